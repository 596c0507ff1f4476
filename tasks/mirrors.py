"""Which mirror is the fastest from a host: measured there, briefly, printed and recorded."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from tasks.digest import digest_of
from tasks.paths import INVENTORIES
from tasks.plan import Plan
from tasks.proxy import through_proxy
from tasks.remote import quote
from tasks.steps import Done, StepFailed, onhost

GITHUB = "https://github.com/"
MEASURE_SECONDS = 60


def candidates() -> dict[str, Any]:
    """The servers that are compared, by kind."""
    return tomllib.loads((INVENTORIES / "mirrors.toml").read_text("utf-8"))


def picked(plan: Plan, name: str, default: Any) -> Any:
    """What a measurement of this host chose, while the site asks for measurements; else `default`."""
    receipt = plan.receipt("mirrors")
    if plan.settings.mirrors != "auto" or receipt is None:
        return default
    chosen = receipt.detail.get("chosen") or {}
    return chosen.get(name) or default


def others(plan: Plan, kind: str) -> list[str]:
    """Servers of a kind that answered the measurement and were not chosen, the fastest first.

    A mirror may answer and still lack what was published today.
    """
    receipt = plan.receipt("mirrors")
    if plan.settings.mirrors != "auto" or receipt is None:
        return []
    rows = [row for row in (receipt.detail.get("measured") or {}).get(kind, []) if row["ok"]]
    chosen = (receipt.detail.get("chosen") or {}).get(kind) or candidates()[kind]["candidates"][0]
    bases = [str(row["base"]) for row in sorted(rows, key=lambda row: float(row["seconds"]))]
    return [base for base in bases if base.rstrip("/") != chosen.rstrip("/")]


def as_settings(chosen: dict[str, str | None]) -> dict[str, Any]:
    """A measurement's choices in the words of the settings; a kind's own server needs no word."""
    found: dict[str, Any] = {}
    for name in ("index_url", "hub_endpoint"):
        base = chosen.get(name)
        if base and base != candidates()[name]["candidates"][0]:
            found[name] = base.rstrip("/")
    if chosen.get("torch_index_base"):
        found["torch_index_base"] = chosen["torch_index_base"]
    github = chosen.get("github")
    if github and github != GITHUB:
        found["url_mirrors"] = {GITHUB: github}
    return found


class Mirrors:
    """`mirrors = "auto"`: the host's own measurement, once."""

    name = "mirrors"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return "mirrors: the fastest servers from this host"

    def digest(self) -> str:
        """The candidates."""
        return digest_of(candidates())

    def unchanged(self) -> str | None:
        """Measured before with the same candidates."""
        receipt = self.plan.receipt(self.name)
        if receipt and receipt.digest == self.digest():
            return f"measured {receipt.at}: {_told(receipt.detail.get('chosen') or {})}"
        return None

    def act(self) -> Done:
        """Ask all at once, within a minute."""
        plan = self.plan
        argv = through_proxy(plan, ("python3", onhost(plan, "measure_mirrors.py"), "--stdin"))
        answer = plan.remote.run(
            " ".join(quote(word) for word in argv),
            stdin=json.dumps({"kinds": candidates()}),
            timeout=MEASURE_SECONDS,
        )
        try:
            result = json.loads(answer.stdout)
        except ValueError:
            why = answer.stderr.strip()[-300:] or "no answer"
            raise StepFailed(f"mirrors cannot be measured: {why}\nFix: set index_url by hand") from None
        chosen = as_settings(result["chosen"])
        for kind, rows in result["measured"].items():
            told = [
                f"{row['base']} {row['seconds']} s" if row["ok"] else f"{row['base']} no answer"
                for row in rows
            ]
            plan.say(f"mirrors: {kind}: {', '.join(told)}")
        plan.say(f"mirrors: {_told(chosen)}")
        return Done(detail={"chosen": chosen, "measured": result["measured"]})


def _told(chosen: dict[str, Any]) -> str:
    lines = [f"{name} = {value}" for name, value in chosen.items() if name != "torch_index_base"]
    return ", ".join(lines) or "everything from its own server"
