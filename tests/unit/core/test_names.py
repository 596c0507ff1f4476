"""Test modules are imported by their bare names, so each needs one of its own."""

from __future__ import annotations

from collections import Counter

from tasks.paths import ROOT


def test_no_two_test_modules_have_the_same_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []
