"""Figures of preflight, of a `site` with nothing to do, and of SSH; beside Ansible, and 50 hosts beside 5.

The hosts are test hosts on this machine (root and systemd-nspawn). For 5 and 50 hosts a real sshd gives a
recorded answer after what the probe takes on a host with processors of its own: here they would share ours.
"""

from __future__ import annotations

import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
from beside_ansible import Ansible
from machines import Machine, free_port
from sites import ROOT, Site

sys.path.insert(0, str(ROOT / "tests" / "replay"))
from replay_profiles import install

Figure = tuple[str, float, str]
RUNS = 3
LATENCY_COMMANDS = 40
FEW, MANY = 5, 50
# what the probe takes on an idle host with eight GPUs and persistence mode
PROBE_SECONDS = 1.5


def figures() -> list[Figure]:
    """Everything; some minutes."""
    with tempfile.TemporaryDirectory(prefix="rackwright-bench-") as folder:
        root = Path(folder)
        machine = Machine("container", "gpu1").start()
        try:
            ansible = Ansible(root)
            return [
                *one_host(root, machine, ansible),
                *many_hosts(root, machine),
                *nothing_to_do(root, machine, ansible),
                *latency(machine),
            ]
        finally:
            machine.stop()


def seconds(*works: Callable[[], object]) -> list[float]:
    """Median seconds of each, run in turn so that a busy machine is busy for all of them."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(RUNS):
        for work, times in zip(works, taken, strict=True):
            began = time.monotonic()
            work()
            times.append(time.monotonic() - began)
    return [statistics.median(times) for times in taken]


def sessions(machine: Machine) -> tuple[int, int]:
    """(connections, commands) that sshd has noted."""
    log = (machine.home / "console.log").read_text(errors="replace")
    return log.count("Accepted publickey"), log.count("Starting session: command")


def one_host(root: Path, machine: Machine, ansible: Ansible) -> list[Figure]:
    """One host with four replayed GPUs: connections, commands, seconds."""
    install("rtx-pro-6000-x4", root / "replay")
    machine.put(root / "replay", "/srv/replay")
    machine.run("cp -r /srv/replay/. /usr/local/bin/")
    machine.write("/etc/ssh/sshd_config.d/log.conf", "LogLevel VERBOSE\n")
    machine.inside("pkill", "-HUP", "-o", "sshd")
    time.sleep(1)
    site = Site(
        folder_in(root, "preflight"),
        [machine],
        recipe="deepseek-v4-flash-sm120",
        bundle="/srv/bundle",
        sources=["path"],
        model_path="/srv/model",
        find_links=[],
    )
    before = sessions(machine)
    site.run("preflight", rc=1)
    ours = sessions(machine)
    ansible.play("facts", machine)
    theirs = sessions(machine)
    mine, other = seconds(lambda: site.run("preflight", rc=1), lambda: ansible.play("facts", machine))
    return [
        ("preflight, one host: SSH connections", ours[0] - before[0], "<= 1"),
        ("preflight, one host: remote commands", ours[1] - before[1], "<= 3"),
        ("preflight, one host: seconds", mine, ""),
        ("Ansible, the same facts: remote commands", theirs[1] - ours[1], ""),
        ("Ansible, the same facts: seconds", other, ""),
        ("Ansible / preflight: seconds", other / mine, ""),
    ]


def many_hosts(root: Path, machine: Machine) -> list[Figure]:
    """The same sshd under many names; each gives a recorded answer."""
    from tasks.facts import ProbeRequest, build_probe

    probe = build_probe(ProbeRequest("/opt/rackwright", "/opt/rackwright/models", want_gpu=True))
    machine.write("/srv/probe.sh", probe)
    machine.run("sh /srv/probe.sh >/srv/answer; printf '\\n@@rackwright-rc=0\\n' >>/srv/answer")
    port = free_port()
    replay = f"sleep {PROBE_SECONDS}; cat /srv/answer"
    options = {
        "Port": str(port),
        "ListenAddress": machine.host,
        "ForceCommand": replay,
        "PidFile": "none",
        "MaxStartups": "200",
        "UseDNS": "no",
        "PermitRootLogin": "yes",
    }
    words = " ".join(f"-o {shlex.quote(f'{key}={value}')}" for key, value in options.items())
    keys = "-h /etc/ssh/ssh_host_ed25519_key"
    machine.run(f"setsid /usr/sbin/sshd -f /dev/null {words} {keys} </dev/null >/dev/null 2>&1 &")
    time.sleep(1)
    known = root / "known_hosts"
    known.write_text(machine.known_hosts.read_text().replace(f":{machine.ssh_port} ", f":{port} "))
    data = {**machine.inventory_data(), "ssh_port": port, "ssh_known_hosts_file": str(known)}
    runs = []
    for count in (FEW, MANY):
        site = Site(folder_in(root, f"hosts-{count}"), recipe="deepseek-v4-flash-sm120", bundle="/srv/bundle")
        site.hosts([(f"gpu{number}", {**data, "sources": ["modelscope"]}) for number in range(count)])
        runs.append(site)
    few, many = seconds(*(lambda site=site: site.run("preflight", rc=1) for site in runs))  # type: ignore[misc]
    answered = len(list((runs[1].folder / "reports").glob("*/preflight.json")))
    assert answered == MANY, f"{answered} of {MANY} hosts left a report"
    return [
        (f"preflight, {FEW} hosts: seconds", few, ""),
        (f"preflight, {MANY} hosts: seconds", many, ""),
        (f"preflight, {MANY} / {FEW} hosts: seconds", many / few, "<= 3"),
    ]


def nothing_to_do(root: Path, machine: Machine, ansible: Ansible) -> list[Figure]:
    """A provisioned host with the stand-in engine: `site` again, and the same steps as a playbook."""
    site = Site(folder_in(root, "site"), [machine])
    site.prepare(machine)
    site.run("site", "-y")
    values = {
        "root": site.data["root"],
        "url": site.url,
        "links": site.data["find_links"][0],
        "engine_lock": str(site.folder / "engine.lock"),
        "tools_lock": str(ROOT / "requirements" / "tools.lock"),
        "wrapper": str(ROOT / "tasks" / "onhost" / "start-engine.sh"),
    }
    ansible.play("site", machine, values)  # its own folders and files are made here
    before = sessions(machine)
    site.run("site", "-y")
    ours = sessions(machine)
    ansible.play("site", machine, values)
    theirs = sessions(machine)
    mine, other = seconds(lambda: site.run("site", "-y"), lambda: ansible.play("site", machine, values))
    return [
        ("site, nothing to do: remote commands", ours[1] - before[1], "<= 12"),
        ("site, nothing to do: seconds", mine, ""),
        ("Ansible with pipelining, the same steps: remote commands", theirs[1] - ours[1], ""),
        ("Ansible with pipelining, the same steps: seconds", other, ""),
        ("Ansible with pipelining / site, nothing to do: seconds", other / mine, ">= 5"),
    ]


def latency(machine: Machine) -> list[Figure]:
    """Milliseconds of one small command over an open connection, as paramiko leaves it and as we set it."""
    medians = []
    for nodelay in (True, False):
        client = paramiko.SSHClient()
        client.load_host_keys(str(machine.known_hosts))
        client.connect(machine.host, machine.ssh_port, "root", key_filename=str(machine.ssh_key),
                       allow_agent=False, look_for_keys=False)  # fmt: skip
        transport = client.get_transport()
        assert transport is not None and isinstance(transport.sock, socket.socket)
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(nodelay))
        times = []
        for _ in range(LATENCY_COMMANDS):
            began = time.monotonic()
            _, out, _ = client.exec_command("sh -c :")
            out.channel.recv_exit_status()
            times.append(time.monotonic() - began)
        client.close()
        medians.append(statistics.median(times) * 1000)
    with_it, without = medians
    return [
        ("SSH command with TCP_NODELAY: ms", with_it, ""),
        ("SSH command without: ms", without, ""),
        ("SSH command, without / with TCP_NODELAY", without / with_it, ""),
    ]


def folder_in(root: Path, name: str) -> Path:
    """A new folder."""
    folder = root / name
    folder.mkdir()
    return folder
