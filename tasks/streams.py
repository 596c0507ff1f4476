"""stdin, stdout and stderr that are closed, broken or full end a run as they end other tools: no traceback.

A stdout that nobody reads any more ends the process with 141, as SIGPIPE ends a program; that signal itself
would also end a run whose SSH connection breaks. A full one is a line on stderr and 1. Closed ones are as if
they led to /dev/null, so that no file or connection gets their number.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from typing import Any, TextIO

BROKEN = 141  # 128 + SIGPIPE, what a shell says of a program that it ended

_over = False
_code: int | None = None


class _Written(io.FileIO):
    """A descriptor that ends the process when nobody reads it, or when what matters cannot be written."""

    def __init__(self, number: int, *, matters: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.matters = matters

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno == errno.EPIPE:
                _leave(BROKEN)
            elif self.matters and _code is None:
                sys.stderr.write(f"rackwright: stdout cannot be written: {error.strerror}\n")
                _leave(1)
            return len(data)  # progress that has no place is no reason to stop


def _leave(code: int) -> None:
    """End here; when the run is over, after what else is registered for its end (reports)."""
    global _code
    if not _over:
        os._exit(code)
    _code = code


def _leave_at_last() -> None:
    if _code is not None:
        os._exit(_code)


def print_last(text: str) -> None:
    """Print a result from a function that `atexit` runs."""
    global _over
    _over = True
    print(text, flush=True)


def guard_streams() -> None:
    """Make this process's three streams safe to use; those that a caller has put in their place are left."""
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:  # closed: the lowest free number is this one
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:
        atexit.register(_leave_at_last)  # the first that is registered is the last that runs
        sys.stdout = _guarded(1, sys.stdout, matters=True)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(2, sys.stderr, matters=False)


def _guarded(number: int, stream: TextIO | None, *, matters: bool) -> TextIO:
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Written(number, matters=matters)),
        encoding=stream.encoding if stream else "utf-8",
        # a terminal that lacks a character is no reason to stop either
        errors=stream.errors if stream and stream.errors != "strict" else "backslashreplace",
        line_buffering=not matters or os.isatty(number),
    )
