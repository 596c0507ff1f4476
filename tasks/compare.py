"""`rackwright compare A B`: two benchmarks side by side; what lies inside the spread is called noise.

A and B are files (`bench-<time>.json`, or a report's `<verb>.json`), hosts (their newest benchmark), or
HOST/MODE (the newest of that mode). A host whose site keeps its reports elsewhere (`reports = …`) is named by
its folder there. No host is touched.

A figure differs when the ranges of its runs do not meet: with three runs each, two equal engines look
different by chance in one of ten comparisons of one figure (2 of the 20 ways to order six values).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.mistakes import nearest
from tasks.redact import clean

Verdict = Literal["better", "worse", "noise", "single run"]
# Figures that are compared, with whether more is better.
FIGURES: dict[str, bool] = {
    "output_tokens_per_second": True,
    "total_tokens_per_second": True,
    "output_tokens_per_second_per_gpu": True,
    "ttft_p50_ms": False,
    "ttft_p95_ms": False,
    "ttft_p99_ms": False,
    "tpot_p50_ms": False,
    "tpot_p95_ms": False,
    "itl_p99_ms": False,
    "e2el_p50_ms": False,
    "e2el_p95_ms": False,
    "joules_per_output_token": False,
    "acceptance_rate": True,
}
MOST = 1e100  # more is no figure; the ratio of two such figures is still a number
PROTOCOL = ("input", "output", "concurrency", "prompts", "rate")


class NoBenchmark(Exception):
    """What was named holds no benchmark; the message says what would have been right."""


@dataclass(frozen=True)
class Row:
    """One figure of one case in both benchmarks. `change` is b / a - 1; None where `a` is 0."""

    case: str
    figure: str
    a: float
    b: float
    a_spread: tuple[float, float]
    b_spread: tuple[float, float]
    change: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Rows, what else differs between the two, and why some of it may not be compared."""

    rows: list[Row]
    differs: list[tuple[str, str, str]]
    warnings: list[str]


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Two benchmark documents, case by case."""
    theirs = {row["name"]: row for row in b["cases"]}
    rows: list[Row] = []
    warnings = [
        f"{word} does not pass: {doc.get('why') or 'not every run counts'}"
        for word, doc in (("A", a), ("B", b))
        if doc.get("verdict") != "pass"
    ]
    for mine in a["cases"]:
        other = theirs.pop(mine["name"], None)
        if other is None:
            warnings.append(f"only A has the case {mine['name']}")
            continue
        unlike = [key for key in PROTOCOL if mine.get(key) != other.get(key)]
        if unlike:
            warnings.append(f"{mine['name']}: not comparable, {', '.join(unlike)} differ")
            continue
        rows += [row for name in FIGURES if (row := _row(mine, other, name))]
    warnings += [f"only B has the case {name}" for name in theirs]
    if a.get("client") != b.get("client"):
        warnings.append(f"measured with two clients: {a.get('client')} and {b.get('client')}")
    for row in rows:
        if row.figure == "acceptance_rate" and row.verdict in ("better", "worse"):
            warnings.append(f"{row.case}: drafts are accepted at another rate")
    return Comparison(rows, _differs(a, b), warnings)


def _row(mine: dict[str, Any], other: dict[str, Any], name: str) -> Row | None:
    values = [(case["median"].get(name), case["spread"].get(name)) for case in (mine, other)]
    if any(value is None or spread is None for value, spread in values):
        return None
    (x, xs), (y, ys) = values
    verdict: Verdict
    if min(mine.get("counted", 0), other.get("counted", 0)) < 2:
        verdict = "single run"  # one run has no spread, so nothing can be said
    elif xs[0] <= ys[1] and ys[0] <= xs[1]:
        verdict = "noise"
    else:
        verdict = "better" if (y > x) == FIGURES[name] else "worse"
    change = y / x - 1 if x else None
    return Row(mine["name"], name, x, y, (xs[0], xs[1]), (ys[0], ys[1]), change, verdict)


def _differs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What the two were measured on, where it is not the same: it explains the figures."""

    def told(doc: dict[str, Any]) -> dict[str, str]:
        engine, facts, recipe = (_dict(doc.get(key)) for key in ("engine", "facts", "recipe"))
        words = {
            "host": doc.get("host"),
            "model": doc.get("model"),
            "weights": doc.get("weights"),
            "mode": doc.get("mode"),
            "engine": engine.get("label"),
            "engine version": doc.get("engine_version"),
            "recipe": recipe.get("digest"),
            "flags": " ".join(_flags(engine.get("argv"))),
            "cpu": _dict(facts.get("cpu")).get("model"),
            "gpus": json.dumps(doc["gpus"], sort_keys=True) if doc.get("gpus") else None,
            "measured": doc.get("started"),
        }
        return {key: str(value) for key, value in words.items() if value is not None}

    x, y = told(a), told(b)
    return [(key, x.get(key, "-"), y.get(key, "-")) for key in {**x, **y} if x.get(key) != y.get(key)]


