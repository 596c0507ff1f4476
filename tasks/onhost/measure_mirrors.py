#!/usr/bin/env python3
"""Measure from this host which of several servers answers fastest; short, bounded, nothing is kept.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    kinds    {KIND: {"probe": PATH, "candidates": [BASE, ...]}}    required
    bytes    how much of each answer is read at most (default 262144)
    seconds  deadline of one answer (default 6)

Every candidate is asked at the same time. The first of a kind is its own server: another one is chosen only
when that does not answer, or when the other is more than `MARGIN` times faster.

stdout: {"chosen": {KIND: BASE or null}, "measured": {KIND: [{"base", "ok", "seconds", "why"}]}}; exit status
0 also when nothing answers: what that means is for others to say.
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional
from urllib.request import Request, urlopen

MARGIN = 1.5


def redact(text: str) -> str:
    """Credentials in URLs replaced."""
    return re.sub(r"(?<=://)[^/@\s]+(?=@)", "****", text)


def measure(base: str, probe: str, size: int, deadline: float) -> Dict[str, Any]:
    """Seconds until `size` bytes (or the whole answer) of one server were here."""
    began = time.monotonic()
    row: Dict[str, Any] = {"base": base, "ok": False, "seconds": None, "why": None}
    try:
        ask = Request(base + probe, headers={"User-Agent": "rackwright"})
        with urlopen(ask, timeout=deadline) as answer:
            left = size
            while left > 0:
                block = answer.read(min(left, 32768))
                if not block:
                    break
                left -= len(block)
                if time.monotonic() - began > deadline:
                    raise OSError("only %d bytes in %.0f s" % (size - left, deadline))
        row.update(ok=True, seconds=round(time.monotonic() - began, 3))
    except (OSError, ValueError) as error:
        row["why"] = redact(str(error))[:200]
    return row


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
        kinds = request["kinds"]
        size, deadline = int(request.get("bytes", 262144)), float(request.get("seconds", 6))
        asked = [(kind, base) for kind, one in kinds.items() for base in one["candidates"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(json.dumps({"error": {"id": "usage", "what": str(error), "file": None, "fix": "see --help"}}))
        return 2
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
        rows = list(pool.map(lambda pair: measure(pair[1], kinds[pair[0]]["probe"], size, deadline), asked))
    measured: Dict[str, List[Dict[str, Any]]] = {kind: [] for kind in kinds}
    for (kind, _), row in zip(asked, rows):
        measured[kind].append(row)
    print(
        json.dumps(
            {"chosen": {kind: choose(found) for kind, found in measured.items()}, "measured": measured}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
