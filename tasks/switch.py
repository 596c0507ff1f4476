"""Start, stop and restart as steps: they leave no receipt, the supervisor's state is the truth."""

from __future__ import annotations

from tasks.plan import Plan
from tasks.proven import proven_mode
from tasks.remote import quote
from tasks.service import (
    SERVE_ANEW,
    is_coming_up,
    look_ready,
    lost_names,
    port_is_ours,
    refuse_other_settings,
    refuse_while_promoting,
    startup_note,
    stop_service,
)
from tasks.startup import JOB, bring_up, done_of
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
        plan = self.plan
        settled = all(state.settled for state in plan.services.values())
        if settled and not is_coming_up(plan) and not lost_names(plan):
            return "nothing runs"
        return None

    def act(self) -> Done:
        """End a start that goes on, which would put back what served before; then stop every mode."""
        plan = self.plan
        refuse_while_promoting(plan)
        if is_coming_up(plan):
            job = quote(f"{plan.layout.jobs}/{JOB}")
            plan.remote.run(f"sh {quote(f'{plan.lib}/job.sh')} cancel {job} stop", timeout=60)
            plan.look()  # what it has started meanwhile
        stop_service(plan)
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
        """A restart keeps the mode that runs; else the one proven last, else the one installed last.

        Raises StepFailed where there is none.
        """
        plan = self.plan
        receipt = plan.receipt("service")
        if receipt is None:
            raise StepFailed("no service is installed here\nFix: rackwright site INVENTORY")
        runs = [mode for mode in plan.recipe.serve.modes if plan.services[plan.spec(mode).name].running]
        last = str(receipt.detail.get("mode"))
        mode = (runs[0] if self._again and runs else None) or proven_mode(plan) or last
        if mode not in plan.recipe.serve.modes:
            raise StepFailed(f"the recipe has no mode {mode} any more\nFix: {SERVE_ANEW}")
        return mode

    def unchanged(self) -> str | None:
        """It runs, and a token comes out. A restart always has something to do."""
        if self._again:
            return None
        try:
            spec = self.plan.spec(self.mode())
        except StepFailed:  # `act` says it
            return None
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
