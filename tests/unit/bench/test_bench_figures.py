"""From a recorded run of `vllm bench serve` to figures, and what makes a run not count."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rig import page, recorded

from tasks.onhost import bench

GOOD = "vllm-0.32-cpu-128x16-c2.json"
CASE = bench.case_of({"input": 128, "output": 16, "concurrency": 2, "prompts": 4})


@pytest.fixture
def raw() -> dict[str, Any]:
    return copy.deepcopy(recorded(GOOD))


def test_figures_recomputed_from_single_requests_are_those_that_vllm_reports(raw: dict[str, Any]) -> None:
    figures = bench.figures_of(raw)
    for name in bench.LATENCIES:
        for share in bench.PERCENTILES:
            key = f"{name}_p{share}_ms"
            # vLLM keeps no per-request TPOT in the file; its own comes from the same times
            assert figures[key] == pytest.approx(raw[f"p{share}_{name}_ms"], rel=1e-6), key
        assert figures[f"{name}_mean_ms"] == pytest.approx(raw[f"mean_{name}_ms"], rel=1e-6)
    assert figures["output_tokens_per_second"] == pytest.approx(raw["output_throughput"])
    assert figures["total_tokens_per_second"] == pytest.approx(raw["total_token_throughput"])
    assert (figures["requests"], figures["output_tokens"], figures["input_tokens"]) == (4, 64, 513)


def test_a_recorded_good_run_counts(raw: dict[str, Any]) -> None:
    assert bench.problems_of(raw, CASE, bench.figures_of(raw)) == []


def test_answers_that_are_too_short_do_not_count_though_vllm_calls_them_completed() -> None:
    raw = recorded("vllm-0.32-cpu-short-answers.json")
    assert (raw["completed"], raw["failed"]) == (3, 0)
    case = bench.case_of({"input": 8190, "output": 16, "concurrency": 2, "prompts": 3})
    assert bench.problems_of(raw, case, bench.figures_of(raw)) == ["3 answers do not have 16 tokens"]


def test_a_failed_request_is_named_with_its_error(raw: dict[str, Any]) -> None:
    raw["errors"][2], raw["output_lens"][2] = "Traceback …\nServiceUnavailable: overloaded\n", 0
    raw |= {"completed": 3, "failed": 1, "total_output_tokens": 48}
    problems = bench.problems_of(raw, CASE, bench.figures_of(raw))
    assert problems[0] == "1 of 4 requests failed: ServiceUnavailable: overloaded"


def test_requests_that_are_missing_from_the_result_count_as_failed(raw: dict[str, Any]) -> None:
    for name in ("errors", "output_lens", "input_lens", "ttfts", "itls", "latencies", "start_times"):
        del raw[name][3]
    assert bench.problems_of(raw, CASE, bench.figures_of(raw))[0] == "1 of 4 requests failed"


@pytest.mark.parametrize(
    ("field", "figure"),
    [
        ("completed", "requests"),
        ("total_output_tokens", "output_tokens"),
        ("output_throughput", "output_tokens_per_second"),
        ("total_token_throughput", "total_tokens_per_second"),
    ],
)
def test_a_reported_total_that_the_requests_do_not_make_is_found(
    raw: dict[str, Any], field: str, figure: str
) -> None:
    raw[field] *= 2
    assert any(figure + " =" in why for why in bench.problems_of(raw, CASE, bench.figures_of(raw)))


def test_a_duration_shorter_than_its_requests_is_found(raw: dict[str, Any]) -> None:
    raw["latencies"][0] = 30.0
    assert any("requests took 30.0 s" in why for why in bench.problems_of(raw, CASE, bench.figures_of(raw)))


def test_clients_without_latencies_are_measured_by_their_tokens(raw: dict[str, Any]) -> None:
    del raw["latencies"]  # vLLM before 0.30 does not save them
    expected = 1000 * (raw["ttfts"][2] + sum(raw["itls"][2]))
    assert bench.latencies_of(raw)["e2el"][2] == pytest.approx(expected)


def test_bundled_tokens_and_a_short_run_are_told_to_the_reader(raw: dict[str, Any]) -> None:
    notes = " / ".join(bench.notes_of(raw, {**bench.figures_of(raw), "cached_prompt_share": 0.3}))
    assert "tokens came in bundles" in notes
    assert "30 % of the prompt tokens were read from the prefix cache" in notes
    assert "too short for a steady state" in notes
    raw["itls"] = [[0.01] * 15] * 4
    assert bench.notes_of(raw, {"seconds": 60.0}) == []


@pytest.mark.parametrize(
    ("requests", "shares"), [(8, "p95 and p99"), (19, "p95 and p99"), (20, "p99"), (99, "p99"), (100, None)]
)
def test_percentiles_of_too_few_requests_are_told_to_the_reader(requests: int, shares: str | None) -> None:
    notes = bench.notes_of({}, {"seconds": 60.0, "requests": requests})
    wanted = f"{shares} of {requests} requests: little more than the slowest of them"
    assert notes == ([wanted] if shares else [])


def test_counters_of_the_engine_agree_with_the_recorded_run() -> None:
    case = {**CASE, "warmups": 2}
    assert bench.served_problems(case, page("metrics-before.txt"), page("metrics-after.txt")) == []


def test_somebody_elses_requests_are_seen_in_the_counters() -> None:
    case = {**CASE, "prompts": 2, "warmups": 2}
    problems = bench.served_problems(case, page("metrics-before.txt"), page("metrics-after.txt"))
    assert "finished 6 requests where the run sent 4: somebody else was served" in problems[0]


def test_requests_that_the_engine_never_saw_are_found() -> None:
    case = {**CASE, "prompts": 40, "warmups": 2}
    problems = bench.served_problems(case, page("metrics-before.txt"), page("metrics-after.txt"))
    assert problems[0] == "the engine finished 6 requests, the run sent 42"


def test_a_restart_during_the_run_is_found() -> None:
    after = page("metrics-after.txt")
    after.samples["process_start_time_seconds"] = [({}, 1.9e9)]
    problems = bench.served_problems(CASE, page("metrics-before.txt"), after)
    assert problems == ["the engine was restarted during the run"]


def test_median_and_spread_are_of_the_runs_that_count() -> None:
    runs = [
        {"valid": True, "figures": {"x": 10.0}},
        {"valid": True, "figures": {"x": 14.0}},
        {"valid": True, "figures": {"x": 11.0, "y": 1.0}},
        {"valid": False, "figures": {"x": 900.0}},
    ]
    assert bench.summary_of(runs) == ({"x": 11.0, "y": 1.0}, {"x": [10.0, 14.0], "y": [1.0, 1.0]})
    assert bench.summary_of([runs[-1]]) == ({}, {})


def test_percentiles_are_interpolated() -> None:
    assert [bench.percentile([4, 1, 3, 2], share) for share in (0, 50, 95, 100)] == [1, 2.5, 3.85, 4]
    assert bench.percentile([7.0], 99) == 7.0


GPU_ROWS = "0, 97, 91012, 412.50, 2407, 61\n1, 95, 91011, [N/A], 2400, 60\ngarbage\n"


def test_gpu_rows_are_parsed_and_what_is_not_told_is_none() -> None:
    first, second = bench.parse_gpus(GPU_ROWS)
    assert first == {
        "gpu": 0, "use_percent": 97.0, "memory_mib": 91012.0, "power_w": 412.5, "clock_mhz": 2407.0,
        "celsius": 61.0,
    }  # fmt: skip
    assert second["power_w"] is None


def samples(*watts: float | None) -> list[dict[str, Any]]:
    """One GPU, one sample a second."""
    return [{"at": float(i), "gpus": [{"power_w": w, "memory_mib": 1.0}]} for i, w in enumerate(watts)]


def test_energy_is_power_over_the_measured_time_alone() -> None:
    assert bench.energy_of(samples(50, 300, 300, 300, 300, 50), (1.0, 4.0)) == pytest.approx(900)
    assert bench.energy_of(samples(100, 200, 300), None) == pytest.approx(400)


def test_energy_is_not_guessed() -> None:
    assert bench.energy_of(samples(300, 300), (0.0, 1.0)) is None
    assert bench.energy_of(samples(300, None, None, 300), (0.0, 3.0)) is None


def test_new_lines_of_a_log_are_found_in_its_end() -> None:
    before = "\n".join(f"line {i}" for i in range(50))
    assert bench.accept.new_lines(before, before) == []
    assert bench.accept.new_lines(before, before + "\nfresh") == ["fresh"]
    moved_on = "\n".join([f"line {i}" for i in range(20, 50)] + ["a", "b"])
    assert bench.accept.new_lines(before, moved_on) == ["a", "b"]
    assert bench.accept.new_lines(before, "rotated\nlog") == ["rotated", "log"]
    assert bench.accept.new_lines("", "first") == ["first"]


@pytest.mark.parametrize(
    ("words", "rival"),
    [
        (["/env/bin/python", "/env/bin/vllm", "bench", "serve", "--model"], True),
        (["/env/bin/vllm", "bench", "serve"], True),
        (["python3", "-m", "sglang.bench_serving"], True),
        (["python3", "/lib/bench.py", "--stdin"], True),
        (["/env/bin/vllm", "serve", "/models/m"], False),
        (["python3", "-m", "pytest", "tests/unit/bench"], False),
        (["tail", "-f", "bench"], False),
        ([], False),
    ],
)
def test_other_load_generators_are_known_by_their_command(words: list[str], rival: bool) -> None:
    assert bench.is_benchmark(words) is rival


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a process namespace")
def test_a_rival_is_one_on_this_host_and_not_in_another_container(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("import time; print('up', flush=True); time.sleep(30)")
    begin = [sys.executable, str(tmp_path / "bench.py")]
    inside = ["unshare", "--pid", "--fork", "--kill-child", *begin]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE) for argv in (begin, inside)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        ours = {processes[0].pid, *children(processes[1].pid)}
        assert [pid for pid, _ in bench.others_running() if pid in ours] == [processes[0].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_a_rival_is_named_without_its_options() -> None:
    key = ["--api-key", "sk-secret"]
    assert bench.name_of(["guidellm", "benchmark", *key]) == "guidellm benchmark"
    assert (
        bench.name_of(["python", "/env/bin/vllm", "bench", "serve", *key])
        == "python /env/bin/vllm bench serve"
    )
    assert bench.name_of(["python", "-m", "sglang.bench_serving", *key]) == "python -m sglang.bench_serving"


def test_a_case_is_filled_in() -> None:
    case = bench.case_of({"input": 128, "output": 64, "concurrency": 8})
    assert (case["prompts"], case["warmups"], case["name"]) == (64, 8, "128/64 x8")
    assert bench.case_of({**case, "name": None, "rate": 2.5})["name"] == "128/64 x8 at 2.5/s"
    few = bench.case_of({"input": 1, "output": 1, "concurrency": 8, "prompts": 2, "warmups": 1})
    assert (few["prompts"], few["warmups"]) == (8, 8)  # never fewer than are in flight


@pytest.mark.parametrize(
    "values",
    [
        {"cases": [{"input": 0, "output": 1, "concurrency": 1}]},
        {"cases": [{"input": 1, "output": 1}]},
        {"cases": []},
        {"cases": [{"input": 1, "output": 1, "concurrency": 1}] * 2},
        {"runs": 0},
        {"gpus": [True]},
        {"gpus": "0"},
        {"no_such": 1},
        {"model": ""},
        {"seed": "1"},
        {"vllm": "/env/bin/vllm"},
    ],
)
def test_wrong_parameters_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(bench.Refused):
        bench.parameters_from({"base_url": "http://127.0.0.1:1", "model": "m", **values})
