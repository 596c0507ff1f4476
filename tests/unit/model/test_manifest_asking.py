"""`rackwright manifest`: what cannot work is told before any source is asked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tasks.model import cli


@pytest.fixture
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*words: object) -> list[cli.Answer]:
        raise AssertionError("a source was asked")

    monkeypatch.setattr(cli, "ask", ask)


@pytest.mark.usefixtures("nobody_is_asked")
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("{}", "is a folder: name a file in it"),
        ("{}/file/x", "cannot be written: Not a directory"),
        ("/proc/x", "/proc cannot be written"),
        ("/dev/null", "is there and no plain file"),
    ],
)
def test_a_file_that_cannot_be_written_is_wrong_usage(
    target: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["rehearsal-cpu", "generate", "-o", target.format(tmp_path)]) == 2
    said = capsys.readouterr()
    assert why in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_disk_that_fills_up_is_one_line_and_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*words: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    listing = {"a.safetensors": cli.manifest.Published("a.safetensors", 1, "a" * 64)}
    monkeypatch.setattr(cli, "ask", lambda *words: [cli.Answer("hub", listing)])
    monkeypatch.setattr(cli.verify_weights, "write_atomically", full)
    target = tmp_path / "m.sha256"
    assert cli.main(["rehearsal-cpu", "-o", str(target)]) == 1
    assert capsys.readouterr().err == f"rackwright manifest: {target}: No space left on device\n"


FETCHER = """
import json, sys, time
asked = json.load(sys.stdin)
print("asking hub at h", file=sys.stderr, flush=True)
time.sleep(0.3)
print("#progress {}", file=sys.stderr)
print("not from hub at h: hub at h: refused", file=sys.stderr)
found = {"name": "hub at h", "kind": "huggingface", "revision": None, "files": {}}
found.update(why="hub at h: refused", fix="patience %d" % asked["patience"])
print(json.dumps({"sources": [found]}))
"""


def test_a_hub_that_does_not_answer_is_told_once_and_meanwhile_that_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fetch_weights.py").write_text(FETCHER)
    monkeypatch.setattr(cli, "ONHOST", tmp_path)
    monkeypatch.setattr(cli, "BEAT", 0.05)
    assert cli.main(["deepseek-v4-flash-sm120", "huggingface"]) == 1
    said = capsys.readouterr()
    assert said.out == "hub at h: refused\n  fix: patience 10\n", "a download is more patient"
    lines = said.err.splitlines()
    assert lines.count("asking hub at h") == 1
    assert set(lines) == {"asking hub at h", "still asking, 0 s"}
