"""Promotion and rollback as steps. The work is `onhost/promotion.py`'s: it goes on without the controller."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from typing import Any

from tasks.acceptance import Acceptance, acceptance_request
from tasks.digest import digest_of
from tasks.jobs import Job, Outcome, in_time, run_job, status
from tasks.launch import LaunchSpec
from tasks.plan import Plan
from tasks.proven import STEP, proof_of, proof_receipt, proven_mode, proven_otherwise
from tasks.receipts import Receipt
from tasks.recipe import SAFE_MODE
from tasks.remote import quote
from tasks.report_serving import table
from tasks.service import (
    PROMOTE_JOB,
    SERVE_ANEW,
    Service,
    files_are_there,
    files_of,
    keep_files,
    look_ready,
    port_is_ours,
    prepare,
    put_back,
    refuse_other_flags,
    refuse_other_settings,
    what_serves,
)
from tasks.startup import SPARE_SECONDS, Cancelled, bring_up, done_of, explain, service_request
from tasks.steps import Done, StepFailed, onhost, python_of

ACCEPTANCE_SECONDS = 3600
GUARD_LOOKS_SECONDS = 3
# On the serving port clients may be asking, so what needs an idle engine cannot be judged there.
NOT_AT_LAST = {"guard.idle": "clients may be asking"}


def fast_mode(plan: Plan) -> str:
    """The mode to promote: the one that is asked for, else the recipe's first one that is not the safe one.

    Raises StepFailed when the recipe has none.
    """
    mode = plan.recipe.faster(plan.settings.mode)
    if mode is None:
        raise StepFailed(
            f"the recipe {plan.recipe.name} has no mode besides {SAFE_MODE}\n"
            "Fix: add one: [serve.modes.optimized.flags]"
        )
    return mode


def folder_of(plan: Plan) -> str:
    """Where a promotion keeps its state on the host."""
    return f"{plan.layout.run}/promotion"


def running(plan: Plan) -> bool:
    """A promotion runs on the host."""
    now = plan.state.jobs.get(PROMOTE_JOB)
    return now is not None and now.state == "running"


class Promote:
    """A faster mode serves, if it earned it; else the safe mode does, and the report says why."""

    name = "promote"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        modes = [mode for mode in self.plan.recipe.serve.modes if mode != SAFE_MODE]
        return f"promote: {fast_mode(self.plan) if modes else 'no other mode'}"

    def digest(self) -> str:
        """What makes two promotions the same: both modes, the questions, the margin."""
        plan = self.plan
        fast = fast_mode(plan)
        specs = [plan.spec(SAFE_MODE).digest, plan.spec(fast).digest]
        questions = acceptance_request(plan, plan.spec(fast), None)
        return digest_of([specs, questions, plan.recipe.serve.promote.model_dump()])

    def unchanged(self) -> str | None:
        """The faster mode was proven with these very flags, runs as installed, and answers."""
        plan = self.plan
        if running(plan) or len(plan.recipe.serve.modes) < 2:
            return None
        mode = fast_mode(plan)
        spec, receipt = plan.spec(mode), plan.receipt("promotion")
        if proven_mode(plan) != mode or proof_of(plan, mode) is None:
            return None
        if not plan.services[spec.name].running or not files_are_there(plan, spec):
            return None
        if not look_ready(plan, spec)["ready"]:
            return None
        plan.record.note(promotion=receipt.detail.get("result") if receipt else None)
        return f"{mode} was proven {(proof_of(plan, mode) or {}).get('at')} and serves"

    def act(self) -> Done:
        """Have the host do it, watch, and say how it ended."""
        plan = self.plan
        fast = fast_mode(plan)
        inputs = self.digest()[:32]
        now = plan.state.jobs.get(PROMOTE_JOB)
        if now is not None and now.state == "running" and not now.key.startswith(inputs):
            raise StepFailed(
                "another promotion is running on this host, with other flags\n"
                "Fix: wait for it, or end it: rackwright rollback INVENTORY"
            )
        request = ""
        key = f"{inputs}-{secrets.token_hex(8)}"
        if now is not None and now.state == "running":
            key = now.key
        else:
            if plan.receipt("service") is None:
                raise StepFailed("no service is installed here\nFix: rackwright site INVENTORY")
            safe = plan.spec(SAFE_MODE)
            refuse_other_settings(plan, safe)
            if plan.services[safe.name].running:
                refuse_other_flags(plan, safe)
            specs = (safe, plan.spec(fast), plan.spec(fast, trial_port=free_port(plan)))
            prepare(plan, *specs)
            request = json.dumps(promotion_request(plan, *specs))
        outcome = run_promotion(plan, key, inputs, request)
        return concluded(plan, fast, outcome)


def free_port(plan: Plan) -> int:
    """A port for the mode on trial: free now, near the serving port, below what outgoing connections use."""
    taken = {listener.port for listener in plan.facts.net.listeners or ()}
    first: int = plan.settings.port + 1
    ports: list[int] = [*range(first, first + 400), *range(20001, 32768)]
    for port in ports:
        if port not in taken and 1024 < port < 32768:
            return port
    raise StepFailed("no port is free for the mode on trial\nFix: set another port in the inventory")


def run_promotion(plan: Plan, key: str, inputs: str, request: str) -> Outcome:
    """Start the job or attach to it; of two controllers at once one starts it and both watch."""
    program, folder = f"{plan.lib}/job.sh", f"{plan.layout.jobs}/{PROMOTE_JOB}"
    argv = (python_of(plan), onhost(plan, "promotion.py"), "run", folder_of(plan))
    deadline = total_seconds(plan) + 2 * SPARE_SECONDS
    job = Job(PROMOTE_JOB, folder, key, argv, request, (), deadline)
    outcome = run_job(plan.remote, program, job, plan.say)
    if outcome.result or outcome.ok:
        return outcome
    now, before = status(plan.remote, program, folder, 0), plan.state.jobs.get(PROMOTE_JOB)
    # the other controller's, which may even have ended by now
    other = now.key not in (key, before.key if before else "") and now.key.startswith(inputs)
    if other and now.state in ("running", "done"):
        return run_job(plan.remote, program, replace(job, key=now.key), plan.say)
    return outcome


def total_seconds(plan: Plan) -> int:
    """What a promotion may take: three starts with their warm-ups, two acceptances, two short benchmarks."""
    serve = plan.recipe.serve
    slowest: int = max(plan.spec(mode).ready_seconds for mode in serve.modes)
    starts = 3 * (slowest + serve.warmup.seconds)
    return starts + 2 * ACCEPTANCE_SECONDS + SPARE_SECONDS


def promotion_request(plan: Plan, safe: LaunchSpec, fast: LaunchSpec, trial: LaunchSpec) -> dict[str, Any]:
    """All that the host needs to do it alone."""
    promote = plan.recipe.serve.promote
    names = plan.service_names
    proof = proof_of(plan, safe.mode) or {}
    acceptance = acceptance_request(plan, trial, None)
    return {
        "instance": plan.settings.instance,
        "safe": service_request(plan, safe),
        "trial": service_request(plan, trial),
        "candidate": service_request(plan, fast),
        "reload": plan.supervisor.reload(),
        "boot": {
            "safe": plan.supervisor.at_boot(safe.name, names),
            "candidate": plan.supervisor.at_boot(fast.name, names),
        },
        "tidy": tidy_script(plan, trial),
        "python": python_of(plan),
        "accept": acceptance,
        "final": {"profile": "smoke", "skip": {**plan.recipe.acceptance.skip, **NOT_AT_LAST}},
        "bench": {
            "concurrency": promote.concurrency,
            "prompt_tokens": promote.prompt_tokens,
            "output_tokens": promote.output_tokens,
            "requests": promote.requests,
            "timeout": 600,
        },
        "margin": promote.margin,
        "baseline": {"acceptance": proof.get("acceptance"), "bench": proof.get("bench")},
        "receipts": {
            "folder": plan.layout.receipts,
            # in the order of writing: the one that names the mode for the next boot comes last
            "kept": [_acceptance_draft(plan, fast), *reversed(_drafts(plan, fast))],
            "back": _drafts(plan, safe),
            "promotion": _draft(Receipt("promotion", fast.digest, 0)),
        },
        "deadline": total_seconds(plan),
    }


def tidy_script(plan: Plan, trial: LaunchSpec) -> str:
    """Take the trial's files away, once it does not run."""
    shared = files_of(plan, plan.spec(SAFE_MODE))
    paths = [path for path in files_of(plan, trial) if path not in shared]
    return f"rm -f {' '.join(quote(path) for path in paths)}; {plan.supervisor.reload()}"


