"""What is assumed of a stream that is shown or kept."""

from __future__ import annotations

import io

import pytest

from tasks.terminal import columns, cut, shape


@pytest.mark.parametrize(("wanted", "width"), [("40", 40), ("", 100), ("0", 100), ("²", 100), ("900", 140)])
def test_a_file_is_as_wide_as_columns_says(wanted: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", wanted)
    assert shape(io.StringIO()) == (width, False)


@pytest.mark.parametrize(
    ("text", "wide"), [("gpu1", 4), ("工作站", 6), ("ｇｐｕ", 6), ("e\u0301", 1), ("が", 2), ("", 0)]
)
def test_wide_characters_take_two_columns_and_marks_none(text: str, wide: int) -> None:
    assert columns(text) == wide


def test_a_text_is_cut_before_the_character_that_does_not_fit() -> None:
    assert [cut("a工b", most) for most in range(5)] == ["", "a", "a", "a工", "a工b"]
