"""Room for everything that will be written: bytes, inodes, what kind of disk, whether it may be written."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.checks.needs import DiskNeed, Needs
from tasks.checks.words import SUDO, count, names, size
from tasks.facts import HostFacts
from tasks.facts.disk import UNCOUNTED, PathFacts
from tasks.findings import Finding, fail, ok, skipped, warn

# Below this much left over, logs and caches fill the disk in days.
SPARE_BYTES = 2 * 1024**3
# Where Docker keeps images unless its configuration says otherwise (dockerd(8), data-root).
DOCKER_ROOT = "/var/lib/docker"
DOCKER_DEFAULT_SHM = 64 * 1024**2


@dataclass(frozen=True)
class Shared:
    """What is wanted of one file system, over all paths on it."""

    facts: PathFacts
    needs: tuple[DiskNeed, ...]

    @property
    def bytes(self) -> int:
        """Bytes wanted."""
        return sum(need.bytes for need in self.needs)

    @property
    def inodes(self) -> int:
        """Inodes wanted."""
        return sum(need.inodes for need in self.needs)

    @property
    def label(self) -> str:
        """Mount point with what goes there: `/ (env, cache)`."""
        what = dict.fromkeys(need.purpose or need.path for need in self.needs)
        return f"{self.facts.mount or self.facts.at or self.facts.path} ({', '.join(what)})"


def place_of(need: DiskNeed, host: HostFacts) -> PathFacts:
    """Where a need goes: Docker's folder may have been moved, and the daemon says where to."""
    moved = host.docker.root if host.docker else None
    if need.path == DOCKER_ROOT and moved and moved in host.disk.paths:
        return host.disk.at(moved)
    return host.disk.at(need.path)


def by_filesystem(needs: Needs, host: HostFacts) -> list[Shared]:
    """The needs grouped by the file system that they share."""
    groups: dict[str, list[DiskNeed]] = {}
    for need in needs.disk:
        facts = place_of(need, host)
        groups.setdefault(facts.filesystem or facts.path, []).append(need)
    return [Shared(place_of(items[0], host), tuple(items)) for items in groups.values()]


def space(needs: Needs, host: HostFacts) -> Finding:
    """Bytes free on every file system of the layout, adding up what shares one."""
    if not needs.disk:
        return skipped("disk.space", "nothing is to be written")
    short, tight, seen, unread = [], [], [], []
    for shared in by_filesystem(needs, host):
        free = shared.facts.free_bytes
        if free is None:
            unread.append(f"{shared.label}: {_why(shared.facts, 'space')}")
            continue
        line = f"{shared.label}: {size(free)} free, {size(shared.bytes)} needed"
        seen.append(line)
        if free < shared.bytes:
            short.append(f"{line}, {size(shared.bytes - free)} short")
        elif free < shared.bytes + SPARE_BYTES:
            tight.append(line)
    if short:
        return fail(
            "disk.space",
            "not everything fits",
            observed="; ".join(short),
            expected="room for all that shares the disk",
            fix=_room_fix(host),
        )
    if tight:
        return warn(
            "disk.space",
            "it fits, with next to nothing left for logs and caches",
            observed="; ".join(tight),
            expected=f"{size(SPARE_BYTES)} to spare",
            fix=_room_fix(host),
        )
    if unread:
        return skipped("disk.space", "; ".join(unread))
    return ok("disk.space", "everything fits", "; ".join(seen))


def _room_fix(host: HostFacts) -> str:
    if host.system.autodl:
        return (
            "Put root on the data disk and the model on file storage: root = '/root/autodl-tmp/rackwright', "
            "model_root = '/root/autodl-fs/models'; the 30 GB system disk is too small for either."
        )
    return "Free space, or point `root` or `model_root` at a larger disk."


def inodes(needs: Needs, host: HostFacts) -> Finding:
    """Inodes free on every file system: an environment is some 100 000 files."""
    if not needs.disk:
        return skipped("disk.inodes", "nothing is to be written")
    short, seen, unread, uncounted = [], [], [], []
    for shared in by_filesystem(needs, host):
        free = shared.facts.free_inodes
        if shared.facts.reasons.get("inodes") == UNCOUNTED:
            uncounted.append(f"{shared.label}: {UNCOUNTED}")
            continue
        if free is None:
            unread.append(f"{shared.label}: {_why(shared.facts, 'inodes')}")
            continue
        line = f"{shared.label}: {count(free)} free, {count(shared.inodes)} needed"
        seen.append(line)
        if free < max(shared.inodes, 100):
            short.append(line)
    if short:
        return fail(
            "disk.inodes",
            "the disk runs out of inodes (files), though it may have space",
            observed="; ".join(short),
            expected="an inode for every file",
            fix="Delete folders with many small files (old environments, package caches), or move elsewhere.",
            reference="df -i; rented file storage has a quota of files as well as of bytes",
        )
    if unread or not seen:
        return skipped("disk.inodes", "; ".join(unread or uncounted))
    return ok("disk.inodes", "enough inodes", "; ".join([*seen, *uncounted]))


