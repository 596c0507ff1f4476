"""A service on real hosts that is hurt: what supervisors, wrapper and verbs make of it, on both kinds."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest
from machines import Machine
from serving import PACE, ROOT, Served, ask, unchanged, wait_for


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
    """It serves; whatever the test before did."""
    host.calm()
    host.run("start")
    return host


@pytest.fixture
def container(served: Served) -> Served:
    """The host without systemd."""
    if served.machine.kind != "container":
        pytest.skip("about supervisord")
    return served


@pytest.fixture
def systemd(served: Served) -> Served:
    """The host with systemd."""
    if served.machine.kind != "systemd":
        pytest.skip("about systemd")
    return served


def test_a_killed_engine_comes_back(served: Served) -> None:
    (before,) = served.pids()
    served.machine.run(f"kill -9 {before}")
    wait_for(lambda: served.pids() not in ([], [before]) and served.answers())
    assert "1 restart" in served.run("status")


def test_the_host_s_restart_brings_the_proven_mode_back(served: Served) -> None:
    served.machine.reboot()
    if served.machine.kind == "container":
        assert served.mode() == ""
        assert "rackwright start" in served.run("status", rc=1)
        served.run("start")
    wait_for(lambda: served.mode() == "eager" and served.answers())


def test_the_boot_command_of_a_container_brings_it_back_and_may_run_twice(container: Served) -> None:
    container.machine.reboot()
    for _ in range(2):
        container.machine.run(f"sh {ROOT}/run/up.sh")
    wait_for(container.answers)
    assert len(container.pids()) == 1


def test_when_supervisord_is_killed_its_engine_is_found_and_start_takes_it_back(container: Served) -> None:
    container.machine.run(f"kill -9 $(cat {ROOT}/run/supervisord.pid)")
    (orphan,) = container.pids()
    assert "without its supervisor" in container.run("status", rc=1)
    container.run("start")
    assert container.answers()
    assert len(container.pids()) == 1
    assert container.pids() != [orphan]
    assert unchanged(container.run("start"))


def test_stop_finds_an_engine_whose_supervisord_is_dead(container: Served) -> None:
    container.machine.run(f"kill -9 $(cat {ROOT}/run/supervisord.pid)")
    container.run("stop")
    assert container.pids() == []
    assert unchanged(container.run("stop"))


def test_stop_ends_an_engine_that_ignores_being_asked(served: Served) -> None:
    served.eager_faults("ignores_sigterm", PACE)
    began = time.monotonic()
    served.run("stop")
    assert served.pids() == []
    assert time.monotonic() - began < 45, "the recipe gives it 10 s"


def test_a_crash_loop_ends_and_status_says_why(served: Served) -> None:
    served.eager_faults("dies_at_start")
    (before,) = served.pids()
    served.machine.run(f"kill -9 {before}")

    def given_up() -> bool:
        if served.machine.kind == "systemd":
            return "failed" in served.machine.run("systemctl is-failed rackwright-eager", check=False).stdout
        return (
            "FATAL"
            in served.machine.run(f"{ROOT}/tools/bin/python {ROOT}/run/sv.py {ROOT}/run status").stdout
        )

    wait_for(given_up, 180)
    output = served.run("status", rc=1)
    assert "nobody tries any more" in output
    assert served.pids() == []
    served.calm()
    served.run("start")
    assert served.answers()


def test_a_changed_key_restarts_once_and_the_old_key_is_refused(served: Served) -> None:
    old, before = served.key(), served.pids()
    owner = served.machine.run(f"stat -c %U {ROOT}/run/api-key").stdout.strip()
    served.machine.run(f"umask 077; printf %s another-key-of-their-own >{ROOT}/run/api-key")
    assert "another key" in served.run("status", rc=1)
    served.run("serve")
    after = served.pids()
    assert after != before
    port = int(served.site.data["port"])
    assert ask(port, old)[0] == 401
    assert ask(port, "another-key-of-their-own") == (200, "PD_OK")
    assert unchanged(served.run("serve"))
    assert served.pids() == after
    found = served.machine.run(f"stat -c '%a %U' {ROOT}/run/api-key").stdout.split()
    assert found == ["600", owner]


def test_a_changed_flag_restarts_once_and_a_changed_unit_is_put_right(served: Served) -> None:
    recipe = served.site.folder / "standin.toml"
    text = recipe.read_text()
    before = served.pids()
    try:
        recipe.write_text(text.replace("max-model-len = 8192", "max-model-len = 8000"))
        served.run("serve")
        after = served.pids()
        assert after != before
        assert "8000" in served.engines()[0]
        assert unchanged(served.run("serve"))
        assert served.pids() == after
    finally:
        recipe.write_text(text)
    served.run("serve")
    path = {
        "systemd": "/etc/systemd/system/rackwright-eager.service",
        "container": f"{ROOT}/run/programs/rackwright-eager.conf",
    }[served.machine.kind]
    served.machine.run(f"sed -i s/8192/4096/ {path}")
    assert not unchanged(served.run("serve"))
    assert "8192" in served.engines()[0]


def test_a_stranger_on_the_port_is_named_before_the_start(served: Served) -> None:
    port = served.site.data["port"]
    served.run("stop")
    served.machine.run(f"nohup python3 -m http.server {port} --bind 127.0.0.1 >/dev/null 2>&1 & sleep 1")
    try:
        output = served.run("start", rc=1)
        assert f"port {port} is taken by process" in output
        assert "python3 -m" in output
    finally:
        served.machine.run(f"pkill -f 'http.server {port}'")


def test_a_port_stolen_between_stop_and_start_is_named_with_its_thief(served: Served) -> None:
    port = served.site.data["port"]
    thief = f"""
