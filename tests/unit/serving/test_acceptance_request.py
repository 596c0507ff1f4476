"""What acceptance asks of an engine follows from the engine's own flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.acceptance import acceptance_request
from tasks.onhost import accept


def expect_of(flags: dict[str, Any], pid: int | None = None, route: str = "wheel") -> dict[str, Any]:
    """What is expected of an engine with these flags."""
    recipe = SimpleNamespace(
        flags=lambda mode, route: flags,
        acceptance=SimpleNamespace(profile="smoke", knowledge=True, skip={}),
    )
    spec: Any = SimpleNamespace(mode="eager", base_url="http://127.0.0.1:1", model_name="m", key_file=None)
    plan: Any = SimpleNamespace(
        recipe=recipe, route=route, model_dir="/m", settings=SimpleNamespace(profile=None)
    )
    request = acceptance_request(plan, spec, pid)
    accept.parameters_from(request)  # the program takes it
    found: dict[str, Any] = request["expect"]
    return found


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, None),  # the engine says itself what its default is
        ({"enable-prefix-caching": True}, True),
        ({"no-enable-prefix-caching": True}, False),
        ({"enable-prefix-caching": True, "no-enable-prefix-caching": True}, False),
    ],
)
def test_prefix_caching_is_expected_where_the_flags_turn_it_on(
    flags: dict[str, Any], told: bool | None
) -> None:
    assert expect_of(flags).get("prefix_caching") is told


@pytest.mark.parametrize(("length", "told"), [(8192, 8192), ("128k", None), ("auto", None), (-1, None)])
def test_a_context_length_that_the_engine_counts_out_is_not_expected(length: Any, told: int | None) -> None:
    assert expect_of({"max-model-len": length})["max_model_len"] == told


def test_the_process_is_told_where_it_is_the_supervisors_own() -> None:
    assert expect_of({}, 7)["identity"] == {"root": "/m", "pid": 7}
    assert expect_of({}, 7, "docker")["identity"] == {"root": "/m"}
