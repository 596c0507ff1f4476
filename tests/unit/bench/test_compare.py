"""Two benchmarks side by side: what differs, what is noise, and what may not be compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import compare as c


def document(mode: str = "eager", counted: int = 3, **figures: tuple[float, float, float]) -> dict[str, Any]:
    """A benchmark with one case; figures are (lowest, median, highest)."""
    case = {
        "name": "128/64 x8",
        "input": 128,
        "output": 64,
        "concurrency": 8,
        "prompts": 64,
        "rate": None,
        "counted": counted,
        "median": {name: values[1] for name, values in figures.items()},
        "spread": {name: [values[0], values[2]] for name, values in figures.items()},
        "runs": [],
    }
    return {
        "verdict": "pass",
        "mode": mode,
        "client": "vllm bench serve",
        "started": "2026-11-30T05:00:00Z",
        "engine": {"label": "vLLM 0.32.0", "argv": ["/env/bin/vllm", "serve", "/m", "--port", "8000"]},
        "cases": [case],
    }


def verdicts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return {row.figure: row.verdict for row in c.compare(a, b).rows}


def test_ranges_that_meet_are_noise_and_apart_they_differ_in_the_right_direction() -> None:
    a = document(output_tokens_per_second=(90, 100, 110), ttft_p50_ms=(10, 11, 12), tpot_p50_ms=(5, 5, 5))
    b = document(output_tokens_per_second=(105, 120, 125), ttft_p50_ms=(14, 15, 16), tpot_p50_ms=(3, 4, 4.9))
    assert verdicts(a, b) == {
        "output_tokens_per_second": "noise",
        "ttft_p50_ms": "worse",
        "tpot_p50_ms": "better",
    }
    assert verdicts(b, a)["ttft_p50_ms"] == "better"
    change = {row.figure: row.change for row in c.compare(a, b).rows}
    assert change["output_tokens_per_second"] == pytest.approx(0.2)


def test_a_benchmark_against_itself_is_noise_throughout() -> None:
    a = document(output_tokens_per_second=(100, 100, 100), e2el_p95_ms=(1, 2, 3))
    assert set(verdicts(a, a).values()) == {"noise"}


def test_one_run_says_nothing() -> None:
    a = document(counted=1, output_tokens_per_second=(100, 100, 100))
    b = document(output_tokens_per_second=(200, 210, 220))
    assert verdicts(a, b) == {"output_tokens_per_second": "single run"}


def test_other_protocols_are_not_compared() -> None:
    a, b = document(ttft_p50_ms=(1, 1, 1)), document(ttft_p50_ms=(2, 2, 2))
    b["cases"][0]["prompts"] = 8
    found = c.compare(a, b)
    assert found.rows == []
    assert found.warnings == ["128/64 x8: not comparable, prompts differ"]


def test_cases_of_one_side_and_failed_benchmarks_are_told() -> None:
    a, b = document(ttft_p50_ms=(1, 1, 1)), document(ttft_p50_ms=(2, 2, 2))
    b["cases"][0]["name"], b["verdict"], b["why"] = "other", "fail", "2 of 3 runs count"
    b["client"] = "rackwright"
    assert c.compare(a, b).warnings == [
        "B does not pass: 2 of 3 runs count",
        "only A has the case 128/64 x8",
        "only B has the case other",
        "measured with two clients: vllm bench serve and rackwright",
    ]


def test_what_else_differs_is_listed_and_equal_things_are_not() -> None:
    a, b = document("eager", ttft_p50_ms=(1, 1, 1)), document("optimized", ttft_p50_ms=(1, 1, 1))
    b["engine"] = {**b["engine"], "argv": [*b["engine"]["argv"], "--enable-prefix-caching"]}
    assert c.compare(a, b).differs == [
        ("mode", "eager", "optimized"),
        ("flags", "--port 8000", "--port 8000 --enable-prefix-caching"),
    ]


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Two hosts; the first was measured three times, twice in one second."""
    folder = tmp_path / "reports"
    (folder / "gpu1").mkdir(parents=True)
    (folder / "gpu2").mkdir()
    for name, mode in (
        ("bench-20261101T000000Z.json", "optimized"),
        ("bench-20261102T000000Z.json", "eager"),
        ("bench-20261102T000000Z-10.json", "eager"),
    ):
        told = {**document(mode, ttft_p50_ms=(1, 1, 1)), "started": name}
        (folder / "gpu1" / name).write_text(json.dumps(told))
    return folder


def test_a_host_means_its_newest_benchmark_and_a_mode_its_newest_of_that_mode(reports: Path) -> None:
    assert c.load("gpu1", reports)["started"] == "bench-20261102T000000Z-10.json"
    assert c.load("gpu1/optimized", reports)["started"] == "bench-20261101T000000Z.json"
    (reports / "gpu1" / "bench-20261102T000000Z-².json").write_text("a copy of somebody's")
    assert c.load("gpu1", reports)["started"] == "bench-20261102T000000Z-10.json"


