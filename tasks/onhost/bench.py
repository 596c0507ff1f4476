#!/usr/bin/env python3
"""Benchmark of one running endpoint: figures with their protocol, and reasons not to believe them.

    bench.py --stdin        parameters as one JSON object on stdin, one JSON document on stdout
    bench.py --base-url URL --model NAME [--case 128/64x8] [--runs 3]

Runs on the host beside the engine. The load comes from the engine's own `vllm bench serve` where its
environment has it (`vllm`: path of the command), else from the client in this file. Every case is run
`runs` times with another seed each, so that no run reads the prompts of an earlier one from the prefix
cache. Beside each run the GPUs and the engine's queues are sampled once a second.

A run counts when every request was answered in full, the totals recomputed from single requests agree with
the reported ones and with the engine's own counters (so nobody else was served meanwhile), and no kernel
was compiled in it; one that compiled is marked cold and repeated. The result holds the median and the
spread of the runs that count, and every run with its reasons.

Parameters: base_url, model (served name); optional: api_key_file, tokenizer (folder of the model),
tokenizer_mode, trust_remote_code, vllm, cases [{name, input, output, concurrency, prompts, warmups, rate}]
(tokens; rate in requests a second, absent: as fast as the concurrency allows), runs, seed, gpus (indices of
those that the engine uses, as nvidia-smi counts them; absent: every one), log_script (sh that prints the end
of the engine's log), patience (seconds to wait for the engine to be idle), limit (seconds for one run),
folder (for files in passing).

Exit codes: 0 every case has all its runs, 1 not, 2 wrong usage. Standard library only, Python >= 3.8.
Protocol: DeepSeek-V4-Flash on H20, section 8 of the tutorial (fixed lengths, `--ignore-eos`, temperature 0,
warm-ups of at least the concurrency, p50/p95/p99 of TTFT, TPOT, ITL, E2EL).
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Callable, Iterator

try:
    from . import accept
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import accept  # type: ignore[import-not-found,no-redef]

if TYPE_CHECKING:
    Json = dict[str, Any]

PERCENTILES = (50, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
REPEATS = 2  # of a run that compiled kernels
NO_WARMUPS = "this version of the client makes no warm-ups: the first requests may be slower"
BUNDLED = 1e-4  # seconds
SHORT_RUN = 5.0  # seconds
FEW = {95: 20, 99: 100}  # requests that a percentile needs: with fewer it is the slowest of them
SAMPLES_KEPT = 120  # of one run
GPU_FIELDS = ("index", "utilization.gpu", "memory.used", "power.draw", "clocks.sm", "temperature.gpu")
# flags that older versions of `vllm bench serve` lack; without them a run still means what it says
OPTIONAL = ("--num-warmups", "--request-id-prefix", "--temperature", "--tokenizer-mode")
UNKNOWN_FLAGS = re.compile(r"unrecognized arguments: (.*)")
DEFAULT_CASES = (
    {"input": 128, "output": 64, "concurrency": 1},
    {"input": 128, "output": 64, "concurrency": 8},
    {"input": 4096, "output": 128, "concurrency": 4},
)
# what a case may say: its type, and the most where it is a number
CASE: dict[str, tuple[Any, int]] = {
    "name": (str, 0), "input": (int, 10_000_000), "output": (int, 10_000_000), "concurrency": (int, 4096),
    "prompts": (int, 1_000_000), "warmups": (int, 1_000_000), "rate": ((int, float), 1_000_000),
}  # fmt: skip
NEEDED = ("input", "output", "concurrency")
MOST_TOKENS = 200_000_000  # of a case's prompts, which are all made before the first is sent
WORDS = "weather location function parameter string object tool name call result answer question the and for"


class Refused(Exception):
    """The benchmark cannot begin or go on: what, and what to do."""

    def __init__(self, id: str, what: str, fix: str) -> None:
        super().__init__(what)
        self.error = {"id": id, "what": what, "fix": fix}


# --- pure: from one run's requests to figures --------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    """The percentile, interpolated between the two nearest values as NumPy does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def list_of(raw: Json, name: str) -> list[Any]:
    """A list of the raw result, or an empty one."""
    value = raw.get(name)
    return value if isinstance(value, list) else []


def answered(raw: Json) -> list[int]:
    """Places of the requests that were answered: they have tokens and no error."""
    errors = list_of(raw, "errors")
    lengths = list_of(raw, "output_lens")
    return [i for i, length in enumerate(lengths) if length and not (errors[i] if i < len(errors) else "")]


def latencies_of(raw: Json) -> dict[str, list[float]]:
    """Milliseconds of every answered request (ITL: of every token), recomputed from times of tokens."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    ttfts, itls, lengths = (list_of(raw, name) for name in ("ttfts", "itls", "output_lens"))
    whole = list_of(raw, "latencies")  # newer clients only; else the sum of the tokens' times
    for i in answered(raw):
        if i >= len(ttfts) or i >= len(itls):
            continue
        end = whole[i] if i < len(whole) and whole[i] else ttfts[i] + sum(itls[i])
        found["ttft"].append(1000 * ttfts[i])
        found["e2el"].append(1000 * end)
        found["itl"] += [1000 * value for value in itls[i]]
        if lengths[i] > 1:
            found["tpot"].append(1000 * (end - ttfts[i]) / (lengths[i] - 1))
    return found


def span_of(raw: Json) -> tuple[float, float] | None:
    """First request's start and last answer's end on the client's monotonic clock; None when not told."""
    starts, latencies = list_of(raw, "start_times"), latencies_of(raw)["e2el"]
    places = answered(raw)
    if not places or len(starts) <= places[-1] or len(latencies) != len(places):
        return None
    ends = [starts[i] + latency / 1000 for i, latency in zip(places, latencies)]
    return min(starts[i] for i in places), max(ends)


