"""How the service stands; exit code 1 when no token comes out.  pyinfra INVENTORY deploys/status.py"""

from pyinfra import host

from tasks.verbs import status

status(host)
