"""What a report's page shows of a benchmark: a table of medians with their spread, and charts.

Pure but for the drawing, which `report_charts` does. Evidence may be of any shape: what is not a number or
not where it should be is left out, and nothing raises on it. The shape is described in `docs/benchmark.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks.report_charts import Bar, NoLibrary, Point, bars, lines
from tasks.report_values import dict_of, number_of, text_of

MOST_CASES = 12
MOST_GPUS = 8
# The table's columns: figure, and the key of its heading.
COLUMNS = (
    ("output_tokens_per_second", "tokens"),
    ("output_tokens_per_second_per_gpu", "tokens_gpu"),
    ("ttft_p50_ms", "ttft_p50"),
    ("ttft_p99_ms", "ttft_p99"),
    ("tpot_p50_ms", "tpot_p50"),
    ("itl_p99_ms", "itl_p99"),
    ("joules_per_output_token", "joules"),
)
PERCENTILES = ("p50", "p95", "p99")
# Charts of one mode: name, and the figure's stem.
LATENCIES = (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2el", "e2el"))
# Charts of all modes, when there are several: name, figure, unit.
BESIDE = (("ttft_modes", "ttft_p50_ms", "ms"), ("tpot_modes", "tpot_p50_ms", "ms"))
# Charts over time: name, field of a GPU's sample, unit, what one of it is.
GPU_CURVES = (
    ("memory", "memory_mib", "GiB", 1 / 1024),
    ("power", "power_w", "W", 1.0),
    ("use", "use_percent", "%", 1.0),
    ("clock", "clock_mhz", "MHz", 1.0),
)
# Charts of a promotion: name, field of its rows, unit.
PROMOTED = (("promoted_tokens", "tokens_per_second", "tokens/s"), ("promoted_ttft", "ttft", "s"))
ENGINE_CURVES = (("queue", ("running", "waiting"), "", 1.0), ("kv", ("kv_usage",), "%", 100.0))

Json = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A median and the range of its runs."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class BenchRow:
    """One case in one mode. `cells` are in the order of the view's columns."""

    case: str
    mode: str
    counted: int
    cells: list[Cell | None]


@dataclass(frozen=True)
class Case:
    """One case with everything about it: all figures, the command, and why runs do not count."""

    name: str
    figures: list[tuple[str, Cell]]
    command: list[Any]
    reasons: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Key:
    """One entry of a legend: the place of its colour, its name, and the highest value of a curve."""

    place: int
    name: str
    peak: float | None = None


@dataclass(frozen=True)
class Chart:
    """A chart: its name in the texts, its unit, its SVG and its legend. `shades` colours one hue."""

    name: str
    unit: str
    svg: str
    keys: list[Key]
    shades: bool = False


@dataclass(frozen=True)
class Wanted:
    """An expected figure beside the measured one."""

    case: str
    metric: str
    value: float
    measured: float | None
    ratio: float | None
    source: str


@dataclass(frozen=True)
class Bench:
    """One benchmark's section. `told` are short facts about it: a text's key and a value."""

    verdict: str
    why: str
    started: str
    told: list[tuple[str, str]]
    columns: list[str]
    rows: list[BenchRow]
    several: bool
    cases: list[Case]
    expected: list[Wanted]
    charts: list[Chart]
    drawn: bool


def bench_of(value: Any) -> Bench | None:
    """The view of a report's `bench`; None where it holds no cases."""
    doc = dict_of(value)
    cases = _cases(doc)
    if not cases:
        return None
    docs = [doc, *[one for one in _list(doc.get("beside")) if _cases(one)]]
    modes = _modes(docs)
    figures = [
        (figure, key)
        for figure, key in COLUMNS
        if any(_cell(case, figure) for one in docs for case in _cases(one))
    ]
    rows = [
        BenchRow(
            _name(case), mode, int(_number(case.get("counted")) or 0), [_cell(case, f) for f, _ in figures]
        )
        for mode, one in zip(modes, docs, strict=True)
        for case in _cases(one)
    ]
    order = {_name(case): place for place, case in enumerate(cases)}
    try:
        charts, drawn = _charts(docs, modes), True
    except NoLibrary:
        charts, drawn = [], False
    return Bench(
        verdict=_text(doc.get("verdict")),
        why=_text(doc.get("why")),
        started=_text(doc.get("started")),
        told=[(key, text) for key, text in _told(doc) if text],
        columns=[key for _, key in figures],
        rows=sorted(rows, key=lambda row: order.get(row.case, len(order))),
        several=len(docs) > 1,
        cases=[_case(case) for case in cases],
        expected=[row for item in _list(doc.get("expected")) if (row := _wanted(item))],
        charts=charts,
        drawn=drawn,
    )


