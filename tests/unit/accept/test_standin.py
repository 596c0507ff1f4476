"""The stand-in as a process: what tests of hosts and supervisors rely on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accept_bench import ENGINE, MODEL, engine


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Process:
    """A stand-in started as `vllm serve`."""

    def __init__(self, log: Path, faults: str = "", port: int | None = None, **env: str) -> None:
        self.port = port or free_port()
        self.log = log
        argv = ["serve", "/models/m", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--served-model-name", MODEL, "--trust-remote-code", "--compilation-config", '{"level": 3}']
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(ENGINE), *argv],
                env={**os.environ, "STANDIN_FAULTS": faults, **env},
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def wait_for(self, text: str, seconds: float = 10) -> None:
        """Until the log holds `text`."""
        end = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def ask(self, path: str, body: Any = None, key: str = "") -> tuple[int, str]:
        """Status and text of one request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts stand-ins that are killed, by pid, at the end of the test."""
    started: list[Process] = []

    def launch(*given: Any, **env: Any) -> Process:
        started.append(Process(tmp_path / f"{len(started)}.log", *given, **env))
        return started[-1]

    yield launch
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(10)


HELLO = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "只输出：PD_OK"}],
    "reasoning_effort": "none",
}


def test_it_starts_answers_and_ends_cleanly_on_sigterm(start: Any) -> None:
    one = start()
    one.wait_for("Application startup complete.")
    status, text = one.ask("/v1/chat/completions", HELLO)
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "PD_OK")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(5) == 0
    assert "Application shutdown complete." in one.log.read_text()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", one.port), 1)


def test_it_dies_at_start_with_a_traceback(start: Any) -> None:
    one = start("dies_at_start")
    assert one.process.wait(5) == 1
    assert "Engine core initialization failed" in one.log.read_text()


def test_it_is_never_ready_and_still_ends_on_sigterm(start: Any) -> None:
    one = start("never_ready")
    one.wait_for("non-default args")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", one.port), 1)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(5) == 0


def test_it_is_slow_to_start(start: Any) -> None:
    began = time.monotonic()
    start("slow_start=0.5").wait_for("Application startup complete.")
    assert time.monotonic() - began >= 0.5


def test_it_is_healthy_and_dies_at_the_first_request(start: Any) -> None:
    one = start("healthy_but_dies_at_first_request")
    one.wait_for("Application startup complete.")
    assert one.ask("/health")[0] == 200
    with pytest.raises(OSError):
        one.ask("/v1/chat/completions", HELLO)
    assert one.process.wait(5) == 1
    assert "head_dim=16" in one.log.read_text()


def test_a_port_that_is_taken_is_an_error_that_names_it(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = start("", server.getsockname()[1])
        assert one.process.wait(5) == 1
    assert "address already in use" in one.log.read_text().lower()


def test_the_key_guards_v1_and_not_health_as_in_vllm(start: Any) -> None:
    one = start("", None, VLLM_API_KEY="k-123")
    one.wait_for("Application startup complete.")
    assert one.ask("/v1/models")[0] == 401
    assert one.ask("/v1/models", key="k-123")[0] == 200
    assert one.ask("/health")[0] == 200
    assert "k-123" not in one.log.read_text()


def test_the_fault_file_is_read_again_for_each_request(start: Any, tmp_path: Path) -> None:
    switch = tmp_path / "faults.json"
    one = start("", None, STANDIN_FAULT_FILE=str(switch))
    one.wait_for("Application startup complete.")
    assert MODEL in one.ask("/v1/models")[1]
    switch.write_text('{"wrong_model_name": true}')
    assert "some-other-model" in one.ask("/v1/models")[1]
    switch.write_text("[]")
    assert MODEL in one.ask("/v1/models")[1]


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ("a, b=2", {"a": "", "b": "2"}),
        (["a", "b=2"], {"a": "", "b": "2"}),
        ({"a": True, "b": 2, "c": False}, {"a": "", "b": "2"}),
        ("", {}),
        (None, {}),
    ],
)
def test_faults_are_given_as_text_list_or_object(given: Any, faults: dict[str, str]) -> None:
    assert engine.parse_faults(given) == faults


def test_flags_are_read_in_all_spellings_and_unknown_ones_accepted() -> None:
    argv = ["serve", "/m", "--host=::1", "--max_model_len", "4096", "--enforce-eager", "--port", "8001"]
    options = engine.parse_argv(argv)
    assert options == {
        "model": "/m",
        "host": "::1",
        "max-model-len": "4096",
        "enforce-eager": "",
        "port": "8001",
    }
