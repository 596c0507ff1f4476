"""Phases of a start, read from recorded logs of real engines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasks.onhost import startup_log as log

FIXTURES = Path(__file__).parents[2] / "fixtures"
OURS, PUBLIC = FIXTURES / "startup", FIXTURES / "public" / "E-vllm-log"


def recorded(path: Path) -> str:
    with path.open(newline="") as file:
        return file.read()


@pytest.mark.parametrize(
    ("path", "phase", "progress"),
    [
        (OURS / "cpu-eager-v0.32.log", "ready", (0, 0, "")),
        (OURS / "cpu-compile-ngram-v0.32.log", "ready", (0, 0, "")),
        (OURS / "cold-eager-compiling.log", "compiling", (0, 0, "")),
        (OURS / "mtp2-cudagraph-compiling.log", "compiling", (0, 0, "")),
        (OURS / "deepgemm-warmup.log", "warming up kernels", (988, 1153, "kernels")),
        (OURS / "dummy-weights-assertion.log", "measuring memory", (0, 0, "")),
        (PUBLIC / "startup-dsv4-flash-v0.21.log", "ready", (0, 0, "")),
        (PUBLIC / "sm120-8x-startup-and-serving-v0.20.log", "ready", (0, 0, "")),
        (PUBLIC / "nccl-hang-shm-broadcast.log", "connecting workers", (0, 0, "")),
    ],
)
def test_the_phase_of_a_recorded_start_is_recognised(
    path: Path, phase: str, progress: tuple[int, int, str]
) -> None:
    reading = log.read(recorded(path))
    assert (reading.phase, (reading.done, reading.total, reading.unit)) == (phase, progress)


def test_the_phases_of_a_gpu_start_come_in_the_engine_s_order() -> None:
    seen = log.read(recorded(PUBLIC / "startup-dsv4-flash-v0.21.log")).seen
    assert seen == (
        "starting the engine core",
        "connecting workers",
        "loading weights",
        "measuring memory",
        "compiling",
        "making the KV cache",
        "warming up kernels",
        "capturing CUDA graphs",
        "opening the port",
        "ready",
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("50% Completed | 2/4", ("loading weights", 2, 4, "shards")),
        ("40%|████      | 2/5", ("capturing CUDA graphs", 2, 5, "graphs")),
        ("75%|███████▌  | 3/4", ("capturing CUDA graphs", 3, 4, "graphs")),
    ],
)
def test_progress_is_counted_while_it_happens(after: str, expected: tuple[str, int, int, str]) -> None:
    whole = recorded(PUBLIC / "startup-dsv4-flash-v0.21.log")
    reading = log.read(whole[: whole.index(after) + len(after)])
    assert (reading.phase, reading.done, reading.total, reading.unit) == expected


def test_the_second_bar_of_a_draft_model_is_the_one_that_counts() -> None:
    whole = recorded(PUBLIC / "sm120-8x-startup-and-serving-v0.20.log")
    second = whole.index("18% Completed", whole.index("Loading drafter model"))
    reading = log.read(whole[: second + 30])
    assert (reading.phase, reading.done, reading.total, reading.note) == (
        "loading weights",
        2,
        11,
        "draft model",
    )


def test_the_kernel_being_compiled_is_named() -> None:
    reading = log.read(recorded(OURS / "cold-eager-compiling.log"))
    assert reading.note == "kernel 3: mhc_pre_big_fuse_with_norm_tilelang"


def test_figures_of_the_start_are_read() -> None:
    facts = log.read(recorded(PUBLIC / "startup-dsv4-flash-v0.21.log")).facts
    assert facts == {
        "weights_gib": 73.52,
        "load_seconds": 86.52,
        "kv_cache_tokens": 81623,
        "kv_cache_gib": 29.1,
        "most_requests": 4.98,
        "compile_seconds": 18.03,
        "graph_seconds": 4,
    }


@pytest.mark.parametrize("path", sorted([*OURS.glob("*.log"), *PUBLIC.glob("*.log")]), ids=lambda p: p.stem)
def test_a_log_cut_anywhere_is_read_and_never_goes_further_than_the_whole(path: Path) -> None:
    whole = recorded(path)
    seen = set(log.read(whole).seen)
    for end in range(0, len(whole), max(1, len(whole) // 40)):
        reading = log.read(whole[:end])
        assert set(reading.seen) <= seen | {"starting"}
        assert reading.done <= reading.total


def test_only_the_newest_start_counts() -> None:
    text = (
        "rackwright: start 1\nApplication startup complete.\nrackwright: start 2\nStarting to load model /m"
    )
    assert log.read(log.this_start(text)).phase == "loading weights"
    assert log.this_start("no mark") == "no mark"


def test_what_is_compiled_after_ready_is_counted_and_is_no_phase() -> None:
    text = recorded(PUBLIC / "startup-dsv4-flash-v0.21.log")
    ready = text.index("Application startup complete")
    assert log.compiles(text) > log.compiles(text[:ready]) > 0
    assert log.compiles(recorded(OURS / "cpu-eager-v0.32.log")) == 0


@pytest.mark.parametrize(
    "line",
    [
        "Triton kernel JIT compilation during inference: _fwd_kernel",
        "autotuning during inference",
        "TileLang begins to compile kernel `mhc`",
        "Triton autotuning for function _attn finished",
        "[Autotuner]: Autotuning process starts ...",
        "Compiling a graph for compile range (1, 8192) takes 3 s",
    ],
)
def test_every_kind_of_late_compilation_counts_for_status_s_awk_too(line: str) -> None:
    assert log.compiles(line) == 1
    assert log.compiles("10 JIT compilations during inference will be logged as warnings") == 0
    awk = subprocess.run(
        ["awk", f"/{log.COMPILES.pattern}/ {{ n++ }} END {{ print n + 0 }}"],
        input=line + "\n",
        capture_output=True,
        text=True,
    )
    assert awk.stdout == "1\n"


def test_tidy_lines_keep_one_step_of_a_bar_and_lose_colours_and_empty_frames() -> None:
    text = (
        "(APIServer pid=1) INFO 05-22 20:45:32 [utils.py:306] \n\x1b[31mred\x1b[0m\r"
        "DeepGEMM warmup:   0%| | 0/9\rDeepGEMM warmup:  50%| | 4/9\r\n\n"
        "(EngineCore pid=2) ERROR 11-30 03:09:26 [core.py:1330]        ^^^^^^\nlast"
    )
    assert log.tidy(text) == ["red", "DeepGEMM warmup:  50%| | 4/9", "last"]
