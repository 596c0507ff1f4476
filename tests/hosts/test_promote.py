"""Promotion on real hosts: a faster mode is kept when it earned it; in every other case eager is back up."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest
from machines import Machine
from serving import PACE, ROOT, Client, Served, unchanged, wait_for

EAGER, FAST = "eager", "optimized"


@pytest.fixture(scope="module", params=["systemd", "container"])
def host(
    request: pytest.FixtureRequest, hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A host of each kind, provisioned once."""
    machine = Machine(request.param, "gpu1")
    try:
        machine.start()
        served = Served(machine, tmp_path_factory.mktemp("site"))
        served.run("site")
        yield served
    finally:
        machine.stop()


@pytest.fixture
def served(host: Served) -> Served:
    """It serves eager, proven, without faults; whatever the test before did."""
    host.calm()
    host.run("rollback")
    assert (host.mode(), host.at_boot()) == (EAGER, EAGER)
    return host


def trials(served: Served) -> int:
    """How often a mode was started on trial or for clients, by the host's own record."""
    text = served.machine.run(
        f"cat {ROOT}/run/starts/rackwright-optimized.json 2>/dev/null || echo '[]'"
    ).stdout
    return len(json.loads(text))


def assert_eager_is_back(served: Served) -> None:
    assert served.mode() == EAGER
    assert served.answers()
    assert served.at_boot() == EAGER
    assert len(served.engines()) == 1, "the mode on trial is gone"
    trial = f"/etc/systemd/system/rackwright-trial.service {ROOT}/run/programs/rackwright-trial.conf"
    left = served.machine.run(f"ls {trial} 2>/dev/null", check=False).stdout
    assert left == ""


def test_a_faster_mode_that_earns_it_is_kept_and_promoting_again_changes_nothing(served: Served) -> None:
    with Client(served) as client:
        output = served.run("promote")
    assert client.wrong == []
    assert client.right > 5
    assert (served.mode(), served.at_boot()) == (FAST, FAST)
    assert served.answers()
    evidence = served.report("promote")["promotion"]
    assert evidence["verdict"] == "promoted"
    for column in ("safe", "candidate"):
        assert {row["concurrency"] for row in evidence[column]["bench"]} == {1, 2}
        assert all(row["tokens_per_second"] > 0 for row in evidence[column]["bench"])
    assert "tokens/s at 1" in output, "both columns are shown"
    assert evidence["candidate"]["trial"]["seconds"] > 0
    assert evidence["candidate"]["start"]["seconds"] > 0
    before = served.pids()
    assert unchanged(served.run("promote"))
    assert unchanged(served.run("serve")), "the mode that was proven is the one that is meant"
    assert served.pids() == before
    served.machine.reboot()
    if served.machine.kind == "container":
        served.run("start")
    wait_for(lambda: served.mode() == FAST and served.answers())


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (("dies_at_start",), "gave-up ended crash"),
        (("never_ready",), "deadline phase"),
        (("healthy_but_dies_at_first_request",), "gave-up ended crash"),
        (("hanging",), "deadline"),
        (("wrong_answer",), "acceptance"),
        (("slow=0.04",), "slower"),
        (("dies_at_request=30", PACE), "gave-up ended crash acceptance benchmark warm-up"),
    ],
)
def test_a_mode_that_fails_its_trial_never_meets_a_client_and_eager_is_back(
    served: Served, faults: tuple[str, ...], reason: str
) -> None:
    served.fast_faults(*faults)
    with Client(served) as client:
        output = served.run("promote", rc=1)
        wait_for(served.answers)
    assert client.wrong == []
    assert client.right > 3
    assert_eager_is_back(served)
    evidence = served.report("promote")["promotion"]
    assert evidence["verdict"] == "rolled-back"
    assert evidence["reason"] in reason.split()
    assert "eager serves again" in output
    assert evidence["safe"]["bench"], "eager's column is there"
    start = evidence["safe"]["start"]["seconds"]
    back = next(seconds for name, seconds in evidence["steps"] if name == "bringing eager back")
    # its own start, and stopping the other one
    assert back < start + 15
    assert served.report("promote")["verdict"] == "fail"


