"""Small local servers that speak as the hubs do, with faults that a test switches on.

The Hugging Face shape follows what huggingface_hub 2.4 asks for (`/api/models/<id>/revision/<rev>`, `tree/`,
`/<id>/resolve/<rev>/<path>` with a redirect of LFS files to a signed address on another name); the ModelScope
shape what modelscope_hub 0.5 asks for (`/api/v1/models/<id>/repo/files`, `.../repo?FilePath=`).
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "11c5a3d5811f50298f278a704980280950aedb10"
REPO = "acme/tiny"
TOKEN = "hf_" + "test0token" * 3
TRICKLE = 4096  # bytes every half a second: a connection that is held does not time out
LFS_FROM = 400  # bytes; larger files are LFS files, as shards are


@dataclass
class Fault:
    """What happens to the next requests of one file (or of the listing, `path=""`)."""

    kind: str  # drop, short, wrong, longer, status; page: a proxy's own, with status 200
    at: int = 0  # bytes of the body that are sent, for drop and short
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    body: bytes = b""


def git_blob(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """One server: its files, its faults, and what it sent."""

    def __init__(self, files: dict[str, bytes], shape: str, token: str | None = None) -> None:
        self.files = files
        self.shape = shape
        self.token = token
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.hidden: set[str] = set()  # listed, but 404
        self.unlisted: set[str] = set()  # there, but not listed
        self.lies: dict[str, dict[str, Any]] = {}  # path -> fields of its listing that are wrong
        self.sent: dict[str, int] = defaultdict(int)
        self.requests: list[tuple[str, str]] = []  # (path of a file, Range)
        self.rate: int | None = None  # bytes a second and connection
        self.total_rate: int | None = None  # bytes a second of all connections together
        self.free_at = 0.0
        self.ranges = True  # it can send a part of a file
        self.hold: dict[str, int] = {}  # path -> bytes after which only a trickle goes out, while it is here
        self.seen_tokens: dict[str, set[str]] = defaultdict(set)  # host -> Authorization headers
        self.lock = threading.Lock()
        self.on_request: Callable[[], object] = lambda: None
        self.url = ""

    def fault(self, path: str) -> Fault | None:
        """The next fault of a file, if any is left."""
        with self.lock:
            faults = self.faults[path]
            if not faults:
                return None
            faults[0].times -= 1
            return faults[0] if faults[0].times else faults.pop(0)

    def turn(self, size: int) -> float:
        """Seconds until these bytes may go out, where all connections share one rate."""
        if not self.total_rate:
            return 0.0
        with self.lock:
            now = time.monotonic()
            begin = max(self.free_at, now)
            self.free_at = begin + size / self.total_rate
        return begin - now

    def total(self) -> int:
        """Bytes of all its files."""
        return sum(map(len, self.files.values()))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True

    def do_GET(self) -> None:
        hub = self.hub
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        given = self.headers.get("Authorization", "")
        hub.on_request()
        hub.seen_tokens[self.headers.get("Host", "").split(":")[0]].add(given)
        signed = url.path.startswith("/cdn/")
        if hub.token and not signed and given != f"Bearer {hub.token}":
            self.reply(401, {"error": "Invalid credentials in Authorization header"})
            return
        if hub.shape == "huggingface":
            self.huggingface(url.path, query)
        else:
            self.modelscope(url.path, query)

    do_HEAD = do_GET

    def huggingface(self, path: str, query: dict[str, str]) -> None:
        hub = self.hub
        api = f"/api/models/{REPO}"
        if path.startswith("/cdn/"):
            if query.get("Signature") != "secret":
                self.reply(403, {"error": "no signature"})
                return
            self.file(urllib.parse.unquote(path[len("/cdn/") :]))
        elif path.startswith(f"{api}/revision/"):
            if path.rpartition("/")[2] not in (COMMIT, "main"):
                self.reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            elif not self.broken_listing():
                self.reply(200, {"id": REPO, "sha": COMMIT, "siblings": [], "tags": [], "private": False})
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            self.reply(200, self.tree())
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            name = urllib.parse.unquote(path[len(f"/{REPO}/resolve/{COMMIT}/") :])
            content = hub.files.get(name)
            if content is None or name in hub.hidden:
                self.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            elif len(content) >= LFS_FROM:
                # another host name, as a CDN is: the token must not follow
                cdn = hub.url.replace("127.0.0.1", "localhost")
                location = f"{cdn}/cdn/{urllib.parse.quote(name)}?Signature=secret"
                linked = {
                    "X-Linked-Size": str(len(content)),
                    "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                }
                self.reply(302, None, {"Location": location, "X-Repo-Commit": COMMIT, **linked})
            else:
                self.file(name)
        else:
            self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def tree(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for name, content in self.hub.files.items():
            if name in self.hub.unlisted:
                continue
            entry: dict[str, Any] = {
                "type": "file",
                "oid": git_blob(content),
                "size": len(content),
                "path": name,
            }
            if len(content) >= LFS_FROM:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 135}
                entry["oid"], entry["xetHash"] = "4" * 40, "d" * 64
            entries.append({**entry, **self.hub.lies.get(name, {})})
        folders = {n.rpartition("/")[0] for n in self.hub.files if "/" in n}
        return entries + [
            {"type": "directory", "oid": "2" * 40, "size": 0, "path": f} for f in sorted(folders)
        ]

    def modelscope(self, path: str, query: dict[str, str]) -> None:
        hub = self.hub
        api = f"/api/v1/models/{REPO}"
        if path == f"{api}/repo/files":
            if self.broken_listing():
                return
            files = [
                {
                    "Path": name,
                    "Name": name.rpartition("/")[2],
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                    **hub.lies.get(name, {}),
                }
                for name, content in hub.files.items()
                if name not in hub.unlisted
            ]
            files.append({"Path": "encoding", "Name": "encoding", "Type": "tree", "Size": 0, "Sha256": ""})
            self.reply(200, {"Code": 200, "Success": True, "Data": {"Files": files}})
        elif path == f"{api}/repo":
            name = query["FilePath"]
            if name not in hub.files or name in hub.hidden:
                self.reply(404, {"Code": 10010205001, "Message": "Not found", "Success": False})
            else:
                self.file(name)
        else:
            self.reply(404, {"Code": 10010205001, "Message": "Not found", "Success": False})

    def broken_listing(self) -> bool:
        fault = self.hub.fault("")
        if fault is None:
            return False
        self.reply(fault.status, json.loads(fault.body or b"{}"), fault.headers)
        return True

    def reply(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def file(self, name: str) -> None:
        hub = self.hub
        content = hub.files[name]
        asked = self.headers.get("Range", "") if hub.ranges else ""
        if self.command == "GET":
            with hub.lock:
                hub.requests.append((name, asked))
        fault = hub.fault(name) if self.command == "GET" else None
        kind = fault.kind if fault else ""
        if fault and kind == "status":
            self.reply(fault.status, {"error": "later"}, fault.headers)
            return
        if fault and kind == "page":
            self.reply(200, "<html><body>Please log in to the hotel's network</body></html>")
            return
        if fault and kind == "wrong":
            content = bytes(b ^ 0x55 for b in content)
        if fault and kind == "longer":
            content += b"and more"
        offset = int(asked[len("bytes=") :].split("-")[0]) if asked.startswith("bytes=") else 0
        if offset and offset >= len(content):
            self.reply(416, None, {"Content-Range": f"bytes */{len(content)}"})
            return
        body = content[offset:]
        if fault and kind == "short":
            body = body[: fault.at]
        self.send_response(206 if offset else 200)
        self.send_header("ETag", f'"{hashlib.sha256(hub.files[name]).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if hub.shape == "huggingface":
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if offset:
            self.send_header("Content-Range", f"bytes {offset}-{offset + len(body) - 1}/{len(content)}")
        self.end_headers()
        if self.command != "GET":
            return
        if fault and kind == "drop":
            self.send(name, body[: fault.at])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send(name, body)

    def send(self, name: str, body: bytes) -> None:
        step = 64 * 1024
        for at in range(0, len(body), step):
            block = body[at : at + step]
            time.sleep(self.hub.turn(len(block)))
            while name in self.hub.hold and at >= self.hub.hold[name] and block:
                self.wfile.write(block[:TRICKLE])
                with self.hub.lock:
                    self.hub.sent[name] += len(block[:TRICKLE])
                block = block[TRICKLE:]
                time.sleep(0.5)
            self.wfile.write(block)
            with self.hub.lock:
                self.hub.sent[name] += len(block)
            if self.hub.rate:
                time.sleep(len(block) / self.hub.rate)


@contextmanager
def running(files: dict[str, bytes], shape: str, token: str | None = None) -> Iterator[Hub]:
    """A hub on a free port of the loopback."""
    hub = Hub(dict(files), shape, token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class Wire:
    """In front of any server: each connection in turn is cut after so many bytes of its answers."""

    def __init__(self, target: int, cuts: list[int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.target, self.cuts = target, cuts
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # closed at either end: the test is over
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                cut = self.cuts.pop(0) if self.cuts else None
                threading.Thread(target=self.pump, args=(near, far, None), daemon=True).start()
                threading.Thread(target=self.pump, args=(far, near, cut), daemon=True).start()

    @staticmethod
    def pump(source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with suppress(OSError):
            while block := source.recv(65536 if left is None else min(65536, left)):
                sink.sendall(block)
                if left is not None:
                    left -= len(block)
                    if left <= 0:
                        break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Portal(BaseHTTPRequestHandler):
    """A proxy that answers every request with a page of its own."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        page = b"<html>Please log in</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
