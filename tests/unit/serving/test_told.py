"""What people are told: columns of a promotion, causes of a failed start, status; both supervisors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from typing import Any

import pytest

from tasks.digest import digest_of
from tasks.onhost import promotion, service_state
from tasks.promote import columns
from tasks.report_serving import promotion_shown, startup_shown
from tasks.service import readable
from tasks.startup import explain, now_told
from tasks.status import parse_look
from tasks.supervisors import Systemd, version_in


def result(**candidate: Any) -> dict[str, Any]:
    bench = [{"concurrency": 1, "tokens_per_second": 50.0, "ttft": 0.1, "tpot": 0.02}]
    return {
        "verdict": "rolled-back",
        "safe": {"mode": "eager", "acceptance": {"pass": 16, "fail": 0, "skipped": 1}, "bench": bench},
        "candidate": {"mode": "optimized", **candidate},
    }


def test_both_columns_of_a_promotion_are_told_and_what_was_not_reached_is_a_dash() -> None:
    rows = columns(result())
    assert [row.split() for row in rows[:2]] == [
        ["eager", "optimized"],
        ["acceptance", "16", "passed,", "0", "failed", "-"],
    ]
    assert rows[2].split() == ["tokens/s", "at", "1", "50.0", "-"]
    fast = [{"concurrency": 1, "tokens_per_second": 80.0, "ttft": None, "tpot": 0.01}]
    rows = columns(
        result(
            bench=fast,
            acceptance={"checks": [{"verdict": "pass"}, {"verdict": "fail"}]},
            trial={"seconds": 200},
            start={"seconds": 70},
        )
    )
    assert rows[1].endswith("1 passed, 1 failed")
    assert rows[2].split()[-2:] == ["50.0", "80.0"]
    assert "3 min 20 s then 1 min 10 s" in rows[-1], "the first start and the warm one"


def test_a_report_shows_a_promotion_in_small_and_damaged_evidence_as_nothing() -> None:
    evidence = result(compiles_after_warmup=2, trial={"seconds": 9}, start={"seconds": 4})
    shown = promotion_shown(
        {"promotion": {**evidence, "why": "slower", "away_seconds": 70, "steps": [["a", 3]]}}
    )
    assert shown["eager"]["acceptance"] == "16 passed, 0 failed"
    assert shown["optimized"]["start, first then second"] == "9 s then 4 s"
    assert (shown["why"], shown["without a service"], shown["steps"]) == (
        "slower",
        "1 min 10 s",
        {"a": "3 s"},
    )
    for damaged in (
        None,
        "x",
        {"verdict": "promoted", "safe": 1, "candidate": {"bench": [{}]}},
        {"verdict": 1, "steps": 5},
    ):
        assert promotion_shown({"promotion": damaged}) == {}


def test_a_report_shows_a_start_beside_the_one_before() -> None:
    start = {
        "seconds": 70,
        "before": {"seconds": 200},
        "phases": [["loading weights", 60]],
        "warmup": {"requests": 12},
    }
    shown = startup_shown({"startup": start})
    assert (shown["took"], shown["the one before took"]) == ("1 min 10 s", "3 min 20 s")
    assert shown["phases"] == {"loading weights": "1 min 0 s"}
    for damaged in (None, [], {}, {"seconds": "x"}, {"seconds": 1, "phases": 3}):
        assert startup_shown({"startup": damaged}) == {}


@pytest.mark.parametrize(
    ("found", "what", "fix"),
    [
        (
            {"reason": "port", "why": "port 1 is taken by x", "log": []},
            "port 1 is taken by x",
            "--data port=",
        ),
        (
            {"reason": "crash", "why": "it crashed", "log": ["RuntimeError: Could not find nvcc"]},
            "nvcc",
            "CUDA toolkit",
        ),
        (
            {"reason": "crash", "why": "it crashed", "log": ["ValueError: odd"]},
            "it crashed: ValueError: odd",
            "log lines",
        ),
        (
            {"reason": "trial-port", "why": "the port was taken", "log": ["INFO all is well"]},
            "the port was taken",
            "promote again",
        ),
        ({"reason": "deadline", "why": "no token", "log": []}, "no token", "serve.ready_seconds"),
        ({"reason": "phase", "why": "stuck", "log": []}, "stuck", "serve.phase_seconds"),
        ({"reason": "slower", "why": "is slower", "log": []}, "is slower", "serve.promote.margin"),
    ],
)
def test_a_failure_is_told_with_its_cause_and_one_thing_to_do(
    found: dict[str, Any], what: str, fix: str
) -> None:
    told, cure, _ = explain(found)
    assert what in told
    assert fix in cure


def test_a_port_that_was_taken_is_told_without_the_lines_of_a_start_that_went_well() -> None:
    healthy = [f"INFO loading {number}" for number in range(20)]
    for reason in ("port", "trial-port"):
        refused = "OSError: [Errno 98] Address already in use"
        assert explain({"reason": reason, "why": "w", "log": [*healthy, refused]})[2] == [refused]
        assert explain({"reason": reason, "why": "w", "log": healthy})[2] == []


@pytest.mark.parametrize(
    ("back", "words"),
    [
        (None, "it is stopped now"),
        ({"name": "rw-eager", "up": True, "why": ""}, "rw-eager serves again as before"),
        ({"name": "rw-eager", "up": False, "why": "no disk"}, "rw-eager did not come back either: no disk"),
    ],
)
def test_what_serves_after_a_failed_start_is_told(back: dict[str, Any] | None, words: str) -> None:
    assert words in now_told({"put_back": back})


def test_status_is_read_in_one_go_and_damage_is_absence() -> None:
    text = (
        '{"ready": true, "stage": "token"}\n\n@@gpu\n0, 81920, 97887\n1, [N/A], 97887\n@@starts\n'
        '[{"seconds": 1.5, "compiles": 2}]\n\n@@compiles\n7\n'
    )
    look = parse_look(text)
    assert look.answer["ready"]
    assert look.gpus == (("0", 81920, 97887),)
    assert (look.starts[0]["seconds"], look.compiles) == (1.5, 7)
    nothing = parse_look("Traceback\n@@gpu\nNVIDIA-SMI has failed\n@@starts\n{\n@@compiles\n\n")
    assert (nothing.answer, nothing.gpus, nothing.starts, nothing.compiles) == ({}, (), (), None)


def test_systemd_s_words_become_a_state() -> None:
    def state(text: str) -> dict[str, Any]:
        return service_state.parse_systemd(f"unit=a\n{text}now=1000\nup=50\n", ("a",))["a"]

    trying = state(
        "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nMainPID=0\nNRestarts=2\n"
    )
    assert (trying["state"], trying["running"], trying["restarts"]) == ("auto-restart", False, 2)
    assert trying["state"] not in service_state.SETTLED
    enabled = state("LoadState=loaded\nActiveState=inactive\nUnitFileState=enabled\nMainPID=0\n")
    assert enabled["at_boot"] and enabled["state"] in service_state.SETTLED
    assert state("LoadState=not-found\nActiveState=inactive\n") == service_state.ABSENT


def test_supervisord_s_words_become_a_state() -> None:
    items = [
        {"name": "a", "state": "BACKOFF", "pid": 0, "start": 5, "restarts": 3, "boot": True},
        {"name": "b", "state": "ORPHAN", "pid": None},
    ]
    found = service_state.parse_supervisord(json.dumps(items), ("a", "b", "c"))
    assert (found["a"]["running"], found["a"]["at_boot"]) == (False, True)
    assert found["a"]["state"] not in service_state.SETTLED
    assert found["b"]["state"] not in service_state.SETTLED, "stop has something to do"
    assert found["c"] == service_state.ABSENT


def test_systemd_s_version_is_read_from_its_status() -> None:
    assert version_in("unit=a\nversion=252\n") == 252
    assert version_in("version=\n") == version_in("") == 0
    assert "systemctl --version" in Systemd().status(("a",))


def test_the_new_mode_is_enabled_before_the_old_one_is_disabled() -> None:
    script = Systemd().at_boot("rw-optimized", ("rw-eager", "rw-optimized", "rw-trial"))
    assert script.index("enable --quiet 'rw-optimized.service'") < script.index(
        "disable --quiet 'rw-eager.service'"
    )
    assert "disable --quiet 'rw-optimized" not in script


@pytest.mark.parametrize("value", [[1, "é", None, {"b": 1, "a": [True]}], {}, "x"])
def test_the_host_makes_the_same_digests_as_the_controller(value: Any) -> None:
    assert promotion.digest_of(value) == digest_of(value)


def test_the_identity_in_a_receipt_s_digest_is_filled_in_on_the_host(tmp_path: Any) -> None:
    made = promotion.Promotion(
        {
            "margin": 0.1,
            "safe": {"mode": "eager"},
            "candidate": {"mode": "optimized"},
            "receipts": {"folder": str(tmp_path)},
        },
        str(tmp_path),
    )
    draft = {"step": "acceptance", "digest": "", "detail": {}, "digest_inputs": ["a", "@identity"]}
    made.write_receipt(draft, {"result": {"verdict": "pass"}}, "42@7")
    written = json.loads((tmp_path / "acceptance.json").read_text())
    assert written["digest"] == digest_of(["a", "42@7"])
    assert "digest_inputs" not in written
    assert written["detail"]["result"] == {"verdict": "pass"}


def test_a_log_that_is_followed_comes_line_by_line_and_foreign_bytes_are_shown_as_such() -> None:
    script = "printf '10%%\\r20%%\\r\\n\\033[1mbold\\033[0m \\303\\251\\n'; cat"
    process = subprocess.Popen(
        ["sh", "-c", readable(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    overdue = threading.Timer(60, lambda: os.killpg(process.pid, signal.SIGKILL))
    overdue.start()
    # nothing more is written, and nothing ends, before these lines were read
    lines = [process.stdout.readline() for _ in range(4)]
    overdue.cancel()
    process.stdin.close()
    assert process.wait(60) == 0
    assert lines == [b"10%\n", b"20%\n", b"\n", b"[1mbold[0m ??\n"]
