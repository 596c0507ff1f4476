"""Bringing an engine up, run for real with the stand-in: what is waited for, and what a failure is called."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_bench import ONHOST, STANDIN, EngineBench

from tasks.onhost import bring_up
from tasks.onhost.bring_up import Timeline, last_start, write_json
from tasks.onhost.startup_log import read

NewEngine = Callable[..., EngineBench]
slow = pytest.mark.slow


def test_up_means_a_token_and_a_warm_up_and_is_remembered(engine: EngineBench) -> None:
    rc, result, progress = engine.bring_up()
    assert (rc, result["verdict"]) == (0, "pass")
    assert result["pid"] == engine.pid()
    assert result["warmup"]["requests"] == 1
    assert [name for name, _ in result["phases"]][-1] == "warm-up requests"
    assert result["before"] is None
    assert "no estimate" in progress
    (entry,) = json.loads((engine.folder / "test-eager.json").read_text())
    assert entry["seconds"] == result["seconds"]
    engine.close()
    _, second, progress = engine.bring_up()
    assert second["before"]["seconds"] == entry["seconds"]
    assert "no estimate" not in progress
    assert len(json.loads((engine.folder / "test-eager.json").read_text())) == 2


@slow
def test_a_receipt_is_written_when_it_is_up_and_only_then(engine: EngineBench) -> None:
    folder = engine.folder / "receipts"
    draft = {
        "step": "service",
        "digest": "d",
        "seconds": 0,
        "detail": {"mode": "eager"},
        "tool": "t",
        "at": "",
    }
    receipt = {"folder": str(folder), "draft": draft}
    engine.faults("dies_at_start")
    assert engine.bring_up(receipt=receipt)[0] == 1
    assert not folder.exists()
    engine.faults()
    assert engine.bring_up(receipt=receipt)[0] == 0
    written = json.loads((folder / "service.json").read_text())
    assert (written["digest"], written["detail"]["mode"]) == ("d", "eager")
    assert written["at"] and written["detail"]["start"]["spec"] == "spec-1"


@slow
def test_a_full_disk_does_not_make_a_start_a_failed_one(engine: EngineBench) -> None:
    full = engine.folder / "full"
    full.write_text("a file where a folder should be: nothing can be written below it")
    draft = {"step": "service", "digest": "d", "seconds": 0, "detail": {}, "tool": "t", "at": ""}
    rc, result, told = engine.bring_up(
        history=str(full / "history.json"), receipt={"folder": str(full), "draft": draft}
    )
    assert (rc, result["verdict"]) == (0, "pass")
    assert engine.alive()
    assert "this start is not remembered" in told
    assert "the receipt cannot be written" in told


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError):
        write_json(str(tmp_path / "target"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@slow
@pytest.mark.parametrize(
    ("fault", "more", "reason", "words"),
    [
        ("dies_at_start", {}, "gave-up", "ends as soon as it starts"),
        ("healthy_but_dies_at_first_request", {}, "gave-up", "ends as soon"),
        ("never_ready", {"ready_seconds": 3}, "deadline", "no token within 3 s"),
        ("never_ready", {"phase_seconds": {"starting": 2}}, "phase", "starting made no progress for 2 s"),
        ("wrong_model_name", {"ready_seconds": 3}, "deadline", "some-other-model"),
        ("hanging", {"ready_seconds": 3}, "deadline", "no token within 3 s"),
    ],
)
def test_a_start_that_fails_has_a_reason_a_log_and_is_stopped(
    new_engine: NewEngine, fault: str, more: dict[str, object], reason: str, words: str
) -> None:
    engine = new_engine("test-eager", fault)
    rc, result, _ = engine.bring_up(**more)
    assert (rc, result["verdict"], result["reason"]) == (1, "fail", reason)
    assert words in result["why"]
    assert any("vLLM API server version" in line for line in result["log"])
    assert not engine.alive()


@slow
def test_a_failing_warm_up_is_no_start(engine: EngineBench) -> None:
    warmup = {"concurrency": [1], "prompt_tokens": [4096], "forms": ["chat"], "max_tokens": 2}
    rc, result, _ = engine.bring_up(warmup=warmup)
    assert (rc, result["reason"]) == (1, "warm-up")
    assert not engine.alive()


def test_an_answer_of_a_stranger_on_the_port_is_no_answer_and_the_stranger_is_named(
    engine: EngineBench,
) -> None:
    other = subprocess.Popen(
        [sys.executable, STANDIN, "serve", "x", "--served-model-name", "m", "--port", str(engine.port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", engine.port)):
            assert other.poll() is None
            time.sleep(0.05)
        rc, result, _ = engine.bring_up()
    finally:
        other.kill()
        other.wait()
    assert (rc, result["reason"]) == (1, "port")
    assert f"process {other.pid} (" in result["why"]


FOREIGN = """
import socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\\r\\n")
    connection.close()
