"""Engines that were built: what one is for, whether a host may use it, and where it is kept.

An entry is a folder named by its key: the engine's wheel, the lock of the environment that it was built in,
the build's log, and provenance.json. Hosts keep theirs below `<root>/wheels/built`; the controller keeps
copies in the site's `wheelhouse` folder, from which other hosts install.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.remote import quote

# what the words of a key mean to a person
MEANING = {
    "commit": "source commit",
    "torch": "torch",
    "cuda": "CUDA",
    "arch": "GPU architectures",
    "python": "Python",
    "glibc": "glibc",
    "machine": "machine",
    "env": "build settings",
}
FILES = ("provenance.json", "engine.lock", "build.log")


@dataclass(frozen=True)
class Entry:
    """One finished build. `place` is its folder, on the host or on the controller."""

    id: str
    place: str
    key: dict[str, str]
    wheel: str
    sha256: str
    bytes: int
    lock_sha256: str
    env: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)


def parse_entry(place: str, text: str) -> Entry | None:
    """An entry from its provenance; None when that is damaged (then it is as if it were not there)."""
    try:
        data = json.loads(text)
        wheel, key = data["wheel"], {str(name): str(value) for name, value in data["key"].items()}
        entry = Entry(
            id=place.rstrip("/").rsplit("/", 1)[-1],
            place=place.rstrip("/"),
            key=key,
            wheel=str(wheel["file"]),
            sha256=str(wheel["sha256"]),
            bytes=int(wheel["bytes"]),
            lock_sha256=str(data["lock_sha256"]),
            env={str(name): str(value) for name, value in data["env"].items()},
            provenance=data,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    whole = entry.id == digest_of(key)[:16] and "/" not in entry.wheel and entry.wheel.endswith(".whl")
    return entry if whole else None


def differences(entry: Entry, wanted: dict[str, str], env: dict[str, str]) -> list[str]:
    """Why an entry is not for this host: `glibc: built with 2.36, here 2.31`. Empty when it fits.

    `wanted` holds what is known of the host; torch is not, since the entry's own lock brings it. A compiler
    of a newer release of the CUDA that is wanted fits, as it does in preflight and for the build.
    """
    found = [
        f"{MEANING.get(name, name)}: built with {entry.key.get(name)}, here {value}"
        for name, value in wanted.items()
        if entry.key.get(name) != value
        and not (name == "cuda" and newer_of_major(entry.key.get(name, ""), value))
    ]
    changed = sorted(name for name in entry.env.keys() | env.keys() if entry.env.get(name) != env.get(name))
    found += [
        f"{MEANING['env']}: built with {name}={entry.env.get(name)}, the recipe says {env.get(name)}"
        for name in changed
    ]
    return found


def newer_of_major(release: str, wanted: str) -> bool:
    """A release of the wanted one's major, and newer: 13.2 for 13.0."""
    try:
        have, least = (tuple(map(int, one.split("."))) for one in (release, wanted))
    except ValueError:
        return False
    return have[0] == least[0] and have > least


def choose(
    entries: Iterable[Entry], wanted: dict[str, str], env: dict[str, str]
) -> tuple[Entry | None, list[str]]:
    """The newest entry that fits, and why the others of the same commit do not."""
    why: list[str] = []
    fits: list[Entry] = []
    for entry in entries:
        if entry.key.get("commit") != wanted["commit"]:
            continue
        found = differences(entry, wanted, env)
        if found:
            why.append(f"{entry.id}: {'; '.join(found)}")
        else:
            fits.append(entry)
    fits.sort(key=lambda entry: str(entry.provenance.get("at", "")))
    return (fits[-1] if fits else None), why


def list_script(folder: str) -> str:
    """The sh that prints every entry of a host: `FOLDER BASE64`, one a line."""
    return (
        f'for f in {quote(folder)}/*/provenance.json; do [ -f "$f" ] &&'
        ' echo "${f%/*} $(base64 <"$f" | tr -d "\\n")"; done; :'
    )


def parse_list(text: str) -> list[Entry]:
    """What `list_script` printed."""
    found = []
    for line in text.splitlines():
        place, _, encoded = line.rpartition(" ")
        try:
            entry = parse_entry(place, base64.b64decode(encoded).decode())
        except ValueError:
            continue
        if entry:
            found.append(entry)
    return found


def entries_here(folder: Path) -> list[Entry]:
    """Entries of a folder on the controller, whole ones only: the wheel's size must be right."""
    found = []
    for path in sorted(folder.glob("*/provenance.json")):
        entry = parse_entry(str(path.parent), path.read_text("utf-8", errors="replace"))
        if entry is None or not all((path.parent / name).is_file() for name in FILES):
            continue
        wheel = path.parent / entry.wheel
        if wheel.is_file() and wheel.stat().st_size == entry.bytes:
            found.append(entry)
    return found


def sums_of(entry: Entry) -> dict[str, str]:
    """SHA-256 of the files of an entry on the controller, as its provenance says (and of that itself)."""
    log = entry.provenance.get("log") or {}
    return {
        entry.wheel: entry.sha256,
        "engine.lock": entry.lock_sha256,
        "build.log": str(log.get("sha256")),
        "provenance.json": digest_of_file(Path(entry.place) / "provenance.json"),
    }
