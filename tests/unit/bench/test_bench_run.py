"""Benchmarks of stand-in engines: what counts, what does not, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import urllib.request
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_rig import CASE, FIXTURES, MODEL, Rig, engine

from tasks.onhost import bench

KEY = "sk-bench-0123456789abcdef"


def test_a_clean_run_counts_and_its_figures_are_there(rig: Rig) -> None:
    result = rig.run(rig.serve("slow=0.01"))
    assert (result["verdict"], result["why"], result["client"]) == ("pass", None, "rackwright")
    row = result["cases"][0]
    assert row["counted"] == 1
    figures = row["median"]
    assert (figures["requests"], figures["output_tokens"], figures["input_tokens"]) == (6, 24, 192)
    assert figures["tpot_p50_ms"] > 9, "4 tokens, 10 ms apart: the stand-in cannot be faster"
    assert figures["e2el_p50_ms"] >= figures["ttft_p50_ms"]
    assert row["spread"]["requests"] == [6, 6]
    assert any("running" in sample for sample in row["runs"][0]["samples"])


def test_every_run_has_a_seed_of_its_own_and_the_cases_take_turns(rig: Rig) -> None:
    cases = [CASE, {**CASE, "concurrency": 1, "prompts": 2}]
    result = rig.run(rig.serve(), cases=cases, runs=2)
    seeds = [[run["seed"] for run in row["runs"]] for row in result["cases"]]
    assert len({seed for row in seeds for seed in row}) == 4
    assert seeds[0][0] < seeds[1][0] < seeds[0][1] < seeds[1][1]


def test_failed_requests_make_a_run_invalid(rig: Rig) -> None:
    assert rig.reasons("fails_every=4")[0] == "2 of 6 requests failed: status 503: The engine is overloaded."


def test_answers_that_end_early_make_a_run_invalid(rig: Rig) -> None:
    assert any("answers do not have 64 tokens" in why for why in rig.reasons(
        "ends_early", cases=[{**CASE, "output": 64}]
    ))  # fmt: skip


def test_a_stream_that_breaks_off_makes_a_run_invalid(rig: Rig) -> None:
    assert "engine died" in rig.reasons("stream_error_event")[0]


def test_a_hanging_engine_ends_the_run_at_its_limit(rig: Rig) -> None:
    began = time.monotonic()
    with pytest.raises(bench.Refused) as refused:  # its requests stay in the engine
        rig.run(rig.serve("hanging", "hangup_leaks"), limit=0.5, cases=[{**CASE, "concurrency": 6}])
    assert refused.value.error["id"] == "busy"
    assert time.monotonic() - began < 90


def test_counters_that_do_not_move_with_the_load_make_a_run_invalid(rig: Rig) -> None:
    assert rig.reasons("frozen_counters")[0] == "the engine finished 0 requests, the run sent 8"


def test_an_engine_without_counters_is_measured_all_the_same(rig: Rig) -> None:
    result = rig.run(rig.serve("no_metrics"))
    assert result["verdict"] == "pass"
    assert "preemptions" not in result["cases"][0]["median"]


def test_a_run_that_compiled_is_cold_and_repeated(rig: Rig) -> None:
    one = rig.serve("compiles_late")
    drive = bench.OwnLoad.drive

    def cold_once(self: Any) -> Any:
        raw = drive(self)
        one.faults_given = []  # what had to be compiled is compiled now
        return raw

    bench.OwnLoad.drive = cold_once  # type: ignore[method-assign]
    try:
        result = rig.run(one)
    finally:
        bench.OwnLoad.drive = drive  # type: ignore[method-assign]
    runs = result["cases"][0]["runs"]
    assert [(run["cold"], run["valid"]) for run in runs] == [(True, False), (False, True)]
    assert "kernels were compiled" in runs[0]["why"][0]
    assert result["verdict"] == "pass"


def test_an_engine_that_never_stops_compiling_fails_the_benchmark(rig: Rig) -> None:
    result = rig.run(rig.serve("compiles_late"))
    assert result["verdict"] == "fail"
    assert len(result["cases"][0]["runs"]) == 1 + bench.REPEATS
    assert result["why"].startswith("32/4 x2: 0 of 1 runs count: ")


def test_requests_of_somebody_else_before_the_run_are_waited_out_then_refused(rig: Rig) -> None:
    one = rig.serve("hanging", "hangup_leaks")
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(
        one.url + "/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(request, timeout=0.3)
    with pytest.raises(bench.Refused, match="1 requests of somebody else are in the engine"):
        rig.run(one)


def test_requests_of_somebody_else_during_the_run_make_it_invalid(rig: Rig) -> None:
    one = rig.serve("slow=0.02")
    over = threading.Event()

    def intrude() -> None:
        body = json.dumps(
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        ).encode()
        while not over.is_set():
            request = urllib.request.Request(
                one.url + "/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=5).read()
            time.sleep(0.02)

    session = rig.session(one)
    drive = session.drive_own

    def with_company(*arguments: Any) -> Any:
        other = threading.Thread(target=intrude, daemon=True)
        other.start()
        try:
            return drive(*arguments)
        finally:
            over.set()
            other.join()

    session.drive_own = with_company  # type: ignore[method-assign]
    result = bench.benchmark(session)
    assert any("somebody else was served" in why for why in result["cases"][0]["runs"][0]["why"])


def test_an_engine_that_is_not_there_is_named(rig: Rig) -> None:
    one = rig.serve()
    one.stop()
    with pytest.raises(bench.Refused) as refused:
        rig.run(one)
    assert refused.value.error["id"] == "down"


def test_the_key_is_used_and_is_nowhere_in_the_result(rig: Rig) -> None:
    one = rig.serve(key=KEY)
    result = rig.run(one, KEY)
    assert result["verdict"] == "pass"
    assert KEY not in json.dumps(result)
    with pytest.raises(bench.Refused) as refused:
        rig.run(one, None)
    assert refused.value.error["id"] == "key"


def test_a_request_rate_paces_the_requests(rig: Rig) -> None:
    case = {**CASE, "prompts": 8, "concurrency": 8, "rate": 20.0}
    result = rig.run(rig.serve(), cases=[case])
    row = result["cases"][0]
    assert row["name"] == "32/4 x8 at 20/s"
    assert row["median"]["seconds"] > 0.15  # 8 arrivals, 50 ms apart on average, from a fixed seed


# The engine's own client, in the form of programs that behave as it does.

REPLAY = f"""
import json, os, sys, urllib.request
words = sys.argv[1:]
assert words[:2] == ["bench", "serve"], words
given = dict(zip(words, words[1:]))
if os.environ.get("OPENAI_API_KEY"):
    assert os.environ["OPENAI_API_KEY"] not in " ".join(words)
