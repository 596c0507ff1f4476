"""Measure the running engine: medians, spread and protocol.  pyinfra INVENTORY deploys/bench.py"""

from pyinfra import host

from tasks.verbs import bench

bench(host)
