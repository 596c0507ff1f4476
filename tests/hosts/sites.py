"""A site on test hosts: the stand-in engine as a wheel, its lock, a recipe and an inventory in one folder.

The wheel holds one program, `vllm` (tests/standin/engine.py), and stands for an engine's distribution;
everything else (environment, lock with hashes, weights, supervisor) is what a real site uses.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machines import free_port

ROOT = Path(__file__).resolve().parents[2]
RACKWRIGHT = [sys.executable, "-c", "from tasks.cli import main; main()"]
PACKAGE, VERSION = "vllm-standin", "0.32.0"
WHEEL = f"vllm_standin-{VERSION}-py3-none-any.whl"
WHEELS_ON_HOST = "/srv/wheels"
FAULTS_ON_HOST = "/srv/faults.json"


def build_wheel(folder: Path) -> Path:
    """The stand-in engine as a wheel with a script, byte for byte the same each time."""
    info = f"vllm_standin-{VERSION}.dist-info"
    script = (ROOT / "tests" / "standin" / "engine.py").read_text("utf-8")
    script = "#!python\n" + script.split("\n", 1)[1]  # pip writes the environment's own interpreter there
    files = {
        f"vllm_standin-{VERSION}.data/scripts/vllm": script.encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = ("\n".join([*lines, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, content)
    return path


RECIPE = """
summary = "stand-in engine"
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
default = "wheel"
[engine.wheel]
package = "{package}"
version = "{version}"
python = "3.11"
lock = "engine.lock"
env_bytes = 60_000_000
wheel_bytes = 1_000_000
[serve]
ready_seconds = {ready_seconds}
stop_seconds = 10
[serve.flags]
max-model-len = 8192
[serve.env]
STANDIN_FAULT_FILE = "{faults}"
[serve.modes.eager.flags]
enforce-eager = true
[serve.modes.optimized.flags]
enable-prefix-caching = true
[acceptance]
profile = "smoke"
"""


class Site:
    """A folder with everything a run needs, and the runs."""

    def __init__(self, folder: Path, hosts: Iterable[Any] = (), **data: Any) -> None:
        self.folder = folder
        self.wheel = build_wheel(folder)
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        (folder / "engine.lock").write_text(f"{PACKAGE}=={VERSION} \\\n    --hash=sha256:{digest}\n")
        self.recipe(ready_seconds=60)
        self.data: dict[str, Any] = {
            "recipe": str(folder / "standin.toml"),
            "root": "/opt/rackwright",
            "sources": ["generate"],
            "find_links": [WHEELS_ON_HOST],
            "extra_index_urls": [],
            "reports": str(folder / "reports"),
            "port": free_port(),  # hosts share the controller's network
            **data,
        }
        self.url = f"http://127.0.0.1:{self.data['port']}"
        self.inventory = folder / "inventory.py"
        self.hosts([(host.name, host.inventory_data()) for host in hosts])

    def recipe(self, **values: Any) -> None:
        """Write the recipe anew."""
        manifest = ROOT / "inventories" / "recipes" / "manifests" / "rehearsal-cpu.sha256"
        (self.folder / "standin.toml").write_text(
            RECIPE.format(
                package=PACKAGE, version=VERSION, faults=FAULTS_ON_HOST, manifest=manifest, **values
            )
        )

    def hosts(self, hosts: list[tuple[str, dict[str, Any]]]) -> None:
        """Write the inventory: these hosts, with this site's data under their own."""
        self.inventory.write_text(f"hosts = {[(name, {**self.data, **own}) for name, own in hosts]!r}\n")

    def prepare(self, machine: Any) -> None:
        """What a mirror would serve: the wheel, on the host's own disk."""
        machine.run(f"mkdir -p {WHEELS_ON_HOST}")
        machine.put(self.wheel, f"{WHEELS_ON_HOST}/{WHEEL}")

    def faults(self, machine: Any, *names: str) -> None:
        """Switch the stand-in's faults on (none: all off)."""
        machine.write(FAULTS_ON_HOST, json.dumps(list(names)))

    def start(self, verb: str, *options: str, **more: Any) -> subprocess.Popen[str]:
        """Begin a run and return its process."""
        return subprocess.Popen(
            [*RACKWRIGHT, verb, str(self.inventory), *options],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYINFRA_PROGRESS": "off"},
            **more,
        )

    def run(self, verb: str, *options: str, rc: int = 0, timeout: float = 300) -> str:
        """A whole run; its output. The exit code must be as told."""
        process = self.start(verb, *options)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{verb} took longer than {timeout} s:\n{output}") from None
        assert process.returncode == rc, f"exit code {process.returncode}, not {rc}:\n{output}"
        return output

    def report(self, host: str, verb: str = "site") -> dict[str, Any]:
        """The evidence that a run left on the controller."""
        found: dict[str, Any] = json.loads(
            (self.folder / "reports" / host / f"{verb}.json").read_text("utf-8")
        )
        return found
