"""A bundle of the controller on a host: sent once, whole, and the one that the site names now."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import offline, shipping
from tasks.digest import digest_of
from tasks.offline import HostBundle
from tasks.plan import Stop
from tasks.shipping import NotShipped, fetch_file, send_file


class Here:
    """A host that is this machine, asked by commands like any other."""

    connector = object()

    def __init__(self, path: str | None = None) -> None:
        self.env = {**os.environ, **({"PATH": path} if path else {})}
        self.sent = 0

    def run(self, script: str, stdin: str | None = None, timeout: float = 60) -> Any:
        self.sent += len(stdin or "")
        done = subprocess.run(
            ["sh", "-c", script], input=stdin or "", capture_output=True, text=True, env=self.env
        )
        return SimpleNamespace(
            ok=done.returncode == 0, stdout=done.stdout, stderr=done.stderr, rc=done.returncode
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def bundle(folder: Path, files: dict[str, bytes], part: str = "source") -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    items = [
        {"path": name, "bytes": len(content), "sha256": sha256(content), "part": part}
        for name, content in files.items()
    ]
    (folder / "manifest.json").write_text(json.dumps({"files": items}))
    return folder


class Host:
    """A host and what its bundle step does there."""

    def __init__(self, root: Path, path: str | None = None) -> None:
        self.remote, self.said = Here(path), list[str]()
        self.dest = root / "cache" / "bundle"
        self.layout = SimpleNamespace(root=str(root))

    def use(self, here: Path) -> HostBundle:
        plan: Any = SimpleNamespace(
            remote=self.remote, layout=self.layout, route="source", say=self.said.append, name="h",
            recipe=SimpleNamespace(name="r"),
        )  # fmt: skip
        return offline._sent(plan, here)

    def held(self, name: str) -> bytes:
        return (self.dest / name).read_bytes()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


LARGE = bytes(range(256)) * 40_000


def test_going_back_to_an_earlier_bundle_is_going_back_to_its_files(host: Host, tmp_path: Path) -> None:
    first = bundle(tmp_path / "a", {"source/v.tar": b"commit of A", "source/same": b"same", "w.whl": LARGE})
    later = bundle(tmp_path / "b", {"source/v.tar": b"of B, longer", "source/same": b"same", "w.whl": b"B"})
    for here in (first, later, first):
        host.use(here)
        assert host.held("source/v.tar") == (here / "source/v.tar").read_bytes()
        assert host.held("w.whl") == (here / "w.whl").read_bytes()
    told = len(host.said)
    host.use(first)
    assert len(host.said) == told, "whole: nothing is sent"


def test_files_of_the_same_size_are_told_apart_by_their_bytes(host: Host, tmp_path: Path) -> None:
    names = [f"wheels/{number}.whl" for number in range(7)]
    host.use(bundle(tmp_path / "a", dict.fromkeys(names, b"of A") | {"big": LARGE}))
    later = bundle(tmp_path / "b", dict.fromkeys(names, b"of B") | {"big": LARGE[::-1]})
    host.use(later)
    assert {host.held(name) for name in names} == {b"of B"}
    assert host.held("big") == LARGE[::-1]


def test_a_file_that_is_gone_from_the_host_comes_again_and_alone(host: Host, tmp_path: Path) -> None:
    here = bundle(tmp_path / "a", {"source/v.tar": b"tar", "big": LARGE})
    host.use(here)
    (host.dest / "source/v.tar").unlink()
    host.remote.sent = 0
    host.use(here)
    assert host.held("source/v.tar") == b"tar"
    assert host.remote.sent < len(LARGE)


def test_what_is_another_file_here_too_is_named_and_does_not_stay(host: Host, tmp_path: Path) -> None:
    here = bundle(tmp_path / "a", {"source/v.tar": b"tar"})
    (here / "source/v.tar").write_bytes(b"rat")
    with pytest.raises(Stop, match=r"source/v\.tar: not the bytes that the manifest names"):
        host.use(here)
    assert not (host.dest / "source/v.tar").exists()


def test_a_host_that_cannot_hash_does_not_take_the_bundle_for_whole(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sha256sum").write_text("#!/bin/sh\necho 'unrecognized option: quiet'\nexit 1\n")
    (tools / "sha256sum").chmod(0o755)
    host = Host(tmp_path / "host", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(Stop, match="cannot be hashed on h: unrecognized option"):
        host.use(bundle(tmp_path / "a", {"source/v.tar": b"tar"}))
    assert list(host.dest.glob(".whole-*")) == []


def test_builds_that_an_earlier_bundle_left_are_not_this_ones(host: Host, tmp_path: Path) -> None:
    key = {"commit": "c" * 40}
    name = f"built/{digest_of(key)[:16]}"
    wheel = {"file": "v-1-py3-none-any.whl", "sha256": "0" * 64, "bytes": 1}
    entry = json.dumps({"key": key, "wheel": wheel, "lock_sha256": "0", "env": {}}).encode()
    with_build = {f"{name}/provenance.json": entry, f"{name}/{wheel['file']}": b"w"}
    assert len(host.use(bundle(tmp_path / "a", with_build)).built) == 1
    assert host.use(bundle(tmp_path / "b", {"source/v.tar": b"tar"})).built == ()


# ---------------------------------------------------------------- one file


def put(tmp_path: Path, content: bytes) -> tuple[Path, Path]:
    (tmp_path / "host").mkdir()
    (tmp_path / "v.whl").write_bytes(content)
    return tmp_path / "v.whl", tmp_path / "host" / "v.whl"


def send(local: Path, dest: Path) -> None:
    remote: Any = Here()
    send_file(remote, local, str(dest), sha256(local.read_bytes()), lambda line: None)


def test_what_an_earlier_build_left_half_sent_does_not_get_in_the_way(tmp_path: Path) -> None:
    local, dest = put(tmp_path, b"new build " * 1000)
    for left in ("v.whl.part", "v.whl.0123456789ab.part"):
        (tmp_path / "host" / left).write_bytes(b"old build " * 100)
    send(local, dest)
    assert dest.read_bytes() == local.read_bytes()
    assert [path.name for path in dest.parent.iterdir()] == ["v.whl"]


def test_a_transfer_that_broke_off_goes_on_and_a_spoilt_beginning_is_sent_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "PIECE", 1000)
    content = bytes(range(250)) * 40
    local, dest = put(tmp_path, content)
    part = dest.with_name(f"v.whl.{sha256(content)[:12]}.part")
    part.write_bytes(content[:9000])
    remote: Any = Here()
    send_file(remote, local, str(dest), sha256(content), lambda line: None)
    assert remote.sent < 2000
    dest.unlink()
    part.write_bytes(b"x" + content[1:9000])
    send(local, dest)
    assert dest.read_bytes() == content


def test_a_file_that_is_not_what_it_should_be_is_not_sent_for_good(tmp_path: Path) -> None:
    local, dest = put(tmp_path, b"evil")
    remote: Any = Here()
    with pytest.raises(NotShipped, match="expected SHA-256"):
        send_file(remote, local, str(dest), sha256(b"good"), lambda line: None)
    assert list(dest.parent.iterdir()) == []


def test_an_empty_file_arrives_too(tmp_path: Path) -> None:
    local, dest = put(tmp_path, b"")
    send(local, dest)
    assert dest.read_bytes() == b""


def test_half_of_another_build_is_no_beginning_of_what_is_fetched(tmp_path: Path) -> None:
    there, here = put(tmp_path, b"new build")
    here.with_name("v.whl.part").write_bytes(b"old")
    remote: Any = Here()
    assert fetch_file(remote, str(there), here, sha256(b"new build"), 9, lambda line: None)
    assert here.read_bytes() == b"new build"
