"""Let the faster mode earn its place by proof, or keep the safe one.  pyinfra INVENTORY deploys/promote.py"""

from pyinfra import host

from tasks.verbs import promote

promote(host)
