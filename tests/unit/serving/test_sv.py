"""What speaks to supervisord: whose processes are those that a dead supervisord left, and whose are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.onhost import sv


@pytest.fixture
def left(tmp_path: Path) -> Iterator[int]:
    """A process whose session's leader is dead, and a folder that says that supervisord was this leader."""
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 300 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    leader.wait(10)
    (tmp_path / "supervisord.pid").write_text(f"{leader.pid}\n")
    (tmp_path / "boot").write_text("rackwright-eager\n")
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_what_a_killed_supervisord_left_is_found(left: int, tmp_path: Path) -> None:
    sv.mark_boot(str(tmp_path))
    assert sv.orphans(str(tmp_path)) == {left: "rackwright-eager"}


@pytest.mark.parametrize("noted", [None, "another-boot/21\n", "{boot_id}/1\n"])
def test_the_same_number_in_an_earlier_start_of_the_container_makes_nobody_an_orphan(
    left: int, tmp_path: Path, noted: str | None
) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if noted:
        (tmp_path / "supervisord.boot").write_text(noted.format(boot_id=boot_id))
    assert sv.orphans(str(tmp_path)) == {}


def test_restarts_are_counted_since_somebody_last_started_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "logs" / "supervisord.log").write_text(
        "exited: a (exit status 1; not expected)\nstopped: a (exit status 0)\n"
        "exited: a (terminated by SIGKILL; not expected)\nexited: b (exit status 1; not expected)\n"
        "spawned: 'a' with pid 41\n"
    )
    run = str(tmp_path / "run")
    assert (sv.restarts(run, "a"), sv.restarts(run, "b"), sv.restarts(run, "c")) == (1, 1, 0)
    assert sv.spawned(run) == {41: "a"}


SUPERVISORD = """
import os, subprocess, sys, time
engine = subprocess.Popen(["sleep", "300"], preexec_fn=os.setpgrp)
print(engine.pid, flush=True)
while True:
    time.sleep(0.05)
    if engine.poll() is not None:  # its program is started again, as supervisord does
        engine = subprocess.Popen(["sleep", "300"], preexec_fn=os.setpgrp)
"""


class Deaf:
    """What looks like a supervisord of a folder and has no socket, with its engine."""

    def __init__(self, root: Path) -> None:
        self.run = str(root / "run")
        for name in ("run", "logs"):
            (root / name).mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISORD, "-c", f"{self.run}/supervisord.conf"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.engine = int(self.process.stdout.readline())
        (root / "run" / "supervisord.pid").write_text(f"{self.process.pid}\n")
        (root / "logs" / "supervisord.log").write_text(f"spawned: 'rw-eager' with pid {self.engine}\n")
        sv.mark_boot(self.run)

    def processes(self) -> set[int]:
        """It, and every engine that it has."""
        self.process.poll()
        return {pid for pid, (_, session, _) in sv.processes().items() if session == self.process.pid}

    def close(self) -> None:
        """End all of it."""
        for pid in (self.process.pid, *self.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        self.process.wait()


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    monkeypatch.setattr(sv, "answers", lambda run: False)
    monkeypatch.setattr(sv, "DEAF_SECONDS", 0.2)
    made = Deaf(tmp_path)
    yield made
    made.close()


def test_an_engine_whose_supervisord_does_not_answer_is_seen(
    deaf: Deaf, capsys: pytest.CaptureFixture[str]
) -> None:
    sv.main([deaf.run, "status"])
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["name"], told["state"], told["pid"]) == ("rw-eager", "ORPHAN", deaf.engine)
    assert deaf.processes() == {deaf.process.pid, deaf.engine}, "it was only looked at"


@pytest.mark.parametrize("words", [["stop", "rw-eager"], ["shutdown"]])
def test_a_stop_ends_a_supervisord_that_does_not_answer_before_its_engine(
    deaf: Deaf, words: list[str]
) -> None:
    sv.main([deaf.run, *words])
    assert deaf.processes() == set()


def test_no_second_supervisord_is_started_beside_one_that_does_not_answer(
    deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[set[int]] = []

    def start(command: list[str], **_: Any) -> Any:
        alive.append(deaf.processes())
        return SimpleNamespace(returncode=1, stderr="not in this test", stdout="")

    monkeypatch.setattr(sv.subprocess, "run", start)
    with pytest.raises(SystemExit, match="not in this test"):
        sv.boot(deaf.run)
    assert alive == [set()]


def test_a_supervisord_that_only_just_starts_is_waited_for(
    deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sv, "DEAF_SECONDS", 60)
    began = time.monotonic()
    monkeypatch.setattr(sv, "answers", lambda run: time.monotonic() > began + 0.3)
    sv.boot(deaf.run)
    assert deaf.processes() == {deaf.process.pid, deaf.engine}


@pytest.mark.parametrize(
    ("systemd", "uid", "scope"), [(True, 0, True), (True, 1000, False), (False, 0, False)]
)
def test_root_starts_supervisord_outside_the_control_group_of_the_job_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, systemd: bool, uid: int, scope: bool
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Any:
        started.append(command)
        return SimpleNamespace(returncode=1, stderr="", stdout="")

    monkeypatch.setattr(sv, "answers", lambda run: False)
    monkeypatch.setattr(sv.os.path, "isdir", lambda path: systemd and path == "/run/systemd/system")
    monkeypatch.setattr(sv.os, "geteuid", lambda: uid)
    monkeypatch.setattr(sv.subprocess, "run", start)
    with pytest.raises(SystemExit):
        sv.boot(str(tmp_path))
    (command,) = started
    assert (command[:2] == ["systemd-run", "--quiet"]) is scope
    assert ("--scope" in command) is scope
    assert command[-2:] == ["-c", f"{tmp_path}/supervisord.conf"]
