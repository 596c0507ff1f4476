"""How a step of a deploy runs: nothing when its receipt and the host agree, else once, with evidence.

A step decides (`unchanged`) and acts (`act`); this module is the pyinfra operation around it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyinfra import host as current_host
from pyinfra.api import FunctionCommand, operation

from tasks.jobs import Job, JobState, Outcome, in_time, log_lines, run_job
from tasks.plan import Plan, Stop
from tasks.receipts import Artifact, Receipt
from tasks.remote import LostHost, quote
from tasks.state import HostState

LEFT_SECONDS = 3600
# Steps that may run where nothing is installed; others would only leave their programs there.
ANYWHERE = {"mirrors", "environment", "stop", "uninstall"}
GONE = "rackwright was uninstalled on this host meanwhile\nFix: rackwright site INVENTORY"


class StepFailed(Exception):
    """A step did not reach its end on one host: what, why, and the one next command."""

    def __init__(self, what: str, log: list[str] | None = None) -> None:
        super().__init__(what)
        self.log = log or []


@dataclass(frozen=True)
class Done:
    """What a step leaves behind: the detail and the artifacts of its receipt."""

    detail: dict[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    paths: tuple[str, ...] = ()
    receipt: bool = True


class Step(Protocol):
    """One step of a deploy on one host."""

    name: str
    plan: Plan

    @property
    def label(self) -> str:
        """What the person sees."""
        ...

    def digest(self) -> str:
        """What makes two runs of the step the same."""
        ...

    def unchanged(self) -> str | None:
        """Why there is nothing to do, or None. May read the host, never change it."""
        ...

    def act(self) -> Done:
        """Do it. Raises StepFailed, Stop or LostHost."""
        ...


@operation()
def _step(work: Step) -> Any:
    """Run a step once: no change where its receipt matches and the host agrees."""
    plan = work.plan
    executing = plan.host.state.is_executing
    if executing:
        plan.record.open()
    before = plan.state
    try:
        plan.fresh()
        if executing and uninstalled(before, plan.state):
            yield FunctionCommand(_fail, (work, GONE, []), {})
            return
        why = None if plan.failed else work.unchanged()
    except LostHost as lost:
        if executing:
            yield FunctionCommand(_fail, (work, f"the host does not answer: {lost}", []), {})
        return
    if why is not None:
        if executing:
            receipt = plan.receipt(work.name)
            plan.record.step(
                work.name,
                "unchanged",
                why=why,
                label=work.label,
                seconds=0,
                detail=receipt.detail if receipt else {},
            )
        current_host.noop(why)
        return
    yield FunctionCommand(_run, (work,), {})


def uninstalled(before: HostState, now: HostState) -> bool:
    """Another controller has uninstalled the host since it was looked at, or begun to."""
    begun = now.has("uninstalling") and not before.has("uninstalling")
    return begun or (before.ours and not now.ours)


def run_step(work: Step) -> None:
    """Put a step into the deploy."""
    work.plan.record.expect(work.name, work.label)
    _step(work=work, name=work.label)


def _run(state: Any, host: Any, work: Step) -> bool:
    plan, began = work.plan, time.monotonic()
    plan.record.step(work.name, "running", label=work.label)
    try:
        if not plan.state.ours and work.name not in ANYWHERE:
            raise StepFailed(f"nothing is installed in {plan.layout.root}\nFix: rackwright site INVENTORY")
        plan.dirty = True
        plan.ship()
        done = work.act()
        seconds = round(time.monotonic() - began, 1)
        if done.receipt:
            receipt = Receipt(work.name, work.digest(), seconds, done.detail, done.artifacts, done.paths)
            # what a receipt vouches for is over: when the host no longer agrees, the work is done anew
            over = "".join(f" && : >{quote(f'{plan.layout.jobs}/{name}/again')}" for name in plan.jobs_used)
            written = plan.remote.run(receipt.write(plan.layout.receipts) + over)
            plan.jobs_used.clear()
            if not written.ok:
                why = f"the receipt cannot be written: {written.stderr.strip()}"
                raise StepFailed(f"{why}\nFix: free space or make it writable, then run this again")
    except (StepFailed, Stop) as failure:
        return _fail(state, host, work, str(failure), getattr(failure, "log", []), time.monotonic() - began)
    except LostHost as lost:
        return _fail(state, host, work, f"the host does not answer: {lost}", [], time.monotonic() - began)
    except Exception as error:
        # One host's surprise must not end the run of the others, as pyinfra would let it.
        what = f"unexpected {type(error).__name__}: {error} (a fault of rackwright: please report it)"
        return _fail(state, host, work, what, [], time.monotonic() - began)
    plan.record.step(work.name, "done", label=work.label, seconds=seconds, detail=done.detail)
    plan.say(f"{work.label}: done in {in_time(seconds)}")
    return True


def _fail(state: Any, host: Any, work: Step, what: str, log: list[str], seconds: float = 0) -> bool:
    plan = work.plan
    plan.failed = True
    for line in log:
        plan.say(f"    | {line}")
    plan.complain(f"{work.name} failed on {plan.name}: {what}")
    plan.record.step(work.name, "failed", label=work.label, seconds=round(seconds, 1), why=what, log=log)
    plan.record.finish("fail", f"{work.name}: {what.splitlines()[0]}")
    plan.complain(f"report: {plan.record.page}")
    return False


def job(
    plan: Plan,
    name: str,
    key: str,
    argv: tuple[str, ...],
    *,
    verdict: bool = False,
    again: bool = False,
    anew: bool = False,
    **more: Any,
) -> Outcome:
    """Run a detached job of this plan and return its outcome. Raises StepFailed when it failed.

    The program's own error document (`{"error": {"what", "fix"}}`) is what the person reads. With
    `verdict`, a program that ends with 1 and a verdict has done its work: the caller judges. With `again`
    a job that was done is run once more (it is cheap then), since what it made may be gone. With `anew` every
    asking is a job of its own; what an earlier run left at work or unfetched (Ctrl-C, a dead controller) is
    taken up.
    """
    if anew:
        more["inputs"] = key
        left = plan.state.jobs.get(name)
        key = left.key if left and is_left(left, key) else f"{key}-{secrets.token_hex(4)}"
    work = Job(name, f"{plan.layout.jobs}/{name}", key, argv, **more)
    plan.jobs_used.append(name)
    if again:
        plan.remote.run(f"[ ! -f {quote(work.folder)}/rc ] || : >{quote(work.folder)}/again")
    outcome = run_job(plan.remote, f"{plan.lib}/job.sh", work, plan.say)
    if outcome.ok or (verdict and outcome.result.get("verdict")):
        return outcome
    problems = problems_of(outcome.result)
    if not problems:
        where = "" if outcome.cancelled else f"\nLog on the host: {work.folder}/log"
        raise StepFailed(f"{outcome.why}{where}", log_lines(outcome.log, 20))
    first, *others = problems
    also = "".join(f"\nAlso: {line}" for line, _ in others[:7])
    also += f"\nand {len(others) - 7} more: {work.folder}/result" if len(others) > 7 else ""
    raise StepFailed(f"{first[0]}{also}\nFix: {first[1]}", log_lines(outcome.log, 8))


def is_left(job: JobState, inputs: str) -> bool:
    """A job of these inputs that runs, or ended well within the hour: later, what it found is old."""
    ended = job.rc == 0 and (job.now or 0) - (job.ended or 0) < LEFT_SECONDS
    return job.key.startswith(inputs) and (job.state == "running" or ended)


def problems_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What an onhost program says went wrong, as (what, fix): its `error`, or its `problems`."""
    found = [result["error"]] if isinstance(result.get("error"), dict) else result.get("problems") or []
    return [
        (
            ": ".join(str(item[key]) for key in ("file", "what") if item.get(key)),
            str(item.get("fix") or "see the log"),
        )
        for item in found
        if isinstance(item, dict)
    ]


def python_of(plan: Plan) -> str:
    """The engine env's interpreter: it is there once the environment step is done."""
    return f"{plan.layout.env}/bin/python"


def onhost(plan: Plan, program: str) -> str:
    """Path of an onhost program on the host."""
    return f"{plan.lib}/{program}"


def remove_tree(path: str) -> str:
    """The sh that removes a folder of ours."""
    return f"rm -rf {quote(path)}"
