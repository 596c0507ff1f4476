"""What a controller makes of a promotion that was killed on the host: its living guard is waited for."""

from __future__ import annotations

import fcntl
import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import promote

BOOT = "this-boot"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan whose host is this machine and whose promotion's folder is the test's."""
    monkeypatch.setattr(promote, "GUARD_LOOKS_SECONDS", 0.05)
    (tmp_path / "promotion").mkdir()

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True)

    return SimpleNamespace(
        layout=SimpleNamespace(run=str(tmp_path)),
        facts=SimpleNamespace(system=SimpleNamespace(boot_id=BOOT)),
        spec=lambda mode: SimpleNamespace(ready_seconds=600),
        remote=SimpleNamespace(run=run),
        say=lambda text: None,
    )


def state(plan: Any, **fields: Any) -> None:
    path = Path(plan.layout.run) / "promotion" / "state.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"boot": BOOT, "settled": False, "result": {}, **fields}))
    new.rename(path)


def test_a_guard_that_lives_is_waited_for_and_what_it_wrote_is_the_result(plan: Any) -> None:
    state(plan)
    with (Path(plan.layout.run) / "promotion" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        over = threading.Timer(
            0.3, lambda: state(plan, settled=True, result={"verdict": "rolled-back", "why": "killed"})
        )
        over.start()
        assert promote.guarded(plan) == {"verdict": "rolled-back", "why": "killed"}
        over.join()


def test_where_the_guard_is_dead_too_nobody_is_waited_for(plan: Any) -> None:
    state(plan)
    assert promote.guarded(plan) == {}


def test_a_promotion_of_an_earlier_boot_or_none_at_all_is_not_waited_for(plan: Any) -> None:
    assert promote.guarded(plan) == {}
    state(plan, boot="another", settled=True, result={"verdict": "promoted"})
    assert promote.guarded(plan) == {}
