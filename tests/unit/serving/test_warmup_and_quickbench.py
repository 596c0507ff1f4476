"""Warm-up and short benchmark against the stand-in; comparing two modes."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import engine_client as ec
from tasks.onhost.quickbench import bench, better, compare
from tasks.onhost.warmup import warm_up

REPO = Path(__file__).parents[3]
WARMUP = {
    "concurrency": [1, 3],
    "prompt_tokens": [8, 64],
    "forms": ["chat", "reasoning", "tool"],
    "max_tokens": 4,
}
BENCH = {"concurrency": [1, 2], "prompt_tokens": 32, "output_tokens": 16, "requests": 4}


def _load_standin() -> Any:
    spec = importlib.util.spec_from_file_location("standin_engine", REPO / "tests" / "standin" / "engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def standin(request: pytest.FixtureRequest) -> Iterator[Any]:
    engine = (
        _load_standin()
        .StandIn(["serve", "m", "--host", "127.0.0.1", "--port", "0", "--max-model-len", "1024"], env={})
        .start()
    )
    yield engine
    engine.stop()


def asked(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    return {**wanted, "base_url": engine.url, "model": "m", "key_file": None, "timeout": 10}


def test_every_form_length_and_concurrency_is_sent(standin: Any) -> None:
    result = warm_up(asked(standin, WARMUP))
    assert (result["verdict"], result["failed"]) == ("pass", 0)
    assert result["requests"] == 3 * 2 * (1 + 3)
    assert {(row["form"], row["prompt_tokens"], row["concurrency"]) for row in result["rows"]} == {
        (form, length, concurrency)
        for form in ("chat", "reasoning", "tool")
        for length in (8, 64)
        for concurrency in (1, 3)
    }


def test_prompts_have_about_the_length_that_was_asked_for_and_share_no_prefix(standin: Any) -> None:
    client = ec.Client(standin.url, "m", None)
    words = ec.words(1, int(400 / client.per_word()))
    _, text = client.ask("POST", "/tokenize", {"model": "m", "prompt": words}, 10)
    assert 0.6 < json.loads(text)["count"] / 400 < 1.7
    assert ec.words(1, 50)[:40] != ec.words(2, 50)[:40]


def test_a_length_beyond_the_context_is_left_out_and_said(standin: Any) -> None:
    result = warm_up(asked(standin, {**WARMUP, "prompt_tokens": [8, 5000]}))
    assert result["verdict"] == "pass"
    assert result["skipped"] == ["5000 tokens: the context has 1024"]


def test_a_warm_up_that_fails_says_where_and_does_not_wait_for_ever(standin: Any) -> None:
    standin.faults_given = ["server_error"]
    result = warm_up(asked(standin, WARMUP))
    assert result["verdict"] == "fail"
    assert result["why"].startswith("chat, 8 tokens, 1 at a time: HTTP 500")
    assert result["requests"] < 24


@pytest.mark.parametrize("fault", ["no_done", "stream_error_event", "ok_with_error_body", "hanging"])
def test_an_answer_that_is_none_counts_as_failed(standin: Any, fault: str) -> None:
    standin.faults_given = [fault]
    client = ec.Client(standin.url, "m", None)
    # one that hangs is not waited for without end
    answer = client.stream(ec.body_of("chat", "hello", 4), timeout=2)
    assert not answer.ok and answer.why


@pytest.mark.slow
def test_the_waiting_ends_when_the_caller_says_so_also_for_an_engine_that_hangs(standin: Any) -> None:
    standin.faults_given = ["hanging"]
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        warm_up({**asked(standin, WARMUP), "timeout": 600}, check=check)
    assert time.monotonic() - began < 300, "the request's own deadline was not waited for"
    held = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    assert held == [], "the program's end waits for no request either"


@pytest.mark.slow
def test_a_slower_engine_measures_slower(standin: Any) -> None:
    standin.faults_given = ["slow=0.002"]
    fast = bench(asked(standin, BENCH))
    standin.faults_given = ["slow=0.02"]
    slow = bench(asked(standin, BENCH))
    assert fast["verdict"] == slow["verdict"] == "pass"
    assert [row["concurrency"] for row in fast["rows"]] == [1, 2]
    assert "before" in compare(fast["rows"], slow["rows"], 0.3)
    assert compare(slow["rows"], fast["rows"], 0.0) == ""
    assert slow["rows"][0]["tpot"] > fast["rows"][0]["tpot"]


def test_a_request_that_fails_fails_the_benchmark(standin: Any) -> None:
    standin.faults_given = ["server_error"]
    result = bench(asked(standin, BENCH))
    assert result["verdict"] == "fail"
    assert "HTTP 500" in result["why"]


def row(concurrency: int, speed: float) -> dict[str, Any]:
    return {"concurrency": concurrency, "tokens_per_second": speed}


@pytest.mark.parametrize(
    ("fast", "margin", "slower"),
    [(95.1, 0.05, False), (94.9, 0.05, True), (100, 0.0, False), (99.9, 0.0, True), (50.1, 0.5, False)],
)
def test_the_margin_is_a_share_of_the_safe_mode(fast: float, margin: float, slower: bool) -> None:
    assert bool(compare([row(1, 100)], [row(1, fast)], margin)) == slower


def test_being_slower_at_one_concurrency_is_being_slower() -> None:
    said = compare([row(1, 100), row(4, 300)], [row(1, 150), row(4, 200)], 0.05)
    assert said.startswith("200.0 tokens/s at 4 requests at a time, 300.0 before")


def test_of_two_measurements_the_better_row_counts() -> None:
    assert better([row(1, 100), row(4, 300)], [row(1, 120), row(4, 200), row(8, 5)]) == [
        row(1, 120),
        row(4, 300),
        row(8, 5),
    ]
