"""What a test host borrows from the kernel: a disk, a cgroup, perhaps a network; all named by its id.

`release(home)` undoes everything for one host from its folder's name alone, so it serves a normal stop and
the remains of a killed run alike, and can never reach anything that was not ours.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAME = "rackwright-test-"
_NSPAWN = Path("/run/systemd/nspawn")
# RFC 5737 documentation addresses: 64 networks of one pair each, never routed anywhere
_PAIRS = tuple(ipaddress.IPv4Network("198.51.100.0/24").subnets(new_prefix=30))


def full_name(home: Path) -> str:
    """Name of a host's cgroup, network namespace and machine, from its folder."""
    return NAME + home.name


def sh(*argv: str, check: bool = True) -> str:
    """Run a local command, return its stdout; its stderr is in the error."""
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    if check and done.returncode:
        raise OSError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


# disk


def mount_disk(home: Path, base: Path) -> Path:
    """Mount a fresh writable disk over the base system at `home/root`."""
    for part in ("upper", "work", "root"):
        (home / part).mkdir()
        # the upper folder's mode becomes the mode of the host's `/`, whatever the umask here
        (home / part).chmod(0o755)
    options = f"lowerdir={base},upperdir={home}/upper,workdir={home}/work"
    sh("mount", "-t", "overlay", full_name(home), "-o", options, str(home / "root"))
    return home / "root"


def _is_mounted(path: Path) -> bool:
    escaped = str(path).replace("\\", "\\134").replace(" ", "\\040")
    return any(line.split()[4] == escaped for line in Path("/proc/self/mountinfo").read_text().splitlines())


# cgroup


def cgroup_root() -> Path | None:
    """Where cgroup version 2 is mounted (alone, or beside version 1), None where it is not."""
    return next((path for kind, path in _cgroup_mounts() if kind == "cgroup2"), None)


def make_cgroup(home: Path) -> Path:
    """Create the host's cgroup: sharing one, two hosts' systemds would manage each other's units."""
    root = cgroup_root()
    if root is None:
        raise OSError("cgroup2 is not mounted")
    cgroup = root / full_name(home)
    cgroup.mkdir(exist_ok=True)
    return cgroup


def _cgroup_mounts() -> list[tuple[str, Path]]:
    fields = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(kind, Path(point)) for _, point, kind, *_ in fields if kind in ("cgroup", "cgroup2")]


def _remove_cgroup(home: Path) -> None:
    # systemd-nspawn mirrors the group in version 1's hierarchy "systemd" where that is mounted
    ours = [root / full_name(home) for _, root in _cgroup_mounts() if (root / full_name(home)).is_dir()]
    deadline = time.monotonic() + 10
    for cgroup in ours:
        if (cgroup / "cgroup.kill").exists():
            (cgroup / "cgroup.kill").write_text("1")
    while not all(_remove_tree(cgroup) for cgroup in ours):
        if time.monotonic() > deadline:
            raise OSError(f"processes of {full_name(home)} do not end")
        time.sleep(0.02)


def _remove_tree(cgroup: Path) -> bool:
    # os.walk passes over groups that vanish meanwhile
    for group, _, _ in os.walk(cgroup, topdown=False):
        _rmdir(Path(group))
    return not cgroup.exists()


# network


def make_network(home: Path) -> str:
    """Create a network namespace whose only link is a pair to here; return the host's address on it."""
    name, near, far = full_name(home), f"rwt{home.name}", f"rwh{home.name}"
    taken = [
        ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}").network
        for link in json.loads(sh("ip", "-json", "-4", "address"))
        for address in link["addr_info"]
    ]
    pair = next((net for net in _PAIRS if not any(net.overlaps(other) for other in taken)), None)
    if pair is None:
        raise OSError("no free address pair for a host with a network of its own")
    here, there = (str(address) for address in pair.hosts())
    sh("ip", "netns", "add", name)
    sh("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
    sh("ip", "address", "add", f"{here}/30", "dev", near)
    sh("ip", "link", "set", near, "up")
    sh("ip", "-n", name, "link", "set", far, "name", "eth0")
    sh("ip", "-n", name, "address", "add", f"{there}/30", "dev", "eth0")
    sh("ip", "-n", name, "link", "set", "eth0", "up")
    sh("ip", "-n", name, "link", "set", "lo", "up")
    return there


def network_path(home: Path) -> Path:
    """The host's network namespace, if it has one of its own."""
    return Path("/run/netns") / full_name(home)


# everything


def release(home: Path) -> None:
    """End the host's processes and give back its network, disk and folder; what is gone already is fine."""
    _remove_cgroup(home)
    if network_path(home).exists():
        sh("ip", "link", "delete", f"rwt{home.name}", check=False)
        sh("ip", "netns", "delete", full_name(home))
    root = home / "root"
    deadline = time.monotonic() + 10
    if _is_mounted(root):
        # a killed systemd-nspawn leaves its lock on the disk's root behind
        disk = root.stat()
        (_NSPAWN / "locks" / f"inode-{disk.st_dev}:{disk.st_ino}").unlink(missing_ok=True)
    while _is_mounted(root):
        sh("umount", str(root), check=time.monotonic() > deadline)
    _rmdir(_NSPAWN / "propagate" / full_name(home))
    shutil.rmtree(home)


def _rmdir(path: Path) -> bool:
    """Whether the folder is gone now."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
