#!/usr/bin/env python3
"""Prove that a folder of model weights is whole.

Standard library only, Python 3.8 or newer, nothing to install: copy this one file to any host.
The folder may come from Hugging Face, ModelScope, S3 or a disk: the same manifest holds for all of them.

The folder is whole when
  * every shard that the index names is there, in subfolders too, and no other shard is;
  * every safetensors header parses, its tensors touch one another without a gap, end exactly at the end of
    the file, take the bytes that dtype and shape say, and are the tensors that the index puts there;
  * the tensors add up to the index's total_size, when it gives one;
  * config.json, the tokenizer and generation_config.json parse;
  * nothing half-written is left (.incomplete, lock and temp files of the download clients), no Git LFS
    pointer stands in for a file, no file is empty, hidden or of a special kind, no link leaves the folder;
  * the SHA-256 of every file is the manifest's, and the manifest names every file (.py files too, since
    they run with --trust-remote-code).

A manifest is plain text, one file a line, sorted by path, and `sha256sum -c` accepts it:
  e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  encoding/__init__.py

Without a manifest the files are hashed for the digest that is printed, and compared with nothing.
Where the manifest proves a file, an oddity of its publisher (a wrong total_size, an extra shard that the
manifest names) is a note and not a problem.

Exit status: 0 whole, 1 not whole, 2 wrong usage. With --stdin the parameters are one JSON object with the
names of the options (`{"dir": "/models/x", "manifest": "...", "stamp": "..."}`) and the answer is JSON.

Sources: safetensors format, https://github.com/huggingface/safetensors (header limit of 100 MB, no holes);
huggingface_hub `_local_folder.py` (`.cache/huggingface/download/*.incomplete`); modelscope_hub
`_download.py` (`*.incomplete`, `._____temp`); Git LFS pointer specification v1.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterable, Iterator, NamedTuple, TextIO

HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers
JSON_LIMIT = 256 * 1024 * 1024  # bytes; a longer "JSON" file is not a config, tokenizer or index
BLOCK = 1024 * 1024  # bytes read at a time by each hashing thread: what keeps memory flat
INDEX_SUFFIX = ".safetensors.index.json"
LFS_MAGIC = b"version https://git-lfs.github.com/spec/v1"
LFS_LIMIT = 1024  # bytes; the LFS specification: a pointer is shorter than this
STAMP_VERSION = 1

# bits of one element; safetensors `tensor.rs`
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

MUST_PARSE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json")
HIDDEN_BUT_PUBLISHED = (".gitattributes", ".gitignore", ".gitkeep")
MAY_BE_EMPTY = ("__init__.py", "py.typed", ".gitkeep")
# What the clients keep for themselves: not part of the model, so neither counted nor hashed.
BOOKKEEPING = re.compile(
    r"(^|/)\.cache/huggingface/(\.gitignore|CACHEDIR\.TAG|(download|upload)/.*\.metadata)$"
    r"|(^|/)\.(msc|mdl|mv)$"
)
LEFTOVERS = (
    (re.compile(r"\.incomplete$"), "leftover.incomplete", "a download that never ended"),
    (re.compile(r"\.(lock|lck)$|(^|/)\.lock/"), "leftover.lock", "a lock of a download client"),
    (re.compile(r"(^|/)\._____temp/"), "leftover.temp", "ModelScope's folder of half-downloaded files"),
    (
        re.compile(r"\.parallel_tmp$|\.safetensors_\d+_\d+$"),
        "leftover.temp",
        "a piece of ModelScope's client",
    ),
    (re.compile(r"(^|/)\..+\.[0-9a-f]{8}\.(new|old)$"), "leftover.temp", "a half-replaced file"),
    (re.compile(r"\.(aria2|part|partial|crdownload|tmp|download)$"), "leftover.temp", "a half-copied file"),
    (re.compile(r"(^|/)\.[^/]+\.[A-Za-z0-9]{6}$"), "leftover.temp", "a half-copied file of rsync"),
)


class Usage(Exception):
    """Wrong parameters: exit status 2."""


class Problem(NamedTuple):
    """One reason why the folder is not whole: what is wrong with which file, and what to do."""

    id: str
    file: str
    what: str
    fix: str


class Entry(NamedTuple):
    """A regular file of the tree; `path` is relative to its root, with `/`."""

    path: str
    full: str
    size: int
    mtime_ns: int
    inode: int


class Params(NamedTuple):
    """What to verify and against what; the JSON keys of --stdin are these names."""

    dir: str
    manifest: str | None = None
    stamp: str | None = None
    write_manifest: str | None = None
    threads: int = 0
    full: bool = False
    headers_only: bool = False
    follow_links: bool = False
    ignore: tuple[str, ...] = ()
    shards: int | None = None
    files: int | None = None
    bytes: int | None = None
    bytes_within: float = 1.0


# ---------------------------------------------------------------------------------------------- manifest


def manifest_line(digest: str, path: str) -> str:
    """One line as `sha256sum` writes it; a path with a newline, return or backslash is escaped its way."""
    if any(c in path for c in "\\\n\r"):
        escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        return f"\\{digest}  {escaped}\n"
    return f"{digest}  {path}\n"


def manifest_text(digests: dict[str, str]) -> str:
    """The manifest of `{path: sha256}`, sorted by the paths' bytes (the order of `LC_ALL=C sort`)."""
    return "".join(manifest_line(digests[p], p) for p in sorted(digests, key=os.fsencode))


