"""LaunchSpec: the one description of an engine process that every supervisor renders."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tasks.digest import digest_of
from tasks.recipe import Recipe, flag_argv
from tasks.settings import Layout, Settings

CUDA_HOME = "/usr/local/cuda"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class LaunchSpec:
    """One engine process: what runs, as whom, where it listens, when it is ready.

    `argv` holds no secret: the key is read from `key_file` by the wrapper `with-key.sh`.
    Seconds are deadlines. Render it; never write a flag anywhere else.
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

    @property
    def digest(self) -> str:
        """What makes two starts of the engine the same."""
        return digest_of(asdict(self))

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


def engine_env(layout: Layout, extra: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Environment of the engine and of builds: own HOME and caches, CUDA's tools on PATH.

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
        **layout.caches(),
        **extra,
    }
    return tuple(sorted(env.items()))


def launch_spec(
    recipe: Recipe, settings: Settings, layout: Layout, mode: str, *, user: str | None
) -> LaunchSpec:
    """The engine of `recipe` in one mode on one host, for routes that install into `<root>/env`."""
    route = settings.route or recipe.engine.default
    model_dir = f"{layout.model_root}/{recipe.model.name}"
    argv = [
        f"{layout.env}/bin/vllm",
        "serve",
        model_dir,
        "--served-model-name",
        recipe.model.name,
        "--host",
        settings.bind,
        "--port",
        str(settings.port),
        *flag_argv(recipe.flags(mode, route)),
    ]
    caches = f"{layout.root}/cache"
    return LaunchSpec(
        name=f"{settings.instance}-{mode}",
        mode=mode,
        argv=tuple(argv),
        env=engine_env(layout, recipe.env(mode, route)),
        unset=tuple(recipe.serve.unset),
        cwd=layout.run,
        bind=settings.bind,
        port=settings.port,
        model_name=recipe.model.name,
        user=user,
        log=f"{layout.logs}/{settings.instance}-{mode}.log",
        key_file=layout.key_file if settings.api_key else None,
        wrapper=f"{layout.run}/with-key.sh",
        ready_seconds=settings.ready_seconds
        or recipe.serve.modes[mode].ready_seconds
        or recipe.serve.ready_seconds,
        stop_seconds=recipe.serve.stop_seconds,
        writable=(caches, layout.tmp, layout.logs),
        readable=(layout.env, model_dir),
    )
