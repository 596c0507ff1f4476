"""Ready: a real token, of the engine that its supervisor names, with the key that is on the host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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


def test_where_processes_cannot_be_looked_into_the_socket_s_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ready, "holders", lambda sockets: [])
    mine = Path(f"/proc/{os.getpid()}").stat().st_uid
    monkeypatch.setattr(ready, "listening", lambda port: {"socket:[1]": mine})
    assert ready.strangers(8000, os.getpid()) == []
    monkeypatch.setattr(ready, "listening", lambda port: {"socket:[1]": mine + 7})
    assert ready.strangers(8000, os.getpid()) == [f"a process of user {mine + 7}"]
    monkeypatch.setattr(ready, "listening", lambda port: {})
    assert ready.strangers(8000, os.getpid()) == []


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
