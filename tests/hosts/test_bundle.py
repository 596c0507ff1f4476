"""A host without any network, provisioned from a bundle; and bundles that were damaged or are of no use."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_sites import SOURCE_ON_HOST, SourceSite, build_tools, index_of, standin
from machines import Machine
from sites import RACKWRIGHT, Site

ROOT = "/opt/rackwright"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> standin.Source:
    """Repositories where the bundle is made; an offline host never sees them."""
    folder = tmp_path_factory.mktemp("source")
    return standin.Source(folder, f"file://{folder}/git")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("index")
    wheels = [*build_tools().glob("*.whl"), *standin.standin_wheels(folder / "made").values()]
    with index_of(folder, wheels) as server:
        yield server


@pytest.fixture(scope="module")
def offline_host(hosts_can_run: None) -> Iterator[Machine]:
    """A host without a way out, for what needs only the engine's wheel."""
    host = Machine("container", "gpu1", offline=True)
    try:
        yield host.start()
    finally:
        host.stop()


@pytest.fixture
def host(offline_host: Machine) -> Machine:
    """That host with its environment at most: no engine, no wheel, no bundle."""
    offline_host.run(
        f"rm -rf {ROOT}/receipts/engine.json {ROOT}/jobs/engine* {ROOT}/wheels {ROOT}/cache/bundle"
        f" {ROOT}/env/bin/vllm {ROOT}/env/lib/python3.*/site-packages/vllm*"
    )
    return offline_host


def wheels_of(site: Site, folder: Path) -> str:
    """A folder with the site's wheel, as a bundle's maker has it."""
    folder.mkdir()
    (folder / site.wheel.name).write_bytes(site.wheel.read_bytes())
    return str(folder)


def make(site: Site, out: Path, *options: str, rc: int = 0) -> str:
    """`rackwright bundle` for a site's recipe; what it printed."""
    recipe = str(site.data["recipe"])
    done = subprocess.run(
        [*RACKWRIGHT, "bundle", recipe, "--output", str(out), "--python", "3.11", *options],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_offline_host_is_provisioned_from_a_bundle_alone(
    new_host: Callable[..., Machine], tmp_path: Path
) -> None:
    host = new_host("container", offline=True)
    site = Site(tmp_path, [host], bundle=str(tmp_path / "bundle"), find_links=[])
    wheels = wheels_of(site, tmp_path / "made")
    dry = make(site, tmp_path / "bundle", "--dry", "--find-links", wheels)
    assert site.wheel.name.split("-")[1] in dry
    assert not (tmp_path / "bundle").exists()
    make(site, tmp_path / "bundle", "--find-links", wheels, "--without", "miniforge")
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert {item["part"] for item in manifest["files"]} == {"tools", "engine"}
    assert host.run("ip route", check=False).stdout.count("default") == 0
    output = site.run("site", "-y", timeout=400)
    assert "bundle: sending" in output
    report = site.report(host.name)
    assert report["verdict"] in ("pass", "warn")
    again = site.run("site", "-y", timeout=200)
    assert "] Success" not in again


def test_an_offline_host_builds_from_a_bundle_with_the_source(
    new_host: Callable[..., Machine], tmp_path: Path, index: Any, source: standin.Source
) -> None:
    """First the bundle's sources are built offline; a bundle with that build needs no compiler any more."""
    host, second = (
        new_host("container", "builder", offline=True),
        new_host("container", "second", offline=True),
    )
    site = SourceSite(tmp_path, [host, second], index, source, bundle=str(tmp_path / "bundle"))
    for machine in (host, second):
        site.prepare(machine, repositories=False)
    lock = locked(site, tmp_path)
    site.write_recipe(build_env="", repo=source.repo)
    text = (tmp_path / "source.toml").read_text()
    (tmp_path / "source.toml").write_text(
        text.replace("[engine.source.env]", f'lock = "{lock.name}"\n[engine.source.env]')
    )
    (tmp_path / "wheelhouse").mkdir(exist_ok=True)
    options = ("--index-url", f"{index.url}/simple", "--wheelhouse", str(tmp_path / "wheelhouse"))
    options += ("--without", "miniforge", "--without", "tools")
    make(site, tmp_path / "bundle", *options)
    parts = {item["path"] for item in json.loads((tmp_path / "bundle/manifest.json").read_text())["files"]}
    assert {"source/vllm.tar", "source/deps/cutlass-src.tar", "source/deps/deepgemm-src.tar"} <= parts
    assert host.run(f"test -e {SOURCE_ON_HOST}", check=False).returncode != 0
    site.run("build", "-y", "--limit", "builder", timeout=400)
    provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
    assert {one["how"] for one in provenance["source"]["dependencies"]} == {"archive"}
    assert provenance["source"]["how"] == "archive"
    # making it again keeps what is there and adds the build
    make(site, tmp_path / "bundle", *options)
    site.run("engine", "-y", "--limit", "second", timeout=400)
    detail = json.loads(second.run(f"cat {ROOT}/receipts/engine.json").stdout)["detail"]
    assert detail["how"] == "bundle"
    assert second.run(f"test -e {ROOT}/src", check=False).returncode != 0


def locked(site: SourceSite, folder: Path) -> Path:
    """A lock for the source route, as a recipe would name it: every wheel of the index, by hash."""
    lines = []
    for wheel in [*build_tools().glob("*.whl"), site.pins["torch"], *list(site.pins.values())[1:]]:
        name, version = wheel.name.split("-")[:2]
        lines.append(
            f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{standin.sha256(wheel)}\n"
            f"    # {wheel.name} {wheel.stat().st_size}"
        )
    path = folder / "source.lock"
    path.write_text("\n".join(sorted(lines)) + "\n")
    return path


def test_a_damaged_bundle_is_noticed_and_named(host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [host], bundle=str(tmp_path / "bundle"), find_links=[])
    output = site.run("engine", "-y", rc=1, timeout=200)
    assert "rackwright bundle" in output
    wheels = wheels_of(site, tmp_path / "made")
    make(site, tmp_path / "bundle", "--find-links", wheels, "--without", "miniforge", "--without", "tools")
    held = tmp_path / "bundle" / "wheels" / site.wheel.name
    data = bytearray(held.read_bytes())
    data[len(data) // 2] ^= 1
    held.write_bytes(bytes(data))
    output = site.run("engine", "-y", rc=1, timeout=200)
    assert f"wheels/{site.wheel.name}: not the bytes that the manifest names" in output
    assert host.run(f"test -x {ROOT}/env/bin/vllm", check=False).returncode != 0
    # made again it is mended
    make(site, tmp_path / "bundle", "--find-links", wheels, "--without", "miniforge", "--without", "tools")
    site.run("engine", "-y", timeout=200)


def test_a_bundle_on_the_hosts_own_disk_is_used_in_place(host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [host], bundle="/mnt/usb/bundle", find_links=[])
    wheels = wheels_of(site, tmp_path / "made")
    make(site, tmp_path / "bundle", "--find-links", wheels, "--without", "miniforge", "--without", "tools")
    host.run("rm -rf /mnt/usb; mkdir -p /mnt/usb")
    host.put(tmp_path / "bundle", "/mnt/usb/bundle")
    output = site.run("engine", "-y", timeout=200)
    assert "bundle: sending" not in output
    assert host.run(f"test -e {ROOT}/cache/bundle", check=False).returncode != 0
