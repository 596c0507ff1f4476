"""Files by hash from real servers: resumed, refused, set aside."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import fetch_files
from tasks.onhost.measure_mirrors import choose

# real processes, and time that they are given
pytestmark = pytest.mark.slow

ONHOST = Path(__file__).parents[3] / "tasks" / "onhost"
CONTENT = b"pip-26.0.tar.gz" + bytes(range(256)) * 12_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """What each path stands for.

    /whole, /wrong, /longer; /breaks ends the first answer after 1 MB, /drops every answer; /busy asks for a
    second's patience once; /drips sends a few bytes at a time; /chunks breaks off within a chunk, once;
    /login is the page of a network's portal; /never-a-header goes on and on before its answer; else 404.
    """

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        self.path = self.path.partition("?")[0]
        if self.path == "/login":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Please log in to go to simple/pip/</html>")
            return
        if self.path == "/never-a-header":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
                for _ in range(600):
                    self.wfile.write(b"x")
                    threading.Event().wait(0.1)
            return
        if self.path not in (
            "/whole",
            "/breaks",
            "/wrong",
            "/drops",
            "/busy",
            "/drips",
            "/chunks",
            "/longer",
        ):
            self.send_error(404)
            return
        first = len(self.server.asked) == 1  # type: ignore[attr-defined]
        if self.path == "/busy" and first:
            self.send_response(429)
            self.send_header("Retry-After", "1")
            self.end_headers()
            return
        if self.path == "/chunks" and first:
            self.protocol_version = "HTTP/1.1"
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ffff\r\n" + CONTENT[:1000])
            self.close_connection = True
            return
        content = {"/wrong": CONTENT[:-1] + b"x", "/longer": CONTENT * 3}.get(self.path, CONTENT)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.path == "/drips":
            with contextlib.suppress(OSError):
                for at in range(start, start + 600, 5):
                    self.wfile.write(content[at : at + 5])
                    threading.Event().wait(0.1)
            return
        breaks = (self.path == "/breaks" and not start) or self.path == "/drops"
        self.wfile.write(
            content[start:][: 500_000 if self.path == "/drops" else 1_000_000 if breaks else None]
        )


@pytest.fixture
def server() -> Iterator[Any]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []  # type: ignore[attr-defined]
    made.url = f"http://127.0.0.1:{made.server_port}"  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def fetch(dest: Path, *urls: str, digest: str = DIGEST, **more: Any) -> tuple[int, dict[str, Any]]:
    one = {"file": "w.whl", "sha256": digest, "bytes": len(CONTENT), "urls": list(urls)}
    done = subprocess.run(
        [sys.executable, str(ONHOST / "fetch_files.py"), "--stdin"],
        input=json.dumps({"files": [one], "dest": str(dest), **more}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def test_a_line_that_breaks_is_taken_up_where_it_broke(server: Any, tmp_path: Path) -> None:
    rc, answer = fetch(tmp_path, f"{server.url}/breaks")
    assert rc == 0, answer
    assert (tmp_path / "w.whl").read_bytes() == CONTENT
    (first, second) = [range_ for _, range_ in server.asked]
    assert first is None
    assert second == "bytes=1000000-"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program in this process, with short waits: `here(DEST, URL, ...)` is a file's row."""
    monkeypatch.setattr(fetch_files, "SLOW_SECONDS", 0.5)
    monkeypatch.setattr(fetch_files, "BLOCK", 400_000)
    waited: list[float] = []
    monkeypatch.setattr(fetch_files.time, "sleep", waited.append)

    def fetched(dest: Path, *urls: str, size: int | None = len(CONTENT), **more: Any) -> dict[str, Any]:
        one = {"file": "w.whl", "sha256": DIGEST, "bytes": size, "urls": list(urls)}
        request = {"dest": str(dest), "near": [], "mirrors": [], "offline": False, **more}
        dest.mkdir(exist_ok=True)
        return fetch_files.bring(one, request, fetch_files.Reporter(0))

    fetched.waited = waited  # type: ignore[attr-defined]
    return fetched