def promotion_charts(promotion: Any) -> list[Chart]:
    """Both modes of a promotion beside each other, by concurrency; none where only one was measured."""
    found = dict_of(promotion)
    columns = [(found.get(key), word) for key, word in (("safe", "safe"), ("candidate", "candidate"))]
    names = _apart([_label(dict_of(column).get("mode") or word) for column, word in columns])
    measured: dict[str, dict[int, Json]] = {}
    for name, (column, _) in zip(names, columns, strict=True):
        rows = _list(dict_of(column).get("bench"))
        by = {int(n): row for row in rows if (n := _number(row.get("concurrency")))}
        if by:
            measured[name] = by
    if len(measured) < 2:
        return []
    levels = sorted({level for by in measured.values() for level in by})[:MOST_CASES]
    charts = []
    for name, key, unit in PROMOTED:
        series = {
            mode: [_bar(_number(by.get(level, {}).get(key))) for level in levels]
            for mode, by in measured.items()
        }
        try:
            charts += _bars(name, unit, [f"C={level}" for level in levels], series)
        except NoLibrary:
            return []
    return charts


def _charts(docs: list[Json], modes: list[str]) -> list[Chart]:
    doc = docs[0]
    cases = sorted(_cases(doc), key=_order)[:MOST_CASES]
    labels = [_label(_name(case)) for case in cases]

    def by_mode(figure: str) -> dict[str, list[Bar | None]]:
        found = [{_name(case): case for case in _cases(one)} for one in docs]
        return {
            mode: [_bar_of(_cell(by.get(_name(case), {}), figure)) for case in cases]
            for mode, by in zip(modes, found, strict=True)
        }

    charts = _bars("throughput", "tokens/s", labels, by_mode("output_tokens_per_second"))
    if len(docs) > 1:
        for name, figure, unit in BESIDE:
            charts += _bars(name, unit, labels, by_mode(figure))
    for name, stem in LATENCIES:
        series = {
            share: [_bar_of(_cell(case, f"{stem}_{share}_ms")) for case in cases] for share in PERCENTILES
        }
        charts += _bars(name, "ms", labels, series, shades=True)
    runs = _timeline(doc)
    for name, field, unit, factor in GPU_CURVES:
        curves = {f"GPU {gpu}": _curve(runs, _of_gpu(gpu, field), factor) for gpu in _gpus(runs)[:MOST_GPUS]}
        charts += _lines(name, unit, curves)
    for name, fields, unit, factor in ENGINE_CURVES:
        charts += _lines(name, unit, {key: _curve(runs, _of_engine(key), factor) for key in fields})
    return charts


def _bars(
    name: str, unit: str, labels: list[str], series: dict[str, list[Bar | None]], *, shades: bool = False
) -> list[Chart]:
    """The chart, or none where it would be empty."""
    filled = {key: row for key, row in series.items() if any(row)}
    if not filled or not labels:
        return []
    keys = [Key(place, key) for place, key in enumerate(filled)]
    return [Chart(name, unit, bars(labels, filled, unit), keys, shades)]


def _lines(name: str, unit: str, curves: dict[str, list[Point]]) -> list[Chart]:
    """The chart with the highest value of each curve, or none where no curve has two values."""
    values = {key: [y for _, y in points if y is not None] for key, points in curves.items()}
    filled = {key: curves[key] for key, found in values.items() if len(found) > 1}
    if not filled or not any(max(values[key]) for key in filled):
        return []
    keys = [Key(place, key, max(values[key])) for place, key in enumerate(filled)]
    return [Chart(name, unit, lines(filled), keys)]


def _timeline(doc: Json) -> list[list[tuple[float, Json]]]:
    """Samples of every run, with seconds since the first of them."""
    runs = []
    for run in [run for case in _cases(doc) for run in _list(case.get("runs"))]:
        began = _moment(run.get("started"))
        samples = [
            (began + at, one)
            for one in _list(run.get("samples"))
            if (at := _number(one.get("at"), least=-1e9)) is not None
        ]
        if samples:
            runs.append(samples)
    runs.sort(key=lambda run: run[0][0])
    first = runs[0][0][0] if runs else 0.0
    return [[(at - first, one) for at, one in run] for run in runs]


def _curve(
    runs: list[list[tuple[float, Json]]], value_of: Callable[[Json], float | None], factor: float
) -> list[Point]:
    """One value over all runs; the line breaks between them."""
    points: list[Point] = []
    for run in runs:
        for at, one in run:
            value = value_of(one)
            points.append((round(at, 1), None if value is None else round(value * factor, 3)))
        points.append((round(run[-1][0], 1), None))
    return points[:-1]


