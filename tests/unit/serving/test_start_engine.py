"""The wrapper that starts the engine: key, marks, leftovers of a crash, GPU memory. Run for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WRAPPER = str(Path(__file__).parents[3] / "tasks" / "onhost" / "start-engine.sh")


def start(
    *argv: str, env: dict[str, str] | None = None, timeout: float = 30
) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        ["/bin/sh", WRAPPER, *argv],
        env={**base, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def fake_smi(folder: Path, script: str) -> str:
    """PATH with an nvidia-smi of the test's own in front."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_each_start_is_marked_with_its_time_and_the_program_gets_its_words() -> None:
    done = start("printf", "%s|", "a b", "$x", '"')
    mark, rest = done.stdout.split("\n", 1)
    assert mark.split()[:2] == ["rackwright:", "start"]
    assert abs(int(mark.split()[2]) - time.time()) < 30
    assert rest == 'a b|$x|"|'


def test_the_key_reaches_the_engine_s_environment_and_nothing_else(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    done = start(
        "sh", "-c", 'echo "$VLLM_API_KEY"; env | grep RACKWRIGHT', env={"RACKWRIGHT_KEY_FILE": str(key)}
    )
    assert done.stdout.splitlines()[1:] == ["s3cret"]
    (tmp_path / "api-key").write_text("credential")
    both = {"RACKWRIGHT_KEY_FILE": str(key), "CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert start("sh", "-c", 'echo "$VLLM_API_KEY"', env=both).stdout.splitlines()[1] == "credential"


def test_an_empty_or_missing_key_file_starts_no_open_engine(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path in (empty, tmp_path / "missing"):
        done = start("echo", "STARTED", env={"RACKWRIGHT_KEY_FILE": str(path)})
        assert done.returncode != 0
        assert "STARTED" not in done.stdout


def test_no_engine_starts_without_the_key_that_it_must_have(tmp_path: Path) -> None:
    # as systemd before 247 left it, which knows no credentials
    done = start("echo", "STARTED", env={"RACKWRIGHT_KEY": "required"})
    assert done.returncode == 1
    assert "STARTED" not in done.stdout
    assert "no key was handed over" in done.stderr
    key = tmp_path / "key"
    key.write_text("s3cret")
    # a stray variable of that name is dropped, the key is not
    env = {"RACKWRIGHT_KEY": "required", "RACKWRIGHT_KEY_FILE": str(key), "RACKWRIGHT_UNSET": "VLLM_API_KEY"}
    done = start(
        "sh", "-c", 'echo "$VLLM_API_KEY"; env | grep RACKWRIGHT', env={**env, "VLLM_API_KEY": "stray"}
    )
    assert done.stdout.splitlines()[1:] == ["s3cret"]


def test_a_full_disk_that_takes_no_note_of_the_group_does_not_stop_the_engine() -> None:
    done = start("echo", "STARTED", env={"RACKWRIGHT_GROUP": "/dev/full"})
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "STARTED")
    assert "cannot write /dev/full" in done.stdout


def test_stray_variables_are_dropped() -> None:
    env = {"RACKWRIGHT_UNSET": "VLLM_A VLLM_NOT_THERE", "VLLM_A": "1", "VLLM_B": "2"}
    assert start("sh", "-c", "env | grep ^VLLM", env=env).stdout.splitlines()[1:] == ["VLLM_B=2"]


def test_what_the_last_start_left_behind_is_ended_and_a_strangers_group_is_not(tmp_path: Path) -> None:
    group = tmp_path / "group"
    script = "sleep 300 & echo left $!"
    first = subprocess.Popen(
        ["/bin/sh", WRAPPER, "sh", "-c", script],
        env={"PATH": os.environ["PATH"], "RACKWRIGHT_GROUP": str(group)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    left = int(next(line for line in first.stdout if line.startswith("left")).split()[1])
    first.wait(10)
    assert Path(f"/proc/{left}").exists()
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        done = start("true", env={"RACKWRIGHT_GROUP": str(group)})
        assert f"ending what the last start left: {left}" in done.stdout
        end = time.monotonic() + 60
        while Path(f"/proc/{left}/cmdline").exists() and Path(f"/proc/{left}/cmdline").read_bytes():
            assert time.monotonic() < end
            time.sleep(0.05)
        # the leader lives: that number belongs to somebody else by now
        boot = group.read_text().split()[1]
        group.write_text(f"{stranger.pid} {boot}\n")
        assert "ending" not in start("true", env={"RACKWRIGHT_GROUP": str(group)}).stdout
        assert stranger.poll() is None
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()


@pytest.mark.parametrize("earlier", ["another-boot/21", "{boot_id}/1", "{boot_id}"])
def test_a_group_of_an_earlier_boot_or_of_the_container_s_last_start_is_no_group_of_ours(
    tmp_path: Path, earlier: str
) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    group = tmp_path / "group"
    # its leader is gone and a process of it lives: what a number of a start before can look like by chance
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 300 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    stranger = int(leader.stdout.readline())
    leader.wait(10)
    try:
        group.write_text(f"{leader.pid} {earlier.format(boot_id=boot_id)}\n")
        assert "ending" not in start("true", env={"RACKWRIGHT_GROUP": str(group)}).stdout
        assert group.read_text().split()[1] == f"{boot_id}/{first_process_began()}"
    finally:
        os.kill(stranger, signal.SIGKILL)


def first_process_began() -> str:
    return Path("/proc/1/stat").read_text().rsplit(")", 1)[1].split()[19]


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    for hard in (4096, 1024):
        done = subprocess.run(
            ["sh", "-c", f"ulimit -n {hard}; ulimit -Sn 512; exec sh {WRAPPER} sh -c 'ulimit -Sn'"],
            capture_output=True,
            text=True,
        )
        assert done.stdout.split()[-1] == str(hard), done.stderr


@pytest.mark.slow
def test_it_waits_until_gpu_memory_is_free(tmp_path: Path) -> None:
    path = fake_smi(tmp_path, f'n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n+1)) >{tmp_path}/n\n'
                    'if [ $n -lt 2 ]; then echo "1000, 97887"; else echo "97000, 97887"; fi')  # fmt: skip
    done = start("echo", "STARTED", env={"PATH": path, "RACKWRIGHT_GPU_FREE": "0.85"})
    assert done.stdout.splitlines()[1:] == ["rackwright: waiting for GPU memory", "STARTED"]
    assert (tmp_path / "n").read_text().strip() == "3"


@pytest.mark.slow
def test_the_wait_for_gpu_memory_is_bounded(tmp_path: Path) -> None:
    path = fake_smi(tmp_path, 'echo "1000, 97887"')
    env = {"PATH": path, "RACKWRIGHT_GPU_FREE": "0.85", "RACKWRIGHT_GPU_WAIT": "2"}
    done = start("echo", "STARTED", env=env)
    assert "still held after 2 s" in done.stdout
    assert done.stdout.endswith("STARTED\n")


def test_only_the_engine_s_own_gpus_are_asked_for(tmp_path: Path) -> None:
    path = fake_smi(tmp_path, f'echo "$@" >>{tmp_path}/asked; echo "97000, 97887"')
    start("true", env={"PATH": path, "RACKWRIGHT_GPU_FREE": "0.9", "CUDA_VISIBLE_DEVICES": "2,3"})
    start("true", env={"PATH": path, "RACKWRIGHT_GPU_FREE": "0.9", "CUDA_VISIBLE_DEVICES": "GPU-abc"})
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "-i 2,3" in first
    assert "-i" not in second.split()


@pytest.mark.parametrize(
    "script", ["echo '[N/A], [N/A]'", "echo 'Failed to initialize NVML'; exit 9", "echo"]
)
def test_a_driver_that_says_nothing_useful_holds_nothing_up(tmp_path: Path, script: str) -> None:
    done = start("echo", "STARTED", env={"PATH": fake_smi(tmp_path, script), "RACKWRIGHT_GPU_FREE": "0.9"})
    assert done.stdout.splitlines()[1:] == ["STARTED"], "no wait is announced"


LEAK = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # as if the tracker were killed too
print(segment.name, flush=True)
time.sleep(300)
"""


def leaking(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a segment of shared memory, and the segment's file, made long ago."""
    process = subprocess.Popen([sys.executable, "-c", LEAK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    segment = Path("/dev/shm") / process.stdout.readline().strip()
    age(segment)
    return process, segment


def age(path: Path) -> None:
    then = time.time() - 600
    os.utime(path, (then, then))


def test_shared_memory_of_a_killed_engine_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    process, segment = leaking(tmp_path)
    others = [Path("/dev/shm") / name for name in ("psm_notours0", "rw-test-psm_0a1b2c3d", "sem.mp-UPPER123")]
    young, semaphore = Path("/dev/shm/psm_0f0e0d0c"), Path("/dev/shm/sem.mp-rw_test0")
    try:
        for path in (*others, young, semaphore):
            path.touch()
        for path in (*others, semaphore):
            age(path)
        done = start("echo", "STARTED")
        assert segment.exists(), "a living process has it"
        assert not semaphore.exists()
        assert "removed 1 files in /dev/shm" in done.stdout
        process.kill()
        process.wait()
        assert segment.exists(), "nobody has removed it"
        began = time.monotonic()
        done = start("echo", "STARTED")
        assert done.stdout.endswith("STARTED\n")
        assert not segment.exists()
        assert time.monotonic() - began < 5
        assert young.exists(), "it may just be being made"
        assert all(path.exists() for path in others), "multiprocessing does not name files like this"
    finally:
        process.kill()
        process.wait()
        for path in (segment, young, semaphore, *others):
            path.unlink(missing_ok=True)


def test_shared_memory_can_be_tidied_without_a_start_and_only_a_user_s_own(tmp_path: Path) -> None:
    process, segment = leaking(tmp_path)
    process.kill()
    process.wait()
    try:
        assert start("--tidy-shm", str(os.getuid() + 12345)).stdout == ""
        assert segment.exists()
        assert "removed" in start("--tidy-shm", str(os.getuid())).stdout
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
