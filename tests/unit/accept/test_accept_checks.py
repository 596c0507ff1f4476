"""Every check of the gate: a stand-in that makes it pass, and at least one that makes it fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accept_bench import ACCEPT, FULL, KEY, MODEL, Bench, accept, engine

IDS = [one.id for one in accept.CHECKS]
SEMANTIC = [one.id for one in accept.CHECKS if one.needs_knowledge]
IDENTITY = {"pid": os.getpid(), "root": "/models/m", "version": "0.32.0+cpu", "max_model_len": 8192}


@pytest.fixture(scope="module")
def healthy(module_bench: Bench) -> Any:
    """One deep run against a server without a fault, where every check has something to judge."""
    one = module_bench.serve(None, *FULL, key=KEY)
    expect = {
        "log": str(module_bench.folder / "engine.log"), "speculative": True, "prefix_caching": True,
        "identity": {**IDENTITY, "started_after": time.time() - 60}, "max_model_len": 8192,
    }  # fmt: skip
    return module_bench.run(one, key=KEY, profile="deep", expect=expect)


@pytest.mark.parametrize("check", IDS)
def test_a_sound_server_passes(healthy: Any, check: str) -> None:
    found = next(c for c in healthy["checks"] if c["id"] == check)
    assert found["verdict"] == "pass", found["summary"]


def test_the_run_of_a_sound_server_passes_and_counts_right(healthy: Any) -> None:
    assert healthy["verdict"] == "pass"
    assert healthy["counts"] == {"pass": len(IDS), "fail": 0, "skipped": 0}


LEGAL = ["reasoning_content", "no_tokenize", "no_metrics", "split_transport", "slow=0.001"]
SLOW = ["split_transport", "slow=0.001"]


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] * (v in SLOW)) for v in LEGAL])
def test_what_servers_may_do_differently_is_no_fault(bench: Bench, variant: str) -> None:
    result = bench.run(bench.serve([variant]), profile="smoke" if "slow" in variant else "standard")
    assert [c["summary"] for c in result["checks"] if c["verdict"] == "fail"] == []
    assert result["verdict"] == "pass"


# (faults, check, what the summary says)
FAILING = [
    (
        "healthy_but_dies_at_first_request",
        "guard.first_request",
        "/health says 200, but the first real request",
    ),
    ("hanging", "guard.first_request", "no whole answer in"),
    ("trickle=0.3", "guard.first_request", "no whole answer in"),
    (
        "server_error",
        "guard.first_request",
        "/health says 200, but the first real request failed: status 500",
    ),
    ("ok_with_error_body", "guard.first_request", "status 200, but the body is an error"),
    ("wrong_model_name", "models.name", "serves ['some-other-model']"),
    ("token_counters_move_idle", "guard.idle", "moved by"),
    ("no_key_check", "auth.key", "not 401"),
    ("ok_with_error_body", "chat.plain", "the body is an error: upstream unavailable"),
    ("empty_answer", "chat.plain", "the answer is empty"),
    ("always_thinks", "chat.plain", "carries reasoning"),
    ("think_in_content", "chat.plain", "markup leaked"),
    ("random_weights", "chat.exact", "was asked for"),
    ("wrong_answer", "chat.exact", "was asked for"),
    ("wrong_finish_reason", "chat.exact", "not stop"),
    ("no_done", "chat.stream", "without [DONE]"),
    ("bad_sse", "chat.stream", "no server-sent event"),
    ("hanging_stream", "chat.stream", "no whole answer in"),
    ("stream_error_event", "chat.stream", "the stream carries an error: engine died"),
    ("answers_only_not_streaming", "chat.stream", "carries no text"),
    ("answers_only_not_streaming", "chat.stream_equal", "streamed: ''"),
    ("stream_differs", "chat.stream_equal", "streamed: "),
    ("wrong_usage", "chat.usage", "completion tokens where 1 to 48"),
    ("no_stream_usage", "chat.usage", "no usage"),
    ("usage_of_another_prompt", "chat.usage", "/tokenize counts"),
    ("wrong_finish_reason", "chat.max_tokens", "not length"),
    ("ignores_max_tokens", "chat.max_tokens", "not length"),
    ("ignores_stop", "chat.stop", "holds the stop string"),
    ("wrong_finish_reason", "chat.stop", "the finish reason is"),
    ("ignores_n", "chat.n", "[0, 1] were asked for"),
    ("no_logprobs", "chat.logprobs", "no log probabilities"),
    ("positive_logprobs", "chat.logprobs", "log probabilities ["),
    ("half_utf8", "chat.utf8", "not valid UTF-8"),
    ("replacement_chars", "chat.utf8", "replacement character"),
    ("ignores_thinking_switch", "thinking.prompt", "not </think>"),
    ("lost_reasoning", "thinking.on", "no reasoning came"),
    ("reasoning_after_answer", "thinking.on", "after the answer began"),
    ("think_in_content", "thinking.on", "markup leaked"),
    ("wrong_answer", "thinking.on", "does not name 9.9"),
    ("always_thinks", "thinking.off", "thinking is off, but reasoning came"),
    ("empty_answer", "thinking.off", "the answer is empty"),
    ("ignores_tool_choice", "tools.forced", "gave no call"),
    ("tool_args_cut", "tools.forced", "no JSON object"),
    ("wrong_tool", "tools.forced", "'get_time' was called"),
    ("no_tool_calls", "tools.auto", "0 calls came"),
    ("wrong_tool_args", "tools.auto", "the location is 'Paris'"),
    ("stream_tool_args_cut", "tools.auto", "no JSON object: '{\"locatio'"),
    ("tool_args_cut", "tools.auto", "no JSON object"),
    ("one_call_only", "tools.parallel", "1 calls came"),
    ("ignores_tool_result", "tools.result", "does not use the result"),
    ("ignores_schema", "json.schema", "is missing"),
    ("wrong_answer", "json.schema", "no JSON"),
    ("leaked_markup_round3", "agent.rounds", "round 3: markup leaked"),
    ("stuck_round3", "agent.rounds", "round 3: the key is"),
    ("leaked_markup_round3", "agent.rounds_stream", "round 3: markup leaked"),
    ("stream_tool_args_cut", "agent.rounds_stream", "round 1: the key is"),
    ("lost_reasoning_round3", "agent.rounds_thinking", "lost on the way"),
    ("lost_reasoning", "agent.rounds_thinking", "round 1: thinking is on"),
    ("lost_reasoning_round3", "agent.rounds_thinking_stream", "lost on the way"),
    ("frozen_counters", "cache.prefix", "not one token was read from the cache"),
    ("no_cache_hits", "cache.prefix", "not one token was read from the cache"),
    ("no_drafts", "spec.decode", "not one token was drafted"),
    ("frozen_counters", "spec.decode", "not one token was drafted"),
    ("no_acceptance", "spec.decode", "none was accepted"),
    ("accepts_any_model", "error.unknown_model", "not 404"),
    ("bad_json_500", "error.bad_json", "500, not 400"),
    ("accepts_too_long", "error.too_long", "200, not 400"),
    ("dies_on_long", "error.too_long", "not 400"),
    ("hangup_leaks", "error.hangup", "running long after the client left"),
    ("forgets_middle", "long.needle", "the password middle"),
    ("preempts", "engine.preemptions", "were preempted"),
    ("failed_transfers", "engine.kv_transfers", "failed transfers"),
    ("compiles_late", "engine.compile", "compiled while requests waited"),
    ("model_swap", "guard.model", "answered by 'deepseek-v3-old'"),
    ("think_in_content", "content.markup", "<think> leaked in guard.first_request"),
]
AFTER = {"content.markup", "guard.model", "engine.preemptions", "engine.kv_transfers", "engine.compile"}


@pytest.mark.parametrize(("fault", "check", "said"), FAILING)
def test_a_fault_makes_its_check_fail(bench: Bench, fault: str, check: str, said: str) -> None:
    # an answer that fits the socket's buffer is over before anybody can hang up
    faults = [fault, "slow=0.002"] if check == "error.hangup" else [fault]
    one = bench.serve(faults, *FULL, key=KEY)
    values: dict[str, Any] = {"key": KEY, "expect": {"log": str(bench.folder / "engine.log")}}
    if said == "no whole answer in":
        values["patience"] = 0.004  # the time limit is what ends these
    if check == "error.hangup":
        values["patience"] = 0.1  # it watches for a quarter of its limit: a busy machine needs the rest
    first = ["guard.first_request", "chat.plain"] if check in AFTER else []
    verdict, summary = bench.verdict(one, check, first=first, **values)
    assert verdict == "fail", summary
    assert said in summary


IDENTITIES = [
    ({"pid": 999_999_999}, "belongs to process"),
    ({"root": "/models/old"}, "root is '/models/m', the receipt says '/models/old'"),
    ({"version": "0.26.0"}, "version is '0.32.0'"),
    ({"max_model_len": 131072}, "max_model_len is 8192"),
    ({"started_after": 4e9}, "before the one of the receipt"),
]


@pytest.mark.parametrize(("identity", "said"), IDENTITIES)
def test_an_old_server_on_the_port_is_not_taken_for_the_new_one(
    bench: Bench, identity: dict[str, Any], said: str
) -> None:
    verdict, summary = bench.verdict(bench.serve(), "guard.identity", expect={"identity": identity})
    assert verdict == "fail"
    assert said in summary


def test_the_right_process_does_not_clear_another_one_on_the_same_port(bench: Bench) -> None:
    one = bench.serve()
    one.server.socket.set_inheritable(True)
    words = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, close_fds=False, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            found = bench.verdict(one, "guard.identity", expect={"identity": {"pid": holder.pid}})
        finally:
            holder.kill()
    port = one.url.rsplit(":", 1)[1]
    assert found == ("fail", f"port {port} belongs to process {os.getpid()}, the receipt says {holder.pid}")


def test_a_gauge_that_never_moves_proves_nothing_of_requests_that_are_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = property(lambda self: 0, lambda self, value: None)
    monkeypatch.setattr(engine.Metrics, "running", stuck, raising=False)
    verdict, summary = bench.verdict(bench.serve(["hangup_leaks"]), "error.hangup")
    assert (verdict, "does not show the one that ran" in summary) == ("skipped", True)


def test_counters_that_no_answer_moves_prove_nothing_of_an_idle_server(bench: Bench) -> None:
    one = bench.serve(["frozen_counters"])
    verdict, summary = bench.verdict(one, "guard.idle", first=["guard.first_request"])
    assert (verdict, "do not move with answers" in summary) == ("skipped", True)


def test_whose_the_port_is_stays_open_where_the_program_was_copied_alone(
    bench: Bench, tmp_path: Path
) -> None:
    alone = tmp_path / "accept.py"
    alone.write_text(ACCEPT.read_text("utf-8"), "utf-8")
    expect = json.dumps({"identity": {"pid": 1}})
    argv = ["--base-url", bench.serve().url, "--model", MODEL, "--checks", "guard.identity"]
    done = subprocess.run(
        [sys.executable, "-I", str(alone), *argv, "--expect", expect], capture_output=True, text=True
    )
    assert "skipped: nothing of the identity could be read here: pid" in done.stdout, done.stderr


@pytest.mark.parametrize(("faults", "verdict"), [((), "pass"), (("compiles_late",), "fail")])
def test_a_log_that_is_no_file_is_read_by_a_command(
    bench: Bench, faults: tuple[str, ...], verdict: str
) -> None:
    log = bench.folder / "engine.log"
    log.write_text("TileLang begins to compile kernel `before` during the warm-up\n")
    one = bench.serve(list(faults))
    found = bench.verdict(
        one,
        "engine.compile",
        first=["guard.first_request", "chat.plain"],
        expect={"log_script": f"tail -n 400 {log}"},
    )
    assert found[0] == verdict, found[1]


def test_a_log_that_cannot_be_read_is_a_skip(bench: Bench) -> None:
    found = bench.verdict(
        bench.serve(),
        "engine.compile",
        first=["guard.first_request"],
        expect={"log_script": "exit 1"},
    )
    assert found == ("skipped", "skipped: the log cannot be read: exit 1")


def test_a_context_length_that_is_not_the_recipes_fails(bench: Bench) -> None:
    one = bench.serve(["wrong_context"])
    verdict, summary = bench.verdict(one, "models.name", expect={"max_model_len": 8192})
    assert (verdict, summary) == ("fail", "the context length is 4096, not 8192")


def test_speculation_that_should_be_on_and_has_no_counters_fails(bench: Bench) -> None:
    verdict, summary = bench.verdict(bench.serve(), "spec.decode", expect={"speculative": True})
    assert verdict == "fail"
    assert "should be on" in summary


def test_every_check_has_a_fault_that_makes_it_fail() -> None:
    proven = {check for _, check, _ in FAILING} | {"guard.identity"}
    assert set(IDS) - proven == set()


def test_every_fault_of_the_tables_is_described_by_the_stand_in() -> None:
    described = {word.split("=")[0] for word in engine.__doc__.split()}
    used = {fault.split("=")[0] for fault in [*LEGAL, *(row[0] for row in FAILING)]}
    assert used - described == set()


SKIPS = [
    ("guard.identity", {}, "no identity was given"),
    ("auth.key", {}, "no key is set"),
    ("cache.prefix", {"expect": {"prefix_caching": False}}, "prefix caching is off"),
    ("spec.decode", {}, "no counters of speculative decoding"),
    ("spec.decode", {"expect": {"speculative": False}}, "speculative decoding is off"),
    ("engine.kv_transfers", {}, "transfers no KV cache"),
    ("engine.compile", {}, "no log was given"),
    ("content.markup", {}, "no answer came"),
    ("chat.plain", {"skip": {"chat.plain": "not taught"}}, "not taught"),
]


@pytest.mark.parametrize(("check", "values", "said"), SKIPS)
def test_what_cannot_be_judged_is_skipped_with_its_reason(
    bench: Bench, check: str, values: dict[str, Any], said: str
) -> None:
    result = bench.run(bench.serve(), [check], **values)
    (found,) = result["checks"]
    assert found["verdict"] == "skipped"
    assert said in found["reason"]
    assert result["verdict"] == "fail", "a run that proved nothing is not a pass"


def test_the_server_itself_is_asked_whether_prefix_caching_is_on(bench: Bench) -> None:
    one = bench.serve(None, "--no-enable-prefix-caching")
    assert bench.verdict(one, "cache.prefix") == ("skipped", "skipped: prefix caching is off")


def test_random_weights_are_judged_by_form_and_the_rest_says_why_it_is_skipped(bench: Bench) -> None:
    one = bench.serve(["random_weights"], *FULL)
    result = bench.run(one, profile="standard", knowledge=False)
    assert [(c["id"], c["summary"]) for c in result["checks"] if c["verdict"] == "fail"] == []
    skipped = {c["id"]: c["reason"] for c in result["checks"] if c["verdict"] == "skipped"}
    for check in SEMANTIC:
        if check != "long.needle":  # not in this profile
            assert skipped[check] == "the checkpoint has random weights"
    passed = {c["id"] for c in result["checks"] if c["verdict"] == "pass"}
    assert {
        "chat.stream",
        "thinking.on",
        "thinking.prompt",
        "tools.forced",
        "json.schema",
        "cache.prefix",
    } <= passed


@pytest.mark.parametrize(
    "fault", ["lost_reasoning", "no_done", "ignores_tool_choice", "frozen_counters", "no_logprobs"]
)
def test_form_is_judged_for_random_weights_too(bench: Bench, fault: str) -> None:
    one = bench.serve([fault], *FULL)
    assert bench.run(one, profile="standard", knowledge=False)["verdict"] == "fail"


def test_other_peoples_requests_make_the_idle_check_a_skip_and_not_a_fail(bench: Bench) -> None:
    one = bench.serve()
    one.metrics.running = 1
    verdict, summary = bench.verdict(one, "guard.idle")
    assert (verdict, "1 requests of somebody" in summary) == ("skipped", True)


def test_the_profiles_grow(bench: Bench) -> None:
    sizes = []
    for profile in accept.PROFILES:
        parameters = accept.parameters_from({"base_url": "http://h:1", "model": MODEL, "profile": profile})
        sizes.append(len(accept.chosen(parameters)))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == len(IDS)
