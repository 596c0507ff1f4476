"""Find all that will stop a deployment, in one read-only pass.  pyinfra INVENTORY deploys/preflight.py"""

from pyinfra import host

from tasks.verbs import preflight

preflight(host)
