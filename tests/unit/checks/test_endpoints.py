"""Which servers a run needs, by route and sources, and what an answer of one means for the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composed_hosts import HEALTHY

from tasks.checks import net
from tasks.checks.needs import EndpointNeed
from tasks.endpoints import endpoints_of
from tasks.facts.net import EndpointFacts, NetFacts
from tasks.facts.tools import CondaFacts
from tasks.findings import Finding
from tasks.needs import glibc_of, needs_of
from tasks.plan import Plan
from tasks.recipe import Recipe, load_recipe
from tasks.settings import settings_from


def plan_of(recipe: str = "rehearsal-cpu", verb: str = "preflight", **settings: Any) -> Plan:
    host = SimpleNamespace(name="gpu1", data={}, connector=None)
    made = settings_from({"recipe": recipe, **settings}, lambda key: key)
    return Plan(host, made, load_recipe(recipe), verb)


def by_name(plan: Plan) -> dict[str, EndpointNeed]:
    needs = endpoints_of(plan)
    found = {need.name: need for need in needs}
    assert len(found) == len(needs), "a name was given twice"
    return found


def answered(plan: Plan, **reachable: bool) -> dict[str, Finding]:
    """Findings of `net` when these endpoints (by name, `_` for `.`) answer or not, and others do not."""
    needs = by_name(plan)
    facts = {
        need.url: EndpointFacts(need.url, reachable.get(name.replace(".", "_"), False), tool="curl", why="no")
        for name, need in needs.items()
    }
    plan.facts = replace(HEALTHY, net=NetFacts((), {}, facts))
    return {finding.id: finding for finding in net.endpoints(needs_of(plan), plan.facts)}


def test_the_rehearsal_needs_the_index_and_torch_from_its_own() -> None:
    needs = by_name(plan_of(sources=["generate"]))
    assert set(needs) == {"conda", "miniforge", "index", "extra_index"}
    assert needs["index"].url == "pip:pip"
    assert needs["extra_index"].url == "https://download.pytorch.org/whl/cpu/torch/"
    (case,) = needs["extra_index"].unless
    assert case.wheels == ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",)
    tools, engine = needs["index"].unless
    assert len(engine.wheels) > 100 and case.wheels[0] in engine.wheels
    assert any(wheel.startswith("supervisor-") for wheel in tools.wheels)
    assert "engine.json" in engine.done and "0.32.0" in engine.done
    assert "/run/systemd/system" in tools.done, "systemd needs no tools where nothing is downloaded"


def test_a_bundle_needs_no_server_but_the_hub() -> None:
    assert by_name(plan_of(bundle="/srv/bundle", sources=["generate"])) == {}
    assert set(by_name(plan_of("deepseek-v4-flash-sm120", bundle="/srv/bundle"))) == {
        "huggingface",
        "modelscope",
    }


@pytest.mark.parametrize(
    ("verb", "asked", "room"),
    [
        ("weights", {"index", "huggingface", "modelscope"}, {"tools", "weights"}),
        ("environment", {"index"}, {"tools"}),
        ("engine", {"index", "torch_index", "source", "files", "files.2"}, {"engine and its wheels"}),
        ("serve", set(), set()),
    ],
)
def test_a_verb_needs_what_it_brings(verb: str, asked: set[str], room: set[str]) -> None:
    plan = plan_of("deepseek-v4-flash-sm120", verb, env_kind="venv")
    assert set(by_name(plan)) == asked
    assert {need.purpose for need in needs_of(plan).disk} == room


def test_the_sites_mirrors_are_what_is_asked() -> None:
    plan = plan_of(
        "deepseek-v4-flash-sm120",
        index_url="https://mirror.test/simple",
        torch_index_url="https://mirror.test/pytorch/cu130/",
        hub_endpoint="https://hub.test",
        sources=["huggingface"],
        url_mirrors={"https://github.com/": "https://gh.test/https://github.com/"},
        env_kind="venv",
    )
    urls = {name: need.url for name, need in by_name(plan).items()}
    assert urls["index"] == "https://mirror.test/simple/pip/"
    assert urls["torch_index"] == "https://mirror.test/pytorch/cu130/torch/"
    assert urls["huggingface"] == "https://hub.test/api/models/deepseek-ai/DeepSeek-V4-Flash"
    assert urls["source"] == "https://gh.test/https://github.com/jasl/vllm.git"
    assert urls["source.2"] == "https://github.com/jasl/vllm.git"
    assert set(urls) == {
        *("index", "torch_index", "huggingface", "source", "source.2", "files", "files.2", "files.3"),
    }


def test_an_archive_of_the_source_spares_its_host() -> None:
    plan = plan_of("deepseek-v4-flash-sm120", source_archive="/srv/vllm.tar")
    assert "source" not in by_name(plan)


def test_a_finished_build_on_the_controller_spares_source_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheelhouse" / "abc").mkdir(parents=True)
    commit = load_recipe("deepseek-v4-flash-sm120").route("source").model_dump()["commit"]
    (tmp_path / "wheelhouse" / "abc" / "provenance.json").write_text(f'{{"commit": "{commit}"}}')
    monkeypatch.setattr("tasks.endpoints.ROOT", tmp_path)
    assert not {"source", "torch_index"} & set(by_name(plan_of("deepseek-v4-flash-sm120")))


def test_the_image_comes_from_its_registry() -> None:
    needs = by_name(plan_of("deepseek-v4-flash-sm120", route="docker", sources=["path"], model_path="/m"))
    assert needs["registry"].url == "https://registry-1.docker.io/v2/"
    assert set(needs) == {"registry", "index"}, "the index is for the tools"


def test_one_hub_that_answers_makes_the_other_a_decision() -> None:
    plan = plan_of("deepseek-v4-flash-sm120", bundle="/srv/bundle")
    found = answered(plan, modelscope=True)
    assert {id: finding.status for id, finding in found.items()} == {
        "net.huggingface": "warn",
        "net.modelscope": "ok",
    }
    assert "modelscope.cn" in (found["net.huggingface"].fix or "")
    assert {finding.status for finding in answered(plan).values()} == {"fail"}


def test_a_copy_elsewhere_is_another_way_to_the_weights() -> None:
    plan = plan_of(
        "deepseek-v4-flash-sm120",
        bundle="/srv/bundle",
        sources=["huggingface", "path"],
        model_path="/mnt/copy",
    )
    found = answered(plan)
    assert found["net.huggingface"].status == "warn" and "`path`" in (found["net.huggingface"].fix or "")


def test_a_dead_index_names_mirror_and_bundle_unless_the_hosts_pip_has_more() -> None:
    plan = plan_of(sources=["generate"], env_kind="venv")
    found = answered(plan)
    assert {finding.status for finding in found.values()} == {"fail"}
    assert "rackwright bundle rehearsal-cpu" in (found["net.index"].fix or "")
    assert "find_links" in (found["net.extra_index"].fix or "")
    plan.facts = replace(plan.facts, net=replace(plan.facts.net, pip=("extra-index-url",)))
    findings = net.endpoints(needs_of(plan), plan.facts)
    assert {finding.status for finding in findings} == {"warn"}


def test_a_page_of_wheels_is_another_way_though_it_cannot_be_counted() -> None:
    plan = plan_of(sources=["generate"], env_kind="venv", find_links=["https://pages.test/wheels"])
    assert answered(plan)["net.index"].status == "warn"


def test_files_that_another_server_has_are_no_failure(tmp_path: Path) -> None:
    recipe = load_recipe("deepseek-v4-flash-sm120")
    assert recipe.engine.source
    one, two = recipe.engine.source.wheels
    two = two.model_copy(update={"urls": [*two.urls, one.urls[0]]})
    source = recipe.engine.source.model_copy(update={"wheels": [one, two]})
    engine = recipe.engine.model_copy(update={"source": source})
    changed: Recipe = recipe.model_copy(update={"engine": engine})
    plan = plan_of("deepseek-v4-flash-sm120", env_kind="venv", sources=["path"], model_path="/m")
    plan.recipe = changed
    first, second = (need.url for name, need in by_name(plan).items() if name.startswith("files"))
    assert "github.com" in first and "flashinfer.ai" in second
    only_github = answered(plan, files=True)
    assert only_github["net.files.2"].status == "warn" and "github.com" in (
        only_github["net.files.2"].fix or ""
    )
    assert answered(plan, files_2=True)["net.files"].status == "fail", "one wheel is on no other server"


def test_a_conda_without_its_channel_is_replaced_by_a_venv_where_a_python_fits() -> None:
    plan = plan_of(sources=["generate"])
    conda = CondaFacts("/opt/conda/bin/conda", "/opt/conda", "24.5.0")
    dead = {"conda:": EndpointFacts("conda:", False, tool="curl", why="no")}
    for version, status in (("3.12.3", "fail"), ("3.11.2", "warn")):
        python = replace(HEALTHY.tools.pythons[0], version=version)
        tools = replace(HEALTHY.tools, pythons=(python,), conda=conda)
        plan.facts = replace(HEALTHY, tools=tools, net=NetFacts((), {}, dead))
        found = {finding.id: finding for finding in net.endpoints(needs_of(plan), plan.facts)}
        assert found["net.conda"].status == status


@pytest.mark.parametrize(
    ("file", "floor"),
    [
        ("llguidance-1.7.6-cp39-abi3-manylinux_2_31_x86_64.whl", (2, 31)),
        ("aiohttp-3.14.5-cp312-cp312-manylinux2014_x86_64.manylinux_2_28_x86_64.whl", (2, 17)),
        ("old-1-cp27-cp27mu-manylinux1_x86_64.whl", (2, 5)),
        ("attrs-26.1.0-py3-none-any.whl", None),
        ("built-1-cp312-cp312-linux_x86_64.whl", None),
        ("", None),
    ],
)
def test_the_oldest_glibc_of_a_wheel_is_in_its_name(file: str, floor: tuple[int, int] | None) -> None:
    assert glibc_of(file) == floor


def test_the_floor_of_glibc_is_that_of_the_most_demanding_wheel_in_the_lock() -> None:
    for name in ("rehearsal-cpu", "deepseek-v4-flash-sm120-stock-0.26", "deepseek-v4-flash-sm120-stock-0.33"):
        assert needs_of(plan_of(name)).glibc == "2.31", name


def test_what_is_needed_beside_servers_follows_from_route_recipe_and_site() -> None:
    built = needs_of(plan_of("deepseek-v4-flash-sm120", max_jobs=12, sources=["path"], model_path="/m"))
    assert (built.build_jobs, built.build_bytes_per_job) == (12, 5_368_709_120)
    assert (built.engine_version, built.flashinfer) == (None, "0.6.14")
    assert built.needs_root is False and built.offline is True
    image = needs_of(plan_of("deepseek-v4-flash-sm120", route="docker", supervisor="systemd"))
    assert image.engine_version is None, "a nightly's tag is no release"
    assert (image.build_jobs, image.needs_root) == (None, True)
    wheel = needs_of(plan_of(sources=["generate"]))
    assert (wheel.engine_version, wheel.nofile) == ("0.32.0", 8192)
