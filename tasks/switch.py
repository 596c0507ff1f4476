"""Start and stop as steps: they leave no receipt, the supervisor's state is the truth."""

from __future__ import annotations

from tasks.plan import Plan
from tasks.service import look_ready, stop_service, wait_ready
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
        settled = ("absent", "inactive", "failed", "STOPPED", "EXITED", "FATAL")
        if all(state.state in settled for state in self.plan.services.values()):
            return "nothing runs"
        return None

    def act(self) -> Done:
        """Stop every mode."""
        stop_service(self.plan)
        return Done(receipt=False)


class Start:
    """The mode that was installed last runs and answers."""

    name = "start"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"start: {self.plan.settings.instance}"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def _mode(self) -> str:
        receipt = self.plan.receipt("service")
        if receipt is None:
            raise StepFailed("no service is installed here\nFix: rackwright site INVENTORY")
        return str(receipt.detail["mode"])

    def unchanged(self) -> str | None:
        """It runs, and a token comes out."""
        if not self.plan.receipt("service"):
            return None
        spec = self.plan.spec(self._mode())
        if self.plan.services[spec.name].running and look_ready(self.plan, spec)["ready"]:
            return f"{spec.name} runs and answers"
        return None

    def act(self) -> Done:
        """Start it as installed and wait for a token."""
        spec = self.plan.spec(self._mode())
        done = self.plan.remote.run(self.plan.supervisor.start(spec.name), timeout=spec.stop_seconds + 180)
        if not done.ok:
            raise StepFailed(f"{spec.name} cannot be started: {done.stderr.strip() or done.stdout.strip()}")
        return Done(detail={"ready_seconds": wait_ready(self.plan, spec)}, receipt=False)
