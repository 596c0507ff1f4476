"""A bundle that travels in pieces arrives whole, in any order, or says what is damaged."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu_rehearsal"


@pytest.fixture
def pieces(tmp_path: Path) -> list[Path]:
    bundle, controller, out = tmp_path / "bundle", tmp_path / "controller", tmp_path / "pieces"
    (bundle / "wheels").mkdir(parents=True)
    controller.mkdir()
    rng = random.Random(7)
    files = []
    for name, size, part in (("large.whl", 3_400_000, "engine"), ("tool.whl", 90_000, "tools")):
        (bundle / "wheels" / name).write_bytes(rng.randbytes(size))
        files.append({"path": f"wheels/{name}", "bytes": size, "sha256": "0" * 64, "part": part})
    (bundle / "manifest.json").write_text(json.dumps({"files": files}))
    (controller / "own.whl").write_bytes(rng.randbytes(5000))
    (controller / "empty.whl").write_bytes(b"")
    words = ["--bundle", str(bundle), "--controller", str(controller), "--output", str(out), "--size", "1"]
    subprocess.run([sys.executable, str(SCRIPTS / "pack.py"), *words], check=True, capture_output=True)
    return sorted(out.iterdir())


def take(piece: Path, stash: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPTS / "unpack.py"), str(piece), str(stash)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_no_piece_is_larger_than_asked(pieces: list[Path]) -> None:
    assert len(pieces) == 4
    for piece in pieces:
        size = sum(path.stat().st_size for path in piece.iterdir() if path.name != "plan.json")
        assert size <= 1 << 20


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 3, 1, 0)])
def test_the_pieces_may_come_in_any_order_and_twice(
    pieces: list[Path], tmp_path: Path, order: tuple[int, ...]
) -> None:
    stash = tmp_path / "stash"
    for number in order:
        assert not (stash / "all-here").exists()
        assert take(pieces[number], stash).returncode == 0
    assert (stash / "all-here").exists()
    for path in ("bundle/wheels/large.whl", "bundle/wheels/tool.whl", "bundle/manifest.json"):
        assert (stash / path).read_bytes() == (tmp_path / path).read_bytes()
    assert (stash / "controller" / "own.whl").stat().st_size == 5000


def test_what_is_needed_first_is_in_the_first_piece(pieces: list[Path], tmp_path: Path) -> None:
    stash = tmp_path / "stash"
    assert take(pieces[0], stash).returncode == 0
    first = ("controller/own.whl", "controller/empty.whl", "bundle/manifest.json", "bundle/wheels/tool.whl")
    assert all((stash / path).exists() for path in first)
    assert not (stash / "bundle/wheels/large.whl").exists()


def test_a_damaged_part_is_named_and_its_file_never_appears(pieces: list[Path], tmp_path: Path) -> None:
    stash = tmp_path / "stash"
    victim = sorted(path for path in pieces[2].iterdir() if path.name != "plan.json")[0]
    raw = victim.read_bytes()
    victim.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    ends = [take(piece, stash) for piece in pieces]
    assert ends[-1].returncode == 1
    assert "damaged: bundle/wheels/large.whl" in ends[-1].stdout
    assert not (stash / "bundle/wheels/large.whl").exists() and not (stash / "all-here").exists()
