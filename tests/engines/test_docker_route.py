"""The docker route against a real Docker Engine and a real registry, with images under the pinned names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockers import PINNED, ROOT, Docker, docker_engine, engine_files, registry
from machines import base_system, missing_requirements

from tasks.bundling import ids_in
from tasks.digest import digest_of_file

RACKWRIGHT = [sys.executable, "-c", "from tasks.cli import main; main()"]
PROGRAM = ROOT / "tasks" / "onhost" / "docker_image.py"


@pytest.fixture(scope="module")
def docker(docker_can_run: None) -> Iterator[Docker]:
    """A Docker Engine with a runtime named nvidia, and the pinned image in it."""
    if missing_requirements():
        pytest.skip("; ".join(missing_requirements()))
    with docker_engine(nvidia=True) as engine:
        engine.import_base(base_system())
        engine.derive(PINNED, engine_files())
        yield engine


def ask(engine: Docker, **request: Any) -> tuple[int, dict[str, Any]]:
    """docker_image.py's answer."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--stdin"],
        input=json.dumps({"image": PINNED, **request}),
        env={**os.environ, "PATH": f"{engine.path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def test_an_image_that_is_here_is_inspected_and_sees_the_gpus(docker: Docker) -> None:
    rc, answer = ask(
        docker, versions={"vllm": "0.26.0", "flashinfer-python": "0.6.14"}, cuda_major=13, gpus=4
    )
    assert rc == 0, answer
    assert answer["how"] == "here"
    assert answer["versions"]["torch"] == "2.11.0+cu130"
    assert (answer["gpu"], len(answer["gpus"])) == ("runtime", 4)
    assert answer["ref"].startswith("sha256:")
    assert docker.run("ps", "-aq").stdout == ""


@pytest.mark.parametrize(
    ("request_", "identifier", "words"),
    [
        ({"versions": {"vllm": "0.25.1"}}, "contents", "holds vllm 0.26.0, the recipe says 0.25.1"),
        ({"cuda_major": 12}, "contents", "for CUDA 13.0, the recipe says 12"),
        ({"gpus": 8}, "gpus", "sees 4 GPUs"),
        ({"recorded": {"id": "sha256:" + "0" * 64}}, "digest", "the name was given to another image"),
        ({"image_id": "sha256:" + "0" * 64, "offline": True}, "unreachable", "nothing may be pulled"),
    ],
)
def test_another_image_than_the_recipe_means_is_refused(
    docker: Docker, request_: dict[str, Any], identifier: str, words: str
) -> None:
    rc, answer = ask(docker, **request_)
    assert rc == 1
    assert answer["error"]["id"] == identifier
    assert words in answer["error"]["what"]
    assert answer["error"]["fix"]


def test_without_a_runtime_named_nvidia_the_missing_toolkit_is_named(docker_can_run: None) -> None:
    with docker_engine(nvidia=False) as engine:
        engine.import_base(base_system())
        engine.derive(PINNED, engine_files())
        rc, answer = ask(engine, gpus=4)
    assert rc == 1
    assert answer["error"]["id"] == "toolkit"
    assert "could not select device driver" in answer["error"]["what"]
    assert "nvidia-ctk runtime configure" in answer["error"]["fix"]


def test_pull_by_digest_by_tag_from_a_mirror_and_a_purged_tag(docker: Docker) -> None:
    with registry() as address:
        name = f"{address}/vllm/vllm-openai:v0.26.0"
        identity = docker.derive(name, engine_files(vllm="0.26.0"))
        docker.run("push", name)
        digest = (
            docker.run("image", "inspect", "--format", "{{index .RepoDigests 0}}", name)
            .stdout.split("@")[1]
            .strip()
        )
        docker.run("rmi", name)
        rc, answer = ask(docker, image=name, digest=digest)
        assert rc == 0, answer
        assert (answer["how"], answer["id"], answer["digest"]) == ("pulled", identity, digest)
        assert ask(docker, image=name, digest=digest)[1]["how"] == "here"
        # the same name from a mirror, as a site without the hub has it
        docker.run("rmi", "-f", identity)
        rc, answer = ask(docker, image="vllm/vllm-openai:v0.26.0", mirrors=[address])
        assert rc == 0, answer
        assert (answer["how"], answer["id"]) == ("mirror", identity)
        # somebody moves the tag; what was recorded is held against it
        other = docker.derive(name, engine_files(vllm="0.26.1"))
        docker.run("push", name)
        docker.run("rmi", "-f", other, identity)
        rc, answer = ask(docker, image=name, recorded={"id": identity, "digest": digest})
        assert rc == 1
        assert answer["error"]["id"] == "digest"
        assert identity in answer["error"]["what"]
        rc, answer = ask(
            docker, image=f"{address}/vllm/vllm-openai:nightly-gone", replacement="vllm/vllm-openai:v0.26.0"
        )
        assert (rc, answer["error"]["id"]) == (1, "purged")
        assert answer["error"]["fix"] == "use vllm/vllm-openai:v0.26.0 in the recipe"
    rc, answer = ask(docker, image=f"{address}/vllm/vllm-openai:later")
    assert (rc, answer["error"]["id"]) == (1, "unreachable")
    assert "bundle" in answer["error"]["fix"]


def test_an_image_is_loaded_from_an_archive_and_a_damaged_archive_is_named(
    docker: Docker, tmp_path: Path
) -> None:
    name = "vllm/vllm-openai:v0.33.0"
    identity = docker.derive(name, engine_files(vllm="0.33.0"))
    archive = tmp_path / "image.tar"
    docker.run("save", "--output", str(archive), name)
    docker.run("rmi", "-f", identity)
    assert identity in ids_in(archive)
    held = [{"path": str(archive), "sha256": digest_of_file(archive)}]
    rc, answer = ask(docker, image=name, archives=held, offline=True, image_id=identity)
    assert rc == 0, answer
    assert (answer["how"], answer["id"]) == ("archive", identity)
    docker.run("rmi", "-f", identity)
    # the archive holds another image than the one that is asked for, and that name is taken already
    other = docker.derive("vllm/vllm-openai:v0.34.0", engine_files(vllm="0.34.0"))
    request = {"image": "vllm/vllm-openai:v0.34.0", "digest": "sha256:" + "0" * 64, "offline": True}
    rc, answer = ask(docker, archives=held, **request)
    assert (rc, answer["error"]["id"]) == (1, "damaged")
    docker.run("rmi", "-f", other, identity)
    archive.write_bytes(archive.read_bytes()[:100_000])
    rc, answer = ask(docker, image=name, archives=held, offline=True)
    assert (rc, answer["error"]["id"]) == (1, "digest")
    assert docker.run("image", "inspect", name, check=False).returncode != 0
    rc, answer = ask(
        docker,
        image=name,
        archives=[{"path": str(archive), "sha256": digest_of_file(archive)}],
        offline=True,
    )
    assert (rc, answer["error"]["id"]) == (1, "damaged")


def test_room_is_looked_at_before_pulling(docker: Docker) -> None:
    rc, answer = ask(docker, image="127.0.0.1:9/vllm/vllm-openai:v1", bytes=10**15)
    assert (rc, answer["error"]["id"]) == (1, "disk_full")
    assert "the image needs 1000000.0 GB" in answer["error"]["what"]


def spec_of(tmp_path: Path, port: int) -> Any:
    from tasks.launch import launch_spec
    from tasks.recipe import load_recipe
    from tasks.settings import Settings, layout_of

    settings = Settings(recipe="deepseek-v4-flash-sm120", root=str(tmp_path / "r"), route="docker", port=port)
    recipe = load_recipe("deepseek-v4-flash-sm120")
    return launch_spec(recipe, settings, layout_of(settings), "eager", user=None)


def test_the_launch_spec_serves_from_the_container_and_ends_with_its_supervisor(
    docker: Docker, tmp_path: Path
) -> None:
    from tasks.engines.docker_launch import Container, docker_spec

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = spec_of(tmp_path, port)
    for folder in (*base.writable, *(path for path in base.readable if path != str(tmp_path / "r" / "env"))):
        Path(folder).mkdir(parents=True, exist_ok=True)
    identity = docker.run("image", "inspect", "--format", "{{.Id}}", PINNED).stdout.strip()
    spec = docker_spec(
        base, Container(identity, "vllm", "runtime"), str(ROOT / "tasks" / "onhost" / "docker-engine.sh")
    )
    env = {
        **os.environ, "PATH": f"{docker.path}:{os.environ['PATH']}", "VLLM_API_KEY": "not-in-argv",
    }  # fmt: skip
    # what a killed run left under this name goes first
    docker.run("run", "-d", "--name", spec.name, "--network", "none", PINNED, "sleep", "600")
    process = subprocess.Popen(spec.argv, env=env, stdin=subprocess.DEVNULL)
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer not-in-argv"}
        )
        deadline = time.monotonic() + 180
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    models = json.load(answer)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.3)
        assert models["data"][0]["id"] == "deepseek-v4-flash"
        found = json.loads(docker.run("inspect", spec.name).stdout)[0]
        host = found["HostConfig"]
        assert host["Privileged"] is False
        assert (host["IpcMode"], host["NetworkMode"], host["Runtime"]) == ("host", "host", "nvidia")
        assert found["Image"] == identity
        assert found["Config"]["Labels"]["org.rackwright.spec"] == base.digest
        writable = {mount["Source"]: mount["RW"] for mount in found["Mounts"]}
        assert writable[str(tmp_path / "r" / "models" / "deepseek-v4-flash")] is False
        assert writable[str(tmp_path / "r" / "cache" / "jit" / "any")] is True
        assert "not-in-argv" not in json.dumps(spec.argv)
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"not-in-argv" not in arguments
    finally:
        process.terminate()
        process.wait(60)
    assert docker.run("ps", "-aq", "--filter", f"name={spec.name}").stdout == ""


