from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from composed_hosts import HEALTHY, gpu_host

from tasks.checks import GpuNeed, Needs
from tasks.checks.pairing import applies, flag_count, flag_value, in_range, known_issues, pairing, rules
from tasks.needs import needs_of
from tasks.plan import Plan
from tasks.recipe import Mode, load_recipe
from tasks.settings import settings_from

MakeNeeds = Callable[..., Needs]
SM120 = GpuNeed(("RTX PRO 6000 Blackwell",), 4, "12.0")
SM90 = GpuNeed(("H20",), 8, "9.0")

# For every rule: needs that it must refuse, and a change that makes them good again.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no-sm120-kernels-in-0.27": ({"gpu": SM120, "engine_version": "0.27.1"}, {"engine_version": "0.26.0"}),
    "sm120-fp8-warmup-in-0.24": ({"gpu": SM120, "engine_version": "0.24.0"}, {"gpu": SM90}),
    "fp4-indexer-cache-on-sm120": (
        {"gpu": SM120, "flags": {"attention_config.use_fp4_indexer_cache": True}},
        {"flags": {"attention_config.use_fp4_indexer_cache": False}},
    ),
    "fp4-indexer-cache-on-sm90": (
        {"gpu": SM90, "flags": {"attention-config": {"use_fp4_indexer_cache": True}}},
        {"flags": {}},
    ),
    "mega-moe-off-sm100": (
        {"gpu": SM120, "flags": {"moe-backend": "deep_gemm_mega_moe"}},
        {"flags": {"moe-backend": "marlin"}},
    ),
    "dspark-on-sm120-needs-flashinfer-0.6.18": (
        {"gpu": SM120, "speculative_method": "dspark", "flashinfer": "0.6.16.post3"},
        {"flashinfer": "0.6.18.post1"},
    ),
    "dspark-on-sm120-needs-vllm-0.30": (
        {"gpu": SM120, "speculative_method": "dspark", "engine_version": "0.28.0"},
        {"engine_version": "0.30.0"},
    ),
    "dspark-in-0.27-on-hopper": (
        {"gpu": SM90, "speculative_method": "dspark", "engine_version": "0.27.0"},
        {"engine_version": "0.26.0"},
    ),
    "dspark-needs-0.25": (
        {"gpu": SM90, "speculative_method": "dspark", "engine_version": "0.24.1"},
        {"engine_version": "0.25.1"},
    ),
    "dspark-too-many-tokens": (
        {"speculative_method": "dspark", "speculative_tokens": 7},
        {"speculative_tokens": 5},
    ),
    "dspark-too-few-tokens-in-0.26": (
        {"speculative_method": "dspark", "speculative_tokens": 3, "engine_version": "0.26.0"},
        {"engine_version": "0.33.0"},
    ),
    "adaptive-verification-on-hopper": (
        {"gpu": SM90, "speculative_method": "dspark", "engine_version": "0.30.0"},
        {"flags": {"speculative-config": {"enable_adaptive_verification": False}}},
    ),
    "custom-all-reduce-in-0.28": (
        {"gpu": SM120, "engine_version": "0.28.0", "tensor_parallel": 4},
        {"flags": {"disable-custom-all-reduce": True}},
    ),
    "ray-garbage": (
        {"flags": {"distributed-executor-backend": "ray"}},
        {"flags": {"distributed-executor-backend": "mp"}},
    ),
    "checkpoint-speculation-on-cpu": ({"gpu": None, "speculative_method": "mtp"}, {"gpu": SM120}),
    "dspark-on-cpu": ({"gpu": None, "speculative_method": "dspark"}, {"gpu": SM90}),
}


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in rules()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_refuses_its_case_and_lets_the_mended_one_pass(name: str, needs: MakeNeeds) -> None:
    (rule,) = [rule for rule in rules() if rule.name == name]
    bad, mend = CASES[name]
    wrong = needs(**bad)
    right = replace(wrong, **mend)

    def holds(wanted: Needs) -> bool:
        return applies(rule, wanted, wanted.gpu.compute_capability if wanted.gpu else None)

    assert holds(wrong)
    assert not holds(right)


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_reaches_the_finding_with_fix_and_source(name: str, needs: MakeNeeds) -> None:
    (rule,) = [rule for rule in rules() if rule.name == name]
    wanted = needs(**{"model_speculative": ("mtp", "dspark"), **CASES[name][0]})
    finding = pairing(wanted, HEALTHY)
    assert finding.status in ("fail", "warn")
    if finding.status == rule.status:
        assert rule.summary in finding.summary
        assert rule.fix in (finding.fix or "") and rule.reference in (finding.reference or "")


def test_a_method_needs_weights_of_the_checkpoint(needs: MakeNeeds) -> None:
    preview = needs(
        gpu=SM90, model_speculative=("mtp",), speculative_method="dspark", engine_version="0.30.0"
    )
    finding = pairing(preview, HEALTHY)
    assert finding.status == "fail" and "no weights for dspark (it can do: mtp)" in finding.summary
    newer = needs(gpu=SM90, model_speculative=("dspark",), speculative_method="mtp", engine_version="0.26.0")
    assert pairing(newer, HEALTHY).fix == "Set the method to dspark."
    assert pairing(needs(gpu=SM90, model_speculative=(), speculative_method="ngram"), HEALTHY).status == "ok"


