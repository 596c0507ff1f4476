"""The run around the checks: time limits, giving up, evidence, redaction, parameters, command line."""

from __future__ import annotations

import ast
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accept_bench import ACCEPT, ENGINE, KEY, MODEL, Bench, accept

from tasks.acceptance import DEADLINES

PROGRESS = re.compile(r"^#progress (\{.*\})$")


# --- time limits


def test_a_server_that_hangs_ends_the_run_with_everything_else_skipped(bench: Bench) -> None:
    started = time.monotonic()
    result = bench.run(bench.serve(["hanging"]), profile="deep", patience=0.004)
    assert time.monotonic() - started < 60
    assert [c["id"] for c in result["checks"] if c["verdict"] == "fail"] == ["guard.first_request"]
    reasons = {c["reason"] for c in result["checks"] if c["verdict"] == "skipped"}
    assert reasons == {"the server does not answer (see guard.first_request)"}


def test_a_server_that_stops_answering_in_the_middle_is_given_up_after_two_checks(bench: Bench) -> None:
    asked = ["chat.stream", "chat.stream_equal", "chat.utf8", "error.bad_json"]
    result = bench.run(bench.serve(["hanging_stream"]), asked, patience=0.005)
    assert [c["verdict"] for c in result["checks"]] == ["fail", "fail", "skipped", "skipped"]
    assert "does not answer" in result["checks"][-1]["reason"]


def test_a_closed_port_fails_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        parameters = accept.parameters_from({"base_url": url, "model": MODEL})
        started = time.monotonic()
        result = accept.accept(parameters, None)
    assert time.monotonic() - started < 60
    assert result["counts"]["fail"] == 1
    assert "Connection refused" in result["checks"][0]["summary"]


def test_the_time_of_a_whole_run_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accept.BUDGET, "standard", 0.0)
    result = bench.run(bench.serve(), ["chat.plain", "chat.n"])
    assert [c["verdict"] for c in result["checks"]] == ["fail", "fail"]
    assert "were over before this check" in result["checks"][0]["summary"]


