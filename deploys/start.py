"""Start the service and wait until a token comes out.  pyinfra INVENTORY deploys/start.py"""

from pyinfra import host

from tasks.verbs import start

start(host)
