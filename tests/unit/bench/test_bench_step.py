"""The benchmark step's pure parts: cases, expected figures, lines for people, and the file that stays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tasks import bench as b
from tasks.checks.needs import GpuNeed, Needs
from tasks.facts.gpu import Gpu, GpuFacts
from tasks.onhost import bench as onhost
from tasks.recipe import Bench, BenchCase, Expected

ROW: dict[str, Any] = {
    "name": "128/64 x8",
    "counted": 2,
    "median": {"output_tokens_per_second": 812.345, "ttft_p50_ms": 41.5},
    "spread": {"output_tokens_per_second": [800.0, 820.0], "ttft_p50_ms": [40.0, 45.0]},
    "runs": [{"valid": False, "why": ["1 of 64 requests failed"]}, {"valid": True, "why": []}],
}


def step(bench: Bench, **settings: Any) -> b.Benchmark:
    """A step for a recipe's bench section."""
    chosen = SimpleNamespace(**{"bench_runs": None, "bench_rates": [], **settings})
    plan: Any = SimpleNamespace(recipe=SimpleNamespace(bench=bench), settings=chosen)
    return b.Benchmark(plan)


def test_the_default_cases_are_the_tutorials_and_the_program_takes_them() -> None:
    cases = [onhost.case_of(case) for case in step(Bench.model_validate({})).cases()]
    assert [case["name"] for case in cases] == ["128/64 x1", "128/64 x8", "4096/128 x4"]
    assert [case["warmups"] for case in cases] == [1, 8, 4]
    assert [onhost.case_of(case)["name"] for case in onhost.DEFAULT_CASES] == [case["name"] for case in cases]


def test_request_rates_repeat_the_last_case_as_stairs() -> None:
    work = step(Bench.model_validate({}), bench_rates=[1.0, 2.0], bench_runs=1)
    names = [onhost.case_of(case)["name"] for case in work.cases()]
    assert names[3:] == ["4096/128 x4 at 1/s", "4096/128 x4 at 2/s"]
    assert names == [BenchCase.model_validate(case).label for case in work.cases()]
    assert work.label == "bench: 5 cases, 1 run each"