def manifest_digest(digests: dict[str, str]) -> str:
    """SHA-256 of the manifest text: one name for the whole content of a model."""
    return hashlib.sha256(os.fsencode(manifest_text(digests))).hexdigest()


_LINE = re.compile(r"^(\\?)([0-9a-fA-F]{64}) [ *](.+)$")


def safe_path(path: str) -> str | None:
    """The path without `./`, or None if it is absolute, leaves the folder or is not in its plain form."""
    plain = path[2:] if path.startswith("./") else path
    if not plain or plain.startswith("/") or "\0" in plain:
        return None
    return None if any(part in ("", ".", "..") for part in plain.split("/")) else plain


def parse_manifest(text: str, name: str = "manifest") -> dict[str, str]:
    """`{path: sha256}` of a manifest; empty lines and `#` comments are skipped.

    Raises ValueError with the line's number for anything else, for an unsafe path and for a path given twice
    with two digests.
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"{name}, line {number}: not `<sha256>  <path>`")
        escaped, digest, raw = match.groups()
        if escaped:
            raw = re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m.group(1), m.group(1)), raw)
        path = safe_path(raw)
        if path is None:
            raise ValueError(f"{name}, line {number}: {raw!r} is not a path inside the folder")
        if digests.setdefault(path, digest.lower()) != digest.lower():
            raise ValueError(f"{name}, line {number}: {path} is listed twice, with two digests")
    if not digests:
        raise ValueError(f"{name}: names no file")
    return digests


def read_manifest(path: str) -> dict[str, str]:
    """The manifest in a file; Usage if it cannot be read or is not one."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
            return parse_manifest(f.read(), path)
    except (OSError, ValueError) as e:
        raise Usage(f"cannot use the manifest: {e}") from e


def write_atomically(path: str, text: str) -> None:
    """Write a whole file or nothing: a temporary beside it, flushed to the disk, then renamed over it."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=".rackwright-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# --------------------------------------------------------------------------------------------- progress


class Progress:
    """`#progress {...}` lines on stderr: two a second at most, and one at least every 10 s while working."""

    def __init__(self, phase: str, total: int, unit: str, show: str = "json") -> None:
        self.phase, self.total, self.unit, self.show = phase, total, unit, show
        self.done = 0
        self.note = ""
        self._lock = threading.Lock()
        self._began = self._last = time.monotonic()
        self._stop = threading.Event()
        if show == "json":
            threading.Thread(target=self._heartbeat, daemon=True).start()

    def add(self, amount: int, note: str = "") -> None:
        """Count work; prints when the last line is old enough."""
        with self._lock:
            self.done += amount
            self.note = note or self.note
            if time.monotonic() - self._last >= 0.5:
                self._print()

    def close(self) -> None:
        """The last line, and no more heartbeats."""
        self._stop.set()
        with self._lock:
            self._print(last=True)

    def _heartbeat(self) -> None:
        while not self._stop.wait(2):
            with self._lock:
                if time.monotonic() - self._last >= 8:
                    self._print()

    def _print(self, last: bool = False) -> None:
        self._last = time.monotonic()
        if self.show == "json":
            line = {"phase": self.phase, "done": self.done, "total": self.total}
            document = json.dumps({**line, "unit": self.unit, "note": self.note})
            print("#progress " + document, file=sys.stderr, flush=True)
        elif self.show == "tty":
            seconds = max(self._last - self._began, 1e-3)
            rate = self.done / seconds
            left = (self.total - self.done) / rate if rate else 0
            text = f"{self.phase}: {human(self.done)} of {human(self.total)}"
            text += f", {human(int(rate))}/s, {left:.0f} s left"
            print("\r\033[K" + ("" if last else text), end="", file=sys.stderr, flush=True)


def human(amount: int) -> str:
    """Bytes in decimal units, as disks and hubs count them."""
    value = float(amount)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


# ------------------------------------------------------------------------------------------------- tree


class Tree:
    """What a walk found: the model's files, and what should not be there."""

    def __init__(self) -> None:
        self.files: dict[str, Entry] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []


