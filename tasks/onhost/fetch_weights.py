#!/usr/bin/env python3
"""Bring a model's weights to this host: from the first source that works, resumable, proved file by file.

Run it with the tools environment's Python (the hubs' clients); `path` and `peer` sources need none of them.
Parameters are one JSON object on stdin, the result is one JSON document on stdout, progress is on stderr.

  dest            the model's folder, or a link to it; a mount point only if nothing is missing in it
  sources         in order of preference; the first that works serves, the next ones what it cannot
    {"kind": "huggingface", "repo": "org/name", "revision": "<commit>", "endpoint": null, "token_file": null}
    {"kind": "modelscope",  "repo": "org/name", "revision": "<commit>", "endpoint": null, "token_file": null}
    {"kind": "s3", "bucket": "b", "prefix": "models/x", "endpoint": "https://…", "region": null,
     "addressing": "auto|virtual|path", "profile": null, "credentials_file": null, "ca_bundle": null,
     "anonymous": false}
    {"kind": "path", "dir": "/mnt/models/x", "how": "copy|hardlink|symlink"}
    {"kind": "peer", "url": "https://10.0.0.1:40123", "cert_file": "…", "token_file": "…"}
                  every source may have a "name"; tokens come from a 0600 file or the environment
                  (HF_TOKEN, MODELSCOPE_API_TOKEN or token_env); "allow_http" permits an endpoint without TLS
  secrets         a 0600 file, one JSON object of environment variables for the clients (HF_TOKEN,
                  MODELSCOPE_API_TOKEN, RACKWRIGHT_PEER_TOKEN, AWS_...): read once, and deleted before any
                  source is asked
  manifest        `<sha256>  <path>` lines: exactly these files are fetched, and each must have this hash.
                  Without it the first source's listing says what is wanted, with the hashes that it publishes
  ignore          globs of files that are not wanted; files that the manifest names always are
  stamp           file of known digests, as verify_weights.py keeps it; makes every later run fast
  write_manifest  where to write the manifest of the verified model
  concurrency     downloads at a time (8)          threads   hashing threads (0: one a core)
  patience        seconds without a byte before a source is given up (120)
  reserve         bytes that must stay free on the disk (1 GiB)
  shards, files, bytes, bytes_within               cross-checks, as verify_weights.py takes them
  seal            make files and folders read-only when the model is whole (true)
  mode            "fetch", or "list": only say what each source has, as {"files": {path: {size, sha256}}};
                  hash_small: with "list", files up to so many bytes whose SHA-256 no one publishes are
                  fetched and hashed (0)

What never happens: a half file in the model's folder (files are made beside it, in `.rackwright-download`,
and moved in when their hash is right); a verified file fetched again; two runs at once (the second is
refused); a wrong file used or deleted (it goes to `.rackwright-rejected` beside the folder); a change to what
a link leads to (the name is replaced, never the bytes behind it). The third wrong copy of one file stops the
run and says which source served what. A model that is whole needs no right to write.

Exit status: 0 the model is whole, 1 it is not (run it again: it goes on), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

try:
    from . import verify_weights as vw
    from . import weight_sources as ws
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import verify_weights as vw  # type: ignore[import-not-found,no-redef]
    import weight_sources as ws  # type: ignore[import-not-found,no-redef]

WORK = ".rackwright-download"  # beside the model: parts, clients' homes, the lock
REJECTED = ".rackwright-rejected"  # beside the model: wrong files, kept for a look
ATTEMPTS = 3  # wrong copies of one file before the run stops
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a network file system that knows none
NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)  # this user or this mount may only read
BEAT = 5.0  # seconds between two signs of life in the lock, for hosts that share the folder
WATCH = 12.0  # seconds without one after which another host's lock counts as left behind
SETTLE = 2.0  # seconds after which a host that signed a lock looks whether another one did so, too
GRACE = 5.0  # seconds that a stopped run waits for its workers
STUCK = 6  # failures of one file at one source in a row without a new byte before that pair is given up
SECRET_NAMES = ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "RACKWRIGHT_PEER_TOKEN", "AWS_ACCESS_KEY_ID",
                "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # fmt: skip
HUB_NAME = re.compile(r"\.([0-9a-f]{64})(\.[0-9a-f]{8})?\.incomplete$")  # huggingface_hub's, with the sha256


class Params(NamedTuple):
    """The parameters; JSON keys are these names."""

    dest: str = ""
    sources: tuple[dict[str, Any], ...] = ()
    secrets: str | None = None
    manifest: str | None = None
    ignore: tuple[str, ...] = ()
    stamp: str | None = None
    write_manifest: str | None = None
    concurrency: int = 8
    threads: int = 0
    patience: float = 120.0
    reserve: int = 1 << 30
    shards: int | None = None
    files: int | None = None
    bytes: int | None = None
    bytes_within: float = 1.0
    seal: bool = True
    mode: str = "fetch"
    hash_small: int = 0


KINDS: dict[str, tuple[type, ...]] = {
    "dest": (str,), "sources": (list,), "secrets": (str,), "manifest": (str,),
    "ignore": (list,), "stamp": (str,), "write_manifest": (str,), "concurrency": (int,), "threads": (int,),
    "patience": (int, float),
    "reserve": (int,), "shards": (int,), "files": (int,), "bytes": (int,), "bytes_within": (int, float),
    "seal": (bool,), "mode": (str,), "hash_small": (int,),
}  # fmt: skip


def params_from(document: Any) -> Params:
    """Parameters from JSON; vw.Usage names what is missing, unknown or of the wrong kind."""
    if not isinstance(document, dict):
        raise vw.Usage("the parameters must be one JSON object")
    unknown = sorted(set(document) - set(Params._fields))
    if unknown:
        raise vw.Usage(f"unknown parameter {', '.join(unknown)}; known: {', '.join(Params._fields)}")
    given = {k: v for k, v in document.items() if v is not None}
    for key, value in given.items():
        if not isinstance(value, KINDS[key]) or (isinstance(value, bool) and bool not in KINDS[key]):
            raise vw.Usage(f"{key}: {value!r} is not of the right kind ({KINDS[key][0].__name__})")
    for key in ("sources", "ignore"):
        given[key] = tuple(given.get(key, ()))
    if given.get("dest"):
        given["dest"] = os.path.normpath(given["dest"])
    params = Params(**given)
    if params.mode not in ("fetch", "list"):
        raise vw.Usage("mode must be fetch or list")
    if params.mode == "fetch" and not os.path.isabs(params.dest):
        raise vw.Usage("dest must be an absolute path")
    if not 1 <= params.concurrency <= 64 or not 0 <= params.threads <= 256 or params.patience < 0:
        raise vw.Usage("concurrency must be from 1 to 64, threads from 0 to 256, patience not negative")
    if params.mode == "fetch" and not params.sources and params.manifest is None:
        raise vw.Usage("sources or a manifest must be given")
    return params


def take_secrets(path: str) -> None:
    """Put the variables of a secrets file into this process's environment, and delete the file.

    vw.Usage if others can read it or it holds anything but known names with text.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        os.unlink(path)
        found = json.loads(text)
    except OSError as e:
        raise vw.Usage(f"secrets: {path}: {e.strerror}") from e
    except ValueError:
        raise vw.Usage(f"secrets: {path} is not JSON") from None  # its text must not show
    if mode & 0o077:
        raise vw.Usage(f"secrets: {path} could be read by other users; it is deleted, give it mode 0600")
    good = isinstance(found, dict) and set(found) <= set(SECRET_NAMES)
    if not good or not all(isinstance(value, str) and value for value in found.values()):
        raise vw.Usage(f"secrets: {path} may hold text for {', '.join(SECRET_NAMES)} and nothing else")
    os.environ.update(found)


