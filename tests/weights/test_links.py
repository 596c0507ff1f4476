"""Links: a name in the model's folder may go, the bytes that it leads to are somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tasks.onhost import fetch_weights as fw
from tasks.onhost import weight_sources as ws
from tests.weights.conftest import SOURCE, Site, hf
from tests.weights.making import digests_of
from tests.weights.servers import Hub, running

SHARD = "model-00002-of-00004.safetensors"
LINKS = {"symlink": os.symlink, "hardlink": os.link}


@pytest.fixture
def shared(site: Site, tmp_path: Path) -> Path:
    """A copy of the model that belongs to somebody else, on the same disk."""
    folder = tmp_path / "shared"
    shutil.copytree(site.origin, folder)
    return folder


def parts_of(site: Site) -> Path:
    parts = site.work / "tiny" / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    return parts


def label(site: Site, name: str = SHARD) -> str:
    return digests_of(site.origin)[name]


@pytest.mark.parametrize("how", LINKS)
def test_a_run_that_was_killed_while_it_hashed_a_linked_file_leaves_that_file_alone(
    how: str, site: Site, shared: Path
) -> None:
    part = parts_of(site) / f"{SHARD}.incomplete"
    big = shared / SHARD
    with big.open("r+b") as f:
        f.truncate(600_000_000)
    source = {"kind": "path", "dir": str(shared), "how": how}
    first = site.start(source, manifest=None, threads=1)
    while not os.path.lexists(part):
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert ws.foreign(str(part)), "it was too late for this test"
    site.fetch(source, manifest=None)
    assert big.stat().st_size == 600_000_000


@pytest.mark.parametrize("how", LINKS)
@pytest.mark.parametrize("shape", ["huggingface", "modelscope", "path"])
def test_a_part_that_is_a_link_is_dropped_and_the_file_comes_whole_from_whoever_has_it(
    how: str, shape: str, site: Site, shared: Path, content: dict[str, bytes]
) -> None:
    half = shared / SHARD
    os.truncate(half, 1_000_000)
    before = half.read_bytes()
    part = parts_of(site) / f"{SHARD}.incomplete"
    LINKS[how](half, part)
    Path(f"{part}.of").write_text(label(site))
    if shape == "path":
        result = site.fetch({"kind": "path", "dir": str(site.origin)})
    else:
        with running(content, shape) as hub:
            result = site.fetch(SOURCE[shape](hub))
            assert hub.sent[SHARD] == len(content[SHARD])
    assert result["ok"] and site.is_whole()
    assert half.read_bytes() == before
    assert not (site.dest / SHARD).is_symlink() and (site.dest / SHARD).stat().st_nlink == 1


def test_a_whole_file_behind_a_link_of_an_earlier_run_is_copied_where_copies_are_wanted(
    site: Site, shared: Path
) -> None:
    part = parts_of(site) / f"{SHARD}.incomplete"
    part.symlink_to(shared / SHARD)
    Path(f"{part}.of").write_text(label(site))
    assert site.fetch({"kind": "path", "dir": str(site.origin)})["ok"]
    assert not (site.dest / SHARD).is_symlink()


@pytest.mark.parametrize("how", LINKS)
def test_a_source_that_grows_between_the_listing_and_the_link_is_not_cut(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "nas"
    folder.mkdir()
    growing = folder / "x"
    growing.write_bytes(b"x" * 1000)
    source = ws.make_source({"kind": "path", "dir": str(folder), "how": how}, "")
    listed = source.list()["x"]
    with growing.open("ab") as f:
        f.write(b"y" * 1000)
    part = ws.Part(str(tmp_path / "parts" / "x"), ws.Meter(lambda n: None), threading.Event())
    with pytest.raises(ws.BadBody):
        source.fetch(listed, part)
    assert growing.read_bytes() == b"x" * 1000 + b"y" * 1000
    assert not os.path.lexists(part.path)


@pytest.mark.parametrize("how", LINKS)
@pytest.mark.parametrize("damage", ["cut off", "wrong"])
def test_a_bad_file_of_the_folder_that_is_a_link_is_replaced_and_what_it_leads_to_stays(
    damage: str, how: str, site: Site, shared: Path
) -> None:
    blob = shared / SHARD
    data = bytearray(blob.read_bytes())
    if damage == "cut off":
        del data[400_000:]
    else:
        data[-1] ^= 1
    blob.write_bytes(data)
    blob.chmod(0o664)
    site.dest.mkdir()
    LINKS[how](blob, site.dest / SHARD)
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    assert result["ok"] and site.is_whole()
    assert blob.read_bytes() == data
    assert blob.stat().st_mode & 0o777 == 0o664
    for rejected in result["rejected"]:
        assert Path(rejected["kept_at"]).read_bytes() == data


def test_half_files_and_locks_of_others_behind_a_linked_folder_are_left_alone(
    site: Site, tmp_path: Path
) -> None:
    other = tmp_path / "other-team"
    other.mkdir()
    (other / "train.lock").touch()
    (other / "checkpoint.tmp").write_text("their work")
    (other / f"{SHARD}.incomplete").write_bytes(b"theirs")
    site.dest.mkdir()
    (site.dest / "extra").symlink_to(other)
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    assert {(p["id"], p["file"]) for p in result["problems"]} == {("link.outside", "extra")}
    assert {p.name for p in other.iterdir()} == {"train.lock", "checkpoint.tmp", f"{SHARD}.incomplete"}
    assert not site.rejected.exists()


@pytest.mark.parametrize("name", ["leftover.tmp", "x.lock", f"{SHARD}.incomplete"])
def test_a_leftover_that_is_a_link_goes_and_what_it_leads_to_stays(
    name: str, site: Site, tmp_path: Path, hub: Hub
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes((site.origin / SHARD).read_bytes()[:70_000])
    before = theirs.read_bytes()
    site.dest.mkdir()
    (site.dest / name).symlink_to(theirs)
    result = site.fetch(hf(hub))
    assert result["ok"] and site.is_whole()
    assert theirs.read_bytes() == before


@pytest.mark.parametrize("damage", ["missing", "wrong", "cut off"])
def test_a_bad_file_behind_a_linked_folder_is_named_and_nothing_is_written_there(
    damage: str, site: Site, shared: Path
) -> None:
    target = shared / "encoding" / "encoding_dsv4.py"
    if damage == "missing":
        target.unlink()
    elif damage == "wrong":
        target.write_text("wrong\n")
    else:
        os.truncate(target, 3)
    before = digests_of(shared)
    site.dest.mkdir()
    (site.dest / "encoding").symlink_to(shared / "encoding")
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    (problem,) = [p for p in result["problems"] if p["file"] == "encoding/encoding_dsv4.py"]
    assert problem["id"] == "link.outside" and str(shared / "encoding") in problem["what"]
    assert digests_of(shared) == before
    assert {p.stat().st_mode & 0o222 for p in shared.rglob("*")} != {0}
    (site.dest / "encoding").unlink()
    assert site.fetch({"kind": "path", "dir": str(site.origin)})["ok"] and site.is_whole()


def test_files_behind_a_linked_folder_are_not_made_read_only(site: Site, shared: Path) -> None:
    site.dest.mkdir()
    (site.dest / "encoding").symlink_to(shared / "encoding")
    source = {"kind": "path", "dir": str(site.origin), "how": "symlink"}  # links may lead out of the folder
    assert site.fetch(source)["ok"]
    assert all(p.stat().st_mode & 0o200 for p in (shared / "encoding").iterdir())


def test_a_label_that_is_a_link_is_replaced(site: Site, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    for name, link in ((SHARD, os.symlink), ("config.json", os.link)):
        link(theirs, parts_of(site) / f"{name}.incomplete.of")
    assert site.fetch({"kind": "path", "dir": str(site.origin)})["ok"]
    assert theirs.read_text() == "theirs"


def test_a_lock_that_is_a_link_is_not_written_through(site: Site, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    site.work.mkdir()
    (site.work / "tiny.lock").symlink_to(theirs)
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    assert not result["ok"]
    assert theirs.read_text() == "theirs"


def test_a_model_folder_that_is_a_link_is_filled_where_it_leads_and_locked_by_either_name(
    site: Site, tmp_path: Path, hub: Hub
) -> None:
    real = tmp_path / "big" / "tiny"
    real.mkdir(parents=True)
    site.dest.symlink_to(real)
    with fw.Lock(str(real.parent / fw.WORK / "tiny.lock")):
        refused = site.fetch(hf(hub))
    assert [p["id"] for p in refused["problems"]] == ["fetch.running"]
    assert site.fetch(hf(hub))["ok"] and site.is_whole()
    assert site.dest.is_symlink() and digests_of(real) == digests_of(site.origin)
    assert [p.name for p in site.models.iterdir()] == ["tiny"]
    assert [p.name for p in real.parent.iterdir()] == ["tiny"]
