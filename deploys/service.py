"""The engine as a service, ready.  pyinfra INVENTORY deploys/service.py"""

from pyinfra import host

from tasks.verbs import service

service(host)
