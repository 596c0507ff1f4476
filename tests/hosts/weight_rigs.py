"""What the host tests of weights share: a host with its tools, and models that hubs on the loopback serve.

Hosts share the controller's network, so a hub of `tests/weights/servers.py` is at 127.0.0.1 for both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machines import Machine
from sites import RECIPE, Site

from tests.weights.making import digests_of, make_checkpoint
from tests.weights.servers import COMMIT, REPO

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = "/opt/rackwright"
SOURCES = f"""[model.sources]
huggingface = {{ repo = "{REPO}", revision = "{COMMIT}" }}
modelscope = {{ repo = "{REPO}", revision = "v1" }}
s3 = {{ bucket = "weights", prefix = "models/x" }}
"""
GENERATE = '[model.sources.generate]\nprogram = "make_rehearsal_checkpoint.py"\n'


class Checkpoint:
    """A model: its files, its manifest, and what a recipe says of it."""

    def __init__(self, name: str, folder: Path, shards: int) -> None:
        self.name, self.shards = name, shards
        self.digests = digests_of(folder)
        self.files = {path: (folder / path).read_bytes() for path in self.digests}
        self.bytes = sum(map(len, self.files.values()))
        self.manifest = folder.with_suffix(".sha256")
        self.manifest.write_text("".join(f"{self.digests[p]}  {p}\n" for p in sorted(self.digests)))

    def shard(self, number: int) -> str:
        """The name of one of its shards."""
        return f"model-{number:05d}-of-{self.shards:05d}.safetensors"


def rehearsal(folder: Path) -> Checkpoint:
    """The rehearsal's checkpoint, as every host makes it."""
    program = REPOSITORY / "tasks" / "onhost" / "make_rehearsal_checkpoint.py"
    subprocess.run([sys.executable, program, folder / "rehearsal"], check=True, stdout=subprocess.DEVNULL)
    return Checkpoint("rehearsal", folder / "rehearsal", 3)


def tiny(folder: Path) -> Checkpoint:
    """12 MB in four shards: long enough on the way to be interrupted."""
    make_checkpoint(folder / "tiny", shards=4, tensors=3, tensor_bytes=1_000_000)
    return Checkpoint("tiny", folder / "tiny", 4)


def write_recipe(site: Site, model: Checkpoint, *, manifest: bool = True, size: int | None = None) -> None:
    """The stand-in's recipe with this model, from hubs and storage instead of a program."""
    text = RECIPE.format(
        package="vllm-standin", version="0.32.0", faults="/srv/faults.json",
        manifest=model.manifest, ready_seconds=60,
    )  # fmt: skip
    text = text.replace(GENERATE, SOURCES).replace('name = "rehearsal"', f'name = "{model.name}"')
    text = text.replace("shards = 3", f"shards = {model.shards}")
    text = text.replace("bytes = 1_577_495", f"bytes = {size or model.bytes}")
    if not manifest:
        text = text.replace(f'manifest = "{model.manifest}"\n', "")
    (site.folder / "standin.toml").write_text(text)


class Rig:
    """A host with its tools, and the site of one test on it."""

    def __init__(self, host: Machine, folder: Path, model: Checkpoint, **data: Any) -> None:
        self.host, self.model = host, model
        self.site = Site(folder, [host], sources=["huggingface"], reports=str(folder / "reports"), **data)
        write_recipe(self.site, model)
        self.dest = f"{self.site.data.get('model_root', ROOT + '/models')}/{model.name}"

    def set(self, **data: Any) -> None:
        """Change the site's settings."""
        self.site.data.update(data)
        self.site.hosts([(self.host.name, self.host.inventory_data())])

    def weights(self, *options: str, rc: int = 0) -> str:
        """A whole run of the verb."""
        return self.site.run("weights", "-y", *options, rc=rc)

    def detail(self) -> dict[str, Any]:
        """What the receipt of the last delivery says."""
        steps = self.site.report(self.host.name, "weights")["steps"]
        found: dict[str, Any] = next(step for step in steps if step["name"] == "weights")
        return dict(found["detail"])

    def on_host(self) -> dict[str, str]:
        """{path: sha256} of every file in the model's folder."""
        listed = self.host.run(
            f"cd {self.dest} 2>/dev/null && find . -type f -printf '%P\\0' | xargs -0 -r sha256sum || :"
        ).stdout
        return {path: digest for digest, path in (line.split(None, 1) for line in listed.splitlines())}

    def is_whole(self) -> bool:
        """Byte for byte the model, and nothing else, with no half file beside it."""
        beside = self.host.run(f"ls -A {self.dest}/..").stdout.split()
        return self.on_host() == self.model.digests and ".rackwright-download" not in beside


def forget(host: Machine) -> None:
    """Make a host one that has its tools, and has never seen a model."""
    host.run(
        f"for d in {ROOT}/jobs/*; do for j in {ROOT}/lib/*/job.sh; do"
        ' [ -d "$d" ] && sh $j cancel $d; done; done; '
        f"rm -rf {ROOT}/models {ROOT}/jobs/weights {ROOT}/receipts/weights.json {ROOT}/run/weights-*"
    )


@contextmanager
def kept(host: Machine) -> Iterator[None]:
    """What the module installed is there again afterwards, whatever the block removes."""
    folders, beside = "env tools lib receipts run jobs tmp wheels", f"{ROOT}-kept"
    host.run(f"rm -rf {beside}; mkdir {beside}; cd {ROOT} && cp -a {folders} {beside}/", timeout=180)
    try:
        yield
    finally:
        host.run(
            f"mkdir -p {ROOT}; cp -a {beside}/. {ROOT}/; rm -rf {beside}; touch {ROOT}/.rackwright",
            timeout=180,
        )


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    """Return when the condition holds; it must, in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"it did not come within {seconds} s")