def _of_gpu(gpu: int, field: str) -> Callable[[Json], float | None]:
    return lambda one: next(
        (_number(row.get(field)) for row in _list(one.get("gpus")) if row.get("gpu") == gpu), None
    )


def _of_engine(field: str) -> Callable[[Json], float | None]:
    return lambda one: _number(one.get(field))


def _gpus(runs: list[list[tuple[float, Json]]]) -> list[int]:
    found = {row.get("gpu") for run in runs for _, one in run for row in _list(one.get("gpus"))}
    return sorted(gpu for gpu in found if isinstance(gpu, int) and not isinstance(gpu, bool))


def _told(doc: Json) -> list[tuple[str, str]]:
    """What the figures depend on, in few words."""
    engine, gpus = dict_of(doc.get("engine")), dict_of(doc.get("gpus"))
    names = [_text(name) for name in gpus.get("names") or []] if isinstance(gpus.get("names"), list) else []
    counted = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    driver = _text(gpus.get("driver"))
    label, version = _text(engine.get("label")), _text(doc.get("engine_version"))
    return [
        ("mode", _text(doc.get("mode"))),
        ("engine", label if not version or version in label else f"{label} {version}".strip()),
        ("gpus", ", ".join(filter(None, (counted, f"driver {driver}" if driver else "")))),
        ("client", _text(doc.get("client"))),
        ("runs", _text(doc.get("runs"))),
        ("seed", _text(doc.get("seed"))),
    ]


def _case(case: Json) -> Case:
    median = dict_of(case.get("median"))
    command = case.get("command")
    runs = _list(case.get("runs"))
    return Case(
        name=_name(case),
        figures=[(_text(name), cell) for name in list(median)[:60] if (cell := _cell(case, name))],
        command=command[:100] if isinstance(command, list) else [],
        reasons=[
            _text(why) for run in runs if run.get("valid") is not True for why in _texts(run.get("why"))
        ][:20],
        notes=list(dict.fromkeys(_text(note) for run in runs for note in _texts(run.get("notes"))))[:20],
    )


def _wanted(item: Json) -> Wanted | None:
    value = _number(item.get("value"))
    if value is None:
        return None
    return Wanted(
        case=_text(item.get("case")),
        metric=_text(item.get("metric")),
        value=value,
        measured=_number(item.get("measured")),
        ratio=_number(item.get("ratio")),
        source=_text(item.get("source")),
    )


def _modes(docs: list[Json]) -> list[str]:
    """A name for each document: its mode."""
    return _apart([_label(doc.get("mode") or "?") for doc in docs])


def _apart(labels: list[str]) -> list[str]:
    """Labels in their order, with a number where two are the same (long ones are cut)."""
    names: list[str] = []
    for label in labels:
        number, name = 1, label
        while name in names:
            number, name = number + 1, f"{label} {number + 1}"
        names.append(name)
    return names


def _cell(case: Json, figure: str) -> Cell | None:
    median, spread = dict_of(case.get("median")), dict_of(case.get("spread"))
    value = _number(median.get(figure))
    if value is None:
        return None
    ends = spread.get(figure)
    low, high = (
        (_number(ends[0]), _number(ends[1])) if isinstance(ends, list) and len(ends) == 2 else (None, None)
    )
    return Cell(value, low, high)


def _bar_of(cell: Cell | None) -> Bar | None:
    return Bar(cell.value, cell.low, cell.high) if cell else None


def _bar(value: float | None) -> Bar | None:
    return None if value is None else Bar(value)


def _order(case: Json) -> tuple[float, ...]:
    return tuple(_number(case.get(key)) or 0.0 for key in ("input", "output", "concurrency", "rate"))


def _cases(doc: Json) -> list[Json]:
    return [case for case in _list(doc.get("cases")) if case.get("name")]


def _list(value: Any) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: Any) -> list[Any]:
    return value[:20] if isinstance(value, list) else [value] if value else []


def _name(case: Json) -> str:
    return _text(case.get("name"))


def _text(value: Any) -> str:
    """A short text; nothing for what is none."""
    return "" if isinstance(value, dict | list) else text_of(value, 400)


def _label(value: Any) -> str:
    """A text that may stand in a drawing: short, without characters that XML does not know."""
    return re.sub(r"[^ -\ud7ff\ue000-\ufffd]", "", _text(value))[:28] or "?"


def _number(value: Any, *, least: float = 0.0) -> float | None:
    """The number, exactly as it was, where it is one that can be drawn."""
    number = number_of(value)
    return number if number is not None and least <= number < 1e12 else None  # no comparison holds for NaN


def _moment(value: Any) -> float:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
