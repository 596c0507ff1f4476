"""What docker is told, and what its words mean."""

from __future__ import annotations

import pytest

from tasks.engines.docker_launch import Container, docker_spec, gpu_words, run_words
from tasks.launch import launch_spec
from tasks.onhost.docker_image import (
    Seen,
    gpu_ways,
    layers_done,
    mirrored,
    repository,
    why_no_gpu,
    why_pull_failed,
)
from tasks.recipe import load_recipe
from tasks.settings import Settings, layout_of

REF = "sha256:" + "1" * 64


def spec(**more: object):  # type: ignore[no-untyped-def]
    settings = Settings.model_validate(
        {"recipe": "deepseek-v4-flash-sm120", "root": "/opt/r", "route": "docker", **more}
    )
    recipe = load_recipe("deepseek-v4-flash-sm120")
    return launch_spec(recipe, settings, layout_of(settings), "eager", user=None)


def test_the_container_is_confined_and_the_image_is_named_by_its_id() -> None:
    words = run_words(spec(), Container(REF, "vllm", "runtime"))
    assert "--privileged" not in " ".join(words)
    assert {"--ipc=host", "--network=host", "--security-opt=no-new-privileges", "--rm"} <= set(words)
    assert (
        "--mount=type=bind,source=/opt/r/models/deepseek-v4-flash,target=/opt/r/models/deepseek-v4-flash,readonly"
        in words
    )
    for path in spec().writable:
        assert f"--mount=type=bind,source={path},target={path}" in words
    assert any(path.startswith("/opt/r/cache/") for path in spec().writable)
    assert words[words.index(REF) + 1 :][:2] == ["serve", "/opt/r/models/deepseek-v4-flash"]
    assert words[words.index(REF) - 1] == "--entrypoint=vllm"


def test_the_key_is_named_and_never_written() -> None:
    words = run_words(spec(), Container(REF, "vllm", None))
    assert "--env=VLLM_API_KEY" in words
    assert not any("VLLM_API_KEY=" in word for word in words)
    assert "--env=VLLM_API_KEY" not in run_words(spec(api_key=False), Container(REF, "vllm", None))


def test_flags_and_environment_of_the_docker_route_are_the_recipes() -> None:
    words = run_words(spec(), Container(REF, "vllm", "gpus"))
    assert "--enable-expert-parallel" in words
    assert "--env=NCCL_P2P_DISABLE=1" in words
    assert '--gpus="device=0,1,2,3"' in words
    assert not any(word.startswith(("--env=PATH=", "--env=CUDA_VISIBLE_DEVICES=")) for word in words)


def test_a_sized_shm_replaces_the_hosts() -> None:
    words = run_words(spec(), Container(REF, "vllm", None, shm_gib=32))
    assert "--shm-size=32g" in words
    assert "--ipc=host" not in words


@pytest.mark.parametrize(
    ("how", "devices", "words"),
    [
        ("cdi", None, ["--device=nvidia.com/gpu=all"]),
        ("cdi", "0,1", ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"]),
        ("gpus", None, ["--gpus=all"]),
        (None, "0", []),
    ],
)
def test_every_way_of_giving_gpus(how: str | None, devices: str | None, words: list[str]) -> None:
    assert gpu_words(how, devices) == words


def test_the_supervised_process_is_docker_run_with_the_same_port_and_deadline() -> None:
    base = spec()
    made = docker_spec(base, Container(REF, "vllm", None), "/opt/r/lib/x/docker-engine.sh")
    assert made.argv[:4] == ("/bin/sh", "/opt/r/lib/x/docker-engine.sh", "rackwright-eager", "115")
    assert (made.port, made.bind, made.ready_seconds) == (base.port, base.bind, base.ready_seconds)
    assert made.user is None
    assert f"--label=org.rackwright.spec={base.digest}" in made.argv


@pytest.mark.parametrize(
    ("runtimes", "cdi", "ways"),
    [
        (["runc", "nvidia"], False, ["runtime"]),
        (["runc"], True, ["cdi"]),
        (["runc", "nvidia"], True, ["runtime", "cdi"]),
        (["runc"], False, ["gpus"]),
    ],
)
def test_hosts_with_a_runtime_and_hosts_with_cdi_only_both_work(
    runtimes: list[str], cdi: bool, ways: list[str]
) -> None:
    assert gpu_ways(runtimes, cdi) == ways


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        # Docker Engine 20.10 to 28 and registry:2, as they print it
        ("Error response from daemon: manifest for vllm/vllm-openai:nightly-x not found: manifest unknown: manifest unknown", "purged"),  # noqa: E501
        ("Error response from daemon: failed to resolve reference \"docker.io/vllm/x:y\": docker.io/vllm/x:y: not found", "purged"),  # noqa: E501
        ("failed to register layer: write /x: no space left on device", "disk_full"),
        ("Error response from daemon: Get \"https://registry-1.docker.io/v2/\": dial tcp: i/o timeout", "unreachable"),  # noqa: E501
        ("Error response from daemon: pull access denied for vllm/x, repository does not exist or may require 'docker login': denied", "unreachable"),  # noqa: E501
    ],
)  # fmt: skip
def test_reasons_of_a_failed_pull(text: str, identifier: str) -> None:
    found = why_pull_failed(text, "vllm/vllm-openai:nightly-x", "vllm/vllm-openai:v0.26.0")
    assert found.id == identifier
    assert ("v0.26.0" in found.fix) == (identifier == "purged")


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        ('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].', "toolkit"),  # noqa: E501
        ("docker: Error response from daemon: Unknown runtime specified nvidia.", "toolkit"),
        ("docker: Error response from daemon: CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all", "toolkit"),  # noqa: E501
        ('exec: "nvidia-smi": executable file not found in $PATH', "gpus"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "gpus"),
    ],
)  # fmt: skip
def test_reasons_of_a_container_without_gpus(text: str, identifier: str) -> None:
    found = why_no_gpu(text, "runtime")
    assert found.id == identifier
    assert found.fix


def test_names_of_images_at_mirrors() -> None:
    assert mirrored("vllm/vllm-openai:v1", "m.example") == "m.example/vllm/vllm-openai:v1"
    assert mirrored("debian:12", "m.example/hub/") == "m.example/hub/library/debian:12"
    assert mirrored("ghcr.io/a/b@sha256:0", "m.example") == "m.example/a/b@sha256:0"
    assert repository("localhost:5000/a/b:tag") == "localhost:5000/a/b"


def test_the_digest_is_that_of_the_images_own_repository() -> None:
    seen = Seen("id", ("mirror/vllm/vllm-openai@sha256:aa", "vllm/vllm-openai@sha256:bb"), 1)
    assert seen.digest_of("vllm/vllm-openai:x") == "sha256:bb"
    assert Seen("id", (), 1).digest_of("vllm/vllm-openai:x") is None


def test_layers_that_are_finished_are_counted() -> None:
    assert layers_done({"a": "Pull complete", "b": "Already exists", "c": "Download complete"}) == (2, 3)