"""


def foreign(engine: EngineBench) -> str:
    """A start of what speaks another protocol on the engine's port."""
    (engine.folder / "foreign.py").write_text(FOREIGN)
    run = f"setsid {sys.executable} {engine.folder}/foreign.py {engine.port} </dev/null >/dev/null 2>&1"
    return f"{run} & echo $! >{engine.folder}/{engine.name}.pid"


@slow
def test_an_engine_that_speaks_no_http_is_stopped_and_what_served_before_is_put_back(
    new_engine: NewEngine,
) -> None:
    old, new = new_engine("old"), new_engine("new")
    back = {"script": ":", "service": {**old.request(), "warmup": None}}
    rc, result, _ = new.bring_up(before=[foreign(new)], ready_seconds=3, put_back=back)
    assert (rc, result["reason"]) == (1, "deadline")
    assert "SSH-2.0" in result["why"]
    assert not new.alive()
    assert (result["put_back"]["up"], old.alive()) == (True, True)


def test_a_fault_of_ours_too_stops_what_was_started_and_puts_back_what_served(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = new_engine("old"), new_engine("new")

    def fault(service: bring_up.Service, *_: object) -> None:
        raise ZeroDivisionError(service.name)

    monkeypatch.setattr(bring_up, "await_up", fault)
    request = new.request(put_back={"script": ":", "service": old.request()})
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    assert bring_up.main() == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["reason"], result["why"]) == ("fail", "fault", "ZeroDivisionError: new")
    assert result["put_back"] == {"name": "old", "up": False, "why": "ZeroDivisionError: old"}
    assert not new.alive()


def test_a_look_never_raises_and_odd_answers_to_the_warm_up_are_a_failed_start(
    engine: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise TypeError("odd")

    service = bring_up.Service(engine.request())
    monkeypatch.setattr("tasks.onhost.ready.look", fault)
    assert service.look(None) == {"ready": False, "stage": "error", "why": "TypeError: odd"}
    monkeypatch.setattr("tasks.onhost.warmup.warm_up", fault)
    monkeypatch.setattr(bring_up, "_await_token", lambda *_: ({"identity": "1"}, read("")))
    with pytest.raises(bring_up.Failed, match="TypeError: odd") as failed:
        bring_up.await_up(service)
    assert failed.value.reason == "warm-up"


def test_progress_that_cannot_be_written_fails_no_start(engine: EngineBench) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, str(ONHOST / "bring_up.py")],
            input=json.dumps(engine.request(history="/dev/full/history.json")),
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=300,
        )
    assert json.loads(done.stdout)["verdict"] == "pass"
    assert engine.alive()


def test_scripts_that_fail_are_told_with_their_own_words(engine: EngineBench) -> None:
    rc, result, _ = engine.bring_up(before=["echo no such unit >&2; exit 5"])
    assert (rc, result["reason"], result["why"]) == (1, "script", "no such unit")


def test_the_estimate_is_of_the_same_engine_else_of_the_same_service() -> None:
    history = [{"spec": "a", "seconds": 100}, {"spec": "b", "seconds": 300}]
    assert last_start(history, "a") == history[0]
    assert last_start(history, "c") == history[1]
    assert last_start([], "a") is None


