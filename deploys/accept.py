"""Ask the running engine again, whatever an earlier run found.  pyinfra INVENTORY deploys/accept.py"""

from pyinfra import host

from tasks.verbs import accept

accept(host)