def _draft(receipt: Receipt) -> dict[str, Any]:
    draft: dict[str, Any] = json.loads(receipt.text())
    return draft


def _drafts(plan: Plan, spec: LaunchSpec) -> list[dict[str, Any]]:
    return [_draft(proof_receipt(plan, spec.mode)), _draft(Service(plan, spec.mode).draft())]


def _acceptance_draft(plan: Plan, spec: LaunchSpec) -> dict[str, Any]:
    """The receipt of an acceptance of the start that serves at the end; its identity is known there only."""
    acceptance = Acceptance(plan)
    draft = _draft(Receipt(acceptance.name, "", 0, {"profile": acceptance.profile, "mode": spec.mode}))
    return {**draft, "digest_inputs": acceptance.inputs(spec, "@identity")}


def concluded(plan: Plan, fast: str, outcome: Outcome) -> Done:
    """How it ended, for person and report. Raises StepFailed unless the faster mode serves now."""
    if outcome.cancelled:
        raise StepFailed(f"the promotion: {outcome.why}\nFix: rackwright site INVENTORY")
    result = outcome.result or guarded(plan)
    if not result.get("verdict"):
        log_on_host = f"Log on the host: {plan.layout.jobs}/{PROMOTE_JOB}/log"
        raise StepFailed(
            f"{outcome.why}\nFix: rackwright rollback INVENTORY, then promote again\n{log_on_host}"
        )
    log = result.pop("log", [])
    plan.record.note(promotion=result, mode=serving(result))
    # what is proven of the mode that serves, or the evidence of what was not
    if result["verdict"] == "promoted" or result.get("reason") == "acceptance":
        plan.record.note(acceptance=(result.get("candidate") or {}).get("acceptance"))
    for line in columns(result):
        plan.say(line)
    if result["verdict"] == "promoted":
        return Done(detail=result, receipt=False)
    what, fix, lines = explain({**result, "log": log})
    safe = result["safe"]["mode"]
    away = result.get("away_seconds", 0)
    end = (
        (
            f"{safe} serves again, after {in_time(away)} without a service"
            if away
            else f"{safe} serves as before"
        )
        if result["verdict"] == "rolled-back"
        else f"and {safe} does NOT serve: rackwright logs INVENTORY, then rackwright start INVENTORY"
    )
    raise StepFailed(f"{fast} did not earn its place: {what}\n{end}\nFix: {fix}", lines if log else [])