def figures_of(raw: Json) -> dict[str, float]:
    """What one run measured, recomputed from its single requests. Rates are per second of the whole run."""
    places = answered(raw)
    seconds = float(raw.get("duration") or 0)
    inputs, outputs = list_of(raw, "input_lens"), list_of(raw, "output_lens")
    made = sum(outputs[i] for i in places)
    read = sum(inputs[i] for i in places if i < len(inputs))
    figures: dict[str, float] = {"seconds": seconds, "requests": len(places), "output_tokens": made}
    figures["input_tokens"] = read
    if seconds > 0:
        figures["requests_per_second"] = len(places) / seconds
        figures["output_tokens_per_second"] = made / seconds
        figures["total_tokens_per_second"] = (made + read) / seconds
    for name, values in latencies_of(raw).items():
        if values:
            figures[name + "_mean_ms"] = statistics.fmean(values)
            for share in PERCENTILES:
                figures["%s_p%d_ms" % (name, share)] = percentile(values, share)
    return figures


def bundled_share(raw: Json) -> float:
    """Share of the tokens that came together with the one before: less than 0.1 ms apart."""
    gaps = [gap for i in answered(raw) if i < len(list_of(raw, "itls")) for gap in raw["itls"][i]]
    return sum(gap < BUNDLED for gap in gaps) / len(gaps) if gaps else 0.0


def notes_of(raw: Json, figures: dict[str, float]) -> list[str]:
    """What a reader must know of a run that counts."""
    notes = []
    bundled = bundled_share(raw)
    if bundled > 0.2:
        notes.append(
            "%.0f %% of the tokens came in bundles (the client lags, or several are accepted at once): "
            "TTFT and ITL are those of bundles" % (100 * bundled)
        )
    cached = figures.get("cached_prompt_share", 0.0)
    if cached > 0.1:
        notes.append("%.0f %% of the prompt tokens were read from the prefix cache" % (100 * cached))
    if figures.get("preemptions"):
        notes.append("%d requests were preempted: the KV cache is too small" % figures["preemptions"])
    if 0 < figures.get("seconds", 0) < SHORT_RUN:
        notes.append("the run took %.2f s: too short for a steady state" % figures["seconds"])
    requests = int(figures.get("requests", 0))
    few = ["p%d" % share for share, least in FEW.items() if 0 < requests < least]
    if few:
        notes.append(
            "%s of %d requests: little more than the slowest of them" % (" and ".join(few), requests)
        )
    return notes


def reported_totals(raw: Json) -> dict[str, float]:
    """The client's own totals, by the names of `figures_of`."""
    names = {
        "requests": "completed", "output_tokens": "total_output_tokens", "input_tokens": "total_input_tokens",
        "requests_per_second": "request_throughput", "output_tokens_per_second": "output_throughput",
        "total_tokens_per_second": "total_token_throughput",
    }  # fmt: skip
    return {
        ours: float(raw[theirs])
        for ours, theirs in names.items()
        if isinstance(raw.get(theirs), (int, float))
    }


def problems_of(raw: Json, case: Json, figures: dict[str, float]) -> list[str]:
    """Why this run does not count; nothing when it does."""
    problems = []
    errors = [str(error) for error in list_of(raw, "errors") if error]
    failed = max(len(errors), int(raw.get("failed") or 0), case["prompts"] - int(figures["requests"]))
    if failed > 0:
        why = (": " + errors[0].strip().splitlines()[-1][:160]) if errors and errors[0].strip() else ""
        problems.append("%d of %d requests failed%s" % (failed, case["prompts"], why))
    lengths = [list_of(raw, "output_lens")[i] for i in answered(raw)]
    short = sum(length != case["output"] for length in lengths)
    if short:
        problems.append("%d answers do not have %d tokens" % (short, case["output"]))
    for name, told in reported_totals(raw).items():
        counted = figures.get(name, 0.0)
        if abs(told - counted) > 0.01 * max(abs(told), abs(counted)):
            problems.append(
                "the client reports %s = %.6g, its single requests make %.6g" % (name, told, counted)
            )
    span = span_of(raw)
    if span and figures["seconds"] and span[1] - span[0] > figures["seconds"] * 1.02 + 0.2:
        problems.append("requests took %.1f s, the run %.1f s" % (span[1] - span[0], figures["seconds"]))
    return problems


def served_problems(case: Json, before: accept.Metrics, after: accept.Metrics) -> list[str]:
    """What the engine's own counters say against this run. Counters that are not exported say nothing."""
    problems = []
    if before.get("started") != after.get("started"):
        return ["the engine was restarted during the run"]
    served = accept.moved(before, after, "finished")
    asked = case["prompts"] + case["warmups"]
    # one more: the client's request before the warm-ups, which some versions send
    if served is not None and not asked <= served <= asked + 1:
        problems.append(
            "the engine finished %d requests where the run sent %d: somebody else was served"
            % (served, asked)
            if served > asked
            else "the engine finished %d requests, the run sent %d" % (served, asked)
        )
    extra = min(1, max(0, int(served or asked) - asked))
    for what, each in (("generated", case["output"]), ("prompted", case["input"])):
        counted, wanted = accept.moved(before, after, what), (asked + extra) * each
        if counted is not None and abs(counted - wanted) > 0.02 * wanted + 2 * asked:
            problems.append(
                "the engine counts %d tokens %s, the run accounts for %d" % (counted, what, wanted)
            )
    return problems


