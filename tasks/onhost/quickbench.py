"""A short benchmark that compares two modes of one engine on one host; not a benchmark of the hardware.

Used by promotion.py. Request:
{"base_url", "model", "key_file", "concurrency": [1, 4], "prompt_tokens": 256, "output_tokens": 64,
"requests": 8, "timeout": 600}. At each concurrency so many streamed requests of fixed length are sent
(`ignore_eos`, temperature 0). The better of two passes counts: what else ran then must not decide.
Result: {"verdict", "why", "rows": [{concurrency, tokens_per_second, ttft, tpot, seconds, failed}]}; times in
seconds, medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any, Callable

try:
    from . import engine_client as ec
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import engine_client as ec  # type: ignore[import-not-found,no-redef]

PASSES = 2


def bench(
    request: dict[str, Any],
    say: Callable[[str, int, int, str, str], None] = lambda *_: None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure every concurrency; `check` may raise to end it early."""
    client = ec.Client(request["base_url"], request["model"], request.get("key_file"))
    count = max(1, int(int(request["prompt_tokens"]) / client.per_word()))
    rounds = [(concurrency, turn) for concurrency in request["concurrency"] for turn in range(PASSES)]
    best: dict[int, dict[str, Any]] = {}
    why = ""
    for number, (concurrency, turn) in enumerate(rounds):
        say("short benchmark", number, len(rounds), "passes", "%d at a time" % concurrency)
        row, problem = _pass(client, request, concurrency, count, turn, check)
        why = why or problem
        old = best.get(concurrency)
        if old is None or row["tokens_per_second"] > old["tokens_per_second"]:
            best[concurrency] = row
    rows = list(best.values())
    return {"verdict": "fail" if why else "pass", "why": why, "rows": rows}


def _pass(
    client: Any, request: dict[str, Any], concurrency: int, count: int, turn: int, check: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    tokens, timeout = int(request["output_tokens"]), float(request.get("timeout", 600))
    total = max(concurrency, int(request["requests"]))
    bodies = []
    for i in range(total):
        prompt = ec.words(100_000 + turn * 10_000 + concurrency * 1000 + i, count)
        bodies.append({**ec.body_of("chat", prompt, tokens), "ignore_eos": True})
    began = time.monotonic()
    answers = ec.send_all(client, bodies, concurrency, timeout, check)
    seconds = time.monotonic() - began
    good = [answer for answer in answers if answer.ok]
    rest = [(a.total - a.first) / (a.tokens - 1) for a in good if a.tokens > 1]
    row = {
        "concurrency": concurrency,
        "tokens_per_second": round(sum(answer.tokens for answer in good) / seconds, 2),
        "ttft": round(statistics.median(answer.first for answer in good), 4) if good else None,
        "tpot": round(statistics.median(rest), 5) if rest else None,
        "seconds": round(seconds, 2),
        "failed": len(answers) - len(good),
    }
    return row, next((answer.why for answer in answers if not answer.ok), "")


def compare(safe: list[dict[str, Any]], fast: list[dict[str, Any]], margin: float) -> str:
    """Why the fast mode is too slow, or "": its throughput at each concurrency; `margin` is a share."""
    by = {row["concurrency"]: row for row in safe}
    for row in fast:
        other = by.get(row["concurrency"])
        if other and row["tokens_per_second"] < (1 - margin) * other["tokens_per_second"]:
            return "%.1f tokens/s at %d requests at a time, %.1f before (a loss of %.0f %% is allowed)" % (
                row["tokens_per_second"],
                row["concurrency"],
                other["tokens_per_second"],
                100 * margin,
            )
    return ""


def better(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of two measurements of one mode the faster row at each concurrency."""
    by = {row["concurrency"]: row for row in first}
    for row in second:
        old = by.get(row["concurrency"])
        if old is None or row["tokens_per_second"] > old["tokens_per_second"]:
            by[row["concurrency"]] = row
    return list(by.values())
