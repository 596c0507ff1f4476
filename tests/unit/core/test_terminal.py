"""What is assumed of a stream that is shown or kept."""

from __future__ import annotations

import io

import pytest

from tasks.terminal import shape


@pytest.mark.parametrize(("columns", "width"), [("40", 40), ("", 100), ("0", 100), ("x", 100), ("900", 140)])
def test_a_file_is_as_wide_as_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert shape(io.StringIO()) == (width, False)
