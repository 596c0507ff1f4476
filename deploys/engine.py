"""The engine, into its environment.  pyinfra INVENTORY deploys/engine.py"""

from pyinfra import host

from tasks.verbs import engine

engine(host)
