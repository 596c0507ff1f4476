"""Findings as text: the table of one host, the one line that follows from it, and a table of many hosts.

Everything here returns text. `width` is the number of columns to keep to; `colour` is for terminals only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence

from tasks.checks.words import plural
from tasks.findings import WORST_FIRST, Finding, Status, worst_first
from tasks.redact import clean
from tasks.terminal import columns, cut

_LABEL: dict[Status, str] = {"fail": "FAIL", "warn": "WARN", "skipped": "skip", "ok": "ok"}
_COLOUR: dict[Status, str] = {"fail": "31;1", "warn": "33;1", "skipped": "2", "ok": "32"}
_TITLE = {
    "recipe": "recipe",
    "gpu": "GPUs",
    "driver": "driver",
    "cuda": "CUDA",
    "docker": "Docker",
    "deep": "deep checks",
    "host": "host",
    "disk": "disks",
    "python": "Python",
    "build": "build tools",
    "net": "network",
}
_ID_WIDTH = 24
_SPACELESS = re.compile("[\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffee]+")
_NARROWEST = 48


def verdict(findings: Sequence[Finding], strict: bool = False) -> Status:
    """What the findings come to: `fail`, `warn` or `ok`. With `strict`, warnings fail."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses or (strict and "warn" in statuses):
        return "fail"
    return "warn" if "warn" in statuses else "ok"


def verdict_line(findings: Sequence[Finding], strict: bool = False) -> str:
    """Ready, ready with warnings, or not ready, in one line."""
    fails = sum(finding.status == "fail" for finding in findings)
    warns = sum(finding.status == "warn" for finding in findings)
    counted = [plural(number, word) for number, word in ((fails, "failure"), (warns, "warning")) if number]
    came_to = verdict(findings, strict)
    if came_to == "fail":
        blocking = " (strict: warnings block)" if not fails else ""
        return f"not ready: {', '.join(counted)}{blocking}"
    return f"ready with {counted[0]}" if came_to == "warn" else "ready"


def render_host(
    name: str,
    findings: Sequence[Finding],
    *,
    strict: bool = False,
    width: int = 100,
    colour: bool = False,
    brief: bool = False,
) -> str:
    """The table of one host: the worst group first and the worst finding first in it, then the verdict.

    What passed takes one line (with `brief` all of it together); what did not says what was seen and wanted,
    how to mend it and who says so.
    """
    width = max(width, _NARROWEST)
    passed = sum(finding.status == "ok" for finding in findings)
    groups: dict[str, list[Finding]] = {}
    for finding in worst_first(list(findings)):
        if brief and finding.status == "ok":
            continue
        groups.setdefault(finding.group, []).append(finding)
    order = list(_TITLE)
    ranked = sorted(
        groups.items(),
        key=lambda item: (
            WORST_FIRST.index(item[1][0].status),
            order.index(item[0]) if item[0] in order else len(order),
        ),
    )
    lines = [name]
    for group, members in ranked:
        lines += ["", f"  {_TITLE.get(group, group)}"]
        for finding in members:
            lines += _finding_lines(finding, width, colour)
    if brief and passed:
        lines += ["", f"  {_painted('ok  ', 'ok', colour)}  {plural(passed, 'check')} passed"]
    came_to = verdict(findings, strict)
    lines += ["", f"{name}: {_painted(verdict_line(findings, strict), came_to, colour)}"]
    return "\n".join(lines)


def render_blocked(
    findings: Sequence[Finding], *, strict: bool = False, width: int = 100, colour: bool = False
) -> str:
    """What stops a deployment: warnings, how much else was found, and at the end what blocks, with its cure.

    With `strict`, warnings block.
    """
    width = max(width, _NARROWEST)
    blocking: set[Status] = {"fail", "warn"} if strict else {"fail"}
    lines: list[str] = []
    for finding in reversed(worst_first(list(findings))):
        if finding.status == "warn" and not strict:
            lines += _finding_lines(finding, width, colour)
    counts = Counter(finding.status for finding in findings)
    passed = f"{plural(counts['ok'], 'check')} passed" if counts["ok"] else ""
    skipped = f"{counts['skipped']} skipped" if counts["skipped"] else ""
    rest = ", ".join(filter(None, (passed, skipped)))
    if rest:
        lines += [f"  {_painted('ok  ', 'ok', colour)}  {rest}; all of them: rackwright preflight INVENTORY"]
    for finding in reversed(worst_first(list(findings))):
        if finding.status in blocking:
            lines += _finding_lines(finding, width, colour)
    return "\n".join(lines)


