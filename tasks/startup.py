"""Bringing an engine up from the controller: the job on the host, its progress, and what a failure means."""

from __future__ import annotations

import json
import secrets
from typing import Any

from tasks.digest import digest_of
from tasks.failures import recognise, root_cause, telling_lines
from tasks.jobs import Job, Outcome, run_job
from tasks.launch import LaunchSpec
from tasks.onhost.startup_log import PHASES
from tasks.plan import Plan
from tasks.receipts import Receipt
from tasks.remote import quote
from tasks.steps import StepFailed, onhost, python_of

JOB = "bring-up"
LOG_LINES = 3000
PROBE_SECONDS = 120
# The program ends by its own deadlines; the job's is only for a program that hangs.
SPARE_SECONDS = 600


class Cancelled(StepFailed):
    """Somebody ended the start on its host: nobody waits for it any more."""


def log_script(plan: Plan, spec: LaunchSpec, lines: int = LOG_LINES) -> str:
    """The sh that prints the engine's last log lines."""
    return plan.supervisor.logs(spec.name, spec.log, lines, False)


def service_request(plan: Plan, spec: LaunchSpec) -> dict[str, Any]:
    """One service as `onhost/bring_up.py` needs it."""
    serve = plan.recipe.serve
    return {
        "kind": plan.supervisor.name,
        "names": list(plan.service_names),
        "name": spec.name,
        "mode": spec.mode,
        "status": plan.supervisor.status(plan.service_names),
        "log": log_script(plan, spec),
        "start": plan.supervisor.start(spec.name),
        "stop": plan.supervisor.stop(spec.name),
        "probe": probe_request(plan, spec),
        "ready_seconds": spec.ready_seconds,
        "phase_seconds": {
            phase.name: min(serve.phase_seconds.get(phase.name, phase.seconds), spec.ready_seconds)
            for phase in PHASES
        },
        "warmup": warmup_request(plan),
        "warmup_seconds": serve.warmup.seconds,
        "crashes": 3 if spec.restart else 1,
        "history": history_path(plan, spec.mode),
        "spec": spec.digest,
    }


def probe_request(plan: Plan, spec: LaunchSpec) -> dict[str, Any]:
    """What `onhost/ready.py` is asked, but for the engine's process."""
    return {
        "base_url": spec.base_url,
        "model": spec.model_name,
        "key_file": spec.key_file,
        "timeout": PROBE_SECONDS,
        "container": spec.name if plan.route == "docker" else None,
    }


def warmup_request(plan: Plan) -> dict[str, Any]:
    """The recipe's warm-up, without the address."""
    warmup = plan.recipe.serve.warmup
    return {
        "concurrency": warmup.concurrency,
        "prompt_tokens": warmup.prompt_tokens,
        "forms": warmup.forms,
        "max_tokens": warmup.max_tokens,
        "timeout": min(600, warmup.seconds),
    }


def history_path(plan: Plan, mode: str) -> str:
    """Where this host's last starts of a mode are kept."""
    return f"{plan.layout.run}/starts/{plan.settings.instance}-{mode}.json"


def bring_up(
    plan: Plan,
    spec: LaunchSpec,
    before: list[str],
    receipt: Receipt | None = None,
    put_back: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run `before`, wait for a token, warm up; as a job on the host, so that a lost controller loses nothing.

    A bring-up of the same inputs that runs already is attached to; one of other inputs is ended first.
    `receipt` is written on the host when it is up; `put_back` says what serves again when it does
    not come up. Raises StepFailed with the cause and the telling lines.
    """
    request = {**service_request(plan, spec), "before": before}
    if receipt is not None:
        draft = json.loads(receipt.text())
        request["receipt"] = {"folder": plan.layout.receipts, "draft": draft}
    if put_back is not None:
        request["put_back"] = put_back
    inputs = digest_of([spec.digest, receipt.digest if receipt else None])[:32]
    program = f"{plan.lib}/job.sh"
    folder = f"{plan.layout.jobs}/{JOB}"
    now = plan.state.jobs.get(JOB)
    if now is not None and now.state == "running" and not now.key.startswith(inputs):
        plan.remote.run(f"sh {quote(program)} cancel {quote(folder)}", timeout=60)
    deadline = spec.ready_seconds + plan.recipe.serve.warmup.seconds + spec.stop_seconds + SPARE_SECONDS
    deadline += int(put_back["service"]["ready_seconds"]) if put_back else 0
    job = Job(
        JOB,
        folder,
        f"{inputs}-{secrets.token_hex(8)}",
        (python_of(plan), onhost(plan, "bring_up.py")),
        stdin=json.dumps(request),
        deadline=deadline,
        inputs=inputs,
    )
    outcome = run_job(
        plan.remote, program, job, lambda text: plan.say(text.replace(f"{JOB}:", "service:", 1))
    )
    if not outcome.ok:
        raise explained(plan, spec, outcome)
    return outcome.result


def explained(plan: Plan, spec: LaunchSpec, outcome: Outcome) -> StepFailed:
    """A start that failed, as what happened, why, and the one thing to do."""
    result = outcome.result
    if not result.get("verdict"):
        kind = Cancelled if outcome.cancelled else StepFailed
        return kind(f"{outcome.why}\nLog on the host: {plan.layout.jobs}/{JOB}/log", [])
    what, fix, lines = explain(result)
    also = f"\nSee all of it with: rackwright logs INVENTORY --limit {plan.name}"
    return StepFailed(f"{spec.name}: {what}; {now_told(result)}\nFix: {fix}{also}", lines)


def now_told(result: dict[str, Any]) -> str:
    """What serves after a start that failed."""
    back = result.get("put_back")
    if not back:
        return "it is stopped now"
    if back.get("up"):
        return f"{back.get('name')} serves again as before"
    return f"it is stopped now, and {back.get('name')} did not come back either: {back.get('why')}"


def explain(result: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What happened, what to do, and the telling log lines, from a failed result of `bring_up.py`."""
    log = [str(line) for line in result.get("log") or []]
    why = str(result.get("why") or "it failed")
    known = recognise(log)
    ports = {
        "port": "stop that process, or take another port: rackwright serve INVENTORY --data port=ANOTHER",
        "trial-port": "promote again: it takes another port for the trial",
    }
    if result.get("reason") in ports:
        # all else in the log is of a start that went well
        return why, ports[str(result["reason"])], list(known.lines[:3]) if known else []
    if known is not None:
        failure = known.failure
        return f"{why}: {failure.cause} ({failure.reference})", failure.fix, telling_lines(log)
    cause = root_cause(log)
    fix = {
        "phase": "read the log lines above; if it is only slow, raise serve.phase_seconds in the recipe",
        "silent": "see that no flag or variable of the recipe moves the engine to another port or address",
        "deadline": "read the log lines above; if it is only slow, raise serve.ready_seconds in the recipe",
        "slower": "tune the mode's flags in the recipe; serve.promote.margin says how much slower it may be",
        "acceptance": "read the evidence of the failed checks in the report",
        "cancelled": "run it again when you want to",
        "disk": "make room on the host, then promote again",
        "killed": "run it again; dmesg says whether memory ran out",
    }.get(str(result.get("reason")), "read the log lines above")
    return f"{why}: {cause}" if cause else why, fix, telling_lines(log)


def done_of(result: dict[str, Any]) -> dict[str, Any]:
    """What a receipt and a report keep of a start."""
    return {
        key: value for key, value in result.items() if key not in ("pid", "log", "verdict", "reason", "why")
    }
