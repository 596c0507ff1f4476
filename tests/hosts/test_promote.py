"""Promotion on real hosts: a faster mode is kept when it earned it; in every other case eager is back up."""

from __future__ import annotations

import signal

import pytest
from machines import free_port
from serving import PACE, ROOT, Client, Served, on_trial, provisioned, unchanged, wait_for

EAGER, FAST = "eager", "optimized"


@pytest.fixture(scope="module", params=["systemd", "container"])
def host(
    request: pytest.FixtureRequest, hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A host of each kind; it is provisioned once."""
    return provisioned(request, request.param, tmp_path_factory.mktemp("site"))


@pytest.fixture
def served(host: Served) -> Served:
    """It serves eager, proven, without faults; whatever the test before did."""
    host.calm()
    if not host.serves(EAGER):
        host.run("rollback")
    assert host.serves(EAGER)
    return host


def assert_eager_is_back(served: Served) -> None:
    assert served.serves(EAGER)
    assert len(served.engines()) == 1, "the mode on trial is gone"
    trial = f"/etc/systemd/system/rackwright-trial.service {ROOT}/run/programs/rackwright-trial.conf"
    left = served.machine.run(f"ls {trial} 2>/dev/null", check=False).stdout
    assert left == ""


def test_a_faster_mode_that_earns_it_is_kept_and_promoting_again_changes_nothing(served: Served) -> None:
    with Client(served) as client:
        output = served.run("promote")
    assert client.wrong == []
    assert client.right > 5
    assert served.serves(FAST)
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
    wait_for(lambda: served.serves(FAST))


def test_rollback_after_a_promotion_serves_eager_from_now_on(host: Served) -> None:
    host.calm()
    if not host.serves(FAST):
        host.run("promote")
    host.run("rollback")
    assert_eager_is_back(host)
    assert unchanged(host.run("rollback"))
    assert unchanged(host.run("serve"))


def test_a_rollback_that_cannot_succeed_leaves_what_serves(host: Served) -> None:
    host.calm()
    if not host.serves(FAST):
        host.run("promote")
    before = host.pids()
    output = host.run("rollback", "--data", f"port={free_port()}", rc=1)
    assert "installed with other settings" in output
    assert host.pids() == before, "it was refused before anything was stopped"
    host.eager_faults("dies_at_start")
    assert "optimized serves again as before" in host.run("rollback", rc=1)
    wait_for(lambda: host.serves(FAST))


def test_a_rollback_is_to_what_was_proven_whatever_the_recipe_says_now(host: Served) -> None:
    host.calm()
    if not host.serves(FAST):
        host.run("promote")
    host.recipe(host.recipe().replace("[serve.flags]", "[serve.flags]\nmax-num-seqs = 7"))
    assert "rackwright-eager starts as it was proven" in host.run("rollback")
    assert_eager_is_back(host)
    assert all("max-num-seqs" not in word for words in host.engines() for word in words)
    host.calm()


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
    if "deadline" in reason:
        served.fast_deadline(6)
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
    # its own start, and stopping the other one; no deadline was waited for
    assert back < 2 * start + 60
    assert served.report("promote")["verdict"] == "fail"


def test_a_promotion_goes_on_when_its_controller_is_killed(served: Served) -> None:
    process = served.site.start("promote", "-y", start_new_session=True)
    wait_for(lambda: served.mode() == "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: served.serves(FAST))
    assert unchanged(served.run("promote"))


def test_a_controller_that_comes_back_attaches_and_of_two_only_one_promotes(served: Served) -> None:
    before = served.starts(FAST)
    first = served.site.start("promote", "-y")
    second = served.site.start("promote", "-y")
    outputs = [process.communicate(timeout=600)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    new = [start for start in served.starts(FAST) if start not in before]
    assert len(new) == 2, "one start on trial and one for clients"
    assert served.serves(FAST)


def test_when_the_promotion_itself_is_killed_its_guard_brings_eager_back(served: Served) -> None:
    served.fast_faults("never_ready")
    process = served.site.start("promote", "-y")
    wait_for(lambda: on_trial(served))
    if served.machine.kind == "systemd":
        served.machine.run("systemctl kill --signal=KILL rackwright-job-promote.service")
    else:
        served.machine.run(
            "kill -9 -- -$(ps -o pgid= -p $(pgrep -f '[p]romotion.py run' | head -1) | tr -d ' ')"
        )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    assert_eager_is_back(served)
    assert "was killed while" in output
    assert served.report("promote")["promotion"]["verdict"] == "rolled-back"


def test_a_host_that_restarts_amid_a_promotion_comes_up_eager(served: Served) -> None:
    served.fast_faults("never_ready")
    process = served.site.start("promote", "-y")
    wait_for(lambda: on_trial(served))
    process.send_signal(signal.SIGKILL)
    process.wait()
    served.machine.reboot()
    if served.machine.kind == "container":
        assert served.mode() == ""
        served.machine.run(f"sh {ROOT}/run/up.sh")
    wait_for(lambda: served.serves(EAGER))
    served.calm()
    served.run("promote")
    assert served.serves(FAST)


def test_while_a_promotion_runs_only_rollback_ends_it_and_it_does_so_at_once(served: Served) -> None:
    served.fast_faults("never_ready")
    process = served.site.start("promote", "-y")
    wait_for(lambda: on_trial(served))
    told = served.run("status", rc=1)
    assert "attach to it with: rackwright promote" in told
    assert "another mode is on trial since" in told and "start it with" not in told
    for verb in ("stop", "restart", "accept", "bench"):
        assert "a promotion is running" in served.run(verb, rc=1)
    assert on_trial(served), "it goes on"
    served.run("rollback")
    assert_eager_is_back(served)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "a rollback was asked for" in output, "no deadline was waited for"
