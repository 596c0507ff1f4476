"""The image of a bundle: the one that the recipe pins, and on the host the bytes that were bundled."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tasks.bundling import Bundler, Failed, Options, ids_in
from tasks.digest import digest_of_file
from tasks.offline import HostBundle
from tasks.onhost.docker_image import names_loaded, spellings
from tasks.recipe import DockerRoute, load_recipe

PROGRAM = Path(__file__).parents[3] / "tasks" / "onhost" / "docker_image.py"
IMAGE = "vllm/vllm-openai:v1"
PINNED, OTHER = "sha256:" + "e" * 64, "sha256:" + "f" * 64

# knows one image by its tag, in a file; `pull` has the registry's, `save` writes what docker saves
DOCKER = """\
#!@PYTHON@
import io, json, sys, tarfile
from pathlib import Path
here, registry, words = Path("@HERE@/local"), "@REGISTRY@", sys.argv[1:]
with open("@HERE@/asked", "a") as log:
    log.write(" ".join(words) + "\\n")
have = here.read_text() if here.exists() else ""
identity = have.replace("e", "c").replace("f", "d")
if words[:2] == ["image", "inspect"]:
    if not have:
        sys.exit(1)
    print(json.dumps({"Id": identity, "RepoDigests": ["vllm/vllm-openai@" + have]}))
elif words[0] == "pull":
    here.write_text(registry)
elif words[0] == "save":
    with tarfile.open(words[2], "w") as tar:
        text = json.dumps([{"Config": identity[7:] + ".json"}]).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
elif words[0] == "load":
    print("Loaded image: vllm/vllm-openai:v1")
elif words[0] == "info":
    print(json.dumps({"ServerVersion": "28"}))
elif words[0] == "run":
    sys.exit(1)
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A docker program whose registry serves the pinned image."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    text = DOCKER.replace("@PYTHON@", sys.executable).replace("@HERE@", str(tmp_path))
    program.write_text(text.replace("@REGISTRY@", PINNED))
    program.chmod(0o755)
    return program


def pins(**more: Any) -> DockerRoute:
    route = load_recipe("deepseek-v4-flash-sm120").engine.docker
    assert route
    return route.model_copy(update={"image": IMAGE, "digest": None, "image_id": None, **more})


def bundler(tmp_path: Path, docker: Path, said: list[str] | None = None) -> Bundler:
    options = Options(
        out=tmp_path / "out", route="docker", pythons=(), index_url=None, extra_index_urls=(), find_links=(),
        mirrors=(), wheelhouse=tmp_path / "wheelhouse", docker=str(docker),
    )  # fmt: skip
    (tmp_path / "out").mkdir(exist_ok=True)
    return Bundler(load_recipe("deepseek-v4-flash-sm120"), options, (said if said is not None else []).append)


def asked(tmp_path: Path, verb: str) -> int:
    return sum(line.startswith(verb + " ") for line in (tmp_path / "asked").read_text().splitlines())


def test_another_image_under_the_tag_is_no_reason_to_bundle_it(tmp_path: Path, docker: Path) -> None:
    (tmp_path / "local").write_text(OTHER)
    bundle = bundler(tmp_path, docker)
    bundle.image(pins(digest=PINNED))
    assert asked(tmp_path, "pull") == 1
    manifest = bundle.manifest()
    assert manifest["image"] == {
        "image": IMAGE, "id": "sha256:" + "c" * 64, "digests": [f"vllm/vllm-openai@{PINNED}"],
    }  # fmt: skip
    (held,) = HostBundle("/b", manifest, ()).images()
    name = "images/vllm_vllm-openai_v1.tar"
    assert held == {"path": f"/b/{name}", "sha256": digest_of_file(tmp_path / "out" / name)}


def test_an_image_that_stays_another_one_is_not_bundled(tmp_path: Path, docker: Path) -> None:
    bundle = bundler(tmp_path, docker)
    with pytest.raises(Failed, match="the recipe pins sha256:fff"):
        bundle.image(pins(digest=OTHER))
    with pytest.raises(Failed, match="has id sha256:ccc"):
        bundle.image(pins(image_id=OTHER))
    assert asked(tmp_path, "save") == 0


