"""`mirrors = "auto"`: measured on the host within a bound, told, recorded, used where the site is silent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import env
from tasks.env import index_settings, torch_index, url_mirrors
from tasks.jobs import Outcome
from tasks.mirrors import MEASURE_SECONDS, Mirrors, as_settings, candidates, picked
from tasks.plan import Plan
from tasks.receipts import Receipt
from tasks.recipe import load_recipe
from tasks.settings import settings_from
from tasks.steps import StepFailed

CHOSEN = {
    "index_url": "https://pypi.tuna.tsinghua.edu.cn/simple/",
    "torch_index_base": "https://mirror.nju.edu.cn/pytorch/whl/",
    "github": "https://ghfast.top/https://github.com/",
    "hub_endpoint": "https://hf-mirror.com/",
}


def plan_of(said: list[str] | None = None, **settings: Any) -> Plan:
    site = settings_from({"recipe": "deepseek-v4-flash-sm120", **settings}, lambda key: key)
    log = (lambda text, *rest: said.append(text)) if said is not None else None
    host = SimpleNamespace(name="gpu1", data={}, connector=None, log=log)
    return Plan(host, site, load_recipe(site.recipe), "site")


def measured(plan: Plan, stdout: str) -> list[tuple[str, dict[str, Any]]]:
    """Commands that the step runs on a host that answers this."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def run(command: str, **more: Any) -> SimpleNamespace:
        asked.append((command, more))
        return SimpleNamespace(ok=True, stdout=stdout, stderr="python3: not found")

    plan.remote = SimpleNamespace(run=run)  # type: ignore[assignment]
    return asked


def test_every_candidate_is_told_and_the_choice_recorded() -> None:
    said: list[str] = []
    plan = plan_of(said, mirrors="auto")
    rows = [
        {"base": "https://pypi.org/simple/", "ok": False, "seconds": None, "why": "timed out"},
        {"base": CHOSEN["index_url"], "ok": True, "seconds": 0.2, "why": None},
    ]
    asked = measured(plan, json.dumps({"chosen": CHOSEN, "measured": {"index_url": rows}}))
    done = Mirrors(plan).act()
    ((command, more),) = asked
    assert "measure_mirrors.py" in command
    assert more["timeout"] == MEASURE_SECONDS == 60
    assert json.loads(more["stdin"]) == {"kinds": candidates()}
    assert "mirrors: index_url: https://pypi.org/simple/ no answer, " + CHOSEN["index_url"] + " 0.2 s" in said
    assert done.detail["measured"] == {"index_url": rows}
    assert done.detail["chosen"] == as_settings(CHOSEN)  # type: ignore[arg-type]


def test_a_host_that_cannot_measure_is_told_what_to_set() -> None:
    plan = plan_of([], mirrors="auto")
    measured(plan, "")
    with pytest.raises(StepFailed, match=r"(?s)python3: not found.*Fix: set index_url"):
        Mirrors(plan).act()


def test_a_kinds_own_server_needs_no_setting() -> None:
    own = {kind: data["candidates"][0] for kind, data in candidates().items()}
    assert as_settings(own) == {"torch_index_base": own["torch_index_base"]}
    assert as_settings(dict.fromkeys(own)) == {}


def recorded(**settings: Any) -> Plan:
    plan = plan_of(**settings)
    plan.state.receipts["mirrors"] = Receipt(
        "mirrors",
        Mirrors(plan).digest(),
        1.0,
        {"chosen": as_settings(CHOSEN), "measured": MEASURED},  # type: ignore[arg-type]
    )
    return plan


def rows(*answers: tuple[str, float | None]) -> list[dict[str, Any]]:
    return [{"base": base, "ok": seconds is not None, "seconds": seconds} for base, seconds in answers]


MEASURED = {
    "index_url": rows(
        ("https://pypi.org/simple/", 3.0),
        (CHOSEN["index_url"], 0.2),
        ("https://mirrors.aliyun.com/pypi/simple/", 0.3),
        ("https://mirrors.ustc.edu.cn/pypi/simple/", None),
    ),
    "torch_index_base": rows((CHOSEN["torch_index_base"], 0.2), ("https://download.pytorch.org/whl/", 2.0)),
}


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        (
            {"mirrors": "auto"},
            ["https://more.test", "https://mirrors.aliyun.com/pypi/simple/", "https://pypi.org/simple/"],
        ),
        ({"mirrors": "auto", "index_url": "https://own.test/simple"}, ["https://more.test"]),
        ({}, ["https://more.test"]),
    ],
    ids=["measured", "the site's own", "not measured"],
)
def test_what_the_chosen_index_lacks_the_others_that_answered_are_asked_for(
    settings: dict[str, Any], extra: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def job(plan: Plan, name: str, key: str, argv: tuple[str, ...], **more: Any) -> Outcome:
        asked.append(json.loads(more["stdin"]))
        return Outcome(True, 1, {}, "")

    monkeypatch.setattr(env, "job", job)
    more = {"extra_index_urls": ["https://more.test"]}
    env.install_locked(recorded(**settings), "engine", "key", "/e", "/l.lock", more)
    assert asked[0]["extra_index_urls"] == extra


def test_a_torch_that_the_mirror_lacks_is_asked_of_its_own_server() -> None:
    mirror, own = "https://mirror.nju.edu.cn/pytorch/whl/cu130", "https://download.pytorch.org/whl/cu130"
    assert env.torch_indexes(recorded(mirrors="auto"), "cu130") == [mirror, own]
    assert env.torch_indexes(recorded(), "cu130") == [own]
    assert env.torch_indexes(recorded(mirrors="auto", torch_index_url="https://t.test"), "cu130") == [
        "https://t.test"
    ]
    assert env.torch_indexes(recorded(mirrors="auto"), None) == []


def test_what_was_measured_is_used_and_not_measured_again() -> None:
    plan = recorded(mirrors="auto")
    assert index_settings(plan)["index_url"] == "https://pypi.tuna.tsinghua.edu.cn/simple"
    assert torch_index(plan, "cu130") == "https://mirror.nju.edu.cn/pytorch/whl/cu130"
    assert url_mirrors(plan) == [["https://github.com/", "https://ghfast.top/https://github.com/"]]
    assert picked(plan, "hub_endpoint", None) == "https://hf-mirror.com"
    assert "measured" in (Mirrors(plan).unchanged() or "")


def test_what_the_site_says_wins_and_without_auto_nothing_measured_counts() -> None:
    own = recorded(
        mirrors="auto", index_url="https://own.test/simple", url_mirrors={"https://github.com/": "x"}
    )
    assert index_settings(own)["index_url"] == "https://own.test/simple"
    assert url_mirrors(own) == [["https://github.com/", "x"]]
    plain = recorded()
    assert index_settings(plain)["index_url"] is None
    assert picked(plain, "hub_endpoint", None) is None
