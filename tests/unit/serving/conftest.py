"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_bench import EngineBench


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[Callable[..., EngineBench]]:
    """Services of one test: `new_engine("name", "fault", ...)`."""
    made: list[EngineBench] = []

    def make(name: str = "test-eager", *faults: str) -> EngineBench:
        made.append(EngineBench(tmp_path, name, faults))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def engine(new_engine: Callable[..., EngineBench]) -> EngineBench:
    """One service without faults."""
    return new_engine()