def mechanisms(before: accept.Metrics, after: accept.Metrics) -> dict[str, float]:
    """How the engine got there: share of the prompt read from the cache, accepted drafts, preemptions."""
    found: dict[str, float] = {}
    hits, queries = (accept.moved(before, after, what) for what in ("hits", "queries"))
    if hits is not None and queries:
        found["cached_prompt_share"] = hits / queries
    accepted, drafted = (accept.moved(before, after, what) for what in ("accepted", "drafted"))
    if accepted is not None and drafted:
        found["acceptance_rate"] = accepted / drafted
    preempted = accept.moved(before, after, "preemptions")
    if preempted is not None:
        found["preemptions"] = preempted
    return found


def energy_of(samples: list[Json], span: tuple[float, float] | None) -> float | None:
    """Joules of all GPUs in the samples between two moments, from power samples (trapezoids).

    None without power, and where fewer than three samples lie between them: that is no measurement.
    """
    inside = [s for s in samples if span is None or span[0] <= s["at"] <= span[1]]
    powers = [(s["at"], sum(gpu["power_w"] for gpu in s["gpus"])) for s in inside if has_power(s)]
    if len(powers) < 3:
        return None
    joules = 0.0
    for i in range(1, len(powers)):
        joules += (powers[i][0] - powers[i - 1][0]) * (powers[i][1] + powers[i - 1][1]) / 2
    covered: float = powers[-1][0] - powers[0][0]
    return joules / covered * (span[1] - span[0]) if span else joules


def around(moment: float, span: tuple[float, float] | None) -> bool:
    """Whether a moment lies in a span or two seconds beside it; every moment when the span is not known."""
    return span is None or span[0] - 2 <= moment <= span[1] + 2


def has_power(sample: Json) -> bool:
    """Every GPU told its power in this sample."""
    gpus = sample.get("gpus") or []
    return bool(gpus) and all(gpu.get("power_w") is not None for gpu in gpus)


def summary_of(runs: list[Json]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median of every figure over the runs that count, and its lowest and highest value."""
    counted = [run["figures"] for run in runs if run["valid"]]
    names = sorted({name for figures in counted for name in figures})
    median, spread = {}, {}
    for name in names:
        values = [figures[name] for figures in counted if name in figures]
        median[name] = rounded(statistics.median(values))
        spread[name] = [rounded(min(values)), rounded(max(values))]
    return median, spread


def rounded(value: float) -> float:
    """Six significant digits: more is noise."""
    return float("%.6g" % value)


def thinned(samples: list[Json], most: int = SAMPLES_KEPT) -> list[Json]:
    """At most so many samples, evenly chosen."""
    if len(samples) <= most:
        return samples
    step = len(samples) / most
    return [samples[int(i * step)] for i in range(most)]


def parse_gpus(text: str) -> list[Json]:
    """Rows of `nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits`; what is not told is None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS) or not cells[0].isdigit():
            continue
        numbers: list[float | None] = []
        for cell in cells:
            try:
                numbers.append(float(cell))
            except ValueError:  # [N/A], [Unknown Error]
                numbers.append(None)
        rows.append({
            "gpu": int(cells[0]), "use_percent": numbers[1], "memory_mib": numbers[2],
            "power_w": numbers[3], "clock_mhz": numbers[4], "celsius": numbers[5],
        })  # fmt: skip
    return rows


def case_of(values: Json) -> Json:
    """A case with everything filled in. Raises Refused for what makes no sense."""
    if not isinstance(values, dict):
        raise Refused("usage", "a case is %r, not an object" % (values,), "such as %s" % DEFAULT_CASES[0])
    case = dict(values)
    for name, value in case.items():
        if name not in CASE:
            raise Refused("usage", "a case has no %r: %s" % (name, values), "allowed: " + ", ".join(CASE))
        kind, most = CASE[name]
        if value is None and name not in NEEDED:
            continue
        if not accept.is_a(value, kind):
            raise Refused("usage", "%s of a case has the wrong type: %s" % (name, values), "correct it")
        if most and not 0 < value <= most:
            raise Refused(
                "usage", "%s must be above 0 and at most %d: %s" % (name, most, values), "correct it"
            )
    for name in NEEDED:
        if name not in case:
            raise Refused("usage", "a case needs %s, a number above 0: %s" % (name, values), "correct it")
    case["prompts"] = max(case["concurrency"], case.get("prompts") or 8 * case["concurrency"])
    warmups = case.get("warmups")
    case["warmups"] = max(case["concurrency"], case["concurrency"] if warmups is None else warmups)
    case["rate"] = case.get("rate")
    tokens = (case["prompts"] + case["warmups"]) * case["input"]
    if tokens > MOST_TOKENS:
        what = "the prompts of a case are %d tokens, at most %d are prepared" % (tokens, MOST_TOKENS)
        raise Refused("usage", what, "fewer or shorter prompts")
    rate = "" if case["rate"] is None else " at %g/s" % case["rate"]
    case["name"] = case.get("name") or "%d/%d x%d%s" % (
        case["input"], case["output"], case["concurrency"], rate,
    )  # fmt: skip
    return case


