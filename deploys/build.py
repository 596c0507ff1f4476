"""Build the engine on a host and keep the wheel for the others.  pyinfra INVENTORY deploys/build.py"""

from pyinfra import host

from tasks.verbs import build

build(host)
