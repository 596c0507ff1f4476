"""Engine routes: how an engine gets onto a host. One module a route."""

from __future__ import annotations

from tasks.engines.wheel import WheelEngine
from tasks.plan import Plan
from tasks.recipe import WheelRoute
from tasks.steps import Step


def engine_step(plan: Plan) -> Step:
    """The step that installs the engine by the plan's route."""
    pins = plan.recipe.route(plan.route)
    assert isinstance(pins, WheelRoute)
    return WheelEngine(plan, pins)
