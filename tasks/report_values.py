"""Values of evidence of any shape, as what they should be: nothing here raises."""

from __future__ import annotations

import json
from typing import Any

# What the page shows of one text at most; the JSON beside it has everything.
LINE_CHARS = 600


def dict_of(value: Any) -> dict[str, Any]:
    """The object, or an empty one."""
    return value if isinstance(value, dict) else {}


def items_of(value: Any, text_key: str) -> list[dict[str, Any]]:
    """A list of objects; a bare text among them becomes an object with that text."""
    if not isinstance(value, list):
        return []
    return [
        item if isinstance(item, dict) else {text_key: item}
        for item in value
        if item is not None and item != ""
    ]


def number_of(value: Any) -> int | float | None:
    """The number; a truth value is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def text_of(value: Any, limit: int = LINE_CHARS) -> str:
    """A text of at most `limit` characters; what is not a text is shown as JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]} … [{len(text) - limit} characters] … {text[-tail:]}"