# --- sampling ----------------------------------------------------------------------------------------------


class Sampler:
    """Looks once a second at the GPUs and at the engine's queues, until it is told to stop."""

    def __init__(self, client: accept.Client, gpus: list[int] | None = None, every: float = 1.0) -> None:
        self.samples: list[Json] = []
        self.used = gpus
        self.every = every
        self.client = client
        self.tool = None if gpus == [] else shutil.which("nvidia-smi")
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """One sample a second; a look that takes longer is followed by the next one at once."""
        due = time.monotonic()
        while not self.over.is_set():
            sample: Json = {"at": time.monotonic()}
            page = metrics_now(self.client)
            if page is not None:
                for what in ("running", "waiting", "kv_usage"):
                    value = page.get(what)
                    if value is not None:
                        sample[what] = rounded(value)
            if self.tool:
                sample["gpus"] = self.gpus()
            self.samples.append(sample)
            due = max(due + self.every, time.monotonic())
            self.over.wait(max(0.0, due - time.monotonic()))

    def gpus(self) -> list[Json]:
        """What nvidia-smi says now of the GPUs in use; nothing when it does not answer."""
        argv = [str(self.tool), "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return []
        rows = parse_gpus(done.stdout.decode("utf-8", "replace"))
        return [row for row in rows if self.used is None or row["gpu"] in self.used]

    def stop(self) -> list[Json]:
        """End it; what it saw."""
        self.over.set()
        self.thread.join(15)
        return self.samples


def metrics_now(client: accept.Client) -> accept.Metrics | None:
    """The engine's counters now; None when it does not show them."""
    own = accept.Client(client.url, client.key)  # clients count their exchanges, and threads share nothing
    exchange = own.send("GET", "/metrics", seconds=10)
    return accept.parse_metrics(exchange.text) if exchange.status == 200 else None


# --- load --------------------------------------------------------------------------------------------------


def vllm_argv(
    parameters: Json, case: Json, seed: int, prefix: str, file: str, without: set[str]
) -> list[str]:
    """One run with the engine's own client. It holds no secret: the key is in its environment."""
    pairs: list[tuple[str, str | None]] = [
        ("--backend", "openai"),
        ("--base-url", parameters["base_url"]),
        ("--endpoint", "/v1/completions"),
        ("--model", parameters["tokenizer"]),
        ("--served-model-name", parameters["model"]),
        ("--tokenizer", parameters["tokenizer"]),
        ("--dataset-name", "random"),
        ("--num-prompts", str(case["prompts"])),
        ("--num-warmups", str(case["warmups"])),
        ("--random-input-len", str(case["input"])),
        ("--random-output-len", str(case["output"])),
        ("--ignore-eos", None),
        ("--temperature", "0"),
        ("--seed", str(seed)),
        ("--request-rate", "inf" if case["rate"] is None else "%g" % case["rate"]),
        ("--max-concurrency", str(case["concurrency"])),
        ("--percentile-metrics", ",".join(LATENCIES)),
        ("--metric-percentiles", ",".join(map(str, PERCENTILES))),
        ("--request-id-prefix", prefix),
        ("--save-result", None),
        ("--save-detailed", None),
        ("--result-dir", os.path.dirname(file)),
        ("--result-filename", os.path.basename(file)),
        ("--disable-tqdm", None),
    ]
    if parameters.get("tokenizer_mode"):
        pairs.append(("--tokenizer-mode", parameters["tokenizer_mode"]))
    if parameters.get("trust_remote_code"):
        pairs.append(("--trust-remote-code", None))
    argv = [parameters["vllm"], "bench", "serve"]
    for name, value in pairs:
        if name not in without:
            argv += [name] if value is None else [name, value]
    return argv


class Session:
    """One benchmark: its parameters, its client, and what was found out on the way."""

    def __init__(self, parameters: Json, key: str | None) -> None:
        self.parameters = parameters
        self.key = key
        self.client = accept.Client(parameters["base_url"], key)
        self.cases = [case_of(one) for one in parameters["cases"]]
        self.without: set[str] = set()
        self.own_client = not parameters.get("vllm")
        self.why_own = "" if parameters.get("vllm") else "the engine's environment has no benchmark client"
        self.folder = ""
        self.note = ""
        self.done = 0
        self.pool: list[int] = []

    # --- progress

    def say(self, note: str | None = None) -> None:
        """One progress line on stderr."""
        self.note = self.note if note is None else note
        total = len(self.cases) * self.parameters["runs"]
        accept.say({"phase": "bench", "done": self.done, "total": total, "unit": "runs", "note": self.note})

    # --- is the engine ours alone?

    def idle(self) -> accept.Metrics | None:
        """Wait until nothing runs or waits in the engine. Raises Refused when somebody keeps it busy."""
        end = time.monotonic() + self.parameters["patience"]
        while True:
            page = metrics_now(self.client)
            if page is None:
                self.alive()
                return None
            busy = (page.get("running") or 0) + (page.get("waiting") or 0)
            if not busy:
                return page
            if time.monotonic() > end:
                raise Refused(
                    "busy",
                    "%d requests of somebody else are in the engine" % busy,
                    "stop the other clients, then run it again",
                )
            time.sleep(0.2)

    def alive(self) -> None:
        """Raises Refused when the engine does not answer at all."""
        exchange = self.client.send("GET", "/v1/models", seconds=20)
        if exchange.status is None:
            raise Refused(
                "down", "the engine does not answer: %s" % exchange.error, "start it: rackwright start"
            )
        if exchange.status in (401, 403):
            raise Refused("key", "the engine refuses the key", "give the key file that it was started with")

    def log_end(self) -> str:
        """The end of the engine's log; empty where there is none."""
        script = self.parameters.get("log_script")
        return (accept.log_end(script) or "") if script else ""

    # --- one run

    def run(self, case: Json, seed: int) -> Json:
        """Drive one run of a case and judge it."""
        before = self.idle()
        log = self.log_end()
        prefix = "rackwright-%s-" % uuid.uuid4().hex[:8]
        sampler = Sampler(self.client, self.parameters.get("gpus"))
        began = time.time()
        try:
            if self.own_client:
                raw, command, failure = self.drive_own(case, seed, prefix)
            else:
                raw, command, failure = self.drive_vllm(case, seed, prefix)
        finally:
            samples = sampler.stop()
        sent = self.sent(case)
        figures = figures_of(raw) if raw else {}
        why = [failure] if failure else problems_of(raw, case, figures)
        after = self.settled(before, sent) if before else None
        if before and after:
            why += [] if failure else served_problems(sent, before, after)
            figures.update(mechanisms(before, after))
        compiled = [line for line in accept.new_lines(log, self.log_end()) if accept.COMPILED.search(line)]
        span = span_of(raw) if raw else None
        self.add_energy(figures, samples, span)
        first = span[0] if span else samples[0]["at"] if samples else 0.0
        return {
            "seed": seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "valid": not why and not compiled,
            "cold": bool(compiled),
            "why": why + (["%d kernels were compiled in this run" % len(compiled)] if compiled else []),
            "notes": notes_of(raw, figures) + ([] if sent == case else [NO_WARMUPS]),
            "figures": {name: rounded(value) for name, value in figures.items()},
            "command": command,
            "samples": thinned([
                {**s, "at": round(s["at"] - first, 1)} for s in samples if around(s["at"], span)
            ]),
        }  # fmt: skip

    def sent(self, case: Json) -> Json:
        """The case as its client sends it: older versions of the engine's know no warm-ups."""
        cold = not self.own_client and "--num-warmups" in self.without
        return {**case, "warmups": 0} if cold else case

    def settled(self, before: accept.Metrics, case: Json) -> accept.Metrics | None:
        """Counters after a run: nothing outstanding, and the last answers counted."""
        asked = case["prompts"] + case["warmups"]
        end = time.monotonic() + min(3.0, self.parameters["patience"])
        while True:
            page = self.idle()
            if page is None or time.monotonic() > end:
                return page
            served = accept.moved(before, page, "finished")
            if served is None or served >= asked:
                return page
            time.sleep(0.2)

    @staticmethod
    def add_energy(figures: dict[str, float], samples: list[Json], span: tuple[float, float] | None) -> None:
        """Tokens a second and GPU, joules a token, and the highest GPU memory, where GPUs were seen."""
        gpus = max((len(sample.get("gpus") or []) for sample in samples), default=0)
        if not gpus:
            return
        if "output_tokens_per_second" in figures:
            figures["output_tokens_per_second_per_gpu"] = figures["output_tokens_per_second"] / gpus
        memory = [gpu["memory_mib"] for s in samples for gpu in s.get("gpus") or [] if gpu["memory_mib"]]
        if memory:
            figures["gpu_memory_peak_mib"] = max(memory)
        joules = energy_of(samples, span)
        if joules is not None and figures.get("output_tokens"):
            figures["joules_per_output_token"] = joules / figures["output_tokens"]

    def drive_vllm(self, case: Json, seed: int, prefix: str) -> tuple[Json, list[str], str | None]:
        """One run of `vllm bench serve`: its detailed result, its command, and why it failed."""
        while True:
            file = os.path.join(self.folder, "run.json")
            if os.path.exists(file):
                os.unlink(file)
            argv = vllm_argv(self.parameters, case, seed, prefix, file, self.without)
            env = {**os.environ, **({"OPENAI_API_KEY": self.key} if self.key else {})}
            rc, said = self.child(argv, env)
            unknown = UNKNOWN_FLAGS.search(said)
            drop = {f for f in OPTIONAL if unknown and f in unknown.group(1)} - self.without
            if not drop:
                break
            self.without |= drop
            accept.TELL.line("this version of the client does not know %s" % ", ".join(sorted(drop)))
        raw = read_json(file)
        if rc == 0 and raw:
            return raw, argv, None
        if rc in (2, 127) and not self.done and not unknown:
            self.own_client = True
            self.why_own = "the engine's command has no benchmark: " + (last_line(said) or "no word")
            accept.TELL.line(self.why_own)
            return self.drive_own(case, seed, prefix)
        what = last_line(said) or "no word"
        return {}, argv, "the client ended with %s: %s" % ("a time-out" if rc is None else rc, what)

    def child(self, argv: list[str], env: dict[str, str]) -> tuple[int | None, str]:
        """Run a command to its end, with progress now and then: its exit code (None: too long) and words."""
        log = os.path.join(self.folder, "client.log")
        with open(log, "wb") as stream:
            try:
                process = subprocess.Popen(
                    argv, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=env
                )
            except OSError as error:
                return 127, str(error)
            started = said = time.monotonic()
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    now = time.monotonic()
                    if now - said > 8:
                        said = now
                        self.say()
                    if now - started > self.parameters["limit"]:
                        return None, "longer than %.0f s" % self.parameters["limit"]
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        with open(log, "rb") as stream:
            return process.returncode, stream.read()[-20000:].decode("utf-8", "replace")

    def drive_own(self, case: Json, seed: int, prefix: str) -> tuple[Json, list[str], str | None]:
        """The same protocol with the client of this file, in the same shape of result."""
        if not self.pool:
            self.pool = token_pool(self.client, self.parameters["model"])
        load = OwnLoad(self, case, seed, prefix)
        command = [
            "bench.py", "--base-url", self.parameters["base_url"], "--model", self.parameters["model"],
            "--case", "%d/%dx%d" % (case["input"], case["output"], case["concurrency"]), "--seed", str(seed),
        ]  # fmt: skip
        return load.drive(), command, None


class OwnLoad:
    """A client for engines that bring none: fixed lengths, streamed, the arrival times of all tokens."""

    def __init__(self, session: Session, case: Json, seed: int, prefix: str) -> None:
        self.session = session
        self.case = case
        self.ids = ("%s%d" % (prefix, number) for number in itertools.count())
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.results: list[Json] = []

    def body(self) -> Json:
        """One request: a random prompt of just the right length, as token ids where the engine takes them."""
        pool, count = self.session.pool, self.case["input"]
        prompt: Any = [self.random.choice(pool) for _ in range(count)] if pool else (
            " ".join(self.random.choice(WORDS.split()) for _ in range(count))
        )  # fmt: skip
        return {
            "model": self.session.parameters["model"], "prompt": prompt, "max_tokens": self.case["output"],
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def drive(self) -> Json:
        """Warm-ups, then all requests; the raw result."""
        self.spread([self.body() for _ in range(self.case["warmups"])], None)
        self.results = []
        bodies = [self.body() for _ in range(self.case["prompts"])]
        began = time.monotonic()
        self.spread(bodies, self.case["rate"])
        rows = sorted(self.results, key=lambda row: float(row["start"]))
        return {
            "duration": time.monotonic() - began,
            "input_lens": [row["input"] for row in rows],
            "output_lens": [row["output"] for row in rows],
            "ttfts": [row["ttft"] for row in rows],
            "itls": [row["itl"] for row in rows],
            "latencies": [row["latency"] for row in rows],
            "start_times": [row["start"] for row in rows],
            "errors": [row["error"] for row in rows],
        }

    def spread(self, bodies: list[Json], rate: float | None) -> None:
        """Send all bodies, at most `concurrency` at a time; with a rate, at random moments of that mean."""
        waiting: queue.Queue[tuple[float, Json] | None] = queue.Queue()
        moment = time.monotonic()
        for body in bodies:
            if rate:
                moment += self.random.expovariate(rate)
            waiting.put((moment, body))
        workers = [
            threading.Thread(target=self.work, args=(waiting,), daemon=True)
            for _ in range(self.case["concurrency"])
        ]
        for worker in workers:
            waiting.put(None)
            worker.start()
        said = time.monotonic()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.05)
            if time.monotonic() - said > 8:
                said = time.monotonic()
                self.session.say()

    def work(self, waiting: queue.Queue[tuple[float, Json] | None]) -> None:
        """Take requests until there are none."""
        while True:
            item = waiting.get()
            if item is None:
                return
            due, body = item
            time.sleep(max(0.0, due - time.monotonic()))
            with self.lock:
                name = next(self.ids)
            row = self.ask(body, name)
            with self.lock:
                self.results.append(row)

    def ask(self, body: Json, name: str) -> Json:
        """One streamed request; the engine's log calls it by this name."""
        client = accept.Client(self.session.parameters["base_url"], self.session.key)
        times: list[float] = []
        usage: Json = {}
        error: list[str] = []

        def consume(lines: Iterator[tuple[float, bytes]]) -> None:
            for event in accept.events_of(lines, error):
                if event.data == "[DONE]":
                    continue
                chunk = accept.loads(event.data)
                if accept.error_in(chunk):
                    error.append(str(accept.error_in(chunk)))
                usage.update(chunk.get("usage") or {})
                if chunk.get("choices"):
                    times.append(event.at)

        start = time.monotonic()
        limit = self.session.parameters["limit"]
        exchange = client.send("POST", "/v1/completions", body, seconds=limit, each_line=consume, name=name)
        if exchange.status != 200:
            said = accept.error_in_text(exchange.text)
            error.append(exchange.error or "status %s: %s" % (exchange.status, said))
        elif exchange.error:
            error.append(exchange.error)
        made = int(usage.get("completion_tokens") or len(times))
        return {
            "start": start, "ttft": times[0] if times else 0.0,
            "itl": [times[i] - times[i - 1] for i in range(1, len(times))],
            "latency": times[-1] if times else 0.0,
            "input": int(usage.get("prompt_tokens") or self.case["input"]),
            "output": 0 if error else made, "error": error[0] if error else "",
        }  # fmt: skip


def last_line(text: str) -> str:
    """The last words of a program."""
    lines = [line for line in map(accept.plain, text.splitlines()) if line]
    return lines[-1][:300] if lines else ""


def token_pool(client: accept.Client, model: str) -> list[int]:
    """Harmless token ids of this model, from /tokenize; empty where the engine has none."""
    exchange, value = client.json("POST", "/tokenize", {"model": model, "prompt": WORDS})
    tokens = value.get("tokens") if isinstance(value, dict) and exchange.status == 200 else None
    return sorted(set(tokens)) if isinstance(tokens, list) else []


def read_json(path: str) -> Json:
    """A JSON object from a file; empty when there is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def others_running() -> list[tuple[int, str]]:
    """Processes of other benchmarks on this host, as (pid, words of its command).

    In another container they are another host's: what they ask of our engine, its counters tell.
    """
    mine = {os.getpid(), os.getppid()}
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        pid = int(path.split("/")[2])
        try:
            with open(path, "rb") as stream:
                words = stream.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if pid not in mine and is_benchmark(words) and is_of_this_host(pid):
            found.append((pid, name_of(words)))
    return found


def is_of_this_host(pid: int) -> bool:
    """Whether a process belongs to the same process namespace; one that cannot be asked may."""
    try:
        return os.readlink("/proc/%d/ns/pid" % pid) == os.readlink("/proc/self/ns/pid")
    except OSError:
        return True


def name_of(words: list[str]) -> str:
    """A benchmark's command without its options: they may hold a key."""
    options = (i for i, word in enumerate(words) if word.startswith("--"))
    return " ".join(words[: min(4, next(options, 4))])


def is_benchmark(words: list[str]) -> bool:
    """Whether a command line is a load generator: `vllm bench serve`, this program, or the usual others."""
    names = [os.path.basename(word) for word in words[:4]]
    pairs = [tuple(names[i : i + 2]) for i in range(len(names))]
    if ("bench", "serve") in pairs or ("-m", "sglang.bench_serving") in pairs:
        return True
    program = next((n for n in names[:2] if n and not n.startswith(("python", "-"))), "")
    return program in ("bench.py", "benchmark_serving.py", "guidellm", "genai-perf")


def benchmark(session: Session) -> Json:
    """All cases, `runs` times each, round by round so that a slow hour hits all of them alike."""
    parameters = session.parameters
    rivals = others_running()
    if rivals:
        pid, words = rivals[0]
        raise Refused(
            "rival", "another benchmark runs here: pid %d (%s)" % (pid, words), "end it: kill %d" % pid
        )
    session.alive()
    began, started = time.time(), time.monotonic()
    runs: dict[str, list[Json]] = {case["name"]: [] for case in session.cases}
    commands: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="rackwright-bench-", dir=parameters.get("folder")) as folder:
        session.folder = folder
        for turn in range(parameters["runs"]):
            for place, case in enumerate(session.cases):
                session.say("%s, run %d of %d" % (case["name"], turn + 1, parameters["runs"]))
                for repeat in range(1 + REPEATS):
                    # seeds far apart: neighbours share prompts (vLLM's random data counts up from an offset)
                    seed = parameters["seed"] + 7919 * (turn * len(session.cases) + place) + 104729 * repeat
                    run = session.run(case, seed)
                    commands.setdefault(case["name"], run["command"])
                    del run["command"]
                    runs[case["name"]].append(run)
                    if not run["cold"]:
                        break
                session.done += 1
    rows = []
    for case in session.cases:
        mine = runs[case["name"]]
        median, spread = summary_of(mine)
        counted = sum(run["valid"] for run in mine)
        rows.append({
            **case, "counted": counted, "command": commands[case["name"]], "median": median,
            "spread": spread, "runs": mine,
        })  # fmt: skip
    session.say("done")
    short = [row for row in rows if row["counted"] < parameters["runs"]]
    why = [
        "%s: %d of %d runs count%s"
        % (row["name"], row["counted"], parameters["runs"], "".join(": " + w for w in reasons_of(row)[:1]))
        for row in short
    ]
    result: Json = accept.redact({
        "verdict": "fail" if short else "pass",
        "why": "; ".join(why) or None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.monotonic() - started, 1),
        "client": "rackwright" if session.own_client else "vllm bench serve",
        "why_client": session.why_own or None,
        "without_flags": sorted(session.without),
        "dataset": "random tokens of fixed length, end token ignored, temperature 0",
        "seed": parameters["seed"],
        "runs": parameters["runs"],
        "engine_version": engine_version(session.client),
        "cases": rows,
    }, session.key)  # fmt: skip
    return result


