"""Every flag of every recipe is an option of the engine version that it starts: here, and not on a host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.paths import RECIPES
from tasks.recipe import Recipe, WheelRoute, load_recipe, recipe_names

OPTIONS = RECIPES / "options"
# what launch.py itself adds
OWN = ("served-model-name", "host", "port")


def options(version: str) -> set[str]:
    """The options of a version, from its snapshot."""
    path = OPTIONS / f"vllm-{version}.txt"
    assert path.is_file(), f"no snapshot of {version}: python scripts/snapshot_options.py {version} ..."
    return {line for line in path.read_text().splitlines() if not line.startswith("#")}


def version_of(recipe: Recipe, route: str) -> str:
    """The version whose options the route has."""
    pins = recipe.route(route)
    version = pins.version if isinstance(pins, WheelRoute) else pins.options_like
    assert version, f"{recipe.name}: engine.{route}.options_like must name a release"
    return version


def unknown(flags: list[str], known: set[str]) -> list[str]:
    """Flags that are none of the options. `a-b.c` sets a part of option `a-b`."""
    wrong = []
    for flag in flags:
        name = flag.split(".")[0].replace("_", "-")
        if name not in known and not (name.startswith("no-") and name[3:] in known):
            wrong.append(flag)
    return wrong


CASES = [
    (name, route, mode)
    for name in recipe_names()
    for route in load_recipe(name).engine.routes()
    for mode in load_recipe(name).serve.modes
]


@pytest.mark.parametrize(("name", "route", "mode"), CASES)
def test_every_flag_is_an_option_of_its_engine(name: str, route: str, mode: str) -> None:
    recipe = load_recipe(name)
    known = options(version_of(recipe, route))
    assert unknown([*recipe.flags(mode, route), *OWN], known) == []


def test_a_flag_that_a_version_dropped_is_noticed() -> None:
    known = options("0.26.0")
    assert unknown(["enforce-eager", "kv-cache-dtype", "no-enable-prefix-caching"], known) == []
    assert unknown(["swap-space-of-old"], known) == ["swap-space-of-old"]


@pytest.mark.parametrize("path", sorted(OPTIONS.glob("*.txt")), ids=lambda path: path.stem)
def test_snapshots_say_how_they_were_made_and_are_whole(path: Path) -> None:
    text = path.read_text()
    assert re.match(r"# Options of `vllm serve`, vLLM \d+\.\d+\.\d+: .+\.\n# Written by", text)
    names = [line for line in text.splitlines() if not line.startswith("#")]
    assert names == sorted(names)
    assert len(names) > 200
    assert {"model", "tensor-parallel-size", "speculative-config", "api-key", *OWN} <= set(names)
