"""What was done on a host, from which inputs: one JSON file a step, written last and atomically."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks import __version__
from tasks.remote import write_file


@dataclass(frozen=True)
class Artifact:
    """One file that reached the host."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Receipt:
    """A step is done when its receipt's `digest` matches its inputs and a cheap check agrees.

    `detail` holds what the step found out (environment kind, versions, verdicts); `paths` what
    it made outside `root`, which `uninstall` removes. No secrets.
    """

    step: str
    digest: str
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    paths: tuple[str, ...] = ()
    tool: str = f"rackwright {__version__}"
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def text(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def write(self, folder: str) -> str:
        """The sh that puts the receipt in place."""
        return write_file(f"{folder}/{self.step}.json", self.text())


def parse_receipt(text: str) -> Receipt | None:
    """A receipt from its file; None when it is damaged or of an unknown shape (then the step runs again)."""
    try:
        data = json.loads(text)
        artifacts = tuple(Artifact(**item) for item in data.pop("artifacts", ()))
        return Receipt(artifacts=artifacts, paths=tuple(data.pop("paths", ())), **data)
    except (ValueError, TypeError, AttributeError):
        return None