def scan(
    root: str, follow_links: bool = False, ignore: Iterable[str] = (), published: Iterable[str] = ()
) -> Tree:
    """Walk a folder, opening nothing. Links are followed inside the folder; one that leaves it is a problem,
    or a note with `follow_links`. What clients leave behind is sorted out, but for `published` paths.
    """
    tree = Tree()
    root = os.path.abspath(root)
    real_root = os.path.realpath(root)
    ignored = tuple(ignore)
    outside = 0

    def link_is_fine(path: str, rel: str) -> bool:
        nonlocal outside
        target = os.path.realpath(path)
        if target != real_root and not target.startswith(real_root.rstrip("/") + "/"):
            if not follow_links:
                what = f"a link that leaves the folder, to {os.readlink(path)}"
                fix = "replace it by the file, or allow such links with --follow-links"
                tree.problems.append(Problem("link.outside", rel, what, fix))
                return False
            outside += 1
        return True

    def walk(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        try:
            children = sorted(os.scandir(folder), key=lambda d: d.name)
        except OSError as e:
            fix = "give this user read access, or run as another user"
            tree.problems.append(Problem("dir.unreadable", prefix or ".", str(e.strerror), fix))
            return
        for child in children:
            rel = f"{prefix}/{child.name}" if prefix else child.name
            if any(fnmatch.fnmatchcase(rel, pattern) for pattern in ignored):
                continue
            try:
                if child.is_symlink() and not link_is_fine(child.path, rel):
                    continue
                status = child.stat()
            except OSError as e:
                id, what = "file.unreadable", str(e.strerror)
                if child.is_symlink():
                    id, what = "link.broken", f"a link to nothing ({os.readlink(child.path)})"
                tree.problems.append(Problem(id, rel, what, "fetch this file again"))
                continue
            if stat.S_ISDIR(status.st_mode):
                identity = (status.st_dev, status.st_ino)
                if child.name == ".git":
                    tree.notes.append(f"{rel}: a Git folder, not looked into (LFS keeps a second copy in it)")
                elif identity in above:
                    what = "a link to a folder above it"
                    tree.problems.append(Problem("link.loop", rel, what, f"rm {rel}"))
                else:
                    walk(child.path, rel, above | {identity})
            elif stat.S_ISREG(status.st_mode):
                tree.files[rel] = Entry(rel, child.path, status.st_size, status.st_mtime_ns, status.st_ino)
            else:
                what = "neither a file nor a folder (a device, socket or pipe)"
                tree.problems.append(Problem("file.special", rel, what, f"rm {rel}"))

    top = os.stat(root)
    walk(root, "", frozenset({(top.st_dev, top.st_ino)}))
    if outside:
        tree.notes.append(f"links that lead out of the folder and were followed: {outside}")
    for rel in set(tree.files).difference(published):
        if BOOKKEEPING.search(rel):
            del tree.files[rel]
            continue
        for pattern, id, what in LEFTOVERS:
            if pattern.search(rel):
                size = human(tree.files.pop(rel).size)
                fix = "let the download end (run it again), or delete the file"
                tree.problems.append(Problem(id, rel, f"{what} ({size})", fix))
                break
    return tree


# ------------------------------------------------------------------------------------------ single files


def read_head(entry: Entry, limit: int) -> bytes:
    """The first `limit` bytes of a file."""
    with open(entry.full, "rb", buffering=0) as f:
        parts = []
        while limit > 0:
            part = f.read(limit)
            if not part:
                break
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)


def lfs_pointer(head: bytes) -> str | None:
    """What a Git LFS pointer stands for ("sha256:…, 5.4 GB"), or None if this is none."""
    if not head.startswith(LFS_MAGIC):
        return None
    oid = re.search(rb"^oid (\S+)$", head, re.M)
    size = re.search(rb"^size (\d+)$", head, re.M)
    named = oid.group(1).decode("ascii", "replace") if oid else "unknown content"
    return f"{named}, {human(int(size.group(1)))}" if size else named


def looks_like_page(head: bytes) -> str:
    """A hint for a file that is an error page of a server, else nothing."""
    start = head[:200].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "; it is a web page or an error message of a server"
    return ""


def read_json(entry: Entry) -> Any:
    """The JSON document in a file; ValueError says why it is none."""
    if entry.size > JSON_LIMIT:
        raise ValueError(f"{human(entry.size)} is too long for a JSON file of a model")
    raw = read_head(entry, JSON_LIMIT + 1)
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e}){looks_like_page(raw)}") from e


# ------------------------------------------------------------------------------------------- safetensors


class Header(NamedTuple):
    """One parsed safetensors header: tensor names, bytes of tensors, and what is wrong with the file."""

    tensors: frozenset[str]
    tensor_bytes: int
    wrong: tuple[str, ...]
    unknown_dtypes: tuple[str, ...]


