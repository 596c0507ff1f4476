"""Python environments on the host: the engine's (conda or venv) and the tools'."""

from __future__ import annotations

import json

from tasks.digest import digest_of, digest_of_file
from tasks.paths import TOOLS_LOCK
from tasks.plan import Plan
from tasks.receipts import Artifact
from tasks.recipe import DockerRoute
from tasks.steps import Done, job, onhost


def wanted_python(plan: Plan) -> str:
    """The Python that the engine route pins."""
    pins = plan.recipe.route(plan.route)
    return "3.10+" if isinstance(pins, DockerRoute) else pins.python


class Environment:
    """`<root>/env`: a conda env where the host has a conda, else a venv of the same prefix."""

    name = "environment"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"environment: Python {wanted_python(self.plan)} in {self.plan.layout.env}"

    def digest(self) -> str:
        """Version, kind and interpreter that the site asks for."""
        settings = self.plan.settings
        return digest_of([wanted_python(self.plan), settings.env_kind, settings.python, self.plan.layout.env])

    def unchanged(self) -> str | None:
        """The receipt matches and the environment's Python is there."""
        receipt = self.plan.receipt(self.name)
        if receipt and receipt.digest == self.digest() and self.plan.state.has("env"):
            return f"{receipt.detail.get('kind')} with Python {receipt.detail.get('python')} is there"
        return None

    def act(self) -> Done:
        """Make it; a conda needs the network and minutes, so it is a job."""
        plan, settings = self.plan, self.plan.settings
        receipt = plan.receipt(self.name)
        if receipt and receipt.digest != self.digest():
            plan.remote.run(f"rm -f '{plan.layout.env}/.rackwright-env'")  # other inputs: made anew
        outcome = job(
            plan,
            "environment",
            self.digest(),
            (
                "sh",
                onhost(plan, "make_env.sh"),
                plan.layout.env,
                wanted_python(plan),
                settings.env_kind,
                settings.python or "",
            ),
            env=(
                ("CONDA_PKGS_DIRS", f"{plan.layout.root}/cache/conda-pkgs"),
                ("TMPDIR", plan.layout.tmp),
            ),
            deadline=1800,
        )
        plan.say(f"environment: {outcome.result.get('kind')}, Python {outcome.result.get('python')}")
        return Done(detail=outcome.result)


class Tools:
    """`<root>/tools`: downloaders and supervisor from a lock with hashes, never mixed with the engine."""

    name = "tools"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"tools: downloaders and supervisor in {self.plan.layout.tools}"

    def digest(self) -> str:
        """The lock."""
        return digest_of([digest_of_file(TOOLS_LOCK), self.plan.layout.tools])

    def unchanged(self) -> str | None:
        """Not needed here, or there already."""
        plan = self.plan
        if plan.supervisor.name != "supervisord" and set(plan.settings.sources) <= {"generate", "path"}:
            return "not needed: systemd keeps the engine, and no download tool is used"
        receipt = plan.receipt(self.name)
        if (
            receipt
            and receipt.digest == self.digest()
            and plan.state.has("tools")
            and not plan.state.has("broken-tools")
        ):
            return "the tools are there, as their lock says"
        return None

    def act(self) -> Done:
        """Make the venv, then install from the lock."""
        plan = self.plan
        made = job(
            plan,
            "tools-env",
            self.digest(),
            ("sh", onhost(plan, "make_env.sh"), plan.layout.tools, "3.10+", "venv", ""),
            deadline=600,
        )
        done = install_locked(plan, "tools", self.digest(), plan.layout.tools, "tools.lock", {})
        return Done(detail={**made.result, "packages": done.detail.get("packages")}, artifacts=done.artifacts)


def install_locked(plan: Plan, name: str, key: str, env: str, lock: str, more: dict[str, object]) -> Done:
    """Install a lock with hashes into an environment, as a detached job with progress."""
    settings = plan.settings
    request = {
        "python": f"{env}/bin/python",
        "lock": onhost(plan, lock),
        "wheels": plan.layout.wheels,
        "index_url": settings.index_url,
        "extra_index_urls": settings.extra_index_urls or [],
        "find_links": settings.find_links,
        "offline": False,
        "tmp": plan.layout.tmp,
        "pip_cache": f"{plan.layout.root}/cache/pip",
        **more,
    }
    outcome = job(
        plan,
        name,
        key,
        (f"{env}/bin/python", onhost(plan, "install_wheels.py")),
        stdin=json.dumps(request),
        env=(("TMPDIR", plan.layout.tmp),),
        deadline=4 * 3600,
    )
    artifacts = tuple(
        Artifact(str(item["file"]), str(item["sha256"]), int(item["bytes"]))
        for item in outcome.result.get("artifacts", [])
    )
    return Done(
        detail={"packages": len(artifacts), "seconds": outcome.result.get("seconds")}, artifacts=artifacts
    )
