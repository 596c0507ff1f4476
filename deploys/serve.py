"""The engine as a service, ready and warm (--data mode=eager).  pyinfra INVENTORY deploys/serve.py"""

from pyinfra import host

from tasks.verbs import serve

serve(host)
