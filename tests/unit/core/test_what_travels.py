"""What travels to a host: what is in it, and what is left of earlier versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from this_machine import Here

from tasks.bundle import Bundle, bundle_for, ship
from tasks.recipe import load_recipe
from tasks.remote import Remote


def test_the_taught_weights_travel_only_where_they_are_written() -> None:
    assert "make_rehearsal_checkpoint.safetensors" in bundle_for(load_recipe("rehearsal-cpu")).files
    other = bundle_for(load_recipe("deepseek-v4-mini-hopper")).files
    assert "make_deepseek_mini.py" in other
    assert not [name for name in other if name.endswith(".safetensors")]


def test_versions_of_long_ago_go_and_the_newest_stay(tmp_path: Path) -> None:
    lib = tmp_path / "root" / "lib"
    shipped = [Bundle({"a.txt": (str(i).encode(), 0o644)}, f"{i}" * 64) for i in range(5)]
    for i, bundle in enumerate(shipped):
        assert ship(cast(Remote, Here()), bundle, str(lib)) is None
        os.utime(bundle.folder(str(lib)), (1000 + i, 1000 + i))
    # the first one again: it is the newest now
    assert ship(cast(Remote, Here()), shipped[0], str(lib)) is None
    left = {path.name: (path / "a.txt").read_text() for path in lib.iterdir()}
    assert left == {"0" * 16: "0", "3" * 16: "3", "4" * 16: "4"}
