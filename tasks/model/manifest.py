"""Manifests of models: made from what hubs publish, compared and merged; pure, no network, no disk.

A manifest is `{path: sha256}`; its text is what `sha256sum -c` accepts, sorted by path, and reads the same
here and on the host (one implementation: `onhost/verify_weights.py`). A *listing* is what one source
publishes of its files, `{path: Published}`: a hub gives the SHA-256 of large files (Hugging Face: `lfs.oid`;
its top-level `oid` is a Git blob id and `xetHash` is neither), ModelScope of all files.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.onhost.verify_weights import manifest_digest as digest
from tasks.onhost.verify_weights import manifest_text as render
from tasks.onhost.verify_weights import parse_manifest as parse
from tasks.onhost.verify_weights import safe_path

__all__ = [
    "NOT_SERVED",
    "Difference",
    "Published",
    "compare",
    "digest",
    "explain",
    "from_digests",
    "from_fetch",
    "merge",
    "parse",
    "render",
    "to_manifest",
    "without",
]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")

# What no engine reads, and what differs between hubs although the model is the same.
NOT_SERVED = (
    *(".gitattributes", ".gitignore", "*.md", "LICENSE*", "LICENCE*", "NOTICE*", "configuration.json"),
    *("*.pdf", "*.png", "*.jpg", "*.jpeg", "*.svg", "*.gif", "*.webp", ".eval_results/*"),
)


@dataclass(frozen=True)
class Published:
    """One file as a source publishes it; None is what it does not say."""

    path: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None

    def same_as(self, other: Published) -> bool | None:
        """True and False by hashes; False by sizes; None where nothing both sides know can tell."""
        if self.size is not None and other.size is not None and self.size != other.size:
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        if self.git_sha1 and other.git_sha1:
            return self.git_sha1 == other.git_sha1
        return None


Listing = dict[str, Published]
Kind = Literal["only_left", "only_right", "size", "hash", "unknown"]


@dataclass(frozen=True)
class Difference:
    """A file on which two listings differ, or of which nothing says that they agree (`unknown`)."""

    kind: Kind
    path: str
    left: Published | None
    right: Published | None


def _published(path: Any, size: Any, sha256: Any, git_sha1: Any = None) -> Published:
    """A checked entry; ValueError for a path that leaves the model or a hash that is none."""
    if not isinstance(path, str) or safe_path(path) != path:
        raise ValueError(f"{path!r} is not a path inside a model")
    for value, pattern, what in ((sha256, _SHA256, "SHA-256"), (git_sha1, _SHA1, "Git blob id")):
        if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ValueError(f"{path}: {value!r} is no {what}")
    if size is not None and (type(size) is not int or size < 0):
        raise ValueError(f"{path}: {size!r} is no size")
    return Published(path, size, sha256, git_sha1)


def from_fetch(source: Mapping[str, Any]) -> Listing:
    """One element of `sources` in what `onhost/fetch_weights.py` answers in its mode `list`."""
    return {
        path: _published(path, entry.get("size"), entry.get("sha256"), entry.get("git_sha1"))
        for path, entry in source["files"].items()
    }


def from_digests(digests: Mapping[str, str]) -> Listing:
    """A manifest as a listing, to compare it with one."""
    return {path: Published(path, None, sha256) for path, sha256 in digests.items()}


def without(listing: Listing, patterns: Iterable[str] = NOT_SERVED) -> Listing:
    """The listing without files that match a glob (of the whole path, or of the name alone)."""
    globs = tuple(patterns)

    def matches(path: str) -> bool:
        names = (path, path.rpartition("/")[2])
        return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)

    return {path: entry for path, entry in listing.items() if not matches(path)}


def to_manifest(listing: Listing) -> tuple[dict[str, str], list[str]]:
    """The manifest of a listing, and the files whose SHA-256 it does not say (fetch and hash these)."""
    digests = {path: entry.sha256 for path, entry in listing.items() if entry.sha256 is not None}
    return digests, sorted(set(listing) - set(digests))


def compare(left: Listing, right: Listing) -> list[Difference]:
    """File by file, sorted by path; no difference where both publish the same hash."""
    differences = []
    for path in sorted({*left, *right}):
        a, b = left.get(path), right.get(path)
        if a is None or b is None:
            differences.append(Difference("only_right" if a is None else "only_left", path, a, b))
            continue
        same = a.same_as(b)
        if same is None:
            differences.append(Difference("unknown", path, a, b))
        elif not same:
            sizes = a.size is not None and b.size is not None and a.size != b.size
            differences.append(Difference("size" if sizes else "hash", path, a, b))
    return differences


def merge(listings: Iterable[Listing]) -> tuple[Listing, list[Difference]]:
    """What several sources together say of one model, and where a later one contradicts.

    The first source decides which files there are. A later one adds a hash or size that was unknown, for
    files that are not known to differ; where it contradicts, the first one's word stays and is reported.
    """
    merged: Listing = {}
    contradictions: list[Difference] = []
    for number, listing in enumerate(listings):
        if number == 0:
            merged = dict(listing)
            continue
        for path in sorted(set(merged) & set(listing)):
            a, b = merged[path], listing[path]
            if a.same_as(b) is False:
                kind: Kind = "size" if a.size != b.size and None not in (a.size, b.size) else "hash"
                contradictions.append(Difference(kind, path, a, b))
                continue
            size = b.size if a.size is None else a.size
            merged[path] = Published(path, size, a.sha256 or b.sha256, a.git_sha1 or b.git_sha1)
    return merged, contradictions


def explain(differences: Iterable[Difference], left: str, right: str) -> list[str]:
    """One line a difference, for people; `left` and `right` name the two sides."""

    def told(entry: Published | None) -> str:
        if entry is None:
            return "-"
        return entry.sha256 or (f"Git blob {entry.git_sha1}" if entry.git_sha1 else "no hash")

    lines = []
    for d in differences:
        if d.kind in ("only_left", "only_right"):
            lines.append(f"{d.path}: only in {left if d.kind == 'only_left' else right}")
        elif d.kind == "size":
            a, b = (entry.size if entry else None for entry in (d.left, d.right))
            lines.append(f"{d.path}: {a} bytes in {left}, {b} in {right}")
        elif d.kind == "hash":
            lines.append(f"{d.path}: {told(d.left)} in {left}, {told(d.right)} in {right}")
        else:
            lines.append(f"{d.path}: nothing says that both are the same ({told(d.left)}, {told(d.right)})")
    return lines
