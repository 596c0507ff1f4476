"""Sites whose engine is built from the source in small: its repositories, wheels, recipe and inventory."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machines import Machine, base_system, cache_dir
from pip._internal.models.index import PyPI
from sites import FAULTS_ON_HOST, ROOT, Site

sys.path.insert(0, str(ROOT / "tests" / "engines"))
import standin_source as standin

SOURCE_ON_HOST = "/srv/source"

RECIPE = """
summary = "an engine in small, from source"
proven = "never: it stands for an engine in tests"
[model]
name = "rehearsal"
shards = 3
bytes = 1_577_495
manifest = "{manifest}"
[model.sources.generate]
program = "make_rehearsal_checkpoint.py"
[hardware]
ram_gib = 0.2
[engine]
default = "source"
[engine.source]
version = "{version}"
repo = "{repo}"
commit = "{commit}"
tag = "{tag}"
python = "{python}"
cuda_major = 13
cuda_toolkit = "13.0"
build_requirements = "requirements/build/cuda.txt"
requirements = "requirements/cuda.txt"
drop_lines = ['^[[:space:]]*--extra-index-url[[:space:]]+https://flashinfer\\.ai/whl/?[[:space:]]*$']
same_version = [["flashinfer-python", "flashinfer-cubin"]]
extensions = ["vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"]
ops = ["scaled_fp4_quant"]
bytes_per_job = {bytes_per_job}
env_bytes = 400_000_000
[engine.source.env]
VLLM_TARGET_DEVICE = "cpu"
{build_env}
{wheels}
[serve]
ready_seconds = 60
stop_seconds = 10
[serve.flags]
max-model-len = 8192
[serve.env]
STANDIN_FAULT_FILE = "{faults}"
[serve.modes.eager.flags]
enforce-eager = true
[acceptance]
profile = "smoke"
"""

PINNED = """
[[engine.source.wheels]]
package = "{package}"
version = "{version}"
file = "{file}"
sha256 = "{sha256}"
bytes = {bytes}
urls = ["{url}"]
"""


@functools.cache
def build_tools() -> Path:
    """A folder with the wheels that the build really uses, downloaded once for this machine's Python."""
    folder = cache_dir() / f"build-tools-py{sys.version_info.major}{sys.version_info.minor}"
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        lock = (ROOT / "requirements" / "uv.lock").read_text("utf-8")
        uv = next(line.split()[0] for line in lock.splitlines() if line.startswith("uv=="))
        names = [name for name in standin.BUILD_TOOLS if name not in ("uv", "setuptools")]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "setuptools<81", uv, *names],
            check=True,
        )
        (folder / "whole").touch()
    return folder


@functools.cache
def python_headers() -> Path:
    """Debian's Python headers as a folder `usr`, for hosts that compile: the base system has none."""
    folder = cache_dir() / "python-headers"
    if not (folder / "usr").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        names = subprocess.run(
            ["chroot", base_system(), "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        package = f"libpython{names.stdout.strip()}-dev"
        # apt's own user could not write there
        argv = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
        subprocess.run(argv, cwd=folder, check=True, capture_output=True)
        (deb,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder / "whole")], check=True)
        shutil.rmtree(folder / "whole" / "usr" / "lib", ignore_errors=True)
        (folder / "whole" / "usr").rename(folder / "usr")
    return folder / "usr"


@functools.cache
def upstream_index() -> str:
    """The index that pip uses on this machine."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    ).stdout.strip()
    return (configured or PyPI.simple_url).rstrip("/")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server without a log; the server counts its requests."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        folder = Path(self.translate_path(self.path))
        if self.path.startswith("/simple/") and not folder.exists():
            # the tools' packages: where this machine's pip would look
            self.send_response(302)
            self.send_header("Location", f"{upstream_index()}/{folder.name}/")
            self.end_headers()
            return
        super().do_GET()


@contextmanager
def index_of(folder: Path, wheels: Iterable[Path]) -> Iterator[Any]:
    """A package index on loopback (PEP 503) with these wheels; `.url`, and `.asked` for what was asked."""
    by_name: dict[str, list[Path]] = {}
    for path in wheels:
        by_name.setdefault(path.name.split("-")[0].lower().replace("_", "-"), []).append(path)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    for name, paths in by_name.items():
        page = folder / "simple" / name
        page.mkdir(parents=True, exist_ok=True)
        links = []
        for path in paths:
            shutil.copyfile(path, folder / "files" / path.name)
            links.append(f'<a href="/files/{path.name}#sha256={standin.sha256(path)}">{path.name}</a><br>')
        (page / "index.html").write_text(
            "<!DOCTYPE html><html><body>\n" + "\n".join(links) + "</body></html>"
        )
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.folder = folder  # type: ignore[attr-defined]
    server.asked = []  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class SourceSite(Site):
    """A site with the source route. `index` serves packages; repositories lie on each prepared host."""

    def __init__(
        self, folder: Path, hosts: Iterable[Machine], index: Any, source: standin.Source, **data: Any
    ):
        self.source = source
        self.pins = standin.standin_wheels(folder / "standin-wheels")
        self.index = index
        self.changes: dict[str, Any] = {}
        super().__init__(
            folder,
            hosts,
            recipe=str(folder / "source.toml"),
            index_url=f"{index.url}/simple" if index else None,
            find_links=[],
            wheelhouse=str(folder / "wheelhouse"),
            **data,
        )
        self.write_recipe()

    def write_recipe(self, **changes: Any) -> None:
        """The recipe; `changes` replace single values."""
        self.changes.update(changes)
        wheels = ""
        for name in ("flashinfer-cubin", "flashinfer-python"):
            path = self.pins[name]
            url = f"{self.index.url if self.index else 'http://127.0.0.1:9'}/files/{path.name}"
            wheels += PINNED.format(
                package=name, version=standin.FLASHINFER, file=path.name, sha256=standin.sha256(path),
                bytes=path.stat().st_size, url=url,
            )  # fmt: skip
        values = {
            "manifest": ROOT / "inventories" / "recipes" / "manifests" / "rehearsal-cpu.sha256",
            "version": standin.VERSION,
            "repo": self.source.repo,
            "commit": self.source.commit,
            "tag": self.source.tag,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "bytes_per_job": 100_000_000,
            "build_env": "",
            "faults": FAULTS_ON_HOST,
            "wheels": wheels,
            **self.changes,
        }
        (self.folder / "source.toml").write_text(RECIPE.format(**values))

    def prepare(self, machine: Machine, *, repositories: bool = True) -> None:
        """What a host finds: Python's headers; the repositories, where their addresses say."""
        machine.put(python_headers() / "include", "/usr")
        if repositories:
            machine.run(f"mkdir -p {SOURCE_ON_HOST}")
            machine.put(self.source.bare, f"{SOURCE_ON_HOST}/git")
            machine.run(f"chown -R root:root {SOURCE_ON_HOST}")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment() -> dict[str, str]:
    """The environment of a run."""
    return {**os.environ, "PYINFRA_PROGRESS": "off"}