import socket, time
while True:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind(("127.0.0.1", {port}))
        s.listen()
        time.sleep(600)
    except OSError:
        time.sleep(0.002)
"""
    served.machine.write("/srv/thief.py", thief)
    served.machine.run("nohup python3 /srv/thief.py >/dev/null 2>&1 & sleep 1")
    try:
        output = served.run("restart", rc=1)
        assert f"port {port} is taken by process" in output
        assert "thief.py" in output
        assert "--data port=" in output
        assert served.pids() == [], "it does not crash for ever"
    finally:
        served.machine.run("pkill -f thief.py")


def test_a_controller_that_was_killed_attaches_to_the_start_that_goes_on(served: Served) -> None:
    served.run("stop")
    served.eager_faults("slow_start=30", PACE)
    first = served.site.start("start", "-y", "--data", "ready_seconds=90", start_new_session=True)
    wait_for(lambda: bool(served.pids()))
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = served.pids()
    output = served.run("start", "--data", "ready_seconds=90")
    assert "attached to it" in output
    assert served.pids() == before
    served.calm()


def test_a_mode_that_does_not_start_leaves_the_proven_one_up(served: Served) -> None:
    served.fast_faults("dies_at_start")
    output = served.run("serve", "--data", "mode=optimized", rc=1)
    assert "rackwright-eager is up again" in output
    assert served.mode() == "eager"
    assert served.at_boot() == "eager"


def test_a_mode_that_was_not_proven_serves_but_does_not_start_with_the_host(served: Served) -> None:
    served.run("serve", "--data", "mode=optimized")
    assert (served.mode(), served.at_boot()) == ("optimized", "eager")
    assert "after a reboot: eager" in served.run("status")
    served.run("rollback")
    assert (served.mode(), served.at_boot()) == ("eager", "eager")


def test_restart_restarts_the_mode_that_runs(served: Served) -> None:
    before = served.pids()
    served.run("restart")
    assert served.pids() != before
    assert served.mode() == "eager"


def test_status_tells_mode_proof_pins_and_start_times(served: Served) -> None:
    output = served.run("status")
    for words in (
        "ready: a token came out",
        "eager; after a reboot: eager",
        "up for",
        "start took",
        "no kernel was compiled while requests waited",
        "proven",
        "checks passed",
        "vllm-standin 0.32.0",
        "files verified",
    ):
        assert words in output
    served.eager_faults("compiles_late", PACE)
    assert served.answers()
    assert "kernels were compiled while requests waited" in served.run("status")


def test_what_the_engine_may_write_and_who_may_read_its_log(served: Served) -> None:
    found = served.machine.run(f"find {ROOT} -maxdepth 3 -user rackwright -type d -printf '%P\\n'").stdout
    folders = sorted(found.split())
    assert [path for path in folders if path.count("/") < 2] == ["cache/home", "tmp/engine"]
    (jit,) = [path for path in folders if path.startswith("cache/jit/")]
    env = served.machine.run(f"tr '\\0' '\\n' </proc/{served.pids()[0]}/environ", check=False).stdout
    assert not env or f"TRITON_CACHE_DIR={ROOT}/{jit}/triton" in env.splitlines()
    (pid,) = served.pids()
    assert "0077" in served.machine.run(f"grep Umask /proc/{pid}/status").stdout
    if served.machine.kind == "container":
        log = served.machine.run(f"stat -c '%U %a' {ROOT}/logs/rackwright-eager.log").stdout.split()
        assert log == ["root", "600"]


def test_systemd_finds_no_fault_in_the_unit_and_little_exposure(systemd: Served) -> None:
    unit = "/etc/systemd/system/rackwright-eager.service"
    done = systemd.machine.run(f"systemd-analyze verify {unit} 2>&1")
    assert done.stdout == ""
    systemd.machine.run(f"systemd-analyze security --offline=yes --threshold=40 {unit} >/dev/null")


def test_the_log_is_rotated_by_size(container: Served) -> None:
    conf = f"{ROOT}/run/programs/rackwright-eager.conf"
    container.machine.run(f"sed -i s/50MB/20KB/ {conf}")
    container.machine.run(f"{ROOT}/tools/bin/python {ROOT}/run/sv.py {ROOT}/run start rackwright-eager")
    wait_for(container.answers)
    port, key = int(container.site.data["port"]), container.key()

    def rotated() -> bool:
        for _ in range(50):
            ask(port, key)
        return (
            container.machine.run(f"test -f {ROOT}/logs/rackwright-eager.log.1", check=False).returncode == 0
        )

    wait_for(rotated)
    sizes = container.machine.run(f"stat -c %s {ROOT}/logs/rackwright-eager.log*").stdout.split()
    # a chunk is written whole, however long it is
    assert all(int(size) < 200_000 for size in sizes)
    assert not unchanged(container.run("serve")), "the size is put right"


def test_a_full_log_folder_does_not_stop_the_engine(container: Served) -> None:
    container.run("stop")
    container.machine.run(f"{ROOT}/tools/bin/python {ROOT}/run/sv.py {ROOT}/run shutdown")
    container.machine.tmpfs(f"{ROOT}/logs", size="64k", inodes=64)
    try:
        container.machine.run(f"head -c 200000 /dev/zero >{ROOT}/logs/full 2>/dev/null || :")
        container.run("start")
        assert container.answers()
        container.run("status")
    finally:
        container.machine.run(f"{ROOT}/tools/bin/python {ROOT}/run/sv.py {ROOT}/run shutdown")
        container.machine.inside("umount", f"{ROOT}/logs")


def test_the_starts_of_this_host_are_remembered(served: Served) -> None:
    served.run("restart")
    starts = json.loads(served.machine.run(f"cat {ROOT}/run/starts/rackwright-eager.json").stdout)
    assert len(starts) >= 2
    assert all(start["seconds"] > 0 and start["phases"] for start in starts)
    evidence = served.report("restart")["startup"]
    assert evidence["before"]["seconds"] > 0
