"""A service on real hosts that is hurt: what supervisors, wrapper and verbs make of it, on both kinds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import Machine, free_port
from serving import PACE, ROOT, Served, ask, on_trial, provisioned, unchanged, wait_for


@pytest.fixture(scope="module", params=["systemd", "container"])
def host(
    request: pytest.FixtureRequest, hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A host of each kind; it is provisioned once."""
    return provisioned(request, request.param, tmp_path_factory.mktemp("site"))


@pytest.fixture
def served(host: Served) -> Served:
    """It serves; whatever the test before did."""
    host.calm()
    if not host.serves("eager"):
        host.run("start")
    assert host.serves("eager")
    return host


@pytest.fixture
def container(served: Served) -> Served:
    """The host without systemd: asked for by tests that are about that kind alone (see conftest)."""
    return served


@pytest.fixture
def systemd(served: Served) -> Served:
    """The host with systemd, likewise."""
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
    wait_for(lambda: served.serves("eager"))


def test_the_boot_command_of_a_container_brings_it_back_and_may_run_twice(container: Served) -> None:
    container.machine.reboot()
    for _ in range(2):
        # a console's start command knows no profile: no PATH, no HOME
        container.machine.run(f"cd / && env -i /bin/sh {ROOT}/run/up.sh")
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


def test_a_supervisord_that_lost_its_socket_is_replaced_by_start_and_ended_by_stop(
    container: Served,
) -> None:
    lose = f"rm {ROOT}/run/supervisor.sock"
    at_work = "pgrep -f '[s]upervisord -c' || :"
    container.machine.run(lose)
    (orphan,) = container.pids()
    assert "without its supervisor" in container.run("status", rc=1)
    container.run("start")
    assert container.answers()
    assert len(container.pids()) == 1
    assert container.pids() != [orphan]
    assert len(container.machine.run(at_work).stdout.split()) == 1
    container.machine.run(lose)
    container.run("stop")
    assert container.pids() == []


def test_supervisord_on_a_host_with_systemd_outlives_the_job_that_started_it(
    new_host: Callable[..., Machine], tmp_path: Path
) -> None:
    alone = Served(new_host("systemd", "gpu2"), tmp_path)
    choice = ("--data", "supervisor=supervisord")
    alone.run("site", *choice)
    assert alone.answers()
    jobs = "systemctl list-units 'rackwright-job-*' --no-legend"
    wait_for(lambda: alone.machine.run(jobs).stdout == "")
    assert alone.answers()
    (before,) = alone.pids()
    assert unchanged(alone.run("site", *choice))
    alone.machine.run(f"kill -9 {before}")
    wait_for(lambda: alone.pids() not in ([], [before]) and alone.answers())
    alone.run("uninstall", *choice)
    assert alone.machine.run("pgrep -f '[v]llm serve|[s]upervisord -c' || :").stdout == ""


def test_stop_ends_an_engine_that_ignores_being_asked_and_that_is_no_crash(served: Served) -> None:
    served.eager_faults("ignores_sigterm", PACE)
    served.run("stop")
    assert served.pids() == []
    output = served.run("status", rc=1)
    assert "start it with: rackwright start" in output
    assert "crashed" not in output


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

    wait_for(given_up)
    output = served.run("status", rc=1)
    assert "nobody tries any more" in output
    assert served.pids() == []
    served.calm()
    served.run("start")
    assert served.serves("eager")


def test_a_changed_key_restarts_once_and_the_old_key_is_refused(served: Served) -> None:
    old, before = served.key(), served.starts("eager")
    path = f"{ROOT}/run/api-key"
    owner = served.machine.run(f"stat -c %U {path}").stdout.strip()
    served.machine.run(f"rm {path}; umask 022; printf %s another-key-of-their-own >{path}")
    assert "another key" in served.run("status", rc=1)
    served.run("serve")
    after = served.pids()
    port = int(served.site.data["port"])
    assert ask(port, old)[0] == 401
    assert ask(port, "another-key-of-their-own") == (200, "PD_OK")
    assert unchanged(served.run("serve"))
    assert served.pids() == after
    assert len([start for start in served.starts("eager") if start not in before]) == 1
    assert served.machine.run(f"stat -c '%a %U' {path}").stdout.split() == ["600", owner]


# as Ubuntu 20.04 says it; LoadCredential= is not known to it
OLD_SYSTEMD = """#!/bin/sh
if [ "$1" = --version ]; then echo "systemd 245 (245.4-4ubuntu3.24)"; else exec /usr/bin/systemctl "$@"; fi
"""


