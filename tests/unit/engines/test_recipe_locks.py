"""The locks that recipes name fit the recipe: its version, and no compiler newer than its driver."""

from __future__ import annotations

import pytest

from tasks.onhost.wheel_lock import parse_lock
from tasks.paths import RECIPES
from tasks.recipe import WheelRoute, load_recipe, recipe_names

# what writes code for the GPU while serving; a driver reads no code of a newer minor release (CUDA's
# compatibility guide: minor version compatibility does not cover PTX)
COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-nvrtc")
WHEELS = [name for name in recipe_names() if load_recipe(name).engine.wheel]


def versions(name: str) -> dict[str, str]:
    recipe = load_recipe(name)
    pins = recipe.route("wheel")
    assert isinstance(pins, WheelRoute)
    return {pin.name: pin.version for pin in parse_lock(recipe.beside(pins.lock).read_text("utf-8"))}


@pytest.mark.parametrize("name", WHEELS)
def test_a_lock_installs_the_version_of_its_recipe(name: str) -> None:
    pins = load_recipe(name).route("wheel")
    assert isinstance(pins, WheelRoute)
    assert versions(name)[pins.package] == pins.version


@pytest.mark.parametrize("name", [name for name in WHEELS if load_recipe(name).hardware.cuda_toolkit])
def test_no_compiler_of_a_lock_is_newer_than_the_cuda_of_the_recipes_driver(name: str) -> None:
    cuda = tuple(map(int, str(load_recipe(name).hardware.cuda_toolkit).split(".")[:2]))
    locked = versions(name)
    compilers = {one: tuple(map(int, locked[one].split(".")[:2])) for one in COMPILERS if one in locked}
    assert "nvidia-cuda-nvcc" in compilers
    assert {one: version for one, version in compilers.items() if version > cuda} == {}


def test_every_lock_is_of_some_recipe() -> None:
    used = {load_recipe(name).engine.wheel.lock for name in WHEELS}  # type: ignore[union-attr]
    assert {f"locks/{path.name}" for path in (RECIPES / "locks").glob("*.txt")} == used
