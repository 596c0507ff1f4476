"""Tests that share something dear are run by one worker: a file's hosts, and the one real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Whole files to workers, in order (`make test`); all of tests/engine to one."""
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/engine" if file.startswith("tests/engine/") else file

    config.option.loadscopereorder = False  # what takes longest comes first as it is
    return ByWhatIsShared(config, log)
