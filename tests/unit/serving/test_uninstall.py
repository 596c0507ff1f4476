"""Uninstall on this machine as the host: nothing comes back, nothing foreign goes, what stays is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_bench import ONHOST, EngineBench
from test_promotion import Bench

from tasks import former
from tasks.former import end_supervisord, meant, remove_units
from tasks.jobs import Job, start_script
from tasks.onhost.fetch_weights import WORK
from tasks.receipts import Receipt
from tasks.remote import Result
from tasks.service import prepare
from tasks.settings import Layout
from tasks.steps import StepFailed
from tasks.supervisors import Systemd
from tasks.supervisors.systemd import systemd_word
from tasks.uninstall import Uninstall


class Host:
    """A plan whose host is this machine; programs in `bin` take the place of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        self.bin.mkdir()
        for name in ("run/programs", "lib/1", "receipts", "cache/jit", "jobs"):
            (self.root / name).mkdir(parents=True)
        (self.root / ".rackwright").touch()
        shutil.copy(ONHOST / "job.sh", self.root / "lib/1/job.sh")
        self.layout = Layout(str(self.root), str(folder / "models"))
        self.model_dir, self.name = str(folder / "models" / "m"), "h"
        self.service_names = ("rackwright-eager", "rackwright-trial")
        self.receipts: dict[str, Receipt] = {}
        self.state = SimpleNamespace(foreign_root=False, has=lambda flag: (self.root / "run" / flag).exists())
        self.recipe = SimpleNamespace(serve=SimpleNamespace(stop_seconds=1))
        self.settings = SimpleNamespace(instance="rackwright")
        self.facts = SimpleNamespace(system=SimpleNamespace(uid=0, home=str(folder / "home")))
        self.supervisor: Any = SimpleNamespace(name="supervisord", remove=lambda names: ":")
        self.remote = self
        self.said: list[str] = []

    def program(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def run(self, script: str, timeout: float = 60) -> Result:
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", f"( {script}\n)"], input="", capture_output=True, text=True, env=env, timeout=timeout
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def receipt(self, step: str) -> Receipt | None:
        return self.receipts.get(step)

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its units lie in a folder of the test."""
    monkeypatch.setattr(former, "SYSTEM_UNITS", str(tmp_path / "units"))
    (tmp_path / "units").mkdir()
    return Host(tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_start_that_goes_on_does_not_put_back_what_is_being_removed(host: Any, tmp_path: Path) -> None:
    serves, unit = tmp_path / "serves", tmp_path / "units" / "rackwright-eager.service"
    serves.touch()
    # what bring_up.py does when its engine ends: the service of before is put back
    work = f"while [ -e {serves} ]; do sleep 0.05; done; : >{unit}"
    job = Job("bring-up", f"{host.root}/jobs/bring-up", "k", ("sh", "-c", work))
    assert host.run(start_script(job, f"{host.root}/lib/1/job.sh")).stdout == "started\n"
    host.supervisor.remove = lambda names: f"rm -f {unit} {serves}; sleep 0.5"
    Uninstall(host).act()
    assert not unit.exists()
    assert not host.root.exists()


@pytest.mark.slow
def test_a_guard_at_work_ends_before_anything_is_removed(
    host: Any, tmp_path: Path, new_engine: Callable[..., EngineBench]
) -> None:
    bench, folder = Bench(host.root, new_engine), host.root / "run" / "promotion"
    request = bench.request()
    # an engine that takes long to load
    request["safe"]["probe"] = {**request["safe"]["probe"], "base_url": "http://127.0.0.1:1"}
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state = {"phase": "starting fast on trial", "steps": [], "result": {}, "boot": boot, "settled": False}
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "state.json").write_text(json.dumps(state))
    guard = subprocess.Popen([sys.executable, str(ONHOST / "promotion.py"), "guard", str(folder)])
    try:
        wait_for(bench.safe.alive)
        host.supervisor.remove = lambda names: bench.safe.stop_script
        Uninstall(host).act()
        assert guard.wait(60) == 1
    finally:
        guard.kill()
        guard.wait()
    assert not host.root.exists()
    assert not bench.safe.alive()


@pytest.mark.parametrize("stays", ["root/cache", f"models/{WORK}/m"])
def test_what_cannot_be_removed_is_said_and_the_next_uninstall_goes_on(
    host: Any, tmp_path: Path, stays: str
) -> None:
    stuck = tmp_path / stays
    stuck.mkdir(parents=True, exist_ok=True)
    refuse = f"case \" $* \" in *' {stuck} '*) echo rm: {stuck}: Permission denied >&2; exit 1;; esac"
    host.program("rm", f'{refuse}; exec {shutil.which("rm")} "$@"')
    for uid, fix in (
        (1000, "rackwright uninstall INVENTORY -y --sudo"),
        (0, "rackwright uninstall INVENTORY -y"),
    ):
        host.facts.system.uid = uid
        with pytest.raises(StepFailed) as why:
            Uninstall(host).act()
        assert f"{stuck}: Permission denied" in str(why.value)
        assert str(why.value).endswith(f"\nFix: {fix}")
        assert (host.root / ".rackwright").exists()
    (host.bin / "rm").unlink()
    Uninstall(host).act()
    assert not host.root.exists()
    assert not stuck.exists()


def test_the_user_that_was_made_is_removed_and_nobody_else(host: Any, tmp_path: Path) -> None:
    users, removed = tmp_path / "users", tmp_path / "removed"
    users.mkdir()
    (users / "rackwright").touch()  # somebody else's account of that name
    host.program("id", f'[ -e {users}/"$2" ] && echo 999')
    host.program("useradd", f'for u; do :; done; : >{users}/"$u"')
    mark = host.root / ".rackwright"
    host.program("userdel", f'[ -e {mark} ] && rm {users}/"$1" && echo "$1" >>{removed}')
    for name in ("chown", "usermod", "getent"):
        host.program(name, "exit 0")
    spec = SimpleNamespace(user="llm", env=(), writable=(f"{host.root}/cache/jit/k",), key_file=None)
    host.supervisor.helpers = dict
    host.supervisor.files = lambda spec, others: {}
    spec.wrapper, host.route = f"{host.root}/run/start-engine.sh", "wheel"
    for name in ("rackwright", "llm", "llm"):
        spec.user = name
        prepare(host, spec)
    assert {path.name for path in users.iterdir()} == {"rackwright", "llm"}
    Uninstall(host).act()
    assert removed.read_text() == "llm\n"
    assert {path.name for path in users.iterdir()} == {"rackwright"}


def test_a_user_that_something_else_needs_is_kept_and_said(host: Any) -> None:
    (host.root / "run" / "made-user").write_text("llm\n")
    host.program("id", "echo 999")
    host.program("userdel", 'echo "userdel: user $1 is currently used by process 7" >&2; exit 8')
    Uninstall(host).act()
    assert "kept: the user llm: userdel: user llm is currently used by process 7" in host.said


def unit(folder: Path, name: str, wrapper: str) -> Path:
    """An enabled unit."""
    path = folder / f"{name}.service"
    wants = folder / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[Service]\nExecStart={systemd_word('/bin/sh')} {systemd_word(wrapper)}\n")
    (wants / path.name).symlink_to(path)
    return path


def test_units_of_lost_modes_and_former_instances_go_and_others_stay(host: Any, tmp_path: Path) -> None:
    wrapper, system = f"{host.root}/run/start-engine.sh", tmp_path / "units"
    of_user, elsewhere = tmp_path / "home/.config/systemd/user", tmp_path / "old-home/.config/systemd/user"
    now = unit(system, "rackwright-eager", wrapper)
    lost = [unit(system, "rackwright-fastest", wrapper), unit(system, "llm-eager", wrapper)]
    lost += [unit(of_user, "rackwright-eager", wrapper), unit(elsewhere, "rackwright-eager", wrapper)]
    foreign = unit(system, "rackwright-other", "/srv/other/run/start-engine.sh")
    host.receipts["service"] = Receipt("service", "d", 0, paths=(str(lost[3]),))
    host.supervisor = Systemd()
    host.supervisor.unit_path = lambda name: f"{system}/{name}.service"
    assert host.run(remove_units(host, meant(host))) == Result(0, "", "")
    assert [path.exists() for path in (now, foreign, *lost)] == [True, True, *[False] * 4]
    links = {path.name for path in tmp_path.rglob("*.wants/*")}
    assert links == {"rackwright-eager.service", "rackwright-other.service"}
    host.supervisor = SimpleNamespace(name="supervisord", remove=lambda names: ":")
    assert meant(host) == ()
    Uninstall(host).act()
    assert (now.exists(), foreign.exists()) == (False, True)


def test_a_supervisord_of_before_ends_and_nothing_starts_it_again(host: Any) -> None:
    run, tools = host.root / "run", host.root / "tools" / "bin"
    tools.mkdir(parents=True)
    names = ("sv.py", "up.sh", "boot", "supervisord.conf", "programs/rackwright-eager.conf")
    for name in (*names, "api-key"):
        (run / name).write_text("x\n")
    (tools / "python").write_text(f'#!/bin/sh\necho "$@" >>{host.root}/told\n')
    (tools / "python").chmod(0o755)
    assert host.run(end_supervisord(host)).ok
    assert all((run / name).exists() for name in names), "it is what is meant"
    host.supervisor = Systemd()
    for _ in range(2):
        assert host.run(end_supervisord(host)) == Result(0, "", "")
    assert (host.root / "told").read_text() == f"{run}/sv.py {run} shutdown\n"
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["api-key"]


def test_a_unit_that_cannot_be_removed_is_named(host: Any, tmp_path: Path) -> None:
    path = unit(tmp_path / "units", "rackwright-fastest", f"{host.root}/run/start-engine.sh")
    host.program("rm", "echo Read-only file system >&2; exit 1")
    with pytest.raises(StepFailed, match=f"Read-only file system; {path} is still there"):
        Uninstall(host).act()