def test_an_older_systemd_hands_the_key_over_too_and_to_the_engine_alone(systemd: Served) -> None:
    unit, copy = "/etc/systemd/system/rackwright-eager.service", f"{ROOT}/run/api-key.rackwright-eager"
    systemd.machine.write("/usr/local/bin/systemctl", OLD_SYSTEMD, mode="755")
    try:
        systemd.run("serve")
        assert "LoadCredential" not in systemd.machine.run(f"cat {unit}").stdout
        assert systemd.answers()
        assert ask(int(systemd.site.data["port"]), "another")[0] == 401
        assert systemd.machine.run(f"stat -c '%a %U' {copy}").stdout.split() == ["400", "rackwright"]
        assert systemd.machine.run(f"stat -c '%a %U' {ROOT}/run/api-key").stdout.split() == ["600", "root"]
        assert unchanged(systemd.run("serve"))
        # without the copy there is no start, rather than one without a key
        systemd.machine.run(f"sed -i '/^ExecStartPre/d; /RACKWRIGHT_KEY_FILE/d' {unit}")
        systemd.machine.run("systemctl daemon-reload; systemctl restart rackwright-eager")
        told = "journalctl --unit rackwright-eager --output=cat --lines=20"
        wait_for(lambda: "no key was handed over" in systemd.machine.run(told).stdout)
        assert systemd.pids() == []
    finally:
        systemd.machine.run("rm /usr/local/bin/systemctl")
        systemd.run("serve")
    assert "LoadCredential" in systemd.machine.run(f"cat {unit}").stdout


def test_values_of_any_form_reach_the_engine_as_the_recipe_has_them(served: Served) -> None:
    odd = """a #b ;c $d 'e' "f" 50% \\g {"h": 1}"""
    quoted = json.dumps(odd)
    text = served.recipe().replace("[serve.modes.eager.flags]", f"[serve.modes.eager.flags]\nseed = {quoted}")
    served.recipe(f"{text}[serve.modes.eager.env]\nODD = {quoted}\n")
    served.run("serve")
    (pid,) = served.pids()
    # in a container only its own user may look into it
    look = "runuser -u rackwright -- cat /proc/{}/{} | tr '\\0' '\\n'"
    assert odd in served.machine.run(look.format(pid, "cmdline")).stdout.splitlines()
    assert f"ODD={odd}" in served.machine.run(look.format(pid, "environ")).stdout.splitlines()
    assert unchanged(served.run("serve"))
    served.calm()
    served.run("serve")


def test_a_changed_unit_is_put_right_and_a_changed_flag_restarts_once(served: Served) -> None:
    path = {
        "systemd": "/etc/systemd/system/rackwright-eager.service",
        "container": f"{ROOT}/run/programs/rackwright-eager.conf",
    }[served.machine.kind]
    served.machine.run(f"sed -i s/8192/4096/ {path}")
    assert not unchanged(served.run("serve"))
    assert "8192" in served.engines()[0]
    before = served.starts("eager")
    text = served.recipe()
    served.recipe(text.replace("max-model-len = 8192", "max-model-len = 8000"))
    served.run("serve")
    after = served.pids()
    assert "8000" in served.engines()[0]
    assert unchanged(served.run("serve"))
    assert served.pids() == after
    assert len([start for start in served.starts("eager") if start not in before]) == 1
    served.recipe(text)
    served.run("serve")


def test_a_stranger_on_the_port_is_named_before_the_start(served: Served) -> None:
    port = int(served.site.data["port"])
    served.run("stop")
    served.machine.run(f"nohup python3 -m http.server {port} --bind 127.0.0.1 >/dev/null 2>&1 &")
    try:
        wait_for(lambda: ask(port, "any")[0] != 0)
        output = served.run("start", rc=1)
        assert f"port {port} is taken by process" in output
        assert "python3 -m" in output
    finally:
        served.machine.run(f"pkill -f 'http.server {port}'")


def test_a_stranger_of_another_user_is_not_taken_for_our_service_on_another_port(served: Served) -> None:
    port, before = free_port(), served.pids()
    server = f"python3 -m http.server {port} --bind 127.0.0.1"
    served.machine.run(f"setsid runuser -u nobody -- {server} >/dev/null 2>&1 &")
    try:
        wait_for(lambda: ask(port, "any")[0] != 0)
        for verb in ("preflight", "serve"):
            output = served.run(verb, "--data", f"port={port}", rc=1)
            assert "another program listens where the engine should" in output
            assert "python3 (pid" in output or "a process of nobody" in output
    finally:
        served.machine.run(f"pkill -f 'http.server {port}'")
    assert served.pids() == before and served.serves("eager"), "it was not stopped for that"


def test_a_port_that_is_root_s_is_refused_before_anything_is_stopped(served: Served) -> None:
    before = served.pids()
    output = served.run("serve", "--data", "port=80", rc=1)
    assert "may not listen on a port this low" in " ".join(output.split()), "a table breaks its lines"
    assert served.pids() == before