def test_the_time_left_is_what_the_last_start_took_from_this_phase_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tasks.onhost.bring_up.time.monotonic", lambda: clock[0])
    phases = [["loading weights", 30], ["compiling", 100], ["ready", 5], ["warm-up requests", 20]]
    timeline = Timeline({"seconds": 155, "phases": phases}, {})
    clock[0] = 50
    timeline.enter(read("Starting to load model /m"))
    assert timeline.left() == "up in about 2 min 5 s"
    clock[0] = 60
    # nothing to compile this time: it goes on as if that phase were over
    timeline.enter(read("Application startup complete"))
    clock[0] = 61
    timeline.enter(read("Application startup complete"))
    assert timeline.left() == "up in about 20 s"


def test_phases_that_came_and_went_between_two_looks_are_told_in_their_place() -> None:
    timeline = Timeline(None, {})
    timeline.enter(read("Starting to load model /m"))
    later = "CPU KV cache size: 1,048,576 tokens\nStarted server process [1]\n"
    timeline.enter(read("Starting to load model /m\nInitial profiling/warmup run took 2 s\n" + later))
    phases = timeline.phases()
    assert [name for name, _ in phases] == [
        "loading weights", "measuring memory", "making the KV cache", "opening the port",
    ]  # fmt: skip
    assert [seconds for _, seconds in phases[1:3]] == [0.0, 0.0]


def test_a_phase_that_gets_on_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("tasks.onhost.bring_up.time.monotonic", lambda: clock[0])
    timeline = Timeline(None, {"compiling": 60})
    text = ""
    for number in range(30):
        clock[0] += 50
        text += f"TileLang begins to compile kernel `k{number}`\n"
        timeline.enter(read(text))
        assert timeline.overdue() == ""
    clock[0] += 61
    assert "compiling made no progress for 61 s" in timeline.overdue()
    assert timeline.phases() == [["compiling", 1500.0]]


def test_programs_on_hosts_need_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import bring_up, promotion, quickbench, startup_log;"
        "print([name for name in sys.modules if name.split('.')[0] in ('tasks', 'pydantic', 'jinja2')])"
    )
    folder = str(Path(__file__).parents[3] / "tasks" / "onhost")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, folder],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        timeout=30,
    )
    assert done.stdout.strip() == "[]", done.stderr


@slow
def test_settings_that_do_not_come_up_leave_what_served_before_as_it_was(new_engine: NewEngine) -> None:
    old, new = new_engine("test-old"), new_engine("test-new", "dies_at_start")
    assert old.bring_up()[0] == 0
    unit, kept = old.folder / "unit", old.folder / "kept"
    kept.write_text("old")
    before = [f"echo new >{unit}", old.stop_script, new.start_script]
    back = {"script": f"cp {kept} {unit}", "service": old.request(warmup=None)}
    rc, result, told = new.bring_up(before=before, put_back=back)
    assert (rc, result["verdict"]) == (1, "fail")
    assert result["put_back"] == {"name": "test-old", "up": True, "why": ""}
    assert (old.alive(), new.alive(), unit.read_text()) == (True, False, "old")
    assert "test-old is put back" in told
    old.faults("dies_at_start")
    rc, result, _ = new.bring_up(before=[old.stop_script, new.start_script], put_back=back)
    assert rc == 1
    assert not result["put_back"]["up"] and "ends as soon" in result["put_back"]["why"]


@slow
def test_an_engine_that_is_ready_on_another_port_is_not_waited_for_till_the_last_deadline(
    engine: EngineBench,
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # nobody listens there
        port = other.getsockname()[1]
        probe = {**engine.request()["probe"], "base_url": f"http://127.0.0.1:{port}"}
        rc, result, _ = engine.bring_up(probe=probe, phase_seconds={"ready": 2})
    assert (rc, result["reason"]) == (1, "silent")
    assert result["why"] == f"the engine says that it is ready, but nothing listens on port {port}"
