"""Reading what programs print: sections, `key=value` lines, numbers, sizes and things that are no value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# rc of a section whose deadline ran out (what coreutils' `timeout` returns).
DEADLINE_RC = 124

_HEADER = re.compile(r"^@@rw:([A-Za-z0-9_.-]+)[ \t]*$")
_RC = re.compile(r"^@@rc:(\d{1,3}|skip)[ \t]*$")
_ANSI = re.compile(r"\x1b?\[[0-9;]{1,8}m")
# What nvidia-smi and friends print in place of a value (any bracketed phrase counts as well).
_NO_VALUE = {"", "-", "n/a", "none", "not supported", "unknown error", "err!", "unknown", "not available"}
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5, "E": 1024**6}


@dataclass(frozen=True)
class Section:
    """What one part of the probe printed.

    `rc` is the exit status of its command, None when the output was cut or never ended.
    `present` is False when the probe never came to it.
    """

    text: str = ""
    rc: int | None = None
    skipped: bool = False
    present: bool = True

    @property
    def timed_out(self) -> bool:
        """Its deadline ran out, or that of the command in it."""
        return self.rc == DEADLINE_RC

    @property
    def why(self) -> str:
        """In words, why there may be nothing to read here."""
        if not self.present:
            return "the probe did not get here"
        if self.skipped:
            return "not tried, because an earlier command of the same tool did not answer"
        if self.timed_out:
            return "no answer within the deadline"
        if self.rc == 127:
            return "command not found"
        first = first_line(self.text)
        if self.rc not in (0, None):
            return f"exit status {self.rc}" + (f": {first}" if first else "")
        return first or "nothing was printed"

    def pairs(self) -> dict[str, str]:
        """`key=value` lines; the first of a key counts, lines of another form are left alone."""
        found: dict[str, str] = {}
        for line in self.text.splitlines():
            key, equals, value = line.partition("=")
            if equals and key and key not in found:
                found[key] = value.strip()
        return found


MISSING = Section(present=False)


def split_sections(text: str) -> dict[str, Section]:
    """The probe's output by section name. Text before the first header is dropped; never raises."""
    bodies: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = bodies.setdefault(header.group(1), [])
        elif current is not None:
            current.append(line)
    return {name: _section(lines) for name, lines in bodies.items()}


def _section(lines: list[str]) -> Section:
    rc: int | None = None
    skip = False
    kept = []
    for line in lines:
        marker = _RC.match(line)
        if not marker:
            kept.append(line)
        elif marker.group(1) == "skip":
            skip = True
        elif rc != DEADLINE_RC:
            rc = int(marker.group(1))
    return Section("\n".join(kept).strip("\n"), rc, skip)


def get_section(sections: Mapping[str, Section], name: str) -> Section:
    """A section, or the one that says that it is missing."""
    return sections.get(name, MISSING)


def plain(text: str) -> str:
    """Text without terminal escapes (`nvidia-smi topo` underlines its header, even into a pipe)."""
    return _ANSI.sub("", text)


def first_line(text: str) -> str:
    """The first line with something on it, shortened."""
    for line in text.splitlines():
        if line.strip():
            return line.strip()[:200]
    return ""


def value_of(raw: str | None) -> str | None:
    """The text of a value, or None where the tool printed that it has none (`[N/A]`, `ERR!`, …)."""
    if raw is None:
        return None
    text = raw.strip()
    if text.casefold() in _NO_VALUE or (text.startswith("[") and text.endswith("]")):
        return None
    if text.startswith(("Requested functionality", "GPU is lost", "GPU requires reset")):
        return None
    return text


def number_of(raw: str | None) -> float | None:
    """The number a value begins with (`97887 MiB`, `412.77 W`, `16x`, `0x28`), or None."""
    text = value_of(raw)
    if text is None:
        return None
    hexadecimal = re.match(r"0[xX][0-9a-fA-F]{1,16}\b", text)
    if hexadecimal:
        return float(int(hexadecimal.group(), 16))
    match = re.match(r"[-+]?\d{1,18}(?:\.\d{1,9})?", text)
    return float(match.group()) if match else None


def int_of(raw: str | None) -> int | None:
    """Like `number_of`, as a whole number, with every digit kept."""
    text = value_of(raw) or ""
    match = re.match(r"[-+]?\d{1,18}(?![\dx])", text)
    if match:
        return int(match.group())
    number = number_of(raw)
    return None if number is None else int(number)


def size_of(raw: str | None, unit: int = 1) -> int | None:
    """Bytes of a size as `df` prints it: `8.6G`, `30G`, `64M`, or a plain count of `unit`s."""
    if raw is None:
        return None
    match = re.fullmatch(r"(-?\d{1,18}(?:[.,]\d{1,3})?)([KMGTPE]?)(i?B)?", raw.strip())
    if not match:
        return None
    number = float(match.group(1).replace(",", "."))
    if match.group(2):
        return int(number * _UNITS[match.group(2)])
    if number == int(number) and "." not in match.group(1):
        return int(match.group(1)) * unit
    return int(number * unit)


def yes(raw: str | None) -> bool | None:
    """`yes` and `no` of the probe as a truth value; anything else is None."""
    return {"yes": True, "no": False}.get((raw or "").strip().lower())


def version_key(version: str | None) -> tuple[int, ...]:
    """Numbers of a dotted version, for comparing; `()` when there are none."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version or ""))


def at_least(version: str | None, floor: str) -> bool | None:
    """Whether a version reaches a floor, compared on the floor's precision; None when unknown."""
    have, want = version_key(version), version_key(floor)
    if not have:
        return None
    width = max(len(have), len(want))
    pad = (0,) * width
    return (have + pad)[:width] >= (want + pad)[:width]