def part_of(dest: Path, digest: str = DIGEST) -> Path:
    return dest / f"w.whl.{digest[:12]}.part"


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_line_that_breaks_each_time_brings_the_file_as_long_as_it_goes_forward(
    size: int | None, server: Any, here: Any, tmp_path: Path
) -> None:
    """More breaks than attempts; none of them is taken for a forged file."""
    assert here(tmp_path, f"{server.url}/drops", size=size)["from"].endswith("/drops")
    assert len(server.asked) == len(CONTENT) // 500_000 + 1 > fetch_files.ATTEMPTS
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_an_answer_that_breaks_off_within_a_chunk_is_a_broken_line(
    server: Any, here: Any, tmp_path: Path
) -> None:
    assert here(tmp_path, f"{server.url}/chunks")["bytes"] == len(CONTENT)


def test_a_server_that_asks_for_patience_gets_as_much_as_it_asks_for(
    server: Any, here: Any, tmp_path: Path
) -> None:
    assert here(tmp_path, f"{server.url}/busy")["from"].endswith("/busy")
    assert here.waited == [1]


def test_an_address_that_hardly_sends_anything_makes_way_for_the_next(
    server: Any, here: Any, tmp_path: Path
) -> None:
    assert here(tmp_path, f"{server.url}/drips", f"{server.url}/whole")["from"].endswith("/whole")
    (first, second) = [range_ for _, range_ in server.asked]
    assert first is None and second is not None  # what it sent is not lost


def test_what_is_longer_than_the_pin_is_refused_before_all_of_it_is_here(
    server: Any, here: Any, tmp_path: Path
) -> None:
    with pytest.raises(fetch_files.Problem) as problem:
        here(tmp_path, f"{server.url}/longer")
    assert problem.value.id == "hash_mismatch"
    assert len(server.asked) == 1
    assert (tmp_path / "w.whl.rejected").stat().st_size < len(CONTENT) * 1.2


