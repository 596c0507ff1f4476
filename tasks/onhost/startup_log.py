"""What an engine's log says about its start: the phase it is in, how far, and what it found. Pure.

Read by `bring_up.py` on hosts and by the controller. The forms were taken from logs of vLLM 0.20 to 0.32
(recordings with their sources in tests/fixtures/startup). Carriage returns count as line ends, and pieces
of several processes glued into one line are found as well: patterns are searched, not matched.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# `start-engine.sh` writes this line first, so that one start can be told from the one before it.
START = re.compile(r"rackwright: start (\d+)")


class Phase(NamedTuple):
    """A part of the start: how people call it, the seconds it may take, and what shows that it began."""

    name: str
    seconds: int
    signs: Any


def _signs(*patterns: str) -> Any:
    return re.compile("|".join(patterns))


# In the usual order; an engine may go back (a draft model is loaded after the main one was).
PHASES = (
    Phase("starting", 600, START),
    Phase("waiting for GPU memory", 120, _signs(r"rackwright: waiting for GPU memory")),
    Phase("starting the engine core", 600, _signs(r"Initializing a V1 LLM engine")),
    # the first collective operation; a hang here is NCCL's (see the catalogue of known failures)
    Phase("connecting workers", 300, _signs(r"distributed_init_method=", r"vLLM is using nccl")),
    Phase("loading weights", 2400, _signs(
        r"Starting to load model", r"Loading drafter model",
        r"Loading safetensors [^:\r\n]*:\s+\d+% Completed",
    )),
    Phase("measuring memory", 1200, _signs(
        r"Model loading took", r"Initial profiling/warmup run", r"Profiling CUDA graph memory",
    )),
    Phase("compiling", 3600, _signs(
        r"Dynamo bytecode transform", r"Compiling a graph for", r"TileLang begins to compile kernel",
        r"Warming up model for the compilation", r"Compiling model again", r"saved AOT compiled function",
    )),
    Phase("making the KV cache", 600, _signs(r"(?:GPU|CPU) KV cache size: [\d,]+ tokens")),
    Phase("warming up kernels", 3600, _signs(
        r"DeepGEMM warmup:\s+\d+%", r"Warming up DeepSeek V4", r"Autotuning process starts",
        r"Compile and warming up model for size",
    )),
    Phase("capturing CUDA graphs", 1200, _signs(r"Capturing CUDA graphs? ?[^:\r\n]{0,60}:\s+\d+%")),
    Phase("opening the port", 300, _signs(r"Starting vLLM server on", r"Started server process")),
    Phase("ready", 300, _signs(r"Application startup complete")),
)  # fmt: skip
# Not in the log: what the watcher itself does.
WARM_UP = "warm-up requests"

_COUNTS = (
    ("shards", re.compile(r"Loading safetensors [^:\r\n]*:\s+\d+% Completed \| (\d+)/(\d+)")),
    ("kernels", re.compile(r"DeepGEMM warmup:\s+\d+%\|[^|\r\n]*\| (\d+)/(\d+)")),
    ("graphs", re.compile(r"Capturing CUDA graphs? ?[^:\r\n]{0,60}:\s+\d+%\|[^|\r\n]*\| (\d+)/(\d+)")),
)
_UNIT_OF = {"loading weights": "shards", "warming up kernels": "kernels", "capturing CUDA graphs": "graphs"}
_FACTS = (
    ("weights_gib", re.compile(r"Model loading took ([\d.]+) GiB")),
    ("load_seconds", re.compile(r"Loading weights took ([\d.]+) seconds")),
    ("kv_cache_tokens", re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")),
    ("kv_cache_gib", re.compile(r"Available KV cache memory: ([\d.]+) GiB")),
    ("most_requests", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")),
    ("compile_seconds", re.compile(r"torch\.compile took ([\d.]+) s")),
    ("graph_seconds", re.compile(r"Graph capturing finished in (\d+) secs")),
)
_KERNEL = re.compile(r"TileLang begins to compile kernel `([^`]+)`")
# Kernels compiled while a request waits (vLLM's jit_monitor, TileLang, FlashInfer's tuner, Triton's),
# in words that awk reads too (tasks/status.py).
COMPILES = re.compile(
    r"(JIT compilation|[Aa]utotun[a-z]+|compile) during inference|TileLang begins to compile"
    r"|Triton autotuning for|Autotuning process starts|Compiling a graph for compile range"
)

_FRAME = re.compile(r"^\([\w .=-]+\)(?: (?:DEBUG|INFO|WARNING|ERROR) [\d :-]+ \[[^\]]*\])?")


class Reading(NamedTuple):
    """How far a start is. `done` of `total` `unit`s, or 0 of 0; `note` is a detail; `facts` are figures."""

    phase: str
    done: int
    total: int
    unit: str
    note: str
    seen: tuple[str, ...]
    facts: dict[str, float]


def this_start(text: str) -> str:
    """The part of a log that the newest start wrote; all of it where no start is marked."""
    marks = list(START.finditer(text))
    return text[marks[-1].start() :] if marks else text


def read(text: str) -> Reading:
    """The state of one start, from what it has written so far."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for phase in PHASES:
        for found in phase.signs.finditer(text):
            first.setdefault(phase.name, found.start())
            last[phase.name] = found.start()
    name = max(last, key=lambda key: last[key]) if last else PHASES[0].name
    if "ready" in last:
        name = "ready"  # what is compiled later is not the start any more
    seen = tuple(sorted(first, key=lambda key: first[key])) or (name,)
    done = total = 0
    unit = _UNIT_OF.get(name, "")
    for kind, pattern in _COUNTS:
        if kind == unit:
            done, total = _last_pair(pattern, text, last[name])
    return Reading(name, done, total, unit if total else "", _note(name, text), seen, _facts(text))


def _last_pair(pattern: Any, text: str, near: int) -> tuple[int, int]:
    # several bars may follow each other (main model, then draft): the newest one counts
    pairs = list(pattern.finditer(text, max(0, near - 4000)))
    return (int(pairs[-1].group(1)), int(pairs[-1].group(2))) if pairs else (0, 0)


def _note(phase: str, text: str) -> str:
    if phase == "loading weights":
        return "draft model" if "Loading drafter model" in text else ""
    if phase == "compiling":
        kernels = _KERNEL.findall(text)
        return "kernel %d: %s" % (len(kernels), kernels[-1]) if kernels else ""
    return ""


def _facts(text: str) -> dict[str, float]:
    found = {}
    for name, pattern in _FACTS:
        match = pattern.search(text)
        if match:
            found[name] = float(match.group(1).replace(",", ""))
    return found


def compiles(text: str) -> int:
    """Messages of kernels compiled."""
    return len(COMPILES.findall(text))


def tidy(text: str) -> list[str]:
    """The log's lines without empty ones, colours, and all but the last step of each progress bar."""
    out: list[str] = []
    bar = ""
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "\n").split("\n"):
        line = line.rstrip()
        if not _FRAME.sub("", line).strip(" ^~"):
            continue  # the frame of a line without a line, or what underlines a line of a traceback
        match = re.match(r"\s*([A-Z][\w ,()-]*):\s+\d+%", line)
        if match and match.group(1) == bar:
            out[-1] = line
            continue
        bar = match.group(1) if match else ""
        out.append(line)
    return out
