"""The composed hosts and needs, as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from composed_hosts import GIB, HEALTHY

from tasks.checks import DiskNeed, Needs
from tasks.facts import HostFacts
from tasks.facts.disk import DiskFacts
from tasks.findings import Finding


@pytest.fixture
def healthy() -> HostFacts:
    """A good machine with systemd and no GPU facts."""
    return HEALTHY


@pytest.fixture
def host() -> Callable[..., HostFacts]:
    """The healthy host with parts changed: `host(system={"libc": "musl"}, disk={...paths})`."""

    def make(**parts: Any) -> HostFacts:
        made = HEALTHY
        for name, changes in parts.items():
            if name == "disk":
                paths = {**made.disk.paths, **{path.path: path for path in changes}}
                made = replace(made, disk=DiskFacts(paths))
            elif isinstance(changes, dict):
                made = replace(made, **{name: replace(getattr(made, name), **changes)})
            else:
                made = replace(made, **{name: changes})
        return made

    return make


@pytest.fixture
def needs() -> Callable[..., Needs]:
    """Needs of a small deployment with parts changed."""

    def make(**changes: Any) -> Needs:
        base = Needs(
            root="/opt/rackwright",
            glibc="2.28",
            cpu_flags=("avx2",),
            ram_bytes=6 * GIB,
            python="3.12",
            ports=(8000,),
            disk=(DiskNeed("/opt/rackwright", 8 * GIB, 120_000, "env", "env"),),
        )
        return replace(base, **changes)

    return make


@pytest.fixture
def by_id() -> Callable[[list[Finding]], dict[str, Finding]]:
    """Findings by id; two of one id are a mistake."""

    def index(findings: list[Finding]) -> dict[str, Finding]:
        found = {finding.id: finding for finding in findings}
        assert len(found) == len(findings), "an id was given twice"
        return found

    return index
