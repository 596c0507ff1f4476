"""A site on real hosts with the stand-in engine: provisioned, unchanged, mended, removed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from machines import Machine
from sites import Site

ENDPOINT = "http://127.0.0.1:8000"


@pytest.fixture
def site(host: Machine, tmp_path: Path) -> Site:
    made = Site(tmp_path, [host])
    made.prepare(host)
    return made


def answers(host: Machine) -> bool:
    return host.run(f"curl -fsS -m 5 {ENDPOINT}/health", check=False).returncode == 0


def wait_for(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.3)
    raise AssertionError("it never came")


def test_preflight_reads_everything_and_writes_nothing(host: Machine, site: Site) -> None:
    before = host.run("find / -xdev -newer /proc/1 -type f 2>/dev/null | wc -l").stdout
    output = site.run("preflight")
    assert "ready" in output
    assert host.run("test -e /opt/rackwright", check=False).returncode != 0
    assert before
    report = site.report(host.name, "preflight")
    assert report["commands"] <= 3
    assert {finding["id"] for finding in report["findings"]} >= {"host.init", "disk.space", "host.ports"}
