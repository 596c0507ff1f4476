"""The documents that are written have exactly the fields that the manual names."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from report_pages import SAMPLES, sample

from tasks import bench
from tasks.findings import ok
from tasks.onhost import accept
from tasks.record import Record

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "standin"))
import engine  # noqa: E402


def rows(page: str) -> dict[str, str]:
    """First column of a manual's tables: each name in it, and the whole row."""
    found = {}
    for line in (ROOT / "docs" / page).read_text("utf-8").splitlines():
        cells = line.split("|")
        if line.startswith("| `"):
            for name in re.findall(r"`([a-z_\[\].]+)`", cells[1]):
                found[name] = line
    return found


REPORT = rows("report.md")
BENCH = rows("benchmark.md")


def named(row: str) -> set[str]:
    """Every word that a row of a table sets in code."""
    return set(re.findall(r"`([a-z_0-9]+)`", row))


@cache
def noted() -> frozenset[str]:
    """Every field that the library puts into a report: arguments of `record.note`."""
    found: set[str] = set()
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if node.func.attr == "note" and name == "record":
                    found |= {keyword.arg or "?" for keyword in node.keywords}
    return frozenset(found)


def test_every_field_that_the_library_writes_is_in_the_manual(tmp_path: Path) -> None:
    record = Record(tmp_path, "site", "gpu1", {})
    record.step("engine", "done")
    written = noted() | set(record.evidence)
    assert len(written) > 15 and "?" not in written
    assert written - set(REPORT) == set()


@pytest.mark.parametrize("name", SAMPLES)
def test_examples_have_no_field_that_the_manual_does_not_name(name: str) -> None:
    evidence = sample(name)
    assert set(evidence) - set(REPORT) == set()
    for key in ("steps", "findings", "pins"):
        assert {field for item in evidence[key] for field in item} - named(REPORT[key]) == set(), key
    for key in ("recipe", "engine"):
        assert set(evidence[key] or {}) - named(REPORT[key]) == set(), key
    if evidence["topology"]:
        assert set(evidence["topology"]) <= named(REPORT["topology"])


def test_every_field_of_the_manual_can_be_written() -> None:
    """What nothing writes any more would be a promise that is not kept."""
    given = {"recipe", "engine"}  # of `Plan`, when its record is made
    always = set(Record(Path("nowhere"), "site", "h", {}).evidence) | {"steps", "seconds"}
    assert set(REPORT) - noted() - always - given == set()


def test_a_finding_is_written_as_the_manual_says() -> None:
    assert set(ok("a.b", "fine", observed="1").to_json()) == named(REPORT["findings"]) - {"findings"}


def served(folder: Path) -> Any:
    argv = ["serve", "/m", "--host", "127.0.0.1", "--port", "0", "--served-model-name", "m"]
    return engine.StandIn([*argv, "--standin-log", str(folder / "log")], env={}).start()


def test_acceptance_is_written_as_the_manual_says(tmp_path: Path) -> None:
    one = served(tmp_path)
    try:
        result = accept.accept(
            accept.parameters_from(
                {
                    "base_url": one.url,
                    "model": "m",
                    "checks": ["guard.first_request", "chat.exact", "auth.key"],
                }
            ),
            None,
        )
    finally:
        one.stop()
    row = named(REPORT["acceptance"])
    assert set(result) - row == set()
    assert {field for check in result["checks"] for field in check} - row == set()
    assert set(result["counts"]) | set(result["slowest_request"]) <= row
    assert {name for check in result["checks"] for name in check["evidence"] or {}} <= row


def test_a_benchmark_is_written_as_the_manual_says(tmp_path: Path) -> None:
    from tasks.onhost import bench as program

    one = served(tmp_path)
    asked = {
        "base_url": one.url,
        "model": "m",
        "cases": [{"input": 8, "output": 2, "concurrency": 1, "prompts": 2}],
        "runs": 1,
        "folder": str(tmp_path),
    }
    try:
        result = program.benchmark(program.Session(program.parameters_from(asked), None))
    finally:
        one.stop()
    more = document_fields()
    assert {"mode", "gpus", "expected"} <= more
    assert (set(result) | more | {"beside"}) - set(BENCH) - {"cases", "expected", "beside"} == set()
    (case,) = result["cases"]
    (run,) = case["runs"]
    assert set(case) <= named(BENCH["cases[]"])
    assert set(run) <= named(BENCH["cases[].runs[]"])
    assert {field for one in run["samples"] for field in one} <= named(BENCH["cases[].runs[].samples[]"])
    manual = (ROOT / "docs" / "benchmark.md").read_text("utf-8")
    stems = {re.sub(r"^(ttft|tpot|itl|e2el)_(mean|p50|p95|p99)_ms$", "", name) for name in run["figures"]}
    assert {name for name in stems if name and f"`{name}`" not in manual} == set()


def document_fields() -> set[str]:
    """What `bench.document` adds to the program's result."""
    tree = ast.parse(Path(bench.__file__).read_text("utf-8"))
    (function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "document"
    ]
    (answer,) = [node.value for node in function.body if isinstance(node, ast.Return)]
    assert isinstance(answer, ast.Dict)
    return {key.value for key in answer.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_fields_of_the_gpu_example_are_all_in_the_manual() -> None:
    found = sample("gpu-bench")["bench"]
    assert set(found) - set(BENCH) - {"cases", "expected", "beside"} == set()
    for row in found["expected"]:
        assert set(row) <= named(BENCH["expected[]"])
    for one in found["beside"]:
        assert set(one) - {"cases"} <= named(BENCH["beside[]"])
    gpus = [row for run in found["cases"][0]["runs"] for one in run["samples"] for row in one["gpus"]]
    assert set(gpus[0]) <= named(BENCH["cases[].runs[].samples[]"])
