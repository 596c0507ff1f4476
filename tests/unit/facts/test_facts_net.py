from __future__ import annotations

import pytest

from tasks.facts.net import parse_net
from tasks.facts.text import split_sections

PORTS = """
@@rw:ports
listen=   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 48711 1 0 100 0 0 10 0
listen=   1: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0 100 0 0 10 0
listen=   2: 00000000000000000000000001000000:1F41 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 223 1 0 100 0 0 10 0
unprivileged=80
@@rc:0
@@rw:owners
user=1000\tlee
owner=1F40\t4242\tpython3\t/usr/bin/python3.11\t/opt/rackwright/run\t/opt/rackwright/env/bin/python /opt/rackwright/env/bin/vllm
owner=1F41\t4243\tpython3\t\t\t\t4242,7,4242
@@rc:0
"""  # noqa: E501

URLS = (
    "https://pypi.org/simple/",
    "https://hub.test/x",
    "http://mirror.test/",
    "https://dead.test/",
    "https://s.test",
)
ANSWERS = """
@@rw:net
proxy=https_proxy
endpoint=1 tool=curl rc=6 curl: (6) Could not resolve host: hub.test code=000 seconds=0.001
endpoint=0 tool=curl rc=0 code=200 seconds=0.684228
endpoint=2 tool=curl rc=22 curl: (22) refused range code=404 seconds=0.2
endpoint=4 tool=curl rc=0 code=503 seconds=0.2
@@rc:124
"""


def test_listeners_are_read_with_address_and_user() -> None:
    facts = parse_net(split_sections(PORTS))
    assert [(one.port, one.address, one.uid) for one in facts.listeners or ()] == [
        (8000, "127.0.0.1", 1000),
        (22, "::", 0),
        (8001, "::1", 0),
    ]


def test_the_owner_of_a_port_is_named_where_the_host_shows_it() -> None:
    facts = parse_net(split_sections(PORTS))
    (owner,) = facts.owners[8000]
    assert (owner.pid, owner.name, owner.cwd) == (4242, "python3", "/opt/rackwright/run")
    (child,) = facts.owners[8001]
    assert child.kin == (4242, 7, 4242)
    assert (facts.users, facts.unprivileged) == ({1000: "lee"}, 80)


def test_sockets_that_may_not_be_read_are_not_no_sockets() -> None:
    facts = parse_net(split_sections("@@rw:ports\n@@rc:1\n"))
    assert facts.listeners is None
    assert "exit status 1" in facts.reasons["listeners"]


def test_any_answer_of_a_server_is_reachable_but_a_5xx_is_not() -> None:
    facts = parse_net(split_sections(ANSWERS), URLS)
    ok, unresolved, missing, dead, broken = (facts.endpoints[url] for url in URLS)
    assert (ok.reachable, ok.status, ok.seconds) == (True, 200, 0.684228)
    assert (unresolved.reachable, unresolved.why) == (False, "curl: (6) Could not resolve host: hub.test")
    assert (missing.reachable, missing.status) == (True, 404)
    assert (dead.reachable, dead.why) == (None, "no answer within the deadline")
    assert (broken.reachable, broken.why) == (False, "the server answers 503")
    assert facts.proxies == ("https_proxy",)


@pytest.mark.parametrize(
    ("answer", "reachable"),
    [
        ("tool=wget rc=0 saved", True),
        ("tool=wget rc=1 wget: server returned error: HTTP/1.1 403 Forbidden", True),
        ("tool=wget rc=1 wget: bad address 'x'", False),
        ("tool=python rc=0 code=404", True),
        ("tool=python rc=1 urllib.error.URLError: <urlopen error timed out>", False),
        ("tool=bash rc=0 ", True),
        ("tool=bash rc=124 ", False),
        ("tool=none rc=127 no curl, wget, python3 or bash", None),
        ("gibberish", None),
    ],
)
def test_answers_of_every_tool_are_understood(answer: str, reachable: bool | None) -> None:
    facts = parse_net(split_sections(f"@@rw:net\nendpoint=0 {answer}\n@@rc:0\n"), ("https://x.test",))
    assert facts.endpoints["https://x.test"].reachable is reachable
    assert (facts.endpoints["https://x.test"].why is None) == bool(reachable)


def test_what_is_there_already_is_not_asked_and_the_count_of_wheels_is_read() -> None:
    answers = (
        "endpoint=0 tool=skip rc=0 hand=38/38 \n"
        "endpoint=1 tool=curl rc=6 hand=2/40 at=https://mirror.test/simple/pip/ curl: (6) no such host "
        "code=000 seconds=0.0\n"
    )
    facts = parse_net(split_sections(f"@@rw:net\npip=find-links\n{answers}@@rc:0\n"), ("pip:a", "pip:pip"))
    spared, asked = facts.endpoints["pip:a"], facts.endpoints["pip:pip"]
    assert (spared.spared, spared.at_hand, spared.reachable) == (True, (38, 38), None)
    assert (asked.spared, asked.at_hand, asked.reachable) == (False, (2, 40), False)
    assert (asked.at, asked.why) == ("https://mirror.test/simple/pip/", "curl: (6) no such host")
    assert facts.pip == ("find-links",)
