"""What this recipe on this site asks of a host: the flat record that the checks compare."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from tasks.checks import DiskNeed, GpuNeed, Needs
from tasks.checks.pairing import flag_count, flag_value
from tasks.endpoints import brings, endpoints_of
from tasks.installed import installed_of
from tasks.model.sources import need_clients
from tasks.onhost.wheel_lock import parse_lock
from tasks.recipe import DockerRoute, Recipe, SourceRoute, WheelRoute

if TYPE_CHECKING:
    from tasks.plan import Plan

GIB = 1024**3
TOOLS_BYTES = 300_000_000
# Counted in the CPU engine's env: 41,000 files with bytecode in 2.0 GB, 49 kB each.
BYTES_PER_FILE = 45_000


# What the oldest names of manylinux stand for (PEP 513, 571 and 599); newer ones say it (PEP 600).
_MANYLINUX = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
# A release in an image's tag: `vllm/vllm-openai:v0.26.0-cu129`.
_RELEASE = re.compile(r":v?(\d+\.\d+(?:\.\d+)?)(?:-|$)")


def needs_of(plan: Plan) -> Needs:
    """Needs of one host as it stands: what is done already needs no room and no endpoint."""
    endpoints = endpoints_of(plan)
    asked = [plan.facts.net.endpoints.get(need.url) for need in endpoints]
    recipe, settings, layout = plan.recipe, plan.settings, plan.layout
    hardware, pins = recipe.hardware, recipe.route(plan.route)
    needs = Needs(
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
        python_path=settings.python,
        env_kind=settings.env_kind,
        glibc=_glibc(recipe, pins),
        cpu_flags=tuple(hardware.cpu_flags),
        libraries=tuple(hardware.libraries),
        compiles_later=not all(
            recipe.flags(mode, plan.route).get("enforce-eager") for mode in recipe.serve.modes
        ),
        ram_bytes=0
        if any(state.running for state in plan.services.values())
        else int(hardware.ram_gib * GIB),
        shm_bytes=int(hardware.shm_gib * GIB),
        disk=_disk(plan),
        ports=(settings.port,),
        build_jobs=settings.max_jobs if isinstance(pins, SourceRoute) else None,
        build_bytes_per_job=pins.bytes_per_job if isinstance(pins, SourceRoute) else 6 * GIB,
        endpoints=endpoints,
        offline=all(facts is None or facts.spared for facts in asked),
        supervisor=settings.supervisor,
        needs_root=settings.supervisor == "systemd" or settings.service_user is not None,
        nofile=hardware.nofile,
        own_pids=tuple(state.pid for state in plan.services.values() if state.pid)
        + (plan.facts.docker.own_pids if plan.facts.docker else ()),
        own_ports=_own_ports(plan),
        low_ports=isinstance(pins, DockerRoute)
        # systemd takes the right away from root too (CapabilityBoundingSet=)
        or (plan.supervisor.name == "supervisord" and plan.facts.system.uid == 0 and plan.user is None),
        engine_version=_engine_version(pins),
        flashinfer=_flashinfer(recipe, pins),
        model_speculative=tuple(recipe.model.speculative),
        attention_heads=recipe.model.attention_heads,
        promoting=recipe.faster(settings.mode) if plan.verb == "promote" else None,
        known_issues=tuple(f"{issue.summary} ({issue.reference})" for issue in recipe.known_issues),
    )
    modes = {mode: _serving(needs, recipe, mode, plan.route) for mode in recipe.serve.modes}
    return replace(modes.pop(plan.mode), other_modes=modes)


def _serving(needs: Needs, recipe: Recipe, mode: str, route: str) -> Needs:
    """The needs with what one mode says: flags, environment, and what follows from them."""
    flags = recipe.flags(mode, route)
    method = flag_value(flags, "speculative-config.method")
    return replace(
        needs,
        speculative_method=str(method) if method else None,
        speculative_tokens=flag_count(flags, "speculative-config.num_speculative_tokens"),
        tensor_parallel=flag_count(flags, "tensor-parallel-size"),
        disaggregated=flag_value(flags, "kv-transfer-config.kv_role") in ("kv_producer", "kv_consumer"),
        flags=dict(flags),
        env=recipe.env(mode, route),
    )


def _own_ports(plan: Plan) -> tuple[tuple[int, int | None], ...]:
    """Ports that services which run, or are being started again, are installed for; and as which user."""
    up = (installed_of(plan, name) for name, state in plan.services.items() if not state.settled)
    return tuple((now.port, now.uid) for now in up if now and now.port)


def _disk(plan: Plan) -> tuple[DiskNeed, ...]:
    recipe, layout = plan.recipe, plan.layout
    pins = recipe.route(plan.route)
    needs = []
    if brings(plan, "engine") and not plan.receipt("engine"):
        if isinstance(pins, DockerRoute):
            needs.append(DiskNeed("/var/lib/docker", pins.image_bytes, 0, "engine image", "other"))
        else:
            room = pins.env_bytes + (pins.wheel_bytes if isinstance(pins, WheelRoute) else 0)
            needs.append(DiskNeed(layout.root, room, room // BYTES_PER_FILE, "engine and its wheels", "env"))
    tools = plan.supervisor.name == "supervisord" or need_clients(recipe, plan.settings)
    if brings(plan, "tools") and tools and not plan.receipt("tools"):
        needs.append(DiskNeed(layout.root, TOOLS_BYTES, 6000, "tools", "env"))
    missing = recipe.model.bytes - plan.state.model_bytes
    if not brings(plan, "weights"):
        return tuple(needs)
    if not plan.receipt("weights") or missing > recipe.model.bytes / 100:  # as exact as the recipe's count
        linked = plan.settings.sources[0] == "path" and plan.settings.model_path_how != "copy"
        room = 0 if linked else max(missing, 0)
        what = "missing weights" if plan.state.model_bytes else "weights"
        needs.append(DiskNeed(layout.model_root, room, recipe.model.shards + 50, what, "model"))
    return tuple(needs)


def _engine_version(pins: WheelRoute | SourceRoute | DockerRoute) -> str | None:
    """The engine's release, where the route pins one: a date or a nightly tag says nothing about releases."""
    if isinstance(pins, DockerRoute):
        found = _RELEASE.search(pins.image)
        return found.group(1) if found else None
    return pins.version if "." in pins.version else None