def test_a_promotion_goes_on_when_its_controller_is_killed(served: Served) -> None:
    served.fast_faults("slow_start=5", PACE)
    process = served.site.start("promote", "-y", start_new_session=True)
    wait_for(lambda: served.mode() == "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: served.mode() == FAST and served.at_boot() == FAST, 90)
    served.fast_faults(PACE)
    assert unchanged(served.run("promote"))


def test_a_controller_that_comes_back_attaches_and_of_two_only_one_promotes(served: Served) -> None:
    served.fast_faults("slow_start=4", PACE)
    before = trials(served)
    first = served.site.start("promote", "-y")
    second = served.site.start("promote", "-y")
    outputs = [process.communicate(timeout=240)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert trials(served) - before == 2, "one start on trial and one for clients"
    assert served.mode() == FAST


def test_when_the_promotion_itself_is_killed_its_guard_brings_eager_back(served: Served) -> None:
    served.fast_faults("slow_start=8", PACE)
    process = served.site.start("promote", "-y")
    wait_for(lambda: "--port" in str(served.engines()) and served.mode() == "")
    if served.machine.kind == "systemd":
        served.machine.run("systemctl kill --signal=KILL rackwright-job-promote.service")
    else:
        served.machine.run(
            "kill -9 -- -$(ps -o pgid= -p $(pgrep -f '[p]romotion.py run' | head -1) | tr -d ' ')"
        )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert_eager_is_back(served)
    assert "was killed while" in output
    assert served.report("promote")["promotion"]["verdict"] == "rolled-back"


def test_a_host_that_restarts_amid_a_promotion_comes_up_eager(served: Served) -> None:
    served.fast_faults("slow_start=8", PACE)
    process = served.site.start("promote", "-y")
    wait_for(lambda: "--port" in str(served.engines()) and served.mode() == "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    served.machine.reboot()
    if served.machine.kind == "container":
        assert served.mode() == ""
        served.machine.run(f"sh {ROOT}/run/up.sh")
    wait_for(lambda: served.mode() == EAGER and served.answers())
    served.calm()
    served.run("promote")
    assert served.mode() == FAST


def test_rollback_ends_a_promotion_at_once(served: Served) -> None:
    served.fast_faults("slow_start=15", PACE)
    process = served.site.start("promote", "-y")
    wait_for(lambda: "--port" in str(served.engines()) and served.mode() == "")
    began = time.monotonic()
    served.run("rollback")
    assert time.monotonic() - began < 30
    assert_eager_is_back(served)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a rollback was asked for" in output


def test_while_a_promotion_runs_nobody_else_starts_or_stops_modes(served: Served) -> None:
    served.fast_faults("slow_start=16", PACE)
    process = served.site.start("promote", "-y")
    wait_for(lambda: "--port" in str(served.engines()) and served.mode() == "")
    assert "attach to it with: rackwright promote" in served.run("status", rc=1)
    for verb in ("stop", "restart"):
        assert "a promotion is running" in served.run(verb, rc=1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert served.mode() == FAST


def test_rollback_after_a_promotion_serves_eager_from_now_on(served: Served) -> None:
    served.run("promote")
    served.run("rollback")
    assert_eager_is_back(served)
    assert unchanged(served.run("rollback"))
    assert unchanged(served.run("serve"))


def test_uninstall_amid_a_promotion_leaves_nothing_that_comes_back(served: Served) -> None:
    # the last test of this host
    served.fast_faults("slow_start=12", PACE)
    process = served.site.start("promote", "-y")
    wait_for(lambda: "--port" in str(served.engines()) and served.mode() == "")
    served.run("uninstall")
    process.communicate(timeout=120)
    assert process.returncode == 1
    time.sleep(5)
    assert served.engines() == []
    assert served.machine.run("pgrep -f '[p]romotion.py|[s]upervisord -c' || :").stdout == ""
    assert served.machine.run(f"ls {ROOT} /etc/systemd/system/rackwright* 2>/dev/null || :").stdout == ""