def shm(needs: Needs, host: HostFacts) -> Finding:
    """`/dev/shm` is large enough for NCCL and worker queues; what lies there costs RAM."""
    facts = host.disk.at("/dev/shm")
    if facts.total_bytes is None:
        return skipped("disk.shm", f"its size could not be read: {_why(facts, 'space')}")
    parked = sum(need.bytes for need in needs.disk if host.disk.at(need.path).filesystem == facts.filesystem)
    wanted = needs.shm_bytes
    observed = f"{size(facts.total_bytes)}, {size(facts.free_bytes)} free"
    expected = f">= {size(wanted)}" if wanted else None
    if facts.mount != "/dev/shm":
        return fail(
            "disk.shm",
            "/dev/shm is not a memory file system here: shared-memory queues of the engine go to disk",
            observed=f"part of {facts.mount}",
            expected="a tmpfs",
            fix="mount -t tmpfs -o size=16g tmpfs /dev/shm   (containers: --ipc=host or --shm-size=16g)",
        )
    if (facts.free_bytes or 0) < wanted:
        small = facts.total_bytes <= DOCKER_DEFAULT_SHM
        return fail(
            "disk.shm",
            "/dev/shm is Docker's default of 64 MiB" if small else "/dev/shm is too small or too full",
            observed=observed,
            expected=expected,
            fix="Start the container with --ipc=host or --shm-size=16g; on a machine of your own: "
            "mount -o remount,size=16g /dev/shm",
            reference="vLLM issues #1710 and #6574: NCCL cannot allocate /dev/shm/nccl-*",
        )
    if parked:
        return warn(
            "disk.shm",
            "files that go to /dev/shm take RAM for as long as they lie there",
            observed=f"{size(parked)} of {observed}",
            expected="caches on a disk",
            fix="Put these paths on a local disk, or count that memory as used.",
        )
    return ok("disk.shm", "large enough", observed, expected)


def writable(needs: Needs, host: HostFacts) -> Finding:
    """Every path can be made and written, and programs there may run."""
    if not needs.disk:
        return skipped("disk.writable", "nothing is to be written")
    wrong, unread = [], []
    for need in needs.disk:
        facts = host.disk.at(need.path)
        if facts.late:
            wrong.append(f"{need.path}: {_why(facts, 'space')}")
        elif facts.exists and facts.directory is False:
            wrong.append(f"{need.path} is a file, not a folder")
        elif facts.directory is False:
            wrong.append(f"{facts.at} is a file, so {need.path} cannot be made")
        elif facts.read_only:
            wrong.append(f"{facts.mount} is mounted read-only ({need.path})")
        elif facts.no_exec and need.kind == "env":
            wrong.append(f"{facts.mount} is mounted noexec: no program in {need.path} could run")
        elif facts.writable is False:
            wrong.append(f"{facts.at} may not be written by {host.system.user or 'this user'} ({need.path})")
        elif facts.writable is None:
            unread.append(f"{need.path}: {_why(facts, 'space')}")
    if wrong:
        return fail(
            "disk.writable",
            "a path of the layout cannot be used",
            observed="; ".join(dict.fromkeys(wrong)),
            expected="folders that can be made and written",
            fix="Choose another `root` or `model_root`, or mount and own these folders for this user."
            if host.system.sudo != "passwordless"
            else f"{SUDO} Or choose folders that this user may write.",
        )
    if unread:
        return skipped("disk.writable", "; ".join(unread))
    return ok("disk.writable", "all paths can be written", names(dict.fromkeys(n.path for n in needs.disk)))


_SLOW: dict[str, str] = {
    "env": "starting Python reads tens of thousands of small files: imports may take minutes",
    "cache": "compiled kernels are many small files with locks: start-up is slow and may hang",
    "model": "loading reads every shard over the network: minutes instead of seconds, at each start",
    "scratch": "builds write many small files there",
    "other": "file access is slow",
}


def kind(needs: Needs, host: HostFacts) -> Finding:
    """Network and memory file systems under the layout, with what they slow or cost."""
    if not needs.disk:
        return skipped("disk.type", "nothing is to be written")
    slow, seen, unread = [], [], []
    for need in needs.disk:
        facts = host.disk.at(need.path)
        if facts.type is None:
            unread.append(f"{need.path}: {facts.reasons.get('type') or facts.reasons.get('*')}")
            continue
        seen.append(f"{need.path} on {facts.type}")
        if facts.network:
            slow.append(f"{need.path} is on {facts.type}, a network file system: {_SLOW[need.kind]}")
        elif facts.in_memory:
            slow.append(f"{need.path} is on {facts.type}: it costs RAM and is gone after a reboot")
    if slow:
        return warn(
            "disk.type",
            "a path lies on a file system that costs time or memory",
            observed="; ".join(dict.fromkeys(slow)),
            expected="a local disk",
            fix="Keep `root` on a local disk; a shared `model_root` is fine when slow starts are acceptable.",
        )
    if not seen:
        return skipped("disk.type", "; ".join(unread))
    return ok("disk.type", "local disks", "; ".join(dict.fromkeys(seen)))


def _why(facts: PathFacts, key: str) -> str:
    return facts.reasons.get(key) or facts.reasons.get("*") or "not read"
