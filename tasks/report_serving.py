"""What a report's page shows of starts and promotions: the evidence in small, both modes side by side."""

from __future__ import annotations

from typing import Any

from tasks.jobs import in_time
from tasks.report_values import dict_of


def table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of a promotion: what, the safe mode, the faster mode. The first row names the modes."""
    safe, fast = dict_of(result.get("safe")), dict_of(result.get("candidate"))
    rows = [
        ("", str(safe.get("mode") or "safe"), str(fast.get("mode") or "candidate")),
        ("acceptance", _accepted(safe), _accepted(fast)),
    ]
    by_safe, by_fast = _by_concurrency(safe), _by_concurrency(fast)
    for concurrency in sorted({*by_safe, *by_fast}):
        for key, label, unit in (("tokens_per_second", "tokens/s", ""), ("ttft", "first token", " s")):
            cells = [by.get(concurrency, {}).get(key) for by in (by_safe, by_fast)]
            left, right = (f"{cell}{unit}" if cell is not None else "-" for cell in cells)
            rows.append((f"{label} at {concurrency}", left, right))
    told = [in_time(start["seconds"]) if start else "-" for start in (fast.get("trial"), fast.get("start"))]
    rows.append(("start, first then second", "", " then ".join(told)))
    return rows


def promotion_shown(data: dict[str, Any]) -> dict[str, Any]:
    """A promotion for the page; {} where the run had none, or its evidence is damaged."""
    try:
        return _promotion(data)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def promotion_table(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Both modes of a promotion beside each other, their names in the first row; [] as above."""
    try:
        result = dict_of(data.get("promotion"))
        return table(result) if result.get("verdict") else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def startup_shown(data: dict[str, Any]) -> dict[str, Any]:
    """The last start for the page, with the one before it: what kept caches are worth; {} as above."""
    try:
        return _startup(data)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _promotion(data: dict[str, Any]) -> dict[str, Any]:
    result = dict_of(data.get("promotion"))
    if not result.get("verdict"):
        return {}
    (_, safe, fast), *rows = table(result)
    shown: dict[str, Any] = {"verdict": result["verdict"]}
    if result.get("why"):
        shown["why"] = result["why"]
    shown[safe] = {what: left for what, left, _ in rows if left}
    shown[fast] = {what: right for what, _, right in rows}
    late = dict_of(result.get("candidate")).get("compiles_after_warmup")
    if late is not None:
        shown["kernels compiled after the warm-up"] = late
    if result.get("away_seconds") is not None:
        shown["without a service"] = in_time(result["away_seconds"])
    shown["steps"] = {str(name): in_time(seconds) for name, seconds in result.get("steps") or []}
    return shown


def _startup(data: dict[str, Any]) -> dict[str, Any]:
    start = dict_of(data.get("startup"))
    if not isinstance(start.get("seconds"), int | float):
        return {}
    shown: dict[str, Any] = {"took": in_time(start["seconds"])}
    before = dict_of(start.get("before"))
    if isinstance(before.get("seconds"), int | float):
        shown["the one before took"] = in_time(before["seconds"])
    shown["phases"] = {str(name): in_time(seconds) for name, seconds in start.get("phases") or []}
    warm = dict_of(start.get("warmup"))
    if warm:
        shown["warm-up"] = {key: warm[key] for key in ("requests", "failed", "slowest") if key in warm}
    if dict_of(start.get("facts")):
        shown["engine"] = start["facts"]
    return shown


def _accepted(column: dict[str, Any]) -> str:
    found = dict_of(column.get("acceptance"))
    if "checks" in found:
        verdicts = [check.get("verdict") for check in found["checks"]]
        found = {word: verdicts.count(word) for word in ("pass", "fail")}
    return f"{found.get('pass', 0)} passed, {found.get('fail', 0)} failed" if found else "-"


def _by_concurrency(column: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["concurrency"]: row for row in column.get("bench") or []}
