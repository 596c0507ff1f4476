"""Which mode of the engine was proven last on a host: it is the one that starts with the host."""

from __future__ import annotations

import time
from typing import Any

from tasks.installed import installed_of
from tasks.launch import LaunchSpec
from tasks.plan import Plan
from tasks.receipts import Receipt
from tasks.steps import StepFailed

STEP = "proven"


def proven_mode(plan: Plan) -> str | None:
    """The mode that was proven last, if the recipe still has it."""
    receipt = plan.receipt(STEP)
    mode = receipt.detail.get("mode") if receipt else None
    return str(mode) if mode in plan.recipe.serve.modes else None


def proof_of(plan: Plan, mode: str) -> dict[str, Any] | None:
    """What was proven of one mode, whether or not it is the last one; None when nothing was.

    A proof counts for the very LaunchSpec that it was made with.
    """
    receipt = plan.receipt(STEP)
    proof: dict[str, Any] | None = (receipt.detail.get("modes") or {}).get(mode) if receipt else None
    return proof if proof and proof.get("spec") == plan.spec(mode).digest else None


def proven_as_installed(plan: Plan, spec: LaunchSpec) -> str | None:
    """The beginning of the digest that a service is installed with, if its mode was proven with that."""
    receipt, now = plan.receipt(STEP), installed_of(plan, spec.name)
    if receipt is None or now is None or not now.spec:
        return None
    proof = str(((receipt.detail.get("modes") or {}).get(spec.mode) or {}).get("spec") or "")
    return now.spec if proof.startswith(now.spec) else None


def proven_otherwise(plan: Plan, spec: LaunchSpec) -> bool:
    """The service is installed with other flags than it would have now, and with those it was proven."""
    proven = proven_as_installed(plan, spec)
    return proven is not None and not spec.digest.startswith(proven)


def boot_mode(plan: Plan, otherwise: str) -> str:
    """The mode that starts with the host: the one proven last, else the one being installed."""
    return proven_mode(plan) or otherwise


def proof_receipt(plan: Plan, mode: str, proof: dict[str, Any] | None = None) -> Receipt:
    """The receipt that makes `mode` the one proven last and keeps what is known of the others.

    Without a `proof` of now, what was known of `mode` itself stays too.
    """
    old = plan.receipt(STEP)
    modes = dict(old.detail.get("modes") or {}) if old else {}
    if proof is not None:
        modes[mode] = {"spec": plan.spec(mode).digest, **proof}
    return Receipt(STEP, plan.spec(mode).digest, 0, {"mode": mode, "modes": modes})


def keep_proof(plan: Plan, mode: str, proof: dict[str, Any]) -> None:
    """Record that `mode` was proven now, and have it start with the host. Raises StepFailed."""
    receipt = proof_receipt(plan, mode, {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **proof})
    boot = plan.supervisor.at_boot(plan.spec(mode).name, plan.service_names)
    done = plan.remote.run(f"{receipt.write(plan.layout.receipts)} && {{ {boot}; }}", timeout=120)
    if not done.ok:
        raise StepFailed(f"the proof cannot be kept: {done.stderr.strip() or done.stdout.strip()}")


def counts(acceptance: dict[str, Any]) -> dict[str, int]:
    """How many checks of an acceptance result passed, failed and were skipped."""
    verdicts = [check.get("verdict") for check in acceptance.get("checks", [])]
    return {word: verdicts.count(word) for word in ("pass", "fail", "skipped")}
