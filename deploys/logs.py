"""The engine's log: the last lines, or as it grows.  pyinfra INVENTORY deploys/logs.py"""

from pyinfra import host

from tasks.verbs import logs

logs(host)
