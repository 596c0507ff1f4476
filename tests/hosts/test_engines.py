"""The source route on real hosts: an engine in small, built for real, killed, resumed, refused, passed on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_sites import SOURCE_ON_HOST, SourceSite, build_tools, index_of, standin
from machines import Machine

ROOT = "/opt/rackwright"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> standin.Source:
    return standin.Source(tmp_path_factory.mktemp("source"), f"file://{SOURCE_ON_HOST}/git")


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("index")
    wheels = [*build_tools().glob("*.whl"), *standin.standin_wheels(folder / "made").values()]
    with index_of(folder, wheels) as server:
        yield server


@pytest.fixture
def site(host: Machine, tmp_path: Path, index: Any, source: standin.Source) -> SourceSite:
    made = SourceSite(tmp_path, [host], index, source)
    made.prepare(host)
    return made


def receipt(machine: Machine, step: str = "engine") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.run(f"cat {ROOT}/receipts/{step}.json").stdout)
    return found


def test_site_builds_serves_and_changes_nothing_the_second_time(host: Machine, site: SourceSite) -> None:
    output = site.run("site", "-y", timeout=600)
    detail = receipt(host)["detail"]
    assert detail["how"] == "built"
    assert detail["checks"] == [
        "commit",
        "version torch",
        "flashinfer-python == flashinfer-cubin",
        "one CUDA major",
        "import vllm._C_stable_libtorch",
        "import vllm._moe_C_stable_libtorch",
        "operator scaled_fp4_quant",
    ]
    assert site.source.commit in host.run(f"git -C {ROOT}/src/vllm rev-parse HEAD").stdout
    provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
    assert provenance["key"]["commit"] == site.source.commit
    assert {one["name"]: one["proven"] for one in provenance["source"]["dependencies"]} == {
        "cutlass": False,
        "deepgemm": True,
    }
    assert "acceptance" in output
    again = site.run("site", "-y", timeout=200)
    assert "No changes" in again
    assert "Success" not in again
