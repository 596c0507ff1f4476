"""What a real H200 host showed and no stand-in had: recorded logs, read by the code that watches starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tasks.failures import recognise
from tasks.onhost import startup_log
from tasks.recipe import load_recipe

RECORDED = Path(__file__).parents[2] / "fixtures" / "gpu-rehearsal"
READY = "Application startup complete"


def log(name: str) -> str:
    return (RECORDED / name).read_text("utf-8", "replace")


def before_ready(text: str) -> str:
    return text[: text.index(READY)]


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        ("Initializing a V1 LLM engine", "starting the engine core"),
        ("12% Completed", "loading weights"),
        ("Model loading took", "measuring memory"),
        ("begins to compile kernel `hc_head_fuse_tilelang`", "compiling"),
        ("GPU KV cache size", "making the KV cache"),
        ("Warming up DeepSeek V4 sparse MLA", "warming up kernels"),
        (READY, "ready"),
    ],
)
def test_each_phase_of_the_cold_start_is_recognised_when_it_begins(at: str, phase: str) -> None:
    text = log("cold-eager.log")
    assert startup_log.read(text[: text.index(at) + len(at) + 40]).phase == phase


def test_a_kernel_that_compiles_is_named_with_its_number() -> None:
    text = log("cold-eager.log")
    until = text.index("begins to compile kernel `hc_head_fuse_tilelang`") + 60
    assert startup_log.read(text[:until]).note == "kernel 4: hc_head_fuse_tilelang"


def test_the_cold_start_is_mostly_compilation() -> None:
    phases = dict(json.loads(log("starts-eager.json"))[0]["phases"])
    assert phases["compiling"] > 0.75 * sum(
        seconds for name, seconds in phases.items() if name != "warm-up requests"
    )


def test_weights_and_cache_of_both_modes_are_read() -> None:
    cold = startup_log.read(before_ready(log("cold-eager.log"))).facts
    warm = startup_log.read(before_ready(log("warm-optimized-mtp2.log"))).facts
    assert cold["weights_gib"] == 5.33 and cold["kv_cache_tokens"] == 52_295_312
    assert warm["weights_gib"] == 5.89 and warm["kv_cache_tokens"] == 51_065_755
    assert warm["graph_seconds"] == 2


def test_the_optimized_start_goes_through_draft_model_and_graphs() -> None:
    text = before_ready(log("warm-optimized-mtp2.log"))
    reading = startup_log.read(text)
    assert {"loading weights", "capturing CUDA graphs", "warming up kernels"} <= set(reading.seen)
    during = startup_log.read(text[: text.index("Loading drafter model") + 200])
    assert (during.phase, during.note) == ("loading weights", "draft model")


def test_kept_kernel_caches_leave_nothing_to_compile_before_ready() -> None:
    cold, warm = before_ready(log("cold-eager.log")), before_ready(log("warm-optimized-mtp2.log"))
    assert startup_log.compiles(cold) >= 9
    assert "TileLang begins" not in warm


def test_kernels_that_compile_while_requests_wait_are_counted() -> None:
    text = log("warm-optimized-mtp2.log")
    served = text[text.index(READY) :]
    assert "TileLang JIT compilation during inference: mhc_pre_big_fuse_broadcast_with_norm" in served
    assert startup_log.compiles(served) >= 8


def test_what_compiles_late_does_not_make_a_ready_engine_look_unready() -> None:
    assert startup_log.read(log("warm-optimized-mtp2.log")).phase == "ready"


def test_a_healthy_start_is_not_taken_for_a_known_failure() -> None:
    for name in ("cold-eager.log", "warm-optimized-mtp2.log"):
        assert recognise(startup_log.tidy(log(name))) is None


def test_one_start_is_told_from_the_next_by_its_mark() -> None:
    text = log("cold-eager.log")
    assert startup_log.this_start("older\n" + text) == text[text.index("rackwright: start") :]


def test_the_check_that_noise_cannot_pass_is_the_one_that_the_recipe_skips() -> None:
    check = json.loads(log("tools-forced-noise.json"))
    choice = check["evidence"]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]
    assert set(load_recipe("deepseek-v4-mini-hopper").acceptance.skip) == {check["id"]}


def test_preflight_let_that_host_pass_with_one_warning() -> None:
    text = log("host-preflight.txt")
    assert re.findall(r"(?m)^  (?:WARN|FAIL) +(\S+)", text) == ["host.ulimits"]
    assert "ready with 1 warning" in text