def test_settings_that_do_not_come_up_leave_the_proven_service_as_it_was(served: Served) -> None:
    served.machine.write("/srv/faults-new.json", '["dies_at_start"]')
    text = served.recipe()
    served.recipe(text + '[serve.modes.eager.env]\nSTANDIN_FAULT_FILE = "/srv/faults-new.json"\n')
    output = served.run("serve", rc=1)
    assert "rackwright-eager serves again as before" in output
    assert served.serves("eager")
    served.recipe(text)
    before = served.pids()
    assert unchanged(served.run("serve")), "its files are the old ones too"
    assert served.pids() == before


def test_other_settings_than_installed_are_told_at_once_by_start_restart_and_status(served: Served) -> None:
    port = free_port()
    told = f"installed with other settings (port {served.site.data['port']}, the inventory says {port})"
    assert told in served.run("restart", "--data", f"port={port}", rc=1)
    assert served.serves("eager"), "it was not stopped for that"
    served.run("stop")
    for verb in ("start", "status"):
        output = served.run(verb, "--data", f"port={port}", rc=1)
        assert told in output
        assert "rackwright serve" in output
    assert served.pids() == []


def test_shared_memory_that_a_killed_engine_left_is_gone_after_its_restart(served: Served) -> None:
    leak = (
        "from multiprocessing import resource_tracker as t, shared_memory as s; import os;"
        " m = s.SharedMemory(create=True, size=1 << 20); t.unregister(m._name, 'shared_memory');"
        " print(m.name, flush=True); os.kill(os.getpid(), 9)"
    )
    leaked = served.machine.run(f'runuser -u rackwright -- python3 -c "{leak}"', check=False).stdout.strip()
    path = f"/dev/shm/{leaked}"
    served.machine.run(f"test -f {path} && touch -d '-5 minutes' {path}")
    (before,) = served.pids()
    served.machine.run(f"kill -9 {before}")
    wait_for(lambda: served.pids() not in ([], [before]) and served.answers())
    assert served.machine.run(f"test -e {path}", check=False).returncode == 1


def test_an_acceptance_without_a_service_says_so_and_leaves_the_last_one_s_report(served: Served) -> None:
    served.run("accept")
    before = served.report("accept")
    served.run("stop")
    output = served.run("accept", rc=1)
    assert "nothing serves here" in output and "rackwright start" in output
    assert served.report("accept") == before


