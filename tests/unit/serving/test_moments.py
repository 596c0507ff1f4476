"""What verbs say of the moment: nothing serves, it starts, it restarts, a promotion runs, other settings."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import promote, service, startup, verbs
from tasks.installed import Installed, differences
from tasks.jobs import JobState, Outcome
from tasks.launch import LaunchSpec, launch_spec
from tasks.promote import Promote, Rollback
from tasks.receipts import Receipt
from tasks.recipe import TRIAL, load_recipe
from tasks.remote import Result
from tasks.service import refuse_unless_serving, what_serves
from tasks.settings import layout_of, settings_from
from tasks.startup import JOB, Cancelled
from tasks.status import start_told, status_lines
from tasks.steps import StepFailed
from tasks.supervisors import Supervisord
from tasks.supervisors.base import ABSENT, ServiceState
from tasks.switch import Start, Stopped

RECIPE = load_recipe("deepseek-v4-flash-sm120")
SETTINGS = settings_from({"recipe": "deepseek-v4-flash-sm120", "root": "/opt/rw"}, lambda key: "here")
LAYOUT = layout_of(SETTINGS)
UP = ServiceState(True, "RUNNING", True, pid=7, identity="7@1", since=90)
STOPPED = ServiceState(True, "STOPPED", False)


class Host:
    """A plan whose host says what the test wants."""

    def __init__(self, **services: ServiceState) -> None:
        self.recipe, self.settings, self.layout, self.route = RECIPE, SETTINGS, LAYOUT, "source"
        self.name, self.lib, self.mode, self.trial_name = (
            "gpu1",
            "/opt/rw/lib/1",
            "eager",
            f"rackwright-{TRIAL}",
        )
        self.service_names = tuple(f"rackwright-{mode}" for mode in (*RECIPE.serve.modes, TRIAL))
        self.services = dict.fromkeys(self.service_names, ABSENT)
        self.services.update({f"rackwright-{mode}": state for mode, state in services.items()})
        self.supervisor = Supervisord(LAYOUT, "rackwright")
        self.facts = SimpleNamespace(system=SimpleNamespace(epoch=100, boot_id="b"))
        self.receipts = {"service": Receipt("service", "d", 0, {"mode": "eager"})}
        self.state = SimpleNamespace(jobs={}, installed={}, receipts={}, sums={}, has=lambda flag: True)
        self.printed = ""
        self.job_log = ""
        self.remote = SimpleNamespace(run=self.run)
        self.asked: list[str] = []

    def run(self, script: str, **_: Any) -> Result:
        self.asked.append(script)
        if "job.sh" in script and " status " in script:
            return Result(0, f"state=running\nlog={base64.b64encode(self.job_log.encode()).decode()}\n", "")
        return Result(0, self.printed, "")

    def spec(self, mode: str | None = None, *, trial_port: int | None = None) -> LaunchSpec:
        return launch_spec(
            RECIPE, SETTINGS, LAYOUT, mode or self.mode, user="rackwright", trial_port=trial_port
        )

    def look(self) -> None:
        self.asked.append("look")

    def say(self, text: str) -> None:
        self.asked.append(f"said: {text}")

    @property
    def service(self) -> ServiceState:
        return self.services[self.spec().name]

    def receipt(self, step: str) -> Receipt | None:
        return self.receipts.get(step)

    def runs(self, job: str, log: str = "") -> None:
        """A job runs on the host."""
        self.state.jobs[job] = JobState("running", "k", None, 40, None, 100, "", "")
        self.job_log = log

    def installs(self, **flags: str) -> None:
        """What the program of the eager mode starts; other flags than the inventory's."""
        argv = list(self.spec("eager").argv)
        for name, value in flags.items():
            argv[argv.index(f"--{name}") + 1] = value
        found = Installed(tuple(argv), self.spec("eager").digest[:16], 999)
        self.state.installed = {f"{LAYOUT.run}/programs/rackwright-eager.conf": found}


