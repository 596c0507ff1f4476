"""Mistakes in recipes and inventories, all at once, each with what is allowed instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tasks.redact import MASK, names_a_secret, redact

# Where pydantic names a type, the way to write one.
_SYNTAX = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "list_type": """must be a list: KEY = ["a", "b"]; on the command line: --data 'KEY=["a", "b"]'""",
    "dict_type": """must be a table: KEY = {"a": "b"}; on the command line: --data 'KEY={"a": "b"}'""",
}


class Mistakes(Exception):
    """Everything that is wrong with the input, one line each; nothing was touched."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest known word, or the whole list of what is allowed."""
    names = sorted(set(known))
    swapped = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    # two letters in the wrong order are one slip, and two to difflib
    close = sorted(swapped.intersection(names)) or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "allowed: " + ", ".join(names) if names else "remove it"


def explain(error: ValidationError, where: str | Callable[[str], str], model: type[BaseModel]) -> list[str]:
    """An error of `model` as lines `file: key = value: what is allowed`.

    `where` is the file, or says for a top-level key where that key was given.
    """
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "(as a whole)"
        place = where if isinstance(where, str) else where(str(item["loc"][0]) if item["loc"] else "")
        if item["type"] == "extra_forbidden":
            hint = nearest(str(item["loc"][-1]), keys_at(model, item["loc"][:-1]))
            lines.append(f"{place}: {key}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"{place}: {key}: is missing and must be given")
        else:
            syntax = _SYNTAX.get(item["type"])
            message = syntax.replace("KEY", key) if syntax else item["msg"].removeprefix("Value error, ")
            if not item["loc"]:
                lines.append(f"{place}: {message}")
                continue
            lines.append(f"{place}: {key} = {_shown(key, item['input'])}: {message}")
    return lines


def keys_at(model: type[BaseModel], path: Sequence[int | str]) -> Iterable[str]:
    """The keys that a model allows at a place below it (`("engine", "wheel")`)."""
    here: Any = model
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = field.annotation if field else None
        else:  # a list's index or a table's own key
            here = get_args(here)[-1] if get_args(here) else None
        inner = [arg for arg in get_args(here) if isinstance(arg, type) and issubclass(arg, BaseModel)]
        if get_origin(here) in (Union, UnionType) and inner:
            here = inner[0]
    return here.model_fields if isinstance(here, type) and issubclass(here, BaseModel) else ()


def _shown(key: str, value: Any) -> str:
    """A value as it was given, short; a token or a password is not shown back, nor what stands for one."""
    name = key.rsplit(".", 1)[-1]
    kind = name.removesuffix("_env")
    if not str(value).startswith(("/", ".", "~")):  # a path is none; what stands for one may be
        kind = kind.removesuffix("_file")
    secret = names_a_secret(kind)
    text = repr(redact({name: value})[name]) if not secret or isinstance(value, bool) else MASK
    return text if len(text) <= 80 else text[:77] + "..."
