"""Which Python an environment is made with: Miniforge comes where nothing on the host fits, by its hash."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import env
from tasks.facts import HostFacts
from tasks.facts.tools import CondaFacts, PythonFacts, ToolFacts
from tasks.jobs import Outcome
from tasks.paths import MINIFORGE
from tasks.plan import Plan
from tasks.recipe import load_recipe
from tasks.settings import settings_from

OLD = PythonFacts("/usr/bin/python3", "3.10.12", venv=True)
FITS = PythonFacts("/usr/bin/python3.12", "3.12.3", venv=True)
CONDA = CondaFacts("/root/miniconda3/bin/conda")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The jobs that a step starts: argv and request by name."""
    seen: dict[str, Any] = {}

    def job(plan: Plan, name: str, key: str, argv: tuple[str, ...], **more: Any) -> Outcome:
        seen[name] = (argv, json.loads(more["stdin"]) if "stdin" in more else None)
        return Outcome(True, 1, {"kind": "venv", "python": "3.12.9"}, "")

    monkeypatch.setattr(env, "job", job)
    return seen


def made(tools: ToolFacts, **settings: Any) -> Plan:
    site = settings_from({"recipe": "deepseek-v4-flash-sm120", **settings}, lambda key: key)
    host = SimpleNamespace(name="gpu1", data={}, connector=None, log=lambda *words: None)
    plan = Plan(host, site, load_recipe(site.recipe), "environment")
    plan.facts = replace(HostFacts(), tools=tools)
    env.Environment(plan).act()
    return plan


def test_without_a_conda_or_a_python_that_fits_miniforge_is_fetched_by_its_hash(jobs: dict[str, Any]) -> None:
    plan = made(
        ToolFacts(pythons=(OLD,)), find_links=["/srv/upload"], url_mirrors={"https://a/": "https://b/"}
    )
    pins = tomllib.loads(MINIFORGE.read_text("utf-8"))
    _, request = jobs["miniforge"]
    assert [(one["file"], one["sha256"]) for one in request["files"]] == [(pins["file"], pins["sha256"])]
    assert request["near"] == ["/srv/upload"]
    assert request["mirrors"] == [["https://a/", "https://b/"]]
    assert request["offline"] is False
    argv, _ = jobs["environment"]
    assert argv[-2:] == (f"{plan.layout.root}/conda", f"{plan.layout.wheels}/{pins['file']}")


@pytest.mark.parametrize(
    ("tools", "settings"),
    [
        (ToolFacts(pythons=(OLD, FITS)), {}),
        (ToolFacts(pythons=(OLD,), conda=CONDA), {}),
        (ToolFacts(pythons=(OLD,), conda=CONDA), {"env_kind": "conda"}),
        (ToolFacts(pythons=(OLD,)), {"env_kind": "venv"}),
        (ToolFacts(pythons=(OLD,)), {"python": "/opt/python3.12"}),
    ],
)
def test_where_something_fits_or_the_site_decides_nothing_is_fetched(
    tools: ToolFacts, settings: dict[str, Any], jobs: dict[str, Any]
) -> None:
    made(tools, **settings)
    assert set(jobs) == {"environment"}


def test_a_site_that_wants_conda_gets_one(jobs: dict[str, Any]) -> None:
    made(ToolFacts(pythons=(FITS,)), env_kind="conda")
    assert set(jobs) == {"miniforge", "environment"}
    assert jobs["environment"][0][4] == "conda"
