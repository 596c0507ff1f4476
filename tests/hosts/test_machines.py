"""The test hosts themselves: every ability that other tests build on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest
from machines import CommandFailed, Machine, MachineError, cache_dir, isolation, sweep

NewHost = Callable[..., Machine]
HERE = Path(__file__).parent


def pyinfra(tmp_path: Path, deploy: str, *machines: Machine) -> list[dict[str, object]]:
    """Run a deploy over SSH with the pyinfra command line; its operations, with the hosts per outcome."""
    hosts = [(machine.name, machine.inventory_data()) for machine in machines]
    (tmp_path / "inventory.py").write_text(f"gpus = {hosts!r}\n")
    (tmp_path / "deploy.py").write_text(textwrap.dedent(deploy))
    argv = [sys.executable, "-m", "pyinfra", "-y", "--json", "inventory.py", "deploy.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    operations: list[dict[str, object]] = json.loads(done.stdout)["results"]["operations"]
    return operations


def boot_id(machine: Machine) -> str:
    return machine.run("cat /proc/sys/kernel/random/boot_id").stdout.strip()


def test_a_systemd_host_is_booted_by_systemd(systemd_host: Machine) -> None:
    assert systemd_host.run("cat /proc/1/comm").stdout == "systemd\n"
    assert systemd_host.run("systemctl is-system-running", check=False).stdout == "running\n"
    assert systemd_host.run("uname -n; cat /etc/hostname").stdout == "gpu1\ngpu1\n"


def test_a_container_host_has_sshd_and_no_systemd(container_host: Machine) -> None:
    processes = container_host.run("ps -e -o pid=,comm= | sort -n | head -n 2").stdout.split()
    assert processes[0] == "1" and processes[2:] == ["2", "sshd"]
    assert container_host.run("test -e /run/systemd/system", check=False).returncode == 1
    assert container_host.run("systemctl is-system-running", check=False).stdout == "offline\n"
    refused = container_host.run("mount -t tmpfs none /mnt", check=False)
    assert refused.returncode != 0 and "permission denied" in refused.stderr


def test_accounts_have_the_rights_that_their_names_promise(host: Machine) -> None:
    assert host.run("id -un", user="root").stdout == "root\n"
    assert host.run("id -un; pwd", user="user").stdout == "user\n/home/user\n"
    assert host.run("sudo -n id -un", user="user", check=False).returncode != 0
    assert host.run("sudo -n id -un", user="sudoer").stdout == "root\n"


def test_a_failed_command_shows_what_it_printed(host: Machine) -> None:
    with pytest.raises(CommandFailed, match="exit 3: echo why >&2; exit 3\nwhy"):
        host.run("echo why >&2; exit 3")


def test_the_password_opens_the_door_too(host: Machine) -> None:
    data = host.inventory_data(password=True)
    assert "ssh_key" not in data
    with paramiko.SSHClient() as client:
        client.load_host_keys(data["ssh_known_hosts_file"])
        client.connect(
            data["ssh_hostname"],
            data["ssh_port"],
            data["ssh_user"],
            data["ssh_password"],
            look_for_keys=False,
            allow_agent=False,
        )
        _, stdout, _ = client.exec_command("id -un")
        assert stdout.read() == b"root\n"


def test_files_arrive_as_they_were_sent(host: Machine, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "blob").write_bytes(bytes(range(256)))
    host.put(tmp_path / "folder", "/srv/sent")
    assert host.run("od -An -tx1 -v /srv/sent/blob").stdout.split() == [f"{byte:02x}" for byte in range(256)]
    host.write("/opt/it's new/file", "two\nlines\n", mode="600")
    assert (
        host.run("""cat "/opt/it's new/file"; stat -c %a "/opt/it's new/file" """).stdout
        == "two\nlines\n600\n"
    )


def test_pyinfra_changes_both_kinds_once(new_host: NewHost, tmp_path: Path) -> None:
    machines = [new_host("systemd", "gpu1"), new_host("container", "gpu2")]
    deploy = """
        from io import StringIO
        from pyinfra.operations import files, server
        put = files.put(src=StringIO("hello"), dest="/srv/greeting")
        server.shell(commands=["cp /srv/greeting /srv/copy"], _if=put.did_change)
    """
    first = pyinfra(tmp_path, deploy, *machines)
    assert [operation["success"] for operation in first] == [["gpu1", "gpu2"]] * 2
    assert [machine.run("cat /srv/copy").stdout for machine in machines] == ["hello", "hello"]
    again = pyinfra(tmp_path, deploy, *machines)
    assert [operation["success"] for operation in again] == [[], []]
    assert [operation["no_change"] for operation in again] == [["gpu1", "gpu2"]] * 2


def test_a_reboot_keeps_the_disk_and_loses_memory_and_processes(host: Machine) -> None:
    host.write("/srv/disk", "kept")
    host.write("/tmp/disk", "kept")
    host.write("/dev/shm/memory", "lost")
    host.write("/run/memory", "lost")
    host.run("setsid nohup sleep 987 >/dev/null 2>&1 </dev/null &")
    before = boot_id(host)
    host.reboot()
    left = host.run("cat /srv/disk; ls /dev/shm/memory /run/memory; pgrep -x sleep", check=False)
    assert left.stdout == "kept" and left.returncode == 1
    # a container shows the boot id of the machine below it, which did not restart
    assert (boot_id(host) == before) == (host.kind == "container")


def test_a_host_that_says_reboot_itself_comes_back(systemd_host: Machine) -> None:
    before = boot_id(systemd_host)
    systemd_host.run("systemctl reboot", user="root", check=False)
    deadline = time.monotonic() + 60
    while (now := systemd_host.run("cat /proc/sys/kernel/random/boot_id", check=False)).stdout.strip() in (
        "",
        before,
    ):
        assert time.monotonic() < deadline, now.stderr
        time.sleep(0.1)


def test_a_host_is_unreachable_while_powered_off(host: Machine) -> None:
    host.write("/srv/disk", "kept")
    host.run("sync")
    host.power_off()
    refused = host.run("true", check=False)
    assert refused.returncode == 255 and "Connection refused" in refused.stderr
    host.power_on()
    assert host.run("cat /srv/disk").stdout == "kept"


def test_a_small_tmpfs_runs_out_of_space_and_of_inodes(host: Machine) -> None:
    host.tmpfs("/srv/small disk", size="1m", inodes=10)
    full = host.run("cd '/srv/small disk' && head -c 2M /dev/zero > big", check=False)
    assert full.returncode != 0 and "No space left on device" in full.stderr
    many = host.run("cd '/srv/small disk' && rm big && touch 1 2 3 4 5 6 7 8 9 10 11", check=False)
    assert many.returncode != 0 and "No space left on device" in many.stderr
    assert host.run("df --output=avail '/srv/small disk' | tail -n 1").stdout.strip() != "0"


@pytest.mark.parametrize("user", ["root", "user"])
def test_dropped_sessions_end_and_what_they_started_lives_on(host: Machine, user: str) -> None:
    host.run("setsid nohup sleep 986 >/dev/null 2>&1 </dev/null &", user=user)
    argv = ["ssh", "-F", "none", "-i", str(host.ssh_key), f"-oUserKnownHostsFile={host.known_hosts}"]
    argv += ["-p", str(host.ssh_port), f"{user}@{host.host}", "echo in; sleep 985"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "in\n"
        assert host.kill_ssh_sessions() >= 1
        _, said = session.communicate(timeout=10)
    # the client was reading, or it was writing
    assert session.returncode == 255 and ("closed by remote host" in said or "Broken pipe" in said)
    assert host.run("pgrep -f '^sleep 986$'").stdout.strip()


def test_an_offline_host_reaches_nothing_and_is_reached_over_ssh(new_host: NewHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        for kind in ("systemd", "container"):
            machine = new_host(kind, offline=True)
            assert machine.run("uname -n").stdout == "gpu1\n"
            assert "default" not in machine.run("ip route; ip -6 route").stdout
            assert machine.run(f"bash -c '{connect}'", check=False).returncode == 1
            assert machine.run("curl -sS --max-time 5 http://203.0.113.1/", check=False).returncode == 7
            machine.reboot()
            assert "default" not in machine.run("ip route").stdout


def test_a_host_with_network_reaches_the_package_registry_as_this_machine_does(host: Machine) -> None:
    got = host.run(
        "cd /tmp && python3 -m pip download --no-deps --quiet six && ls six-*", user="user", timeout=120
    )
    assert got.stdout.startswith("six-")


def test_two_systemd_hosts_do_not_see_each_others_units(new_host: NewHost) -> None:
    one, two = new_host("systemd", "gpu1"), new_host("systemd", "gpu2", offline=True)
    for machine in (one, two):
        machine.run(f"systemd-run --unit=engine --setenv=WHO={machine.name} sleep 984")
    two.run("systemctl stop engine")
    assert one.run("systemctl is-active engine").stdout == "active\n"
    assert two.run("systemctl is-active engine", check=False).stdout == "inactive\n"


def test_systemd_credentials_hardening_and_journal_work(systemd_host: Machine) -> None:
    systemd_host.write("/root/key", "secret", mode="600")
    hardening = (
        "-p DynamicUser=yes -p ProtectSystem=strict -p ProtectHome=yes -p PrivateTmp=yes "
        "-p PrivateDevices=yes -p NoNewPrivileges=yes -p SystemCallFilter=@system-service "
        "-p ProtectProc=invisible"
    )
    load = f"systemd-run --wait --quiet --unit=cred -p LoadCredential=key:/root/key {hardening}"
    systemd_host.run(f"{load} sh -c 'cat $CREDENTIALS_DIRECTORY/key'")
    assert "secret" in systemd_host.run("journalctl -u cred -o cat").stdout
    assert "secret" in systemd_host.log_tail()


def test_a_user_lingers_with_polkit_and_is_refused_without(systemd_host: Machine) -> None:
    systemd_host.run("systemctl mask --now polkit.service")
    assert systemd_host.run("loginctl enable-linger", user="user", check=False).returncode != 0
    systemd_host.run("systemctl unmask polkit.service")
    systemd_host.run("loginctl enable-linger", user="user")
    systemd_host.run(
        "mkdir -p ~/.config/systemd/user && cd ~/.config/systemd/user && "
        "printf '[Service]\\nExecStart=sleep 983\\n[Install]\\nWantedBy=default.target\\n' > engine.service; "
        "systemctl --user enable --now engine",
        user="user",
    )
    systemd_host.reboot()
    assert systemd_host.run("pgrep -u user -f '^sleep 983$'").stdout.strip()
    assert systemd_host.run("systemctl --user is-active engine", user="user").stdout == "active\n"


def test_a_host_that_cannot_start_says_why(container_host: Machine) -> None:
    container_host.run("echo Nonsense yes > /etc/ssh/sshd_config.d/bad.conf")
    container_host.power_off()
    with pytest.raises(MachineError, match="Bad configuration option: Nonsense"):
        container_host.power_on()


def remains(name: str) -> list[str]:
    """What is left of a host on this machine."""
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{isolation.NAME}{name}")]
    places = (cache_dir() / "hosts" / name, Path("/run/netns") / (isolation.NAME + name))
    found += [str(path) for path in places if path.exists()]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line]
    found += [str(link) for link in Path("/sys/class/net").iterdir() if name in link.name]
    return found


@pytest.mark.parametrize("offline", [False, True])
def test_a_stopped_host_leaves_nothing(new_host: NewHost, offline: bool) -> None:
    for kind in ("systemd", "container"):
        machine = new_host(kind, offline=offline)
        name = machine.home.name
        assert remains(name)
        machine.stop()
        assert remains(name) == []
        machine.stop()


def test_the_hosts_of_a_killed_run_are_swept_and_those_of_a_living_run_are_not(new_host: NewHost) -> None:
    living = new_host("container")
    program = (
        "from machines import Machine; import time\n"
        "for kind in ('systemd', 'container'):\n"
        "    print(Machine(kind, offline=True).start().home.name, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        names = [run.stdout.readline().strip() for _ in range(2)]
        run.send_signal(signal.SIGKILL)
    assert all(remains(name) for name in names)
    sweep()
    assert [remains(name) for name in names] == [[], []]
    assert living.run("uname -n").stdout == "gpu1\n"


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_where_hosts_cannot_run_tests_are_skipped_unless_required(required: str, outcome: str) -> None:
    environment = {**os.environ, "PATH": "", "RACKWRIGHT_REQUIRE_HOSTS": required}
    environment.pop("PYTEST_ADDOPTS", None)
    test = f"{__file__}::test_a_container_host_has_sshd_and_no_systemd"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert outcome in done.stdout
    assert "no systemd-nspawn (Debian package systemd-container)" in done.stdout
