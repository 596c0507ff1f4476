"""From what a host's links are known to do to what the engine is started with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from composed_hosts import gpu_host

from tasks.checks.links import NcclAdvice, nccl_advice, nccl_env_flags
from tasks.deep import nccl_of, proof_key, run_deep
from tasks.deep_step import Deep
from tasks.facts import HostFacts
from tasks.needs import needs_of
from tasks.onhost.deep_probe import unproven
from tasks.plan import Plan
from tasks.receipts import Receipt
from tasks.recipe import load_recipe
from tasks.remote import Result
from tasks.settings import settings_from
from tasks.state import HostState
from tasks.steps import StepFailed
from tasks.supervisors import ServiceState

OFF = NcclAdvice(
    False, "with P2P it hangs", {"NCCL_P2P_DISABLE": "1"}, {"disable-custom-all-reduce": True}, True
)
NO_P2P = (
    " \tGPU0\tGPU1\tGPU2\tGPU3\n"
    + "".join(f" GPU{i}\t" + "\t".join("X" if i == j else "CNS" for j in range(4)) + "\n" for i in range(4))
    + "\nLegend:\n\n  CNS = Chipset not supported\n"
)


def plan_on(facts: HostFacts, **details: dict[str, Any]) -> Plan:
    """A plan for the SM120 recipe on a host with these facts and these receipts."""
    recipe = "deepseek-v4-flash-sm120"
    made = settings_from({"recipe": recipe}, lambda key: key)
    plan = Plan(SimpleNamespace(name="gpu1", data={}, connector=None), made, load_recipe(recipe), "site")
    plan.facts = facts
    plan.state = HostState(receipts={step: Receipt(step, "d", 1, detail) for step, detail in details.items()})
    plan.needs = needs_of(plan)
    return plan


def test_what_a_deep_probe_proved_is_what_the_engine_is_started_with() -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    assert "NCCL_P2P_DISABLE" not in dict(plan.spec().env)
    proven = plan_on(plan.facts, deep={"of": proof_key(plan), "nccl": asdict(OFF)})
    assert nccl_of(proven) == OFF
    spec = proven.spec()
    assert dict(spec.env)["NCCL_P2P_DISABLE"] == "1"
    assert spec.argv.count("--disable-custom-all-reduce") == 1


def test_a_proof_of_other_gpus_or_another_driver_does_not_count() -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    upgraded = replace(plan.facts, gpu=replace(plan.facts.gpu, driver="590.10"))
    moved = plan_on(upgraded, deep={"of": proof_key(plan), "nccl": asdict(OFF)})
    assert nccl_of(moved).proven is False and nccl_of(moved).p2p is True


def test_gpus_that_cannot_reach_each_other_start_without_p2p_unproven() -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4", p2p_read=NO_P2P))
    assert dict(plan.spec().env)["NCCL_P2P_DISABLE"] == "1"
    assert nccl_of(plan).proven is False


def test_what_cannot_be_read_now_stays_as_it_was() -> None:
    unreadable = gpu_host("rtx-pro-6000-x4", p2p_read="", p2p_write="")
    plan = plan_on(unreadable, service={"nccl": asdict(OFF)})
    assert nccl_of(plan) == OFF
    for damaged in ({}, {"nccl": None}, {"nccl": {"colour": "red"}}):
        assert nccl_of(plan_on(unreadable, service=damaged)).p2p is True
    dead = replace(unreadable, gpu=replace(unreadable.gpu, gpus=()))
    assert nccl_of(plan_on(dead, deep={"of": "x", "nccl": asdict(OFF)})) == OFF


def document(**verdict: Any) -> dict[str, Any]:
    """What the deep probe says about four GPUs that copy well."""
    run = {"ranks": 4, "p2p": False, "status": "ok", "bus_gb_s": 40.0, "latency_us": 30.0, "seconds": 3.0}
    rows = [{"gpu": gpu, "to_device_gb_s": 50.0, "to_host_gb_s": 50.0, "whole": True} for gpu in range(4)]
    return {
        "torch": {"python": "/x", "torch": "2.11.0", "gpus": 4},
        "copies": {"status": "ok", "host_device": rows, "peers": []},
        "all_reduce": [run],
        "stuck": [],
        "verdict": {
            "p2p": False,
            "works": True,
            "env": OFF.env,
            "flags": OFF.flags,
            "why": "with P2P it hangs",
            **verdict,
        },
    }


def test_the_step_keeps_what_was_proven_and_stops_where_nothing_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    monkeypatch.setattr(plan, "say", lambda text: None)
    monkeypatch.setattr("tasks.deep_step.run_deep", lambda plan: (document(), ""))
    step = Deep(plan)
    assert step.unchanged() is None
    done = step.act()
    plan.state = HostState(receipts={"deep": Receipt("deep", step.digest(), 1, done.detail)})
    assert nccl_of(plan) == OFF and "NCCL_P2P_DISABLE" in dict(plan.spec().env)
    assert "with P2P it hangs" in (step.unchanged() or "")
    assert any(finding.id == "deep.all_reduce" for finding in plan.findings)
    dead = document(works=False, p2p=None, why="with P2P it hangs, and without it too")
    monkeypatch.setattr("tasks.deep_step.run_deep", lambda plan: (dead, ""))
    with pytest.raises(StepFailed, match=r"without it too"):
        step.act()
    torchless = {
        "torch": {"python": None, "tried": {"/x": "No module named 'torch'"}},
        "copies": None,
        "all_reduce": [],
        "stuck": [],
        "verdict": unproven("no Python with torch"),
    }
    monkeypatch.setattr("tasks.deep_step.run_deep", lambda plan: (torchless, ""))
    with pytest.raises(StepFailed, match=r"nothing is proven: .*No module named 'torch'"):
        step.act()
    kept = Receipt("deep", step.digest(), 1, {**done.detail, "verdict": unproven("no Python with torch")})
    plan.state = HostState(receipts={"deep": kept})
    assert step.unchanged() is None, "a receipt without a proof is none"
    monkeypatch.setattr("tasks.deep_step.run_deep", lambda plan: (None, "no Python"))
    with pytest.raises(StepFailed, match="no Python"):
        step.act()


def test_the_probe_is_given_the_very_gpus_that_the_engine_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on(gpu_host("h20-x8"))
    plan.needs = replace(plan.needs, env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    asked = []

    def run(command: str, *, stdin: str, timeout: float) -> Result:
        asked.append(json.loads(stdin)["request"]["gpus"])
        return Result(0, json.dumps(document()), "")

    monkeypatch.setattr(plan.remote, "run", run)
    monkeypatch.setattr(plan, "say", lambda text: None)
    assert run_deep(plan)[0] is not None
    assert asked == [[4, 5, 6, 7]]
    assert dict(plan.spec().env)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_new_engine_or_driver_is_proven_anew() -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    kept = Receipt("deep", Deep(plan).digest(), 1, {"nccl": asdict(OFF)})
    plan.state = HostState(receipts={"deep": kept, "engine": Receipt("engine", "new", 1)})
    assert Deep(plan).unchanged() is None


def test_p2p_that_works_adds_nothing() -> None:
    host = gpu_host("h20-x8")
    assert nccl_env_flags(nccl_advice(plan_on(host).needs, host)) == ({}, {})
    assert nccl_env_flags(None) == ({}, {})
    assert nccl_env_flags(NcclAdvice(True, "proven", {"A": "1"}, {}, True)) == ({}, {})


def test_a_running_engine_is_not_disturbed_and_a_host_without_python_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    monkeypatch.setattr(plan.remote, "run", lambda *a, **k: pytest.fail("nothing may be asked"))
    plan.services = {"rackwright-eager": ServiceState(True, "running", True, pid=7)}
    assert "rackwright stop" in run_deep(plan)[1]
    plan.services = {}
    plan.facts = replace(plan.facts, tools=replace(plan.facts.tools, pythons=()))
    assert run_deep(plan) == (None, "there is no Python 3.8 or newer on the host")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Result(127, "", "sh: python3: not found"), "sh: python3: not found"),
        (Result(1, '{"cut', "#progress {}"), "exit code 1"),
        (Result(0, "[]", ""), "exit code 0"),
    ],
)
def test_an_answer_that_is_none_is_a_reason(
    answer: Result, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_on(gpu_host("rtx-pro-6000-x4"))
    monkeypatch.setattr(plan.remote, "run", lambda *a, **k: answer)
    monkeypatch.setattr(plan, "say", lambda text: None)
    document, told = run_deep(plan)
    assert document is None and why in told
