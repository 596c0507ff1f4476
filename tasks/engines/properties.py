"""Whether what was installed is the engine that the recipe means, by properties."""

from __future__ import annotations

import json

from tasks.plan import Plan
from tasks.recipe import SourceRoute, WheelRoute
from tasks.steps import job, onhost, python_of


def verified(
    plan: Plan, pins: WheelRoute | SourceRoute, key: str, versions: dict[str, str] | None = None
) -> list[str]:
    """Run `verify_engine.py` for a recipe's properties; the names of its checks, [] where there are none.

    Raises StepFailed with what the first failure means.
    """
    hardware = plan.recipe.hardware
    request = {
        "extensions": pins.extensions,
        "ops": pins.ops,
        "files": pins.files if isinstance(pins, WheelRoute) else [],
        "equal": [list(pair) for pair in pins.same_version],
        "versions": versions or {},
        "cuda_major": pins.cuda_major,
        "gpus": hardware.count,
        "capability": hardware.compute_capability if hardware.count else None,
    }
    if not any(request.values()):
        return []
    argv = (python_of(plan), onhost(plan, "verify_engine.py"), "--stdin")
    outcome = job(plan, "engine-verify", key, argv, stdin=json.dumps(request), again=True, deadline=3600)
    return [str(check["id"]) for check in outcome.result.get("checks", [])]
