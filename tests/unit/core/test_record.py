"""The evidence of a run is on the disk at every moment of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.paths import ROOT
from tasks.record import Record


def written(folder: Path, verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{verb}.json").read_text("utf-8"))
    return found


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path / "h", "site", "h", {})
    record.expect("engine", "engine")
    record.step("engine", "unchanged")
    record.note(mode="eager")
    assert not (tmp_path / "h").exists()


def test_a_run_that_stops_anywhere_has_left_its_report(tmp_path: Path) -> None:
    record = Record(tmp_path, "site", "h", {})
    for name in ("environment", "engine", "weights"):
        record.expect(name, name)
    record.open()
    record.step("environment", "done", seconds=2)
    record.step("engine", "running")
    found = written(tmp_path, "site")
    assert found["verdict"] == "running"
    assert [step["status"] for step in found["steps"]] == ["done", "running", "pending"]
    record.finish("fail", "engine: no space")
    found = written(tmp_path, "site")
    assert [step["status"] for step in found["steps"]] == ["done", "failed", "skipped"]
    assert (found["verdict"], found["why"]) == ("fail", "engine: no space")


def test_a_verb_whose_steps_are_all_done_has_passed(tmp_path: Path) -> None:
    record = Record(tmp_path, "stop", "h", {})
    record.expect("stop", "stop")
    record.open()
    record.step("stop", "unchanged")
    assert written(tmp_path, "stop")["verdict"] == "pass"


def test_the_page_of_site_is_not_replaced_by_another_verb_s(tmp_path: Path) -> None:
    pages = [Record(tmp_path, verb, "h", {}) for verb in ("site", "uninstall")]
    for record in pages:
        record.open()
    assert [record.page.name for record in pages] == ["index.html", "uninstall.html"]
    assert all(record.page.is_file() for record in pages)


def test_the_page_follows_work_at_once_and_mere_words_later(tmp_path: Path) -> None:
    record = Record(tmp_path, "site", "h", {})
    record.expect("engine", "engine")
    record.open()
    opened = record.page.read_text("utf-8")
    record.note(mode="eager")
    assert written(tmp_path, "site")["mode"] == "eager"
    assert record.page.read_text("utf-8") == opened
    record.step("engine", "running")
    assert record.page.read_text("utf-8") != opened


def test_a_run_with_nothing_to_do_ends_with_a_page_that_says_so(tmp_path: Path) -> None:
    run = (
        "import pathlib, sys; from tasks.record import Record\n"
        "record = Record(pathlib.Path(sys.argv[1]), 'stop', 'h', {}); record.expect('stop', 'stop')\n"
        "record.open(); record.step('stop', 'unchanged'); print(record.page.read_text('utf-8'))"
    )
    done = subprocess.run([sys.executable, "-c", run, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    busy = 'http-equiv="refresh"'  # of the page of a run that is not over
    assert busy in done.stdout
    assert busy not in (tmp_path / "stop.html").read_text("utf-8")
