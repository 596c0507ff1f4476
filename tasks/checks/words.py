"""Sizes and lists in words, the same in every finding."""

from __future__ import annotations

from collections.abc import Iterable

# pyinfra's own way to run everything as root on a host
SUDO = 'Put "_sudo": True into the host\'s data in the inventory.'
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int | float | None) -> str:
    """Bytes in binary units: `75.4 GiB`."""
    if count is None:
        return "unknown"
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def count(number: int | None) -> str:
    """A count with thousands set apart: `1 664 658`."""
    return "unknown" if number is None else f"{number:,}".replace(",", " ")


def names(items: Iterable[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def plural(number: int, word: str) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{number} {word}" + ("" if number == 1 else "s")