def serving(result: dict[str, Any]) -> str:
    """The mode that serves at the end."""
    return str(result["candidate" if result["verdict"] == "promoted" else "safe"]["mode"])


def guarded(plan: Plan) -> dict[str, Any]:
    """The end of a promotion that was killed, as its guard on the host wrote it; {} when there is none."""
    path, lock = f"{folder_of(plan)}/state.json", f"{folder_of(plan)}/lock"
    # a lock that nobody holds: the guard is dead too; twice in a row, since it may just be taking it
    script = f"flock --nonblock {quote(lock)} true; echo $?; cat {quote(path)} 2>/dev/null"
    end = time.monotonic() + plan.spec(SAFE_MODE).ready_seconds + SPARE_SECONDS
    said, idle = False, 0
    while time.monotonic() < end:
        held, _, text = plan.remote.run(script).stdout.partition("\n")
        try:
            state = json.loads(text or "{}")
        except ValueError:
            state = {}
        if not state or state.get("boot") != plan.facts.system.boot_id:
            return {}
        if state.get("settled"):
            return dict(state["result"])
        idle = idle + 1 if held == "0" else 0
        if idle == 2:
            return {}
        if not said:
            plan.say("promote: it was killed on the host; its guard is bringing the safe mode back")
            said = True
        time.sleep(GUARD_LOOKS_SECONDS)
    return {}


