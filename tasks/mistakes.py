"""Mistakes in recipes and inventories, all at once, each with what is allowed instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError


class Mistakes(Exception):
    """Everything that is wrong with the input, one line each; nothing was touched."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or the whole list of what is allowed."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "allowed: " + ", ".join(names)


def explain(error: ValidationError, where: str | Callable[[str], str], known: Iterable[str]) -> list[str]:
    """A pydantic error as lines `file: key = value: what is allowed`.

    `where` is the file, or says for a top-level key where that key was given. `known` are the keys that are allowed at the top level, for unknown keys there; deeper
    unknown keys are answered with what pydantic knows of their place.
    """
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "(as a whole)"
        place = where if isinstance(where, str) else where(str(item["loc"][0]) if item["loc"] else "")
        if item["type"] == "extra_forbidden":
            allowed = item.get("ctx", {}).get("allowed") or (known if len(item["loc"]) == 1 else ())
            hint = nearest(str(item["loc"][-1]), allowed) if allowed else "remove it or fix its spelling"
            lines.append(f"{place}: {key}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"{place}: {key}: is missing and must be given")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{place}: {key} = {_short(item['input'])}: {message}")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
