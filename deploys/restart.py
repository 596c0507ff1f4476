"""Stop the mode that runs, start it again, wait until it is warm.  pyinfra INVENTORY deploys/restart.py"""

from pyinfra import host

from tasks.verbs import restart

restart(host)
