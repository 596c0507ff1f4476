"""Ready: a real token, of the engine that its supervisor names, with the key that is on the host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_bench import ONHOST, EngineBench, free_port

from tasks.onhost import ready

NewEngine = Callable[..., EngineBench]


@pytest.fixture
def engine(new_engine: NewEngine) -> EngineBench:
    made = new_engine()
    subprocess.run(["sh", "-c", made.start_script], check=True, env={**os.environ, "VLLM_API_KEY": "right"})
    return made


def sharing(host: str, port: int) -> socket.socket:
    """A socket that listens as vLLM's does: another with the same flag may share its port."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((host, port))
    one.listen()
    return one


@contextmanager
def sharer(host: str, port: int) -> Iterator[int]:
    """Another process that listens there too; its id."""
    words = (
        "import socket, time; one = socket.socket();"
        "one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
        f"one.bind(({host!r}, {port})); one.listen(); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def look(engine: EngineBench, **more: Any) -> dict[str, Any]:
    return ready.look({**engine.request()["probe"], **more})


def wait_up(engine: EngineBench, key: Path) -> dict[str, Any]:
    for _ in range(200):
        answer = look(engine, key_file=str(key), timeout=5)
        if answer["ready"]:
            return answer
        time.sleep(0.05)
    raise AssertionError(answer)


def test_a_token_with_the_right_key_is_ready_and_another_key_is_told_from_a_fault(
    engine: EngineBench, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("right\n")
    assert wait_up(engine, key)["stage"] == "token"
    assert look(engine, key_file=str(key), pid=engine.pid())["ready"]
    key.write_text("wrong")
    assert look(engine, key_file=str(key))["stage"] == "key"
    assert look(engine, key_file=None)["stage"] == "key"
    assert look(engine, key_file=str(tmp_path / "missing"))["stage"] == "key"


def test_another_model_is_not_ours(engine: EngineBench, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("right")
    wait_up(engine, key)
    answer = look(engine, key_file=str(key), model="other")
    assert (answer["ready"], answer["stage"], answer["why"]) == (False, "model", "it serves m, not other")


def test_a_process_that_is_not_the_engine_s_is_named_as_a_stranger(
    engine: EngineBench, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("right")
    wait_up(engine, key)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        answer = look(engine, key_file=str(key), pid=other.pid)
        assert (answer["ready"], answer["stage"]) == (False, "stranger")
        assert f"process {engine.pid()} (" in answer["why"]
    finally:
        other.kill()
        other.wait()


def test_a_stranger_is_named_by_two_words_as_the_probe_does() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)", "--api-key", "sk-secret"]
    with subprocess.Popen(words) as other:
        try:
            for _ in range(200):  # until it has become its program
                if (told := ready.command_of(other.pid)).endswith(" -c"):
                    break
                time.sleep(0.01)
        finally:
            other.kill()
    assert told == f"{sys.executable} -c"


def test_where_processes_cannot_be_looked_into_the_socket_s_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strangers(held: dict[int, set[str]], **users: int) -> list[str]:
        sockets = {f"socket:[{name}]": user for name, user in users.items()}
        monkeypatch.setattr(ready, "holders", lambda names: held)
        monkeypatch.setattr(ready, "listening", lambda port, host: sockets)
        return ready.strangers(8000, os.getpid())

    mine = Path(f"/proc/{os.getpid()}").stat().st_uid
    assert strangers({}, a=mine) == []
    assert strangers({}, a=mine + 7) == [f"a process of user {mine + 7}"]
    assert strangers({}) == []
    seen = {os.getpid(): {"socket:[a]"}}
    assert strangers(seen, a=mine, b=mine) == []
    assert strangers(seen, a=mine, b=mine + 7) == [f"a process of user {mine + 7}"]


def test_an_older_engine_that_shares_the_port_is_a_stranger_beside_ours() -> None:
    port = free_port()
    with sharer("127.0.0.1", port) as ours:
        assert ready.strangers(port, ours, None, "127.0.0.1") == []
        with sharer("127.0.0.1", port) as old:
            assert set(ready.holders(set(ready.listening(port)))) == {ours, old}
            (told,) = ready.strangers(port, ours, None, "127.0.0.1")
            assert told.startswith(f"process {old} (")
        assert ready.strangers(port, ours, None, "127.0.0.1") == []
    assert ready.listening(port) == {}


@pytest.mark.parametrize(
    ("other", "asked", "counts"),
    [
        ("127.0.0.9", "127.0.0.1", False),  # it never sees what is sent to 127.0.0.1
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.9", None, True),  # who asks for no address wants all that have the port
        ("127.0.0.1", "localhost", True),
        ("127.0.0.9", "0.0.0.0", True),
    ],
)
def test_only_sockets_count_that_may_take_the_request(other: str, asked: str | None, counts: bool) -> None:
    with sharing(other, 0) as one:
        assert bool(ready.listening(one.getsockname()[1], asked)) is counts


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (b"\x7f\0\0\1", "127.0.0.1"),
        (b"\0" * 10 + b"\xff\xff\x0a\0\0\5", "10.0.0.5"),
        (b"\0" * 15 + b"\1", "::1"),
        (b"\0" * 16, "::"),
    ],
)
def test_addresses_of_sockets_are_read_as_the_kernel_prints_them(words: bytes, address: str) -> None:
    printed = "".join(
        f"{int.from_bytes(words[at : at + 4], sys.byteorder):08X}" for at in range(0, len(words), 4)
    )
    assert str(ready.bound(printed)) == address


def test_a_process_descends_from_its_parent_and_not_from_a_stranger() -> None:
    assert ready.is_within(os.getpid(), os.getppid())
    assert not ready.is_within(os.getpid(), 999_999_999)
    apart = subprocess.Popen(["sleep", "60"], start_new_session=True)
    beside = subprocess.Popen(["sleep", "60"])  # of our group, which is not its own
    try:
        assert not ready.is_within(os.getpid(), apart.pid)
        assert not ready.is_within(os.getpid(), beside.pid)
    finally:
        for one in (apart, beside):
            one.kill()
            one.wait()


def test_an_engine_in_a_container_is_known_by_what_docker_says(
    engine: EngineBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("right")
    wait_up(engine, key)
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\n[ "$4" = rw-eager ] && echo {engine.pid()} || exit 1\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert look(engine, key_file=str(key), pid=other.pid, container="rw-eager")["ready"]
        assert look(engine, key_file=str(key), pid=other.pid, container="rw-other")["stage"] == "stranger"
    finally:
        other.kill()
        other.wait()


def test_nobody_listening_is_said_so() -> None:
    port = free_port()
    answer = ready.look({"base_url": f"http://127.0.0.1:{port}", "model": "m"})
    assert (answer["stage"], answer["why"]) == ("closed", f"nothing listens on port {port}")


def test_a_server_that_takes_the_connection_and_says_nothing_does_not_hang_the_look() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answer = ready.look({"base_url": url, "model": "m", "timeout": 1})
    assert (answer["ready"], answer["stage"]) == (False, "error")
    assert answer["seconds"] < 5


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"data": [{}]}', b"\xff\xfe"])
def test_answers_of_another_shape_are_not_ready_and_no_exception(body: bytes) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        answer = ready.look(
            {"base_url": f"http://127.0.0.1:{server.getsockname()[1]}", "model": "m", "timeout": 5}
        )
        thread.join(5)
    assert not answer["ready"]


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n{"data":',  # cut: its process died
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 " + b"x" * 70_000,
    ],
)
def test_a_cut_or_a_foreign_answer_is_not_ready_and_no_exception(answer: bytes) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        found = ready.look({"base_url": url, "model": "m", "timeout": 5})
        thread.join(5)
    assert (found["ready"], found["stage"]) == (False, "error")
    assert found["why"]


def test_it_can_be_sent_along_as_one_text(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", (ONHOST / "ready.py").read_text()],
        input=json.dumps({"base_url": f"http://127.0.0.1:{free_port()}", "model": "m"}),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
    )
    assert json.loads(done.stdout)["stage"] == "closed"
