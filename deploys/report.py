"""Write the report of what is on a host anew.  pyinfra INVENTORY deploys/report.py"""

from pyinfra import host

from tasks.verbs import report

report(host)
