"""Warm-up: sends what users will send, so that no user waits for a kernel to compile.

Used by bring_up.py. Request:
{"base_url", "model", "key_file", "concurrency": [1, 4], "prompt_tokens": [32, 1024],
"forms": ["chat", "reasoning", "tool"], "max_tokens": 8, "timeout": 600}. Every form is sent at every length
and concurrency. Result: {"verdict": "pass|fail", "requests", "failed", "seconds", "slowest", "skipped",
"why", "rows": [{form, prompt_tokens, concurrency, seconds}]}.

Kernels are compiled for shapes (vllm issues 46718, 47807, 48809: 10 to 33 s each), which is why lengths and
concurrencies matter and contents do not.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable

try:
    from . import engine_client as ec
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import engine_client as ec  # type: ignore[import-not-found,no-redef]

Say = Callable[[str, int, int, str, str], None]


def nothing(phase: str, done: int, total: int, unit: str, note: str) -> None:
    """A progress that nobody watches."""


def warm_up(
    request: dict[str, Any], say: Say = nothing, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Send every request; `check` may raise to end it early."""
    client = ec.Client(request["base_url"], request["model"], request.get("key_file"))
    tokens, timeout = int(request.get("max_tokens", 8)), float(request.get("timeout", 600))
    began = time.monotonic()
    per_word, context = client.per_word(), client.context()
    rounds, skipped = [], []
    for length in request["prompt_tokens"]:
        # the form's own markup and tools take up to some hundred tokens
        if context is not None and length + tokens + 300 > context and length > 64:
            skipped.append("%d tokens: the context has %d" % (length, context))
            continue
        for form in request["forms"]:
            rounds += [(form, length, concurrency) for concurrency in request["concurrency"]]
    rows: list[dict[str, Any]] = []
    failed, sent, why = 0, 0, ""
    for number, (form, length, concurrency) in enumerate(rounds):
        note = "%s, %d tokens, %d at a time" % (form, length, concurrency)
        say("warm-up requests", number, len(rounds), "rounds", note)
        bodies = [
            ec.body_of(form, ec.words(number * 97 + i + 1, max(1, int(length / per_word))), tokens)
            for i in range(concurrency)
        ]
        started = time.monotonic()
        answers = ec.send_all(client, bodies, concurrency, timeout, check)
        sent += len(answers)
        bad = [answer for answer in answers if not answer.ok]
        failed += len(bad)
        row = {"form": form, "prompt_tokens": length, "concurrency": concurrency}
        rows.append({**row, "seconds": round(time.monotonic() - started, 3)})
        if bad:
            why = why or "%s: %s" % (note, bad[0].why)
            if len(bad) == len(answers) and number and failed >= 3:
                break  # it does not answer any more: what follows would only wait
    slowest = max((row["seconds"] for row in rows), default=0)
    return {
        "verdict": "pass" if rows and not failed else "fail",
        "requests": sent,
        "failed": failed,
        "seconds": round(time.monotonic() - began, 1),
        "slowest": slowest,
        "skipped": skipped,
        "why": why or ("" if rows else "no round fits the context"),
        "rows": rows,
    }