def test_what_was_saved_before_is_kept_only_while_it_is_that_image(tmp_path: Path, docker: Path) -> None:
    said: list[str] = []
    bundle = bundler(tmp_path, docker, said)
    (tmp_path / "local").write_text(OTHER)
    bundle.image(pins())
    assert any(f"the recipe pins no digest; {IMAGE} is vllm/vllm-openai@{OTHER}" in line for line in said)
    bundle.image(pins())
    assert asked(tmp_path, "save") == 1
    bundle.image(pins(digest=PINNED))
    assert asked(tmp_path, "save") == 2
    assert ids_in(tmp_path / "out" / "images" / "vllm_vllm-openai_v1.tar") == {"sha256:" + "c" * 64}


def test_ids_of_an_archive_are_those_of_both_stores_and_a_damaged_one_has_none(tmp_path: Path) -> None:
    parts = {
        "manifest.json": [{"Config": "blobs/sha256/" + "1" * 64}],
        "index.json": {"manifests": [{"digest": "sha256:" + "2" * 64}]},
    }
    with tarfile.open(tmp_path / "i.tar", "w") as tar:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(json.dumps(data))
            tar.addfile(info, io.BytesIO(json.dumps(data).encode()))
    assert ids_in(tmp_path / "i.tar") == {"sha256:" + "1" * 64, "sha256:" + "2" * 64}
    (tmp_path / "cut.tar").write_bytes((tmp_path / "i.tar").read_bytes()[:700])
    assert ids_in(tmp_path / "cut.tar") == set()


def load(tmp_path: Path, docker: Path, sha256: str) -> dict[str, Any]:
    """docker_image.py's answer where the name belongs to another image, and an archive is at hand."""
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"image")
    request = {"image": IMAGE, "digest": PINNED, "offline": True}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--stdin"],
        input=json.dumps({**request, "archives": [{"path": str(archive), "sha256": sha256}]}),
        env={"PATH": f"{docker.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_an_archive_is_hashed_before_docker_sees_it(tmp_path: Path, docker: Path) -> None:
    (tmp_path / "local").write_text(OTHER)
    answer = load(tmp_path, docker, "0" * 64)
    assert answer["error"]["id"] == "digest"
    assert "the bundle's manifest says 000" in answer["error"]["what"]
    assert asked(tmp_path, "load") == 0
    (tmp_path / "image.tar").write_bytes(b"image")
    answer = load(tmp_path, docker, digest_of_file(tmp_path / "image.tar"))
    assert asked(tmp_path, "load") == 1
    assert answer["error"]["id"] == "contents"  # it was taken; this stand-in runs no Python


def test_an_archive_of_another_name_does_not_vouch_for_what_had_the_name(
    tmp_path: Path, docker: Path
) -> None:
    docker.write_text(
        docker.read_text().replace('"Loaded image: vllm/vllm-openai:v1"', '"Loaded image: x:1"')
    )
    (tmp_path / "local").write_text(OTHER)
    (tmp_path / "image.tar").write_bytes(b"image")
    answer = load(tmp_path, docker, digest_of_file(tmp_path / "image.tar"))
    assert answer["error"]["id"] == "damaged"
    assert f"do not hold {IMAGE}" in answer["error"]["what"]


@pytest.mark.parametrize(
    ("image", "printed"),
    [
        ("vllm/vllm-openai:v1", "vllm/vllm-openai:v1"),
        ("docker.io/vllm/vllm-openai:v1", "vllm/vllm-openai:v1"),
        ("docker.io/library/debian", "debian:latest"),
        ("127.0.0.1:5000/a/b:1", "127.0.0.1:5000/a/b:1"),
    ],
)
def test_docker_may_print_a_name_shorter_than_the_recipe_writes_it(image: str, printed: str) -> None:
    assert names_loaded(f"Loaded image: {printed}\n") & spellings(image)
