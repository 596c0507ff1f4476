#!/usr/bin/env python3
"""Have files on this host, each with the SHA-256 that was told beforehand: from a folder here, or by address.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    files    [{"file", "sha256", "bytes" (or null), "urls": [...]}]    required
    dest     folder for them                                          required
    near     folders that may hold them already (a bundle, an upload)
    mirrors  [[prefix, replacement]]: addresses to try first
    offline  true: ask no server

A file gets its name in `dest` only after its hash was right. What came from a broken line is kept as
NAME.DIGEST.part and gone on with; what has a wrong hash is set aside as NAME.rejected and never used. A
server that asks for patience gets it; one that hardly sends anything makes way for the next address.

stdout: {"files": [{"file", "sha256", "bytes", "from"}], "fetched_bytes"} or {"error": {"id", "what", "file",
"fix"}} with exit status 1. Ids: usage (status 2), unreachable, hash_mismatch, disk_full, permission,
system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from http.client import HTTPException
from typing import Any, Dict, List, Optional
from urllib.error import HTTPError
from urllib.request import Request, urlopen

try:
    from .shared import NO_ROOM, Problem, mirrored, of_the_system, redact, sha256_of
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import NO_ROOM, Problem, mirrored, of_the_system, redact, sha256_of  # type: ignore[import-not-found,no-redef]

BLOCK = 1 << 20
ATTEMPTS = 4
TIMEOUT = 30
# less than this many bytes a second over so many seconds is no line to wait for
SLOW_RATE, SLOW_SECONDS = 1000, 30
LONGEST_WAIT = 60


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


def settle(part: str, path: str) -> None:
    """A verified file gets its name, on the disk for good."""
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, path)


def forget_parts(folder: str, name: str) -> None:
    """Remove what is left of a file, also of others that had its name before."""
    for entry in os.listdir(folder):
        if re.fullmatch(re.escape(name) + r"(\.([0-9a-f]{12}|near))?\.part", entry):
            os.unlink(os.path.join(folder, entry))


class Refused(OSError):
    """A server's word: whether another try is of use, and when."""

    def __init__(self, url: str, error: HTTPError):
        super().__init__("%s answers %d %s" % (url, error.code, error.reason))
        self.final = 400 <= error.code < 500 and error.code not in (408, 425, 429)
        after = error.headers.get("Retry-After", "") if error.headers else ""
        self.wait = min(LONGEST_WAIT, int(after)) if after.isdigit() else None


class Slow(OSError):
    """A line over which a file would take for ever."""


def size_of(path: str) -> int:
    """Bytes of a file; 0 where there is none."""
    return os.path.getsize(path) if os.path.exists(path) else 0


def download(url: str, part: str, name: str, size: Optional[int], report: Reporter) -> bool:
    """Bring a URL into `part`, going on where an earlier try ended. OSError when the line breaks.

    Returns whether bytes that were there before are part of it.
    """
    have = size_of(part)
    if size is not None and have >= size:
        return True
    ask = Request(
        url, headers={"User-Agent": "rackwright", **({"Range": "bytes=%d-" % have} if have else {})}
    )
    try:
        answer = urlopen(ask, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code == 416:  # nothing left to send: the hash will tell
            return True
        raise Refused(url, error) from error
    with answer:
        resumed = bool(have) and answer.status == 206
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        end = size if length is None else have + int(length)
        began, before = time.monotonic(), have
        with open(part, "ab" if resumed else "wb") as out:
            # what is longer than it should be is another file: the hash will tell
            while (end is None or have < end) and (size is None or have <= size):
                block = answer.read1(BLOCK)
                if not block:
                    break
                out.write(block)
                have += len(block)
                report.show(name, have)
                if time.monotonic() - began >= SLOW_SECONDS:
                    if have - before < SLOW_RATE * SLOW_SECONDS:
                        raise Slow("%s sends less than %d bytes a second" % (url, SLOW_RATE))
                    began, before = time.monotonic(), have
        if end is not None and have < end and (size is None or have <= size):
            raise OSError("%s broke off after %d of %d bytes" % (url, have, end))
    return resumed


def bring(one: Dict[str, Any], request: Dict[str, Any], report: Reporter) -> Dict[str, Any]:
    """One file in `dest`, verified. Problem when nobody has it."""
    name, wanted, size = one["file"], one["sha256"], one.get("bytes")
    path = os.path.join(request["dest"], name)
    wrong: List[str] = []

    def refuse(source: str) -> None:
        wrong.append(source)
        log("%s from %s has a wrong SHA-256; not used" % (name, source))

    def had(source: str) -> Dict[str, Any]:
        forget_parts(request["dest"], name)
        return {"file": name, "sha256": wanted, "bytes": os.path.getsize(path), "from": source}

    if os.path.isfile(path):
        if sha256_of(path) == wanted:
            return had("here")
        refuse(path)
        os.replace(path, path + ".rejected")
    for folder in request["near"]:
        candidate, copy = os.path.join(folder, name), path + ".near.part"
        if not os.path.isfile(candidate):
            continue
        try:
            shutil.copyfile(candidate, copy)
        except OSError as error:
            if error.errno in NO_ROOM or error.filename == copy:
                raise
            log("%s cannot be read: %s" % (candidate, error))
            continue
        # the copy is hashed, since that is what gets the name
        if sha256_of(copy) == wanted:
            settle(copy, path)
            return had(folder)
        refuse(candidate)
        os.unlink(copy)
    part = "%s.%s.part" % (path, wanted[:12])
    own = one.get("urls") or []
    urls = [*(near for url in own for near in mirrored(url, request["mirrors"])), *own]
    why: List[str] = []
    for place, url in enumerate([] if request["offline"] else urls):
        most, tries, alone = size_of(part), 0, not os.path.exists(part)
        while tries < ATTEMPTS:
            try:
                alone = not download(url, part, name, size, report) or alone
            except (OSError, ValueError, HTTPException) as error:
                if getattr(error, "errno", None) in NO_ROOM or getattr(error, "filename", None) == part:
                    raise
                why.append("%s: %s" % (url, error))
                log(why[-1])
                if getattr(error, "final", False) or (isinstance(error, Slow) and place + 1 < len(urls)):
                    break
                # a line that breaks again and again brings the file too, as long as each time more is there
                forward = size_of(part) >= most + BLOCK
                most, tries = max(most, size_of(part)), 0 if forward else tries + 1
                if tries < ATTEMPTS:
                    wait = getattr(error, "wait", None)
                    time.sleep(min(8, 2**tries) if wait is None else wait)
                continue
            if not os.path.exists(part):
                break
            if sha256_of(part) == wanted:
                report.done += os.path.getsize(part)
                settle(part, path)
                return had(url)
            if not alone:
                log("%s: what was there before does not go with %s; begun anew" % (name, url))
                os.unlink(part)
                alone = True
                continue
            refuse(url)
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
        print(json.dumps(of_the_system(error).document()))
        return 1
    print(json.dumps({"files": rows, "fetched_bytes": report.done}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