def test_what_an_earlier_pin_left_under_the_name_harms_no_good_server(server: Any, tmp_path: Path) -> None:
    for left in (tmp_path / "w.whl.part", part_of(tmp_path, "0" * 64)):
        left.write_bytes(b"old" * 1000)
    other = tmp_path / f"other-w.whl.{DIGEST[:12]}.part"
    other.write_bytes(b"of another file")
    rc, answer = fetch(tmp_path, f"{server.url}/whole")
    assert rc == 0, answer
    assert server.asked == [("/whole", None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "w.whl"]


def test_a_beginning_from_a_forger_is_not_held_against_the_server_that_went_on(
    server: Any, here: Any, tmp_path: Path
) -> None:
    part_of(tmp_path).write_bytes(b"forged" * 100)
    assert here(tmp_path, f"{server.url}/whole")["from"].endswith("/whole")
    assert [range_ for _, range_ in server.asked] == ["bytes=600-", None]


def test_what_was_hashed_is_what_gets_the_name(
    tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file in a folder that others write to changes while it is looked at."""
    near = tmp_path / "usb"
    near.mkdir()
    (near / "w.whl").write_bytes(CONTENT)
    hashed: list[str] = []
    sha256_of = fetch_files.sha256_of

    def watched(path: str) -> str:
        hashed.append(path)
        found = sha256_of(path)
        (near / "w.whl").write_bytes(b"evil")
        return found

    monkeypatch.setattr(fetch_files, "sha256_of", watched)
    here(tmp_path / "d", near=[str(near)])
    assert (tmp_path / "d" / "w.whl").read_bytes() == CONTENT
    assert str(near / "w.whl") not in hashed


def test_a_near_file_that_cannot_be_read_is_no_reason_to_stop(
    server: Any, here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = tmp_path / "usb"
    near.mkdir()
    (near / "w.whl").write_bytes(CONTENT)

    def broken(source: str, target: str) -> None:
        raise OSError(5, "Input/output error", source)

    monkeypatch.setattr(fetch_files.shutil, "copyfile", broken)
    assert here(tmp_path / "d", f"{server.url}/whole", near=[str(near)])["from"].endswith("/whole")


def test_a_folder_that_may_not_be_written_is_told_as_that(server: Any, here: Any, tmp_path: Path) -> None:
    part_of(tmp_path).mkdir()
    with pytest.raises(IsADirectoryError):
        here(tmp_path, f"{server.url}/whole", size=None)


def test_a_wrong_file_is_never_used_and_the_next_address_is_asked(server: Any, tmp_path: Path) -> None:
    rc, answer = fetch(tmp_path, f"{server.url}/wrong")
    assert (rc, answer["error"]["id"]) == (1, "hash_mismatch")
    assert not (tmp_path / "w.whl").exists()
    assert (tmp_path / "w.whl.rejected").exists()
    rc, answer = fetch(tmp_path, f"{server.url}/wrong", f"{server.url}/whole")
    assert rc == 0
    assert answer["files"][0]["from"].endswith("/whole")


def test_a_mirror_is_asked_first_and_its_wrong_file_does_no_harm(server: Any, tmp_path: Path) -> None:
    mirrors = [[f"{server.url}/whole", f"{server.url}/wrong"]]
    rc, _ = fetch(tmp_path, f"{server.url}/whole", mirrors=mirrors)
    assert rc == 0
    assert [path for path, _ in server.asked] == ["/wrong", "/whole"]


def test_what_is_near_needs_no_server_and_what_is_here_needs_nothing(server: Any, tmp_path: Path) -> None:
    near = tmp_path / "usb"
    near.mkdir()
    (near / "w.whl").write_bytes(CONTENT)
    rc, answer = fetch(tmp_path / "d", f"{server.url}/whole", near=[str(near)], offline=True)
    assert (rc, answer["files"][0]["from"]) == (0, str(near))
    assert fetch(tmp_path / "d", f"{server.url}/whole")[1]["files"][0]["from"] == "here"
    assert server.asked == []


def test_offline_and_missing_says_where_to_put_the_file(tmp_path: Path) -> None:
    rc, answer = fetch(tmp_path, "http://127.0.0.1:9/w", offline=True)
    assert (rc, answer["error"]["id"]) == (1, "unreachable")
    assert str(tmp_path) in answer["error"]["fix"]


def measured(**kinds: Any) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ONHOST / "measure_mirrors.py"), "--stdin"],
        input=json.dumps({"kinds": kinds, "seconds": 2}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "took": time.monotonic() - began}


def test_mirrors_are_measured_and_a_dead_one_is_not_chosen(server: Any) -> None:
    dead_one = "http://127.0.0.1:9/"
    answer = measured(index_url={"probe": "whole", "candidates": [dead_one, f"{server.url}/"]})
    assert answer["chosen"] == {"index_url": f"{server.url}/"}
    dead, alive = answer["measured"]["index_url"]
    assert (dead["ok"], alive["ok"]) == (False, True)
    assert dead["why"]


def test_a_login_page_is_fast_and_no_mirror(server: Any) -> None:
    candidates = [f"{server.url}/whole?", f"{server.url}/login?"]
    answer = measured(index_url={"probe": "simple/pip/", "candidates": candidates, "holds": "pip-"})
    assert answer["chosen"] == {"index_url": candidates[0]}
    assert "Please log in" in answer["measured"]["index_url"][1]["why"]


@pytest.mark.parametrize("path", ["drips", "never-a-header"])
def test_a_mirror_that_hardly_answers_holds_nobody_up(path: str, server: Any) -> None:
    candidates = [f"{server.url}/whole?", f"{server.url}/{path}?"]
    answer = measured(index_url={"probe": "pip/", "candidates": candidates})
    assert answer["chosen"] == {"index_url": candidates[0]}
    assert "2 s" in answer["measured"]["index_url"][1]["why"]
    assert answer["took"] < 10  # it would go on for a minute


def test_its_own_server_stays_unless_another_is_clearly_faster() -> None:
    def rows(*seconds: float | None) -> list[dict[str, Any]]:
        return [{"base": str(n), "ok": s is not None, "seconds": s} for n, s in enumerate(seconds)]

    assert choose(rows(1.0, 0.8)) == "0"
    assert choose(rows(1.0, 0.5)) == "1"
    assert choose(rows(None, 2.0, 1.0)) == "2"
    assert choose(rows(None, None)) is None
