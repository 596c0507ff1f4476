"""The verb `preflight`: one look at each host, in parallel; its table on stdout when all have answered."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

from pyinfra.api.state import StateStage
from pyinfra.context import ctx_state

from tasks.checks.table import render_host, render_hosts, verdict, verdict_line
from tasks.choices import choices_of
from tasks.findings import Finding, Status, fail
from tasks.mistakes import Mistakes
from tasks.plan import Plan, looked, stop_host
from tasks.remote import LostHost
from tasks.report import write_index
from tasks.streams import guard_streams, print_last
from tasks.terminal import shape
from tasks.typed import filled
from tasks.unreachable import Unreachable, by_hand, reasons

VERDICTS: dict[Status, str] = {"ok": "pass", "warn": "warn", "fail": "fail"}


class _Results:
    """Findings by host, printed once when the run is over: stdout is for the result."""

    def __init__(self) -> None:
        self.findings: dict[str, list[Finding]] = {}
        self.strict: set[str] = set()
        self.pages: dict[str, Path] = {}
        self.registered = False


_results = _Results()


def show_at_end() -> None:
    """Print the tables when this process ends; also when no host could be reached at all."""
    if not _results.registered:
        _results.registered = True
        guard_streams()  # a run of plain pyinfra has not passed our guard
        atexit.register(_show)


def preflight(host: Any) -> None:
    """Everything that will stop a deployment, found in one read-only pass."""
    show_at_end()
    real = host.state.inventory.get_host(host.name)
    try:
        plan = looked(real, "preflight", network=True, deep=True)
    except Mistakes as mistakes:
        stop_host(host, real, "\n".join(mistakes.lines))
        return
    except LostHost as lost:
        _unreachable(real, Unreachable(str(lost), by_hand(str(real.name), real.data.dict())))
        stop_host(host, real, f"{host.name} does not answer: {lost}")
        return
    _finish(plan, plan.findings)
    came_to = verdict_line(plan.findings, plan.settings.strict)
    if verdict(plan.findings, plan.settings.strict) == "fail":
        stop_host(host, real, f"{plan.name}: {came_to}")
    else:
        plan.say(came_to)


def _finish(plan: Plan, findings: list[Finding]) -> None:
    strict = plan.settings.strict
    _results.findings[plan.name] = findings
    _results.pages[plan.name] = plan.record.page
    if strict:
        _results.strict.add(plan.name)
    plan.record.note(findings=[finding.to_json() for finding in findings])
    plan.record.finish(VERDICTS[verdict(findings, strict)], verdict_line(findings, strict))
    plan.record.open()  # written once


def _unreachable(host: Any, why: Unreachable) -> None:
    """A host that did not answer is a finding too, and leaves a report."""
    finding = fail(
        "host.reachable",
        "this host cannot be reached",
        observed=why.what,
        expected="a session",
        fix=why.fix,
    )
    try:
        settings, recipe = choices_of(host)
    except Mistakes:
        _results.findings[str(host.name)] = [finding]
        return
    _finish(Plan(host, settings, recipe, "preflight"), [finding])


def _show() -> None:
    state = ctx_state.get()
    if state is None or state.current_stage < StateStage.Connect or "--json" in sys.argv:
        return
    for host in state.inventory:
        if state.is_host_in_limit(host) and host in state.failed_hosts and host not in state.activated_hosts:
            name = str(host.name)
            why = reasons.get(name) or Unreachable("no connection", by_hand(name, host.data.dict()))
            _unreachable(host, why)
    for folder in {page.parent.parent for page in _results.pages.values()}:
        write_index(folder)
    print_last(filled(_tables(*shape(sys.stdout))))


def _tables(width: int, colour: bool) -> str:
    found = _results.findings
    many = len(found) > 1
    parts = [
        render_host(
            name,
            findings,
            strict=name in _results.strict,
            width=width,
            colour=colour,
            brief=many,
        )
        for name, findings in sorted(found.items())
    ]
    if many:
        parts.append(render_hosts(found, strict=_results.strict, width=width, colour=colour))
    folders = {page.parent.parent for page in _results.pages.values()}
    shown = [folder / "index.html" for folder in folders] if many else list(_results.pages.values())
    lines = [f"report: {page}" for page in sorted(shown)]
    return "\n" + "\n\n".join(parts) + "\n" + "\n".join(lines)
