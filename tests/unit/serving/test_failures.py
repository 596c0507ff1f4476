"""Known failures: each message is answered with its own cause, and healthy logs with none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.failures import catalogue, recognise, root_cause, telling_lines
from tasks.onhost.startup_log import tidy

FIXTURES = Path(__file__).parents[2] / "fixtures"
OURS, PUBLIC = FIXTURES / "startup", FIXTURES / "public" / "E-vllm-log"

# Messages as the programs print them (sources in the catalogue), in the frame of a worker's log line.
MESSAGES = {
    "port-not-permitted": "PermissionError: [Errno 13] error while attempting to bind on address"
    " ('127.0.0.1', 80): permission denied",
    "port-taken": "OSError: [Errno 98] Address already in use",
    "memory-held": "ValueError: Free memory on device cuda:1 (61/95 GiB) on startup is less than desired GPU"
    " memory utilization (0.92, 87.37 GiB).",
    "kv-cache-too-small": "ValueError: No available memory for the cache blocks. Try increasing it.",
    "out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "host-memory": "OSError: [Errno 12] Cannot allocate memory",
    "shm-too-small": "ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-a1 (size 57)",
    "flashinfer-mismatch": "RuntimeError: flashinfer-cubin version (1) does not match flashinfer version (2)",
    "flashinfer-too-old": "TypeError: trtllm_batch() got an unexpected keyword argument 'swa_topk_lens'",
    "dspark-kernels": "RuntimeError: num_tokens > 64 (5 vs. 64)",
    "no-compiler": "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
    "no-host-compiler": "RuntimeError: Failed to find C compiler. Please specify via CC.",
    "ptxas-too-old": "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    "unsupported-architecture": "CUDA error: no kernel image is available for execution on the device",
    "driver-too-old": "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
    "driver-gone": "RuntimeError: No CUDA GPUs are available",
    "cuda-library-missing": "ImportError: libcudart.so.13: cannot open shared object file: No such file",
    "nccl-error": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled",
    "wrong-speculative-checkpoint": "KeyError: 'model.layers.43.mtp_block.main_norm.weight'",
    "dspark-block-size": "ValueError: num_speculative_tokens (3) is below dspark_block_size (5).",
    "graph-capture": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "fp8-on-cpu": "ValueError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX",
    "cpu-attention": "NotImplementedError: Unsupported CPU attention configuration: head_dim=16",
    "numa-threads": "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPU workers.",
    "cutlass-path": "ModuleNotFoundError: No module named 'cutlass'",
    "dummy-weights": "    assert self.hc_attn_fn_broadcast is not None",
    "weights-incomplete": "ValueError: There is no module or parameter named 'x' in Qwen2ForCausalLM",
    "no-model": "ValueError: Invalid repository ID or local directory specified: '/models/x'",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "not-permitted": "PermissionError: [Errno 13] Permission denied: '/root/x'",
    "unknown-flag": "vllm: error: unrecognized arguments: --swap-space 4",
}


@pytest.mark.parametrize(("expected", "message"), MESSAGES.items())
def test_each_message_is_answered_with_its_own_cause(expected: str, message: str) -> None:
    frame = "(Worker_TP1 pid=2750) ERROR 10-12 03:44:09 [multiproc_executor.py:694] "
    found = recognise([frame + "WorkerProc failed to start.", frame + message])
    assert found is not None
    assert found.failure.id == expected
    assert found.lines == (frame + message,)


def test_every_entry_has_a_cause_a_fix_and_a_source_and_ids_are_unique() -> None:
    entries = catalogue()
    ids = [entry.id for entry in entries]
    assert sorted(ids) == sorted({*MESSAGES, "nccl-hang", "bind-not-permitted"}), (
        "each entry is tried with its own message"
    )
    for entry in entries:
        assert entry.cause and entry.fix and entry.reference
        assert not entry.cause.endswith(".")


def test_verbs_that_a_fix_names_exist() -> None:
    verbs = {path.stem for path in (Path(__file__).parents[3] / "deploys").glob("*.py")}
    named = {verb for entry in catalogue() for verb in re.findall(r"rackwright (\w+) INVENTORY", entry.fix)}
    assert named
    assert named <= verbs


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PUBLIC / "flashinfer-cubin-mismatch.log", "flashinfer-mismatch"),
        (PUBLIC / "nccl-hang-shm-broadcast.log", "nccl-hang"),
        (PUBLIC / "nvcc-not-found.log", "no-compiler"),
        (PUBLIC / "oom-triton-serving-and-free-memory.log", "memory-held"),
        (PUBLIC / "unsupported-arch-hyperconnection.log", "unsupported-architecture"),
        (OURS / "cutlass-missing.log", "cutlass-path"),
        (OURS / "dummy-weights-assertion.log", "dummy-weights"),
    ],
)
def test_recorded_failures_are_recognised(path: Path, expected: str) -> None:
    found = recognise(tidy(path.read_text()))
    assert found is not None and found.failure.id == expected


@pytest.mark.parametrize(
    "path",
    [
        OURS / "cpu-eager-v0.32.log",
        OURS / "cpu-compile-ngram-v0.32.log",
        OURS / "cold-eager-compiling.log",
        OURS / "deepgemm-warmup.log",
        OURS / "mtp2-cudagraph-compiling.log",
        PUBLIC / "startup-dsv4-flash-v0.21.log",
        PUBLIC / "sm120-8x-startup-and-serving-v0.20.log",
    ],
    ids=lambda path: path.stem,
)
def test_a_start_that_goes_well_or_is_only_slow_is_no_known_failure(path: Path) -> None:
    assert recognise(tidy(path.read_text())) is None


def test_one_line_about_a_slow_block_is_no_hang_yet() -> None:
    line = "No available shared memory broadcast block found in 60 seconds."
    assert recognise([line]) is None
    assert recognise([line] * 3) is not None


def test_a_port_that_may_not_be_bound_is_no_file_that_may_not_be_read() -> None:
    frame = "(APIServer pid=88) "
    traceback = [
        frame + '  File "vllm/entrypoints/openai/api_server.py", line 555, in create_server_socket',
        frame + "    sock.bind(addr)",
        frame + "PermissionError: [Errno 13] Permission denied",
    ]
    found = recognise(["APIServer starts", *traceback])
    assert found is not None and found.failure.id == "bind-not-permitted"
    assert "--data port=" in found.failure.fix
    assert found.lines == (traceback[-1],)
    elsewhere = recognise([traceback[1], "one", "two", "three", traceback[-1]])
    assert elsewhere is not None and elsewhere.failure.id == "not-permitted"


def test_the_cause_is_found_far_above_the_last_line_and_reports_of_it_are_not_taken_for_it() -> None:
    lines = tidy((OURS / "cutlass-missing.log").read_text())
    assert root_cause(lines) == "ModuleNotFoundError: No module named 'cutlass'"
    assert "cutlass" not in lines[-1]
    generic = "RuntimeError: Engine core initialization failed. See root cause above."
    assert root_cause([generic]) is None


def test_telling_lines_begin_with_the_known_failure_and_end_with_the_last_words() -> None:
    log = [f"line {number}" for number in range(50)]
    log.insert(5, "RuntimeError: Could not find nvcc")
    shown = telling_lines(log, 6)
    assert shown[0] == "RuntimeError: Could not find nvcc"
    assert shown[-1] == "line 49"
    assert len(shown) == 6
