#!/usr/bin/env python3
"""Measure from this host which of several servers answers fastest; short, bounded, nothing is kept.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    kinds    {KIND: {"probe": PATH, "candidates": [BASE, ...], "holds": TEXT}}    required
    bytes    how much of each answer is read at most (default 262144)
    seconds  deadline of all answers (default 6)

An answer counts when `holds` is in what was read of it: a network's login page is fast, and no package index.
Every candidate is asked at the same time. The first of a kind is its own server: another one is chosen only
when that does not answer, or when the other is more than `MARGIN` times faster.

stdout: {"chosen": {KIND: BASE or null}, "measured": {KIND: [{"base", "ok", "seconds", "why"}]}}; exit status
0 also when nothing answers: what that means is for others to say.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.client import HTTPException
from typing import Any, Dict, List, Optional
from urllib.request import Request, urlopen

try:
    from .shared import redact
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import redact  # type: ignore[import-not-found,no-redef]

MARGIN = 1.5


def measure(row: Dict[str, Any], one: Dict[str, Any], size: int, deadline: float) -> None:
    """Note in `row` the seconds until `size` bytes (or the whole answer) of one server were here."""
    began = time.monotonic()
    try:
        ask = Request(row["base"] + one["probe"], headers={"User-Agent": "rackwright"})
        with urlopen(ask, timeout=deadline) as answer:
            content, length = b"", answer.headers.get("Content-Length")
            most = size if length is None else min(size, int(length))
            while len(content) < most:
                block = answer.read1(min(most - len(content), 32768))
                if not block:
                    break
                content += block
                row["why"] = "only %d bytes in %.0f s" % (len(content), deadline)
        if one["holds"].encode() in content:
            row.update(ok=True, seconds=round(time.monotonic() - began, 3), why=None)
        else:
            row["why"] = "another page answers: %s" % content[:60].decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        row["why"] = redact(str(error))[:200]


def measure_all(kinds: Dict[str, Any], size: int, deadline: float) -> Dict[str, List[Dict[str, Any]]]:
    """Every candidate's row, by kind, when all have answered or the time is over: nobody is waited for."""
    rows: Dict[str, List[Dict[str, Any]]] = {kind: [] for kind in kinds}
    threads = []
    for kind, one in kinds.items():
        for base in one["candidates"]:
            why = "no answer in %.0f s" % deadline
            row: Dict[str, Any] = {"base": base, "ok": False, "seconds": None, "why": why}
            rows[kind].append(row)
            threads.append(threading.Thread(target=measure, args=(row, one, size, deadline), daemon=True))
    ends = time.monotonic() + deadline
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    # a late answer changes nothing any more
    return {kind: [dict(row) for row in found] for kind, found in rows.items()}


def choose(rows: List[Dict[str, Any]]) -> Optional[str]:
    """The base to use: the first, unless it does not answer or another one is clearly faster."""
    good = [row for row in rows if row["ok"]]
    if not good:
        return None
    best = min(good, key=lambda row: row["seconds"])
    first = rows[0]
    if first["ok"] and first["seconds"] <= best["seconds"] * MARGIN:
        return str(first["base"])
    return str(best["base"])


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        request = json.loads(sys.stdin.read())
        kinds = {
            str(kind): {"probe": str(one["probe"]), "holds": str(one.get("holds", "")),
                        "candidates": [str(base) for base in one["candidates"]]}
            for kind, one in request["kinds"].items()
        }  # fmt: skip
        size, deadline = int(request.get("bytes", 262144)), float(request.get("seconds", 6))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(json.dumps({"error": {"id": "usage", "what": str(error), "file": None, "fix": "see --help"}}))
        return 2
    measured = measure_all(kinds, size, deadline)
    print(
        json.dumps(
            {"chosen": {kind: choose(found) for kind, found in measured.items()}, "measured": measured}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
