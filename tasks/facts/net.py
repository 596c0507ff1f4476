"""Ports in use, by whom where the host shows it, and which endpoints answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tasks.facts.text import Section, get_section, int_of


@dataclass(frozen=True)
class Owner:
    """A process that listens on a port. `argv` is at most its first two words.

    `kin` are the processes that it descends from and the leader of its process group.
    """

    pid: int
    name: str
    exe: str | None = None
    cwd: str | None = None
    argv: str | None = None
    kin: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    port: int
    address: str
    uid: int | None = None


@dataclass(frozen=True)
class EndpointFacts:
    """Whether a URL's server answered: any HTTP status is an answer, a 5xx of the server is not.

    `spared`: it was not asked, because what it serves is there. `at` is what was tried, where that follows
    from the host's own settings. `at_hand` counts the wheels that need no server, and all of them.
    """

    url: str
    reachable: bool | None = None
    status: int | None = None
    seconds: float | None = None
    tool: str | None = None
    why: str | None = None
    spared: bool = False
    at: str | None = None
    at_hand: tuple[int, int] | None = None


@dataclass(frozen=True)
class NetFacts:
    """Listening sockets, their owners by port, and endpoints by URL.

    `users` are the names of listeners' users; ports below `unprivileged` are root's (ip(7),
    ip_unprivileged_port_start). `proxies` are names of variables; `pip` are the keys by which the host's pip
    looks in more places.
    """

    listeners: tuple[Listener, ...] | None = None
    owners: Mapping[int, tuple[Owner, ...]] = field(default_factory=dict)
    endpoints: Mapping[str, EndpointFacts] = field(default_factory=dict)
    users: Mapping[int, str] = field(default_factory=dict)
    unprivileged: int | None = None
    proxies: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def listening(self, port: int) -> tuple[Listener, ...]:
        """The sockets that listen on a port."""
        return tuple(listener for listener in self.listeners or () if listener.port == port)


_LISTEN = re.compile(
    r"^\s*\d+:\s+([0-9A-Fa-f]{8}|[0-9A-Fa-f]{32}):([0-9A-Fa-f]{4})\s+\S+\s+0A\s+\S+\s+\S+\s+\S+\s+(\d{1,10})\b"
)


def parse_net(sections: Mapping[str, Section], endpoints: tuple[str, ...] = ()) -> NetFacts:
    """Net facts. `endpoints` are the request's URLs, in its order."""
    ports, owners, net = (get_section(sections, name) for name in ("ports", "owners", "net"))
    reasons: dict[str, str] = {}
    listeners: tuple[Listener, ...] | None = None
    if ports.present and ports.rc == 0:
        listeners = tuple(
            Listener(int(m.group(2), 16), _address(m.group(1)), int(m.group(3)))
            for line in ports.text.splitlines()
            if (m := _LISTEN.match(line.removeprefix("listen=")))
        )
    else:
        reasons["listeners"] = ports.why
    proxies = tuple(
        line.removeprefix("proxy=") for line in net.text.splitlines() if line.startswith("proxy=")
    )
    answers: dict[int, str] = {}
    for line in net.text.splitlines():
        match = re.match(r"endpoint=(\d{1,4}) (.*)$", line)
        if match:
            answers.setdefault(int(match.group(1)), match.group(2))
    return NetFacts(
        listeners=listeners,
        owners=_owners(owners.text),
        users=_users(owners.text),
        unprivileged=_unprivileged(ports.text),
        endpoints={
            url: _endpoint(url, answers.get(i), "no answer within the deadline" if net.present else net.why)
            for i, url in enumerate(endpoints)
        },
        proxies=proxies,
        pip=tuple(line.removeprefix("pip=") for line in net.text.splitlines() if line.startswith("pip=")),
        reasons=reasons,
    )


