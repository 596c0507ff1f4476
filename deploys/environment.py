"""The engine's Python environment and the tools'.  pyinfra INVENTORY deploys/environment.py"""

from pyinfra import host

from tasks.verbs import environment

environment(host)
