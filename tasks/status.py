"""What `status` says about one host: reads only, and asks the engine for a token."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from tasks.failures import recognise, root_cause
from tasks.installed import differences
from tasks.jobs import JobState, in_time, last_progress
from tasks.jobs import status as job_status
from tasks.launch import SYSTEM_PATH, LaunchSpec
from tasks.onhost.startup_log import COMPILES, START, read, this_start, tidy
from tasks.plan import Plan
from tasks.proven import boot_mode, proof_of, proven_mode
from tasks.receipts import Receipt
from tasks.recipe import SAFE_MODE
from tasks.remote import quote
from tasks.service import PROMOTE_JOB, SERVE_ANEW, readable, ready_script, tail
from tasks.startup import JOB, PROBE_SECONDS, history_path, log_script

_MARK = "@@"
_GPU = "index,memory.used,memory.total"
_LOG_LINES = 100_000
_START_WORDS = START.pattern.split(" (")[0]


@dataclass(frozen=True)
class Look:
    """What the host said in one go: the engine's answer, GPUs, its last starts, kernels compiled since."""

    answer: dict[str, Any]
    gpus: tuple[tuple[str, int, int], ...]
    starts: tuple[dict[str, Any], ...]
    compiles: int | None


def look_script(plan: Plan, spec: LaunchSpec) -> tuple[str, str]:
    """The sh that reads it all, and what it is given on stdin."""
    script, request = ready_script(plan, spec)
    count = f"/{_START_WORDS}/ {{ n = 0 }} /{COMPILES.pattern}/ {{ n++ }} END {{ print n + 0 }}"
    return (
        f"{script}; echo; echo {_MARK}gpu;"
        f" PATH=$PATH:{SYSTEM_PATH} timeout 15 nvidia-smi --query-gpu={_GPU}"
        f" --format=csv,noheader,nounits 2>/dev/null </dev/null;"
        f" echo {_MARK}starts; cat {quote(history_path(plan, spec.mode))} 2>/dev/null </dev/null;"
        f" echo; echo {_MARK}compiles; {{ {log_script(plan, spec, _LOG_LINES)}; }} 2>/dev/null </dev/null"
        f" | LC_ALL=C awk {quote(count)}",
        request,
    )


def parse_look(text: str) -> Look:
    """What `look_script` printed; parts that are missing or damaged are empty."""
    parts: dict[str, list[str]] = {}
    current = parts.setdefault("ready", [])
    for line in text.splitlines():
        if line.startswith(_MARK):
            current = parts.setdefault(line[len(_MARK) :], [])
        else:
            current.append(line)
    answer = _json(parts["ready"], {})
    starts = _json(parts.get("starts", []), [])
    compiles = "".join(parts.get("compiles", [])).strip()
    gpus = []
    for line in parts.get("gpu", []):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and all(field.isdigit() for field in fields):
            gpus.append((fields[0], int(fields[1]), int(fields[2])))
    return Look(
        answer if isinstance(answer, dict) else {},
        tuple(gpus),
        tuple(start for start in starts if isinstance(start, dict)) if isinstance(starts, list) else (),
        int(compiles) if compiles.isdigit() else None,
    )


def _json(lines: list[str], otherwise: Any) -> Any:
    try:
        return json.loads("\n".join(lines))
    except ValueError:
        return otherwise


def status_lines(plan: Plan) -> tuple[list[str], bool]:
    """What `status` prints about one host, and whether its engine answers."""
    running = [mode for mode in plan.recipe.serve.modes if plan.services[plan.spec(mode).name].running]
    rows: list[tuple[str, str]] = []
    good = False
    promoting = _at_work(plan, PROMOTE_JOB)
    if running:
        spec = plan.spec(running[0])
        script, request = look_script(plan, spec)
        answer = plan.remote.run(script, stdin=request, timeout=PROBE_SECONDS + 60)
        look = parse_look(answer.stdout)
        good = bool(look.answer.get("ready"))
        rows += served_rows(plan, spec, look)
    elif promoting:
        rows += trial_rows(plan)
    else:
        rows += stopped_rows(plan)
    rows += settings_rows(plan)
    rows += promotion_rows(plan)
    rows += proof_rows(plan)
    rows += pin_rows(plan)
    for name, now in plan.state.jobs.items():
        if now.state == "running" and name != PROMOTE_JOB:
            told = f"{name} is running since {in_time(now.elapsed)}; run the same verb to attach"
            rows.append(("job", told))
    width = max(len(key) for key, _ in rows)
    return [f"  {key.ljust(width)}  {value}" for key, value in rows], good


