"""Back to the safe mode, at any time.  pyinfra INVENTORY deploys/rollback.py"""

from pyinfra import host

from tasks.verbs import rollback

rollback(host)
