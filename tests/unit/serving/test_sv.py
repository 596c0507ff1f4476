"""What speaks to supervisord: whose processes are those that a dead supervisord left, and whose are not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