def served_rows(plan: Plan, spec: LaunchSpec, look: Look) -> list[tuple[str, str]]:
    """About a mode that runs."""
    service = plan.services[spec.name]
    answer = look.answer
    state = "ready: a token came out" if answer.get("ready") else coming_up(plan, spec)
    if state is None:
        state = f"not ready: {answer.get('why') or 'no answer'}"
    if answer.get("stage") == "key":
        state += "; it was started with another key: rackwright restart INVENTORY"
    rows = [
        ("service", f"{spec.name}: {state}"),
        ("mode", f"{spec.mode}; after a reboot: {boot_mode(plan, spec.mode)}"),
        ("endpoint", f"{spec.base_url}/v1"),
        ("model", spec.model_name),
        ("supervisor", f"{plan.supervisor.name}, pid {service.pid}, {_restarts(service.restarts)}"),
    ]
    epoch = plan.facts.system.epoch
    if service.since and epoch:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.since))
        rows.append(("up for", f"{in_time(max(0, epoch - service.since))} (since {stamp})"))
    if look.gpus:
        held = (f"{index}: {used / 1024:.1f} of {total / 1024:.1f} GiB" for index, used, total in look.gpus)
        rows.append(("GPU memory", ", ".join(held)))
    if look.starts:
        seconds = [f"{start.get('seconds', '?')} s" for start in look.starts[-2:]]
        rows.append(("start took", seconds[-1] + (f" (the one before {seconds[0]})" if seconds[1:] else "")))
    warm = look.starts[-1].get("compiles") if look.starts else None
    if look.compiles is not None and isinstance(warm, int):
        late = max(0, look.compiles - warm)
        told = f"{late} kernels were compiled while requests waited: widen serve.warmup in the recipe"
        rows.append(("warm-up", told if late else "held: no kernel was compiled while requests waited"))
    return rows


def coming_up(plan: Plan, spec: LaunchSpec) -> str | None:
    """How far the start is that goes on; None when its log says that it is over."""
    printed = plan.remote.run(readable(log_script(plan, spec)), timeout=60).stdout
    return start_told(printed, plan.facts.system.epoch, plan.services[spec.name].restarts)


def start_told(log: str, epoch: int | None, restarts: int | None) -> str | None:
    """A start as its log tells it: the phase, how far, since when; None when it is ready or has no log."""
    text = this_start(log)
    mark, reading = START.search(text), read(text)
    if mark is None or reading.phase == "ready":
        return None
    how = f"restarting after a crash ({restarts})" if restarts else "starting"
    far = f", {reading.done} of {reading.total} {reading.unit}" if reading.total else ""
    since = f", since {in_time(max(0, epoch - int(mark.group(1))))}" if epoch else ""
    return f"{how}: {reading.phase}{far}{since}"


def _at_work(plan: Plan, job: str) -> JobState | None:
    """A job of the host, if it runs."""
    now = plan.state.jobs.get(job)
    return now if now is not None and now.state == "running" else None


def _phase_of(plan: Plan, job: str) -> str:
    """What a job that runs is at, in its own words."""
    now = job_status(plan.remote, f"{plan.lib}/job.sh", f"{plan.layout.jobs}/{job}")
    progress = last_progress(now.log)
    if progress is None:
        return "beginning"
    far = f", {progress.done:g} of {progress.total:g} {progress.unit}" if progress.total else ""
    return progress.phase + far


def trial_rows(plan: Plan) -> list[tuple[str, str]]:
    """About a host where no mode serves because a promotion tries another one."""
    trial, epoch = plan.services[plan.trial_name], plan.facts.system.epoch
    told = "away for a promotion"
    if trial.running:
        since = f" since {in_time(max(0, epoch - trial.since))}" if trial.since and epoch else ""
        told += f"; another mode is on trial{since}"
    return [("service", f"{plan.spec(SAFE_MODE).name}: {told}: {_phase_of(plan, PROMOTE_JOB)}")]


def settings_rows(plan: Plan) -> list[tuple[str, str]]:
    """About a service that is installed with other settings than the inventory's."""
    running = [mode for mode in plan.recipe.serve.modes if plan.services[plan.spec(mode).name].running]
    spec = plan.spec(running[0] if running else boot_mode(plan, SAFE_MODE))
    odd = differences(plan, spec)
    return [("settings", f"installed with other settings ({odd}): {SERVE_ANEW}")] if odd else []


