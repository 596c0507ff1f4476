"""The pure parts of the acceptance: metrics pages, server-sent events, markup, schemas, log lines."""

from __future__ import annotations

from typing import Any

import pytest
from accept_bench import ROOT, accept

PAGES = ROOT / "tests" / "fixtures" / "metrics"


def page(name: str) -> Any:
    """A recorded page (see INDEX.md beside it)."""
    return accept.parse_metrics((PAGES / name).read_text(encoding="utf-8"))


# --- metrics


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("metrics-v0.2x-spec-nixl.txt", "queries", 1.62e7),
        ("metrics-v0.2x-spec-nixl.txt", "hits", 1.1712e7),
        ("metrics-v0.2x-dp2-nixl-failing.txt", "queries", 1.62e7 + 32),
        ("metrics-v0.2x-dp2-nixl-failing.txt", "failed_transfers", 17950),
        ("metrics-v0.2x-dp2-nixl-failing.txt", "expired_transfers", 2),
        ("metrics-v0.2x-spec-nixl.txt", "failed_transfers", 0),
        ("metrics-v0.10-deprecated-pairs.txt", "queries", 1.62e7),
        ("metrics-v0.10-deprecated-pairs.txt", "drafts", None),
        ("metrics-v0.6-legacy.txt", "hits", None),
        ("metrics-v0.6-legacy.txt", "generated", 4032),
        ("metrics-v0.6-legacy.txt", "preemptions", 0),
        ("metrics-v0.32-cpu-ngram.txt", "preemptions", 0),
        ("metrics-v0.32-cpu-ngram.txt", "running", 0),
    ],
)
def test_a_number_is_read_by_its_exact_name_and_summed_over_engines(name: str, what: str, value: Any) -> None:
    assert page(name).get(what) == value


@pytest.mark.parametrize("name", ["metrics-v0.2x-spec-nixl.txt", "metrics-v0.32-cpu-ngram.txt"])
def test_time_stamps_of_created_twins_are_never_counted_as_tokens(name: str) -> None:
    read = page(name)
    assert any(key.endswith("_created") for key in read.samples)
    drafts, drafted, accepted = (read.get(what) for what in ("drafts", "drafted", "accepted"))
    assert 0 < accepted <= drafted < 1e9
    assert drafts <= drafted


def test_the_page_of_a_real_engine_says_that_prefix_caching_is_on() -> None:
    assert (
        page("metrics-v0.32-cpu-ngram.txt").label("vllm:cache_config_info", "enable_prefix_caching") == "True"
    )


def test_how_far_a_counter_moved_needs_it_on_both_pages() -> None:
    old, new = page("metrics-v0.6-legacy.txt"), page("metrics-v0.32-cpu-ngram.txt")
    assert accept.moved(old, new, "drafts") is None
    assert accept.moved(new, new, "drafts") == 0


def test_odd_lines_and_labels_of_a_page_are_read_or_passed_over() -> None:
    text = (
        "# HELP x y\n\nvllm:prompt_tokens_total{a=\"br}ace \\\"q\\\"\",b=\"c d\"} 3 1700000000000\n"
        "vllm:prompt_tokens_total 1e+02\nvllm:prompt_tokens_total{} NotANumber\nnot a sample at all\n"
        "vllm:generation_tokens_total NaN\n"
    )  # fmt: skip
    read = accept.parse_metrics(text)
    assert read.get("prompted") == 103
    assert read.samples["vllm:prompt_tokens_total"][0][0] == {"a": 'br}ace "q"', "b": "c d"}


# --- server-sent events


def events(raw: bytes) -> tuple[list[str], list[str]]:
    """Data of the events in `raw`, and what is wrong with them."""
    problems: list[str] = []
    lines = ((0.0, line) for line in raw.splitlines(keepends=True))
    return [event.data for event in accept.events_of(lines, problems)], problems


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: 1\n\ndata: [DONE]\n\n", ["1", "[DONE]"]),
        (b"data:1\r\n\r\n", ["1"]),
        (b": keep-alive\n\nevent: x\nid: 7\ndata: 1\n\n", ["1"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        ("data: 春😀\n\n".encode(), ["春😀"]),
    ],
)
def test_well_formed_events_are_read(raw: bytes, data: list[str]) -> None:
    assert events(raw) == (data, [])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"error": 1}\n', "no server-sent event"),
        (b"data: 1\n", "not ended by an empty line"),
        ("春".encode()[:2] + b"\n\n", "not valid UTF-8"),
    ],
)
def test_breaches_of_the_form_are_named(raw: bytes, said: str) -> None:
    assert said in events(raw)[1][0]


