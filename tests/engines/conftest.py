"""Fixtures of the engine routes' own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These bring up a Docker Engine: not in the fast tier."""
    for item in items:
        if "docker" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def docker_can_run() -> None:
    """Skip (or fail, where hosts are required) when no Docker Engine can run here."""
    from dockers import missing

    why = missing()
    if why:
        if os.environ.get("RACKWRIGHT_REQUIRE_HOSTS") == "1":
            pytest.fail(f"no Docker Engine can run here: {why}", pytrace=False)
        pytest.skip(f"no Docker Engine can run here: {why}")