def answers(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setattr(service, "look_ready", lambda plan, spec: {"ready": stage == "token", "stage": stage})


def refused(plan: Any) -> str:
    with pytest.raises(StepFailed) as why:
        refuse_unless_serving(plan)
    return str(why.value)


def test_who_is_asked_without_a_service_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "closed")
    host: Any = Host(eager=STOPPED)
    assert refused(host) == (
        "nothing serves here: rackwright-eager does not run\nFix: rackwright start INVENTORY"
    )
    assert host.asked == [], "the host was not even asked"
    host.runs(service.PROMOTE_JOB)
    assert "a promotion is running" in refused(host)
    assert "rackwright start" not in refused(host)


def test_who_is_asked_amid_a_start_is_not_told_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "closed")
    waiting = ServiceState(True, "BACKOFF", False, restarts=2)
    brought_up: Any = Host(eager=STOPPED)
    brought_up.runs(JOB)
    for host in (Host(eager=UP), Host(eager=waiting), brought_up):
        assert "is starting and does not answer yet" in refused(host)
        assert "rackwright status INVENTORY" in refused(host)
    answers(monkeypatch, "token")
    assert refuse_unless_serving(Host(eager=UP)).name == "rackwright-eager"  # type: ignore[arg-type]
    assert "add --data mode=optimized" in refused(Host(eager=STOPPED, optimized=UP))


def test_other_settings_than_installed_are_told_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = Host(eager=STOPPED)
    host.installs()
    assert differences(host, host.spec()) is None
    host.installs(port="8017")
    told = f"port 8017, the inventory says {SETTINGS.port}"
    assert differences(host, host.spec()) == told
    for again in (False, True):
        with pytest.raises(StepFailed) as why:
            Start(host, again=again).act()
        assert str(why.value) == (
            f"rackwright-eager is installed with other settings ({told})\nFix: rackwright serve INVENTORY"
        )
    assert host.asked == [], "nothing was started"
    lines, good = status_lines(host)
    assert not good
    assert any(f"other settings ({told}): rackwright serve INVENTORY" in line for line in lines)


def flags_refused(act: Callable[[], Any]) -> bool:
    """It is refused, since what runs was started with other flags."""
    try:
        act()
    except StepFailed as why:
        told = (
            "rackwright-eager runs with other flags than the recipe has now\nFix: rackwright serve INVENTORY"
        )
        assert str(why) == told
        return True
    return False


def test_what_was_started_with_other_flags_is_neither_asked_nor_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, "token")
    monkeypatch.setattr(promote, "acceptance_request", lambda *_: {})
    monkeypatch.setattr(promote, "free_port", lambda plan: 8001)
    monkeypatch.setattr(promote, "prepare", lambda *_: pytest.fail("it was let through"))
    host: Any = Host(eager=UP)

    def refused_by_all() -> set[bool]:
        asked = [lambda: refuse_unless_serving(host), lambda: refuse_unless_serving(host, ask=False)]
        return {flags_refused(act) for act in asked}

    host.installs()
    assert refused_by_all() == {False}
    (path,) = host.state.installed
    host.state.installed[path] = replace(host.state.installed[path], spec="0" * 16)
    assert refused_by_all() == {True}
    assert flags_refused(Promote(host).act)
    # files written anew by a controller that was killed before it restarted anything
    host.installs()
    started = {"mode": "eager", "name": "rackwright-eager", "spec": "1" * 64}
    host.receipts["service"] = Receipt("service", "d", 0, started)
    assert refused_by_all() == {True}
    assert flags_refused(Promote(host).act)
    host.receipts["service"] = Receipt("service", "d", 0, {**started, "spec": host.spec("eager").digest})
    assert refused_by_all() == {False}


def test_a_mode_that_is_stopped_is_promoted_from_with_the_flags_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(promote, "acceptance_request", lambda *_: {})
    monkeypatch.setattr(promote, "free_port", lambda plan: 8001)
    monkeypatch.setattr(promote, "prepare", lambda plan, *specs: prepared.extend(one.name for one in specs))
    monkeypatch.setattr(promote, "promotion_request", lambda *_: {})
    monkeypatch.setattr(promote, "run_promotion", lambda *_: Outcome(True, 1, {}, ""))
    monkeypatch.setattr(promote, "concluded", lambda *_: "over")
    host: Any = Host(eager=STOPPED)
    host.installs()
    (path,) = host.state.installed
    host.state.installed[path] = replace(host.state.installed[path], spec="0" * 16)
    assert Promote(host).act() == "over"
    assert prepared[0] == "rackwright-eager"


