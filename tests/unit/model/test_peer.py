"""When a host waits for its peer, and when it does not; the peer's own address."""

from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.jobs import parse_status
from tasks.model import peer
from tasks.onhost import serve_weights


class Hosts:
    """The hosts of one run, as pyinfra's state and rackwright's plans show them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.failed_hosts: set[str] = set()
        self.left_out: set[str] = set()
        self.inventory = SimpleNamespace(get_host=lambda name: name)
        self.said: list[str] = []
        self.verified: dict[str, bool] = {}
        self.jobs: dict[str, str] = {}
        self.looks = 0
        self.on_look: dict[int, Any] = {}
        monkeypatch.setattr(peer, "has_model", lambda plan: self.verified.get(plan.name, False))
        monkeypatch.setattr(peer.time, "sleep", self.sleep)
        monkeypatch.setattr(peer, "_deliveries", {})
        monkeypatch.setattr(peer, "_waits", {})

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def is_host_in_limit(self, host: str) -> bool:
        return host not in self.left_out

    def plan(self, name: str, model: str = "x") -> Any:
        plan = SimpleNamespace(
            name=name,
            host=SimpleNamespace(state=self),
            recipe=SimpleNamespace(model=SimpleNamespace(name=model)),
            say=self.said.append,
            state=SimpleNamespace(jobs={}),
        )

        def look() -> None:
            self.looks += 1
            assert self.looks < 500, "waits for ever"
            self.on_look.get(self.looks, lambda: None)()
            state = self.jobs.get(name, "absent")
            plan.state.jobs = {"weights": parse_status(f"state={state}\n")}

        plan.look = look
        return plan

    def wait(self, one: str = "gpu2", other: str = "gpu1", model: str = "x") -> None:
        peer.wait_for_model(self.plan(one), self.plan(other, model), lambda: self.now)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


def test_a_peer_that_has_the_model_is_not_waited_for(hosts: Hosts) -> None:
    hosts.verified["gpu1"] = True
    hosts.wait()
    assert (hosts.looks, hosts.said) == (1, [])


def test_a_peer_at_work_in_the_same_run_is_waited_for_however_long_it_takes(hosts: Hosts) -> None:
    with peer.delivering(hosts.plan("gpu1")):
        hosts.on_look[300] = lambda: hosts.verified.update(gpu1=True)
        hosts.wait()
    assert hosts.now > 10 * peer.BEGIN_SECONDS
    assert len(hosts.said) > 10 and "gpu1" in hosts.said[0]


def test_a_peer_that_another_controller_feeds_is_waited_for(hosts: Hosts) -> None:
    hosts.left_out.add("gpu1")
    hosts.jobs["gpu1"] = "running"
    hosts.on_look[9] = lambda: (hosts.jobs.clear(), hosts.verified.update(gpu1=True))
    hosts.wait()
    assert hosts.looks == 9


def test_a_peer_that_is_about_to_begin_gets_a_minute(hosts: Hosts) -> None:
    with pytest.raises(peer.NoPeer, match="does not have the verified model"):
        hosts.wait()
    assert peer.BEGIN_SECONDS < hosts.now < 2 * peer.BEGIN_SECONDS


@pytest.mark.parametrize("how", ["left out", "failed", "ended without it"])
def test_a_peer_that_will_not_get_it_is_given_up_at_once(how: str, hosts: Hosts) -> None:
    if how == "left out":
        hosts.left_out.add("gpu1")
    elif how == "failed":
        hosts.failed_hosts.add("gpu1")
    else:
        with peer.delivering(hosts.plan("gpu1")):
            pass
    with pytest.raises(peer.NoPeer, match="does not have"):
        hosts.wait()
    assert hosts.looks == 1


def test_what_ended_between_two_looks_is_seen(hosts: Hosts) -> None:
    delivery = peer.delivering(hosts.plan("gpu1"))
    delivery.__enter__()

    def end() -> None:
        delivery.__exit__(None, None, None)

    hosts.on_look[2] = end
    hosts.on_look[3] = lambda: hosts.verified.update(gpu1=True)
    hosts.wait()
    assert hosts.looks == 3


def test_hosts_that_wait_for_each_other_do_not_wait(hosts: Hosts) -> None:
    run = id(hosts)
    peer._waits.update({(run, "gpu1"): "gpu3", (run, "gpu3"): "gpu2"})
    with peer.delivering(hosts.plan("gpu1")), pytest.raises(peer.NoPeer, match="waits for this host itself"):
        hosts.wait("gpu2", "gpu1")
    assert (run, "gpu2") not in peer._waits


def test_a_peer_with_another_model_is_refused(hosts: Hosts) -> None:
    with pytest.raises(peer.NoPeer, match="another model, y"):
        hosts.wait(model="y")
    assert hosts.looks == 0


def test_a_peer_serves_as_long_as_a_delivery_may_last_however_long_nobody_asks_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(peer, "start_script", lambda work, program: started.append(work) or "true")
    monkeypatch.setattr(peer, "status", lambda *_: parse_status("state=running\n"))

    def run(script: str, **_: Any) -> Any:
        answer = "started" if script == "true" else "e30= e30="  # `{}` twice: what it says of itself
        return SimpleNamespace(ok=True, stdout=answer, stderr="")

    one, other = hosts.plan("gpu2"), hosts.plan("gpu1")
    one.settings = SimpleNamespace(peer_address="10.0.0.1", peer_port=None)
    other.layout = SimpleNamespace(run="/r/run", jobs="/r/jobs", tools="/r/tools", env="/r/env")
    other.remote, other.lib, other.model_dir = SimpleNamespace(run=run), "/r/lib", "/models/x"
    other.state.has = lambda step: True
    assert peer._start(one, other, "token") == ({}, "{}")
    (work,) = started
    request = serve_weights.checked(json.loads(work.stdin))
    # another source may serve for hours before this one is needed
    assert request["idle"] == request["last"] == peer.LAST_SECONDS


def test_the_peers_address_is_that_of_the_connection_also_below_sudo() -> None:
    environ = {**os.environ, "SSH_CONNECTION": "10.0.0.9 5555 10.0.0.1 22"}
    direct = subprocess.run(["sh", "-c", peer.ADDRESS], env=environ, capture_output=True, text=True)
    below = subprocess.run(
        # as sudo does it: the variable is gone for the command, and its parent still has it
        ["sh", "-c", 'env -u SSH_CONNECTION sh -c "$1"; :', "x", peer.ADDRESS],
        env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert (direct.stdout.strip(), below.stdout.strip()) == ("10.0.0.1", "10.0.0.1")
