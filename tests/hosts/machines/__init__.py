"""Throw-away hosts for tests: real systemd or a rented-container look-alike, over real SSH, on one machine.

    machine = Machine("systemd")            # or "container", or offline=True
    machine.start()
    machine.run("uname -n")                 # a real ssh connection
    machine.inventory_data()                # the same host for pyinfra
    machine.stop()                          # host, disk, network and processes are gone

In tests use the fixtures of `conftest.py` (`host`, `systemd_host`, `container_host`, `new_host`), which stop
what they start. By hand: `python tests/hosts/host.py up systemd`.

What a host is:
- kind `systemd`: systemd is PID 1, with journald, logind, polkit, user managers, timers, real reboots;
- kind `container`: sshd is PID 2 under a stub, no `/run/systemd/system`, Docker's default capabilities (no
  mount), the boot id of the machine below (it stays the same over a restart, as in rented containers);
- accounts `root`, `user` (no sudo), `sudoer` (sudo without password), all with the host's key and password;
- its disk is an overlay over one cached base system: `/tmp` too; `/run` and `/dev/shm` are memory;
- without `offline=True` it shares the network of the machine below, ports too: take a `free_port()` for what
  listens inside. With it, the host has a network of its own with no way out but SSH to its address.
"""

from .base import base_system, cache_dir
from .machine import CommandFailed, Kind, Machine, MachineError, free_port, missing_requirements, sweep

__all__ = [
    "CommandFailed",
    "Kind",
    "Machine",
    "MachineError",
    "base_system",
    "cache_dir",
    "free_port",
    "missing_requirements",
    "sweep",
]
