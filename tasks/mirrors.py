"""Which mirror is the fastest from a host: measured there, briefly, printed and recorded."""

from __future__ import annotations

from typing import Any

from tasks.plan import Plan


def picked(plan: Plan, name: str, default: Any) -> Any:
    """What a measurement of this host chose, while the site asks for measurements; else `default`."""
    receipt = plan.receipt("mirrors")
    if plan.settings.mirrors != "auto" or receipt is None:
        return default
    chosen = receipt.detail.get("chosen") or {}
    return chosen.get(name, default)
