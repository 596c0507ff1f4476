"""Digests of inputs: what makes two runs of a step the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 (hex) of a file on the controller."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