@pytest.mark.parametrize(
    ("parallel", "heads", "count", "status", "words"),
    [
        (4, 64, 4, "ok", ""),
        (6, 64, 6, "fail", "does not divide the model's 64 attention heads"),
        (8, 64, 4, "fail", "needs more GPUs than the recipe names (4)"),
        (4, 64, 6, "fail", "tensor parallel 4 does not divide the 6 GPUs"),
        (2, 64, 4, "warn", "leaves 2 of the recipe's 4 GPUs unused"),
        (None, 64, 4, "ok", ""),
    ],
)
def test_tensor_parallel_must_divide_heads_and_fit_the_gpus(
    parallel: int | None, heads: int, count: int, status: str, words: str, needs: MakeNeeds
) -> None:
    wanted = needs(gpu=replace(SM90, count=count), tensor_parallel=parallel, attention_heads=heads)
    finding = pairing(wanted, HEALTHY)
    assert finding.status == status
    assert words in finding.summary


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ({"pipeline-parallel-size": 2}, "fail", "tensor parallel 4 x pipeline parallel 2 needs more GPUs"),
        ({"data_parallel_size": "2"}, "fail", "tensor parallel 4 x data parallel 2 needs more GPUs"),
        ({"pipeline-parallel-size": 1, "data-parallel-size": 1}, "ok", ""),
    ],
)
def test_every_kind_of_parallelism_multiplies_the_gpus(
    flags: dict[str, Any], status: str, words: str, needs: MakeNeeds
) -> None:
    finding = pairing(needs(gpu=replace(SM90, count=4), tensor_parallel=4, flags=flags), HEALTHY)
    assert (finding.status, words in finding.summary) == (status, True)


def plan_with(optimized: dict[str, Any], **settings: Any) -> Plan:
    """The SM120 recipe with other flags in its faster mode."""
    verb = settings.pop("verb", "preflight")
    name = "deepseek-v4-flash-sm120"
    recipe = load_recipe(name)
    modes = {**recipe.serve.modes, "optimized": Mode(flags=optimized)}
    recipe = recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"modes": modes})})
    made = settings_from({"recipe": name, **settings}, lambda key: key)
    return Plan(SimpleNamespace(name="gpu1", data={}, connector=None), made, recipe, verb)


@pytest.mark.parametrize("flag", [{"method": "dspark", "num_speculative_tokens": 5}, '{"method": "dspark"}'])
def test_a_mode_that_will_be_promoted_is_judged_before_it_is(flag: Any) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    before = pairing(needs_of(plan_with({"speculative-config": flag})), host)
    assert before.status == "warn"
    assert "mode optimized: this checkpoint has no weights for dspark" in before.summary
    for settings in ({"verb": "promote"}, {"mode": "optimized"}):
        assert pairing(needs_of(plan_with({"speculative-config": flag}, **settings)), host).status == "fail"
    good = plan_with({"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}, verb="promote")
    assert pairing(needs_of(good), host).status == "ok"


def test_what_every_mode_has_is_said_once(needs: MakeNeeds) -> None:
    wanted = needs(flags={"distributed-executor-backend": "ray"})
    both = replace(wanted, other_modes={"optimized": wanted})
    assert pairing(both, HEALTHY) == pairing(wanted, HEALTHY)


def test_what_the_recipe_knows_of_itself_is_shown(needs: MakeNeeds) -> None:
    told = needs_of(plan_with({})).known_issues
    (finding,) = known_issues(needs(known_issues=told), HEALTHY)
    assert finding.status == "ok" and "reasoning_content" in (finding.observed or "")
    assert known_issues(needs(), HEALTHY) == []


def test_prefill_and_decode_need_an_even_split(needs: MakeNeeds) -> None:
    assert pairing(needs(gpu=replace(SM90, count=7), disaggregated=True), HEALTHY).status == "fail"
    assert pairing(needs(gpu=SM90, disaggregated=True), HEALTHY).status == "ok"


def test_the_hosts_capability_counts_where_the_recipe_names_none(needs: MakeNeeds) -> None:
    wanted = needs(gpu=GpuNeed(count=4), engine_version="0.27.0")
    assert pairing(wanted, gpu_host("rtx-pro-6000-x4")).status == "fail"
    assert pairing(wanted, gpu_host("h20-x8")).status == "ok"


@pytest.mark.parametrize(
    ("version", "spec", "inside"),
    [("0.27.1", ">=0.27,<0.28", True), ("0.28.0", ">=0.27,<0.28", False), ("0.6.16.post3", "<0.6.18", True),
     ("0.6.18.post1", "<0.6.18", False), (None, ">=0", False), (5, ">5", False), (7, ">5", True),
     ("0.27", "==0.27.0", True)],
)  # fmt: skip
def test_ranges_compare_versions(version: Any, spec: str, inside: bool) -> None:
    assert in_range(version, spec) is inside


def test_a_bad_range_in_the_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a version range"):
        in_range("1.0", "~=1.0")


def test_flags_are_found_in_every_spelling() -> None:
    flags = {
        "attention_config.use_fp4_indexer_cache": False,
        "speculative-config": {"method": "mtp"},
        "a-b": 1,
    }
    assert flag_value(flags, "attention-config.use_fp4_indexer_cache") is False
    assert flag_value(flags, "speculative_config.method") == "mtp"
    assert flag_value(flags, "a_b") == 1
    assert flag_value(flags, "speculative-config.depth") is None
    assert flag_value({"a-b.c": 1}, "a-b") is None
    text = {"attention-config": '{"use_fp4_indexer_cache": true, "depth": {"x": 3}}', "odd": "{no JSON"}
    assert flag_value(text, "attention_config.use_fp4_indexer_cache") is True
    assert flag_count(text, "attention-config.depth.x") == 3
    assert flag_value(text, "odd.key") is None
    assert [flag_count({"n": value}, "n") for value in (4, "4", True, "auto", None)] == [
        4,
        4,
        None,
        None,
        None,
    ]
