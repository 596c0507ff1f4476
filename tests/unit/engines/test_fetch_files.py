"""Files by hash from real servers: resumed, refused, set aside."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost.measure_mirrors import choose

ONHOST = Path(__file__).parents[3] / "tasks" / "onhost"
CONTENT = bytes(range(256)) * 12_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """/whole, /breaks (ends after 1 MB, honours ranges), /wrong, /slow; everything else is 404."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        if self.path not in ("/whole", "/breaks", "/wrong"):
            self.send_error(404)
            return
        content = CONTENT if self.path != "/wrong" else CONTENT[:-1] + b"x"
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut = 1_000_000 if self.path == "/breaks" and not start else len(content)
        self.wfile.write(content[start:][:cut])


@pytest.fixture
def server() -> Iterator[Any]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []  # type: ignore[attr-defined]
    made.url = f"http://127.0.0.1:{made.server_port}"  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
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


def test_mirrors_are_measured_and_a_dead_one_is_not_chosen(server: Any) -> None:
    kinds = {"index_url": {"probe": "whole", "candidates": ["http://127.0.0.1:9/", f"{server.url}/"]}}
    done = subprocess.run(
        [sys.executable, str(ONHOST / "measure_mirrors.py"), "--stdin"],
        input=json.dumps({"kinds": kinds, "seconds": 3}),
        capture_output=True,
        text=True,
        timeout=30,
    )
    answer = json.loads(done.stdout)
    assert answer["chosen"] == {"index_url": f"{server.url}/"}
    dead, alive = answer["measured"]["index_url"]
    assert (dead["ok"], alive["ok"]) == (False, True)
    assert dead["why"]


def test_its_own_server_stays_unless_another_is_clearly_faster() -> None:
    def rows(*seconds: float | None) -> list[dict[str, Any]]:
        return [{"base": str(n), "ok": s is not None, "seconds": s} for n, s in enumerate(seconds)]

    assert choose(rows(1.0, 0.8)) == "0"
    assert choose(rows(1.0, 0.5)) == "1"
    assert choose(rows(None, 2.0, 1.0)) == "2"
    assert choose(rows(None, None)) is None