def test_a_port_stolen_between_stop_and_start_is_named_with_its_thief(served: Served) -> None:
    port = served.site.data["port"]
    thief = f"""
import pathlib, socket, time
pathlib.Path("/srv/thief.ready").touch()
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
    served.machine.run("rm -f /srv/thief.ready; nohup python3 /srv/thief.py >/dev/null 2>&1 &")
    try:
        wait_for(lambda: served.machine.run("test -e /srv/thief.ready", check=False).returncode == 0)
        output = served.run("restart", rc=1)
        assert f"port {port} is taken by process" in output
        assert "thief.py" in output
        assert "--data port=" in output
        assert served.pids() == [], "it does not crash for ever"
    finally:
        served.machine.run("pkill -f thief.py")


def test_a_controller_that_was_killed_attaches_to_the_start_that_goes_on(served: Served) -> None:
    served.run("stop")
    served.eager_faults("slow_start=3", PACE)
    first = served.site.start("start", "-y", start_new_session=True)
    wait_for(lambda: bool(served.pids()))
    # it comes no further until the second controller is there, however slow this machine is
    (before,) = served.pids()
    served.machine.run(f"kill -STOP {before}")
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = served.site.start("start", "-y")
    assert second.stdout is not None
    try:
        told = next((line for line in second.stdout if "attached to it" in line), "")
    finally:
        served.machine.run(f"kill -CONT {before}")
    output, _ = second.communicate(timeout=600)
    assert (bool(told), second.returncode) == (True, 0), told + output
    assert served.pids() == [before]


def test_a_mode_that_does_not_start_leaves_the_proven_one_up(served: Served) -> None:
    served.fast_faults("dies_at_start")
    output = served.run("serve", "--data", "mode=optimized", rc=1)
    assert "rackwright-eager serves again as before" in output
    assert served.mode() == "eager"
    assert served.at_boot() == "eager"


def test_a_mode_that_was_not_proven_serves_but_does_not_start_with_the_host(served: Served) -> None:
    served.run("serve", "--data", "mode=optimized")
    assert (served.mode(), served.at_boot()) == ("optimized", "eager")
    assert "after a reboot: eager" in served.run("status")
    served.run("rollback")
    assert (served.mode(), served.at_boot()) == ("eager", "eager")


def test_restart_restarts_the_mode_that_runs_and_both_starts_are_told(served: Served) -> None:
    before, starts = served.pids(), served.starts("eager")
    served.run("restart")
    assert served.pids() != before
    assert served.serves("eager")
    assert len([start for start in served.starts("eager") if start not in starts]) == 1
    evidence = served.report("restart")["startup"]
    assert evidence["seconds"] > 0 and evidence["phases"]
    assert evidence["before"]["seconds"] > 0


# as nvidia-smi 580 answers this question; every other one goes unanswered
NVIDIA_SMI = """#!/bin/sh
case "$*" in *index,memory.used,memory.total*) echo "0, 81920, 97887"; echo "1, 0, 97887" ;; *) exit 9 ;; esac
"""


def test_status_tells_mode_proof_pins_memory_and_start_times(served: Served) -> None:
    # where containers have it (tests/fixtures/gpu-rehearsal), and no session's PATH
    served.machine.write("/usr/local/nvidia/bin/nvidia-smi", NVIDIA_SMI, mode="755")
    try:
        output = served.run("status")
    finally:
        served.machine.run("rm -r /usr/local/nvidia")
    for words in (
        "ready: a token came out",
        "eager; after a reboot: eager",
        "up for",
        "start took",
        "restart",
        "0: 80.0 of 95.6 GiB, 1: 0.0 of 95.6 GiB",
        "Python 3.11",
        "files by SHA-256",
        "digest of all",
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


def test_logs_are_followed_until_the_person_has_seen_enough(served: Served) -> None:
    port, key = int(served.site.data["port"]), served.key()
    process = served.site.start("logs", "-f")
    assert process.stdout is not None
    try:
        assert any("Application startup complete" in line for line in process.stdout)
        assert ask(port, key)[0] == 200
        assert any("POST /v1/chat/completions" in line for line in process.stdout)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    def nobody_follows() -> bool:
        ask(port, key)  # who follows notices with the next line that nobody listens any more
        return served.machine.run("pgrep -f '[ ]-F /|[-]-follow' || :").stdout == ""

    wait_for(nobody_follows)


def test_a_dry_run_of_any_verb_touches_no_service(container: Served) -> None:
    before, starts = container.pids(), container.starts("eager")
    for verb in ("serve", "promote", "rollback", "restart", "stop", "start"):
        container.site.run(verb, "--dry")
    assert (container.pids(), container.starts("eager")) == (before, starts)
    assert container.serves("eager")


def test_what_the_engine_may_write_and_who_may_read_its_log_and_its_key(served: Served) -> None:
    found = served.machine.run(f"find {ROOT} -maxdepth 3 -user rackwright -type d -printf '%P\\n'").stdout
    folders = sorted(found.split())
    assert [path for path in folders if path.count("/") < 2] == ["cache/home", "tmp/engine"]
    (jit,) = [path for path in folders if path.startswith("cache/jit/")]
    env = served.machine.run(f"tr '\\0' '\\n' </proc/{served.pids()[0]}/environ", check=False).stdout
    assert not env or f"TRITON_CACHE_DIR={ROOT}/{jit}/triton" in env.splitlines()
    (pid,) = served.pids()
    look = 'for f in /proc/[0-9]*/environ; do ! grep -qsaF "$k" $f || echo $f; done'
    know_the_key = served.machine.run(f"k=$(cat {ROOT}/run/api-key); {look}").stdout.split()
    # in a container even root may not look into another user's process
    assert know_the_key == [f"/proc/{pid}/environ"] or (
        not know_the_key and served.machine.kind == "container"
    )
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
    log = f"{ROOT}/logs/rackwright-eager.log"
    # what was written before is rotated as a whole, whatever its size
    container.machine.run(f"sed -i s/50MB/20KB/ {conf}; truncate -s 0 {log}; rm -f {log}.*")
    container.machine.run(f"{ROOT}/tools/bin/python {ROOT}/run/sv.py {ROOT}/run start rackwright-eager")
    wait_for(container.answers)
    port, key = int(container.site.data["port"]), container.key()

    def rotated() -> bool:
        for _ in range(50):
            ask(port, key)
        return container.machine.run(f"test -f {log}.1", check=False).returncode == 0

    wait_for(rotated)
    sizes = container.machine.run(f"stat -c %s {log}*").stdout.split()
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


def test_uninstall_amid_a_promotion_leaves_nothing_that_comes_back(served: Served) -> None:
    # the last test of these hosts
    served.fast_faults("never_ready")
    process = served.site.start("promote", "-y")
    wait_for(lambda: on_trial(served))
    served.run("uninstall")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "cancelled on the host (uninstall)" in output
    at_work = "pgrep -f '[p]romotion.py|[s]upervisord -c' || :"
    wait_for(lambda: served.machine.run(at_work).stdout == "")
    assert served.engines() == []
    assert served.machine.run(f"ls {ROOT} /etc/systemd/system/rackwright* 2>/dev/null || :").stdout == ""
