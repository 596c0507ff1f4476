"""The last step: the verdict, where the report lies, and how to go on from here."""

from __future__ import annotations

import atexit
import json

from tasks.plan import Plan
from tasks.receipts import Receipt
from tasks.steps import Done
from tasks.streams import print_last
from tasks.typed import filled


class Summary:
    """Says what was proven. It reads and tells; it never changes the host."""

    name = "summary"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return "report"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def unchanged(self) -> str | None:
        """Write the report and print the way on; there is nothing to change on the host."""
        plan = self.plan
        if not plan.host.state.is_executing:
            return "written when the run ends"
        spec = plan.spec()
        curl = curl_line(plan)
        plan.record.note(
            endpoint=f"{spec.base_url}/v1",
            curl=curl,
            pins=[pin for step in ("engine", "weights", "tools") for pin in _pins(plan.receipt(step))],
            commands=plan.remote.commands,
        )
        plan.record.finish("pass")
        rows = [
            ("endpoint", f"{spec.base_url}/v1   (model: {spec.model_name}, mode: {spec.mode})"),
            ("try it", curl),
            ("report", str(plan.record.page)),
            ("look", "rackwright status INVENTORY"),
            ("remove", "rackwright uninstall INVENTORY -y"),
        ]
        say_last(plan.name, [f"  {key.ljust(9)} {value}" for key, value in rows])
        return "the report is written"

    def act(self) -> Done:
        """Never reached: `unchanged` always answers."""
        return Done(receipt=False)


STEPS = ("environment", "tools", "engine", "weights", "service", "acceptance")


def retell(plan: Plan) -> bool:
    """Put what earlier runs left on the host into this run's report. Reads only.

    Returns whether the engine there has been accepted; a host that was not is said so.
    """
    plan.record.open()
    for name in STEPS:
        receipt = plan.receipt(name)
        if receipt is not None:
            why = f"done {receipt.at} by {receipt.tool}"
            plan.record.step(
                name, "unchanged", label=name, seconds=receipt.seconds, why=why, detail=receipt.detail
            )
    accepted = plan.receipt("acceptance")
    if accepted is None:
        plan.record.finish("fail", "nothing has been accepted on this host")
        plan.complain(f"nothing has been accepted on {plan.name}\nFix: rackwright site INVENTORY")
        plan.say(f"report: {plan.record.page}")
        return False
    plan.record.note(acceptance=accepted.detail.get("result"))
    return True


_last: list[str] = []


def say_last(host: str, lines: list[str]) -> None:
    """Print lines when the run is over, below pyinfra's own results, on stdout: they are the result."""
    if not _last:
        atexit.register(lambda: print_last("\n".join(_last)))
    _last.extend(["", f"{host}:", *map(filled, lines)])


def curl_line(plan: Plan) -> str:
    """A command that works when pasted on the host; its key comes from the file, in no argv and not shown."""
    spec = plan.spec()
    # printf is the shell's own: no process has the key among its words
    key = f'printf %s "Authorization: Bearer $(cat {spec.key_file})" | ' if spec.key_file else ""
    headers = "-H 'Content-Type: application/json'" + (" -H @-" if key else "")
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": spec.model_name, "max_tokens": 32, "messages": messages})
    return f"{key}curl -s {spec.base_url}/v1/chat/completions {headers} -d '{body}'"


def _pins(receipt: Receipt | None) -> list[dict[str, object]]:
    if receipt is None:
        return []
    return [
        {"name": artifact.file, "version": None, "sha256": artifact.sha256, "source": receipt.step}
        for artifact in receipt.artifacts
    ]
