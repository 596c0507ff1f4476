"""Which hosts failed in this run, and why in one line: what the end of a run over several hosts names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tasks.redact import clean

_why: dict[str, str] = {}


def host_failed(host: str, why: str) -> None:
    """Remember the first reason of a host."""
    lines = clean(why).splitlines()
    _why.setdefault(host, lines[0] if lines else "failed")


def failed_lines(failed: Iterable[str], count: int, why: Mapping[str, str] = _why) -> list[str]:
    """What to say at the end about hosts that failed, of so many; nothing about a single host."""
    names = sorted(failed)
    if count < 2 or not names:
        return []
    told = [(name, why.get(name, "the reason is above").removeprefix(f"{name}: ")) for name in names]
    return [f"{len(names)} of {count} hosts failed:", *(f"  {name}: {text}" for name, text in told)]
