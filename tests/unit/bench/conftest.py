"""Fixtures of the benchmark tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Stand-in engines and benchmarks against them, for one test."""
    made = Rig(tmp_path)
    yield made
    made.close()