class Wanted(NamedTuple):
    """A file that the model must have; a hash that nobody published is None."""

    path: str
    size: int | None
    sha256: str | None
    git_sha1: str | None = None
    version: str | None = None  # of its source, where no hash says what it is

    def accepts(self, size: int, sha256: str, git_sha1: str) -> bool:
        """This content is the wanted one, as far as anything is known about it."""
        if self.size is not None and size != self.size:
            return False
        if self.sha256 is not None:
            return sha256 == self.sha256
        return self.git_sha1 is None or git_sha1 == self.git_sha1

    @property
    def identity(self) -> str:
        """What a part on the disk is a prefix of."""
        return self.sha256 or self.git_sha1 or f"size {self.size} {self.version}"

    def served_by(self, source: ws.Source, remote: ws.Remote) -> Wanted:
        """This file, from this source: without a hash, bytes of two sources or versions are never joined."""
        if self.sha256 or self.git_sha1:
            return self
        return self._replace(version=f"{source.name} {remote.version}")


def digests(entry: vw.Entry, wanted: Wanted, add: Any = None) -> tuple[str, str]:
    """SHA-256 of a file and, where only that can prove it, its Git blob id, in one reading."""
    if wanted.sha256 is not None:
        return vw.hash_file(entry, add), ""
    git = hashlib.sha1(b"blob %d\0" % entry.size)  # what Git calls a file by; no protection is asked of it
    return vw.hash_file(entry, add, git), git.hexdigest()


def entry_of(path: str, full: str) -> vw.Entry:
    """A file as the verifier sees it."""
    s = os.stat(full)
    return vw.Entry(path, full, s.st_size, s.st_mtime_ns, s.st_ino)


def flush(path: str) -> None:
    """Bring a file to the disk before it gets its name: no crash may leave a whole name on half a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def whole_size(entry: vw.Entry) -> int | None:
    """How long a safetensors file means to be, read from its header; None if the header is not whole."""
    try:
        raw = vw.read_head(entry, 8)
        length = int.from_bytes(raw, "little")
        if len(raw) < 8 or length > vw.HEADER_LIMIT or length + 8 > entry.size:
            return None
        header = json.loads(vw.read_head(entry, 8 + length)[8:])
        ends = [info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"]
        return 8 + length + int(max(ends, default=0))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def cut_off(entry: vw.Entry, wanted: Wanted) -> bool:
    """This file is the beginning of a shard whose copy ended early: it can go on."""
    size = whole_size(entry) if entry.path.endswith(".safetensors") else None
    return size is not None and entry.size < size and wanted.size in (None, size)


def disk_problem(error: OSError) -> tuple[str, str]:
    """What an error of this host's disk is called, and what helps."""
    if error.errno in ws.DISK_FULL:
        return "disk.full", "free space (or inodes) and run it again: it goes on where it stopped"
    if error.errno in NO_RIGHT:
        return "disk.rights", "let this user write there, or choose another model_root"
    return "disk.error", "look at the disk, then run it again: it goes on"


class Locked(Exception):
    """Another run works on this model."""