def test_stop_amid_a_start_ends_the_start_first_and_looks_again() -> None:
    host: Any = Host(eager=STOPPED, optimized=STOPPED)
    assert Stopped(host).unchanged() == "nothing runs"
    host.runs(JOB)
    assert Stopped(host).unchanged() is None
    Stopped(host).act()
    cancel, look, *stops = host.asked
    assert "job.sh' cancel '/opt/rw/jobs/bring-up' stop" in cancel
    assert look == "look"
    assert [any(name in stop for stop in stops) for name in ("'rackwright-eager'", "'rackwright-optimized'")]


def test_stop_finds_the_service_of_a_mode_that_the_recipe_lost() -> None:
    host: Any = Host(eager=STOPPED)
    host.receipts["service"] = Receipt("service", "d", 0, {"mode": "fastest", "name": "rackwright-fastest"})
    assert Stopped(host).unchanged() is None
    Stopped(host).act()
    assert any("stop 'rackwright-fastest'" in script for script in host.asked)


def test_while_a_guard_brings_the_safe_mode_back_nobody_else_starts_or_stops_anything() -> None:
    host: Any = Host(eager=UP)
    host.state.jobs[service.PROMOTE_JOB] = JobState("dead", "k", None, 40, None, 100, "", "")
    held = Result(1, "", "")
    host.remote.run = lambda script, **_: held if "flock --nonblock" in script else pytest.fail(script)
    for act in (Stopped(host).act, Start(host).act, Start(host, again=True).act):
        with pytest.raises(
            StepFailed, match="eager is being brought back\nFix: wait for it: rackwright status"
        ):
            act()
    host.remote.run = host.run
    Stopped(host).act()
    assert any("stop 'rackwright-eager'" in script for script in host.asked), "the guard is gone"


