"""What this recipe on this site asks of a host: the flat record that the checks compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.checks import DiskNeed, EndpointNeed, GpuNeed, Needs
from tasks.recipe import DockerRoute, SourceRoute, WheelRoute

if TYPE_CHECKING:
    from tasks.plan import Plan

GIB = 1024**3
TOOLS_BYTES = 300_000_000
# Counted in the CPU engine's env: 41,000 files with bytecode in 2.0 GB, 49 kB each.
BYTES_PER_FILE = 45_000


def needs_of(plan: Plan) -> Needs:
    """Needs of one host as it stands: what is done already needs no room and no endpoint."""
    recipe, settings, layout = plan.recipe, plan.settings, plan.layout
    hardware, pins = recipe.hardware, recipe.route(plan.route)
    flags = recipe.flags(plan.mode, plan.route)
    speculative = flags.get("speculative-config")
    method = speculative.get("method") if isinstance(speculative, dict) else None
    tokens = speculative.get("num_speculative_tokens") if isinstance(speculative, dict) else None
    parallel = flags.get("tensor-parallel-size")
    return Needs(
        root=layout.root,
        route=settings.route or recipe.engine.default,
        gpu=GpuNeed(
            names=(hardware.gpu,) if hardware.gpu else (),
            count=hardware.count,
            compute_capability=hardware.compute_capability,
            memory_mib=int(hardware.memory_gib * 1024) if hardware.memory_gib else None,
        )
        if hardware.count
        else None,
        driver=hardware.driver,
        cuda_major=pins.cuda_major,
        cuda_toolkit=hardware.cuda_toolkit,
        python=None if isinstance(pins, DockerRoute) or plan.state.has("env") else pins.python,
        env_kind=settings.env_kind,
        glibc="2.28" if isinstance(pins, WheelRoute) else None,  # manylinux_2_28 wheels
        cpu_flags=tuple(hardware.cpu_flags),
        ram_bytes=0
        if any(state.running for state in plan.services.values())
        else int(hardware.ram_gib * GIB),
        shm_bytes=int(hardware.shm_gib * GIB),
        disk=_disk(plan),
        ports=(settings.port,),
        endpoints=endpoints_of(plan),
        supervisor=settings.supervisor,
        own_pids=tuple(state.pid for state in plan.services.values() if state.pid),
        engine_version=pins.version if isinstance(pins, WheelRoute) else None,
        flashinfer=_flashinfer(pins),
        model_speculative=tuple(recipe.model.speculative),
        speculative_method=str(method) if method else None,
        speculative_tokens=int(tokens) if isinstance(tokens, int) else None,
        attention_heads=recipe.model.attention_heads,
        tensor_parallel=int(parallel) if isinstance(parallel, int) else None,
        flags=dict(flags),
        env=recipe.env(plan.mode, plan.route),
    )


def endpoints_of(plan: Plan) -> tuple[EndpointNeed, ...]:
    """Servers that the steps of a run use. Known before the host is read."""
    return ()


def _disk(plan: Plan) -> tuple[DiskNeed, ...]:
    recipe, layout = plan.recipe, plan.layout
    pins = recipe.route(plan.route)
    needs = []
    if not plan.receipt("engine"):
        if isinstance(pins, DockerRoute):
            needs.append(DiskNeed("/var/lib/docker", pins.image_bytes, 0, "engine image", "other"))
        else:
            room = pins.env_bytes + (pins.wheel_bytes if isinstance(pins, WheelRoute) else 0)
            needs.append(DiskNeed(layout.root, room, room // BYTES_PER_FILE, "engine and its wheels", "env"))
    if plan.supervisor.name == "supervisord" and not plan.receipt("tools"):
        needs.append(DiskNeed(layout.root, TOOLS_BYTES, 6000, "tools", "env"))
    if not plan.receipt("weights"):
        needs.append(
            DiskNeed(layout.model_root, recipe.model.bytes, recipe.model.shards + 50, "weights", "model")
        )
    return tuple(needs)


def _flashinfer(pins: WheelRoute | SourceRoute | DockerRoute) -> str | None:
    wheels = pins.wheels if isinstance(pins, SourceRoute) else []
    return next((wheel.version for wheel in wheels if wheel.package == "flashinfer-python"), None)
