"""status and logs of a host that goes away amid them: that host fails, with what to do; the run goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_moments import UP, Host

from tasks import verbs
from tasks.remote import LostHost, Remote


def gone(*_: object, **__: object) -> None:
    raise LostHost("no answer within 60 s")


def lost(monkeypatch: pytest.MonkeyPatch, verb: str, **settings: object) -> list[str]:
    """What is said of the host; nothing is raised."""
    plan: Any = Host(eager=UP)
    data = SimpleNamespace(dict=lambda: {"ssh_port": 2222})
    plan.host = SimpleNamespace(name="gpu1", data=data)
    plan.remote = SimpleNamespace(run=gone, stream=gone)
    plan.settings = plan.settings.model_copy(update=settings)
    told: list[str] = []
    monkeypatch.setattr(verbs, "plan_for", lambda *_, **__: plan)
    monkeypatch.setattr(verbs, "stop_host", lambda host, real, text: told.append(f"{real.name}: {text}"))
    getattr(verbs, verb)(SimpleNamespace())
    return told


@pytest.mark.parametrize(("verb", "follow"), [("status", False), ("logs", False), ("logs", True)])
def test_a_host_that_goes_away_fails_alone_and_the_way_to_it_is_told(
    monkeypatch: pytest.MonkeyPatch, verb: str, follow: bool
) -> None:
    (told,) = lost(monkeypatch, verb, follow=follow)
    assert told.startswith("gpu1: gpu1 does not answer any more: no answer within 60 s\nFix: ")
    assert "2222" in told


@pytest.mark.parametrize(
    "answer", [(False, None), OSError("Socket is closed"), EOFError(), AttributeError("no transport")]
)
def test_a_log_that_is_followed_no_longer_is_a_lost_host_and_no_end(answer: Any) -> None:
    def shell(*_: object, **__: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    host = SimpleNamespace(data={}, run_shell_command=shell)
    with pytest.raises(LostHost) as lost:
        Remote(host).stream("tail -F log")
    assert str(lost.value)