@pytest.mark.parametrize("again", [False, True])
def test_a_mode_that_the_recipe_lost_is_not_started_and_its_log_is_still_shown(
    monkeypatch: pytest.MonkeyPatch, again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    host: Any = Host(eager=STOPPED)
    host.receipts["service"] = Receipt("service", "d", 0, {"mode": "fastest", "name": "rackwright-fastest"})
    assert Start(host, again=again).unchanged() is None
    with pytest.raises(StepFailed) as why:
        Start(host, again=again).act()
    assert str(why.value) == "the recipe has no mode fastest any more\nFix: rackwright serve INVENTORY"
    monkeypatch.setattr(verbs, "plan_for", lambda *_, **__: host)
    host.printed = "a line of the engine\n"
    verbs.logs(SimpleNamespace(state=SimpleNamespace(inventory=["gpu1"])))
    assert capsys.readouterr().out == "a line of the engine\n"
    assert "/opt/rw/logs/rackwright-fastest.log" in host.asked[-1]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_start_that_somebody_ended_brings_no_other_mode_up(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    host: Any = Host(eager=STOPPED, optimized=STOPPED)
    host.receipts["proven"] = Receipt("proven", "d", 0, {"mode": "optimized", "modes": {}})
    outcome = Outcome(False, 1, {}, "", "it was cancelled on the host (stop)", cancelled=cancelled)
    monkeypatch.setattr(startup, "run_job", lambda *_: outcome)
    for name in ("port_is_ours", "prepare", "retire_former"):
        monkeypatch.setattr(service, name, lambda *_: None)
    monkeypatch.setattr(service.Service, "digest", lambda self: "d2")
    monkeypatch.setattr(service.Service, "draft", lambda self: Receipt("service", "d2", 0))
    with pytest.raises(StepFailed, match="cancelled on the host") as why:
        service.Service(host).act()
    assert isinstance(why.value, Cancelled) == cancelled
    assert any("starting rackwright-optimized again" in line for line in host.asked) != cancelled


def test_only_what_was_proven_and_runs_is_put_back_and_as_it_was_installed() -> None:
    host: Any = Host(eager=UP)
    host.installs(port="8017")
    assert what_serves(host) is None, "nothing was proven"
    proofs = {"eager": {"spec": host.spec("eager").digest}}
    host.receipts["proven"] = Receipt("proven", "d", 0, {"mode": "eager", "modes": proofs})
    old = what_serves(host)
    assert old is not None and (old.name, old.port) == ("rackwright-eager", 8017)
    stopped: Any = Host(eager=STOPPED)
    stopped.state, stopped.receipts = host.state, host.receipts
    assert what_serves(stopped) is None
    (path,) = host.state.installed
    host.state.installed[path] = replace(host.state.installed[path], spec="0" * 16)
    assert what_serves(host) is None, "other settings were proven than those that are installed"


def row(plan: Any, name: str) -> str:
    lines, _ = status_lines(plan)
    return next(line.split(None, 1)[1] for line in lines if line.split()[0] == name)


def test_status_amid_a_promotion_says_what_is_on_trial_and_not_to_start_anything() -> None:
    host: Any = Host(eager=STOPPED, **{TRIAL: replace(UP, since=58)})
    progress = {
        "phase": "starting optimized on trial: loading weights",
        "done": 3,
        "total": 46,
        "unit": "shards",
    }
    host.runs(service.PROMOTE_JOB, f"#progress {json.dumps(progress)}\n")
    told = row(host, "service")
    assert told == (
        "rackwright-eager: away for a promotion; another mode is on trial since 42 s:"
        " starting optimized on trial: loading weights, 3 of 46 shards"
    )
    assert "loading weights" in row(host, "promotion") and "since 1 min 0 s" in row(host, "promotion")


def test_status_amid_a_start_or_between_two_tries_says_how_far_it_is() -> None:
    host: Any = Host(eager=STOPPED)
    host.runs(JOB, '#progress {"phase": "compiling", "done": 0, "total": 0}\n')
    assert row(host, "service") == "rackwright-eager: starting since 1 min 0 s: compiling"
    waiting = Host(eager=ServiceState(True, "BACKOFF", False, restarts=2))
    assert "restarting after a crash (2)" in row(waiting, "service")


def test_a_start_is_told_by_its_log() -> None:
    log = f"rackwright: start 1\nApplication startup complete\nrackwright: start {int(time.time()) - 30}\n"
    now = int(time.time())
    assert start_told(log, now, 0) in (f"starting: starting, since {seconds} s" for seconds in (29, 30, 31))
    loading = log + "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]\n"
    told = start_told(loading, now, 3)
    assert told is not None and told.startswith(
        "restarting after a crash (3): loading weights, 2 of 4 shards"
    )
    assert start_told(log + "Application startup complete\n", now, 0) is None
    assert start_told("", now, 0) is None


@pytest.mark.parametrize("kind", [StepFailed, Cancelled])
def test_a_rollback_that_somebody_ended_writes_nothing_on_the_host_any_more(
    monkeypatch: pytest.MonkeyPatch, kind: type[StepFailed]
) -> None:
    host: Any = Host(eager=STOPPED, optimized=UP)
    host.receipts["proven"] = Receipt("proven", "d", 0, {"mode": "optimized", "modes": {}})
    began: list[int] = []

    def bring_up(*_: Any) -> None:
        began.append(len(host.asked))
        raise kind("it did not come up")

    monkeypatch.setattr(promote, "bring_up", bring_up)
    monkeypatch.setattr(promote, "what_serves", lambda plan: plan.spec("optimized"))
    monkeypatch.setattr(promote, "put_back", lambda *_: {})
    for name in ("port_is_ours", "keep_files", "prepare"):
        monkeypatch.setattr(promote, name, lambda *_: None)
    monkeypatch.setattr(service.Service, "draft", lambda self: Receipt("service", "d2", 0))
    with pytest.raises(kind):
        Rollback(host).act()
    after = host.asked[began[0] :]
    assert [("proven.json" in script, "boot 'rackwright-optimized'" in script) for script in after] == (
        [] if kind is Cancelled else [(True, True)]
    )
