"""`preflight` over SSH on both kinds of host, with GPU tools replayed from recordings and odd containers."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Kind, Machine, free_port
from sites import ROOT, Site

sys.path.insert(0, str(ROOT / "tests" / "replay"))
from replay_profiles import Mode, install  # (needs the path above)

# DESIGN §7
MOST_COMMANDS = 3
FAKE_TORCH = ROOT / "tests" / "replay" / "fake_torch" / "torch"
# the stand-in nvidia-smi of whoever asks: users of one host see different GPUs
SHIM = '#!/bin/sh\nexec "/srv/replay/$(id -un)/nvidia-smi" "$@"\n'
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
CUDA = "/usr/local/cuda-13.0"


def give_gpus(machine: Machine, folder: Path, users: dict[str, tuple[str, Mode | None]]) -> None:
    """A host with a CUDA toolkit and device nodes, and the recordings that each of its users sees."""
    for user, (profile, mode) in users.items():
        install(profile, folder / "replay" / user, mode)
    machine.put(folder / "replay", "/srv/replay")
    machine.write("/usr/local/bin/nvidia-smi", SHIM, mode="755")
    machine.write(f"{CUDA}/bin/nvcc", NVCC, mode="755")
    headers = " ".join(f"{CUDA}/include/{name}.h" for name in ("cuda_runtime", "cublas_v2", "curand"))
    nodes = " ".join(
        f"/dev/{name}" for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(8)))
    )
    include = "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])')"
    machine.run(
        f"mkdir -p {CUDA}/include {include} && touch {headers} {include}/Python.h && chmod -R a+rX /srv"
    )
    machine.inside("sh", "-c", f"touch {nodes} && chmod 666 {nodes}")


def add_users(machine: Machine, *names: str) -> None:
    made = "; ".join(
        f"useradd -m {name} && cp -r /root/.ssh /home/{name}/ && chown -R {name}: /home/{name}/.ssh"
        for name in names
    )
    machine.run(made)


def small_recipe(folder: Path, name: str) -> str:
    """A recipe that ships, with the bytes and memory of a test host: its path."""
    text = (ROOT / "inventories" / "recipes" / f"{name}.toml").read_text("utf-8")
    for old, new in {
        r"(?m)^bytes = \d+_600_000_000": "bytes = 1_000_000",
        r"(?m)^env_bytes = \S+": "env_bytes = 1_000_000",
        r"(?m)^ram_gib = \S+": "ram_gib = 0.5",
        r"(?m)^shm_gib = \S+": "shm_gib = 0.1",
    }.items():
        text, count = re.subn(old, new, text)
        assert count == 1, old
    shutil.copytree(ROOT / "inventories" / "recipes", folder / "recipes")
    path = folder / "recipes" / f"{name}.toml"
    path.write_text(text)
    return str(path)


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["status"] for item in report["findings"]}


def finding(report: dict[str, Any], id: str) -> dict[str, Any]:
    return next(item for item in report["findings"] if item["id"] == id)


def worst(report: dict[str, Any]) -> set[str]:
    """What blocks, but for servers: whether those answer is a matter of where the test runs."""
    failed = {id for id, status in statuses(report).items() if status == "fail"}
    return {id for id in failed if not id.startswith("net.")}


@pytest.fixture(scope="module")
def pair(hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, Machine]]:
    """One host of each kind with replayed GPUs, for every test here: preflight changes nothing on them.

    root sees four RTX PRO 6000 on both; the container's other users see other GPUs and broken drivers.
    """
    folder = tmp_path_factory.mktemp("replay")
    found: dict[Kind, Machine] = {
        "systemd": Machine("systemd", "rig"),
        "container": Machine("container", "box"),
    }
    try:
        for kind, machine in found.items():
            machine.start()
            users = {"root": ("rtx-pro-6000-x4", None), "user": ("h20-x8", None)}
            if kind == "container":
                add_users(machine, *BROKEN)
                users |= {mode: ("rtx-pro-6000-x4", mode) for mode in BROKEN}
            give_gpus(machine, folder / kind, users)
            machine.put(FAKE_TORCH, "/usr/lib/python3/dist-packages/torch")
            machine.write("/usr/lib/python3/dist-packages/torch/gpus", "4")
        yield found
    finally:
        for machine in found.values():
            machine.stop()


BROKEN: dict[Mode, tuple[str, str]] = {
    "mismatch": ("driver was upgraded underneath", "reboot"),
    "no_driver": ("kernel module is not loaded", "modprobe nvidia"),
    "no_devices": ("finds no GPU it can use", "lspci -nn"),
    "access_lost": ("lost its devices", "Restart the container"),
    "gpu_lost": ("does not answer any more", "Reboot the host"),
}
# a bundle needs no server, and a copy on the host no hub
OFFLINE = {"bundle": "/srv/bundle", "sources": ["path"], "model_path": "/srv/model"}


def site_of(folder: Path, hosts: dict[str, dict[str, Any]], **data: Any) -> Site:
    site = Site(folder, **{"find_links": [], "sources": ["generate"], **data})
    site.hosts(list(hosts.items()))
    return site


def note_commands(machine: Machine) -> None:
    """Have sshd note every command that it is asked to run."""
    machine.write("/etc/ssh/sshd_config.d/log.conf", "LogLevel VERBOSE\n")
    again = "systemctl reload ssh" if machine.kind == "systemd" else "pkill -HUP -o sshd"
    machine.inside("sh", "-c", again)
    time.sleep(0.2)
    end = time.monotonic() + 30
    while machine.run("true", check=False).returncode and time.monotonic() < end:
        time.sleep(0.2)  # it starts itself anew


def logins(machine: Machine) -> tuple[int, int]:
    """(sessions, commands) that sshd has noted so far."""
    log = machine.log_tail(100_000)
    return log.count("Accepted publickey"), log.count("Starting session: command")


@pytest.mark.parametrize("kind", ["systemd", "container"])
def test_a_host_like_the_recipes_passes_in_one_connection_and_stays_as_it_was(
    kind: Kind, pair: dict[Kind, Machine], tmp_path: Path
) -> None:
    machine = pair[kind]
    note_commands(machine)
    recipe = small_recipe(tmp_path, "deepseek-v4-flash-sm120")
    machine.run("printf 'die-p2p' >/usr/lib/python3/dist-packages/torch/faults")
    site = site_of(tmp_path, {"rig": machine.inventory_data()}, recipe=recipe, **OFFLINE)
    # everything with its time, but what sshd and systemd write at a login, and the replay's own notes
    places = "/var/log /proc /run /srv/replay /tmp/systemd-private-* /var/tmp/systemd-private-*"
    pruned = " -o ".join(f"-path '{place}'" for place in places.split())
    found = "! -path /tmp ! -path /var/tmp -printf '%p %T@\\n'"
    listing = f"find / -xdev \\( {pruned} \\) -prune -o {found} | sort; ls -A /dev/shm"
    before, said = machine.inside("sh", "-c", listing).stdout, logins(machine)
    output = site.run("preflight", "--data", "deep=true")
    after, now = machine.inside("sh", "-c", listing).stdout, logins(machine)
    assert after == before
    report = site.report("rig", "preflight")
    assert worst(report) == set()
    assert report["commands"] == 2 <= MOST_COMMANDS
    assert (now[0] - said[0], now[1] - said[1]) == (1, 2)
    assert statuses(report)["gpu.count"] == statuses(report)["cuda.toolkit"] == "ok"
    assert "4x NVIDIA RTX PRO 6000" in (finding(report, "gpu.present")["observed"] or "")
    assert finding(report, "host.init")["observed"].startswith(
        "systemd" if kind == "systemd" else "no systemd"
    )
    # proven by a real run, not by a flag: with P2P the ranks die, without it the sum is right
    assert report["nccl"] == {
        "p2p": False,
        "why": report["deep"]["verdict"]["why"],
        "env": {"NCCL_P2P_DISABLE": "1"},
        "flags": {"disable-custom-all-reduce": True},
        "proven": True,
    }
    assert "the engine will be started that way" in finding(report, "deep.all_reduce")["summary"]
    assert report["verdict"] == "warn" and "rig: ready with" in output
    assert "\x1b[" not in output.split("\nrig\n", 1)[1], "colours are for terminals"
    assert (site.folder / "reports" / "index.html").exists()
    site.run("preflight", "--data", "strict=true", rc=1)
    assert site.report("rig", "preflight")["why"].startswith("not ready: ")


def test_many_hosts_at_once_with_one_that_hangs_and_one_that_is_not_there(
    pair: dict[Kind, Machine], tmp_path: Path
) -> None:
    box = pair["container"]
    add_users(box, "hang")
    install("rtx-pro-6000-x4", tmp_path / "replay" / "hang", "hang")
    box.put(tmp_path / "replay" / "hang", "/srv/replay/hang")
    broken = {mode: box.inventory_data(user=mode) for mode in BROKEN}
    hosts = {
        "good": pair["systemd"].inventory_data(),
        "nobody": {"ssh_hostname": "127.0.0.1", "ssh_port": free_port(), "ssh_user": "root"},
        "hang": box.inventory_data(user="hang"),
        **broken,
    }
    recipe = small_recipe(tmp_path, "deepseek-v4-flash-sm120")
    site = site_of(tmp_path, hosts, recipe=recipe, **OFFLINE, root="/tmp/rackwright")
    output = site.run("preflight", rc=1, timeout=90)
    rows = output.split("\nhost ", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    assert {row.split()[0] for row in rows} == set(hosts)
    assert rows[-1].startswith("good") and "warnings" in rows[-1], "the worst come first"
    assert f"{len(hosts)} hosts: {len(hosts) - 1} not ready, 1 ready with warnings" in output
    assert worst(site.report("nobody", "preflight")) == {"host.reachable"}
    assert "ssh -p" in finding(site.report("nobody", "preflight"), "host.reachable")["fix"]
    for name, (words, fix) in {**BROKEN, "hang": ("does not answer: the driver is stuck", "Reboot")}.items():
        report = site.report(name, "preflight")
        told = finding(report, "gpu.driver_communication")
        assert told["status"] == "fail" and words in told["summary"] and fix in told["fix"], name
        assert report["commands"] == 1
        # the rest of the host is read all the same, and what needs GPUs is neither ok nor a crash
        assert statuses(report)["host.memory"] == statuses(report)["disk.space"] == "ok"
        assert statuses(report)["gpu.memory"] == "skipped"


def test_eight_h20_are_no_rtx_pro_6000_for_the_right_reasons_only(
    pair: dict[Kind, Machine], tmp_path: Path
) -> None:
    hosts = {kind: machine.inventory_data(user="user") for kind, machine in pair.items()}
    recipe = small_recipe(tmp_path, "deepseek-v4-flash-sm120")
    site = site_of(tmp_path, hosts, recipe=recipe, **OFFLINE, root="/tmp/rackwright")
    output = site.run("preflight", rc=1)
    for kind in hosts:
        report = site.report(kind, "preflight")
        assert worst(report) == {"gpu.model", "gpu.compute_capability"}
        assert finding(report, "gpu.model")["observed"] == "NVIDIA H20"
        assert "NVLink" in finding(report, "gpu.topology")["summary"]
        assert report["topology"]["links"]["GPU 0 to 1"] == "NV18"
    assert "2 hosts: 2 not ready" in output


def test_a_rented_container_is_seen_as_what_it_is(new_host: Any, tmp_path: Path) -> None:
    box: Machine = new_host("container")
    box.tmpfs("/data", size="30m", inodes=90)
    box.inside("mount", "-o", "remount,size=64m", "/dev/shm")
    # 2 hours ahead for whoever asks by name, and nothing that is a Python
    box.write("/usr/local/bin/date", '#!/bin/sh\n[ "$1" = +%s ] && exec echo $(($(/bin/date +%s) + 7200))\n'
              'exec /bin/date "$@"\n', mode="755")  # fmt: skip
    box.run("mv /usr/bin/python3* /srv/")
    hosts = {
        "small": box.inventory_data(),
        "user": {**box.inventory_data(user="user"), "root": "/opt/rackwright"},
        "sudoer": {**box.inventory_data(user="sudoer"), "root": "/opt/rackwright"},
        "sudo": {**box.inventory_data(user="sudoer"), "root": "/opt/rackwright", "_sudo": True},
    }
    site = site_of(tmp_path, hosts, root="/data/rackwright")
    text = (site.folder / "standin.toml").read_text()
    (site.folder / "standin.toml").write_text(text.replace("ram_gib = 0.2", "ram_gib = 0.2\nshm_gib = 1"))
    site.run("preflight", rc=1)
    small, user, sudoer, sudo = (site.report(name, "preflight") for name in hosts)
    common = {"python.conda", "host.clock", "disk.shm"}
    assert worst(small) == {*common, "disk.space", "disk.inodes"}
    assert "64.0 MiB" in finding(small, "disk.shm")["observed"]
    assert "default of 64 MiB" in finding(small, "disk.shm")["summary"]
    assert "--shm-size" in finding(small, "disk.shm")["fix"]
    assert "/data" in finding(small, "disk.inodes")["observed"]
    assert finding(small, "host.clock")["observed"].startswith("+7")
    assert finding(small, "python.conda")["fix"] == "apt-get install -y python3"
    assert "no systemd" in finding(small, "host.init")["observed"]
    assert worst(user) == {*common, "disk.writable"}
    assert "may not be written by user" in finding(user, "disk.writable")["observed"]
    assert '"_sudo": True' in finding(sudoer, "disk.writable")["fix"]
    assert worst(sudo) == common


def test_only_what_is_not_done_is_asked_of_servers(container_host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [container_host], index_url="http://127.0.0.1:1/simple")
    container_host.run("rm -f /etc/pip.conf; sed -i /^PIP_/d /etc/environment")
    output = site.run("preflight", rc=1)
    dead = finding(site.report(container_host.name, "preflight"), "net.index")
    assert dead["status"] == "fail" and "http://127.0.0.1:1/simple/pip/" in dead["observed"]
    assert "rackwright bundle" in dead["fix"] and "rackwright bundle" in " ".join(output.split())
    root = site.data["root"]
    container_host.run(
        f"mkdir -p {root}/receipts {root}/env/bin && : >{root}/.rackwright && "
        f"""printf '{{"version": "0.32.0"}}' >{root}/receipts/engine.json && """
        f"echo {{}} >{root}/receipts/tools.json && "
        f"printf '#!/bin/sh\\n' >{root}/env/bin/vllm && chmod 755 {root}/env/bin/vllm"
    )
    site.run("preflight")
    assert not [id for id in statuses(site.report(container_host.name, "preflight")) if id.startswith("net.")]
