"""Stop the service; it stays installed.  pyinfra INVENTORY deploys/stop.py"""

from pyinfra import host

from tasks.verbs import stop

stop(host)
