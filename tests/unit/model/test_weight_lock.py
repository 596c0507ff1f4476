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

# real processes, and time that they are given
pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fw, "BEAT", 0.1)
    monkeypatch.setattr(fw, "WATCH", 0.5)
    monkeypatch.setattr(fw, "SETTLE", 0.3)
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


class Hosts:
    """Threads that are hosts: each has a name of its own, and a storage without locks between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        monkeypatch.setattr(fw.socket, "gethostname", lambda: self.here.name)
        monkeypatch.setattr(fw.fcntl, "flock", self.no_locks)
        self.worked: list[str] = []
        self.refused: list[str] = []

    @staticmethod
    def no_locks(fd: int, how: int) -> None:
        raise OSError(fw.errno.ENOLCK, "No locks available")

    def run(self, path: Path, *names: str) -> None:
        """Every host at once wants to work for a while."""

        def one(name: str) -> None:
            self.here.name = name
            try:
                with fw.Lock(str(path)):
                    self.worked.append(name)
                    threading.Event().wait(1.5)
            except fw.Locked as why:
                self.refused.append(str(why))

        threads = [threading.Thread(target=one, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize("left", [None, "", "123 gpu7 41\n"])
def test_of_hosts_that_begin_at_once_without_common_locks_one_works(
    left: str | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    if left is not None:
        path.write_text(left)
    hosts = Hosts(monkeypatch)
    meet = threading.Barrier(3)
    known = fw.Lock._lock

    def together(lock: fw.Lock, fd: int) -> bool:
        if not hasattr(hosts.here, "met"):
            hosts.here.met = meet.wait(10)  # all have opened the file, none has signed it
        return known(lock, fd)

    monkeypatch.setattr(fw.Lock, "_lock", together)
    hosts.run(path, "gpu1", "gpu2", "gpu3")
    assert len(hosts.worked) == 1
    assert len(hosts.refused) == 2
    assert not path.exists()


def test_without_locks_two_runs_of_one_host_are_told_apart_by_their_signs_of_life(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(monkeypatch)
    hosts.run(path, "gpu1", "gpu1")
    assert (len(hosts.worked), len(hosts.refused)) == (1, 1)


def test_a_sign_of_life_is_brought_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(fw.os, "fsync", flushed.append)
    with fw.Lock(str(path)) as lock:
        assert flushed == [lock._fd]


def test_a_lock_that_another_host_took_away_is_no_failure_of_the_run(path: Path) -> None:
    with fw.Lock(str(path)):
        path.unlink()
    with fw.Lock(str(path)):
        path.unlink()
        path.write_text("9 gpu7 1\n")
    assert path.read_text() == "9 gpu7 1\n"  # and theirs stays


def test_a_run_that_ends_while_it_is_watched_leaves_no_lock_to_a_removed_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that watched works behind a file that others see."""
    path.parent.mkdir()
    path.write_text("123 gpu7 41\n")
    threading.Timer(0.2, path.unlink).start()
    with fw.Lock(str(path)):
        assert path.read_text().split()[:2] == [str(os.getpid()), socket.gethostname()]


def test_a_lock_of_a_client_in_a_folder_without_locks_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "x.lock"
    lock.touch()
    monkeypatch.setattr(fw.fcntl, "flock", Hosts.no_locks)
    assert fw.held(str(lock)) is False
