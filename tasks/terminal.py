"""What a stream can show: how wide it is, how wide a text is there, and whether colours mean anything."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from typing import TextIO

# wider lines are hard to read
WIDEST = 140
# a file or a pipe
USUAL = 100


def shape(stream: TextIO) -> tuple[int, bool]:
    """(columns, colour) of a stream. Colour is for terminals only, and not where NO_COLOR is set."""
    terminal = stream.isatty()
    wanted = os.environ.get("COLUMNS", "")
    usual = int(wanted) if re.fullmatch("[1-9][0-9]{0,3}", wanted) else USUAL
    width = shutil.get_terminal_size((USUAL, 24)).columns if terminal else usual
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return min(width, WIDEST), colour


def columns(text: str) -> int:
    """How many columns a terminal needs for a text: two for a wide character (UAX #11), none for a mark."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def cut(text: str, most: int) -> str:
    """As much of the beginning of a text as so many columns hold."""
    taken = 0
    for place, character in enumerate(text):
        taken += _columns_of(character)
        if taken > most:
            return text[:place]
    return text


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
