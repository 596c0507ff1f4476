"""The recipes that serve the small checkpoint: their data agree with each other and with the generator."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tasks.onhost import make_deepseek_mini as maker
from tasks.onhost.wheel_lock import parse_lock
from tasks.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[3]
BESIDE = ROOT / "scripts" / "gpu_rehearsal" / "beside-torch.lock"
HOPPER_CHANGES = {"tensor-parallel-size", "no-enable-flashinfer-autotune"}


@pytest.fixture(params=["deepseek-v4-mini-hopper", "deepseek-v4-mini-sm120"])
def mini(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param)


@pytest.mark.parametrize("mode", ["eager", "optimized"])
def test_the_flags_are_the_real_recipes(mode: str) -> None:
    real = load_recipe("deepseek-v4-flash-sm120").flags(mode, "source")
    assert load_recipe("deepseek-v4-mini-sm120").flags(mode, "wheel") == real
    hopper = load_recipe("deepseek-v4-mini-hopper").flags(mode, "wheel")
    assert {name for name in real | hopper if real.get(name) != hopper.get(name)} == HOPPER_CHANGES


def test_the_manifest_names_what_the_generator_writes(mini: Recipe) -> None:
    assert mini.model.manifest is not None
    lines = mini.beside(mini.model.manifest).read_text().splitlines()
    sums = {line.split("  ")[1]: line.split("  ")[0] for line in lines}
    files, _ = maker.checkpoint(maker.FLASH, maker.Noise(1))
    assert set(sums) == {file.name for file in files}
    assert mini.model.bytes == sum(file.size for file in files)
    assert mini.model.shards == sum(name.endswith(".safetensors") for name in sums)
    for file in files:
        if not file.name.endswith(".safetensors"):
            assert hashlib.sha256(b"".join(file.parts())).hexdigest() == sums[file.name], file.name


def test_both_serve_the_same_checkpoint_with_the_same_wheels() -> None:
    hopper, sm120 = load_recipe("deepseek-v4-mini-hopper"), load_recipe("deepseek-v4-mini-sm120")
    assert hopper.model == sm120.model
    assert hopper.engine == sm120.engine


def test_the_recipe_for_hardware_that_was_not_at_hand_says_so() -> None:
    assert "nowhere" in load_recipe("deepseek-v4-mini-sm120").proven


def test_what_an_image_with_torch_lacks_is_part_of_the_whole_lock(mini: Recipe) -> None:
    assert mini.engine.wheel is not None
    whole = {pin.name: pin for pin in parse_lock(mini.beside(mini.engine.wheel.lock).read_text())}
    beside = parse_lock(BESIDE.read_text())
    assert all(whole[pin.name] == pin for pin in beside)
    assert {"torch", "triton", "numpy"}.isdisjoint(pin.name for pin in beside)
    assert {"vllm", "ninja", "tilelang", "nvidia-cutlass-dsl-libs-cu13"} <= {pin.name for pin in beside}


def test_the_compiler_in_the_lock_is_the_drivers_release() -> None:
    # nvcc 13.5 would write PTX that a driver for CUDA 13.0 does not take
    lock = load_recipe("deepseek-v4-mini-hopper").beside("locks/vllm-0.26.0-cu130-py312-linux_x86_64.txt")
    pins = {pin.name: pin.version for pin in parse_lock(lock.read_text())}
    compilers = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
    assert all(pins[name].startswith("13.0.") for name in compilers)
    assert pins["torch"] == "2.11.0" and pins["flashinfer-python"] == "0.6.14"
