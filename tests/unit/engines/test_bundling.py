"""What a bundle's manifest says is what lies there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.bundling import Bundler, Failed, Options, main, wheel_of
from tasks.digest import digest_of
from tasks.onhost.wheel_lock import Pin
from tasks.recipe import load_recipe, recipe_names


@pytest.fixture
def bundler(tmp_path: Path) -> Bundler:
    options = Options(
        out=tmp_path / "out", route="source", pythons=(), index_url=None, extra_index_urls=(), find_links=(),
        mirrors=(), wheelhouse=tmp_path / "wheelhouse", docker="docker",
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    return Bundler(load_recipe("rehearsal-cpu"), options, lambda line: None)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (1_700_000_000, 1_700_000_000))


def test_files_of_one_name_size_and_time_in_two_folders_have_their_own_sums(bundler: Bundler) -> None:
    contents = {"built/aaaa/engine.lock": b"lock of 3.11", "built/bbbb/engine.lock": b"lock of 3.12"}
    for path, content in contents.items():
        put(bundler.out / path, content)
        bundler.parts[path] = "built"
    found = {item["path"]: item["sha256"] for item in bundler.manifest()["files"]}
    assert found == {path: sha256(content) for path, content in contents.items()}


def test_the_same_bytes_under_two_names_are_two_files(bundler: Bundler) -> None:
    name = "flashinfer_cubin-0.6.14-py3-none-any.whl"
    for file in (name, f"{name}.orig"):
        put(bundler.out / "wheels" / file, b"wheel")
    bundler.parts = {f"wheels/{name}": "engine"}
    (item,) = bundler.manifest()["files"]
    assert (item["path"], item["sha256"]) == (f"wheels/{name}", sha256(b"wheel"))


def test_a_pins_wheel_is_taken_under_a_wheels_name() -> None:
    pin = Pin("six", "1.17.0", ("1" * 64,))
    name = "six-1.17.0-py3-none-any.whl"
    assert wheel_of(pin, {"a-copy": "1" * 64, name: "1" * 64}) == name
    assert wheel_of(pin, {"a-copy": "1" * 64, name: "2" * 64}) is None


def entry(wheelhouse: Path, wheel: bytes) -> dict[str, Any]:
    """A finished build whose wheel is these bytes now, and was `good wheel`."""
    key = {"commit": "c" * 40}
    folder = wheelhouse / digest_of(key)[:16]
    put(folder / "v-1-py3-none-any.whl", wheel)
    put(folder / "engine.lock", b"lock")
    put(folder / "build.log", b"log")
    good = {"file": "v-1-py3-none-any.whl", "sha256": sha256(b"good wheel"), "bytes": len(b"good wheel")}
    more = {"lock_sha256": sha256(b"lock"), "log": {"sha256": sha256(b"log")}, "env": {}}
    put(folder / "provenance.json", json.dumps({"key": key, "wheel": good, **more}).encode())
    return good


def test_a_finished_build_goes_into_the_bundle_whole_or_not_at_all(bundler: Bundler, tmp_path: Path) -> None:
    pins: Any = SimpleNamespace(commit="c" * 40)
    good = entry(tmp_path / "wheelhouse", b"good wheel")
    bundler.built(pins)
    assert good["sha256"] in {item["sha256"] for item in bundler.manifest()["files"]}
    entry(tmp_path / "wheelhouse", b"evil wheel")
    with pytest.raises(Failed, match="not what was built"):
        bundler.built(pins)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python", "3.99"], "--python 3.99: must be 3.N from 3.10 to 3.15"),
        (["--wheelhouse", "/nope"], "--wheelhouse /nope: no such folder"),
        (["--index-url", "foo"], "--index-url foo: must be a URL"),
        (["--extra-index-url", "https://u:hunter22@", "--extra-index-url", "x"], "--extra-index-url x: must"),
        (["--find-links", "/nope"], "--find-links /nope: neither a folder nor a URL"),
        (["--mirror", "a=b"], "--mirror a=b: must be PREFIX=REPLACEMENT"),
        (["--docker", "/nope/docker"], "--docker /nope/docker: no such program"),
        (["--output", "/"], "--output /: name a folder in it"),
        (["--output", "/etc/passwd"], "--output /etc/passwd: /etc/passwd cannot be written: Not a directory"),
        (["--output", "/proc/x"], "--output /proc/x: /proc cannot be written"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--dry"]])
def test_what_cannot_work_is_wrong_usage_before_anything_is_fetched(
    options: list[str], said: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["rehearsal-cpu", *how, *options])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert said in shown.err and "hunter22" not in shown.err


def test_an_image_needs_a_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = next(name for name in recipe_names() if load_recipe(name).engine.docker)
    assert main([recipe, "--route", "docker", "--output", str(tmp_path / "out")]) == 1
    assert "there is no docker here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