@pytest.mark.parametrize(
    "values",
    [
        {"cases": []},
        {"runs": 0},
        {"cases": [{"input": 0, "output": 1, "concurrency": 1}]},
        {"cases": [{"input": 1, "output": 1, "concurrency": 1, "rate": 0}]},
        {"expected": [{"case": "128/64 x8", "metric": "ttft_p50_ms", "value": 1}]},  # no source
        {"expected": [{"case": "128/64 x8", "metric": "ttft_p42_ms", "value": 1, "source": "s"}]},
        {"expected": [{"case": "128/64 x9", "metric": "ttft_p50_ms", "value": 1, "source": "s"}]},
        {"cases": [{"input": 1, "output": 1, "concurrency": 1}] * 2},
        {"sead": 1},
    ],
)
def test_a_recipes_bench_section_is_strict(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bench.model_validate(values)


def test_expected_figures_stand_beside_the_measured_ones_of_the_same_mode() -> None:
    def expected(**values: Any) -> Expected:
        told = {"case": "128/64 x8", "metric": "output_tokens_per_second", "value": 900.0, "source": "s"}
        return Expected.model_validate({**told, **values})

    items = [expected(), expected(mode="eager"), expected(case="other"), expected(metric="tpot_p50_ms")]
    rows = b.expected_rows(items, "optimized", [ROW])
    assert [(row["measured"], row["ratio"]) for row in rows] == [(812.345, 0.903), (None, None), (None, None)]
    assert b.expected_line(rows[0]) == (
        "128/64 x8: output_tokens_per_second 812.3, 0.90 times; expected 900 (s)"
    )
    assert "not measured" in b.expected_line(rows[1])


def test_people_see_medians_spreads_and_how_many_runs_count() -> None:
    assert b.line_of(ROW, 3) == (
        "128/64 x8: 812.3 tokens/s (800 to 820), 41.5 ms to the first token (40 to 45) [2 of 3 runs count]"
    )
    assert b.line_of({**ROW, "median": {}, "spread": {}, "counted": 3}, 3) == "128/64 x8: no figures"
    assert b.reasons_of(ROW) == ["128/64 x8: 1 of 64 requests failed"]


def test_every_benchmark_stays_in_a_file_of_its_own_without_secrets(tmp_path: Path) -> None:
    bench = {"started": "2026-11-30T05:00:01Z", "api_key": "sk-0123456789abcdefghij", "cases": [ROW]}
    first = b.write_file_of(bench, tmp_path / "gpu1")
    second = b.write_file_of(bench, tmp_path / "gpu1")
    assert [first.name, second.name] == ["bench-20261130T050001Z.json", "bench-20261130T050001Z-2.json"]
    told = json.loads(first.read_text("utf-8"))
    assert told["cases"] == [ROW] and told["api_key"] == "[redacted]"
    assert [path.suffix for path in (tmp_path / "gpu1").iterdir()] == [".json", ".json"]


def test_the_record_names_driver_and_gpus_and_is_silent_without() -> None:
    gpus = tuple(Gpu(index=i, name="H20", power_limit=500.0, link_gen_max=5, link_width=16) for i in (0, 1))
    assert b.gpus_of(GpuFacts(asked=True, driver="580.1", cuda="13.0", gpus=gpus)) == {
        "driver": "580.1",
        "cuda": "13.0",
        "names": ["H20", "H20"],
        "power_limits": [500.0, 500.0],
        "links": ["gen5 x16", "gen5 x16"],
    }
    assert b.gpus_of(GpuFacts()) is None


def test_only_the_gpus_that_the_engine_uses_are_measured_and_named() -> None:
    cards = [Gpu(index=0, name="T400"), *(Gpu(index=i, name="H20") for i in range(1, 9))]
    facts = GpuFacts(asked=True, gpus=tuple(cards))
    plan: Any = SimpleNamespace(
        recipe=SimpleNamespace(
            flags=lambda mode, route: {},
            bench=Bench.model_validate({}),
            hardware=SimpleNamespace(count=4),
            name="r",
            digest="d",
        ),
        settings=SimpleNamespace(bench_runs=1, bench_rates=[]),
        needs=Needs("/opt/rackwright", gpu=GpuNeed(count=4), env={"CUDA_VISIBLE_DEVICES": "5,6,7,8"}),
        facts=SimpleNamespace(gpu=facts),
        facts_shown=dict,
        model_dir="/models/m", name="h", engine_label="e", route="wheel",
        state=SimpleNamespace(has=lambda what: False),
        supervisor=SimpleNamespace(name="systemd", logs=lambda *words: "true"),
        layout=SimpleNamespace(tmp="/tmp", env="/env"),
        receipt=lambda step: None,
    )  # fmt: skip
    spec: Any = SimpleNamespace(
        mode="eager", base_url="http://127.0.0.1:1", model_name="m", key_file=None, name="s", log="l", argv=()
    )
    asked = b.Benchmark(plan)._request(spec)
    assert asked["gpus"] == [5, 6, 7, 8]
    assert onhost.parameters_from(asked)["gpus"] == [5, 6, 7, 8]
    plan.recipe.hardware.count = 0  # an engine on the CPU
    assert b.Benchmark(plan)._request(spec)["gpus"] == []
    assert b.document(plan, spec, {})["gpus"]["names"] == ["H20"] * 4


def kept(folder: Path, stamp: str, mode: str, **more: Any) -> None:
    """A benchmark of an earlier time, as it lies in a host's reports."""
    case = {**ROW, "input": 128, "output": 64, "concurrency": 8, "prompts": 64, "rate": None}
    bench = {
        "verdict": "pass",
        "mode": mode,
        "recipe": {"name": "r"},
        "started": stamp,
        "cases": [case],
        **more,
    }
    (folder / f"bench-{stamp}.json").write_text(json.dumps(bench), "utf-8")


def test_the_newest_passing_benchmark_of_every_other_mode_stands_beside(tmp_path: Path) -> None:
    kept(tmp_path, "20261101T000000Z", "eager")
    kept(tmp_path, "20261102T000000Z", "eager")
    kept(tmp_path, "20261103T000000Z", "eager", verdict="fail")
    kept(tmp_path, "20261104T000000Z", "optimized")
    kept(tmp_path, "20261105T000000Z", "third", recipe={"name": "another"})
    (tmp_path / "bench-20261106T000000Z.json").write_text("{", "utf-8")
    now = json.loads((tmp_path / "bench-20261104T000000Z.json").read_text("utf-8"))
    (found,) = b.beside(now, tmp_path)
    assert (found["mode"], found["file"]) == ("eager", "bench-20261102T000000Z.json")
    assert found["cases"][0]["median"] == ROW["median"] and "runs" not in found["cases"][0]


def test_cases_of_another_protocol_do_not_stand_beside(tmp_path: Path) -> None:
    kept(tmp_path, "20261101T000000Z", "eager")
    now = {
        "mode": "optimized",
        "recipe": {"name": "r"},
        "cases": [{**ROW, "input": 128, "output": 64, "concurrency": 8, "prompts": 8, "rate": None}],
    }
    assert b.beside(now, tmp_path) == []
    assert b.beside(now, tmp_path / "nothing") == []
