"""The proof on the real vLLM: acceptance with a model that knows the answers, figures, archive."""

from __future__ import annotations

import json
import sys
import tarfile
from typing import Any

import pytest
from rehearsals import REPOSITORY, Rehearsal

REPORTS = REPOSITORY / "reports" / "local"
# What the rehearsal cannot show, each with the reason that the check must give.
NOT_HERE = {
    "auth.key": "no key is set",
    "engine.kv_transfers": "the server transfers no KV cache",
    "spec.decode": "speculative decoding is off",
}


def evidence(verb: str) -> Any:
    return json.loads((REPORTS / f"{verb}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def accepted(rehearsal: Rehearsal) -> dict[str, dict[str, Any]]:
    """The checks of an acceptance run on the safe mode, by id."""
    rehearsal.rackwright("accept")
    found = evidence("accept")["acceptance"]
    assert (found["verdict"], found["profile"], found["knowledge"]) == ("pass", "standard", True)
    return {check["id"]: check for check in found["checks"]}


def test_every_check_passes_but_those_that_this_host_cannot_show(
    accepted: dict[str, dict[str, Any]],
) -> None:
    others = {id: check for id, check in accepted.items() if check["verdict"] != "pass"}
    assert {id: check["reason"] for id, check in others.items()} == {
        id: reason for id, reason in NOT_HERE.items() if id in others
    }


@pytest.mark.parametrize(
    "id",
    [
        "chat.exact",
        "chat.stream_equal",
        "chat.utf8",
        "thinking.on",
        "thinking.off",
        "tools.auto",
        "tools.parallel",
        "tools.result",
        "agent.rounds",
        "agent.rounds_stream",
        "agent.rounds_thinking",
        "agent.rounds_thinking_stream",
        "content.markup",
    ],
)
def test_the_checks_that_need_knowledge_ran_with_evidence(
    accepted: dict[str, dict[str, Any]], id: str
) -> None:
    check = accepted[id]
    assert check["verdict"] == "pass"
    assert check["exchanges"] > 0 or id == "content.markup"


def test_the_reasoning_survives_every_round(accepted: dict[str, dict[str, Any]]) -> None:
    assert accepted["agent.rounds_thinking"]["figures"]["rounds_with_reasoning"] == 6


@pytest.fixture(scope="module")
def measured(rehearsal: Rehearsal) -> dict[str, Any]:
    """A benchmark of the running engine with two runs a case."""
    rehearsal.rackwright("bench", "--data", "bench_runs=2")
    return evidence("bench")["bench"]


def test_the_engines_own_client_gives_figures_that_count(measured: dict[str, Any]) -> None:
    assert (measured["verdict"], measured["client"]) == ("pass", "vllm bench serve")
    assert measured["engine_version"].startswith("0.32.0")
    for row in measured["cases"]:
        assert row["counted"] == 2
        figures = row["median"]
        assert figures["requests"] == row["prompts"]
        assert figures["output_tokens"] == row["prompts"] * row["output"]
        assert figures["output_tokens_per_second"] > 0
        assert 0 < figures["ttft_p50_ms"] <= figures["e2el_p50_ms"]
        assert "--ignore-eos" in row["command"]


def test_the_figures_stay_in_a_file_and_are_noise_against_themselves(
    measured: dict[str, Any], rehearsal: Rehearsal
) -> None:
    newest = max(REPORTS.glob("bench-*.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(newest.read_text("utf-8"))["started"] == measured["started"]
    guard = "from tasks.cli import main; main()"
    said = rehearsal.run(sys.executable, "-c", guard, "compare", str(newest), "local/eager").stdout
    assert "noise" in said and "better" not in said and "worse" not in said


def test_the_support_archive_tells_of_the_host(rehearsal: Rehearsal) -> None:
    rehearsal.rackwright("support")
    newest = max(REPORTS.glob("support-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(newest) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
        packages = next(name for name in tar.getnames() if name.endswith("packages.txt"))
        file = tar.extractfile(packages)
        assert file is not None and "torch==" in file.read().decode()
    assert {"receipts/engine.json", "receipts/weights.json", "report/accept.json", "host.json"} <= names
    assert any(name.startswith("logs/") for name in names)
