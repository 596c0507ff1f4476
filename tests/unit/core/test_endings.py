"""What a person reads when a run stops: what blocks comes last, with its cure; a fault is one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import typed, verbs
from tasks.checks.table import render_blocked
from tasks.findings import fail, ok, skipped, warn
from tasks.mistakes import Mistakes
from tasks.plan import Plan, stop_host
from tasks.recipe import load_recipe
from tasks.record import Record
from tasks.remote import Result
from tasks.settings import Layout
from tasks.uninstall import Uninstall

FOUND = [
    fail("gpu.count", "too few GPUs", observed="2", expected="4", fix="use a host with 4 GPUs"),
    warn("disk.speed", "slow disk", fix="use another one"),
    skipped("deep.nccl", "not asked for"),
    *(ok(f"host.{number}", "fine") for number in range(30)),
]


def test_what_blocks_comes_last_with_its_cure_and_what_passed_is_counted() -> None:
    lines = render_blocked(FOUND).splitlines()
    assert lines[-1].split() == ["mend", "use", "a", "host", "with", "4", "GPUs"]
    assert sum("fine" in line for line in lines) == 0
    counted = [line for line in lines if "30 checks passed" in line]
    assert counted and "1 skipped; all of them: rackwright preflight INVENTORY" in counted[0]
    assert next(line for line in lines if "slow disk" in line).split()[0] == "WARN"


def test_warnings_that_block_come_last_too() -> None:
    text = render_blocked(FOUND[1:], strict=True)
    assert text.splitlines()[-1].split() == ["mend", "use", "another", "one"]
    assert text.count("slow disk") == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [("/nope/x.toml", "no such file"), ("mine/x", "must end with .toml"), ("rehersal-cpu", "did")],
)
def test_a_recipe_that_is_not_there_is_told_by_what_was_meant(name: str, hint: str) -> None:
    with pytest.raises(Mistakes, match=hint):
        load_recipe(name)


def test_a_report_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    record = Record(tmp_path / "file" / "h", "site", "h", {})
    record.open()
    record.step("engine", "done")
    said = capsys.readouterr().err
    assert said.count("the report cannot be written") == 1
    assert "Fix: free space or make it writable, then: rackwright report" in said


class Host:
    """A host on which every command ends well, and what was said while it ran."""

    def __init__(self, root: str) -> None:
        self.layout = Layout(root, f"{root}/models")
        self.model_dir = f"{root}/models/m"
        self.name = "h"
        self.said: list[str] = []
        self.ran: list[str] = []
        self.remote = self
        self.state = SimpleNamespace(foreign_root=False, has=lambda name: True)
        self.supervisor = SimpleNamespace(name="supervisord", remove=lambda names: "remove-service")
        self.service_names = ("s",)

    def run(self, script: str, **more: Any) -> Result:
        self.ran.append(self.said[-1] if self.said else "nothing was said before")
        return Result(0, "", "")

    def say(self, text: str) -> None:
        self.said.append(text)

    def receipt(self, step: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        system, serve = SimpleNamespace(uid=0, home="/root"), SimpleNamespace(stop_seconds=1)
        return SimpleNamespace(instance="i", model_root=None, system=system, serve=serve)


def test_uninstall_says_what_it_removes_before_it_does() -> None:
    host: Any = Host("/srv/rack")
    Uninstall(host).act()
    assert "uninstall: stop and remove the service" in host.said
    assert "uninstall: remove the weights: /srv/rack/models/m" in host.said
    assert host.ran == [line for line in host.said if line.startswith("uninstall: ")]


class Loud:
    """A pyinfra host that keeps what is logged, and the state that hosts fail in."""

    name = "h"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.state = self
        self.failed: set[Any] = set()

    def log_styled(self, text: str, **more: Any) -> None:
        self.said.append(text)

    def fail_hosts(self, hosts: set[Any]) -> None:
        self.failed |= hosts


def test_logs_of_a_host_without_a_service_fail_and_say_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host: Any = Loud()
    absent = SimpleNamespace(installed=False)
    plan = SimpleNamespace(host=host, name="h", services={"s": absent}, receipt=lambda step: None)
    monkeypatch.setattr(verbs, "plan_for", lambda host, verb, preflight: plan)
    verbs.logs(host)
    assert host.said == ["no service is installed here", "Fix: rackwright site INVENTORY"]
    assert host.failed == {host}


def test_what_leaves_for_a_person_or_a_report_names_the_inventory_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "_typed", typed.Typed("mine.py", (("--data", "port=1"),)))
    host: Any = Loud()
    stop_host(host, host, "no\nFix: rackwright site INVENTORY")
    assert host.said[-1] == "Fix: rackwright site mine.py --data port=1"
    record = Record(tmp_path, "site", "h", {})
    record.open()
    record.note(findings=[{"fix": "rackwright start INVENTORY"}])
    record.finish("fail", "rackwright status INVENTORY")
    found = json.loads((tmp_path / "site.json").read_text("utf-8"))
    assert found["why"] == "rackwright status mine.py --data port=1"
    assert found["findings"][0]["fix"] == "rackwright start mine.py --data port=1"


def test_what_a_host_says_is_shown_without_its_escapes_and_what_we_draw_in_our_colours() -> None:
    shown: list[str] = []

    class Host:
        name = "a-host-that-speaks"
        state = SimpleNamespace(fail_hosts=lambda hosts: None)

        def log(self, text: str, how: Any) -> None:
            shown.append(text)

        def log_styled(self, text: str, **how: Any) -> None:
            shown.append(text)

    host = Host()
    plan: Any = SimpleNamespace(host=host, name=host.name, show=lambda text: Plan.show(plan, text))
    said = "\x1b]0;mine\x07\x1b[2Jstopped\x1b[0m"
    Plan.say(plan, said)
    Plan.complain(plan, said)
    stop_host(host, host, said)
    assert shown == ["stopped"] * 3
    Plan.show(plan, "\x1b[31mFAIL\x1b[0m")
    assert shown[3] == "\x1b[31mFAIL\x1b[0m"
