"""Fixtures that bring up hosts and throw them away, also when the test fails. `machines` says what they are.

- `host`: the test runs once on each kind; `systemd_host`, `container_host`: one kind. Fresh for every test.
- `new_host(kind, name, offline=...)`: any number of hosts.

Where hosts cannot run the tests are skipped with the reason; RACKWRIGHT_REQUIRE_HOSTS=1 makes that a failure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from machines import Kind, Machine, base_system, missing_requirements, sweep
from machines.base import BaseSystemError

_MACHINES = pytest.StashKey[list[Machine]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what brings up hosts, so that `-m "not hosts"` leaves it out.

    A test that asks for `systemd` or `container` is about that kind alone: there is none for the other one.
    """
    elsewhere = []
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "hosts_can_run" in names:
            item.add_marker(pytest.mark.hosts)
        kind = item.callspec.params.get("host") if hasattr(item, "callspec") else None
        if {"systemd": "container", "container": "systemd"}.get(kind, "") in names:
            elsewhere.append(item)
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show the hosts' last log lines with a failed test."""
    report = yield
    if report.failed:
        for machine in item.stash.get(_MACHINES, []):
            report.sections.append((f"log of {machine!r}", machine.log_tail()))
    return report


@pytest.fixture(scope="session")
def hosts_can_run() -> None:
    """Build the base system, sweep the remains of killed runs; skip (or fail) where hosts cannot run."""
    missing = "; ".join(missing_requirements())
    if not missing:
        sweep()
        try:
            base_system()
        except BaseSystemError as error:
            missing = str(error)
    if missing:
        why = f"test hosts cannot run here: {missing}"
        if os.environ.get("RACKWRIGHT_REQUIRE_HOSTS") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)


@pytest.fixture
def new_host(hosts_can_run: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., Machine]]:
    """Start hosts: `new_host("systemd")`, `new_host("container", "gpu2", offline=True)`."""
    machines = request.node.stash.setdefault(_MACHINES, [])

    def start(kind: Kind, name: str = "gpu1", *, offline: bool = False) -> Machine:
        machine = Machine(kind, name, offline=offline)
        machines.append(machine)
        stack.callback(machine.stop)
        return machine.start()

    with contextlib.ExitStack() as stack:
        yield start


@pytest.fixture(params=["systemd", "container"])
def host(request: pytest.FixtureRequest, new_host: Callable[..., Machine]) -> Machine:
    """A host of each kind in turn."""
    return new_host(request.param)


@pytest.fixture
def systemd_host(new_host: Callable[..., Machine]) -> Machine:
    """A booted systemd host."""
    return new_host("systemd")


@pytest.fixture
def container_host(new_host: Callable[..., Machine]) -> Machine:
    """A host like a rented container: sshd, no systemd, no Docker."""
    return new_host("container")
