"""The snapshot of options is what the engine's own parser says; so recipes are checked against the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsals import REPOSITORY, Rehearsal

from tasks.paths import RECIPES
from tasks.recipe import WheelRoute, load_recipe

sys.path.insert(0, str(REPOSITORY / "scripts"))
from snapshot_options import options_of_help


@pytest.fixture(scope="module")
def program(rehearsal: Rehearsal) -> Path:
    """The engine's command line, as the rehearsal installed it."""
    return rehearsal.root / "env" / "bin" / "vllm"


def asked(program: Path, *words: str) -> str:
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_snapshot_names_exactly_the_options_of_the_real_parser(program: Path) -> None:
    recipe = load_recipe("rehearsal-cpu")
    pins = recipe.route("wheel")
    assert isinstance(pins, WheelRoute)
    assert re.search(rf"(^|\s){re.escape(pins.version)}(\+\S+)?\s*$", asked(program, "--version"))
    live = options_of_help(asked(program, "serve", "--help=all"))
    lines = (RECIPES / "options" / f"vllm-{pins.version}.txt").read_text("utf-8").splitlines()
    snapshot = {line for line in lines if not line.startswith("#")}
    assert len(live) > 200
    assert live - snapshot == set(), "the engine has options that the snapshot does not know"
    assert snapshot - live == set(), "the snapshot names options that the engine does not have"
    for mode in recipe.serve.modes:
        flags = {flag.split(".")[0].replace("_", "-") for flag in recipe.flags(mode, "wheel")}
        assert {flag.removeprefix("no-") for flag in flags} <= live, mode
