"""One run a model, also where two hosts share a folder whose locks do not reach the other one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.onhost import fetch_weights as fw


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fw, "BEAT", 0.1)
    monkeypatch.setattr(fw, "WATCH", 0.5)
    return tmp_path / "work" / "x.lock"


@contextmanager
def another_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on another host: other name, and a storage that knows no locks between hosts."""

    def no_locks(fd: int, how: int) -> None:
        raise OSError(fw.errno.ENOLCK, "No locks available")

    with monkeypatch.context() as context:
        context.setattr(fw.socket, "gethostname", lambda: "gpu2")
        context.setattr(fw.fcntl, "flock", no_locks)
        yield


def test_a_second_run_on_the_same_host_is_refused_and_told_who_runs(path: Path) -> None:
    with (
        fw.Lock(str(path)),
        pytest.raises(fw.Locked, match=f"process {os.getpid()} works"),
        fw.Lock(str(path)),
    ):
        pass
    assert not path.exists()


def test_a_run_on_another_host_is_refused_while_the_first_lives(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = socket.gethostname()
    with (
        fw.Lock(str(path)),
        another_host(monkeypatch),
        pytest.raises(fw.Locked, match=f"on host {here} works"),
        fw.Lock(str(path)),
    ):
        pass


def test_a_lock_that_a_dead_host_left_behind_is_taken_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    path.write_text("123 gpu7 41\n")
    with fw.Lock(str(path)):
        assert path.read_text().split()[:2] == [str(os.getpid()), socket.gethostname()]
    assert not path.exists()


def test_what_a_killed_run_of_this_host_left_costs_no_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fw, "WATCH", 60)
    path.parent.mkdir()

    def take() -> None:
        with fw.Lock(str(path)):
            pass

    for left in (f"123 {socket.gethostname()} 7\n", "123", ""):
        path.write_text(left)
        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        taking.join(30)
        assert not taking.is_alive(), left


def test_the_lock_shows_signs_of_life_until_it_ends(path: Path) -> None:
    lock = fw.Lock(str(path))
    with lock:
        first = path.read_text()
        for _ in range(100):
            if path.read_text() != first:
                break
            threading.Event().wait(0.05)
        assert path.read_text().split()[:2] == first.split()[:2]
        assert path.read_text() != first
