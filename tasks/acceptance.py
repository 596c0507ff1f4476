"""The acceptance step: the engine that runs is asked, and what it says is the proof."""

from __future__ import annotations

import json
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.launch import LaunchSpec
from tasks.paths import ONHOST
from tasks.plan import Plan
from tasks.proven import counts, keep_proof
from tasks.recipe import Flag
from tasks.service import refuse_unless_serving
from tasks.steps import Done, StepFailed, job, onhost, python_of

# Seconds for a whole run; the program's own budget ends it before.
DEADLINES = {"smoke": 600, "standard": 3600, "deep": 9000}


class Acceptance:
    """`onhost/accept.py` against the running engine, over loopback."""

    name = "acceptance"

    def __init__(self, plan: Plan, *, again: bool = False) -> None:
        self.plan = plan
        self._again = again

    @property
    def profile(self) -> str:
        """The site's profile, else the recipe's."""
        return self.plan.settings.profile or self.plan.recipe.acceptance.profile

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"acceptance: profile {self.profile}"

    def digest(self) -> str:
        """The programs, the profile, the engine's flags, and this very start of it on this very boot."""
        return digest_of(self.inputs(self.plan.spec(), self.plan.service.identity))

    def inputs(self, spec: LaunchSpec, identity: str | None) -> list[Any]:
        """What `digest` is made of, for any mode; `identity` tells one start from another."""
        plan = self.plan
        return [
            digest_of_file(ONHOST / "accept.py"),
            digest_of_file(ONHOST / "ready.py"),
            self.profile,
            plan.recipe.acceptance.model_dump(),
            spec.digest,
            identity,
            plan.facts.system.boot_id,
        ]

    def unchanged(self) -> str | None:
        """This start of the engine has been accepted before."""
        receipt = self.plan.receipt(self.name)
        if self._again or not receipt or receipt.digest != self.digest() or not self.plan.service.running:
            return None
        self.plan.record.note(acceptance=receipt.detail.get("result"))
        return f"this start of the engine was accepted {receipt.at}"

    def act(self) -> Done:
        """Run every check of the profile; one that fails fails the host."""
        plan = self.plan
        plan.look()  # the service step may just have started it: which process is it?
        spec = refuse_unless_serving(plan, ask=False)
        request = acceptance_request(plan, spec, plan.service.pid)
        # a promotion counts compilations itself, before and after its warm-up
        request["expect"]["log_script"] = plan.supervisor.logs(spec.name, spec.log, 4000, False)
        outcome = job(
            plan,
            "acceptance",
            self.digest(),
            (python_of(plan), onhost(plan, "accept.py"), "--stdin"),
            verdict=True,
            anew=True,  # an engine that failed may pass after it was mended
            stdin=json.dumps(request),
            deadline=DEADLINES[self.profile],
        )
        result = outcome.result
        plan.record.note(acceptance=result)
        failed = [check for check in result.get("checks", []) if check.get("verdict") == "fail"]
        if result.get("verdict") != "pass":
            lines = [f"{check['id']}: {check.get('reason') or check.get('summary')}" for check in failed]
            raise StepFailed(
                f"{len(failed)} of {len(result.get('checks', []))} checks say no\n"
                "Fix: read the evidence in the report; `rackwright logs` shows the engine's side",
                lines,
            )
        keep_proof(plan, spec.mode, {"acceptance": counts(result), "profile": self.profile})
        return Done(detail={"result": result, "profile": self.profile})


def acceptance_request(plan: Plan, spec: LaunchSpec, pid: int | None) -> dict[str, Any]:
    """What `onhost/accept.py` is asked about one engine; `pid` is its process where it is known."""
    recipe = plan.recipe
    flags = recipe.flags(spec.mode, plan.route)
    # a green answer of a leftover on the same port would prove nothing; a container's processes are not of
    # the supervisor's making, so there `ready.py` asks Docker whose they are
    known = pid is not None and plan.route != "docker"
    identity = {"root": plan.model_dir, **({"pid": pid} if known else {})}
    length = flags.get("max-model-len")
    return {
        "base_url": spec.base_url,
        "model": spec.model_name,
        "api_key_file": spec.key_file,
        "profile": plan.settings.profile or recipe.acceptance.profile,
        "knowledge": recipe.acceptance.knowledge,
        "skip": recipe.acceptance.skip,
        "expect": {
            # "auto" and "128k" are the engine's to count out
            "max_model_len": length if isinstance(length, int) and length > 0 else None,
            "speculative": "speculative-config" in flags,
            "key_required": spec.key_file is not None,
            "identity": identity,
            **prefix_caching(flags),
        },
    }


def prefix_caching(flags: dict[str, Flag]) -> dict[str, bool]:
    """Whether the engine's flags turn prefix caching on or off; nothing where they leave it to the engine."""
    told = [name for name in flags if name.removeprefix("no-") == "enable-prefix-caching"]
    return {"prefix_caching": told[-1] == "enable-prefix-caching"} if told else {}  # the last one counts
