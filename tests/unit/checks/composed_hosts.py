"""Hosts made of pieces: healthy ones, and single parts of them replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasks.facts import HostFacts
from tasks.facts.disk import DiskFacts, PathFacts
from tasks.facts.net import Listener, NetFacts
from tasks.facts.system import CgroupFacts, CpuFacts, MemoryFacts, SystemFacts
from tasks.facts.tools import PythonFacts, Tool, ToolFacts

GIB = 1024**3


def place(path: str, **changes: Any) -> PathFacts:
    """A path on a roomy local disk."""
    base = PathFacts(
        path=path,
        at="/opt",
        exists=False,
        directory=True,
        writable=True,
        filesystem="/dev/vda",
        source="/dev/vda",
        mount="/",
        type="ext4",
        read_only=False,
        no_exec=False,
        total_bytes=500 * GIB,
        free_bytes=200 * GIB,
        total_inodes=10_000_000,
        free_inodes=9_000_000,
    )
    return replace(base, **changes)


SHM = place(
    "/dev/shm", at="/dev/shm", exists=True, filesystem="device 27", source="tmpfs", mount="/dev/shm",
    type="tmpfs",
    total_bytes=32 * GIB, free_bytes=32 * GIB,
)  # fmt: skip

HEALTHY = HostFacts(
    system=SystemFacts(
        sysname="Linux", kernel="6.8.0-45-generic", machine="x86_64", hostname="gpu1", os_id="ubuntu",
        os_version="24.04", os_name="Ubuntu 24.04.3 LTS", libc="glibc", libc_version="2.39",
        uid=0, user="root", sudo="root", pid1="systemd", systemd=True, systemd_state="running",
        systemd_user=True, linger=False, autodl=False, epoch=1000, clock_skew_s=0.4,
        nofile_soft=1024, nofile_hard=1048576, memlock_soft=8192, memlock_hard=8192, cmdline="",
    ),
    cpu=CpuFacts(model="AMD EPYC", cpus=64, usable=64, flags=frozenset({"avx2", "sse4_2"}), numa_nodes=2),
    memory=MemoryFacts(
        total=256 * GIB, available=240 * GIB, swap_total=0, swap_used=0, huge_pages=0, shmem=0
    ),
    cgroup=CgroupFacts(version=2),
    disk=DiskFacts({"/opt/rackwright": place("/opt/rackwright"), "/dev/shm": SHM}),
    net=NetFacts(listeners=(Listener(22, "0.0.0.0", 0),)),
    tools=ToolFacts(
        found={n: Tool(f"/usr/bin/{n}", "12.2") for n in ("gcc", "g++", "git", "make", "ninja", "curl")},
        pythons=(PythonFacts("/usr/bin/python3", "3.12.3", "/usr", True, True, True),),
    ),
    complete=True,
)  # fmt: skip