def parse_header(raw: bytes, size: int) -> Header:
    """Check a safetensors header. `raw`: the file's beginning up to the header's end; `size`: of the file.

    Never reads or reserves what the first 8 bytes ask for before that has been found sane.
    """

    def bad(*why: str) -> Header:
        return Header(frozenset(), 0, why, ())

    if len(raw) < 8:
        return bad(f"only {size} bytes long: no header")
    (length,) = struct.unpack("<Q", raw[:8])
    hint = looks_like_page(raw)
    if length > HEADER_LIMIT:
        return bad(f"the header claims {length} bytes, the format allows {HEADER_LIMIT}{hint}")
    if length + 8 > size:
        return bad(f"truncated inside the header: {size} bytes are there, it alone needs {length + 8}")
    if len(raw) < length + 8:
        return bad("the header could not be read to its end")
    try:
        header = json.loads(raw[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError) as e:
        return bad(f"the header is not JSON ({e})")
    if not isinstance(header, dict):
        return bad("the header is not a JSON object")
    return _check_tensors(header, size - 8 - length)


def _check_tensors(header: dict[str, Any], data: int) -> Header:
    """Check every tensor of a header against the `data` bytes that follow it."""
    wrong: list[str] = []
    unknown: set[str] = set()
    spans: list[tuple[int, int, str]] = []
    header.pop("__metadata__", None)
    for name, info in header.items():
        try:
            dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
            plain = type(begin) is int and type(end) is int and all(type(n) is int and n >= 0 for n in shape)
        except (TypeError, KeyError, ValueError):
            plain = False
        if not plain or not 0 <= begin <= end:
            wrong.append(f"tensor {name}: no usable dtype, shape and data_offsets")
            continue
        bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            unknown.add(str(dtype))
        elif math.prod(shape) * bits != (end - begin) * 8:
            wrong.append(f"tensor {name}: {dtype} {shape} does not take {end - begin} bytes")
        spans.append((begin, end, name))
    if len(spans) < len(header):
        return Header(frozenset(header), 0, tuple(wrong), tuple(sorted(unknown)))
    spans.sort()
    at = 0
    for begin, end, name in spans:
        if begin != at:
            wrong.append(f"tensor {name} begins at {begin}, the one before it ends at {at}")
            break
        at = end
    else:
        if at > data:
            wrong.append(f"truncated: {at - data} of the tensors' {at} bytes are missing")
        elif at < data:
            wrong.append(f"{data - at} bytes follow the last tensor")
    tensor_bytes = sum(end - begin for begin, end, _ in spans)
    return Header(frozenset(header), tensor_bytes, tuple(wrong), tuple(sorted(unknown)))


def read_header(entry: Entry) -> Header:
    """Read and check one shard's header; two small reads, whatever the shard's size."""
    try:
        with open(entry.full, "rb", buffering=0) as f:
            raw = f.read(8)
            if len(raw) == 8:
                (length,) = struct.unpack("<Q", raw)
                if length <= HEADER_LIMIT and length + 8 <= entry.size:
                    raw = read_head(entry, 8 + length)
                else:
                    raw += f.read(200)
    except OSError as e:
        return Header(frozenset(), 0, (f"cannot be read: {e.strerror}",), ())
    return parse_header(raw, entry.size)


# ------------------------------------------------------------------------------------------------- index


class Index(NamedTuple):
    """A `*.safetensors.index.json`: shard path (relative to the tree) -> its tensors, and the given total."""

    path: str
    shards: dict[str, frozenset[str]]
    total_size: int | None


def parse_index(document: Any, path: str) -> Index:
    """An index from its JSON; ValueError says what is wrong. `total_size` may be a string or missing."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("no weight_map with tensors in it")
    folder = path.rpartition("/")[0]
    tensors: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"tensor {tensor} has no file name")
        tensors.setdefault(shard, set()).add(tensor)
    shards: dict[str, frozenset[str]] = {}
    for shard, names in tensors.items():
        plain = safe_path(shard)
        if plain is None:
            raise ValueError(f"it names {shard!r}, which is not a path inside the folder")
        shards[f"{folder}/{plain}" if folder else plain] = frozenset(names)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    try:
        total_size = None if total is None or isinstance(total, bool) else int(total)
    except (TypeError, ValueError, OverflowError):
        total_size = None
    return Index(path, shards, total_size)


# ----------------------------------------------------------------------------------------------- hashing


class Stamps:
    """Digests that were computed before, by (size, mtime in ns, inode): what makes a second look fast.

    Kept in a file of the caller's choice, never in the model's folder. `full` forgets what was known.
    """

    def __init__(self, path: str | None, root: str, full: bool = False) -> None:
        self.path = path
        self.root = os.path.realpath(root)
        self._known: dict[str, tuple[int, int, int, str]] = {}
        self._lock = threading.Lock()
        if path is not None and not full:
            self._known = self._load(path)

    def _load(self, path: str) -> dict[str, tuple[int, int, int, str]]:
        try:
            with open(path, encoding="utf-8") as f:
                document = json.load(f)
            if document["version"] != STAMP_VERSION or document["root"] != self.root:
                return {}
            known: dict[str, tuple[int, int, int, str]] = {}
            for rel, (size, mtime_ns, inode, digest) in document["files"].items():
                known[rel] = (int(size), int(mtime_ns), int(inode), str(digest))
            return known
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def get(self, entry: Entry) -> str | None:
        """The digest of a file that has not changed since it was hashed."""
        with self._lock:
            known = self._known.get(entry.path)
        if known is not None and known[:3] == (entry.size, entry.mtime_ns, entry.inode):
            return known[3]
        return None

    def put(self, entry: Entry, digest: str) -> None:
        """Remember a digest."""
        with self._lock:
            self._known[entry.path] = (entry.size, entry.mtime_ns, entry.inode, digest)

    def keep_only(self, paths: Iterable[str]) -> None:
        """Forget files that are no longer there."""
        alive = set(paths)
        with self._lock:
            self._known = {p: k for p, k in self._known.items() if p in alive}

    def save(self) -> None:
        """Write the stamp file, atomically; without a path nothing is kept."""
        if self.path is None:
            return
        with self._lock:
            document = {"version": STAMP_VERSION, "root": self.root, "files": dict(self._known)}
            write_atomically(self.path, json.dumps(document, sort_keys=True) + "\n")


def hash_file(entry: Entry, add: Callable[[int], None] | None = None, also: Any = None) -> str:
    """SHA-256 of a file, in memory of one block. `also`: a second hashlib object fed with the same bytes.

    Raises OSError if it cannot be read or was changed meanwhile.
    """
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with open(entry.full, "rb", buffering=0) as f:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while True:
            n = f.readinto(buffer)
            if not n:
                break
            digest.update(view[:n])
            if also is not None:
                also.update(view[:n])
            if add is not None:
                add(n)
        after = os.fstat(f.fileno())
    if (after.st_size, after.st_mtime_ns, after.st_ino) != (entry.size, entry.mtime_ns, entry.inode):
        raise OSError(5, "it was changed while it was read")
    return digest.hexdigest()


def default_threads() -> int:
    """One thread a core that this process may use, 16 at most: beyond that disks are the limit."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(1, min(cores, 16))


# --------------------------------------------------------------------------------------------- the whole


class Verifier:
    """One verification; `problems` and `notes` grow as its steps run."""

    def __init__(self, params: Params, show: str = "none") -> None:
        self.params = params
        self.show = show
        self.threads = params.threads or default_threads()
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.files: dict[str, Entry] = {}
        self.wanted: dict[str, str] | None = None
        self.digests: dict[str, str] = {}
        self.hashed_bytes = 0
        self.reused = 0

    def problem(self, id: str, file: str, what: str, fix: str) -> None:
        """Count one reason why the folder is not whole."""
        self.problems.append(Problem(id, file, what, fix))

    def proved(self, *paths: str) -> bool:
        """All these files are what the manifest says."""
        wanted = self.wanted or {}
        return all(p in wanted and self.digests.get(p) == wanted[p] for p in paths)

    def run(self) -> dict[str, Any]:
        """All steps; the result document."""
        began = time.monotonic()
        if not os.path.isdir(self.params.dir):
            raise Usage(f"{self.params.dir} is not a folder")
        if self.params.manifest is not None:
            self.wanted = read_manifest(self.params.manifest)
            self.wanted = {
                p: d
                for p, d in self.wanted.items()
                if not any(fnmatch.fnmatchcase(p, pattern) for pattern in self.params.ignore)
            }
        tree = scan(self.params.dir, self.params.follow_links, self.params.ignore, self.wanted or ())
        self.files = tree.files
        self.problems += tree.problems
        self.notes += tree.notes
        if not self.params.headers_only:
            self.hash_all()
        self.check_names()
        self.check_documents()
        shards = self.check_shards()
        self.check_counts(len(shards))
        whole = not self.problems
        digest = manifest_digest(self.digests) if len(self.digests) == len(self.files) > 0 else None
        if self.params.write_manifest is not None and whole:
            write_atomically(self.params.write_manifest, manifest_text(self.digests))
        return {
            "whole": whole,
            "dir": self.params.dir,
            "manifest": self.params.manifest,
            "compared": self.wanted is not None and not self.params.headers_only,
            "files": len(self.files),
            "bytes": sum(e.size for e in self.files.values()),
            "shards": len(shards),
            "seconds": round(time.monotonic() - began, 3),
            "threads": self.threads,
            "hashed_bytes": self.hashed_bytes,
            "reused": self.reused,
            "digest": digest,
            "problems": [p._asdict() for p in sorted(self.problems)],
            "notes": self.notes,
        }

    def hash_all(self) -> None:
        """Hash every file that no stamp vouches for, and compare with the manifest."""
        stamps = Stamps(self.params.stamp, self.params.dir, self.params.full)
        todo = []
        for path, entry in self.files.items():
            known = stamps.get(entry)
            if known is None:
                todo.append(entry)
            else:
                self.digests[path] = known
                self.reused += 1
        todo.sort(key=lambda e: -e.size)  # the longest first, so that no thread ends long after the others
        progress = Progress("hash", sum(e.size for e in todo), "bytes", self.show if todo else "none")

        def one(entry: Entry) -> tuple[Entry, str | None, str]:
            name = entry.path
            try:
                return entry, hash_file(entry, lambda n: progress.add(n, name)), ""
            except OSError as e:
                return entry, None, e.strerror or str(e)

        def digests() -> Iterator[tuple[Entry, str | None, str]]:
            with ThreadPoolExecutor(self.threads) as pool:
                yield from pool.map(one, todo)

        for entry, digest, why in digests():
            if digest is None:
                self.problem("file.unreadable", entry.path, why, "check the disk, then fetch this file again")
                continue
            self.digests[entry.path] = digest
            self.hashed_bytes += entry.size
            stamps.put(entry, digest)
        progress.close()
        if todo or self.params.full:
            stamps.keep_only(self.files)
            try:
                stamps.save()
            except OSError as e:
                self.notes.append(f"the stamp could not be kept: {e}")
        for path, digest in sorted((self.wanted or {}).items()):
            if path in self.digests and self.digests[path] != digest:
                what = f"its SHA-256 is {self.digests[path]}, the manifest says {digest}"
                self.problem("hash.differs", path, what, "set this file aside and fetch it again")

    def check_names(self) -> None:
        """Files of the manifest against files of the tree; empty and hidden files; LFS pointers."""
        for path in sorted(self.wanted or {}):
            if path not in self.files:
                self.problem("file.missing", path, "in the manifest and not there", "fetch this file")
        for path, entry in self.files.items():
            name = path.rpartition("/")[2]
            known = self.wanted is not None and path in self.wanted
            if self.wanted is not None and not known:
                kind = "hidden file" if hidden(path) else "Python file" if name.endswith(".py") else "file"
                what = f"a {kind} that the manifest does not name ({human(entry.size)})"
                self.problem("file.extra", path, what, "move it away, or make a new manifest if it belongs")
            elif self.wanted is None and hidden(path) and name not in HIDDEN_BUT_PUBLISHED:
                what = f"a hidden file ({human(entry.size)})"
                self.problem("file.hidden", path, what, "look what put it there, then move it away")
            if entry.size == 0 and not (self.proved(path) or name in MAY_BE_EMPTY):
                self.problem("file.empty", path, "empty", "fetch this file again")
            if 0 < entry.size < LFS_LIMIT:
                try:
                    pointer = lfs_pointer(read_head(entry, LFS_LIMIT))
                except OSError:
                    continue  # an unreadable file is reported by the step that needs it
                if pointer is not None:
                    what = f"only a Git LFS pointer, not the file itself ({pointer})"
                    self.problem(
                        "lfs.pointer", path, what, "run `git lfs pull`, or fetch it with a hub client"
                    )

    def check_documents(self) -> None:
        """config.json, generation config and tokenizer are there and parse."""
        if "config.json" not in self.files:
            self.problem("config.missing", "config.json", "not there", "fetch this file")
        if not any(name in self.files for name in TOKENIZERS):
            what = "none of " + ", ".join(TOKENIZERS) + " is there"
            if self.wanted is not None:
                self.notes.append(f"no tokenizer: {what}")
            else:
                self.problem("tokenizer.missing", "tokenizer.json", what, "fetch the tokenizer's files")
        for path in sorted(self.files):
            if path.rpartition("/")[2] not in MUST_PARSE or self.files[path].size == 0:
                continue
            try:
                if not isinstance(read_json(self.files[path]), dict):
                    raise ValueError("not a JSON object")
            except (OSError, ValueError) as e:
                self.problem("json.unreadable", path, str(e), "fetch this file again")

    def read_indexes(self) -> list[Index]:
        """Every index of the tree that can be read."""
        indexes = []
        for path in sorted(p for p in self.files if p.endswith(INDEX_SUFFIX)):
            try:
                indexes.append(parse_index(read_json(self.files[path]), path))
            except (OSError, ValueError) as e:
                self.problem("index.unreadable", path, str(e), "fetch this file again")
        return indexes

    def check_shards(self) -> list[str]:
        """Index against files against headers; the shards that are there."""
        indexes = self.read_indexes()
        named = {path for index in indexes for path in index.shards}
        there = sorted(p for p in self.files if p.endswith(".safetensors") or p in named)
        missing = sorted(named - set(there))
        extra = sorted(set(there) - named) if indexes else []
        stale = (
            f"; it names {len(named)} shards and {len(extra)} others are here: an old index?" if extra else ""
        )
        for path in missing:
            what = f"the index names it and it is not there{stale}"
            self.problem("shard.missing", path, what, "fetch this file")
        for path in extra:
            if self.proved(path):
                self.notes.append(f"{path}: a shard that no index names; the manifest does")
            else:
                what = f"a shard that no index names ({human(self.files[path].size)})"
                self.problem("shard.extra", path, what, "move it out of the folder")
        if not there and not missing:
            what = "no .safetensors file is here"
            self.problem("weights.none", ".", what, "check the path; then fetch the weights")
        if not indexes and len(there) > 1 and not any(p.endswith(INDEX_SUFFIX) for p in self.files):
            what = f"{len(there)} shards and no index that says which belong together"
            self.problem("index.missing", "model" + INDEX_SUFFIX, what, "fetch this file")
        # An empty file or a pointer is already named as what it is.
        known_bad = {p.file for p in self.problems if p.id in ("file.empty", "lfs.pointer")}
        readable = [p for p in there if p not in known_bad]
        with ThreadPoolExecutor(self.threads) as pool:
            headers = dict(zip(readable, pool.map(lambda p: read_header(self.files[p]), readable)))
        for path, header in headers.items():
            for what in header.wrong[:3]:
                more = f" (and {len(header.wrong) - 3} more)" if len(header.wrong) > 3 else ""
                self.problem("shard.header", path, what + more, "set this file aside and fetch it again")
            if header.unknown_dtypes:
                self.notes.append(f"{path}: sizes not checked for dtype {', '.join(header.unknown_dtypes)}")
        for index in indexes:
            self.check_index(index, headers)
        return there

    def check_index(self, index: Index, headers: dict[str, Header]) -> None:
        """The tensors of an index are in the shards that it says, and add up to its total."""
        unindexed = 0
        whole = True
        for path, tensors in sorted(index.shards.items()):
            header = headers.get(path)
            if header is None or header.wrong:
                whole = False
                continue
            absent = tensors - header.tensors
            unindexed += len(header.tensors - tensors)
            if absent:
                what = f"{len(absent)} tensors of {index.path} are not in it, such as {min(absent)}"
                fix = "fetch it and the index again: files were swapped, or are of two versions"
                self.problem("shard.tensors", path, what, fix)
        if unindexed:
            self.notes.append(f"{index.path}: the shards hold {unindexed} tensors that it does not name")
        if index.total_size is None or not whole:
            return
        total = sum(headers[path].tensor_bytes for path in index.shards)
        if total != index.total_size:
            what = f"total_size is {index.total_size}, the tensors take {total} bytes"
            if self.proved(index.path, *index.shards):
                self.notes.append(f"{index.path}: {what}; published so, says the manifest")
            else:
                self.problem("index.total", index.path, what, "fetch the index again, or use a manifest")

    def check_counts(self, shards: int) -> None:
        """Counts and bytes against what the caller expects; bytes within `bytes_within` percent."""
        fix = "check that this is the model and the revision that was meant"
        p = self.params
        if p.shards is not None and shards != p.shards:
            self.problem("count.shards", ".", f"{shards} shards, {p.shards} expected", fix)
        if p.files is not None and len(self.files) != p.files:
            self.problem("count.files", ".", f"{len(self.files)} files, {p.files} expected", fix)
        total = sum(e.size for e in self.files.values())
        if p.bytes is not None and abs(total - p.bytes) > p.bytes * p.bytes_within / 100:
            what = f"{total} bytes, {p.bytes} expected (within {p.bytes_within:g} %)"
            self.problem("count.bytes", ".", what, fix)


def hidden(path: str) -> bool:
    """A file whose name, or whose folder's name, begins with a dot."""
    return any(part.startswith(".") for part in path.split("/"))


def verify(params: Params, show: str = "none") -> dict[str, Any]:
    """Verify a folder: the result document. Usage if the parameters make no sense.

    `show`: "json" for `#progress` lines on stderr, "tty" for one moving line, "none".
    """
    if params.headers_only and params.write_manifest is not None:
        raise Usage("a manifest needs hashes: --headers-only and --write-manifest do not go together")
    if params.stamp is not None:
        inside = os.path.realpath(params.dir).rstrip("/") + "/"
        if os.path.realpath(params.stamp).startswith(inside):
            raise Usage("the stamp must not lie in the folder that it vouches for")
    return Verifier(params, show).run()


# --------------------------------------------------------------------------------------------------- CLI


def render(result: dict[str, Any]) -> str:
    """The result for a person."""
    what = f"{result['shards']} shards, {result['files']} files, {human(result['bytes'])}"
    how = f"{result['seconds']:.1f} s"
    if result["hashed_bytes"]:
        rate = result["hashed_bytes"] / max(result["seconds"], 1e-3)
        how += f", hashed {human(result['hashed_bytes'])} at {human(int(rate))}/s"
    if result["reused"]:
        how += f", {result['reused']} files unchanged since they were last hashed"
    lines = []
    shown: dict[str, int] = {}
    for p in result["problems"]:
        shown[p["id"]] = shown.get(p["id"], 0) + 1
        if shown[p["id"]] <= 10:
            lines.append(f"  {p['id']:<20} {p['file']}")
            lines += [f"  {'':<20} {text}" for text in (p["what"], "fix: " + p["fix"])]
    for id, count in shown.items():
        if count > 10:
            lines.append(f"  {id:<20} and {count - 10} more: --json lists them all")
    lines += [f"  note: {note}" for note in result["notes"]]
    count = len(result["problems"])
    head = "whole" if result["whole"] else f"NOT WHOLE ({count} problem{'s' if count != 1 else ''})"
    lines.insert(0, f"{head}: {result['dir']}: {what} ({how})")
    if result["digest"] and result["whole"]:
        against = "equal to the manifest" if result["compared"] else "compared with no manifest"
        lines.append(f"  sha256 of all: {result['digest']} ({against})")
    return "\n".join(lines)


def params_from(document: Any) -> Params:
    """Parameters from JSON; Usage names an unknown key or a value of the wrong kind."""
    if not isinstance(document, dict):
        raise Usage("the parameters must be one JSON object")
    unknown = sorted(set(document) - set(Params._fields))
    if unknown:
        raise Usage(f"unknown parameter {', '.join(unknown)}; known: {', '.join(Params._fields)}")
    kinds: dict[str, tuple[type, ...]] = {
        "dir": (str,), "manifest": (str,), "stamp": (str,), "write_manifest": (str,), "threads": (int,),
        "full": (bool,), "headers_only": (bool,), "follow_links": (bool,), "ignore": (list, tuple),
        "shards": (int,), "files": (int,), "bytes": (int,), "bytes_within": (int, float),
    }  # fmt: skip
    given = {k: v for k, v in document.items() if v is not None}
    for key, value in given.items():
        if not isinstance(value, kinds[key]) or (isinstance(value, bool) and bool not in kinds[key]):
            raise Usage(f"{key}: {value!r} is not of the right kind ({kinds[key][0].__name__})")
    if not given.get("dir"):
        raise Usage("dir is missing")
    if not 0 <= given.get("threads", 0) <= 256:
        raise Usage("threads must be from 1 to 256 (0: one a core)")
    given["ignore"] = tuple(str(pattern) for pattern in given.get("ignore", ()))
    return Params(**given)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="verify_weights.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  verify_weights.py /models/x                                structure, and one digest of all\n"
        "  verify_weights.py /models/x --headers-only                 structure alone: under a second\n"
        "  verify_weights.py /models/x --write-manifest x.sha256      make a manifest from a good copy\n"
        "  verify_weights.py /models/x --manifest x.sha256            compare a copy with it, offline\n"
        "  verify_weights.py /models/x --manifest x.sha256 --stamp /var/tmp/x.stamp.json\n"
        "                                                             the next time: under a second",
    )
    p.add_argument("dir", nargs="?", metavar="DIR", help="the folder with config.json and the shards")
    p.add_argument("--manifest", metavar="FILE", help="compare every file's SHA-256 with this list")
    p.add_argument("--write-manifest", metavar="FILE", help="if DIR is whole, write its list here")
    p.add_argument(
        "--stamp", metavar="FILE", help="keep digests here, outside DIR: unchanged files are not read"
    )
    p.add_argument("--full", action="store_true", help="hash everything, whatever the stamp says")
    p.add_argument("--headers-only", action="store_true", help="check names, sizes and headers; hash nothing")
    p.add_argument(
        "--threads", type=int, default=0, metavar="N", help="hashing threads (default: one a core)"
    )
    p.add_argument("--follow-links", action="store_true", help="links may lead out of DIR")
    p.add_argument(
        "--ignore", action="append", default=[], metavar="GLOB", help="leave out files (repeatable)"
    )
    p.add_argument("--shards", type=int, metavar="N", help="this many .safetensors files are expected")
    p.add_argument("--files", type=int, metavar="N", help="this many files are expected")
    p.add_argument("--bytes", type=int, metavar="N", help="this many bytes are expected")
    p.add_argument("--bytes-within", type=float, default=1.0, metavar="PERCENT", help="how near (default: 1)")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    p.add_argument("--stdin", action="store_true", help="parameters as JSON on stdin; implies --json")
    return p


def main(argv: list[str] | None = None, out: TextIO | None = None) -> int:
    """The program; its exit status."""
    out = out or sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = vars(parser().parse_args(argv))
    as_json, from_stdin = options.pop("json"), options.pop("stdin")
    try:
        if from_stdin:
            try:
                params = params_from(json.load(sys.stdin))
            except ValueError as e:
                raise Usage(f"stdin is not JSON: {e}") from e
        else:
            params = params_from(options)
        show = "json" if from_stdin else "tty" if sys.stderr.isatty() else "none"
        result = verify(params, show)
    except Usage as e:
        print(f"verify_weights.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"verify_weights.py: {e}", file=sys.stderr)
        return 1
    print(json.dumps(result) if as_json or from_stdin else render(result), file=out)
    return 0 if result["whole"] else 1


if __name__ == "__main__":
    sys.exit(main())
