"""A LaunchSpec that runs in a container: the same engine, port, key and readiness, other argv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.launch import LaunchSpec
from tasks.receipts import Receipt
from tasks.recipe import DockerRoute

LABEL = "org.rackwright"
# what the host's environment says about itself means nothing inside
_OF_THE_HOST = ("PATH", "LC_ALL")
# time that docker itself needs after the container's own deadline
STOP_MARGIN = 5


@dataclass(frozen=True)
class Container:
    """What the image's check found out: the image by id, and how this Docker gives GPUs.

    `gpu` is "runtime" (NVIDIA's runtime), "cdi", "gpus" or None; `shm_gib` 0 shares the host's memory.
    """

    ref: str
    program: str
    gpu: str | None
    shm_gib: float = 0


def container_of(pins: object, receipt: Receipt | None) -> Container | None:
    """What the engine's receipt says about running the image; None on other routes, and before that step."""
    if not isinstance(pins, DockerRoute) or receipt is None or receipt.detail.get("route") != "docker":
        return None
    gpu = receipt.detail.get("gpu")
    return Container(str(receipt.detail["ref"]), pins.program, str(gpu) if gpu else None)


def gpu_words(how: str | None, devices: str | None) -> list[str]:
    """docker run's words for GPUs; `devices` is a list like CUDA_VISIBLE_DEVICES, None for all."""
    names = devices.split(",") if devices else ["all"]
    if how == "runtime":
        return [
            "--runtime=nvidia",
            f"--env=NVIDIA_VISIBLE_DEVICES={','.join(names)}",
            "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ]
    if how == "cdi":
        return [f"--device=nvidia.com/gpu={name}" for name in names]
    if how == "gpus":
        return ["--gpus=all"] if names == ["all"] else [f'--gpus="device={",".join(names)}"']
    return []


def run_words(spec: LaunchSpec, container: Container) -> list[str]:
    """docker run's words after the name: from options to the engine's own argv.

    The host's network, so that `--host 127.0.0.1` means the same as without a container. The key is named
    only: docker takes its value from the environment that the wrapper has set. Paths are the same inside.
    """
    env = {name: value for name, value in spec.env if name not in _OF_THE_HOST}
    devices = env.pop("CUDA_VISIBLE_DEVICES", None)
    words = [
        "--rm",
        f"--label={LABEL}.spec={spec.digest}",
        f"--label={LABEL}.mode={spec.mode}",
        "--network=host",
        "--ipc=host" if not container.shm_gib else f"--shm-size={container.shm_gib:g}g",
        "--security-opt=no-new-privileges",
        "--log-driver=none",
        *gpu_words(container.gpu, devices),
        *(f"--env={name}={value}" for name, value in env.items()),
        *(["--env=VLLM_API_KEY"] if spec.key_file else []),
        *(f"--mount=type=bind,source={path},target={path},readonly" for path in _read_only(spec)),
        *(f"--mount=type=bind,source={path},target={path}" for path in spec.writable),
        f"--workdir={spec.cwd}" if spec.cwd in spec.writable else "--workdir=/",
        f"--entrypoint={container.program}",
        container.ref,
    ]
    return [*words, *_engine_words(spec.argv)]


def docker_spec(spec: LaunchSpec, container: Container, program: str) -> LaunchSpec:
    """`spec` as a process that a supervisor can keep: docker run in its foreground.

    `program` is `docker-engine.sh` on the host. It runs as root: whoever may use Docker is root.
    """
    stop = max(1, spec.stop_seconds - STOP_MARGIN)
    return replace(
        spec,
        argv=("/bin/sh", program, spec.name, str(stop), *run_words(spec, container)),
        user=None,
        after_stop=("/bin/sh", program, "--remove", spec.name),
    )


def _read_only(spec: LaunchSpec) -> Sequence[str]:
    """What the engine only reads, without the host's own environment folder."""
    env_folder = spec.argv[0].rsplit("/bin/", 1)[0]
    return [path for path in spec.readable if path != env_folder]


def _engine_words(argv: tuple[str, ...]) -> Sequence[str]:
    """The engine's argv without its program, which the image brings."""
    return argv[1:]
