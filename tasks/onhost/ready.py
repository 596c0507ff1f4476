"""One look at whether an engine is up: ready means that a token came out, not that /health says 200.

    ready.py < request.json      {"base_url", "model", "key_file", "timeout", "pid", "container"}

`pid` is the engine's, as its supervisor names it, `container` the name of the container that it runs in, if
it does: an answer from another process on the port is no answer.
Prints one JSON document: {"ready": bool, "stage": str, "why": str, "seconds": float}; stage is `closed`
(nothing listens), `stranger` (another process has the port), `key` (the key is refused), `model` (another
model), `error` or `token`. Exit code 0 whether ready or not; the caller decides. Standard library,
Python >= 3.8.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Iterator, Union
from urllib.parse import urlsplit

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


def call(url: str, body: Any, key: str | None, timeout: float) -> Any:
    """One request; the parsed JSON answer."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    # A proxy of the environment must not see what goes to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer)


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Whose port is it? Then the model list, then one token."""
    began = time.monotonic()
    found = _look(request)
    found["seconds"] = round(time.monotonic() - began, 3)
    return found


def _look(request: dict[str, Any]) -> dict[str, Any]:
    base, model, timeout = request["base_url"], request["model"], float(request.get("timeout", 60))
    port = urlsplit(base).port or 80
    if request.get("pid"):
        host = urlsplit(base).hostname
        others = strangers(port, int(request["pid"]), request.get("container"), host)
        if others:
            return _no("stranger", "port %d is taken by %s" % (port, " and ".join(others)))
    key = None
    if request.get("key_file"):
        try:
            with open(request["key_file"], encoding="utf-8") as file:
                key = file.read().strip()
        except OSError as error:
            return _no("key", "cannot read the key file: %s" % error)
    stage = "error"
    try:
        names = [item.get("id") for item in call(base + "/v1/models", None, key, min(timeout, 10))["data"]]
        if model not in names:
            return _no("model", "it serves %s, not %s" % (", ".join(map(str, names)), model))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 1,
            "temperature": 0,
        }
        answer = call(base + "/v1/chat/completions", body, key, timeout)
        if answer["usage"]["completion_tokens"] < 1:
            return _no(stage, "the completion has no token")
        return {"ready": True, "stage": "token", "why": ""}
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode("utf-8", "replace").strip()
        if error.code == 401:
            return _no("key", "it refuses the key of %s" % request.get("key_file"))
        return _no(stage, "HTTP %d: %s" % (error.code, detail))
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return _no("closed", "nothing listens on port %d" % port)
        return _no(stage, str(error.reason))
    except (OSError, ValueError, KeyError, TypeError, IndexError, http.client.HTTPException) as error:
        return _no(stage, "%s: %s" % (type(error).__name__, error))


def _no(stage: str, why: str) -> dict[str, Any]:
    return {"ready": False, "stage": stage, "why": why}


# --- whose port ---


def strangers(port: int, pid: int, container: str | None = None, host: str | None = None) -> list[str]:
    """Processes that listen on the port and are not `pid` or of its making; [] where that cannot be seen.

    One of ours beside them clears nobody: with SO_REUSEPORT, which vLLM sets, the kernel deals connections
    out to all of them. With `host`, only sockets count that take connections to it. Without the right to
    look into other users' processes (most containers), the socket's user must do.
    """
    sockets = listening(port, host)
    held = holders(set(sockets))
    others = [owner for owner in held if not is_within(owner, pid)]
    unseen = set(sockets).difference(*held.values())
    if (others or unseen) and container:
        inside = container_pid(container)
        if inside:
            others = [owner for owner in others if not is_within(owner, inside)]
            unseen = set()
    told = ["process %d (%s)" % (owner, command_of(owner)) for owner in others]
    try:
        user = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return told
    users = {sockets[name] for name in unseen} - {user}
    return told + ["a process of user %d" % other for other in sorted(users)]


def listening(port: int, host: str | None = None) -> dict[str, int]:
    """Sockets that listen on a TCP port, with the user of each (Linux, proc(5)).

    With `host`, those on one of its addresses or on all addresses.
    """
    asked = addresses(host) if host else set()
    anywhere = not asked or any(address.is_unspecified for address in asked)
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        for row in rows:
            address, _, number = row[1].rpartition(":")
            if row[3] != "0A" or int(number, 16) != port:
                continue
            at = bound(address)
            if anywhere or at.is_unspecified or at in asked:
                found["socket:[%s]" % row[9]] = int(row[7])
    return found


def addresses(host: str) -> set[Address]:
    """What a name or an address means here; empty where nobody knows it."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return set()
    return {plain(str(one[4][0]).split("%")[0]) for one in found}


def bound(words: str) -> Address:
    """An address of /proc/net/tcp: words of 32 bits in the machine's byte order, in hexadecimal."""
    each = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    return plain(b"".join(one.to_bytes(4, sys.byteorder) for one in each))


def plain(address: str | bytes) -> Address:
    """An address, and that of IPv4 where it is mapped into IPv6."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def holders(sockets: set[str]) -> dict[int, set[str]]:
    """Processes that have some of these sockets open, as far as they may be looked into, and which."""
    if not sockets:
        return {}
    found = {int(pid): sockets.intersection(_open(pid)) for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: held for pid, held in found.items() if held}


def _open(pid: str) -> Iterator[str]:
    folder = "/proc/%s/fd" % pid
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink("%s/%s" % (folder, name))
            except OSError:  # closed in the meantime
                continue
    except OSError:  # ended, or another user's
        return


def is_within(pid: int, root: int) -> bool:
    """Whether `pid` is `root`, descends from it, or is of the process group that it leads."""
    try:
        if os.getpgid(pid) == root:
            return True
    except OSError:
        pass
    for _ in range(64):
        if pid == root:
            return True
        try:
            with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def container_pid(name: str) -> int | None:
    """The first process of a Docker container, by the host's numbers."""
    argv = ["docker", "inspect", "--format", "{{.State.Pid}}", name]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        return int(done.stdout) or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def command_of(pid: int) -> str:
    """The first two words of a process's command line, as the probe's; later ones may hold secrets."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return "?"
    return " ".join(word for word in words[:2] if word) or "?"


if __name__ == "__main__":
    print(json.dumps(look(json.load(sys.stdin))))