def columns(result: dict[str, Any]) -> list[str]:
    """Both modes side by side."""
    rows = table(result)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return ["  ".join(row[i].ljust(widths[i]) for i in range(3)).rstrip() for row in rows]


class Rollback:
    """The safe mode serves and starts with the host, whatever served before."""

    name = "rollback"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"rollback: {SAFE_MODE}"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def unchanged(self) -> str | None:
        """The safe mode serves, starts at boot, and nothing tries to change that."""
        plan, spec = self.plan, self.plan.spec(SAFE_MODE)
        service = plan.services[spec.name]
        if running(plan) or not service.running or not service.at_boot:
            return None
        if proven_mode(plan) not in (None, SAFE_MODE):
            return None
        return f"{SAFE_MODE} serves" if look_ready(plan, spec)["ready"] else None

    def act(self) -> Done:
        """End a promotion that runs; then stop what serves and start the safe mode.

        What would keep it from coming up is found before anything is stopped; if it still does not, what
        served serves again. A recipe changed since then changes nothing: the way back is to what was proven.
        """
        plan = self.plan
        if plan.receipt("service") is None:
            raise StepFailed("no service is installed here\nFix: rackwright site INVENTORY")
        now = plan.state.jobs.get(PROMOTE_JOB)
        if now is not None and now.state == "running":
            plan.say("rollback: a promotion is running; asking it to bring the safe mode back")
            plan.remote.run(f": >{quote(folder_of(plan))}/cancel")
            outcome = run_promotion(plan, now.key, now.key[:32], "")
            result = outcome.result or guarded(plan)
            plan.record.note(promotion={key: value for key, value in result.items() if key != "log"})
            plan.look()
            if self.unchanged():
                return Done(detail={"ended": "promotion"}, receipt=False)
        spec = plan.spec(SAFE_MODE)
        for mode in plan.recipe.serve.modes:
            refuse_other_settings(plan, plan.spec(mode))
        port_is_ours(plan, spec)
        old = what_serves(plan)
        if old is not None and old.name == spec.name:
            old = None
        as_it_was = proven_otherwise(plan, spec)
        if as_it_was:
            plan.say(f"rollback: {spec.name} starts as it was proven; for its flags of now: {SERVE_ANEW}")
        else:
            if old:
                keep_files(plan, spec)
            prepare(plan, spec)
        proven = plan.receipt(STEP)
        written = plan.remote.run(proof_receipt(plan, spec.mode).write(plan.layout.receipts))
        if not written.ok:
            why = f"the receipt cannot be written: {written.stderr.strip()}"
            raise StepFailed(f"{why}\nFix: free space or make it writable, then run this again")
        others = [name for name in plan.service_names if name != spec.name and plan.services[name].installed]
        before = [
            *(plan.supervisor.stop(name) for name in others),
            plan.supervisor.reload(),
            plan.supervisor.at_boot(spec.name, plan.service_names),
            plan.supervisor.start(spec.name),
        ]
        draft = None if as_it_was else Service(plan, SAFE_MODE).draft()
        try:
            result = bring_up(plan, spec, before, draft, put_back(plan, spec, old) if old else None)
        except StepFailed as failed:
            # who ended it may be removing all of this
            if old and proven and not isinstance(failed, Cancelled):
                boot = plan.supervisor.at_boot(old.name, plan.service_names)
                plan.remote.run(f"{proven.write(plan.layout.receipts)} && {{ {boot}; }}")
            raise
        return Done(detail={"start": done_of(result)}, receipt=False)
