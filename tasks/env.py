"""Python environments on the host: the engine's (conda or venv) and the tools'."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.endpoints import PYTORCH_INDEX
from tasks.mirrors import others, picked
from tasks.model.sources import need_clients
from tasks.offline import bundle_of
from tasks.paths import MINIFORGE, TOOLS_LOCK
from tasks.plan import Plan
from tasks.proxy import through_proxy
from tasks.receipts import Artifact
from tasks.recipe import DockerRoute, PinnedWheel
from tasks.steps import Done, job, onhost, python_of


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
        make: tuple[str, ...] = (
            "sh",
            onhost(plan, "make_env.sh"),
            plan.layout.env,
            wanted_python(plan),
            settings.env_kind,
            settings.python or "",
            f"{plan.layout.root}/conda",
        )
        if self._needs_miniforge():
            make = (*make, self._miniforge())
        outcome = job(
            plan,
            "environment",
            self.digest(),
            make,
            env=(
                ("CONDA_PKGS_DIRS", f"{plan.layout.root}/cache/conda-pkgs"),
                ("TMPDIR", plan.layout.tmp),
            ),
            deadline=1800,
        )
        plan.say(f"environment: {outcome.result.get('kind')}, Python {outcome.result.get('python')}")
        return Done(detail=outcome.result)

    def _needs_miniforge(self) -> bool:
        """Neither a conda nor the wanted Python is here, and the site does not insist on a venv."""
        plan, tools = self.plan, self.plan.facts.tools
        if plan.settings.env_kind == "venv" or plan.settings.python or tools.conda:
            return False
        if plan.settings.env_kind == "conda":
            return True
        wanted = wanted_python(plan)
        have = {".".join((python.version or "").split(".")[:2]) for python in tools.pythons if python.venv}
        return not wanted.endswith("+") and wanted not in have

    def _miniforge(self) -> str:
        """The pinned installer on the host, its hash checked; from the bundle, a mirror or its release."""
        plan = self.plan
        pins = tomllib.loads(MINIFORGE.read_text("utf-8"))
        bundle = bundle_of(plan)
        request = {
            "files": [{key: pins[key] for key in ("file", "sha256", "bytes", "urls")}],
            "dest": plan.layout.wheels,
            "near": [f"{bundle.root}/miniforge"] if bundle else plan.settings.find_links,
            "mirrors": url_mirrors(plan),
            "offline": bundle is not None,
        }
        argv = through_proxy(plan, ("python3", onhost(plan, "fetch_files.py"), "--stdin"))
        job(plan, "miniforge", digest_of(request), argv, stdin=json.dumps(request), again=True, deadline=3600)
        return f"{plan.layout.wheels}/{pins['file']}"


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
        if plan.supervisor.name != "supervisord" and not need_clients(plan.recipe, plan.settings):
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


def url_mirrors(plan: Plan) -> list[list[str]]:
    """Address prefixes and what to try instead of them: the site's, then what was measured."""
    found = {**picked(plan, "url_mirrors", {}), **plan.settings.url_mirrors}
    return [[old, new] for old, new in found.items()]


def index_settings(plan: Plan) -> dict[str, Any]:
    """Where packages come from: the bundle alone, or the site's index, or the one that was measured."""
    settings, bundle = plan.settings, bundle_of(plan)
    if bundle:
        return {
            "index_url": None,
            "extra_index_urls": [],
            "find_links": [bundle.wheels],
            "offline": True,
        }
    return {
        "index_url": settings.index_url or picked(plan, "index_url", None),
        "extra_index_urls": settings.extra_index_urls or [],
        "find_links": settings.find_links,
        "offline": False,
    }


def pinned_wheels(plan: Plan, wheels: list[PinnedWheel]) -> None:
    """Wheels that a recipe names by hash, in `<root>/wheels` before anything is installed."""
    if not wheels:
        return
    index = index_settings(plan)
    request = {
        "files": [wheel.model_dump(include={"file", "sha256", "bytes", "urls"}) for wheel in wheels],
        "dest": plan.layout.wheels,
        "near": [place for place in index["find_links"] if place.startswith("/")],
        "mirrors": url_mirrors(plan),
        "offline": index["offline"],
    }
    argv = through_proxy(plan, (python_of(plan), onhost(plan, "fetch_files.py"), "--stdin"))
    key = digest_of(request)
    job(plan, "engine-files", key, argv, stdin=json.dumps(request), again=True, deadline=6 * 3600)


def torch_indexes(plan: Plan, backend: str | None) -> list[str]:
    """`torch_index`, then the others that were measured, for packages that have their hash already."""
    first = torch_index(plan, backend)
    if first is None or backend is None or plan.settings.torch_index_url:
        return [first] if first else []
    return [first, *(base + backend for base in others(plan, "torch_index_base"))]


def torch_index(plan: Plan, backend: str | None) -> str | None:
    """The index of PyTorch's packages for a CUDA release (`cu130`): the site's, a measured one, its own."""
    if plan.settings.torch_index_url:
        return plan.settings.torch_index_url
    if backend is None:
        return None
    base = picked(plan, "torch_index_base", PYTORCH_INDEX)
    return str(base) + backend


def install_locked(
    plan: Plan, name: str, key: str, env: str, lock: str, more: dict[str, Any], *, again: bool = False
) -> Done:
    """Install a lock with hashes into an environment, as a detached job with progress.

    `lock` is a file of the shipped programs' folder, or an absolute path. With a bundle nothing else is
    asked. Where servers were measured, the others are asked for what the chosen ones do not have. With
    `again` the installed packages are looked at once more although the job was done.
    """
    index = index_settings(plan)
    request = {
        "python": f"{env}/bin/python",
        "lock": lock if lock.startswith("/") else onhost(plan, lock),
        "wheels": plan.layout.wheels,
        **index,
        "tmp": plan.layout.tmp,
        "pip_cache": None,  # the wheelhouse is the cache
        **more,
    }
    if index["offline"]:
        request["extra_index_urls"] = []
    elif not plan.settings.index_url:
        request["extra_index_urls"] = [*request["extra_index_urls"], *others(plan, "index_url")]
    outcome = job(
        plan,
        name,
        key,
        (f"{env}/bin/python", onhost(plan, "install_wheels.py")),
        stdin=json.dumps(request),
        env=(("TMPDIR", plan.layout.tmp),),
        deadline=4 * 3600,
        again=again,
    )
    artifacts = tuple(
        Artifact(str(item["file"]), str(item["sha256"]), int(item["bytes"]))
        for item in outcome.result.get("artifacts", [])
    )
    return Done(
        detail={"packages": len(artifacts), "seconds": outcome.result.get("seconds")}, artifacts=artifacts
    )
