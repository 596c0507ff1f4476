"""Take away what rackwright put on the host, and nothing else.  pyinfra INVENTORY deploys/uninstall.py"""

from pyinfra import host

from tasks.verbs import uninstall

uninstall(host)