def test_a_file_of_a_benchmark_and_of_a_report_are_read(reports: Path, tmp_path: Path) -> None:
    told = tmp_path / "bench.json"
    told.write_text(json.dumps({"verb": "bench", "bench": document(ttft_p50_ms=(1, 1, 1))}))
    assert c.load(str(told), reports)["mode"] == "eager"
    assert c.load(str(reports / "gpu1" / "bench-20261101T000000Z.json"), reports)["mode"] == "optimized"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("gpu", "did you mean 'gpu"),
        ("gpu1/fast", "there are: eager, optimized"),
        ("gpu2", "run: rackwright bench"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(reports: Path, word: str, hint: str) -> None:
    with pytest.raises(c.NoBenchmark, match=hint):
        c.load(word, reports)


def test_a_host_with_reports_elsewhere_is_named_by_its_folder(
    reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "nowhere"
    assert c.load(str(reports / "gpu1"), nowhere)["mode"] == "eager"
    assert c.load(f"{reports}/gpu1/optimized", nowhere)["mode"] == "optimized"
    monkeypatch.chdir(tmp_path)
    assert c.load("reports/gpu1/optimized", nowhere)["mode"] == "optimized"
    with pytest.raises(c.NoBenchmark) as caught:
        c.load("gpu9", nowhere)
    assert "no host has reports there" in str(caught.value) and "remove it" not in str(caught.value)
    assert "named by its folder" in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [
        {"name": "c"},
        {"name": "c", "median": {"ttft_p50_ms": 1}, "spread": {}},
        {"name": "c", "median": {"ttft_p50_ms": 1}, "spread": {"ttft_p50_ms": [1]}},
        {"name": "c", "median": {"ttft_p50_ms": "1"}, "spread": {"ttft_p50_ms": [1, 2]}},
        {"name": "c", "median": {}, "spread": {}, "counted": "3"},
        {"median": {}, "spread": {}},
        7,
    ],
)
def test_a_damaged_file_is_named_and_ends_with_2(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"verdict": "pass", "cases": [case]}))
    assert c.main([str(file), str(file)], tmp_path) == 2
    assert f"{file} is damaged: the case " in capsys.readouterr().err


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


ODD = [None, 5, -1.5, 10**400, float("inf"), float("nan"), True, "x", "\ud800", [], {}, [None], {"a": 1}]


def damaged(whole: dict[str, Any]) -> Iterator[str]:
    """The document with something else, or nothing, at each of its places; and one that has no bottom."""
    for path in places(whole):
        for odd in [*ODD, KeyError]:
            found: Any = {"all": copy.deepcopy(whole)}
            *way, last = ("all", *path)
            here = found
            for key in way:
                here = here[key]
            if odd is KeyError:
                del here[last]
            else:
                here[last] = odd
            yield json.dumps(found.get("all"))
    yield "[" * 100_000


def test_no_damage_of_a_file_is_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {**document(ttft_p50_ms=(1, 2, 3), acceptance_rate=(0, 0, 0)), "facts": {"cpu": {"model": "x"}}}
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(whole))
    codes = set()
    for text in damaged(whole):
        bad.write_text(text)
        for pair in ([str(bad), str(good)], [str(good), str(bad)]):
            code = c.main(pair, tmp_path)
            said = capsys.readouterr()
            codes.add((code, bool(said.out), bool(said.err)))
    assert codes == {(0, True, False), (2, False, True)}


def test_what_else_is_damaged_is_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    odd = {"engine": "x", "facts": [], "recipe": 1, "gpus": 3}
    file.write_text(json.dumps({**document(ttft_p50_ms=(1, 1, 1)), **odd}))
    assert c.main([str(file), str(file)], tmp_path) == 0


def test_of_nothing_no_share_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = document(acceptance_rate=(0, 0, 0)), document(acceptance_rate=(0.4, 0.5, 0.6))
    (row,) = c.compare(a, b).rows
    assert (row.change, row.verdict) == (None, "better")
    assert c.text_of(c.compare(a, b)).splitlines()[-1].endswith("-  better")


def test_files_that_hold_no_benchmark_are_refused(reports: Path, tmp_path: Path) -> None:
    for text in ("{}", "[1]", "no json", '{"bench": null}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(c.NoBenchmark):
            c.load(str(tmp_path / "x.json"), reports)


def test_the_verb_prints_the_rows_and_ends_with_0(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert c.main(["gpu1/eager", "gpu1/optimized"], reports) == 0
    out = capsys.readouterr().out
    assert "mode: eager -> optimized" in out
    assert "ttft_p50_ms" in out and "+0.0%  noise" in out


def test_wrong_words_end_with_2_and_nothing_on_stdout(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert c.main(["gpu1"], reports) == 2
    assert c.main(["gpu1", "nowhere"], reports) == 2
    said = capsys.readouterr()
    assert said.out == "" and "nowhere" in said.err
