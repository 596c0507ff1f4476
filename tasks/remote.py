"""One host, seen from the controller: commands with deadlines, small files, steady SSH.

pyinfra's connectors run the commands. What is added: the exit code (pyinfra keeps only good or bad),
a deadline that names the command, `TCP_NODELAY` and keepalive (a command on a LAN took 50 ms before,
6 ms after), a bound on opening a channel (paramiko waits an hour), and reconnecting.
"""

from __future__ import annotations

import base64
import io
import socket
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gevent
from paramiko import SSHException
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import StringCommand

KEEPALIVE_SECONDS = 15
CHANNEL_SECONDS = 30
_RC = "@@rackwright-rc="
# What connectors raise when their connection is gone.
_BROKEN = (OSError, EOFError, SSHException, AttributeError, AssertionError)


class LostHost(Exception):
    """The connection to the host is gone; the work there may go on."""


@dataclass(frozen=True)
class Result:
    """What a command did: its exit code and output."""

    rc: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """The command ended with 0."""
        return self.rc == 0


class Remote:
    """Commands on one pyinfra host, counted."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._arguments = {
            key: value
            for key in CONNECTOR_ARGUMENT_KEYS
            if key.startswith(("_sudo", "_su_", "_use_su", "_doas", "_dzdo"))
            and (value := host.data.get(key)) is not None
        }
        self.commands = 0

    @property
    def connector(self) -> Any:
        """pyinfra's connector of the host."""
        return self._host.connector

    def run(self, script: str, *, stdin: str | None = None, timeout: float = 60) -> Result:
        """Run a POSIX-sh script on the host.

        `timeout` in seconds. Output must be text: scripts send foreign bytes as base64.
        Raises LostHost when the connection breaks or the host does not answer in time.
        """
        self.commands += 1
        wrapped = f"( {script}\n)\nprintf '\\n{_RC}%s\\n' $?"
        arguments: dict[str, Any] = {**self._arguments, "_timeout": timeout}
        if stdin is not None:
            arguments["_stdin"] = stdin
        try:
            with gevent.Timeout(timeout + CHANNEL_SECONDS, exception=TimeoutError):
                _, output = self._host.run_shell_command(
                    StringCommand("sh", "-c", _quote(wrapped)), **arguments
                )
        except TimeoutError as error:
            raise LostHost(f"no answer within {timeout:.0f} s") from error
        except _BROKEN as error:
            raise LostHost(str(error) or type(error).__name__) from error
        lines = output.stdout_lines
        while lines and not lines[-1].startswith(_RC):
            lines.pop()
        if not lines:
            # The shell itself did not run: a wrong sudo password, a killed session, a missing shell.
            raise LostHost(output.stderr.strip() or "the connection closed before the command ended")
        rc = int(lines.pop()[len(_RC) :])
        if lines and lines[-1] == "":
            lines.pop()
        return Result(rc, "\n".join(lines), output.stderr)

    def stream(self, script: str) -> None:
        """Run a script that prints until it is interrupted, showing each line as it comes.

        Raises LostHost when the connection breaks.
        """
        try:
            whole, _ = self._host.run_shell_command(
                StringCommand("sh", "-c", _quote(script)), print_output=True, **self._arguments
            )
        except _BROKEN as error:
            raise LostHost(str(error) or type(error).__name__) from error
        if not whole:
            raise LostHost("the connection closed, or what it showed was ended there")

    def reconnect(self) -> None:
        """Connect anew. Raises LostHost while the host cannot be reached."""
        try:
            self._host.disconnect()
            self._host.connect(show_errors=False)
        except Exception as error:
            raise LostHost(str(error)) from error
        if not self._host.connected:
            raise LostHost("cannot connect")
        steady(self._host)


def steady(host: Any) -> None:
    """Make an SSH connection fast and its death noticeable; other connectors have none."""
    client = getattr(host.connector, "client", None)
    transport = client.get_transport() if client is not None and hasattr(client, "get_transport") else None
    if transport is None:
        return
    transport.set_keepalive(KEEPALIVE_SECONDS)
    transport.channel_timeout = CHANNEL_SECONDS
    if isinstance(transport.sock, socket.socket):  # a ProxyJump hop is a channel, not a socket
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def tar_base64(files: Mapping[str, tuple[bytes, int]]) -> str:
    """Files (`path -> content, mode`) as one base64 tar, byte for byte the same each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for path in sorted(files):
            content, mode = files[path]
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
    return base64.encodebytes(buffer.getvalue()).decode()


def write_file(path: str, content: str | bytes, mode: str = "644") -> str:
    """A line of sh that puts a small file in place atomically. Not for secrets: it shows in argv.

    Two controllers may do so at once: each has a name of its own for the unfinished file.
    """
    raw = content.encode() if isinstance(content, str) else content
    encoded = base64.b64encode(raw).decode()
    quoted = _quote(path)
    new = _quote(path + ".new") + ".$$"
    return (
        f"mkdir -p {_quote(path.rsplit('/', 1)[0])} && printf %s {_quote(encoded)} | base64 -d > {new}"
        f" && chmod {mode} {new} && mv -f {new} {quoted}"
    )


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


quote = _quote