def held(path: str) -> bool:
    """Some process holds a lock on this file; where there are no locks, none does."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise
    finally:
        os.close(fd)
    return False


class Lock:
    """One run a model: a lock that ends with the process, whatever ends it.

    On storage that several hosts share, locks may not reach the other host (or there are none at all), so the
    holder also writes into the file every few seconds.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._me = (str(os.getpid()), socket.gethostname())
        self._fd = -1
        self._done = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Lock:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        while not self._take():
            pass  # the run before removed the file that this one had opened
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._heart.join(GRACE)
        if self._there(self._fd):
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._fd)

    def _take(self) -> bool:
        """Lock and sign the file; False if it is no longer the one at the path, Locked if it is another's."""
        made = True
        try:
            # Only one host can make it, also where locks do not reach.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            made = False
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                return False
        try:
            locks = self._lock(fd)
            certain = made or self._left_behind(locks)
            taken = self._there(fd)
            if taken:
                self._fd = fd
                self._sign()
            if taken and not certain:
                time.sleep(SETTLE)
                process, host = self._owner()
                if (process, host) != self._me:
                    raise Locked(f"process {process} on host {host} works on this model already")
        except BaseException:
            os.close(fd)
            raise
        if not taken:
            os.close(fd)
        return taken

    def _lock(self, fd: int) -> bool:
        """Lock the file: Locked if another process of this host has it, False where there are no locks."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"process {self._owner()[0] or 'unknown'} works on this model already") from None
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            return False
        return True

    def _left_behind(self, locks: bool) -> bool:
        """Nobody works behind a file that was there; False if another host may be about to say so, too.

        Locked if its owner lives.
        """
        process, host = self._owner()
        if not host:  # left by a killed run, or made by another host at this very moment
            time.sleep(SETTLE)
            process, host = self._owner()
        if host == self._me[1] and locks:
            return True
        if host and self._lives():
            raise Locked(f"process {process} on host {host} works on this model already")
        return False

    def _there(self, fd: int) -> bool:
        """The open file is the one at the path."""
        try:
            return os.fstat(fd).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def _text(self) -> bytes:
        """What the file says, opened anew: a network file system may show an open one as it was."""
        try:
            with open(self.path, "rb") as f:
                return f.read(256)
        except FileNotFoundError:
            return b""

    def _owner(self) -> tuple[str, str]:
        """Process and host that the file names; empty where it names none."""
        words = self._text().decode("utf-8", "replace").split()
        return (words[0], words[1]) if len(words) >= 2 else ("".join(words[:1]), "")

    def _lives(self) -> bool:
        """The file changes while one looks: no two clocks are compared."""
        before = self._text()
        end = time.monotonic() + WATCH
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH / 10))
            now = self._text()
            if now != before:
                return bool(now)  # it is gone when its run has ended
        return False

    def _sign(self, beat: int = 0) -> None:
        text = f"{' '.join(self._me)} {beat}\n".encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))
        with suppress(OSError):  # a file system that cannot; others must see it soon, not when it suits
            os.fsync(self._fd)

    def _beat(self) -> None:
        beat = 0
        while not self._done.wait(BEAT):
            beat += 1
            with suppress(OSError):  # a full disk, which may have room again
                self._sign(beat)


class Serving:
    """A source in one run: its listing once asked, what it delivered, what it cannot do."""

    def __init__(self, source: ws.Source, meter: ws.Meter) -> None:
        self.source = source
        self.meter = meter
        self.listing: dict[str, ws.Remote] | None = None
        self.why = ""  # why it is out of the game
        self.fix = ""
        self.cannot: dict[str, str] = {}  # path -> why not from here
        self.stuck: dict[str, int] = {}  # path -> failures in a row without a new byte
        self.pauses: dict[str, float] = {}  # path -> seconds to wait before it is asked for again
        self.served: list[str] = []
        self.served_bytes = 0

    @property
    def out(self) -> bool:
        """It refused, or was silent for too long."""
        return bool(self.why)

    def to_json(self) -> dict[str, Any]:
        """What became of it."""
        state = "failed" if self.out else "used" if self.served or self.meter.bytes else "unused"
        return {
            "kind": self.source.kind,
            "name": self.source.name,
            "revision": self.source.revision,
            "state": state,
            "why": self.why,
            "fix": self.fix,
            "files": len(self.served),
            "bytes": self.served_bytes,
            "received_bytes": self.meter.bytes,
            "cannot": self.cannot,
        }


class Fetch:
    """One run. Decisions are made in its one thread; workers only move bytes and hash."""

    def __init__(self, params: Params, stop: threading.Event, work: str | None = None) -> None:
        """`work`: a folder elsewhere, for a look at a model that nothing may be changed of."""
        self.params = params
        self.stop = stop
        self.only_look = work is not None
        self.parent, self.name = os.path.split(os.path.normpath(params.dest))
        self.work = work or os.path.join(self.parent, WORK, self.name)
        self.parts = os.path.join(self.work, "parts")
        self.rejected_dir = os.path.join(self.parent, REJECTED, self.name)
        self.stamps = vw.Stamps(params.stamp, params.dest)
        self.progress = vw.Progress("list", 0, "bytes", "none")
        home = os.path.join(self.work, "home")
        self.servings = [self._serving(spec, home) for spec in params.sources]
        self.wanted: dict[str, Wanted] = {}
        self.ignore = params.ignore
        self.failures: dict[str, list[dict[str, Any]]] = {}
        self.problems: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.rejected: list[dict[str, Any]] = []
        self.sizes: dict[str, int] = {}  # of missing files, as their sources list them
        self.kept = 0
        self.seconds: dict[str, float] = {}

    def _serving(self, spec: dict[str, Any], home: str) -> Serving:
        try:
            source = ws.make_source(spec, home)
        except ValueError as e:
            raise vw.Usage(str(e)) from e
        return Serving(source, ws.Meter(lambda n: self.progress.add(n)))

    def problem(self, id: str, file: str, what: str, fix: str) -> None:
        """One reason why the model is not here."""
        self.problems.append({"id": id, "file": file, "what": what, "fix": fix})

    # ------------------------------------------------------------------------------------------- the run

    def run(self) -> dict[str, Any]:
        """Everything, in order; the result document."""
        began = time.monotonic()
        self.prepare()
        missing = [] if self.problems else self.timed("check", self.missing)
        if missing and not self.problems:
            self.timed("download", lambda: self.download(missing))
        result = None
        if not self.problems and not self.stop.is_set():
            result = self.timed("verify", self.verify)
        if self.stop.is_set() and not self.problems:
            self.problem("fetch.interrupted", "", "told to stop", "run it again: it goes on")
        ok = result is not None and bool(result["whole"]) and not self.problems
        if ok:
            if self.params.seal and not self.only_look:
                self.seal()
            shutil.rmtree(self.work, ignore_errors=True)
        self.seconds["total"] = round(time.monotonic() - began, 3)
        served = [s for s in self.servings if s.served]
        return {
            "ok": ok,
            "dest": self.params.dest,
            "files": len(self.wanted),
            "kept_files": self.kept,
            "fetched_files": sum(len(s.served) for s in served),
            "fetched_bytes": sum(s.served_bytes for s in served),
            "received_bytes": sum(s.meter.bytes for s in self.servings),
            "unproved_files": sum(1 for w in self.wanted.values() if not (w.sha256 or w.git_sha1)),
            "sources": [s.to_json() for s in self.servings],
            "rejected": self.rejected,
            "problems": self.problems + (result["problems"] if result else []),
            "notes": self.notes,
            "digest": result["digest"] if result else None,
            "verify": result,
            "seconds": self.seconds,
        }

    def timed(self, name: str, step: Any) -> Any:
        """Run a step and keep its seconds."""
        began = time.monotonic()
        try:
            return step()
        finally:
            self.seconds[name] = round(time.monotonic() - began, 3)

    def prepare(self) -> None:
        """Know what is wanted; make the folders; sort out what other downloads left in the model's folder."""
        os.makedirs(self.params.dest, exist_ok=True)
        os.makedirs(self.parts, exist_ok=True)
        self.drop_links()
        ws.quiet_clients(os.path.join(self.work, "home"))
        if self.params.manifest is not None:
            hashes = vw.read_manifest(self.params.manifest)
            self.ignore = tuple(g for g in self.ignore if not any(fnmatch.fnmatchcase(p, g) for p in hashes))
            self.wanted = {p: Wanted(p, None, h) for p, h in hashes.items()}
        else:
            first = next((s for s in self.servings if self.ready(s)), None)
            if first is not None and first.listing is not None:
                self.wanted = {
                    p: Wanted(p, r.size, r.sha256, r.git_sha1).served_by(first.source, r)
                    for p, r in first.listing.items()
                    if not self.ignored(p)
                }
            elif not self.stop.is_set():
                self.no_source()
        if not self.only_look:
            self.adopt_leftovers()

    def drop_links(self) -> None:
        """Parts that lead to somebody else's bytes: links that a killed run left, hard-linked backups."""
        for folder, _, names in os.walk(self.parts):
            # our own second names first
            for name in sorted(names, key=lambda name: not name.endswith(ws.KEPT)):
                full = os.path.join(folder, name)
                if name.endswith(ws.KEPT) or ws.foreign(full):
                    os.unlink(full)

    def ours(self, path: str) -> bool:
        """What has this name in the model's folder lies in it, and not behind a link to another folder."""
        home = os.path.realpath(self.params.dest)
        folder = os.path.realpath(os.path.dirname(os.path.join(self.params.dest, path)))
        return folder == home or folder.startswith(home.rstrip("/") + "/")

    def before_changes(self) -> None:
        """Make sure that the model's folder can be changed, once something in it has to be. vw.Usage."""
        dest = self.params.dest
        if os.stat(dest).st_dev != os.stat(self.parts).st_dev:
            what = f"{dest} is a mount point: finished files could not be moved into it"
            raise vw.Usage(f"{what}; take a folder below it as dest")
        self.unseal()

    def ignored(self, path: str) -> bool:
        """The caller does not want this file."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.ignore)

    def no_source(self) -> None:
        """No source answered: say why, for each."""
        why = "; ".join(s.why for s in self.servings) or "no source is given"
        fix = "; ".join(sorted({s.fix for s in self.servings if s.fix})) or "add a source that works"
        self.problem("source.none", "", why, fix)

    def adopt_leftovers(self) -> None:
        """Half files of other programs in the model's folder: what can go on becomes a part, the rest goes
        to the rejected ones. A leftover in the folder would make the model not whole.
        """
        by_hash = {w.sha256: w for w in self.wanted.values() if w.sha256}
        known = set(self.wanted)
        problems = vw.scan(self.params.dest, follow_links=True, published=known).problems
        # Locks first: nothing is moved under a client that is at work.
        for problem in sorted(problems, key=lambda p: p.id != "leftover.lock"):
            if not problem.id.startswith("leftover.") or not self.ours(problem.file):
                continue
            self.before_changes()
            full = os.path.join(self.params.dest, problem.file)
            if problem.id == "leftover.lock" and held(full):
                what = "another download client works in this folder: it holds this lock"
                self.problem("fetch.running", problem.file, what, "wait for it, or end it first")
                return
            match = HUB_NAME.search(problem.file)
            wanted = by_hash.get(match.group(1)) if match else None
            if problem.file.endswith(".incomplete") and problem.file[: -len(".incomplete")] in known:
                wanted = self.wanted[problem.file[: -len(".incomplete")]]
            if problem.file.startswith("._____temp/") and problem.file[len("._____temp/") :] in known:
                wanted = self.wanted[problem.file[len("._____temp/") :]]
            if wanted is not None and not os.path.exists(os.path.join(self.params.dest, wanted.path)):
                self.become_part(full, wanted)
            elif os.path.getsize(full):
                self.set_aside(full, problem.file, "leftover")
            else:
                os.unlink(full)  # an empty lock file holds nothing to keep
            self.remove_empty(os.path.dirname(full))

    def remove_empty(self, folder: str) -> None:
        """Folders of a client in which nothing is left."""
        try:
            while folder != self.params.dest:
                os.rmdir(folder)
                folder = os.path.dirname(folder)
        except OSError:
            pass  # something is in it

    def become_part(self, full: str, wanted: Wanted) -> None:
        """Let a half file go on, unless a longer part is there already."""
        part = self.part_path(wanted)
        if ws.foreign(full):
            os.unlink(full)  # what it leads to is not ours to go on with
        elif os.path.exists(part) and os.path.getsize(part) >= os.path.getsize(full):
            self.set_aside(full, wanted.path, "leftover")
        else:
            os.replace(full, part)

    def part_path(self, wanted: Wanted) -> str:
        """Where a part lies. One that belongs to other content (an older revision) is removed first."""
        path = os.path.join(self.parts, wanted.path + ".incomplete")
        if not self.labelled(path, wanted):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            for old in (path, path + ".of"):
                with suppress(FileNotFoundError):
                    os.unlink(old)
            with open(path + ".of", "w", encoding="utf-8") as f:
                f.write(wanted.identity)
        return path

    @staticmethod
    def labelled(path: str, wanted: Wanted) -> bool:
        """The part at this path is one of this content; its label says of what it is a part."""
        try:
            with open(path + ".of", encoding="utf-8") as f:
                return f.read() == wanted.identity
        except FileNotFoundError:
            return False

    def already(self, wanted: Wanted) -> int:
        """Bytes of a file that are there as a part; touches nothing."""
        path = os.path.join(self.parts, wanted.path + ".incomplete")
        if not self.labelled(path, wanted) or not os.path.exists(path):
            return 0
        return os.path.getsize(path)

    def set_aside(self, full: str, path: str, tag: str) -> str:
        """Move a file to the rejected ones; the same wrong content twice is kept once. Where it lies then."""
        if os.path.islink(full):
            there = os.path.realpath(full)
            os.unlink(full)
            return there  # it stays where it is
        target = os.path.join(self.rejected_dir, f"{path}.{tag}")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(full, target)
        return target

    # ------------------------------------------------------------------------------------ what is missing

    def missing(self) -> list[str]:
        """Wanted files that are not there as they should be. Hashes what no stamp vouches for."""
        tree = vw.scan(self.params.dest, follow_links=True, published=self.wanted)
        todo: list[vw.Entry] = []
        halves: list[vw.Entry] = []
        missing: list[str] = []
        for path, wanted in self.wanted.items():
            entry = tree.files.get(path)
            if entry is None:
                missing.append(path)
            elif cut_off(entry, wanted):
                halves.append(entry)
            else:
                todo.append(entry)
        self.progress = vw.Progress("check", sum(e.size for e in todo), "bytes", "json" if todo else "none")

        def look(entry: vw.Entry) -> tuple[vw.Entry, str | None, str]:
            known = self.stamps.get(entry)
            wanted = self.wanted[entry.path]
            if known is not None and (wanted.sha256 is not None or wanted.git_sha1 is None):
                self.progress.add(entry.size)
                return entry, known, ""
            if self.stop.is_set():
                return entry, None, ""
            try:
                return entry, *digests(entry, wanted, self.progress.add)
            except OSError:
                return entry, None, ""

        with ThreadPoolExecutor(self.params.threads or vw.default_threads()) as pool:
            seen = list(pool.map(look, sorted(todo, key=lambda e: -e.size)))
        wrong: list[tuple[vw.Entry, str | None]] = []
        for entry, sha256, git in seen:
            if self.stop.is_set():
                return []
            if sha256 is not None and self.wanted[entry.path].accepts(entry.size, sha256, git):
                self.kept += 1
                self.stamps.put(entry, sha256)
            else:
                wrong.append((entry, sha256))
        self.progress.close()
        self.keep_stamps()
        missing += [e.path for e in halves] + [e.path for e, _ in wrong]
        if missing and self.may_change(missing):
            self.before_changes()
            for entry in halves:
                self.become_part(entry.full, self.wanted[entry.path])
            for entry, sha256 in wrong:
                kept_at = self.set_aside(entry.full, entry.path, sha256[:12] if sha256 else "unreadable")
                self.rejected.append(
                    {"file": entry.path, "source": "already there", "sha256": sha256, "kept_at": kept_at}
                )
        return missing

    def may_change(self, paths: list[str]) -> bool:
        """These files may be replaced; a problem for each that may not."""
        for path in paths:
            folder = os.path.realpath(os.path.dirname(os.path.join(self.params.dest, path)))
            if self.only_look:
                fix = "let this user write there, or choose another model_root"
                self.problem("disk.rights", path, "missing or wrong, and this user may not write here", fix)
            elif not self.ours(path):
                fix = "remove that link (rm, without a slash at its end) and run it again"
                self.problem("link.outside", path, f"missing or wrong, behind a link to {folder}", fix)
        return not self.problems

    def keep_stamps(self) -> None:
        """Write the stamp; without it the next run only has to hash again."""
        try:
            self.stamps.save()
        except OSError as e:
            note = f"the stamp could not be kept: {e}"
            if note not in self.notes:
                self.notes.append(note)

    # ------------------------------------------------------------------------------------------- sources

    def ready(self, serving: Serving) -> bool:
        """The source has answered with its listing; asked once, and again while it may only be busy."""
        if serving.listing is not None or serving.out:
            return not serving.out
        print(f"asking {serving.source.name}", file=sys.stderr, flush=True)
        asking = vw.Progress("list", 1, "steps")
        asking.note = serving.source.name
        try:
            self.ask(serving)
        finally:
            asking.close()
        if serving.why:
            print(f"not from {serving.source.name}: {serving.why}", file=sys.stderr, flush=True)
        return serving.listing is not None

    def ask(self, serving: Serving) -> None:
        """Get the listing of a source, or the reason why not; waits and asks again while it may be busy."""
        until = time.monotonic() + self.params.patience
        pause = 1.0
        while not self.stop.is_set():
            try:
                serving.listing = serving.source.list()
                serving.meter.last = time.monotonic()
                return
            except ws.Transient as e:
                pause = max(min(pause * 2, 30.0), e.after or 0)
                if time.monotonic() + pause > until:
                    serving.why, serving.fix = str(e), "check the network, the endpoint and the proxy"
                    break
                self.stop.wait(pause)
            except ws.Refused as e:
                serving.why, serving.fix = str(e), e.fix
                break
            except ws.NotThere as e:
                serving.why, serving.fix = str(e), "check the repository's or folder's name, and the revision"
                break
            except OSError as e:
                serving.why, serving.fix = f"{serving.source.name}: {ws.plain(e)}", "look at this host's disk"
                break

    def pick(self, path: str) -> Serving | None:
        """The first source that can serve this file."""
        wanted = self.wanted[path]
        for serving in self.servings:
            if serving.out or path in serving.cannot or not self.ready(serving) or serving.listing is None:
                continue
            remote = serving.listing.get(path)
            if remote is None:
                serving.cannot[path] = "it does not have this file"
            elif wanted.sha256 and remote.sha256 and wanted.sha256 != remote.sha256:
                serving.cannot[path] = f"it publishes another hash, {remote.sha256}"
            elif wanted.size is not None and remote.size is not None and wanted.size != remote.size:
                serving.cannot[path] = f"it has {remote.size} bytes, {wanted.size} are wanted"
            else:
                return serving
        return None

    # ------------------------------------------------------------------------------------------ download

    def space(self, picked: dict[str, Serving | None]) -> None:
        """Free space and inodes for what is still missing; a problem says how much is short."""
        missing = [path for path, serving in picked.items() if serving is None or serving.source.takes_room]
        need = sum(max(self.sizes.get(p, 0) - self.already(self.wanted[p]), 0) for p in missing)
        disk = os.statvfs(self.params.dest)
        free = disk.f_bavail * disk.f_frsize
        if missing and need + self.params.reserve > free:
            what = f"{vw.human(need)} are still missing, {vw.human(free)} are free"
            what += f" ({vw.human(self.params.reserve)} must stay free)"
            self.problem("disk.space", self.params.dest, what, "free space, or choose another model_root")
        if disk.f_files and disk.f_favail < 4 * len(picked) + 16:
            what = f"only {disk.f_favail} inodes are free for {len(picked)} files"
            self.problem("disk.inodes", self.params.dest, what, "remove small files, or choose another disk")

    def download(self, missing: list[str]) -> None:
        """Fetch, hash, accept or reject, until nothing is missing or nothing more can be done."""
        picked = {path: self.pick(path) for path in missing}
        for path, serving in picked.items():
            if serving is not None and serving.listing is not None:
                self.sizes[path] = serving.listing[path].size or self.wanted[path].size or 0
        self.space(picked)
        if self.problems:
            return
        total = sum(self.sizes.get(p, 0) for p in missing)
        self.progress = vw.Progress("download", total, "bytes", "json")
        self.progress.add(sum(self.already(self.wanted[p]) for p in missing))
        # Small files first: a wrong index or a missing config shows before 150 GB have travelled.
        queue = deque(sorted(missing, key=lambda p: (p.endswith(".safetensors"), p)))
        for serving in self.servings:
            serving.meter.last = time.monotonic()
        fetchers = ThreadPoolExecutor(self.params.concurrency)
        hashers = ThreadPoolExecutor(self.params.threads or vw.default_threads())
        try:
            self.loop(queue, fetchers, hashers)
        except BaseException:
            self.stop.set()
            raise
        finally:
            # A stopped run does not wait for clients that sleep: what is on the disk may be cut off anywhere.
            for pool in (fetchers, hashers):
                pool.shutdown(wait=not self.stop.is_set())
        self.progress.close()

    def loop(self, queue: deque[str], fetchers: ThreadPoolExecutor, hashers: ThreadPoolExecutor) -> None:
        """The state machine: every file is queued, being fetched, being hashed, accepted, or given up."""
        fetching: dict[Future[None], tuple[str, Serving, int]] = {}
        hashing: dict[Future[tuple[vw.Entry, str, str]], tuple[str, Serving]] = {}
        stopped_at: float | None = None
        while queue or fetching or hashing:
            while queue and len(fetching) < self.params.concurrency and not self.stop.is_set():
                path = queue.popleft()
                serving = self.pick(path)
                if serving is None:
                    if not self.stop.is_set():
                        self.nowhere(path)
                    continue
                before = self.already(self.wanted[path])
                future = fetchers.submit(self.fetch_one, path, serving)
                fetching[future] = (path, serving, before)
            if self.stop.is_set():
                queue.clear()
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > GRACE:
                    return
            running: list[Future[Any]] = [*fetching, *hashing]
            for future_done in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                if future_done in fetching:
                    path, serving, before = fetching.pop(future_done)
                    error = future_done.exception()
                    if error is None:
                        job = hashers.submit(self.hash_one, path)
                        hashing[job] = (path, serving)
                    elif self.failed(path, serving, error, self.already(self.wanted[path]) > before):
                        queue.append(path)
                else:
                    path, serving = hashing.pop(future_done)
                    error = future_done.exception()
                    if error is not None:
                        again = self.failed(path, serving, error, True)
                    else:
                        again = not self.judged(path, serving, *future_done.result())
                    if again and not self.stop.is_set():
                        queue.append(path)

    def fetch_one(self, path: str, serving: Serving) -> None:
        """In a worker: complete the part of a file."""
        self.stop.wait(serving.pauses.pop(path, 0.0))
        assert serving.listing is not None
        remote = serving.listing[path]
        if remote.size is None:
            remote = remote._replace(size=self.wanted[path].size)
        self.wanted[path] = self.wanted[path].served_by(serving.source, remote)
        part = ws.Part(self.part_path(self.wanted[path]), serving.meter, self.stop)
        self.progress.note = f"{path} from {serving.source.name}"
        serving.source.fetch(remote, part)

    def hash_one(self, path: str) -> tuple[vw.Entry, str, str]:
        """In a worker: flush a complete part to the disk and hash it, while others download."""
        part = self.part_path(self.wanted[path])
        flush(part)
        entry = entry_of(path, part)
        return entry, *digests(entry, self.wanted[path])

    def failed(self, path: str, serving: Serving, error: BaseException, moved: bool) -> bool:
        """A fetch ended with an error; True if the file is to be tried again, here or elsewhere."""
        if isinstance(error, ws.Stopped):
            return False
        print(f"{path}: {ws.plain(error)}", file=sys.stderr, flush=True)
        if isinstance(error, ws.NotThere):
            serving.cannot[path] = str(error)
        elif isinstance(error, ws.Refused):
            serving.why, serving.fix = str(error), error.fix
        elif isinstance(error, ws.BadBody):
            return not self.reject(path, serving, None, str(error))
        elif isinstance(error, ws.Transient):
            if moved:
                serving.stuck[path] = 0
            serving.stuck[path] = serving.stuck.get(path, 0) + 1
            after = error.after or 0.0
            pause = max(min(2.0 ** serving.stuck[path] / 2, 15.0), after)
            silent = time.monotonic() - serving.meter.last
            if after > self.params.patience:
                serving.why = f"{error} (it asks to wait {after:.0f} s)"
                serving.fix = "run it again when that time is over (it goes on), or name another source"
            elif silent + pause > self.params.patience + after:
                serving.why = f"{error} (and no byte for {silent:.0f} s)"
                serving.fix = "check the network, the endpoint and the proxy; then run it again: it goes on"
            elif serving.stuck[path] >= STUCK and silent < pause:  # others come; else patience decides
                serving.cannot[path] = f"{STUCK} failures in a row: {error}"
            serving.pauses[path] = pause
        elif isinstance(error, OSError):
            id, fix = disk_problem(error)
            self.problem(id, path, ws.plain(error), fix)
            self.stop.set()
            return False
        else:
            raise error
        return not self.stop.is_set()

    def judged(self, path: str, serving: Serving, entry: vw.Entry, sha256: str, git: str) -> bool:
        """A file is complete and hashed: into the model's folder with it, or to the rejected ones."""
        wanted = self.wanted[path]
        if not wanted.accepts(entry.size, sha256, git):
            expected = wanted.sha256 or f"Git blob {wanted.git_sha1}"
            why = f"served {entry.size} bytes with SHA-256 {sha256}, wanted {expected}"
            self.reject(path, serving, sha256, why)
            return False
        target = os.path.join(self.params.dest, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(entry.full, target)
        os.unlink(entry.full + ".of")
        serving.served.append(path)
        serving.served_bytes += entry.size
        self.stamps.put(entry, sha256)
        self.keep_stamps()
        return True

    def reject(self, path: str, serving: Serving, sha256: str | None, why: str) -> bool:
        """Set a wrong copy aside; True if that was the last attempt, and the run stops."""
        part = self.part_path(self.wanted[path])
        kept_at = None
        if os.path.lexists(part):
            serving.meter.lost(os.path.getsize(part) if os.path.exists(part) else 0)
            kept_at = self.set_aside(part, path, (sha256 or "refused")[:12])
        record = {
            "file": path,
            "source": serving.source.name,
            "sha256": sha256,
            "why": why,
            "kept_at": kept_at,
        }
        self.rejected.append(record)
        history = self.failures.setdefault(path, [])
        history.append(record)
        print(f"rejected {path} from {serving.source.name}: {why}", file=sys.stderr, flush=True)
        if len(history) >= ATTEMPTS:
            told = "; ".join(f"{h['source']}: {h['why']}" for h in history)
            fix = "compare the sources' listings with the manifest; the wrong copies are kept for a look"
            self.problem("file.rejected", path, f"{ATTEMPTS} wrong copies: {told}", fix)
            self.stop.set()
            return True
        if (
            len(history) == ATTEMPTS - 1
        ):  # twice wrong here: the last attempt goes to another, if there is one
            serving.cannot[path] = why
            if self.pick(path) is None:
                del serving.cannot[path]
        return False

    def nowhere(self, path: str) -> None:
        """No source can serve this file: say what each one said."""
        told = [f"{s.source.name}: {s.cannot.get(path) or s.why}" for s in self.servings]
        fix = "; ".join(sorted({s.fix for s in self.servings if s.fix}))
        fix = fix or "add a source that has it, or correct the manifest or the revision"
        self.problem("file.nowhere", path, "; ".join(told) or "no source is given", fix)

    # ---------------------------------------------------------------------------------------- the end

    def verify(self) -> dict[str, Any]:
        """The whole model, as verify_weights.py sees it; hashes come from the stamps of this run."""
        stamp = self.params.stamp
        if stamp is None:
            stamp = os.path.join(self.work, "stamp.json")
            self.stamps.path = stamp
            self.stamps.save()
        manifest = self.params.manifest
        if manifest is None and self.wanted and all(w.sha256 for w in self.wanted.values()):
            manifest = os.path.join(self.work, "published.sha256")
            vw.write_atomically(
                manifest, vw.manifest_text({p: w.sha256 or "" for p, w in self.wanted.items()})
            )
        linked = any(s.get("how") == "symlink" for s in self.params.sources)
        p = self.params
        result = vw.verify(
            vw.Params(
                p.dest,
                manifest=manifest,
                stamp=stamp,
                write_manifest=p.write_manifest,
                threads=p.threads,
                follow_links=linked,
                ignore=self.ignore,
                shards=p.shards,
                files=p.files,
                bytes=p.bytes,
                bytes_within=p.bytes_within,
            ),
            "json",
        )
        result["manifest"] = p.manifest
        self.notes += result["notes"]
        return result

    def seal(self) -> None:
        """Files and folders read-only, for everyone to read whatever the umask was."""
        try:
            for path in self.wanted:
                full = os.path.join(self.params.dest, path)
                if self.ours(path) and not ws.foreign(full):
                    os.chmod(full, 0o444)
            for folder, _, _ in os.walk(self.params.dest):
                os.chmod(folder, 0o555)
        except OSError as e:  # another user's files, or a file system without modes
            self.notes.append(f"not everything could be made read-only: {ws.plain(e)}")

    def unseal(self) -> None:
        """Let finished files be moved into the folders of a model that an earlier run had closed."""
        for folder, _, _ in os.walk(self.params.dest):
            if not os.stat(folder).st_mode & stat.S_IWUSR:
                os.chmod(folder, 0o755)


def listing(params: Params, stop: threading.Event) -> dict[str, Any]:
    """What each source has, and with hash_small the SHA-256 of small files that nobody publishes."""
    home = tempfile.mkdtemp(prefix="rackwright-list-")
    ws.quiet_clients(home)
    fetch = Fetch(params._replace(dest=os.path.join(home, "model")), stop)
    answers = []
    try:
        for serving in fetch.servings:
            files: dict[str, dict[str, Any]] = {}
            if fetch.ready(serving) and serving.listing is not None:
                for path, remote in sorted(serving.listing.items()):
                    if fetch.ignored(path):
                        continue
                    sha256 = remote.sha256
                    if sha256 is None and (remote.size or 0) <= params.hash_small > 0:
                        sha256 = hashed(fetch, serving, remote)
                    files[path] = {"size": remote.size, "sha256": sha256, "git_sha1": remote.git_sha1}
            answers.append({**serving.to_json(), "files": files})
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {"ok": bool(answers) and all(a["files"] for a in answers), "sources": answers}


def hashed(fetch: Fetch, serving: Serving, remote: ws.Remote) -> str | None:
    """The SHA-256 of one small file, fetched for it; None if it cannot be had or is not what is listed."""
    wanted = Wanted(remote.path, remote.size, None, remote.git_sha1)
    part = ws.Part(fetch.part_path(wanted), serving.meter, fetch.stop)
    for _ in range(ATTEMPTS):
        try:
            serving.source.fetch(remote, part)
        except ws.Transient:
            fetch.stop.wait(1)
            continue
        except (ws.NotThere, ws.Refused, ws.BadBody) as e:
            serving.cannot[remote.path] = str(e)
            return None
        sha256, git = digests(entry_of(remote.path, part.path), wanted)
        os.unlink(part.path)
        if wanted.accepts(remote.size or 0, sha256, git):
            return sha256
        serving.cannot[remote.path] = f"what it serves is not the Git blob {remote.git_sha1} that it lists"
    return None


def look(params: Params, stop: threading.Event) -> dict[str, Any]:
    """A model beside which this user may write nothing: it is whole as it is, or what is missing is named."""
    work = tempfile.mkdtemp(prefix="rackwright-look-")
    try:
        return Fetch(params, stop, work).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(params: Params, stop: threading.Event) -> dict[str, Any]:
    """Fetch or list; the result document."""
    if params.mode == "list":
        return listing(params, stop)
    real = params._replace(dest=os.path.realpath(params.dest))  # one lock, by whichever link it is reached
    parent, name = os.path.split(real.dest)
    with ExitStack() as stack:
        try:
            stack.enter_context(Lock(os.path.join(parent, WORK, f"{name}.lock")))
        except OSError as e:
            if e.errno not in NO_RIGHT or not os.path.isdir(real.dest):
                raise
            return look(real, stop)
        except Locked as e:
            fix = "wait for it, or end it first"
            problem = {"id": "fetch.running", "file": params.dest, "what": str(e), "fix": fix}
            return {"ok": False, "dest": params.dest, "problems": [problem]}
        result = Fetch(real, stop).run()
    try:
        os.rmdir(os.path.join(parent, WORK))
    except OSError:
        pass  # parts of this or another model are in it
    return result


def main(argv: list[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(
        prog="fetch_weights.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stdin", action="store_true", required=True, help="the parameters are JSON on stdin"
    )
    parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        params = params_from(json.load(sys.stdin))
        if params.secrets is not None:
            take_secrets(params.secrets)
        result = run(params, stop)
    except (vw.Usage, json.JSONDecodeError) as e:
        print(f"fetch_weights.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        id, fix = disk_problem(e)
        problem = {"id": id, "file": e.filename or "", "what": ws.plain(e), "fix": fix}
        result = {"ok": False, "problems": [problem]}
    print(json.dumps(result), flush=True)
    if stop.is_set():
        os._exit(0 if result["ok"] else 1)  # workers that sleep inside a client are not waited for
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
