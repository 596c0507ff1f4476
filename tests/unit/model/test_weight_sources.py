"""What errors of clients mean, what may be an address, and what never reaches a log."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import weight_sources as ws


class Response:
    def __init__(self, status: int, **headers: str) -> None:
        self.status_code = status
        self.headers = {k.replace("_", "-"): v for k, v in headers.items()}


class ClientError(Exception):
    def __init__(self, text: str = "no", response: Any = None, **more: Any) -> None:
        super().__init__(text)
        self.response = response
        self.__dict__.update(more)


def boto(code: str, status: int) -> ClientError:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}}
    return ClientError(f"An error occurred ({code})", answer)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (ClientError(response=Response(401)), ws.Refused),
        (ClientError(response=Response(403)), ws.Refused),
        (ClientError(response=Response(400)), ws.Refused),
        (ClientError(response=Response(404)), ws.NotThere),
        (ClientError(response=Response(429)), ws.Transient),
        (ClientError(response=Response(503)), ws.Transient),
        (ClientError(response=Response(416)), ws.Transient),
        (ClientError(status_code=500), ws.Transient),
        (boto("NoSuchKey", 404), ws.NotThere),
        (boto("SlowDown", 503), ws.Transient),
        (boto("PathStyleDomainForbidden", 403), ws.Refused),
        (ConnectionResetError("reset"), ws.Transient),
        (TimeoutError("slow"), ws.Transient),
        (ClientError("SSL: CERTIFICATE_VERIFY_FAILED"), ws.Refused),
        (ws.BadBody("x"), ws.BadBody),
    ],
)
def test_an_error_means(error: Exception, meaning: type[Exception]) -> None:
    assert type(ws.classify(error, "hub")) is meaning


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_error_of_the_disk_is_not_blamed_on_the_source(number: int) -> None:
    error = OSError(number, "disk")
    assert ws.classify(error, "hub") is error


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ClientError(response=Response(429, Retry_After="7")), 7.0),
        (ClientError(response=Response(503, retry_after="0.5")), 0.5),
        (ClientError(response=Response(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")), None),
        (ClientError(response=Response(429), retry_after=9), 9.0),
        (ClientError(response=Response(429)), None),
    ],
)
def test_the_time_that_a_server_asks_for_is_kept(error: Exception, after: float | None) -> None:
    found = ws.classify(error, "hub")
    assert isinstance(found, ws.Transient)
    assert found.after == after


@pytest.mark.parametrize(
    "text",
    [
        "GET https://cdn.example/x?X-Amz-Signature=topsecret&Expires=1 failed",
        "401 for 'https://cdn.example/x?token=topsecret'",
        "header Authorization: Bearer topsecret",
        "with hf_topsecretTOPSECRET in it",
    ],
)
def test_no_secret_of_an_error_is_repeated(text: str) -> None:
    told = str(ws.classify(ClientError(text), "hub"))
    assert "topsecret" not in told
    assert told.startswith("hub: ClientError")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hub.example", True),
        ("https://hub.example/base/", True),
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", True),
        ("http://hub.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("ftp://hub.example", False),
        ("hub.example", False),
        ("https://user:secret@hub.example", False),
    ],
)
def test_an_endpoint_is_https_or_this_machine(url: str, allowed: bool) -> None:
    if allowed:
        assert ws.checked_url(url, False, "x") == url.rstrip("/")
    else:
        with pytest.raises(ValueError, match="x:"):
            ws.checked_url(url, False, "x")


def test_http_can_be_allowed_for_a_mirror_in_the_house() -> None:
    assert ws.checked_url("http://mirror.example/", True, "x") == "http://mirror.example"


def test_a_token_file_must_be_private_and_hold_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    with pytest.raises(ws.Refused, match="No such file"):
        ws.secret({"token_file": str(token)}, "NONE")
    token.write_text("\n")
    token.chmod(0o600)
    with pytest.raises(ws.Refused, match="empty"):
        ws.secret({"token_file": str(token)}, "NONE")
    token.write_text("abc\n")
    assert ws.secret({"token_file": str(token)}, "NONE") == "abc"
    token.chmod(0o604)
    with pytest.raises(ws.Refused, match="other users") as refused:
        ws.secret({"token_file": str(token)}, "NONE")
    assert refused.value.fix == f"chmod 600 {token}"
    monkeypatch.setenv("HUB_TOKEN", "xyz")
    assert ws.secret({}, "HUB_TOKEN") == "xyz"
    assert ws.secret({"token_env": "OTHER"}, "HUB_TOKEN") is None


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({}, "ambient"),
        ({"endpoint": "https://own.example"}, "ambient"),
        ({"endpoint": "http://127.0.0.1:8000"}, "ambient"),
        ({"endpoint": "http://mirror.lan", "allow_http": True}, None),
        ({"endpoint": "https://measured.example", "anonymous": True}, None),
    ],
)
def test_a_token_of_the_environment_goes_only_where_the_site_says_and_none_can_read_it(
    more: dict[str, Any], sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "ambient")
    spec = ws.make_source({"kind": "huggingface", "repo": "a/b", **more}, "").spec
    assert ws.hub_token(spec, "HUB_TOKEN") == sent


@pytest.mark.parametrize("key", ["token_file", "token_env"])
def test_a_token_that_is_named_forbids_plain_http(key: str) -> None:
    spec = {"kind": "modelscope", "repo": "a/b", "endpoint": "http://mirror.lan", "allow_http": True}
    with pytest.raises(ValueError, match="not https"):
        ws.make_source({**spec, key: "X"}, "")


def test_no_address_of_the_environment_reaches_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        for name in ws.ELSEWHERE:
            context.setenv(name, "http://elsewhere.example")
        for name in list(ws.os.environ):
            context.setenv(name, ws.os.environ[name])  # put back afterwards
        ws.quiet_clients(str(tmp_path))
        assert not any("elsewhere" in value for value in ws.os.environ.values())


class Counted:
    def __init__(self) -> None:
        self.shown = 0
        self.meter = ws.Meter(self.add)

    def add(self, n: int) -> None:
        self.shown += n


def test_a_part_appends_counts_and_forgets_what_is_cut_off(tmp_path: Path) -> None:
    counted = Counted()
    path = tmp_path / "a" / "x.incomplete"
    part = ws.Part(str(path), counted.meter, threading.Event())
    with part:
        part.write(b"12345678")
    with part:
        part.write(b"9")
        assert part.tell() == 9
        part.seek(4)
        part.truncate()
        part.write(b"ab")
    assert path.read_bytes() == b"1234ab"
    assert (counted.meter.bytes, counted.shown) == (11, 6)
    part.clear()
    assert (part.size, counted.shown) == (0, 0)


def test_a_stopped_run_ends_its_writers(tmp_path: Path) -> None:
    stop = threading.Event()
    part = ws.Part(str(tmp_path / "x"), Counted().meter, stop)
    with part:
        part.write(b"1")
        stop.set()
        with pytest.raises(ws.Stopped):
            part.write(b"2")
    assert part.size == 1
    assert not issubclass(ws.Stopped, Exception)  # a client's `except Exception` must not retry it


def test_a_link_across_file_systems_names_the_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"1")
    source = ws.make_source({"kind": "path", "dir": str(tmp_path), "how": "hardlink"}, "")

    def cannot(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(ws.os, "link", cannot)
    part = ws.Part(str(tmp_path / "parts" / "x"), Counted().meter, threading.Event())
    with pytest.raises(ws.Refused) as refused:
        source.fetch(ws.Remote("x", 1), part)
    assert "symlink" in refused.value.fix


def test_a_client_that_reports_success_and_leaves_no_file_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Downloader:
        def download_file(self, *_: Any, **__: Any) -> None:
            pass

    class Api:
        downloader = Downloader()

    source = ws.make_source({"kind": "modelscope", "repo": "a/b"}, str(tmp_path))
    monkeypatch.setattr(source, "_api", Api)
    part = ws.Part(str(tmp_path / "x.incomplete"), Counted().meter, threading.Event())
    with pytest.raises(ws.NotThere, match="reported success and left no x"):
        source.fetch(ws.Remote("x", 1), part)


@pytest.mark.parametrize("name", ["verify_weights.py", "fetch_weights.py", "serve_weights.py"])
def test_the_programs_stand_alone_in_a_folder_of_their_own(name: str, tmp_path: Path) -> None:
    for path in Path(ws.__file__).parent.glob("*weight*.py"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / name), "--help"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "Exit status:" in done.stdout


def test_what_a_client_removes_at_a_strange_answer_is_there_again_and_what_it_overwrites_is_not(
    tmp_path: Path,
) -> None:
    counted = Counted()
    part = ws.Part(str(tmp_path / "x.incomplete"), counted.meter, threading.Event())
    with part:
        part.write(b"12345678")
    part.keep()
    Path(part.path).unlink()
    part.give_back(8, 0)
    assert Path(part.path).read_bytes() == b"12345678"
    assert counted.shown == 8 and not ws.foreign(part.path)
    part.keep()
    Path(part.path).write_bytes(b"<html>")
    Path(part.path).unlink()
    part.give_back(8, 0)
    assert list(tmp_path.iterdir()) == []
    assert counted.shown == 0
    part.keep()  # nothing to hold
    Path(part.path).write_bytes(b"1234567890")
    part.give_back(0, 7)
    assert part.size == 10 and counted.shown == 3  # 7 of 10 were reported, by the client, elsewhere