# --- markup and log lines


@pytest.mark.parametrize(
    "text",
    [
        '<｜DSML｜invoke name="x">', "</think>", "<think>", "<｜end▁of▁sentence｜>", "a <tool_call> b",
        "</tool_calls>",
        "<function_calls>", '<invoke name="x">', "<|im_end|>", "[TOOL_CALLS]", "｜DSML｜",
    ],
)  # fmt: skip
def test_markup_is_seen(text: str) -> None:
    assert accept.MARKUP.search("前文" + text + "后文")


@pytest.mark.parametrize("text", ["a < b > c", "x|y|z", "<b>fett</b>", "1 <| 2", "思考一下", "tool_calls"])
def test_plain_text_is_no_markup(text: str) -> None:
    assert accept.MARKUP.search(text) is None


@pytest.mark.parametrize(
    ("line", "compiled"),
    [
        (
            "(Worker_TP0 pid=350) WARNING 05-15 04:28:19 [jit_monitor.py:107] Triton kernel JIT compilation "
            "during inference: eagle_step_slot_mapping_metadata_kernel. This causes a latency spike",
            True,
        ),
        ("[TileLang:tilelang.jit.kernel:INFO] (kernel.py:133): TileLang begins to compile kernel `x`", True),
        (
            "INFO [jit_monitor.py:54] Kernel JIT monitor activated — Triton JIT compilations during "
            "inference will be logged as warnings.",
            False,
        ),
        ("INFO: 127.0.0.1:1 - \"POST /v1/chat/completions HTTP/1.1\" 200 OK", False),
    ],
)  # fmt: skip
def test_log_lines_of_kernels_compiled_late_are_told_from_others(line: str, compiled: bool) -> None:
    assert bool(accept.COMPILED.search(line)) is compiled


# --- small judges


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"city": "北京", "sunny": True}, None),
        ({"city": "巴黎", "sunny": True}, "none of"),
        ({"city": "北京"}, "'sunny' is missing"),
        ({"city": "北京", "sunny": "yes"}, "no boolean"),
        ({"city": "北京", "sunny": True, "x": 1}, "'x' is not in the schema"),
        ([], "no object"),
    ],
)
def test_a_value_is_judged_by_the_schema(value: Any, said: str | None) -> None:
    wrong = accept.fits(accept.CITY_SCHEMA, value)
    assert (wrong is None) if said is None else (said in wrong)


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("0.32.0", "0.32.0+cpu", True), ("0.32.0+cpu", "0.32.0", True), ("0.32.0", "0.32.1", False),
        ("0.32.0+cu130", "0.32.0+cpu", False), ("None", "0.32.0", False),
    ],
)  # fmt: skip
def test_versions_agree_where_one_leaves_the_local_part_out(said: str, wanted: str, same: bool) -> None:
    assert accept.same_version(said, wanted) is same


@pytest.mark.parametrize(
    ("text", "found"), [("1，2，3，4，5", (4, "3，")), ("aaaaaaaa", None), ("\ufffd" * 9, None), ("", None)]
)
def test_a_stop_string_occurs_first_where_it_was_taken(text: str, found: Any) -> None:
    assert accept.stop_in(text) == found


def test_the_agents_preamble_has_forty_tools_of_different_names() -> None:
    names = [one["function"]["name"] for one in accept.preamble()]
    assert len(names) == len(set(names)) == 40
    assert "open_box" in names


def test_recorded_pages_are_listed_with_their_source() -> None:
    index = (PAGES / "INDEX.md").read_text(encoding="utf-8")
    assert [f.name for f in PAGES.glob("*.txt") if f.name not in index] == []