def _owners(text: str) -> dict[int, tuple[Owner, ...]]:
    found: dict[int, dict[int, Owner]] = {}
    for line in text.splitlines():
        fields = line.removeprefix("owner=").split("\t")
        if not line.startswith("owner=") or len(fields) not in (6, 7):  # the kin came later
            continue
        pid = int_of(fields[1])
        if pid is None or not re.fullmatch(r"[0-9A-Fa-f]{4}", fields[0]):
            continue
        kin = tuple(number for word in "".join(fields[6:]).split(",") if (number := int_of(word)))
        owner = Owner(
            pid, fields[2] or "?", fields[3] or None, fields[4] or None, fields[5].strip() or None, kin
        )
        found.setdefault(int(fields[0], 16), {}).setdefault(pid, owner)
    return {port: tuple(by_pid.values()) for port, by_pid in found.items()}


def _users(text: str) -> dict[int, str]:
    found = (re.match(r"user=(\d{1,10})\t(\S+)$", line) for line in text.splitlines())
    return {int(match.group(1)): match.group(2) for match in found if match}


def _unprivileged(text: str) -> int | None:
    match = re.search(r"^unprivileged=(\d{1,5})$", text, re.M)
    return int(match.group(1)) if match else None


def _address(raw: str) -> str:
    """Address of `/proc/net/tcp{,6}`: hexadecimal, each 32-bit word in the byte order of the machine."""
    words = [raw[i : i + 8] for i in range(0, len(raw), 8)]
    octets = [int(word[i : i + 2], 16) for word in words for i in (6, 4, 2, 0)]
    if len(octets) == 4:
        return ".".join(str(octet) for octet in octets)
    groups = [f"{octets[i] << 8 | octets[i + 1]:x}" for i in range(0, 16, 2)]
    if not any(octets[:-1]) and octets[-1] in (0, 1):
        return "::1" if octets[-1] else "::"
    return ":".join(groups)


def _endpoint(url: str, answer: str | None, no_answer: str) -> EndpointFacts:
    if answer is None:
        return EndpointFacts(url, why=no_answer)
    match = re.match(r"tool=(\w+) rc=(\d{1,3}) ?(.*)$", answer)
    if not match:
        return EndpointFacts(url, why="the probe's answer could not be read")
    tool, rc, rest = match.group(1), int(match.group(2)), match.group(3).strip()
    hand = re.match(r"hand=(\d{1,5})/(\d{1,5}) ?", rest)
    rest = rest[hand.end() :] if hand else rest
    at = re.match(r"at=(\S+) ?", rest)
    rest = rest[at.end() :] if at else rest
    base = EndpointFacts(
        url=url,
        tool=tool,
        spared=tool == "skip",
        at=at.group(1) if at else None,
        at_hand=(int(hand.group(1)), int(hand.group(2))) if hand else None,
    )
    if tool == "skip":
        return base
    if tool == "none":
        return replace(base, tool=None, why=rest)
    status = re.search(r"\bcode=(\d{3})\b", rest)
    seconds = re.search(r"\bseconds=(\d{1,6}(?:\.\d{1,9})?)", rest)
    code = int(status.group(1)) if status else None
    wget_status = re.search(r"\b(?:error|ERROR|HTTP/1\.[01]) (\d{3})\b", rest) if tool == "wget" else None
    if wget_status:
        code = int(wget_status.group(1))
    # curl may end with an error after the server answered (a refused range, say): the answer counts.
    answered = bool(code) if tool in ("curl", "python") else (rc == 0 or wget_status is not None)
    message = re.sub(r"\bcode=\d{3} seconds=\S+", "", rest).strip() or None
    if answered and code is not None and code >= 500:
        return replace(base, reachable=False, status=code, why=f"the server answers {code}")
    return replace(
        base,
        reachable=answered,
        status=code or None,
        seconds=float(seconds.group(1)) if seconds and answered else None,
        why=None if answered else (message or f"{tool} ended with status {rc}"),
    )
