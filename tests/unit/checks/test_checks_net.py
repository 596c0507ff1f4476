from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from composed_hosts import HEALTHY

from tasks.checks import EndpointNeed, Needs, net
from tasks.facts import HostFacts
from tasks.facts.net import EndpointFacts, NetFacts

MakeNeeds = Callable[..., Needs]
HUB = EndpointNeed(
    "model_hub", "https://hub.test/", "weights", "Set model_root to a copy, or use ModelScope."
)
INDEX = EndpointNeed("wheel_index", "https://index.test/simple/", "wheels of the engine")


def host(*endpoints: EndpointFacts, proxies: tuple[str, ...] = ()) -> HostFacts:
    return replace(HEALTHY, net=NetFacts((), {}, {one.url: one for one in endpoints}, proxies))


def test_each_endpoint_is_a_finding_of_its_own(needs: MakeNeeds) -> None:
    both = host(
        EndpointFacts(HUB.url, True, 200, 0.3, "curl"), EndpointFacts(INDEX.url, True, 404, 0.2, "curl")
    )
    findings = net.endpoints(needs(endpoints=(HUB, INDEX)), both)
    assert [(f.id, f.status) for f in findings] == [("net.model_hub", "ok"), ("net.wheel_index", "ok")]


def test_unreachable_is_a_decision_where_there_is_another_way_and_a_failure_where_not(
    needs: MakeNeeds,
) -> None:
    dead = host(
        EndpointFacts(HUB.url, False, None, None, "curl", "curl: (28) timed out"),
        EndpointFacts(INDEX.url, False, None, None, "curl", "curl: (6) Could not resolve host: index.test"),
    )
    hub, index = net.endpoints(needs(endpoints=(HUB, INDEX)), dead)
    assert (hub.status, hub.fix) == ("warn", HUB.alternative)
    assert index.status == "fail" and "Could not resolve" in (index.observed or "")
    assert "no proxy variable" in (index.observed or "")


def test_no_answer_in_time_is_unreachable_and_no_tool_is_unknown(needs: MakeNeeds) -> None:
    late = host(EndpointFacts(INDEX.url, None, why="no answer within the deadline"))
    assert net.endpoints(needs(endpoints=(INDEX,)), late)[0].status == "fail"
    no_tool = host(EndpointFacts(INDEX.url, None, why="no curl, wget, python3 or bash"))
    assert net.endpoints(needs(endpoints=(INDEX,)), no_tool)[0].status == "skipped"
    assert net.endpoints(needs(endpoints=(INDEX,)), host())[0].status == "skipped"


def test_a_slow_endpoint_is_a_warning(needs: MakeNeeds) -> None:
    slow = host(EndpointFacts(INDEX.url, True, 200, 4.2, "curl"))
    assert net.endpoints(needs(endpoints=(INDEX,)), slow)[0].status == "warn"


def test_what_was_spared_is_not_reported_and_wheels_at_hand_are_counted(needs: MakeNeeds) -> None:
    spared = host(EndpointFacts(INDEX.url, tool="skip", spared=True))
    assert net.endpoints(needs(endpoints=(INDEX,)), spared) == []
    own = EndpointNeed("index", "pip:pip", "Python packages", fix="Set index_url.")
    dead = EndpointFacts("pip:pip", False, tool="curl", why="x", at="https://m.test/pip/", at_hand=(2, 40))
    (finding,) = net.endpoints(needs(endpoints=(own,)), host(dead))
    assert (finding.status, finding.fix) == ("fail", "Set index_url.")
    assert "https://m.test/pip/: x; 2 of 40 wheels are at hand" in (finding.observed or "")


def test_what_is_not_needed_is_not_reported(needs: MakeNeeds) -> None:
    assert net.endpoints(needs(), host(EndpointFacts(HUB.url, False))) == []