def reasons_of(row: Json) -> list[str]:
    """Why runs of a case do not count."""
    return [why for run in row["runs"] if not run["valid"] for why in run["why"]]


def engine_version(client: accept.Client) -> str | None:
    """What the engine calls its version; None when it does not say."""
    exchange, value = client.json("GET", "/version")
    said = value.get("version") if exchange.status == 200 and isinstance(value, dict) else None
    return None if said is None else str(said)


# --- command line ------------------------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "base_url": str, "model": str, "api_key_file": (str, type(None)), "tokenizer": (str, type(None)),
    "tokenizer_mode": (str, type(None)), "trust_remote_code": bool, "vllm": (str, type(None)), "cases": list,
    "runs": int, "seed": int, "gpus": (list, type(None)), "log_script": (str, type(None)),
    "patience": (int, float),
    "limit": (int, float), "folder": (str, type(None)),
}  # fmt: skip
MOST = {"runs": 1000, "patience": 86_400, "limit": 604_800}  # seconds, but for runs
DEFAULTS: dict[str, Any] = {
    "cases": list(DEFAULT_CASES), "runs": 3, "seed": 0, "patience": 60.0, "limit": 3600.0,
}  # fmt: skip


def parameters_from(values: Json) -> Json:
    """Validated parameters. Raises Refused naming the mistake."""
    for name, value in values.items():
        if name not in TYPES:
            raise Refused("usage", "unknown parameter %r" % name, "allowed: " + ", ".join(TYPES))
        if not accept.is_a(value, TYPES[name]):
            raise Refused("usage", "%s is %r, which has the wrong type" % (name, value), "correct it")
        if name in MOST and not 0 < value <= MOST[name]:
            raise Refused("usage", "%s must be above 0 and at most %d" % (name, MOST[name]), "correct it")
    for name in ("base_url", "model"):
        if not values.get(name):
            raise Refused("usage", "%s is missing" % name, "give it")
    if values.get("vllm") and not values.get("tokenizer"):
        raise Refused("usage", "the engine's client needs tokenizer, the folder of the model", "give it")
    found = {**DEFAULTS, **values}
    gpus = found.get("gpus")
    if gpus is not None and not all(type(one) is int for one in gpus):
        raise Refused("usage", "gpus is %r, not a list of indices" % gpus, "such as [0, 1]")
    if not found["cases"]:
        raise Refused("usage", "at least one case is needed", "correct it")
    names = [case_of(case)["name"] for case in found["cases"]]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise Refused("usage", "two cases are called %s" % ", ".join(sorted(twice)), "name them apart")
    return found


