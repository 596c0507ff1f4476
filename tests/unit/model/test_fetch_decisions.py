"""What the fetcher makes of sources that ask to wait, and of folders that it may only read."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import fetch_weights as fw
from tasks.onhost import weight_sources as ws


def make(folder: Path) -> dict[str, Any]:
    """A model of two files, and the source that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return {"kind": "path", "dir": str(folder)}


def fetch(root: Path, *sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    document = {"dest": str(root / "models" / "x"), "sources": list(sources), "reserve": 0, **more}
    stop = threading.Event()
    watch = threading.Timer(20, stop.set)
    watch.start()
    try:
        return fw.run(fw.params_from(document), stop)
    finally:
        watch.cancel()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source that lists everything and always asks to come back later; `after` says when."""

    class Busy(ws.Source):
        after = 0.0
        asked = 0

        def _list(self) -> dict[str, ws.Remote]:
            return {"config.json": ws.Remote("config.json", 2)}

        def _fetch(self, remote: ws.Remote, part: ws.Part) -> None:
            Busy.asked += 1
            raise ws.Transient("429 Too Many Requests", self.after)

    monkeypatch.setitem(ws.KINDS, "huggingface", (Busy, ("repo",), ws.HUB_KEYS))
    return Busy


@pytest.mark.parametrize("after", [86_400.0, 99_999_999_999.0, float("inf")])
def test_a_source_that_asks_to_wait_longer_than_patience_lasts_is_left_for_the_next_one(
    after: float, busy: Any, tmp_path: Path
) -> None:
    busy.after = after
    hub = {"kind": "huggingface", "repo": "a/b"}
    began = time.monotonic()
    result = fetch(tmp_path, {**make(tmp_path / "copy"), "name": "copy"}, hub, patience=5)
    assert result["ok"] and busy.asked == 0
    (tmp_path / "models" / "x").chmod(0o755)
    (tmp_path / "models" / "x" / "config.json").unlink()
    result = fetch(tmp_path, hub, {**make(tmp_path / "copy"), "name": "copy"}, patience=5, manifest=None)
    assert [s["state"] for s in result["sources"]] == ["failed", "used"]
    assert "it asks to wait" in result["sources"][0]["why"]
    assert (tmp_path / "models" / "x" / "config.json").read_text() == "{}"
    assert busy.asked == 1 and time.monotonic() - began < 5


@pytest.mark.parametrize("how", ["symlink", "hardlink"])
def test_links_need_no_room(how: str, tmp_path: Path) -> None:
    source = make(tmp_path / "copy")
    assert fetch(tmp_path, {**source, "how": how}, reserve=1 << 60)["ok"]


def test_copies_need_room(tmp_path: Path) -> None:
    result = fetch(tmp_path, make(tmp_path / "copy"), reserve=1 << 60)
    assert [p["id"] for p in result["problems"]] == ["disk.space"]


@pytest.mark.parametrize(
    ("number", "id"),
    [
        (errno.ENOSPC, "disk.full"),
        (errno.EDQUOT, "disk.full"),
        (errno.EROFS, "disk.rights"),
        (errno.EACCES, "disk.rights"),
        (errno.EIO, "disk.error"),
    ],
)
def test_an_error_of_the_disk_is_called_what_it_is(number: int, id: str) -> None:
    assert fw.disk_problem(OSError(number, "x"))[0] == id


def test_without_hashes_bytes_of_two_sources_or_of_two_versions_are_not_joined(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    source = ws.make_source(one, "")
    remote = source.list()["config.json"]
    wanted = fw.Wanted("config.json", 2, None).served_by(source, remote)
    other = ws.make_source(two, "")
    assert wanted.identity != wanted.served_by(other, other.list()["config.json"]).identity
    os.utime(tmp_path / "one" / "config.json", ns=(0, 0))
    assert wanted.identity != wanted.served_by(source, source.list()["config.json"]).identity
    proved = fw.Wanted("config.json", None, "a" * 64)
    assert proved.served_by(source, remote).identity == proved.served_by(other, remote).identity == "a" * 64


def test_a_copy_that_was_cut_off_begins_anew_where_its_source_was_replaced(tmp_path: Path) -> None:
    source = make(tmp_path / "copy")
    big = tmp_path / "copy" / "vocab.json"
    big.write_bytes(b"A" * 1000)
    stop = threading.Event()
    made = fw.Fetch(fw.params_from({"dest": str(tmp_path / "models" / "x"), "sources": [source]}), stop)
    made.prepare()
    part = Path(made.part_path(made.wanted["vocab.json"]))
    part.write_bytes(b"A" * 500)
    big.write_bytes(b"B" * 1000)
    os.utime(big, ns=(0, 0))
    fetch(tmp_path, source)
    assert (tmp_path / "models" / "x" / "vocab.json").read_bytes() == b"B" * 1000


@pytest.mark.parametrize(("others_come", "given_up"), [(True, True), (False, False)])
def test_one_file_that_fails_is_given_up_while_others_come_and_an_outage_lasts_as_long_as_patience(
    others_come: bool, given_up: bool, busy: Any, tmp_path: Path
) -> None:
    hub = {"kind": "huggingface", "repo": "a/b"}
    document = {"dest": str(tmp_path / "x"), "sources": [hub], "patience": 120}
    made = fw.Fetch(fw.params_from(document), threading.Event())
    (serving,) = made.servings
    serving.meter.last = time.monotonic() - (0 if others_come else 60)
    for _ in range(fw.STUCK):
        assert made.failed("config.json", serving, ws.Transient("503"), False)
    assert ("config.json" in serving.cannot) == given_up
    assert not serving.out
    serving.meter.last = time.monotonic() - 120
    made.failed("config.json", serving, ws.Transient("503"), False)
    assert serving.out
