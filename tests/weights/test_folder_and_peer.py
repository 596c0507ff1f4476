"""Copies on a disk, and copies from another host over TLS with a pinned certificate."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import serve_weights
from tasks.onhost import weight_sources as ws
from tests.weights.conftest import Site
from tests.weights.making import digests_of
from tests.weights.servers import Portal, Wire

SHARD = "model-00002-of-00004.safetensors"
TOKEN = "peer-token-of-one-run-0123456789abcdef"


# ---- path


def test_a_mounted_copy_is_copied_and_proved(site: Site) -> None:
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    assert result["ok"] and site.is_whole()
    assert result["received_bytes"] == sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())


@pytest.mark.parametrize("how", ["hardlink", "symlink"])
def test_a_copy_may_be_linked_instead_so_that_there_is_one(how: str, site: Site, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.origin, copy)
    result = site.fetch({"kind": "path", "dir": str(copy), "how": how})
    assert result["ok"] and site.is_whole()
    target = site.dest / SHARD
    assert target.is_symlink() == (how == "symlink")
    assert target.samefile(copy / SHARD)
    assert (copy / SHARD).stat().st_mode & 0o200  # the other copy is not made read-only
    assert site.fetch({"kind": "path", "dir": str(copy), "how": how})["kept_files"] == 11


def test_a_bad_file_of_an_upload_comes_from_the_next_source(site: Site, tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    shutil.copytree(site.origin, upload)
    data = bytearray((upload / SHARD).read_bytes())
    data[1000] ^= 1
    (upload / SHARD).write_bytes(data)
    sources = [{"kind": "path", "dir": str(upload)}, {"kind": "path", "dir": str(site.origin)}]
    result = site.fetch(*sources)
    assert result["ok"] and site.is_whole()
    assert [s["files"] for s in result["sources"]] == [10, 1]
    assert len(result["rejected"]) == 2


def test_a_copy_that_stopped_goes_on(site: Site) -> None:
    parts = site.work / "tiny" / "parts"
    parts.mkdir(parents=True)
    (parts / f"{SHARD}.incomplete").write_bytes((site.origin / SHARD).read_bytes()[:2_000_000])
    (parts / f"{SHARD}.incomplete.of").write_text(digests_of(site.origin)[SHARD])
    result = site.fetch({"kind": "path", "dir": str(site.origin)})
    assert result["ok"] and site.is_whole()
    total = sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())
    assert result["received_bytes"] == total - 2_000_000


def test_a_folder_that_is_not_there_is_named(site: Site) -> None:
    result = site.fetch({"kind": "path", "dir": "/nowhere/x"}, manifest=None)
    assert "no such folder" in result["problems"][0]["what"]


def test_files_that_nothing_proves_are_counted(site: Site) -> None:
    result = site.fetch({"kind": "path", "dir": str(site.origin)}, manifest=None)
    assert result["ok"]
    assert result["unproved_files"] == 11


def test_everything_there_and_no_source_is_enough(site: Site) -> None:
    shutil.copytree(site.origin, site.dest)
    result = site.fetch()
    assert result["ok"]
    assert result["fetched_files"] == 0


def test_it_needs_no_client_and_runs_on_an_old_python(site: Site) -> None:
    old = {**os.environ, "PYENV_VERSION": "3.8"}
    if subprocess.run(["sh", "-c", "python3.8 --version"], env=old, capture_output=True).returncode:
        pytest.skip("no Python 3.8 here")
    program = Path(serve_weights.__file__).with_name("fetch_weights.py")
    parameters = json.dumps(site.parameters({"kind": "path", "dir": str(site.origin)}))
    done = subprocess.run(
        ["python3.8", str(program), "--stdin"], input=parameters, capture_output=True, text=True, env=old
    )
    assert done.returncode == 0, done.stderr
    assert site.is_whole()


def test_a_missing_client_is_said_so(site: Site) -> None:
    """As on a host whose tools environment is not installed: -S leaves out site-packages."""
    program = Path(serve_weights.__file__).with_name("fetch_weights.py")
    source = {"kind": "huggingface", "repo": "a/b"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), "--stdin"],
        input=json.dumps(site.parameters(source, manifest=None)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "tools environment" in json.loads(done.stdout)["problems"][0]["fix"]


# ---- peer


@contextmanager
def peer(folder: Path, root: Path, **more: Any) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """A host that serves its copy; the source that the other host is given."""
    root.mkdir(exist_ok=True)
    # one for each side: the server deletes its own once it is read
    token, served = root / "token", root / "token-of-the-server"
    for path in (token, served):
        path.write_text(TOKEN + "\n")
        path.chmod(0o600)
    manifest = root / "m.sha256"
    if not manifest.exists():
        manifest.write_text(serve_weights.vw.manifest_text(digests_of(folder)))
    parameters = {
        "dir": str(folder), "manifest": str(manifest), "address": "127.0.0.1", "token_file": str(served),
        "cert_file": str(root / "cert.pem"), "info_file": str(root / "info.json"), "idle": 60, **more,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-I", serve_weights.__file__, "--stdin"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(parameters))
    process.stdin.close()
    process.stdin = None
    line = process.stdout.readline()
    known = json.loads(line) if line else {"url": ""}
    if line:
        assert json.loads((root / "info.json").read_text()) == known
        assert not served.exists()
    source = {
        "kind": "peer",
        "url": known["url"],
        "cert_file": parameters["cert_file"],
        "token_file": str(token),
    }
    try:
        yield source, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


def test_a_second_host_gets_the_model_from_the_first(site: Site, tmp_path: Path) -> None:
    with peer(site.origin, tmp_path / "peer") as (source, _):
        result = site.fetch(source)
        assert result["ok"] and site.is_whole()
        assert site.fetch(source)["kept_files"] == 11


def test_without_a_manifest_the_peers_hashes_prove_the_copy(site: Site, tmp_path: Path) -> None:
    with peer(site.origin, tmp_path / "peer") as (source, _):
        result = site.fetch(source, manifest=None)
    assert result["ok"]
    assert result["unproved_files"] == 0


def test_a_peer_copy_goes_on_in_the_middle_of_a_file(site: Site, tmp_path: Path) -> None:
    parts = site.work / "tiny" / "parts"
    parts.mkdir(parents=True)
    (parts / f"{SHARD}.incomplete").write_bytes((site.origin / SHARD).read_bytes()[:1_500_000])
    (parts / f"{SHARD}.incomplete.of").write_text(digests_of(site.origin)[SHARD])
    with peer(site.origin, tmp_path / "peer") as (source, _):
        result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    total = sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())
    assert result["received_bytes"] == total - 1_500_000


def test_another_server_at_the_address_is_not_believed(site: Site, tmp_path: Path) -> None:
    with (
        peer(site.origin, tmp_path / "real") as (real, _),
        peer(site.origin, tmp_path / "false") as (false, _),
    ):
        result = site.fetch({**real, "url": false["url"]}, patience=0)
    assert not result["ok"]
    assert "CERTIFICATE_VERIFY_FAILED" in json.dumps(result)


def test_an_answer_that_is_not_the_file_costs_nothing_of_what_is_there(tmp_path: Path) -> None:
    cert, key = serve_weights.make_certificate(str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Portal)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    url = f"https://127.0.0.1:{server.server_address[1]}"
    spec = {"kind": "peer", "url": url, "cert_file": cert, "token_file": str(tmp_path / "token")}
    part = ws.Part(str(tmp_path / "x"), ws.Meter(lambda n: None), threading.Event())
    try:
        for there in (b"", b"x" * 1000):
            Path(part.path).write_bytes(there)
            with pytest.raises(ws.Transient, match="was asked for from byte"):
                ws.make_source(spec, "").fetch(ws.Remote("x", 5000), part)
            assert Path(part.path).read_bytes() == there
    finally:
        server.shutdown()
        server.server_close()


def ask(source: dict[str, Any], path: str, token: str | None = TOKEN, method: str = "GET") -> int:
    context = ssl.create_default_context(cafile=source["cert_file"])
    context.check_hostname = False
    request = urllib.request.Request(source["url"] + path, method=method)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return int(answer.status)
    except urllib.request.HTTPError as e:  # type: ignore[attr-defined]
        return int(e.code)


def test_a_peer_serves_named_files_to_the_token_and_nothing_else(site: Site, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.origin, copy)
    manifest = tmp_path / "peer" / "m.sha256"
    manifest.parent.mkdir()
    manifest.write_text(serve_weights.vw.manifest_text(digests_of(copy)))
    (copy / "secret.txt").write_text("not in the manifest")
    with peer(copy, tmp_path / "peer") as (source, _):
        assert ask(source, "/files") == 200
        assert ask(source, "/file/config.json", method="HEAD") == 200
        assert ask(source, "/files", token=None) == 403
        assert ask(source, "/files", token="x" * 40) == 403
        for path in (
            "/",
            "/file/secret.txt",
            "/file/../m.sha256",
            "/file//etc/passwd",
            "/file/%2e%2e/m.sha256",
        ):
            assert ask(source, path) == 404
        assert ask(source, "/files", method="POST") == 501
        (copy / "config.json").write_text("{}")
        assert ask(source, "/file/config.json") == 410  # not what was verified any more


def test_a_peer_whose_own_copy_is_bad_does_not_serve(site: Site, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.origin, copy)
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "m.sha256").write_text(serve_weights.vw.manifest_text(digests_of(copy)))
    (copy / SHARD).write_bytes(b"bad")
    with peer(copy, tmp_path / "peer") as (source, process):
        assert source["url"] == ""
        assert process.wait(timeout=20) == 1


def test_a_peer_ends_by_itself_when_no_one_asks(site: Site, tmp_path: Path) -> None:
    with peer(site.origin, tmp_path / "peer", idle=1) as (source, process):
        assert ask(source, "/files") == 200
        assert process.wait(timeout=20) == 0
        assert not Path(source["cert_file"]).exists()
        assert not (tmp_path / "peer" / "info.json").exists()
    left = [p.name for p in Path("/tmp").glob("rackwright-peer-*") if p.owner() == Path("/tmp").owner()]
    assert left == []


def test_a_client_that_says_nothing_does_not_hold_up_others(site: Site, tmp_path: Path) -> None:
    with peer(site.origin, tmp_path / "peer") as (source, _):
        port = int(source["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            assert ask(source, "/files") == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": "0.0.0.0"}, "one address"),
        ({"address": None}, "address is missing"),
        ({"port": "80"}, "whole number"),
        ({"tls": False}, "unknown parameter tls"),
    ],
)
def test_wrong_parameters_of_a_peer_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    known = {"dir": "/x", "manifest": "/m", "address": "127.0.0.1", "token_file": "/t", "cert_file": "/c"}
    with pytest.raises(serve_weights.vw.Usage, match=words):
        serve_weights.checked({**known, **change})


def test_a_token_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "t"
    token.write_text(TOKEN)
    token.chmod(0o640)
    with pytest.raises(serve_weights.vw.Usage, match="chmod 600"):
        serve_weights.read_token(str(token))
    token.write_text("short")
    token.chmod(0o600)
    with pytest.raises(serve_weights.vw.Usage, match="32 characters"):
        serve_weights.read_token(str(token))


def test_a_certificate_can_be_made_without_the_openssl_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    cert, key = serve_weights.make_certificate(str(tmp_path))
    assert Path(key).stat().st_mode & 0o077 == 0
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)


def test_a_wire_that_is_cut_again_and_again_only_costs_what_was_on_it(site: Site, tmp_path: Path) -> None:
    rng = random.Random(4)
    with peer(site.origin, tmp_path / "peer") as (source, _):
        wire = Wire(
            int(source["url"].rpartition(":")[2]), [50_000, *(rng.randrange(1, 2_000_000) for _ in range(8))]
        )
        result = site.fetch({**source, "url": f"https://127.0.0.1:{wire.port}"}, concurrency=2, patience=30)
        wire.listener.close()
    assert wire.cuts == []
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []
    total = sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())
    assert result["received_bytes"] == total
