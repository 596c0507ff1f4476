"""Why a host cannot be connected to, told apart, with the one command that comes next.

pyinfra's own words are `Could not connect ([Errno None] …)`; a key file that is missing ends its whole run.
"""

from __future__ import annotations

import errno
import logging
import shlex
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from paramiko import (
    AuthenticationException,
    BadHostKeyException,
    PasswordRequiredException,
    SSHException,
)
from pyinfra import logger
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.host import Host

from tasks.failed import host_failed
from tasks.redact import clean

_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


@dataclass(frozen=True)
class Unreachable:
    """What happened, and the command that comes next."""

    what: str
    fix: str

    @property
    def lines(self) -> list[str]:
        """For the terminal."""
        return [f"cannot be reached: {self.what}", f"Fix: {self.fix}"]


# by host name: why it could not be connected to in this run
reasons: dict[str, Unreachable] = {}


def ssh_line(name: str, data: Mapping[str, Any]) -> str:
    """The ssh command that does by hand what the inventory asks for."""
    words = ["ssh"]
    if data.get("ssh_port"):
        words += ["-p", str(data["ssh_port"])]
    if data.get("ssh_key"):
        words += ["-i", str(data["ssh_key"])]
    if data.get("ssh_config_file"):
        words += ["-F", str(data["ssh_config_file"])]
    if data.get("ssh_known_hosts_file"):
        words += ["-o", f"UserKnownHostsFile={data['ssh_known_hosts_file']}"]
    where = str(data.get("ssh_hostname") or name.removeprefix("@ssh/"))
    words.append(f"{data['ssh_user']}@{where}" if data.get("ssh_user") else where)
    return " ".join(word if word.startswith("~") else shlex.quote(word) for word in words)


def by_hand(name: str, data: Mapping[str, Any]) -> str:
    """What to try before the next run."""
    if name.startswith("@") and not name.startswith("@ssh/"):
        return "look at the host, then run again"
    return f"{ssh_line(name, data)}   (until it works by hand, nothing else can)"


def unreachable(name: str, data: Mapping[str, Any], error: BaseException) -> Unreachable:
    """Why a connection failed, from the exception and what caused it."""
    if name.startswith("@") and not name.startswith("@ssh/"):
        kind, _, what = name[1:].partition("/")
        fix = f"{kind} ps" if kind in ("docker", "podman") else f"see that {what or kind} is there"
        return Unreachable(_told(error), fix)
    line = ssh_line(name, data)
    where, port = data.get("ssh_hostname") or name, data.get("ssh_port") or 22
    hand = by_hand(name, data)
    causes = list(_causes(error))
    numbers = {cause.errno for cause in causes if isinstance(cause, OSError)}
    text = _told(error)
    if any(isinstance(cause, BadHostKeyException) for cause in causes) or "SSH host key error" in text:
        entry = where if port == 22 else f"[{where}]:{port}"
        known = data.get("ssh_known_hosts_file")
        file = f" -f {known}" if known else ""
        return Unreachable(
            f"its host key is not the one that is known for {entry}: another machine, or reinstalled",
            f"if you expected that: ssh-keygen -R {shlex.quote(str(entry))}{file}",
        )
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return Unreachable(f"the name {where} is not known (DNS)", hand)
    if "No such private key file" in text:
        key = data.get("ssh_key") or "its key"
        return Unreachable(
            f"the key file {key} is not there", f"correct ssh_key in the inventory, then: {line}"
        )
    if any(isinstance(cause, PasswordRequiredException) for cause in causes):
        key = str(data.get("ssh_key") or "KEY")
        return Unreachable(
            f"the key {data.get('ssh_key')} has a passphrase, and nobody could be asked for it",
            f"ssh-add {key if key.startswith('~') else shlex.quote(key)}, or --ssh-key-password",
        )
    if "rivate key" in text:
        return Unreachable(f"the key {data.get('ssh_key')} cannot be used: {text}", hand)
    if "No authentication methods" in text:
        return Unreachable(
            f"{where} port {port} answers, but there is no key and no password to try",
            f"set ssh_key in the inventory, or add --ssh-password-prompt; by hand: {line}",
        )
    if any(isinstance(cause, AuthenticationException) for cause in causes):
        user = f"user {data['ssh_user']}" if data.get("ssh_user") else "this user"
        given = "password" if data.get("ssh_password") else "key"
        return Unreachable(f"{where} port {port} answers, but refuses {user}: wrong {given}", hand)
    if errno.ECONNREFUSED in numbers:
        return Unreachable(f"connection refused: nothing listens at {where} port {port}", hand)
    if any(isinstance(cause, TimeoutError) for cause in causes) or errno.ETIMEDOUT in numbers:
        return Unreachable(f"timeout: no answer from {where} port {port} (off, or a firewall)", hand)
    if numbers & _NO_ROUTE:
        return Unreachable(f"no route to {where}", hand)
    if any(word in text.lower() for word in ("banner", "no existing session", "eof error")):
        return Unreachable(
            f"{where} port {port} answers, but not as an SSH server would: {text}; is it the right port?",
            hand,
        )
    return Unreachable(text, hand)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that led to it; paramiko keeps one for each address of a name."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, one.__context__]
        tries = getattr(one, "errors", None)
        left += list(tries.values()) if isinstance(tries, dict) else []


def _told(error: BaseException) -> str:
    # the other side's banner may be in it, and nobody has logged in yet
    text = " ".join(clean(str(error.args[0] if error.args else error)).split())
    return text or type(error).__name__


def explain_connections() -> None:
    """From now on a host that cannot be connected to says why, and never ends the run of the others."""
    connect = Host.connect
    if hasattr(connect, "__wrapped__"):
        return
    logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its threads print tracebacks

    @wraps(connect)
    def explained(
        host: Any, reason: str | None = None, show_errors: bool = True, raise_exceptions: bool = False
    ) -> None:
        try:
            connect(host, reason, show_errors=False, raise_exceptions=True)
        except (PyinfraError, SSHException, OSError, EOFError, ValueError, TypeError) as error:
            why = unreachable(str(host.name), host.data.dict(), error)
            reasons[str(host.name)] = why
            if show_errors:  # and not while reconnecting
                host_failed(str(host.name), why.lines[0])
                for line in why.lines:
                    host.log_styled(line, fg="red", log_func=logger.error)
            if raise_exceptions:
                raise error if isinstance(error, ConnectError) else ConnectError(why.what) from error

    Host.connect = explained  # type: ignore[method-assign, assignment]
