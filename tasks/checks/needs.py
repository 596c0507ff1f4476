"""What a deployment needs of its host, in one flat record: the checks' side of recipe and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.facts import Unless

Route = Literal["wheel", "source", "docker"]
DiskKind = Literal["env", "model", "cache", "scratch", "other"]

GIB = 1024**3


@dataclass(frozen=True)
class DiskNeed:
    """Room that one path of the layout needs, still to come: what is there already is not counted.

    `kind` decides what a slow or network file system costs there.
    """

    path: str
    bytes: int
    inodes: int = 0
    purpose: str = ""
    kind: DiskKind = "other"


@dataclass(frozen=True)
class EndpointNeed:
    """A server that the chosen routes use.

    `alternative` is the other way that is open where it cannot be reached (then that is no failure), `fix`
    what opens one. `unless`: when it is not asked.
    """

    name: str
    url: str
    purpose: str
    alternative: str | None = None
    fix: str | None = None
    unless: tuple[Unless, ...] = ()


@dataclass(frozen=True)
class GpuNeed:
    """The GPUs that the recipe is for. `names` are substrings of the product name, any of them fits.

    `memory_mib` is the least memory of one GPU; `count` how many the recipe uses.
    """

    names: tuple[str, ...] = ()
    count: int = 1
    compute_capability: str | None = None
    memory_mib: int | None = None


@dataclass(frozen=True)
class Needs:
    """Everything that checks compare a host with. A field left empty is not asked of the host.

    Versions are dotted strings (floors, unless said otherwise); sizes are bytes. `own_pids` are processes
    of this deployment that already run: they may hold its ports and its GPUs. `own_ports` are the ports that
    its running services are really installed for, each with the user (number) of its engine where that is
    known. `low_ports`: the engine may listen where only root may. `flags` are the engine's
    flags and `env` its environment in the chosen mode, for combinations that cannot work. `python` is the
    version of the engine's environment, `python_path` the interpreter that the site names for it.
    `compiles_later`: another mode of the recipe compiles, though the present one does not. `other_modes` are
    the same needs in each of the recipe's other modes, `promoting` the one of them that is to be promoted.
    """

    root: str
    route: Route = "wheel"
    gpu: GpuNeed | None = None
    driver: str | None = None
    cuda_major: int | None = None
    cuda_toolkit: str | None = None
    python: str | None = None
    python_path: str | None = None
    env_kind: Literal["auto", "conda", "venv"] = "auto"
    machine: tuple[str, ...] = ("x86_64", "amd64")
    kernel: str | None = "4.18"
    glibc: str | None = None
    cpu_flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    compiles_later: bool = False
    ram_bytes: int = 0
    build_jobs: int | None = None
    build_bytes_per_job: int = 6 * GIB
    shm_bytes: int = 0
    disk: tuple[DiskNeed, ...] = ()
    ports: tuple[int, ...] = ()
    endpoints: tuple[EndpointNeed, ...] = ()
    offline: bool = False
    supervisor: Literal["auto", "systemd", "systemd-user", "supervisord"] = "auto"
    needs_root: bool = False
    nofile: int = 65535
    rdma: bool = False
    own_pids: tuple[int, ...] = ()
    own_ports: tuple[tuple[int, int | None], ...] = ()
    low_ports: bool = False
    engine_version: str | None = None
    flashinfer: str | None = None
    model_speculative: tuple[str, ...] = ()
    speculative_method: str | None = None
    speculative_tokens: int | None = None
    attention_heads: int | None = None
    tensor_parallel: int | None = None
    disaggregated: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    other_modes: dict[str, Needs] = field(default_factory=dict)
    promoting: str | None = None
    known_issues: tuple[str, ...] = ()

    @property
    def want_gpu(self) -> bool:
        """The recipe uses GPUs at all."""
        return self.gpu is not None and self.gpu.count > 0
