"""Provision a host end to end.  pyinfra INVENTORY deploys/site.py"""

from pyinfra import host

from tasks.verbs import site

site(host)