raw = json.load(open({str(FIXTURES / "vllm-0.32-cpu-128x16-c2.json")!r}))
raw["words"] = words
path = os.path.join(given["--result-dir"], given["--result-filename"])
json.dump(raw, open(path, "w"))
"""
RECORDED = {"input": 128, "output": 16, "concurrency": 2, "prompts": 4}


def test_the_engines_own_client_is_used_with_the_protocol(rig: Rig) -> None:
    one = rig.serve("no_metrics", key=KEY)
    result = rig.run(
        one,
        KEY,
        vllm=rig.client(REPLAY),
        tokenizer="/models/m",
        cases=[RECORDED],
        tokenizer_mode="deepseek_v4",
    )
    assert (result["verdict"], result["client"]) == ("pass", "vllm bench serve")
    words = result["cases"][0]["command"]
    given = dict(pairwise(words))
    assert given["--served-model-name"] == MODEL
    assert (given["--num-prompts"], given["--num-warmups"], given["--max-concurrency"]) == ("4", "2", "2")
    assert (given["--random-input-len"], given["--random-output-len"]) == ("128", "16")
    assert given["--temperature"] == "0" and "--ignore-eos" in words
    assert (
        given["--percentile-metrics"] == "ttft,tpot,itl,e2el" and given["--metric-percentiles"] == "50,95,99"
    )
    assert given["--request-id-prefix"].startswith("rackwright-")
    assert KEY not in json.dumps(result)


def test_flags_that_an_older_client_lacks_are_left_out_and_recorded(rig: Rig) -> None:
    older = f"""
import sys
if "--num-warmups" in sys.argv:
    print("vllm: error: unrecognized arguments: --num-warmups 2 --request-id-prefix x")
    sys.exit(2)
{REPLAY}
"""
    one = rig.serve("no_metrics")
    result = rig.run(one, vllm=rig.client(older), tokenizer="/models/m", cases=[RECORDED])
    assert result["verdict"] == "pass"
    assert result["without_flags"] == ["--num-warmups", "--request-id-prefix"]


def test_a_client_that_knows_no_warm_ups_is_held_to_what_it_sends(rig: Rig) -> None:
    older = f"""
