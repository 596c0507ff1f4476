"""Pack one redacted archive for a public issue.  pyinfra INVENTORY deploys/support.py"""

from pyinfra import host

from tasks.verbs import support

support(host)