def _glibc(recipe: Recipe, pins: WheelRoute | SourceRoute | DockerRoute) -> str | None:
    """The oldest glibc on which every wheel of the lock, and every pinned one, can be installed."""
    if isinstance(pins, DockerRoute):
        return None
    files = [wheel.file for wheel in pins.wheels]
    if pins.lock:
        files += [pin.file for pin in parse_lock(recipe.beside(pins.lock).read_text("utf-8"))]
    floors = [floor for file in files if (floor := glibc_of(file))]
    return ".".join(str(part) for part in max(floors)) if floors else None


def glibc_of(file: str) -> tuple[int, int] | None:
    """The oldest glibc that a wheel's file name allows: the lowest of its tags; None where it names none."""
    floors = []
    for tag in file.removesuffix(".whl").split("-")[-1].split("."):
        named = re.match(r"manylinux_(\d+)_(\d+)_", tag)
        if named:
            floors.append((int(named[1]), int(named[2])))
        elif tag.split("_")[0] in _MANYLINUX:
            floors.append(_MANYLINUX[tag.split("_")[0]])
        elif tag == "any" or tag.startswith("linux_"):
            return None
    return min(floors, default=None)


def _flashinfer(recipe: Recipe, pins: WheelRoute | SourceRoute | DockerRoute) -> str | None:
    """FlashInfer's version, from the pinned wheels or the lock."""
    if isinstance(pins, SourceRoute):
        wheels = [(wheel.package, wheel.version) for wheel in pins.wheels]
    elif isinstance(pins, WheelRoute):
        lock = parse_lock(recipe.beside(pins.lock).read_text("utf-8"))
        wheels = [(pin.name, pin.version) for pin in lock]
    else:
        wheels = []
    return dict(wheels).get("flashinfer-python")
