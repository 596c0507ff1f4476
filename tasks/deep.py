"""The deep probe from the controller: run once, its findings, and the NCCL settings that it proves.

The program is piped into a Python of the host; nothing is left there. Its deadlines are its own, and it ends
by itself when the connection is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import gevent

from tasks.checks.deep import deep_findings, proven_advice
from tasks.checks.gpu import chosen
from tasks.checks.links import NcclAdvice, nccl_advice, readable
from tasks.digest import digest_of
from tasks.facts.text import version_key
from tasks.findings import Finding, skipped
from tasks.jobs import HEARTBEAT_SECONDS, in_time
from tasks.onhost.deep_probe import BOOT, DEFAULTS
from tasks.paths import ONHOST
from tasks.remote import quote

if TYPE_CHECKING:
    from tasks.plan import Plan

PROGRAM = "deep_probe.py"
OLDEST_PYTHON = (3, 8)
# what the program may need beyond its own total: starting, ending its processes
SPARE_SECONDS = 60
STEP = "deep"


def deep_look(plan: Plan) -> list[Finding]:
    """Run the deep probe on one host and note what it says. Raises LostHost."""
    document, why = run_deep(plan)
    if document is None:
        findings = [skipped("deep.all_reduce", why)]
    else:
        findings = deep_findings(plan.needs, plan.facts, document)
        advice = proven_advice(document)
        plan.record.note(deep=document, nccl=asdict(advice) if advice else None)
    return findings


def run_deep(plan: Plan) -> tuple[dict[str, Any] | None, str]:
    """The deep probe's document, or None and why there is none. Raises LostHost."""
    used = chosen(plan.needs, plan.facts.gpu)
    if not plan.needs.want_gpu:
        return None, "the recipe uses no GPU"
    if not used:
        return None, f"no GPU could be read ({plan.facts.gpu.smi.message or 'nvidia-smi lists none'})"
    if any(state.running for state in plan.services.values()):
        return None, "the engine runs on these GPUs, and would be disturbed: rackwright stop INVENTORY first"
    pythons = _pythons(plan)
    if not pythons:
        return None, "there is no Python 3.8 or newer on the host"
    total = int(DEFAULTS["total_s"])
    request = {"pythons": pythons, "gpus": [gpu.index for gpu in used], "total_s": total}
    given = json.dumps({"program": (ONHOST / PROGRAM).read_text("utf-8"), "request": request})
    plan.say(f"deep: copies and all_reduce over {len(used)} GPUs, at most {in_time(total)}")
    ticker = gevent.spawn(_tick, plan)
    try:
        answer = plan.remote.run(
            f"cd / && exec {quote(pythons[0])} -B -c {quote(BOOT)} --stdin",
            stdin=given,
            timeout=total + SPARE_SECONDS,
        )
    finally:
        ticker.kill(block=False)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
    try:
        document = json.loads(lines[-1]) if lines else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        words = [line for line in answer.stderr.splitlines() if line and not line.startswith("#progress")]
        return None, f"the deep probe gave no answer: {words[-1] if words else f'exit code {answer.rc}'}"
    return document, ""


def _tick(plan: Plan) -> None:
    passed = 0
    while True:
        gevent.sleep(HEARTBEAT_SECONDS)
        passed += HEARTBEAT_SECONDS
        plan.say(f"deep: still at work ({in_time(passed)})")


def _pythons(plan: Plan) -> list[str]:
    """Interpreters that may have torch: the engine's environment first, then whatever the host has."""
    tools = plan.facts.tools
    found = [tools.env.python] if tools.env and tools.env.version else []
    found += [one.path for one in tools.pythons if version_key(one.version) >= OLDEST_PYTHON]
    if tools.conda and tools.conda.prefix:
        found.append(f"{tools.conda.prefix}/bin/python3")
    return list(dict.fromkeys(found))


def proof_key(plan: Plan) -> str:
    """What a proof is about: these GPUs, this driver, this boot line, so many of them."""
    facts = plan.facts
    gpus = [gpu.uuid for gpu in chosen(plan.needs, facts.gpu)]
    return digest_of([gpus, facts.gpu.driver, facts.system.kernel, facts.system.cmdline])


def nccl_of(plan: Plan) -> NcclAdvice:
    """The NCCL settings for this host: what a deep probe proved here, else what its state says.

    Where the state cannot be read now, what the service was started with stays.
    """
    known = readable(plan.needs, plan.facts)
    proof, service = plan.receipt(STEP), plan.receipt("service")
    if proof and (not known or proof.detail.get("of") == proof_key(plan)):
        advice = _advice_in(proof.detail.get("nccl"))
        if advice:
            return advice
    kept = _advice_in(service.detail.get("nccl")) if service and not known else None
    return kept or nccl_advice(plan.needs, plan.facts)


def _advice_in(detail: Any) -> NcclAdvice | None:
    try:
        return NcclAdvice(**detail)
    except TypeError:
        return None
