"""Known failures of engines: recognised in their log, answered with cause and fix. The catalogue is data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CATALOGUE = Path(__file__).parent / "data" / "startup_failures.toml"
SHOWN_LINES = 12
# A frame of a traceback takes two lines, three where it underlines the call.
LINES_ABOVE = 3

# Said by every failed start; the cause is elsewhere.
_GENERIC = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|WorkerProc (?:failed|initialization)"
    r"|Failed core proc|See root cause above|EngineDeadError|cancelled|leaked (?:shared_memory|semaphore)"
)
_ERROR = re.compile(
    r"(?:^|\] |\) )((?:[A-Za-z_][\w.]*)?(?:Error|Exception|SystemExit|KeyboardInterrupt|Fault)\b[^\r\n]*)"
)


@dataclass(frozen=True)
class KnownFailure:
    """One entry of the catalogue: `signs` are regular expressions; so many matching lines make it sure.

    With `under`, a line counts only where that expression matches one of the lines right above it, as the
    call stands above its error in a traceback.
    """

    id: str
    signs: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    reference: str
    at_least: int = 1
    under: re.Pattern[str] | None = None

    def lines_in(self, log: Sequence[str]) -> list[str]:
        """The lines that show it."""
        return [
            line
            for place, line in enumerate(log)
            if any(sign.search(line) for sign in self.signs)
            and (
                self.under is None
                or any(self.under.search(above) for above in log[max(0, place - LINES_ABOVE) : place])
            )
        ]


@dataclass(frozen=True)
class Recognised:
    """A known failure and the log lines that show it."""

    failure: KnownFailure
    lines: tuple[str, ...]


@cache
def catalogue() -> tuple[KnownFailure, ...]:
    """The known failures, most specific first."""
    entries = tomllib.loads(CATALOGUE.read_text("utf-8"))["failure"]
    return tuple(
        KnownFailure(
            **{
                **entry,
                "signs": tuple(re.compile(sign) for sign in entry["signs"]),
                "under": re.compile(entry["under"]) if "under" in entry else None,
            }
        )
        for entry in entries
    )


def recognise(log: Sequence[str]) -> Recognised | None:
    """The first known failure that the log shows; None when it shows none."""
    for failure in catalogue():
        lines = failure.lines_in(log)
        if len(lines) >= failure.at_least:
            return Recognised(failure, tuple(dict.fromkeys(_short(line) for line in lines)))
    return None


def root_cause(log: Sequence[str]) -> str | None:
    """The first error that is not only the report of another: the cause stands far above the last line."""
    for line in log:
        match = _ERROR.search(line)
        if match and not _GENERIC.search(line):
            return _short(match.group(1))
    return None


def telling_lines(log: Sequence[str], count: int = SHOWN_LINES) -> list[str]:
    """The lines worth showing: those of the known failure, then the last ones."""
    known = recognise(log)
    shown = list(known.lines[:3]) if known else []
    cause = root_cause(log)
    if cause and not any(cause in line for line in shown):
        shown.append(cause)
    rest = [_short(line) for line in log if _short(line) not in shown]
    return shown + rest[-max(0, count - len(shown)) :]


def _short(line: str) -> str:
    return line if len(line) <= 300 else line[:297] + "..."
