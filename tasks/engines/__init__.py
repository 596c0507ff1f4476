"""Engine routes: how an engine gets onto a host. One module a route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.recipe import DockerRoute, SourceRoute

if TYPE_CHECKING:
    from tasks.plan import Plan
    from tasks.steps import Step


def engine_step(plan: Plan, *, build: bool = False) -> Step:
    """The step that installs the engine by the plan's route; with `build` it is built on this host."""
    # the routes know the plan, and the plan knows how a container is launched
    from tasks.engines.docker import DockerEngine
    from tasks.engines.source import SourceEngine
    from tasks.engines.wheel import WheelEngine

    pins = plan.recipe.route(plan.route)
    if isinstance(pins, SourceRoute):
        return SourceEngine(plan, pins, build=build)
    if isinstance(pins, DockerRoute):
        return DockerEngine(plan, pins)
    return WheelEngine(plan, pins)
