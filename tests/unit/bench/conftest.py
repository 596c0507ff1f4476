"""Fixtures of the benchmark tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_rig import Rig

from tasks.onhost import bench


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Stand-in engines and benchmarks against them, for one test.

    Other tests may run real benchmarks on this machine meanwhile; against these engines they are no rivals.
    """
    monkeypatch.setattr(bench, "others_running", list)
    made = Rig(tmp_path)
    yield made
    made.close()
