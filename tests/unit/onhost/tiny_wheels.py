"""Wheels of a few hundred bytes, indexes that serve them, and a host to install them on."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pip

from tasks.onhost import install_wheels

PROGRAM = Path(install_wheels.__file__)


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> Path:
    """A pure wheel, the same bytes every time."""
    info = f"{name}-{version}.dist-info"
    content = dict(files if files is not None else {f"{name}.py": f"VERSION = {version!r}\n"})
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={record_hash(text)},{len(text.encode())}" for path, text in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return wheel


def record_hash(text: str) -> str:
    """A hash as RECORD spells it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, at: int = 60) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Host:
    """An environment without packages, a folder for wheels, and the program as the library runs it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env, self.wheels, self.tmp = root / "env", root / "wheels", root / "tmp"
        self.lock = root / "engine.lock"
        venv.create(self.env, with_pip=False, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = self.env / "lib" / version / "site-packages"
        # the tests' own pip, so that no test needs the network or waits for ensurepip
        (self.site / "pip").symlink_to(Path(pip.__file__).parent)
        (self.site / "README.txt").touch()  # pip removes a folder whose every file it uninstalls

    def lock_wheels(self, *wheels: Path, **other_hashes: str) -> None:
        """Write a lock of these wheels; a keyword gives another hash for that name."""
        lines = []
        for wheel in wheels:
            name, version = wheel.name.split("-")[:2]
            digest = other_hashes.get(name) or sha256(wheel)
            lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}\n")
        self.lock.write_text("".join(lines))

    def request(self, **more: Any) -> str:
        """The parameters as JSON."""
        given = {"python": f"{self.env}/bin/python", "lock": str(self.lock), "wheels": str(self.wheels)}
        return json.dumps({**given, "tmp": str(self.tmp), **more})

    def start(self, extra_env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        """Start the program in a group of its own, with none of this machine's pip settings."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        env |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_RETRIES": "1",
        }
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env | (extra_env or {}),
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write(self.request(**more))
        child.stdin.close()
        child.stdin = None
        return child

    def run(self, extra_env: dict[str, str] | None = None, **more: Any) -> Outcome:
        """Run the program to its end."""
        child = self.start(extra_env, **more)
        out, err = child.communicate(timeout=120)
        return Outcome(child.returncode, json.loads(out), err)

    def python(self, code: str) -> str:
        """What a line of Python prints in the environment."""
        done = subprocess.run(
            [f"{self.env}/bin/python", "-c", code], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    @property
    def unfinished(self) -> bool:
        """The environment is marked as half-made."""
        return (self.env / ".rackwright-installing").exists()


class Outcome:
    """How a run ended."""

    def __init__(self, status: int, document: dict[str, Any], log: str) -> None:
        self.status, self.document, self.log = status, document, log

    @property
    def error(self) -> dict[str, str]:
        """The error, of a run that must have failed."""
        assert self.status == 1, self.log
        found: dict[str, str] = self.document["error"]
        return found

    @property
    def result(self) -> dict[str, Any]:
        """The answer, of a run that must have succeeded."""
        assert self.status == 0, (self.document, self.log)
        return self.document


class Index:
    """A package index (PEP 503) on loopback that counts, and that can be told to hang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.hang_on = ""
        self.hanging = threading.Event()
        self.release = threading.Event()
        self.url = ""

    def fetched(self, wheel: Path) -> int:
        """How often a wheel was asked for."""
        return sum(path.endswith("/" + wheel.name.replace("+", "%2B")) for path in self.requests)

    def page(self, project: str) -> bytes | None:
        """The links of a project, without hashes, as a plain mirror has them."""
        files = [file for file in sorted(self.folder.glob("*.whl")) if file.name.split("-")[0] == project]
        links = "".join(f'<a href="/files/{f.name.replace("+", "%2B")}">{f.name}</a>' for f in files)
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if files else None


@contextmanager
def serving(folder: Path) -> Iterator[Index]:
    """An index of the wheels in a folder."""
    index = Index(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.requests.append(self.path)
            kind, name = self.path.strip("/").split("/")[:2]
            if index.hang_on and name.startswith(index.hang_on) and kind == "files":
                index.hanging.set()
                index.release.wait(60)
                return
            path = folder / name.replace("%2B", "+")
            body = index.page(name.replace("-", "_")) if kind == "simple" else path.read_bytes()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html" if kind == "simple" else "application/octet-stream")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield index
    finally:
        index.release.set()
        server.shutdown()
        server.server_close()
