"""A promotion run for real with the stand-in: what it leaves when its proof cannot be kept."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_bench import EngineBench

from tasks.onhost import promotion

NewEngine = Callable[..., EngineBench]
pytestmark = pytest.mark.slow


class Bench:
    """Two modes and the one on trial, and what of each runs and starts with the host."""

    def __init__(self, folder: Path, new_engine: NewEngine) -> None:
        self.folder = folder
        self.safe, self.trial, self.fast = (new_engine(f"test-{name}") for name in ("eager", "trial", "fast"))
        self.boot = folder / "boot"
        self.receipts = folder / "receipts"

    def request(self) -> dict[str, Any]:
        """What `promotion.py` is asked."""
        draft = {"digest": "d", "seconds": 0, "detail": {"modes": {}}, "tool": "t", "at": ""}
        return {
            "instance": "test",
            "safe": {**self.safe.request(), "mode": "eager"},
            "trial": {**self.trial.request(), "mode": "fast"},
            "candidate": {**self.fast.request(), "mode": "fast"},
            "reload": ":",
            "boot": {"safe": f"echo eager >{self.boot}", "candidate": f"echo fast >{self.boot}"},
            "tidy": ":",
            "accept": {},
            "final": {},
            "bench": {"concurrency": [1], "prompt_tokens": 8, "output_tokens": 8, "requests": 1},
            "margin": 1.0,
            "baseline": {"acceptance": {"pass": 1, "fail": 0, "skipped": 0}, "bench": []},
            "receipts": {
                "folder": str(self.receipts),
                "kept": [{"step": "service", **draft}, {"step": "proven", **draft}],
                "back": [{"step": "service", **draft}],
                "promotion": {"step": "promotion", **draft},
            },
            "deadline": 600,
        }


@pytest.fixture
def bench(tmp_path: Path, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """All questions of the acceptance are answered well; the test's own signals stay as they are."""
    passed = {"verdict": "pass", "checks": [{"id": "a", "verdict": "pass"}]}
    monkeypatch.setattr(promotion.Promotion, "accept", lambda *_, **__: passed)
    monkeypatch.setattr(promotion.signal, "signal", lambda *_: None)
    return Bench(tmp_path, new_engine)


def test_the_mode_that_earned_it_serves_and_starts_with_the_host(bench: Bench) -> None:
    result = promotion.Promotion(bench.request(), str(bench.folder)).run()
    assert result["verdict"] == "promoted", result
    assert (bench.fast.alive(), bench.safe.alive(), bench.trial.alive()) == (True, False, False)
    assert bench.boot.read_text() == "fast\n"
    assert {path.name for path in bench.receipts.iterdir()} == {
        "service.json", "proven.json", "promotion.json",
    }  # fmt: skip


def test_a_mode_whose_proof_cannot_be_written_down_does_not_stay(bench: Bench) -> None:
    bench.receipts.write_text("a file where the folder should be: nothing can be written, as on a full disk")
    result = promotion.Promotion(bench.request(), str(bench.folder)).run()
    assert (result["verdict"], result["reason"]) == ("rolled-back", "disk")
    assert "its proof cannot be kept" in result["why"]
    assert (bench.safe.alive(), bench.fast.alive()) == (True, False)
    assert bench.boot.read_text() == "eager\n"


def test_a_host_that_cannot_start_the_mode_at_boot_stays_with_the_safe_one(bench: Bench) -> None:
    request = bench.request()
    request["boot"]["candidate"] = "echo read-only file system >&2; exit 1"
    result = promotion.Promotion(request, str(bench.folder)).run()
    assert (result["verdict"], result["reason"]) == ("rolled-back", "disk")
    assert "read-only file system" in result["why"]
    assert (bench.safe.alive(), bench.fast.alive()) == (True, False)
    assert bench.boot.read_text() == "eager\n"


def test_a_trial_whose_port_is_taken_ends_before_anything_is_stopped(bench: Bench) -> None:
    assert bench.safe.bring_up()[0] == 0
    before = bench.safe.pid()
    with socket.create_server(("127.0.0.1", bench.trial.port)):
        result = promotion.Promotion(bench.request(), str(bench.folder)).run()
    assert (result["verdict"], result["reason"]) == ("rolled-back", "trial-port")
    assert f"was taken: port {bench.trial.port}" in result["why"]
    assert "nothing was stopped" in result["why"]
    assert (bench.safe.pid(), bench.safe.alive(), result["away_seconds"]) == (before, True, 0)
    assert not bench.trial.pid(), "the trial never began"


def test_a_trial_whose_port_is_taken_later_says_so_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "why_taken", lambda probe: "")
    with socket.create_server(("127.0.0.1", bench.trial.port)):
        result = promotion.Promotion(bench.request(), str(bench.folder)).run()
    assert (result["verdict"], result["reason"]) == ("rolled-back", "trial-port")
    assert "chosen for the trial was taken" in result["why"]
    assert (bench.safe.alive(), bench.trial.alive()) == (True, False)


def test_a_safe_mode_that_is_down_is_started_from_its_files_of_now(bench: Bench) -> None:
    request, order = bench.request(), bench.folder / "order"
    request["reload"] = f"echo reload >>{order}"
    request["safe"]["start"] = f"echo start >>{order}; {request['safe']['start']}"
    made = promotion.Promotion(request, str(bench.folder))
    made.measure_safe()
    assert order.read_text().split() == ["reload", "start"]
    assert bench.safe.alive()


@pytest.mark.parametrize("gone", ["abandoned", "removed"])
def test_what_nobody_wants_any_more_ends_at_its_next_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    folder = bench.folder / "promotion"
    folder.mkdir()
    made = promotion.Promotion(bench.request(), str(folder))
    made.rolling_back = True
    made.check()
    if gone == "abandoned":
        (folder / "abandoned").touch()
    else:
        folder.rmdir()
    for act in (made.check, lambda: made.must(":"), lambda: made.step("x"), lambda: made.roll_back("a", "b")):
        with pytest.raises(SystemExit):
            act()
    assert folder.exists() == (gone == "abandoned"), "nothing is written anew"
    assert not bench.safe.pid()
