"""Find all that will stop a deployment, in one read-only pass.  pyinfra INVENTORY deploys/preflight.py"""

from pyinfra import host

from tasks.preflight import preflight

preflight(host)