def case_from(text: str) -> Json:
    """A case from INPUT/OUTPUTxCONCURRENCY."""
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
    if not found:
        raise Refused("usage", "--case %s is not INPUT/OUTPUTxCONCURRENCY" % text, "such as 128/64x8")
    return {name: int(value) for name, value in zip(("input", "output", "concurrency"), found.groups())}


def indices(text: str) -> list[int]:
    """GPUs from N,N."""
    return [int(one) for one in text.split(",")]


def values_from(argv: list[str]) -> tuple[Json, bool]:
    """The parameters, and whether JSON was asked for."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description="Benchmark a running endpoint, with reasons not to believe the figures.",
        epilog="exit codes: 0 every case has all its runs, 1 not, 2 wrong usage",
    )  # fmt: skip
    parser.add_argument("--stdin", action="store_true", help="parameters as one JSON object on stdin")
    parser.add_argument("--base-url", metavar="URL", help="http://HOST:PORT")
    parser.add_argument("--model", metavar="NAME", help="served model name")
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the API key")
    parser.add_argument("--vllm", metavar="COMMAND", help="the engine's own client; absent: the built-in one")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the model's folder, for the engine's client")
    parser.add_argument("--case", metavar="IN/OUTxC", action="append", help="such as 128/64x8; repeatable")
    parser.add_argument(
        "--gpus", metavar="N,N", type=indices, help="those in use, such as 0,1 (default: all)"
    )
    parser.add_argument("--runs", type=int, default=3, help="of every case (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    given = parser.parse_args(argv)
    if given.stdin:
        try:
            values = accept.loads(sys.stdin.read())
        except ValueError as error:
            raise Refused("usage", "stdin is no JSON: %s" % error, "give one JSON object") from None
        if not isinstance(values, dict):
            raise Refused("usage", "stdin must be one JSON object", "give one JSON object")
        return values, True
    values = {
        name: value
        for name, value in vars(given).items()
        if value is not None and name not in ("stdin", "case")
    }
    if given.case:
        values["cases"] = [case_from(text) for text in given.case]
    return values, False


def table(result: Json) -> str:
    """The result for people: median and spread of the figures that matter."""
    shown = ("output_tokens_per_second", "ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "e2el_p95_ms")
    lines = ["%-16s %5s  %s" % ("case", "runs", "  ".join("%-26s" % name for name in shown))]
    for row in result["cases"]:
        cells = [
            "%-26s" % ("%.4g (%.4g to %.4g)" % (row["median"][name], *row["spread"][name]))
            if name in row["median"] else "%-26s" % "-"
            for name in shown
        ]  # fmt: skip
        lines.append("%-16s %2d/%-2d  %s" % (row["name"], row["counted"], result["runs"], "  ".join(cells)))
        notes = dict.fromkeys(note for run in row["runs"] for note in run.get("notes", []))
        lines += ["    " + accept.plain(words) for words in (*reasons_of(row), *notes)]
    why = ": " + accept.plain(result["why"]) if result["why"] else ""
    lines.append(result["verdict"].upper() + why)
    return "\n".join(lines)


def main(argv: list[str], show: Callable[[str], None] = print) -> int:
    """Parse, run, print; returns the exit code."""
    try:
        values, as_json = values_from(argv)
        parameters = parameters_from(values)
        key = accept.read_key(parameters.get("api_key_file"))
        session = Session(parameters, key)
    except (Refused, accept.Usage, ValueError) as error:
        document = getattr(error, "error", {"id": "usage", "what": str(error), "fix": "correct it"})
        document = accept.redact(document, None)
        sys.stderr.write("bench.py: %s\n" % document["what"])
        show(json.dumps({"error": document}, ensure_ascii=False))
        return 2
    accept.TELL.people = not as_json
    try:
        result = benchmark(session)
    except Refused as refused:
        accept.TELL.line("bench.py: " + accept.plain(str(refused)))
        show(json.dumps({"error": refused.error}, ensure_ascii=False))
        return 1
    show(json.dumps(result, ensure_ascii=False) if as_json else table(result))
    return 0 if result["verdict"] == "pass" else 1


if __name__ == "__main__":
    accept.end(main)