@pytest.fixture
def raw_server() -> Iterator[Any]:
    """A server that sends the same bytes, again and again if asked, to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(head: bytes, repeat: bytes = b"", pause: float = 0.0) -> str:
        def answer(client: socket.socket) -> None:
            with client:
                client.recv(65536)
                try:
                    client.sendall(head)
                    while repeat and not over.is_set():
                        client.sendall(repeat)
                        time.sleep(pause)
                    # unread bytes at the close would turn the end into a reset
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
                except OSError:
                    return

        def loop() -> None:
            while not over.is_set():
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(client,), daemon=True).start()

        threading.Thread(target=loop, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    over.set()
    listener.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def test_a_server_that_drips_header_bytes_cannot_outlive_the_deadline(raw_server: Any) -> None:
    client = accept.Client(raw_server(b"HTTP/1.1 200 OK\r\nX-A: ", b"a", 0.05), None)
    exchange = client.send("GET", "/health", seconds=0.4)
    assert exchange.timed_out
    assert exchange.seconds < 2


def test_a_flood_is_cut_off(raw_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "MOST_BYTES", 300_000)
    client = accept.Client(raw_server(OK + b"\r\n", b"x" * 65536), None)
    exchange = client.send("GET", "/v1/models", seconds=10)
    assert exchange.error == "the answer is longer than 300000 bytes"
    assert len(exchange.text) < 600_000


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "BadStatusLine"),
        (OK + b"Content-Length: 500\r\n\r\n{", "499 bytes are missing"),
        (OK + b"Content-Length: 2\r\n\r\n[]", "no choices"),
        (OK + b"Content-Length: 4\r\n\r\nnull", "no choices"),
        (OK + b'Content-Length: 13\r\n\r\n{"choices":1}', "no choices"),
        (OK + b"Content-Length: 3\r\n\r\n\xff\xfe\x00", "no JSON"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_what_is_no_completion_fails_with_its_cause(raw_server: Any, answer: bytes, said: str) -> None:
    parameters = accept.parameters_from(
        {"base_url": raw_server(answer), "model": MODEL, "checks": ["chat.plain"]}
    )
    result = accept.accept(parameters, None)
    assert result["checks"][0]["verdict"] == "fail"
    assert said in result["checks"][0]["summary"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error":' * 400 + b"1" + b"}" * 400])
def test_an_answer_without_a_bottom_fails_its_checks_and_not_the_run(raw_server: Any, body: bytes) -> None:
    url = raw_server(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    asked = [one.id for one in accept.CHECKS if one.since == "smoke"]
    parameters = accept.parameters_from({"base_url": url, "model": MODEL, "checks": asked, "patience": 0.1})
    result = accept.accept(parameters, None)
    verdicts = {c["id"]: c["verdict"] for c in result["checks"]}
    assert [verdicts[name] for name in ("models.name", "chat.plain", "chat.stream")] == ["fail"] * 3
    assert not [c["summary"] for c in result["checks"] if "unforeseen shape" in c["summary"]]
    assert len(json.dumps(result)) < 100_000


def test_an_answer_in_an_unforeseen_shape_fails_its_check_and_not_the_run(raw_server: Any) -> None:
    body = json.dumps({"choices": [{"message": {"content": "x", "tool_calls": [7]}}]}).encode()
    url = raw_server(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    parameters = accept.parameters_from(
        {"base_url": url, "model": MODEL, "checks": ["chat.plain", "models.name"]}
    )
    result = accept.accept(parameters, None)
    assert [c["verdict"] for c in result["checks"]] == ["fail", "fail"]
    assert "unforeseen shape" in next(c["summary"] for c in result["checks"] if c["id"] == "chat.plain")


# --- evidence and redaction


def test_the_evidence_is_the_request_and_response_that_decided(bench: Bench) -> None:
    result = bench.run(bench.serve(["wrong_answer"]), ["chat.exact"])
    evidence = result["checks"][0]["evidence"]
    assert evidence["request"]["path"] == "/v1/chat/completions"
    assert evidence["request"]["body"]["messages"][0]["content"] == "只输出：PD_OK"
    assert evidence["response"]["status"] == 200
    assert evidence["response"]["body"]["choices"][0]["message"]["content"] == "对不起，我不明白。"


def test_the_evidence_stays_small_whatever_was_sent(bench: Bench) -> None:
    result = bench.run(bench.serve(max_model_len=4096), ["error.too_long", "cache.prefix", "agent.rounds"])
    for found in result["checks"]:
        assert len(json.dumps(found["evidence"], ensure_ascii=False)) < 8000, found["id"]


KEYS = [KEY, 'quo"te\\back/slash 100%', "short", "schlüssel-ß-123"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "fault", [["echoes_key"], ["echoes_key", "no_done"], ["echoes_key", "split_transport"]]
)
def test_a_key_that_the_server_echoes_never_reaches_the_result(
    bench: Bench, key: str, fault: list[str]
) -> None:
    one = bench.serve(fault, key=key)
    result = bench.run(one, ["chat.plain", "chat.exact", "chat.stream", "chat.utf8"], key=key)
    text = json.dumps(result, ensure_ascii=False)
    assert key not in text
    assert json.dumps(key)[1:-1] not in json.dumps(result)
    assert accept.spelled(text).find(key) < 0
    assert "[redacted]" in text
    assert "seen" in text, "only the key is taken out, not the answer"


def test_a_key_on_the_edge_of_the_cut_leaves_no_half() -> None:
    for before in range(560, 605):
        exchange = accept.Exchange("POST", "/x", text="a" * before + KEY)
        shown = json.dumps(exchange.evidence(KEY))
        assert KEY[:8] not in shown


def test_passwords_in_urls_and_other_tokens_are_redacted_too() -> None:
    text = "https://user:pa55@host/v1 Authorization: Bearer abcdefghijklmnop hf_abcdefghijklmnopqrstu"
    shown = accept.redact({"a": [text]}, None)["a"][0]
    for secret in ("pa55", "abcdefghijklmnop", "hf_abc"):
        assert secret not in shown
    assert "host/v1" in shown


# --- parameters


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "model is missing"),
        ({"base_url": "127.0.0.1:8000"}, "base URL must be http"),
        ({"profile": "quick"}, "not one of smoke, standard, deep"),
        ({"checks": ["chat.plian"]}, "did you mean 'chat.plain'?"),
        ({"skip": {"chat.none": "x"}}, "no check is called 'chat.none'"),
        ({"skip": {"chat.plain": " "}}, "skipping chat.plain needs a reason"),
        ({"expect": {"max_model_length": 1}}, "did you mean 'max_model_len'?"),
        ({"expect": {"identity": {"pdi": 1}}}, "did you mean 'pid'?"),
        ({"patience": 0}, "patience must be above 0"),
        ({"patience": float("nan")}, "patience must be above 0, and at most 1000"),
        ({"patience": 1e300}, "patience must be above 0, and at most 1000"),
        ({"patience": True}, "patience is True, which has the wrong type"),
        ({"expect": {"identity": 5}}, "identity is 5, not object"),
        ({"expect": {"log": 5, "log_script": 7}}, "expect: log_script is 7, not string"),
        ({"expect": {"max_model_len": "x"}}, "expect: max_model_len is 'x', not int"),
        ({"expect": {"max_model_len": 0}}, "expect: max_model_len is 0, which cannot be"),
        ({"expect": {"identity": {"pid": "x"}}}, "expect: pid is 'x', not int"),
        ({"expect": {"identity": {"pid": 10**30}}}, "which cannot be (int: process"),
        ({"expect": {"identity": {"started_after": float("inf")}}}, "expect: started_after is inf"),
        ({"expect": {"speculative": 1}}, "expect: speculative is 1, not bool"),
        ({"base_url": "http://h:99999"}, "not 'http://h:99999' (Port out of range"),
        ({"base_url": "http://[::1"}, "not 'http://[::1' (Invalid IPv6 URL)"),
        ({"base_url": "http://h:0"}, "not 'http://h:0' (nothing listens on port 0)"),
        ({"base_url": "http://h x"}, "not 'http://h x'"),
        ({"base_url": "http://h/模型"}, "must be written as %.."),
        ({"knowledge": "no"}, "knowledge is 'no', which has the wrong type"),
        ({"modle": "x"}, "did you mean 'model'?"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_allowed(change: dict[str, Any], said: str) -> None:
    values = {"base_url": "http://h:1", "model": MODEL, **change}
    with pytest.raises(accept.Usage, match=re.escape(said)):
        accept.parameters_from(values)


def test_what_is_not_known_of_a_server_may_be_null() -> None:
    nothing: dict[str, Any] = dict.fromkeys(accept.EXPECT_KEYS)
    for identity in (None, dict.fromkeys(accept.IDENTITY_KEYS)):
        values = {"base_url": "http://h", "model": "m", "expect": {**nothing, "identity": identity}}
        assert not any(accept.parameters_from(values).expect.values())


def test_all_wrong_parameters_are_named_at_once() -> None:
    with pytest.raises(accept.Usage) as caught:
        accept.parameters_from({"profile": "quick", "modle": "x"})
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_the_base_url_is_taken_with_and_without_v1(url: str) -> None:
    client = accept.Client(url, None)
    assert (client.host, client.port, client.prefix) == ("h", 8000, "")


def test_a_path_before_v1_is_kept() -> None:
    assert accept.Client("https://h/serving/v1", None).prefix == "/serving"


# --- command line


def run_program(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """accept.py as people and the library start it."""
    return subprocess.run(
        [sys.executable, str(ACCEPT), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_prints_a_table_and_exits_0(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    one = bench.serve(key=KEY)
    done = run_program(
        *("--base-url", one.url + "/v1", "--model", MODEL, "--api-key-file", str(tmp_path / "key")),
        *("--profile", "smoke", "--patience", "0.1", "--skip", "thinking.on=looked at by hand"),
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("PASS: deepseek-v4-flash at http://127.0.0.1:")
    assert any(line.startswith("skipped  thinking.on") and "looked at by hand" in line for line in lines)
    assert KEY not in done.stdout + done.stderr


def test_stdin_gives_one_json_document_on_stdout_and_progress_on_stderr(bench: Bench) -> None:
    one = bench.serve(["lost_reasoning"])
    asked = {"base_url": one.url, "model": MODEL, "checks": ["chat.plain", "thinking.on"], "patience": 0.1}
    done = run_program("--stdin", given=json.dumps(asked))
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["verdict"] == "fail"
    assert [(c["id"], c["verdict"]) for c in result["checks"]] == [
        ("chat.plain", "pass"),
        ("thinking.on", "fail"),
    ]
    steps = [json.loads(PROGRESS.match(line).group(1)) for line in done.stderr.splitlines()]  # type: ignore[union-attr]
    assert [s["note"] for s in steps] == ["chat.plain", "thinking.on", "done"]
    assert steps[-1] == {"phase": "accept", "done": 2, "total": 2, "unit": "steps", "note": "done"}


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (["--base-url", "http://h:1"], None, "model is missing"),
        (
            ["--base-url", "http://h:1", "--model", "m", "--api-key-file", "/nowhere/key"],
            None,
            "cannot be read",
        ),
        (["--base-url", "http://h:1", "--model", "m", "--expect", "{"], None, "--expect is no JSON"),
        (["--stdin"], "{", "stdin is no JSON"),
        (["--stdin"], "[]", "stdin must be one JSON object"),
        (["--stdin"], "[" * 100_000, "stdin is no JSON: it is nested too deep"),
        (["--profile", "quick"], None, "invalid choice"),
    ],
)
def test_wrong_usage_exits_2_and_prints_nothing_on_stdout(
    arguments: list[str], given: str | None, said: str
) -> None:
    done = run_program(*arguments, given=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_an_empty_key_file_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    with pytest.raises(accept.Usage, match="is empty"):
        accept.read_key(str(tmp_path / "key"))


@pytest.mark.parametrize("key", ["密钥", "a\tb", "a\x1bb"])
def test_a_key_that_no_request_can_carry_is_wrong_usage(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key + "\n")
    with pytest.raises(accept.Usage, match="no HTTP header may hold") as caught:
        accept.read_key(str(tmp_path / "key"))
    assert key not in str(caught.value)


def test_list_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert accept.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [one.id for one in accept.CHECKS]


def test_a_long_check_says_that_it_is_alive(capsys: pytest.CaptureFixture[str]) -> None:
    beat = accept.Heartbeat(3, every=0.03)
    beat.step(1, "long.needle")
    time.sleep(0.2)
    beat.over.set()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert {json.loads(PROGRESS.match(line).group(1))["note"] for line in lines} == {"long.needle"}  # type: ignore[union-attr]


def test_half_a_character_of_a_server_is_written_as_json_writes_it() -> None:
    program = r"import accept; accept.end(lambda words: print('\"\ud800\"') or 3)"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ACCEPT.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (3, "\ud800", "")


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


STEP = {"phase": "accept", "done": 1, "total": 2, "unit": "steps", "note": "chat.plain"}


def test_people_are_told_in_words_and_at_a_terminal_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        tell = accept.Teller()
        tell.people = True
        for step in (STEP, STEP, {**STEP, "done": 2, "note": "done"}):
            tell.progress(step)
        shown.append(stream.getvalue())
    at_terminal, in_file = shown
    assert at_terminal == "\r\x1b[Kaccept: 1 of 2 steps done, now chat.plain" * 2 + "\r\x1b[K"
    assert in_file == "accept: 1 of 2 steps done, now chat.plain\naccept: 2 of 2 steps done\n"


def test_only_programs_are_told_in_json() -> None:
    words = ("--base-url", "http://127.0.0.1:1", "--model", "m", "--checks", "chat.plain")
    assert run_program(*words).stderr == (
        "accept: 0 of 1 steps done, now chat.plain\naccept: 1 of 1 steps done\n"
    )
    given = json.dumps({"base_url": "http://127.0.0.1:1", "model": "m", "checks": ["chat.plain"]})
    assert all(PROGRESS.match(line) for line in run_program("--stdin", given=given).stderr.splitlines())


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("run --list >/dev/full", (1, "accept.py: [Errno 28] No space left on device\n")),
        ("run --list >&-", (0, "")),
        ("run --stdin <&-", (2, "accept.py: stdin is no JSON: Expecting value: line 1 column 1 (char 0)\n")),
        ("run --stdin <&- >&- 2>&-", (2, "")),
        ("(sleep 0.3; run --list) | true", (141, "")),
    ],
)
def test_streams_that_are_closed_full_or_broken_are_no_tracebacks(line: str, ends: tuple[int, str]) -> None:
    script = f'run() {{ {sys.executable} {ACCEPT} "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == ends


# --- where it runs


@pytest.mark.parametrize("path", [ACCEPT, ENGINE])
def test_the_program_is_python_3_8_with_the_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == set()


def test_a_runs_own_budget_ends_before_the_controller_gives_the_job_up() -> None:
    assert set(DEADLINES) == set(accept.BUDGET)
    assert all(DEADLINES[profile] > seconds for profile, seconds in accept.BUDGET.items())


def test_the_help_names_profiles_examples_and_all_that_can_be_expected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        accept.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    words = [*accept.PROFILES, *accept.EXPECT_KEYS, *accept.IDENTITY_KEYS, "examples:", "exit codes: 0 pass"]
    assert [word for word in words if word not in said] == []


def test_what_a_server_says_cannot_paint_the_table() -> None:
    said = "status 400: \x1b]0;mine\x07\x1b[2J\x1b[1;32mPASS\x1b[0m\nPASS: m at http://h"
    row = {"verdict": "fail", "id": "chat.plain", "seconds": 0.0, "summary": said}
    whole = {"verdict": "fail", "model": "m", "base_url": "u", "seconds": 1.0, "counts": {"fail": 1}}
    result = {**whole, "checks": [row]}
    first, second = accept.table(result).split("\n")
    assert first.endswith("status 400: PASS PASS: m at http://h")
    assert second.startswith("FAIL: ")
