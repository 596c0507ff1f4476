"""Ctrl-C: detach, say so, and end with 130. pyinfra alone ends with 0 (or hangs behind a busy host)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tasks.paths import DEPLOYS
from tasks.typed import filled

INTERRUPTED = 130
# Verbs that start nothing on a host, so that there is nothing to attach to.
_ONLY_LOOK = {"status", "report", "support"}


def catch_interrupts() -> None:
    """Take over SIGINT for the rest of this process. Jobs on hosts are detached and go on."""
    signal.signal(signal.SIGINT, _leave)


def farewell(verb: str) -> str:
    """What Ctrl-C says: whoever followed a log wanted it to end, and knows."""
    if verb == "logs":
        return ""
    if verb in _ONLY_LOOK:
        return "\n--> Interrupted. Nothing was changed on any host."
    return filled(
        "\n--> Interrupted: detached. What was started on the hosts goes on there."
        "\n    Run the same command again to attach, or look with: rackwright status INVENTORY"
    )


def _leave(number: int, frame: FrameType | None) -> None:
    sys.stdout.flush()
    last = Path(sys.argv[-1])
    text = farewell(last.stem if last.parent == DEPLOYS else "")
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)  # nothing here is worth waiting for; a busy connection would block a clean exit
