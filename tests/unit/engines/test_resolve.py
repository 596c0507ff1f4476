"""Requirement files without the lines that a recipe drops, and the resolver's command line."""

from __future__ import annotations

import errno
import io
import json
import sys
import tomllib
from pathlib import Path

import pytest

from tasks.onhost import resolve_env
from tasks.onhost.resolve_env import DEFAULTS, Problem, entries, filtered, pinned_lines, uv_argv
from tasks.recipe import load_recipe

# requirements/cuda.txt of vLLM 0.26.0 (source distribution on PyPI), the lines that matter
CUDA = """\
# Common dependencies
-r common.txt

numba == 0.65.0 # Required for N-gram speculative decoding
torch==2.11.0
--extra-index-url https://flashinfer.ai/whl/
flashinfer-python==0.6.14
flashinfer-cubin==0.6.14
"""


def test_the_recipes_expression_takes_exactly_the_index_line_away() -> None:
    pins = load_recipe("deepseek-v4-flash-sm120").engine.source
    assert pins
    left, dropped = filtered({"cuda.txt": CUDA, "build.txt": "cmake\n"}, pins.drop_lines)
    assert dropped == ["--extra-index-url https://flashinfer.ai/whl/"]
    assert left["cuda.txt"] == CUDA.replace(dropped[0] + "\n", "")
    assert left["build.txt"] == "cmake\n"


def test_the_garbled_expression_of_the_printed_tutorial_matches_nothing_and_is_refused() -> None:
    with pytest.raises(Problem, match="matches 0 lines"):
        filtered({"cuda.txt": CUDA}, [r"^--extra-index-url https://flashinfer\.ai/whl$"])
    with pytest.raises(Problem, match="is not an expression"):
        filtered({"cuda.txt": CUDA}, [r"^*--extra-index-url+https://flashinfer\.ai/whl/?*"])


def test_an_expression_that_takes_too_much_is_refused() -> None:
    with pytest.raises(Problem, match="matches 2 lines"):
        filtered({"cuda.txt": CUDA}, ["flashinfer-"])


def test_a_pinned_wheel_of_another_version_than_the_tree_asks_for_is_refused() -> None:
    pin = {"package": "flashinfer-python", "version": "0.6.14"}
    assert pinned_lines(CUDA, [pin]) == CUDA
    with pytest.raises(Problem, match=r"asks for flashinfer-python 0\.6\.14, the recipe pins 0\.6\.13"):
        pinned_lines(CUDA, [{**pin, "version": "0.6.13"}])


def argv(**changes: object) -> list[str]:
    request = {**DEFAULTS, "uv": "/e/bin/uv", "python": "/e/bin/python", "pinned_folder": "/w", **changes}
    return uv_argv(request, ["/s/a.txt"], "/o")


def test_torchs_backend_is_passed_on_and_pinned_wheels_are_left_to_their_hash() -> None:
    pinned = [{"package": "flashinfer-cubin", "version": "0.6.14"}]
    words = argv(torch_backend="cu130", pinned=pinned)
    assert words[words.index("--torch-backend") + 1] == "cu130"
    assert words[words.index("--no-emit-package") + 1] == "flashinfer-cubin"
    assert words[words.index("--find-links") + 1] == "/w"
    assert "--generate-hashes" in words


def test_a_torch_mirror_replaces_the_backend_and_offline_asks_nobody() -> None:
    words = argv(torch_backend="cu130", torch_index="https://m/cu130", index_url="https://i/simple")
    assert "--torch-backend" not in words
    assert words[words.index("--index") + 1] == "https://m/cu130"
    assert words[words.index("--index-strategy") + 1] == "unsafe-best-match"
    words = argv(torch_backend="cu130", index_url="https://i/simple", offline=True)
    assert {"--offline", "--no-index"} <= set(words)
    assert "https://i/simple" not in words


def test_versions_of_a_lock() -> None:
    assert entries("a==1 \\\n    --hash=sha256:0\nb_c[x]==2+cu130 ; python_version < '4' \\\n") == {
        "a": "1", "b-c[x]": "2+cu130",
    }  # fmt: skip


def test_the_pinned_programs_are_data_with_hashes() -> None:
    root = Path(__file__).parents[3] / "requirements"
    forge = tomllib.loads((root / "miniforge.toml").read_text())
    assert len(forge["sha256"]) == 64 and forge["file"] in forge["urls"][0]
    assert "--hash=sha256:" in (root / "uv.lock").read_text()


def resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], uv: str
) -> str:
    """Id of the error that the program answers with, where uv is this script."""
    (tmp_path / "uv").write_text("#!/bin/sh\n" + uv)
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "r.txt").write_text("six\n")
    request = {"src": str(tmp_path), "requirements": ["r.txt"], "python": "p", "uv": str(tmp_path / "uv")}
    text = json.dumps({**request, "lock": str(tmp_path / "lock")})
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert resolve_env.main(["--stdin"]) == 1
    answer = json.loads(capsys.readouterr().out)["error"]
    assert answer["fix"]
    return str(answer["id"])


def test_a_full_disk_is_told_as_that_whoever_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uv = "echo 'error: failed to write to cache: No space left on device (os error 28)'; exit 2\n"
    assert resolved(tmp_path, monkeypatch, capsys, uv) == "disk_full"

    def full(*words: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(resolve_env.os, "makedirs", full)
    assert resolved(tmp_path, monkeypatch, capsys, "exit 0\n") == "disk_full"


def test_a_folder_that_may_not_be_written_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(resolve_env.os, "makedirs", refused)
    assert resolved(tmp_path, monkeypatch, capsys, "exit 0\n") == "permission"
