"""Large files between controller and host: in pieces, so that memory stays flat and a broken line costs one.

Each piece travels as base64 through a command's standard input or output. That works with every connector,
with sudo, and without an SFTP server. A file gets its name only when its SHA-256 is right.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from pathlib import Path

from pyinfra.connectors.local import LocalConnector

from tasks.digest import digest_of_file
from tasks.jobs import SHOW_SECONDS, in_units
from tasks.remote import LostHost, Remote, quote

PIECE = 6 << 20
ATTEMPTS = 5


class NotShipped(Exception):
    """A file did not arrive; the message says which and why."""


def is_local(remote: Remote) -> bool:
    """The host is this very machine, so files are copied and not sent."""
    return isinstance(remote.connector, LocalConnector)


def _patiently(remote: Remote, script: str, stdin: str | None, timeout: float) -> str:
    """Run one piece's command, connecting anew when the line breaks. Raises NotShipped, LostHost."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            done = remote.run(script, stdin=stdin, timeout=timeout)
        except LostHost:
            if attempt == ATTEMPTS:
                raise
            time.sleep(2 * attempt)
            try:
                remote.reconnect()
            except LostHost:
                continue
            continue
        if not done.ok:
            raise NotShipped(done.stderr.strip() or f"exit code {done.rc}")
        return done.stdout
    raise LostHost("the host cannot be reached")


class Progress:
    """Says how far a file is, every few seconds."""

    def __init__(self, say: Callable[[str], None], what: str, total: int) -> None:
        self._say, self._what, self._total = say, what, total
        self._shown = time.monotonic()

    def at(self, done: int) -> None:
        """`done` bytes are over."""
        if time.monotonic() - self._shown >= SHOW_SECONDS:
            self._shown = time.monotonic()
            share = 100 * done // max(1, self._total)
            total = in_units(self._total, "bytes")
            self._say(f"{self._what}: {share} %, {in_units(done, 'bytes')} of {total}")


def send_file(remote: Remote, local: Path, dest: str, sha256: str, say: Callable[[str], None]) -> bool:
    """Have `local` at `dest` on the host, with this SHA-256. Returns whether anything was sent.

    Raises NotShipped or LostHost. An interrupted transfer of these bytes goes on where it was.
    """
    size = local.stat().st_size
    part = f"{dest}.{sha256[:12]}.part"
    folder = quote(dest.rsplit("/", 1)[0])
    look = (
        f"mkdir -p {folder} || exit 1; if [ -f {quote(dest)} ]; then echo whole $(sha256sum {quote(dest)});"
        f" elif [ -f {quote(part)} ]; then echo part $(wc -c <{quote(part)}); else echo none; fi"
    )
    words = _patiently(remote, look, None, 1800).split()
    if words[0] == "whole" and words[1] == sha256:
        return False
    done = int(words[1]) if words[0] == "part" and int(words[1]) <= size else 0
    settle = (
        f'got=$(sha256sum {quote(part)} | cut -d" " -f1); [ "$got" = {sha256} ] ||'
        f' {{ rm -f {quote(part)}; echo "it arrived with SHA-256 $got" >&2; exit 1; }};'
        f" chmod 644 {quote(part)} && mv -f {quote(part)} {quote(dest)}"
        # of what had the name before
        f" && rm -f {quote(dest)}.part {quote(dest)}.????????????.part"
    )
    for begin in [done, 0] if done else [0]:
        if is_local(remote):
            _patiently(remote, f"cp -f {quote(str(local))} {quote(part)}", None, 3600)
        else:
            _send_pieces(remote, local, part, begin, Progress(say, f"sending {local.name}", size))
        try:
            _patiently(remote, settle, None, 1800)
            return True
        except NotShipped as failure:
            # a beginning that was there already may have been cut or changed: once more without it
            if begin == 0:
                raise NotShipped(f"{local}: expected SHA-256 {sha256}, {failure}") from failure
    return True


def _send_pieces(remote: Remote, local: Path, part: str, done: int, progress: Progress) -> None:
    """Send what comes after the first `done` bytes. Raises NotShipped or LostHost."""
    with local.open("rb") as stream:
        while True:
            stream.seek(done)
            piece = stream.read(PIECE)
            if done and not piece:
                return
            # cut to where this piece begins: the same piece may come twice after a broken line
            script = f"touch {quote(part)} && truncate -s {done} {quote(part)} && base64 -d >>{quote(part)}"
            _patiently(remote, script, base64.encodebytes(piece).decode(), 900)
            done += len(piece)
            progress.at(done)
            if not piece:
                return


def fetch_file(
    remote: Remote, path: str, local: Path, sha256: str, size: int, say: Callable[[str], None]
) -> bool:
    """Have a file of the host at `local` on the controller, with this SHA-256. Returns whether it came.

    Raises NotShipped or LostHost.
    """
    if local.is_file() and digest_of_file(local) == sha256:
        return False
    local.parent.mkdir(parents=True, exist_ok=True)
    part = local.with_name(f"{local.name}.{sha256[:12]}.part")
    progress = Progress(say, f"fetching {local.name}", size)
    done = min(part.stat().st_size, size) // PIECE * PIECE if part.is_file() else 0
    with part.open("r+b" if part.is_file() else "w+b") as stream:
        stream.truncate(done)
        stream.seek(done)
        while done < size:
            script = (
                f"dd if={quote(path)} bs={PIECE} skip={done // PIECE} count=1 2>/dev/null | base64 -w 65536"
            )
            piece = base64.b64decode(_patiently(remote, script, None, 900))
            if not piece:
                raise NotShipped(f"{path} ends after {done} of {size} bytes")
            stream.write(piece)
            done += len(piece)
            progress.at(done)
    if (got := digest_of_file(part)) != sha256:
        part.unlink()
        raise NotShipped(f"{path}: expected SHA-256 {sha256}, it arrived with {got}")
    part.replace(local)
    return True
