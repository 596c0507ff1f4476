"""LaunchSpec: the one description of an engine process that every supervisor renders."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tasks.digest import digest_of
from tasks.recipe import TRIAL, Recipe, flag_argv
from tasks.settings import Layout, Settings

CUDA_HOME = "/usr/local/cuda"
# vLLM's own default of gpu-memory-utilization was 0.9 up to 0.2x and is 0.92 since.
USUAL_SHARE = 0.9
# Kernels that the engine compiles, below the root.
JIT = "cache/jit"
GPU_WAIT_SECONDS = 90
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin"


@dataclass(frozen=True)
class LaunchSpec:
    """One engine process: what runs, as whom, where it listens, when it is ready.

    `argv` holds no secret: the key is read from `key_file` by the wrapper `start-engine.sh`.
    Seconds are deadlines. `restart` is false for an engine on trial: its first crash decides.
    `gpu_free` is the share of each GPU's memory that must be free before a start.
    `after_stop` takes away what a killed process leaves outside its control group (a container).
    Render it; never write a flag anywhere else.
    """

    name: str
    mode: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    unset: tuple[str, ...]
    cwd: str
    bind: str
    port: int
    model_name: str
    user: str | None
    log: str
    key_file: str | None
    wrapper: str
    ready_seconds: int
    stop_seconds: int
    writable: tuple[str, ...]
    readable: tuple[str, ...]
    restart: bool = True
    gpu_free: float | None = None
    after_stop: tuple[str, ...] = ()

    @property
    def wrapper_env(self) -> dict[str, str]:
        """What `start-engine.sh` is told under every supervisor; it keeps none of it for the engine."""
        env = {}
        if self.key_file:
            env["RACKWRIGHT_KEY"] = "required"
        if self.unset:
            env["RACKWRIGHT_UNSET"] = " ".join(self.unset)
        if self.gpu_free is not None:
            env["RACKWRIGHT_GPU_FREE"] = f"{self.gpu_free:g}"
            env["RACKWRIGHT_GPU_WAIT"] = str(GPU_WAIT_SECONDS)
        return env

    @property
    def digest(self) -> str:
        """What makes two starts of the engine the same; how long one waits for it does not."""
        return digest_of({**asdict(self), "ready_seconds": None})

    @property
    def base_url(self) -> str:
        """Where the host itself reaches the engine, without `/v1`."""
        address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.bind, self.bind)
        if ":" in address and not address.startswith("["):
            address = f"[{address}]"
        return f"http://{address}:{self.port}"

    @property
    def command(self) -> tuple[str, ...]:
        """What the supervisor runs: the wrapper, then the engine's argv."""
        return ("/bin/sh", self.wrapper, *self.argv)


def engine_caches(layout: Layout, key: str) -> dict[str, str]:
    """Cache variables of the engine: kept between starts, apart for each `key` (engine, driver, GPU).

    The flags are part of the key that each compiler makes itself. Its own folder and temporary folder, so
    that what root keeps beside them (wheels, conda packages) is not the service user's to write.
    """
    shared, own = f"{layout.root}/cache/", f"{layout.root}/{JIT}/{key}/"
    paths = {name: own + path.removeprefix(shared) for name, path in layout.caches().items()}
    return {**paths, "TMPDIR": f"{layout.tmp}/engine"}


def engine_env(layout: Layout, extra: dict[str, str], key: str) -> tuple[tuple[str, str], ...]:
    """Environment of the engine: own HOME and caches, CUDA's tools on PATH.

    Kernels are compiled while serving, so nvcc, ninja and a compiler must be found then too
    (flashinfer issue 1781, vllm issue 49497).
    """
    env = {
        "HOME": f"{layout.root}/cache/home",
        "PATH": f"{layout.env}/bin:{CUDA_HOME}/bin:{SYSTEM_PATH}",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **engine_caches(layout, key),
        **extra,
    }
    return tuple(sorted(env.items()))


def launch_spec(
    recipe: Recipe,
    settings: Settings,
    layout: Layout,
    mode: str,
    *,
    user: str | None,
    trial_port: int | None = None,
    nccl: tuple[dict[str, str], dict[str, bool]] = ({}, {}),
    cache_key: str = "any",
) -> LaunchSpec:
    """The engine of `recipe` in one mode on one host, for routes that install into `<root>/env`.

    `cache_key` names the folder of compiled kernels: they fit one engine, driver and GPU.
    `nccl` is the environment and the flags that this host's links need beside the recipe's.
    With `trial_port` it is the same engine on trial: on a loopback port that no client knows, under a name
    of its own, and without restarts.
    """
    on_trial = trial_port is not None
    name = f"{settings.instance}-{TRIAL if on_trial else mode}"
    bind = "127.0.0.1" if on_trial else settings.bind
    port = settings.port if trial_port is None else trial_port
    flags = {**recipe.flags(mode, settings.route or recipe.engine.default), **nccl[1]}
    route = settings.route or recipe.engine.default
    model_dir = f"{layout.model_root}/{recipe.model.name}"
    # CUDA_VISIBLE_DEVICES then means what nvidia-smi's indices mean (CUDA's own order is the fastest first)
    gpu_order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if recipe.hardware.count else {}
    argv = [
        f"{layout.env}/bin/vllm",
        "serve",
        model_dir,
        "--served-model-name",
        recipe.model.name,
        "--host",
        bind,
        "--port",
        str(port),
        *flag_argv(flags),
    ]
    return LaunchSpec(
        name=name,
        mode=mode,
        argv=tuple(argv),
        env=engine_env(layout, {**gpu_order, **recipe.env(mode, route), **nccl[0]}, cache_key),
        unset=tuple(recipe.serve.unset),
        cwd=layout.run,
        bind=bind,
        port=port,
        model_name=recipe.model.name,
        user=user,
        log=f"{layout.logs}/{name}.log",
        key_file=layout.key_file if settings.api_key else None,
        wrapper=f"{layout.run}/start-engine.sh",
        ready_seconds=settings.ready_seconds
        or recipe.serve.modes[mode].ready_seconds
        or recipe.serve.ready_seconds,
        stop_seconds=recipe.serve.stop_seconds,
        # not the logs: supervisord writes them itself, and must not follow a link of the engine's making
        writable=(f"{layout.root}/{JIT}/{cache_key}", f"{layout.root}/cache/home", f"{layout.tmp}/engine"),
        readable=(layout.env, model_dir),
        restart=not on_trial,
        gpu_free=float(str(flags.get("gpu-memory-utilization", USUAL_SHARE)))
        if recipe.hardware.count
        else None,
    )
