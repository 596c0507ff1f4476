"""What the tests of downloads share: a checkpoint, hubs that serve it, and one way to run the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import fetch_weights, verify_weights
from tests.weights.making import digests_of, make_checkpoint
from tests.weights.servers import COMMIT, REPO, Hub, running

PROGRAM = Path(fetch_weights.__file__)


class Site:
    """A host in a folder: where the model goes, its manifest, its stamp, and the program."""

    def __init__(self, root: Path, origin: Path) -> None:
        self.root = root
        self.origin = origin
        self.models = root / "models"
        self.models.mkdir()
        self.dest = self.models / "tiny"
        self.manifest = root / "tiny.sha256"
        self.manifest.write_text(verify_weights.manifest_text(digests_of(origin)))
        self.stamp = root / "state" / "tiny.stamp.json"
        self.home = root / "home"
        self.home.mkdir()

    @property
    def rejected(self) -> Path:
        return self.models / ".rackwright-rejected" / "tiny"

    @property
    def work(self) -> Path:
        return self.models / ".rackwright-download"

    def parameters(self, *sources: dict[str, Any], **more: Any) -> dict[str, Any]:
        known: dict[str, Any] = {"dest": str(self.dest), "sources": list(sources), "stamp": str(self.stamp)}
        known |= {"manifest": str(self.manifest), "reserve": 0, "patience": 3, "concurrency": 4}
        return {k: v for k, v in {**known, **more}.items() if v is not None}

    def environment(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "AWS_", "MODELSCOPE_"))}
        clean.pop("HTTPS_PROXY", None)
        return {**clean, "HOME": str(self.home), **more}

    def start(self, *sources: dict[str, Any], **more: Any) -> subprocess.Popen[str]:
        environment = self.environment(**more.pop("environment", {}))
        process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), "--stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.parameters(*sources, **more)))
        process.stdin.close()
        process.stdin = None
        return process

    def fetch(self, *sources: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Run to the end; the result, with the exit status and stderr in it."""
        process = self.start(*sources, **more)
        out, err = process.communicate(timeout=120)
        assert out, err
        result: dict[str, Any] = json.loads(out)
        assert process.returncode == (0 if result["ok"] else 1)
        return {**result, "stderr": err}

    def is_whole(self) -> bool:
        """Byte for byte the origin, and nothing else in the folder."""
        return self.dest.is_dir() and digests_of(self.dest) == digests_of(self.origin)


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "tiny"
    make_checkpoint(folder, shards=4, tensors=3, tensor_bytes=1_000_000)
    return folder


@pytest.fixture
def content(origin: Path) -> dict[str, bytes]:
    return {
        p.relative_to(origin).as_posix(): p.read_bytes() for p in sorted(origin.rglob("*")) if p.is_file()
    }


@pytest.fixture
def site(tmp_path: Path, origin: Path) -> Site:
    return Site(tmp_path, origin)


@pytest.fixture
def hub(content: dict[str, bytes]) -> Iterator[Hub]:
    with running(content, "huggingface") as hub:
        yield hub


@pytest.fixture
def scope(content: dict[str, bytes]) -> Iterator[Hub]:
    with running(content, "modelscope") as hub:
        yield hub


def hf(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"kind": "huggingface", "repo": REPO, "revision": COMMIT, "endpoint": hub.url, **more}


def ms(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"kind": "modelscope", "repo": REPO, "revision": "v1", "endpoint": hub.url, **more}


SOURCE: dict[str, Callable[..., dict[str, Any]]] = {"huggingface": hf, "modelscope": ms}


@pytest.fixture(params=["huggingface", "modelscope"])
def any_hub(
    request: pytest.FixtureRequest, content: dict[str, bytes]
) -> Iterator[tuple[Hub, dict[str, Any]]]:
    """Both hubs, one after the other, and the source that names it."""
    with running(content, request.param) as hub:
        yield hub, SOURCE[request.param](hub)
