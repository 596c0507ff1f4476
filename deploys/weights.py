"""The weights, delivered and proven whole.  pyinfra INVENTORY deploys/weights.py"""

from pyinfra import host

from tasks.verbs import weights

weights(host)
