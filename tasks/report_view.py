"""What a report's page shows: evidence of any shape, read once into what the templates expect.

Pure. Any field of the evidence may be missing, null or of the wrong kind; nothing here raises on that.
Long texts and lists are cut, and what was left out is counted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from tasks.report_bench import Bench, Chart, bench_of, promotion_charts
from tasks.report_serving import promotion_shown, promotion_table, startup_shown
from tasks.report_topology import Drawing, drawing_of
from tasks.report_values import dict_of, items_of, number_of, text_of

# What the page shows at most; the JSON beside it has everything.
TEXT_CHARS = 6_000
LOG_LINES = 40
ROWS = 400
PIN_ROWS = 1_000
VALUES = 1_500
CHIPS = 16

_WORST_FIRST = ("fail", "warn", "skipped", "ok")


@dataclass(frozen=True)
class Proof:
    """What acceptance showed, in counts. `ran` is false when there was none."""

    ran: bool
    total: int
    passed: int
    failed: int
    skipped: int
    profile: str
    when: str


@dataclass(frozen=True)
class Step:
    """One row of the timeline; `left` and `width` are its bar, in percent of all steps' time."""

    name: str
    label: str
    status: str
    seconds: float | None
    why: str
    fix: str
    detail: dict[str, Any]
    log: str
    left: float
    width: float


@dataclass(frozen=True)
class Check:
    """One row of acceptance; `evidence` are pairs of a name and a text."""

    id: str
    verdict: str
    title: str
    result: str
    seconds: float | None
    figures: dict[str, Any]
    evidence: list[tuple[str, str]]


@dataclass(frozen=True)
class Note:
    """A finding of preflight, or anything else that needs attention."""

    id: str
    status: str
    summary: str
    observed: str = ""
    expected: str = ""
    fix: str = ""
    reference: str = ""
    kind: str = "finding"
    anchor: str = ""
    log: str = ""


