"""File systems under the paths of the layout: space, inodes, type, what shares one, what may be written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tasks.facts.text import Section, get_section, size_of, yes

# Types that live on another machine. `autofs` is what a network mount shows before its first use.
NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "cifs", "smb2", "smb3", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "juicefs", "9p",
    "afs", "autofs", "quobyte", "wekafs", "orangefs", "curvefs",
})  # fmt: skip
MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# FUSE file systems that only show local disks in another way.
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.lxcfs"})
# A container's root: its room is that of the disk under it, whose name is not told.
OVERLAYS = frozenset({"overlay", "fuse.fuse-overlayfs"})
# Between two calls of df the same disk loses a little.
DRIFT_BYTES = 64 * 1024**2
UNCOUNTED = "this file system does not count inodes"

_DF_ROW = re.compile(
    r"^(?P<source>.+?)\s+(?P<total>-|[\d.,]+[KMGTPE]?)\s+(?P<used>-|-?[\d.,]+[KMGTPE]?)"
    r"\s+(?P<free>-|-?[\d.,]+[KMGTPE]?)\s+(?P<percent>-|\d+%)\s+(?P<mount>/.*)$"
)


@dataclass(frozen=True)
class DfRow:
    """One row of `df`: sizes in bytes for space, counts for inodes; None where df prints a dash."""

    source: str
    total: int | None
    used: int | None
    free: int | None
    mount: str


@dataclass(frozen=True)
class PathFacts:
    """The file system under one path. `at` is the path itself or its nearest existing parent.

    `filesystem` is equal for two paths exactly when they share one file system, as far as the host says.
    `late`: it did not answer in time, so that nothing more is known.
    """

    path: str
    at: str | None = None
    exists: bool | None = None
    directory: bool | None = None
    writable: bool | None = None
    filesystem: str | None = None
    source: str | None = None
    mount: str | None = None
    type: str | None = None
    read_only: bool | None = None
    no_exec: bool | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    late: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def network(self) -> bool:
        """It lies on another machine."""
        if self.type in LOCAL_FUSE:
            return False
        return self.type in NETWORK_TYPES or bool(self.type and self.type.startswith("fuse."))

    @property
    def in_memory(self) -> bool:
        """What is written there costs RAM."""
        return self.type in MEMORY_TYPES


@dataclass(frozen=True)
class DiskFacts:
    """Every path that was asked for, by path."""

    paths: Mapping[str, PathFacts] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def at(self, path: str) -> PathFacts:
        """Facts of one path; empty ones with the reason when the probe did not look there."""
        found = self.paths.get(path)
        return found or PathFacts(path, reasons={"*": f"the probe did not look at {path}"})


def parse_df_row(line: str, unit: int = 1024) -> DfRow | None:
    """One row of `df -P`, `df -h` or `df -i` in any language; None for headers and other lines.

    Read by shape, not by header: header words are translated and wider than their columns in some locales.
    """
    match = _DF_ROW.match(line.strip())
    if not match or match["mount"].startswith("/ "):
        return None
    return DfRow(
        source=match["source"],
        total=size_of(match["total"], unit),
        used=size_of(match["used"], unit),
        free=size_of(match["free"], unit),
        mount=match["mount"],
    )


def parse_mounts(text: str) -> dict[str, tuple[str, str, frozenset[str]]]:
    """`/proc/mounts` as mount point -> (source, type, options); the last mount on a point counts."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[1].startswith("/"):
            source, point, kind, options = fields[:4]
            found[_unescaped(point)] = (_unescaped(source), kind, frozenset(options.split(",")))
    return found


def _unescaped(text: str) -> str:
    """Octal escapes of `/proc/mounts` (`\\040` is a space)."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


def parse_disk(sections: Mapping[str, Section]) -> DiskFacts:
    """Facts of every path that the probe looked at."""
    mounts = parse_mounts(get_section(sections, "mounts").text)
    paths = {}
    for name, section in sections.items():
        if name.startswith("disk."):
            facts = _path_facts(section, mounts)
            if facts:
                paths[facts.path] = facts
    for path, facts in paths.items():
        under = next((other for other in paths.values() if _on_the_disk_of(facts, other)), None)
        if under:
            paths[path] = replace(facts, filesystem=under.filesystem)
    return DiskFacts(paths, {} if paths else {"*": "the probe looked at no path"})


def _on_the_disk_of(facts: PathFacts, other: PathFacts) -> bool:
    """An overlay and a mount of the disk under it, or two data sets of one pool: they share what is free."""
    free, others = facts.free_bytes, other.free_bytes
    if facts.filesystem == other.filesystem or free is None or others is None:
        return False
    if abs(free - others) > DRIFT_BYTES:
        return False
    if facts.type == other.type == "zfs":
        first, second = sorted((facts.source or "", other.source or ""))
        return first.split("/")[0] == second.split("/")[0] and facts.source == second
    return facts.type in OVERLAYS and other.type not in OVERLAYS and facts.total_bytes == other.total_bytes


def _path_facts(section: Section, mounts: Mapping[str, tuple[str, str, frozenset[str]]]) -> PathFacts | None:
    pairs = section.pairs()
    path = pairs.get("path")
    if not path:
        return None
    reasons: dict[str, str] = {}
    space = parse_df_row(pairs.get("space", ""))
    inodes = parse_df_row(pairs.get("inodes", ""), unit=1)
    late = "the file system did not answer within the deadline (a network mount whose server is gone?)"
    if space is None:
        reasons["space"] = late if section.timed_out else "df printed nothing that could be read"
    if inodes is None:
        reasons["inodes"] = late if section.timed_out else "df does not report inodes here"
    point = space.mount if space else (_mount_of(pairs.get("at", path), mounts) if mounts else None)
    mounted = mounts.get(point) if point else None
    source = space.source if space else (mounted[0] if mounted else None)
    kind = mounted[1] if mounted else (pairs.get("magic") or None)
    if kind is None:
        reasons["type"] = "neither /proc/mounts nor stat -f names it"
    device = pairs.get("device")
    shared = source if source and source.startswith("/dev/") else (f"device {device}" if device else point)
    # btrfs, overlay and network file systems may have no fixed number of inodes: 0 means "not counted".
    counted = inodes if inodes and inodes.total else None
    if inodes and not inodes.total:
        reasons["inodes"] = UNCOUNTED
    return PathFacts(
        path=path,
        at=pairs.get("at"),
        exists=yes(pairs.get("exists")),
        directory=yes(pairs.get("directory")),
        writable=yes(pairs.get("writable")),
        filesystem=shared,
        source=source,
        mount=point,
        type=kind,
        read_only="ro" in mounted[2] if mounted else None,
        no_exec="noexec" in mounted[2] if mounted else None,
        total_bytes=space.total if space else None,
        free_bytes=space.free if space else None,
        free_inodes=counted.free if counted else None,
        late=section.timed_out,
        reasons=reasons,
    )


def _mount_of(path: str, mounts: Mapping[str, tuple[str, str, frozenset[str]]]) -> str | None:
    """The longest mount point above a path."""
    above = [point for point in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(above, key=len, default=None)
