"""Ctrl-C: detach, say so, and end with 130. pyinfra alone ends with 0 (or hangs behind a busy host)."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def catch_interrupts() -> None:
    """Take over SIGINT for the rest of this process. Jobs on hosts are detached and go on."""
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.stdout.flush()
    print(
        "\n--> Interrupted: detached. What was started on the hosts goes on there."
        "\n    Run the same command again to attach, or look with: rackwright status INVENTORY",
        file=sys.stderr,
        flush=True,
    )
    os._exit(INTERRUPTED)  # nothing here is worth waiting for; a busy connection would block a clean exit
