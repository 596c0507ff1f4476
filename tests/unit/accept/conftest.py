"""Fixtures of the acceptance tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accept_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench for one test."""
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A bench for a module."""
    made = Bench(tmp_path_factory.mktemp("accept"))
    yield made
    made.close()
