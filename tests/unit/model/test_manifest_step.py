"""The manifest of a host's copy: good where the weights step would say so, differences file by file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.model import proof
from tasks.onhost import verify_weights
from tasks.steps import StepFailed
from tests.weights.making import digests_of, make_checkpoint


class Host:
    """A host in a folder, as the step sees it: the verifier really runs."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.model = root, root / "model"
        self.said: list[str] = []
        self.kept = root / "reports" / "x.sha256"
        self.lib = root / "lib"
        self.lib.mkdir()
        monkeypatch.setattr(proof, "job", self.job)
        monkeypatch.setattr(proof, "python_of", lambda plan: sys.executable)
        monkeypatch.setattr(proof, "onhost", lambda plan, name: str(self.lib / name))
        monkeypatch.setattr(proof, "stamp_file", lambda plan: str(root / "stamp"))
        monkeypatch.setattr(proof.sources, "ignored", lambda recipe, settings: [])

    def job(self, plan: Any, name: str, key: str, argv: Any, stdin: str, **_: Any) -> Any:
        done = subprocess.run(
            [sys.executable, verify_weights.__file__, "--stdin"], input=stdin, capture_output=True, text=True
        )
        result = json.loads(done.stdout)
        if done.returncode:
            raise StepFailed(json.dumps(result["problems"]))
        return SimpleNamespace(result=result)

    def act(self) -> Any:
        model = SimpleNamespace(name="x", manifest="x.sha256", shards=None, bytes=None)
        recipe = SimpleNamespace(name="x", model=model, beside=lambda name: self.lib / "model.sha256")

        def run(script: str, **_: Any) -> Any:
            done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
            return SimpleNamespace(ok=done.returncode == 0, stdout=done.stdout, stderr=done.stderr)

        plan: Any = SimpleNamespace(
            name="gpu1", recipe=recipe, model_dir=str(self.model), say=self.said.append,
            settings=SimpleNamespace(reverify="stamp", hash_threads=1),
            state=SimpleNamespace(model_stat="known"), remote=SimpleNamespace(run=run),
            layout=SimpleNamespace(tmp=str(self.root)),
            record=SimpleNamespace(page=self.kept.parent / "index.html"),
        )  # fmt: skip
        return proof.Manifest(plan).act()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path, monkeypatch)
    make_checkpoint(host.model)
    index = host.model / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_size"] += 1  # as some publishers have it
    index.write_text(json.dumps(document))
    (host.lib / "model.sha256").write_text(verify_weights.manifest_text(digests_of(host.model)))
    return host


def test_what_the_recipes_manifest_vouches_for_is_good_although_its_index_is_wrong(host: Host) -> None:
    host.act()
    assert host.kept.read_text() == (host.lib / "model.sha256").read_text()
    assert host.said[-1] == "equal to x.sha256"


def test_another_model_that_is_whole_is_brought_and_shown_file_by_file(host: Host) -> None:
    make_checkpoint(host.model.with_name("other"), seed=5)
    host.model = host.model.with_name("other")
    with pytest.raises(StepFailed, match="files are not what x") as failed:
        host.act()
    assert any("model-00001-of-00003.safetensors" in line for line in failed.value.log)
    assert host.kept.read_text() == verify_weights.manifest_text(digests_of(host.model))


def test_a_copy_that_is_not_whole_is_held_against_the_manifest(host: Host) -> None:
    (host.model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StepFailed, match="in the manifest and not there"):
        host.act()
    assert not host.kept.exists()
