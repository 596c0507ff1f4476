"""Start, stop and restart as steps: they leave no receipt, the supervisor's state is the truth."""

from __future__ import annotations

from tasks.plan import Plan
from tasks.proven import proven_mode
from tasks.service import (
    look_ready,
    port_is_ours,
    refuse_other_settings,
    refuse_while_promoting,
    startup_note,
    stop_service,
)
from tasks.startup import bring_up, done_of
from tasks.steps import Done, StepFailed


class Stopped:
    """No mode's service runs."""

    name = "stop"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"stop: {self.plan.settings.instance}"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def unchanged(self) -> str | None:
        """Nothing of ours is up, nor trying to come up."""
        if all(state.settled for state in self.plan.services.values()):
            return "nothing runs"
        return None

    def act(self) -> Done:
        """Stop every mode."""
        refuse_while_promoting(self.plan)
        stop_service(self.plan)
        return Done(receipt=False)


class Start:
    """The mode that was proven last runs and answers; with `again`, it is stopped first."""

    def __init__(self, plan: Plan, *, again: bool = False) -> None:
        self.plan = plan
        self.name = "restart" if again else "start"
        self._again = again

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"{self.name}: {self.plan.settings.instance}"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def mode(self) -> str:
        """A restart keeps the mode that runs; else the one proven last, else the one installed last."""
        plan = self.plan
        receipt = plan.receipt("service")
        if receipt is None:
            raise StepFailed("no service is installed here\nFix: rackwright site INVENTORY")
        runs = [mode for mode in plan.recipe.serve.modes if plan.services[plan.spec(mode).name].running]
        return (runs[0] if self._again and runs else None) or proven_mode(plan) or str(receipt.detail["mode"])

    def unchanged(self) -> str | None:
        """It runs, and a token comes out. A restart always has something to do."""
        if self._again or not self.plan.receipt("service"):
            return None
        spec = self.plan.spec(self.mode())
        if self.plan.services[spec.name].running and look_ready(self.plan, spec)["ready"]:
            return f"{spec.name} runs and answers"
        return None

    def act(self) -> Done:
        """Start it as installed, wait for a token, warm it up."""
        plan = self.plan
        refuse_while_promoting(plan)
        spec = plan.spec(self.mode())
        if not plan.services[spec.name].installed and plan.supervisor.name != "supervisord":
            raise StepFailed(f"{spec.name} is not installed here\nFix: rackwright site INVENTORY")
        refuse_other_settings(plan, spec)
        port_is_ours(plan, spec)
        stop = [plan.supervisor.stop(spec.name)] if self._again else []
        result = bring_up(plan, spec, [*stop, plan.supervisor.start(spec.name)])
        plan.record.note(startup=startup_note({"start": done_of(result)}))
        return Done(detail={"ready_seconds": result["seconds"], "start": done_of(result)}, receipt=False)