@dataclass(frozen=True)
class Group:
    """Findings with the same first part of their id."""

    name: str
    status: str
    notes: list[Note]
    counts: list[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """One host in the index."""

    host: str
    link: str
    verb: str
    verdict: str
    why: str
    mode: str
    engine: str
    started: str
    seconds: float | None
    proof: Proof


@dataclass(frozen=True)
class Other:
    """Another run on the same host, whose page lies beside this one."""

    verb: str
    link: str
    verdict: str
    started: str


@dataclass
class _Budget:
    """How many values of free-form data the page still has room for."""

    left: int = VALUES


@dataclass(frozen=True)
class More:
    """Stands for what was left out of the page."""

    count: int


@dataclass(frozen=True)
class Host:
    """One host's page."""

    host: str
    verb: str
    verdict: str
    why: str
    tool: str
    schema: str
    json_name: str
    started: str
    seconds: float | None
    as_of: str
    commands: int | float | None
    mode: str
    endpoint: str
    curl: str
    supervisor: str
    recipe: dict[str, str]
    engine: str
    proof: Proof
    attention: list[Note]
    steps: list[Step]
    step_count: int
    unchanged: bool
    total_seconds: float
    groups: list[Group]
    checks: list[Check]
    chips: list[Check]
    facts: dict[str, Any]
    bench: Bench | None
    topology: Any
    drawing: Drawing | None
    promotion: Any
    promotion_rows: list[tuple[str, str, str]]
    promotion_charts: list[Chart]
    startup: Any
    pins: list[dict[str, str]]
    pin_count: int
    more: dict[str, int]
    others: list[Other]


def host_of(data: dict[str, Any], others: list[Other] | None = None) -> Host:
    """What one host's page shows; `others` are the pages of other runs beside it."""
    seconds = number_of(data.get("seconds"))
    started = text_of(data.get("started"))
    steps, total = _steps(data)
    notes = _findings(data)
    checks = [_check(item) for item in items_of(_acceptance(data).get("checks"), "summary")]
    pins = items_of(data.get("pins"), "name")
    recipe = dict_of(data.get("recipe")) or {"name": data.get("recipe")}
    budget = _Budget()
    rows = promotion_table(data)
    modes = set(rows[0]) if rows else set()
    return Host(
        host=text_of(data.get("host")) or "?",
        verb=text_of(data.get("verb")),
        verdict=text_of(data.get("verdict")),
        why=text_of(data.get("why"), TEXT_CHARS),
        tool=text_of(data.get("tool")) or "rackwright",
        schema=text_of(data.get("schema")),
        json_name=json_name(data),
        started=started,
        seconds=seconds,
        as_of=later(started, seconds),
        commands=number_of(data.get("commands")),
        mode=text_of(data.get("mode")),
        endpoint=text_of(data.get("endpoint")),
        curl=text_of(data.get("curl"), TEXT_CHARS),
        supervisor=text_of(data.get("supervisor")),
        recipe={key: text_of(recipe.get(key)) for key in ("name", "summary", "proven", "digest")},
        engine=_engine(data),
        proof=_proof(data),
        attention=_attention(steps, notes, checks)[:ROWS],
        steps=steps[:ROWS],
        step_count=len(steps),
        unchanged=all(step.status == "unchanged" for step in steps),
        total_seconds=total,
        groups=_groups(notes[:ROWS]),
        checks=checks[:ROWS],
        # one that failed is not among those that are left out
        chips=sorted(checks[:ROWS], key=lambda check: check.verdict != "fail")[:CHIPS],
        facts={key: _cut(value, budget) for key, value in list(dict_of(data.get("facts")).items())[:ROWS]},
        bench=bench_of(data.get("bench")),
        topology=_cut(data.get("topology"), budget),
        drawing=drawing_of(data.get("topology")),
        promotion=_cut(
            {key: item for key, item in promotion_shown(data).items() if key not in modes}, budget
        ),
        promotion_rows=rows,
        promotion_charts=promotion_charts(data.get("promotion")),
        startup=_cut(startup_shown(data), budget),
        pins=[
            {key: text_of(pin.get(key)) for key in ("name", "version", "sha256", "source")}
            for pin in pins[:PIN_ROWS]
        ],
        pin_count=len(pins),
        more={
            "steps": max(0, len(steps) - ROWS),
            "findings": max(0, len(notes) - ROWS),
            "checks": max(0, len(checks) - ROWS),
            "pins": max(0, len(pins) - PIN_ROWS),
            "facts": max(0, len(dict_of(data.get("facts"))) - ROWS),
        },
        others=others or [],
    )


def row_of(data: dict[str, Any], folder: str) -> Row:
    """One host of the index, whose report lies in `folder` beside it."""
    return Row(
        host=text_of(data.get("host")) or "?",
        link=f"{quote(folder)}/{page_name(json_name(data))}",
        verb=text_of(data.get("verb")),
        verdict=text_of(data.get("verdict")),
        why=text_of(data.get("why")),
        mode=text_of(data.get("mode")),
        engine=_engine(data),
        started=text_of(data.get("started")),
        seconds=number_of(data.get("seconds")),
        proof=_proof(data),
    )


def other_of(data: dict[str, Any]) -> Other:
    """A run as another run's page links to it."""
    return Other(
        verb=text_of(data.get("verb")),
        link=page_name(json_name(data)),
        verdict=text_of(data.get("verdict")),
        started=text_of(data.get("started")),
    )


def _engine(data: dict[str, Any]) -> str:
    engine = dict_of(data.get("engine")) or {"label": data.get("engine")}
    label, route = text_of(engine.get("label")), text_of(engine.get("route"))
    return f"{label} ({route})" if label and route else label or route


def _acceptance(data: dict[str, Any]) -> dict[str, Any]:
    """Acceptance of this run, else the one that an unchanged step's receipt still vouches for."""
    if dict_of(data.get("acceptance")):
        return dict_of(data["acceptance"])
    for item in items_of(data.get("steps"), "name"):
        if item.get("name") == "acceptance" and item.get("status") == "unchanged":
            return dict_of(dict_of(item.get("detail")).get("result"))
    return {}


def _proof(data: dict[str, Any]) -> Proof:
    acceptance = _acceptance(data)
    verdicts = [text_of(item.get("verdict")) for item in items_of(acceptance.get("checks"), "summary")]
    return Proof(
        ran=bool(acceptance),
        total=len(verdicts),
        passed=verdicts.count("pass"),
        failed=verdicts.count("fail"),
        skipped=verdicts.count("skipped"),
        profile=text_of(acceptance.get("profile")),
        when=text_of(acceptance.get("started")),
    )


def _steps(data: dict[str, Any]) -> tuple[list[Step], float]:
    """The steps with their bars, and the seconds of all of them together."""
    items = items_of(data.get("steps"), "name")
    times = [number_of(item.get("seconds")) for item in items]
    whole = number_of(data.get("seconds"))
    for place, item in enumerate(items):
        if item.get("status") == "running" and times[place] is None and whole is not None:
            # what the run took so far and no other step accounts for
            times[place] = round(max(0.0, whole - sum(seconds or 0 for seconds in times)), 1)
    total = sum(max(0.0, seconds or 0) for seconds in times)
    steps, done = [], 0.0
    for item, seconds in zip(items, times, strict=True):
        share = 100 * max(0.0, seconds or 0) / total if total else 0.0
        left = min(100 * done / total, 99.4) if total else 0.0
        # a step's reason may end in a line with the cure
        why, _, fix = text_of(item.get("why"), TEXT_CHARS).partition("\nFix: ")
        steps.append(
            Step(
                name=text_of(item.get("name")) or "?",
                label=_label(item),
                status=text_of(item.get("status")),
                seconds=seconds,
                why=why,
                fix=fix,
                detail=_cut(_detail(item), _Budget(100)),
                log=_log(item.get("log")),
                left=left,
                width=max(min(share, 100 - left), 0.6) if seconds else 0.0,
            )
        )
        done += max(0.0, seconds or 0)
    return steps, total


def _label(step: dict[str, Any]) -> str:
    """The label without the step's name, which the page shows before it."""
    name, label = text_of(step.get("name")), text_of(step.get("label"))
    label = re.sub(rf"^{re.escape(name)}\b[:\s]*", "", label, flags=re.IGNORECASE)
    return "" if (name, label) == ("summary", "report") else label


def _detail(step: dict[str, Any]) -> dict[str, Any]:
    """What the step found out, without the acceptance result: that has its own section."""
    detail = dict_of(step.get("detail"))
    return {key: item for key, item in detail.items() if "checks" not in dict_of(item)}


def _log(value: Any) -> str:
    """The last lines, as one text."""
    lines = value if isinstance(value, list) else text_of(value, 10 * TEXT_CHARS).splitlines()
    return "\n".join(text_of(line) for line in lines[-LOG_LINES:])


def _check(item: dict[str, Any]) -> Check:
    about, summary, reason = (text_of(item.get(key), TEXT_CHARS) for key in ("about", "summary", "reason"))
    shown = item.get("evidence")
    evidence = shown if isinstance(shown, dict) else {"response": shown}
    figures = dict_of(item.get("figures"))
    return Check(
        id=text_of(item.get("id")),
        verdict=text_of(item.get("verdict")),
        title=about or summary,
        result=reason or (summary if about else ""),
        seconds=number_of(item.get("seconds")),
        figures=_cut(figures, _Budget(50)),
        evidence=[
            (text_of(key), text) for key, value in list(evidence.items())[:10] if (text := _pretty(value))
        ],
    )


def _findings(data: dict[str, Any]) -> list[Note]:
    """Findings of preflight, worst first; an unknown status counts as skipped."""
    notes = []
    for item in items_of(data.get("findings"), "summary"):
        texts = {
            key: text_of(item.get(key), TEXT_CHARS) for key in ("observed", "expected", "fix", "reference")
        }
        id = text_of(item.get("id"))
        notes.append(
            Note(id, text_of(item.get("status")), text_of(item.get("summary")), anchor=f"f-{id}", **texts)
        )
    return sorted(notes, key=lambda note: (_rank(note.status), note.id))


def _rank(status: str) -> int:
    return _WORST_FIRST.index(status if status in _WORST_FIRST else "skipped")


def _groups(notes: list[Note]) -> list[Group]:
    """Groups in the order of their worst finding; `notes` come worst first."""
    groups: dict[str, list[Note]] = {}
    for note in notes:
        groups.setdefault(note.id.split(".", 1)[0] or "?", []).append(note)
    return [
        Group(
            name,
            members[0].status,
            members,
            [
                (status, count)
                for status in _WORST_FIRST
                if (count := sum(n.status == status for n in members))
            ],
        )
        for name, members in groups.items()
    ]


def _attention(steps: list[Step], findings: list[Note], checks: list[Check]) -> list[Note]:
    """Everything a reader must act on, failures before warnings."""
    failed = [_failed_step(step) for step in steps if step.status == "failed"]
    failed += [note for note in findings if note.status == "fail"]
    failed += [
        Note(check.id, "fail", check.title, observed=check.result, kind="check", anchor=f"c-{check.id}")
        for check in checks
        if check.verdict == "fail"
    ]
    return failed + [note for note in findings if note.status == "warn"]


def _failed_step(step: Step) -> Note:
    log = "\n".join(step.log.splitlines()[-12:])
    return Note(step.name, "fail", step.why, fix=step.fix, kind="step", anchor=f"s-{step.name}", log=log)


# Reading what may be anything.


def _pretty(value: Any) -> str:
    """Evidence as text; JSON is indented, also when it came as a text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return text_of(value, TEXT_CHARS)
    if value is None or isinstance(value, str):
        return text_of(value, TEXT_CHARS)
    return text_of(json.dumps(value, indent=2, ensure_ascii=False), TEXT_CHARS)


def _cut(value: Any, budget: _Budget) -> Any:
    """Free-form data with as many values as the budget has left, the rest as `More`."""
    budget.left -= 1
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for key, item in value.items():
            if budget.left <= 0:
                out["…"] = More(len(value) - len(out))
                break
            out[text_of(key)] = _cut(item, budget)
        return out
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            if budget.left <= 0:
                items.append(More(len(value) - len(items)))
                break
            items.append(_cut(item, budget))
        return items
    return text_of(value, TEXT_CHARS) if isinstance(value, str) else value


def later(started: str, seconds: float | None) -> str:
    """When the evidence was written, as an ISO time, or an empty text."""
    try:
        moment = datetime.fromisoformat(started) + timedelta(seconds=seconds or 0)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        return ""


def json_name(data: dict[str, Any]) -> str:
    """The file that the evidence is written to, named after the verb and never outside its folder."""
    verb = re.sub(r"[^a-z0-9-]+", "-", text_of(data.get("verb")).lower()).strip("-")[:40]
    return f"{verb or 'report'}.json"


def page_name(json_file: str) -> str:
    """The page that belongs to a verb's JSON."""
    return "index.html" if json_file == "site.json" else json_file.removesuffix(".json") + ".html"


def folder_name(host: str) -> str:
    """The folder below `reports/` that belongs to a host: its name with only harmless characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip(".-")[:100] or "host"