def _finding_lines(finding: Finding, width: int, colour: bool) -> list[str]:
    label = _painted(f"{_LABEL[finding.status]:4}", finding.status, colour)
    seen = finding.observed if finding.status == "ok" else None
    told = f"{finding.summary}: {seen}" if seen else finding.summary
    indent = 2 + 4 + 2 + _ID_WIDTH + 1
    if indent > width // 2:  # narrow: the text goes below the id
        lines = [f"  {label}  {finding.id}", *_wrapped(told, "      ", "      ", width)]
    else:
        first, *rest = _wrapped(told, " " * indent, " " * indent, width)
        lines = [f"  {label}  {finding.id:{_ID_WIDTH}} {first[indent:]}", *rest]
    if finding.status in ("fail", "warn"):
        rows = (
            ("seen", finding.observed),
            ("wanted", finding.expected),
            ("mend", finding.fix),
            ("source", finding.reference),
        )
        for word, text in rows:
            if text:
                lines += _wrapped(text, f"        {word:7} ", " " * 16, width)
    return lines


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    """Text within the width. Words are never cut: commands and paths must stay whole to be copied.

    Only those of scripts without spaces are: there a line may end after any character.
    """
    lines: list[str] = []
    line, empty = first, True
    for before, word in re.findall(r"(\s*)(\S+)", clean(text)):
        gap = "" if empty else " " * len(before)
        while columns(line + gap + word) > width:
            room = width - columns(line + gap)
            piece = cut(word, room) if _SPACELESS.fullmatch(word) else ""
            if not piece and empty:
                break  # it is longer than a line
            lines.append(f"{line}{gap}{piece}".rstrip())
            line, empty, gap, word = rest, True, "", word[len(piece) :]
        line, empty = f"{line}{gap}{word}", False
    return [*lines, line.rstrip()]


def render_hosts(
    results: Mapping[str, Sequence[Finding]],
    *,
    strict: Container[str] = (),
    width: int = 100,
    colour: bool = False,
) -> str:
    """One line a host, worst first: verdict, counts and what is worst; then one line for all of them.

    `strict` names the hosts on which warnings block.
    """
    width = max(width, _NARROWEST)
    if not results:
        return "no hosts"
    verdicts = {name: verdict(findings, name in strict) for name, findings in results.items()}
    rows = sorted(results.items(), key=lambda item: (WORST_FIRST.index(verdicts[item[0]]), item[0]))
    name_width = max(columns("host"), *(columns(name) for name in results))
    words: dict[Status, str] = {"fail": "not ready", "warn": "warnings", "ok": "ready", "skipped": "?"}
    lines = [f"{'host':{name_width}}  {'verdict':9}  fail  warn  skip  worst"]
    for name, findings in rows:
        counts = [
            sum(finding.status == status for finding in findings) for status in ("fail", "warn", "skipped")
        ]
        worst = worst_first(list(findings))[:1]
        told = (
            f"{worst[0].id}: {clean(worst[0].summary)}"
            if worst and worst[0].status in ("fail", "warn")
            else ""
        )
        head = f"{name}{' ' * (name_width - columns(name))}  "
        numbers = "  ".join(f"{count:4}" for count in counts)
        left = max(12, width - name_width - 33)
        told = told if columns(told) <= left else cut(told, left - 1) + "…"
        came_to = verdicts[name]
        line = f"{head}{_painted(f'{words[came_to]:9}', came_to, colour)}  {numbers}  {told}"
        lines.append(line.rstrip())
    totals = Counter(verdicts.values())
    meanings: dict[Status, str] = {"fail": "not ready", "warn": "ready with warnings", "ok": "ready"}
    told_all = ", ".join(f"{totals[status]} {word}" for status, word in meanings.items() if totals[status])
    return "\n".join([*lines, "", f"{plural(len(results), 'host')}: {told_all}"])


def _painted(text: str, status: Status, colour: bool) -> str:
    return f"\x1b[{_COLOUR[status]}m{text}\x1b[0m" if colour else text