RECIPE = """
summary = "an engine's image"
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
default = "docker"
[engine.docker]
image = "{image}"
cuda_major = 13
image_bytes = 1_000_000
versions = {{ vllm = "0.26.0" }}
[serve]
ready_seconds = 60
stop_seconds = 10
[serve.flags]
max-model-len = 8192
[serve.modes.eager.flags]
enforce-eager = true
[acceptance]
profile = "smoke"
"""


def rackwright(docker: Docker, folder: Path, verb: str) -> str:
    """A run on this machine, with the tests' own Docker; what it printed."""
    done = subprocess.run(
        [*RACKWRIGHT, verb, str(folder / "inventory.py"), "-y"],
        env={**os.environ, "PATH": f"{docker.path}:{os.environ['PATH']}", "PYINFRA_PROGRESS": "off"},
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_site(folder: Path, **more: Any) -> None:
    """A recipe for the pinned name and an inventory with this machine."""
    manifest = ROOT / "inventories" / "recipes" / "manifests" / "rehearsal-cpu.sha256"
    (folder / "image.toml").write_text(RECIPE.format(manifest=manifest, image=PINNED))
    data = {
        "recipe": str(folder / "image.toml"),
        "root": str(folder / "root"),
        "sources": ["generate"],
        "reports": str(folder / "reports"),
        **more,
    }
    (folder / "inventory.py").write_text(f"hosts = [('@local', {data!r})]\n")


def test_site_records_the_image_serves_from_it_and_uninstall_ends_the_container(docker: Docker) -> None:
    # a short path: supervisord's socket lies below it
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="rws-") as name:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        folder = Path(name)
        write_site(folder, port=port, instance="rwdock")
        try:
            first = rackwright(docker, folder, "engine")
            identity = docker.run("image", "inspect", "--format", "{{.Id}}", PINNED).stdout.strip()
            assert f"the recipe pins no digest; {PINNED} is {identity}, recorded" in first
            receipt = json.loads((folder / "root" / "receipts" / "engine.json").read_text())
            assert receipt["detail"]["ref"] == identity
            again = rackwright(docker, folder, "engine")
            assert "No changes" in again and "] Success" not in again
            # the service's PATH is its own, and begins with this folder
            (folder / "root" / "env" / "bin" / "docker").symlink_to(docker.path / "docker")
            rackwright(docker, folder, "site")
            running = docker.run("ps", "--format", "{{.Names}}").stdout.split()
            assert running == ["rwdock-eager"]
            again = rackwright(docker, folder, "site")
            assert "] Success" not in again
        finally:
            rackwright(docker, folder, "uninstall")
        assert docker.run("ps", "-aq").stdout == ""
