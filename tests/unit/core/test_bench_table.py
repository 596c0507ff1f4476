"""The table of `make bench`: which figures keep their budget, and what the exit code says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import run  # noqa: E402  (a program beside the tests, not a package)


@pytest.mark.parametrize(
    ("value", "budget", "good"),
    [(3, "<= 3", True), (3.01, "<= 3", False), (5, ">= 5", True), (1, "> 1", False), (7, "", None)],
)
def test_a_budget_is_a_comparison(value: float, budget: str, good: bool | None) -> None:
    assert run.kept(value, budget) is good


def test_a_budget_that_compares_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="begins with one of"):
        run.kept(1, "about 3")


@pytest.mark.parametrize(
    ("figures", "code", "words"),
    [
        ([("commands", 1, "<= 3"), ("seconds", 2.345, "")], 0, ["commands", "2.35", "ok"]),
        ([("commands", 4, "<= 3")], 1, ["MISSED"]),
        (None, 1, ["broke, see above"]),
    ],
)
def test_what_is_missed_or_broken_ends_with_1(
    figures: Any,
    code: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"made_{code}_{len(words)}_{words[0][:3].lower()}"
    body = f"return {figures!r}" if figures is not None else "raise RuntimeError('no host')"
    (tmp_path / f"{name}.py").write_text(f"def figures():\n    {body}\n")
    (tmp_path / "helper.py").write_text("x = 1\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == code
    shown = capsys.readouterr()
    assert all(word in shown.out for word in words)
    assert name in shown.err