def _flags(argv: Any) -> list[str]:
    """The engine's flags without its paths: the words from the first flag on."""
    words = [str(word) for word in argv] if isinstance(argv, list) else []
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[first:]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def load(word: str, reports: Path) -> dict[str, Any]:
    """The benchmark that a word names. Raises NoBenchmark."""
    path = Path(word)
    if path.is_file():
        return read_benchmark(path)
    folder, mode = _folder(word, reports)
    modes = []
    for file in newest_first(folder):
        found = read_benchmark(file)
        if mode in ("", found.get("mode")):
            return found
        modes.append(str(found.get("mode")))
    known = f"; there are: {', '.join(sorted(set(modes)))}" if modes else "; run: rackwright bench INVENTORY"
    raise NoBenchmark(f"no benchmark of {word} in {folder}{known}")


def _folder(word: str, reports: Path) -> tuple[Path, str]:
    """The folder of a host's reports, and the mode that is asked for. Raises NoBenchmark."""
    host, _, mode = word.rpartition("/")
    for name, wanted in ((word, ""), (host, mode)):
        for folder in (reports / name, Path(name)):
            if name and folder.is_dir():
                return folder, wanted
    names = [item.name for item in reports.iterdir() if item.is_dir()] if reports.is_dir() else []
    hint = nearest(word.split("/")[0], names) if names else "no host has reports there"
    raise NoBenchmark(
        f"{word!r} is neither a file nor a host in {reports}; {hint}; "
        "a host with reports elsewhere is named by its folder there"
    )


def newest_first(folder: Path) -> list[Path]:
    """The files of a host's benchmarks."""
    return sorted(folder.glob("bench-*.json"), key=_age, reverse=True)


def _age(path: Path) -> tuple[str, int]:
    """Time of a benchmark from its name, and its number within one second."""
    stamp, _, number = path.stem.removeprefix("bench-").partition("-")
    return stamp, int(number) if number.isdecimal() else 1


def read_benchmark(path: Path) -> dict[str, Any]:
    """The benchmark in a file of its own or in a report. Raises NoBenchmark."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NoBenchmark(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise NoBenchmark(f"{path} cannot be read: it is nested too deep") from None
    if isinstance(found, dict) and isinstance(found.get("bench"), dict):
        found = found["bench"]
    if not isinstance(found, dict) or not isinstance(found.get("cases"), list):
        raise NoBenchmark(f"{path} holds no benchmark")
    for case in found["cases"]:
        if not _whole(_dict(case)):
            name = _dict(case).get("name")
            raise NoBenchmark(f"{path} is damaged: the case {name} has no median and spread of its figures")
    return found


def _whole(case: dict[str, Any]) -> bool:
    """It has a name, and every median is a number with the two ends of its spread."""
    median, spread = case.get("median"), case.get("spread")
    if not isinstance(median, dict) or not isinstance(spread, dict):
        return False
    if not isinstance(case.get("name"), str) or not isinstance(case.get("counted", 0), int):
        return False
    values = [[median[name], *ends] for name in median if isinstance(ends := spread.get(name), list)]
    return len(values) == len(median) and all(len(row) == 3 and all(map(_figure, row)) for row in values)


def _figure(value: Any) -> bool:
    """A number that can be reckoned with: JSON may hold NaN, infinities and integers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST < value < MOST


def text_of(found: Comparison) -> str:
    """The comparison for people."""
    lines = [f"{key}: {_short(x)} -> {_short(y)}" for key, x, y in found.differs]
    lines += [f"! {warning}" for warning in found.warnings]
    for case in dict.fromkeys(row.case for row in found.rows):
        lines += ["", case]
        for row in found.rows:
            if row.case == case:
                both = f"{_range(row.a, row.a_spread):>32}  {_range(row.b, row.b_spread):>32}"
                change = "-" if row.change is None else f"{row.change:+.1%}"
                lines.append(f"  {row.figure.ljust(34)} {both}  {change:>8}  {row.verdict}")
    if not found.rows:
        lines.append("nothing can be compared")
    return "\n".join(lines)


def _range(value: float, spread: tuple[float, float]) -> str:
    return f"{value:.4g} ({spread[0]:.4g} to {spread[1]:.4g})"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def main(words: list[str], reports: Path) -> int:
    """Print the comparison; 0, or 2 when it cannot be made."""
    if len(words) != 2:
        words_needed = "two benchmarks are needed: rackwright compare A B (files, hosts, or HOST/MODE)"
        print(words_needed, file=sys.stderr)
        return 2
    try:
        a, b = (load(word, reports) for word in words)
    except NoBenchmark as error:
        print(clean(f"rackwright compare: {error}"), file=sys.stderr)
        return 2
    print(clean(text_of(compare(a, b))))
    return 0
