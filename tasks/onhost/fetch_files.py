#!/usr/bin/env python3
"""Have files on this host, each with the SHA-256 that was told beforehand: from a folder here, or by address.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    files    [{"file", "sha256", "bytes" (or null), "urls": [...]}]    required
    dest     folder for them                                          required
    near     folders that may hold them already (a bundle, an upload)
    mirrors  [[prefix, replacement]]: addresses to try first
    offline  true: ask no server

A file gets its name in `dest` only after its hash was right. What came from a broken line is kept as
NAME.part and gone on with; what has a wrong hash is set aside as NAME.rejected and never used.

stdout: {"files": [{"file", "sha256", "bytes", "from"}], "fetched_bytes"} or {"error": {"id", "what", "file",
"fix"}} with exit status 1. Ids: usage (status 2), unreachable, hash_mismatch, disk_full, permission.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from typing import Any, Dict, List, Optional
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BLOCK = 1 << 20
ATTEMPTS = 4
TIMEOUT = 30


class Problem(Exception):
    """Why a file cannot be had, in the words of the answer."""

    def __init__(self, identifier: str, what: str, fix: str, file: Optional[str] = None):
        super().__init__(what)
        self.id, self.what, self.fix, self.file = identifier, what, fix, file

    def document(self) -> Dict[str, Any]:
        """The answer on stdout."""
        return {"error": {"id": self.id, "what": redact(self.what), "file": self.file, "fix": self.fix}}


def redact(text: str) -> str:
    """Credentials in URLs replaced."""
    return re.sub(r"(?<=://)[^/@\s]+(?=@)", "****", text)


def log(line: str) -> None:
    """A line for the log."""
    print(redact(line), file=sys.stderr, flush=True)


class Reporter:
    """Progress in bytes, at most two lines a second."""

    def __init__(self, total: int) -> None:
        self.shown, self.done, self.total = 0.0, 0, total

    def show(self, note: str, more: int = 0) -> None:
        """`more` bytes of the present file beside what is done."""
        if time.monotonic() - self.shown >= 0.5:
            self.shown = time.monotonic()
            state = {
                "phase": "files", "done": self.done + more, "total": max(self.total, self.done + more),
                "unit": "bytes", "note": note,
            }  # fmt: skip
            print("#progress " + json.dumps(state), file=sys.stderr, flush=True)


def sha256_of(path: str) -> str:
    """SHA-256 of a file, in constant memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def settle(part: str, path: str) -> None:
    """A verified file gets its name, on the disk for good."""
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, path)


def download(url: str, part: str, size: Optional[int], report: Reporter) -> None:
    """Bring a URL into `part`, going on where an earlier try ended. OSError when the line breaks."""
    have = os.path.getsize(part) if os.path.exists(part) else 0
    if size is not None and have >= size:
        return
    ask = Request(
        url, headers={"User-Agent": "rackwright", **({"Range": "bytes=%d-" % have} if have else {})}
    )
    try:
        answer = urlopen(ask, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code == 416:  # nothing left to send: the hash will tell
            return
        raise OSError("%s answers %d %s" % (url, error.code, error.reason)) from error
    with answer:
        mode = "ab" if have and answer.status == 206 else "wb"
        have = have if mode == "ab" else 0
        with open(part, mode) as out:
            while True:
                block = answer.read(BLOCK)
                if not block:
                    break
                out.write(block)
                have += len(block)
                report.show(os.path.basename(part)[:-5], have)
        length = answer.headers.get("Content-Length")
        if length is not None and mode == "wb" and have < int(length):
            raise OSError("%s broke off after %d of %s bytes" % (url, have, length))


def bring(one: Dict[str, Any], request: Dict[str, Any], report: Reporter) -> Dict[str, Any]:
    """One file in `dest`, verified. Problem when nobody has it."""
    name, wanted, size = one["file"], one["sha256"], one.get("bytes")
    path = os.path.join(request["dest"], name)
    wrong: List[str] = []

    def good(candidate: str, source: str) -> bool:
        if sha256_of(candidate) == wanted:
            return True
        wrong.append(source)
        log("%s from %s has a wrong SHA-256; not used" % (name, source))
        return False

    if os.path.isfile(path):
        if good(path, path):
            return {"file": name, "sha256": wanted, "bytes": os.path.getsize(path), "from": "here"}
        os.replace(path, path + ".rejected")
    part = path + ".part"
    for folder in request["near"]:
        candidate = os.path.join(folder, name)
        if os.path.isfile(candidate) and good(candidate, candidate):
            shutil.copyfile(candidate, part)
            settle(part, path)
            return {"file": name, "sha256": wanted, "bytes": os.path.getsize(path), "from": folder}
    urls = []
    for url in one.get("urls") or []:
        urls += [new + url[len(old) :] for old, new in request["mirrors"] if url.startswith(old)]
    urls += one.get("urls") or []
    why: List[str] = []
    for url in [] if request["offline"] else urls:
        for attempt in range(ATTEMPTS):
            try:
                download(url, part, size, report)
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) in (28, 122):
                    raise
                why.append("%s: %s" % (url, error))
                log(why[-1])
                if " answers 4" in str(error):
                    break
                time.sleep(min(8, 2**attempt))
                continue
            if not os.path.exists(part):
                break
            if good(part, url):
                settle(part, path)
                report.done += os.path.getsize(path)
                return {"file": name, "sha256": wanted, "bytes": os.path.getsize(path), "from": url}
            os.replace(part, path + ".rejected")
            break
    if wrong:
        what = "%s is not the file that the recipe names (SHA-256 %s): %s" % (name, wanted, ", ".join(wrong))
        raise Problem(
            "hash_mismatch",
            what,
            "find out who serves it; put the right file into %s" % request["dest"],
            path,
        )
    fix = "make one of its addresses reachable (url_mirrors), or put the file into %s" % request["dest"]
    raise Problem("unreachable", "%s cannot be had: %s" % (name, "; ".join(why[-2:]) or "offline"), fix, name)


def parse_request(text: str) -> Dict[str, Any]:
    """Check the parameters; a mistake is a Problem with id "usage"."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Problem("usage", "stdin is not JSON: %s" % error, "see --help") from error
    known = {"files", "dest", "near", "mirrors", "offline"}
    if not isinstance(given, dict) or set(given) - known or not given.get("dest"):
        raise Problem("usage", "an object with files and dest is needed", "see --help")
    for one in given.get("files") or [None]:
        fits = isinstance(one, dict) and re.fullmatch(r"[0-9a-f]{64}", str(one.get("sha256")))
        if not fits or not re.fullmatch(r"[\w.+-]+", str(one["file"])):
            raise Problem("usage", "every file needs a plain name and a SHA-256: %r" % (one,), "see --help")
    return {"near": [], "mirrors": [], "offline": False, **given}


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        request = parse_request(sys.stdin.read())
        os.makedirs(request["dest"], exist_ok=True)
        report = Reporter(sum(one.get("bytes") or 0 for one in request["files"]))
        rows = [bring(one, request, report) for one in request["files"]]
    except Problem as problem:
        print(json.dumps(problem.document()))
        return 2 if problem.id == "usage" else 1
    except OSError as error:
        kind = "disk_full" if error.errno in (28, 122) else "permission"
        fix = "free space there and run again" if kind == "disk_full" else "let this user write there"
        print(json.dumps(Problem(kind, str(error), fix, error.filename).document()))
        return 1
    print(json.dumps({"files": rows, "fetched_bytes": report.done}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