import sys
if "--num-warmups" in sys.argv:
    print("vllm: error: unrecognized arguments: --num-warmups 2")
    sys.exit(2)
given = dict(zip(sys.argv, sys.argv[1:]))
import urllib.request, json
for _ in range(4 + 1):  # the versions without warm-ups send one request before the others
    body = {{"model": {MODEL!r}, "prompt": [7] * 128, "max_tokens": 16, "ignore_eos": True}}
    url = given["--base-url"] + "/v1/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
{REPLAY}
"""
    one = rig.serve()
    result = rig.run(one, vllm=rig.client(older), tokenizer="/models/m", cases=[RECORDED])
    (run,) = result["cases"][0]["runs"]
    assert run["valid"], run["why"]
    assert bench.NO_WARMUPS in run["notes"]


def test_requests_of_the_built_in_client_carry_names_of_their_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    answer = engine.Handler.do_POST

    def noted(handler: Any) -> None:
        if handler.path == "/v1/completions":
            seen.append(handler.headers["X-Request-Id"])
        answer(handler)

    monkeypatch.setattr(engine.Handler, "do_POST", noted)
    assert rig.run(rig.serve(), runs=2)["verdict"] == "pass"
    assert len(seen) == len(set(seen)) == 2 * (CASE["prompts"] + CASE["concurrency"])
    assert {name.rsplit("-", 1)[0][:11] for name in seen} == {"rackwright-"}
    assert len({name.rsplit("-", 1)[0] for name in seen}) == 2


def test_without_a_client_of_its_own_the_built_in_one_takes_over(rig: Rig) -> None:
    lacking = "import sys\nprint('usage: vllm serve MODEL')\nsys.exit(2)\n"
    result = rig.run(rig.serve(), vllm=rig.client(lacking), tokenizer="/models/m")
    assert (result["verdict"], result["client"]) == ("pass", "rackwright")
    assert result["why_client"] == "the engine's command has no benchmark: usage: vllm serve MODEL"


def test_a_client_that_dies_makes_a_run_invalid_with_its_last_words(rig: Rig) -> None:
    dying = "import sys\nprint('ValueError: Initial test run failed')\nsys.exit(1)\n"
    result = rig.run(rig.serve("no_metrics"), vllm=rig.client(dying), tokenizer="/models/m")
    assert result["verdict"] == "fail"
    assert "the client ended with 1: ValueError: Initial test run failed" in result["why"]


def test_a_client_that_hangs_is_ended_at_its_limit(rig: Rig) -> None:
    hanging = "import time\ntime.sleep(600)\n"
    began = time.monotonic()
    result = rig.run(rig.serve("no_metrics"), vllm=rig.client(hanging), tokenizer="/m", limit=0.5)
    assert "the client ended with a time-out" in result["why"]
    assert time.monotonic() - began < 90


def test_a_client_that_says_nothing_is_no_success(rig: Rig) -> None:
    result = rig.run(rig.serve("no_metrics"), vllm=rig.client("pass\n"), tokenizer="/m")
    assert result["verdict"] == "fail"


def test_the_program_prints_one_document_and_progress(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = rig.serve()
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    request = {"base_url": one.url, "model": MODEL, "cases": [CASE], "runs": 1, "api_key_file": str(key_file)}
    monkeypatch.setattr("sys.stdin", StringIO(json.dumps(request)))
    assert bench.main(["--stdin"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == "pass"
    progress = [json.loads(line[10:]) for line in said.err.splitlines() if line.startswith("#progress ")]
    assert progress[0]["total"] == 1 and progress[-1]["done"] == 1


@pytest.mark.slow
def test_gpus_and_queues_are_sampled_beside_the_load(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n'
        "printf '0, 97, 81234, 100.0, 1980, 61\\n1, 95, 80000, 100.0, 1965, 60\\n'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    eager = functools.partial(bench.Sampler, every=0.02)
    monkeypatch.setattr(bench, "Sampler", eager)
    (case,) = rig.run(rig.serve("slow=0.15"))["cases"]
    (run,) = case["runs"]
    assert run["valid"], run["why"]
    figures, samples = run["figures"], run["samples"]
    assert "--query-gpu=" + ",".join(bench.GPU_FIELDS) in (tmp_path / "asked").read_text("utf-8")
    assert samples[0]["gpus"][1] == {
        "gpu": 1, "use_percent": 95, "memory_mib": 80000, "power_w": 100.0, "clock_mhz": 1965, "celsius": 60,
    }  # fmt: skip
    assert max(one["running"] for one in samples) > 0 and {"waiting", "kv_usage"} <= set(samples[0])
    assert figures["gpu_memory_peak_mib"] == 81234
    assert figures["output_tokens_per_second_per_gpu"] == pytest.approx(
        figures["output_tokens_per_second"] / 2, rel=1e-4
    )
    # two GPUs of 100 W each, for as long as requests were under way
    under_way = figures["joules_per_output_token"] * figures["output_tokens"] / 200
    assert 0 < under_way <= figures["seconds"] * 1.02 + 0.2


def test_other_programs_gpus_and_a_card_for_the_screen_count_for_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["0, 1, 300, [N/A], 300, 40", *(f"{i}, 97, {i}0000, {i}00.0, 1980, 61" for i in range(1, 5))]
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = "\\n".join(rows)
    tool.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    sampler = bench.Sampler(rig.session(rig.serve()).client, [2, 3], every=0.01)
    while len(sampler.samples) < 3:
        time.sleep(0.01)
    taken = sampler.stop()
    assert bench.Sampler(sampler.client, []).stop()[0].get("gpus") is None  # an engine on the CPU
    figures = {"output_tokens_per_second": 100.0, "output_tokens": 10.0}
    bench.Session.add_energy(figures, taken, None)
    assert (figures["output_tokens_per_second_per_gpu"], figures["gpu_memory_peak_mib"]) == (50.0, 30000.0)
    seconds = taken[-1]["at"] - taken[0]["at"]
    assert figures["joules_per_output_token"] == pytest.approx(500 * seconds / 10)


def test_people_read_a_table(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.DEFAULTS, "patience", 0.3)
    one = rig.serve("fails_every=4")
    monkeypatch.setattr(bench.accept, "TELL", bench.accept.Teller())
    assert bench.main(["--base-url", one.url, "--model", MODEL, "--case", "32/4x2", "--runs", "1"]) == 1
    out = capsys.readouterr().out
    assert "32/4 x2" in out and "requests failed" in out and "FAIL" in out
    assert out.count("p95 and p99 of 12 requests: little more than the slowest of them") == 1, out


def test_what_an_engine_says_cannot_paint_the_table() -> None:
    said = "1 of 8 requests failed: \x1b[2J\x1b[32mPASS\x1b[0m"
    row = {"name": "a", "counted": 0, "median": {}, "spread": {}, "runs": [{"valid": False, "why": [said]}]}
    text = bench.table({"cases": [row], "runs": 1, "verdict": "fail", "why": said})
    assert text.isprintable() or "\x1b" not in text
    assert text.splitlines()[-1] == "FAIL: 1 of 8 requests failed: PASS"
    assert bench.last_line("first\n\x1b[31mboom\x1b[0m\n\x1b[0m\n") == "boom"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cases": [5]}, "a case is 5, not an object"),
        ({"cases": [{**CASE, "promts": 5}]}, "a case has no 'promts'"),
        ({"cases": [{**CASE, "prompts": "8"}]}, "prompts of a case has the wrong type"),
        ({"cases": [{**CASE, "rate": True}]}, "rate of a case has the wrong type"),
        ({"cases": [{**CASE, "rate": float("nan")}]}, "rate must be above 0"),
        ({"cases": [{**CASE, "name": ["x"]}]}, "name of a case has the wrong type"),
        ({"cases": [{**CASE, "concurrency": 99999999}]}, "concurrency must be above 0 and at most 4096"),
        ({"cases": [{**CASE, "input": 10_000_000, "prompts": 100}]}, "at most 200000000 are prepared"),
        ({"cases": [{"input": 1, "output": 1}]}, "a case needs concurrency"),
        ({"cases": []}, "at least one case"),
        ({"runs": 0}, "runs must be above 0 and at most 1000"),
        ({"runs": True}, "runs is True, which has the wrong type"),
        ({"limit": float("nan")}, "limit must be above 0"),
        ({"patience": float("inf")}, "patience must be above 0"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(bench.Refused) as caught:
        bench.parameters_from({"base_url": "http://h", "model": "m", **change})
    assert said in str(caught.value)


def test_a_password_in_the_address_is_not_shown_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--base-url", "http://me:hunter22@h:99999", "--model", "m"]) == 2
    said = capsys.readouterr()
    assert "Port out of range" in said.err and "hunter22" not in said.out + said.err


@pytest.mark.parametrize("words", [["--case", "12"], ["--model", "m"], ["--stdin"]])
def test_wrong_usage_ends_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("no json"))
    assert bench.main(words) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fix"]
