"""What a lock with hashes says, and what pip's output means: the pure half of install_wheels.py.

Travels to the host beside it; standard library only, Python >= 3.8.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple
from urllib.parse import unquote

try:
    from .shared import redact
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import redact  # type: ignore[import-not-found,no-redef]

BATCH_PACKAGES, BATCH_BYTES = 24, 64 << 20  # what an interrupted download can lose


class Problem(Exception):
    """Why the installation cannot go on, in the words of the answer."""

    def __init__(self, identifier: str, what: str, file: Optional[str] = None, fix: Optional[str] = None):
        super().__init__(what)
        self.id, self.what, self.file, self.fix = identifier, what, file, fix

    def document(self) -> Dict[str, Any]:
        """The answer on stdout."""
        return {"error": {"id": self.id, "what": redact(self.what), "file": self.file, "fix": self.fix}}


class Pin(NamedTuple):
    """One entry of the lock. `file` and `size` are hints from a comment, where the lock has them."""

    name: str
    version: str
    hashes: Tuple[str, ...]
    marker: str = ""
    file: str = ""
    size: int = 0

    @property
    def label(self) -> str:
        """`name==version`."""
        return self.name + "==" + self.version


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(left: str, right: str) -> bool:
    """Equal, but for the spellings that wheels and metadata use for local versions."""
    return re.sub(r"[-_]", ".", left.lower()) == re.sub(r"[-_]", ".", right.lower())


def wheel_identity(file: str) -> Optional[Tuple[str, str]]:
    """Name and version in a wheel's file name; None for anything else."""
    parts = unquote(file)[: -len(".whl")].split("-")
    if not file.endswith(".whl") or len(parts) not in (5, 6):
        return None
    return canonical(parts[0]), parts[1]


ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*(?P<version>[A-Za-z0-9.!+_-]+)"
    r"\s*(?:;(?P<marker>.*?))?(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})*)\s*"
)
HINT = re.compile(r"\s+#\s+(?P<file>\S+\.whl)\s+(?P<size>\d+)\s*")


def parse_lock(text: str) -> List[Pin]:
    """The pins of a lock, in its order. Every entry must be exact and hashed; anything else is a Problem."""
    pins: List[Pin] = []
    logical, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        hint = HINT.fullmatch(line)
        if hint and pins and not logical:
            pins[-1] = pins[-1]._replace(file=hint["file"], size=int(hint["size"]))
        if line.lstrip().startswith("#"):
            continue
        first = first if logical else number
        logical += re.sub(r"\s#.*$", "", line)
        if logical.endswith("\\"):
            logical = logical[:-1] + " "
            continue
        entry, logical = logical.strip(), ""
        if not entry:
            continue
        found = ENTRY.fullmatch(entry)
        if found is None:
            what = "line %d of the lock is not NAME==VERSION with hashes: %s" % (first, redact(entry[:120]))
            raise Problem("lock", what, fix="write the lock anew with its script; do not edit it by hand")
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", found["hashes"]))
        if not hashes:
            what = "line %d of the lock has no SHA-256 for %s" % (first, found["name"])
            raise Problem("lock", what, fix="write the lock anew with hashes")
        marker = (found["marker"] or "").strip()
        pins.append(Pin(canonical(found["name"]), found["version"], hashes, marker))
    if logical:
        raise Problem(
            "lock", "the lock ends in the middle of an entry", fix="copy the lock to the host again"
        )
    if not pins:
        raise Problem("lock", "the lock names no package", fix="copy the lock to the host again")
    return pins


def choose(pins: List[Pin], markers: Dict[str, bool]) -> List[Pin]:
    """The pins whose markers hold here. One name twice is a Problem."""
    chosen: Dict[str, Pin] = {}
    for pin in pins:
        if pin.marker and not markers[pin.marker]:
            continue
        if pin.name in chosen:
            raise Problem("lock", "the lock names %s twice for this Python" % pin.name)
        chosen[pin.name] = pin
    return list(chosen.values())


def batches(pins: List[Pin]) -> List[List[Pin]]:
    """Groups for one pip call each: small, and what has a local version (`+cpu`) alone.

    Local versions live on indexes of their own, so that one would make its whole group fail.
    """
    groups: List[List[Pin]] = []
    room, size = 0, 0
    for pin in pins:
        if "+" in pin.version:
            groups.append([pin])
            room = 0
            continue
        if room == 0 or size + pin.size > BATCH_BYTES:
            groups.append([])
            room, size = BATCH_PACKAGES, 0
        groups[-1].append(pin)
        room, size = room - 1, size + pin.size
    return groups


class Verdict(NamedTuple):
    """What pip's output means."""

    id: str
    what: str
    file: Optional[str] = None


NETWORK_SIGNS = (
    "Retrying (Retry(",
    "Could not fetch URL",
    "Max retries exceeded",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Connection refused",
    "Connection reset by peer",
    "Network is unreachable",
    "Read timed out",
    "ProxyError",
    "SSLError",
    "IncompleteRead",
    "Connection broken",
)


def last_with(lines: List[str], *signs: str) -> Optional[str]:
    """The last line that holds one of the signs."""
    for line in reversed(lines):
        if any(sign in line for sign in signs):
            return line.strip()
    return None


def understand(status: int, lines: List[str]) -> Verdict:
    """Classify a pip run that failed, from its exit status and last lines (pip 20 to 26)."""
    mismatch = hash_mismatch(lines)
    if mismatch:
        return mismatch
    space = last_with(lines, "No space left on device", "Disk quota exceeded")
    if space:
        path = re.search(r"'([^']+)'", space)
        return Verdict("disk_full", space, path[1] if path else None)
    memory = last_with(lines, "MemoryError", "Cannot allocate memory")
    if memory or status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return Verdict("memory", memory or "pip was killed, most likely because memory ran out")
    denied = last_with(lines, "Permission denied", "Read-only file system")
    if denied:
        path = re.search(r"'([^']+)'", denied)
        return Verdict("permission", denied, path[1] if path else None)
    network = last_with(lines, *NETWORK_SIGNS)
    missing = last_with(lines, "No matching distribution found for")
    if network:
        reason = re.search(r"\[Errno -?\d+\] ([^'\")]+)", network)
        said = reason[1] if reason else next(sign for sign in NETWORK_SIGNS if sign in network)
        return Verdict("network", "a package index cannot be reached: " + said)
    if missing:
        return Verdict("not_found", "no index and no folder has " + missing.split(" for ")[-1])
    return Verdict("pip", last_with(lines, "ERROR:", "Error") or "pip ended with status %d" % status)


def hash_mismatch(lines: List[str]) -> Optional[Verdict]:
    """What pip refused, and the hashes that it expected and got."""
    got = next((at for at, line in enumerate(lines) if re.match(r"\s+Got\s+[0-9a-f]{64}", line)), None)
    if got is None:
        return None
    expected: List[str] = []
    subject = ""
    for line in reversed(lines[:got]):
        found = re.search(r"Expected (?:sha256|\s+or) ([0-9a-f]{64})", line)
        if not found:
            subject = line.strip().rstrip(":")
            break
        expected.insert(0, found[1])
    actual = lines[got].split()[-1]
    source = re.search(r"(\S+\.whl)", subject)
    name = subject.split(" from ")[0]
    wanted = " or ".join(expected) or "one of the lock's"
    what = "%s is not the file that the lock names: expected SHA-256 %s, got %s" % (name, wanted, actual)
    return Verdict("hash_mismatch", what, redact(source[1].split("#")[0]) if source else None)
