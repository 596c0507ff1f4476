"""Killed, stopped, doubled, out of disk: nothing verified is lost or fetched twice, nothing half used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost.weight_sources import BLOCK
from tests.weights.conftest import Site
from tests.weights.making import digests_of
from tests.weights.servers import Hub

Served = tuple[Hub, dict[str, Any]]
CONCURRENCY = 2


def wait_for(condition: Any, seconds: float = 120) -> None:
    """Until it holds; fails the test if it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)


def arrived(site: Site) -> set[str]:
    return {p.name for p in site.dest.glob("*.safetensors")}


def test_kill_9_again_and_again_costs_only_what_was_in_flight(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.rate = 3_000_000
    kills = 0
    kept_after: list[dict[str, int]] = []
    for wanted in (1, 2, 3):
        process = site.start(source, concurrency=CONCURRENCY)
        wait_for(
            lambda wanted=wanted, process=process: len(arrived(site)) >= wanted or process.poll() is not None
        )
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        whole = arrived(site)
        # what stands in the model's folder is right, at any moment
        assert {p: d for p, d in digests_of(site.dest).items() if p in whole} == {
            p: d for p, d in digests_of(site.origin).items() if p in whole
        }
        time.sleep(0.3)  # the server notices that its client is gone
        kept_after.append({name: hub.sent[name] for name in whole})
    hub.rate = None
    result = site.fetch(source, concurrency=CONCURRENCY)
    assert result["ok"] and site.is_whole()
    assert kills >= 2
    for kept in kept_after:
        assert {name: hub.sent[name] for name in kept} == kept  # not one byte of a verified file again
    # in flight: a chunk that was not full, and what the sockets had taken
    assert sum(hub.sent.values()) <= hub.total() + kills * CONCURRENCY * 4 * BLOCK
    assert [p.name for p in site.models.iterdir()] == ["tiny"]


def test_a_file_moved_in_just_before_the_kill_is_hashed_and_kept(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    assert site.fetch(source)["ok"]
    site.stamp.unlink()  # as if it had not been written any more
    sent = sum(hub.sent.values())
    result = site.fetch(source)
    assert result["ok"]
    assert (result["kept_files"], sum(hub.sent.values())) == (11, sent)


def test_a_stop_signal_ends_it_soon_and_the_next_run_goes_on(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.rate = 1_500_000
    process = site.start(source, concurrency=CONCURRENCY)
    wait_for(lambda: hub.sent["model-00001-of-00004.safetensors"] > 2 * BLOCK)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=15)
    assert process.returncode == 1
    result = json.loads(out)
    assert [p["id"] for p in result["problems"]] == ["fetch.interrupted"]
    hub.rate = None
    before = sum(hub.sent.values())
    assert site.fetch(source)["ok"]
    assert site.is_whole()
    assert sum(hub.sent.values()) - before < hub.total() - BLOCK


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_ends_well(
    any_hub: Served, site: Site
) -> None:
    hub, source = any_hub
    hub.rate = 3_000_000
    first = site.start(source)
    wait_for(lambda: sum(hub.sent.values()) > 0)
    second = site.fetch(source)
    assert [p["id"] for p in second["problems"]] == ["fetch.running"]
    assert str(first.pid) in second["problems"][0]["what"]
    out, _ = first.communicate(timeout=60)
    assert json.loads(out)["ok"]
    assert site.is_whole()
    assert sum(hub.sent.values()) == hub.total()


def test_another_client_at_work_in_the_folder_is_not_disturbed(any_hub: Served, site: Site) -> None:
    _, source = any_hub
    lock = site.dest / ".cache" / "huggingface" / "download" / "config.json.lock"
    lock.parent.mkdir(parents=True)
    half = lock.with_name("x.incomplete")
    half.write_bytes(b"half")
    holder = subprocess.Popen(["flock", "--no-fork", str(lock), "sleep", "600"])
    try:
        wait_for(lambda: subprocess.run(["flock", "--nonblock", str(lock), "true"]).returncode != 0)
        result = site.fetch(source)
    finally:
        holder.kill()
        holder.wait()
    assert [p["id"] for p in result["problems"]] == ["fetch.running"]
    assert half.read_bytes() == b"half"
    assert site.fetch(source)["ok"]


def test_space_is_checked_for_what_is_missing_before_a_byte_travels(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    disk = os.statvfs(site.models)
    result = site.fetch(source, reserve=disk.f_blocks * disk.f_frsize)
    assert [p["id"] for p in result["problems"]] == ["disk.space"]
    assert "12.0 MB are still missing" in result["problems"][0]["what"]
    assert hub.sent == {}


class Disk:
    """A small file system of its own, below a site's models."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", self.path], capture_output=True)
        if done.returncode:
            pytest.skip("no right to mount a small file system here")

    def grow(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@pytest.fixture
def disk(site: Site) -> Iterator[Disk]:
    disk = Disk(site.models)
    yield disk
    subprocess.run(["umount", disk.path], capture_output=True)


def test_a_disk_that_fills_up_midway_is_named_and_after_more_space_it_goes_on(
    any_hub: Served, site: Site, disk: Disk
) -> None:
    hub, source = any_hub
    disk.mount("size=14m")
    hub.rate = 6_000_000
    process = site.start(source, concurrency=CONCURRENCY)
    wait_for(lambda: sum(hub.sent.values()) > BLOCK)
    (site.models / "someone-else").write_bytes(b"x" * 7_000_000)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert {p["id"] for p in json.loads(out)["problems"]} == {"disk.full"}
    whole, sent = arrived(site), dict(hub.sent)
    hub.rate = None
    disk.grow("size=40m")
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert all(hub.sent[name] == sent[name] for name in whole)


def test_inodes_that_run_out_are_named_before_the_start(any_hub: Served, site: Site, disk: Disk) -> None:
    hub, source = any_hub
    disk.mount("size=40m,nr_inodes=20")
    result = site.fetch(source)
    assert "disk.inodes" in {p["id"] for p in result["problems"]}
    assert hub.sent == {}
    disk.grow("nr_inodes=1000")
    assert site.fetch(source)["ok"]


def test_a_mount_point_as_dest_is_wrong_usage_with_the_cure(site: Site, hub: Hub) -> None:
    site.dest.mkdir()
    disk = Disk(site.dest)
    disk.mount("size=1m")
    try:
        process = site.start(stamp=None)
        _, err = process.communicate(timeout=30)
    finally:
        subprocess.run(["umount", site.dest], check=True)
    assert process.returncode == 2
    assert "take a folder below it" in err


@pytest.fixture
def read_only(site: Site) -> Iterator[Disk]:
    """The models of this site on a disk that is read-only, once `grow("ro")` is called."""
    disk = Disk(site.models)
    disk.mount("size=40m")
    yield disk
    subprocess.run(["umount", disk.path], capture_output=True)


def test_a_model_that_is_whole_on_a_read_only_disk_is_good(site: Site, read_only: Disk) -> None:
    shutil.copytree(site.origin, site.dest)
    read_only.grow("ro")
    for _ in range(2):
        result = site.fetch()
        assert result["ok"] and result["kept_files"] == 11
    assert site.fetch(stamp=None)["ok"]


def test_what_is_missing_on_a_read_only_disk_is_named_and_is_not_called_a_full_disk(
    any_hub: Served, site: Site, read_only: Disk
) -> None:
    hub, source = any_hub
    shutil.copytree(site.origin, site.dest)
    (site.dest / "config.json").unlink()
    (site.dest / "tokenizer.json").write_text("{}")
    read_only.grow("ro")
    result = site.fetch(source)
    assert {(p["id"], p["file"]) for p in result["problems"]} == {
        ("disk.rights", "config.json"), ("disk.rights", "tokenizer.json"),
    }  # fmt: skip
    assert hub.sent == {}
    shutil.rmtree(site.root / "state")
    assert [p["id"] for p in site.fetch(source, dest=str(site.models / "other"))["problems"]] == [
        "disk.rights"
    ]


def test_a_mount_point_whose_model_is_whole_is_good(site: Site) -> None:
    site.dest.mkdir()
    disk = Disk(site.dest)
    disk.mount("size=40m")
    try:
        shutil.copytree(site.origin, site.dest, dirs_exist_ok=True)
        disk.grow("ro")
        result = site.fetch(seal=False)
    finally:
        subprocess.run(["umount", site.dest], check=True)
    assert result["ok"] and result["kept_files"] == 11


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("beside", [0o755, 0o777])
def test_a_model_that_another_user_sealed_is_good_for_everyone(beside: int, site: Site) -> None:
    assert site.fetch({"kind": "path", "dir": str(site.origin)})["ok"]
    site.models.chmod(beside)
    root = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        root.chmod(0o755)
        shutil.move(site.models, root / "models")
        shutil.copy(site.manifest, root)
        parameters = {"dest": str(root / "models" / "tiny"), "manifest": str(root / site.manifest.name)}
        script = (
            # first, since this interpreter may be closed to others, too
            "import concurrent.futures.thread, encodings.utf_8_sig, os, sys\n"
            "from tasks.onhost import fetch_weights\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(fetch_weights.main(['--stdin']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], input=json.dumps(parameters), capture_output=True, text=True
        )
    finally:
        shutil.rmtree(root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept_files"] == 11


def test_progress_lines_are_json_and_end_at_the_total(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.rate = 4_000_000
    hub.faults["model-00001-of-00004.safetensors"] = []
    result = site.fetch(source)
    lines = [json.loads(x[10:]) for x in result["stderr"].splitlines() if x.startswith("#progress ")]
    download = [x for x in lines if x["phase"] == "download"]
    assert len(download) > 1
    assert set(download[0]) == {"phase", "done", "total", "unit", "note"}
    assert download[-1]["done"] == download[-1]["total"] == hub.total()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": [{}]}, "unknown parameter source"),
        ({"dest": "relative"}, "absolute"),
        ({"sources": [{"kind": "ftp"}]}, "kind"),
        ({"sources": [{"kind": "huggingface"}]}, "repo is missing"),
        ({"sources": [{"kind": "huggingface", "repo": "a/b", "tokne": "x"}]}, "unknown key tokne"),
        (
            {"sources": [{"kind": "huggingface", "repo": "a/b", "endpoint": "http://mirror.example"}]},
            "not https",
        ),
        ({"sources": [{"kind": "s3", "bucket": "b", "addressing": "dns"}]}, "addressing must be one of"),
        (
            {"sources": [{"kind": "s3", "bucket": "b", "endpoint": "https://key:secret@s3.example"}]},
            "credentials",
        ),
        ({"sources": [{"kind": "peer", "url": "http://10.0.0.1:1", "cert_file": "c"}]}, "https"),
        ({"concurrency": 0}, "concurrency"),
        ({"manifest": "/nowhere"}, "cannot use the manifest"),
        ({"sources": [], "manifest": None}, "sources or a manifest"),
    ],
)
def test_wrong_parameters_are_named_and_nothing_is_made(
    change: dict[str, Any], words: str, site: Site
) -> None:
    sources = change.pop("sources", [{"kind": "path", "dir": str(site.origin)}])
    process = site.start(*sources, **change)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert words in err