def _restarts(count: int | None) -> str:
    return "1 restart" if count == 1 else f"{count or 0} restarts"


def stopped_rows(plan: Plan) -> list[tuple[str, str]]:
    """About a host where no mode runs."""
    if plan.receipt("service") is None:
        return [("service", "not installed; install it with: rackwright site INVENTORY")]
    spec = plan.spec(boot_mode(plan, SAFE_MODE))
    service = plan.services[spec.name]
    if service.gave_up:
        log = tidy("\n".join(tail(plan, spec, 400)))
        known = recognise(log)
        why = known.failure.cause if known else root_cause(log) or "see: rackwright logs INVENTORY"
        rows = [("service", f"{spec.name}: it crashed again and again, nobody tries any more: {why}")]
        fix = known.failure.fix if known else "mend it"
        return [*rows, ("fix", f"{fix}; then: rackwright start INVENTORY")]
    if service.state == "ORPHAN":
        return [
            ("service", f"{spec.name}: runs without its supervisor; take it back: rackwright start INVENTORY")
        ]
    job = _at_work(plan, JOB)
    if job is not None:
        told = f"starting since {in_time(job.elapsed)}: {_phase_of(plan, JOB)}"
        return [("service", f"{spec.name}: {told}")]
    if not service.settled:
        crashes = f" ({service.restarts})" if service.restarts else ""
        return [("service", f"{spec.name}: restarting after a crash{crashes}; it waits to be started again")]
    start = SERVE_ANEW if differences(plan, spec) else "rackwright start INVENTORY"
    return [("service", f"{spec.name}: {service.state}; start it with: {start}")]


def promotion_rows(plan: Plan) -> list[tuple[str, str]]:
    """About a promotion that runs, or the last one."""
    now = plan.state.jobs.get(PROMOTE_JOB)
    if now is not None and now.state == "running":
        since = f"is running since {in_time(now.elapsed)}: {_phase_of(plan, PROMOTE_JOB)}"
        return [("promotion", f"{since}; attach to it with: rackwright promote INVENTORY")]
    receipt = plan.receipt("promotion")
    if receipt is None:
        return []
    result = receipt.detail.get("result") or {}
    why = f": {result['why']}" if result.get("why") else ""
    mode = (result.get("candidate") or {}).get("mode")
    return [("promotion", f"{mode} {result.get('verdict')} {receipt.at}{why}")]


def proof_rows(plan: Plan) -> list[tuple[str, str]]:
    """What was proven, the mode that starts with the host first."""
    rows = []
    last = proven_mode(plan)
    for mode in sorted(plan.recipe.serve.modes, key=lambda mode: (mode != last, mode)):
        proof = proof_of(plan, mode)
        if proof is None:
            continue
        passed = (proof.get("acceptance") or {}).get("pass")
        rows.append(("proven", f"{mode} {proof.get('at')}: {passed} checks passed"))
    return rows or [("proven", "nothing yet with these flags: rackwright site INVENTORY")]


def pin_rows(plan: Plan) -> list[tuple[str, str]]:
    """The version of what is installed, as the receipts name it."""
    rows = []
    for step in ("environment", "tools", "engine", "weights"):
        receipt = plan.receipt(step)
        if receipt is not None:
            rows.append((step, f"{_pin(step, receipt)} ({receipt.at}, {receipt.tool})"))
    return rows


def _pin(step: str, receipt: Receipt) -> str:
    detail = receipt.detail
    if step == "environment":
        return f"{detail.get('kind')}, Python {detail.get('python')}"
    if step == "tools":
        return f"{detail.get('packages')} packages, {len(receipt.artifacts)} files by SHA-256"
    if step == "engine":
        name = " ".join(str(detail[key]) for key in ("package", "version") if detail.get(key))
        commit = f" at {str(detail['commit'])[:12]}" if detail.get("commit") else ""
        files = f", {len(receipt.artifacts)} files by SHA-256" if receipt.artifacts else ""
        return f"{name or 'vLLM'}{commit} ({detail.get('route')}{files})"
    manifest = next((artifact.sha256[:12] for artifact in receipt.artifacts), "")
    return f"{detail.get('files')} files verified" + (f", digest of all {manifest}…" if manifest else "")
