"""What a stream can show: how wide it is, and whether colours mean anything there."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

# wider lines are hard to read
WIDEST = 140
# a file or a pipe
USUAL = 100


def shape(stream: TextIO) -> tuple[int, bool]:
    """(columns, colour) of a stream. Colour is for terminals only, and not where NO_COLOR is set."""
    terminal = stream.isatty()
    wanted = os.environ.get("COLUMNS", "")
    usual = int(wanted) if wanted.isdigit() and int(wanted) else USUAL
    width = shutil.get_terminal_size((USUAL, 24)).columns if terminal else usual
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return min(width, WIDEST), colour
