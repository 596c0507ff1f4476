"""What a check says: one finding a concern, with its cause, its cure and where that knowledge is from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["fail", "warn", "skipped", "ok"]
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "skipped", "ok")


@dataclass(frozen=True)
class Finding:
    """One answer of one check about one host.

    `id` is part of the interface (`driver.version`); `fix` is one command or one sentence;
    `reference` says where the knowledge comes from (a document, an issue, a source file).
    """

    id: str
    status: Status
    summary: str
    observed: str | None = None
    expected: str | None = None
    fix: str | None = None
    reference: str | None = None

    @property
    def group(self) -> str:
        """The part of the id before the dot: what the table is grouped by."""
        return self.id.split(".", 1)[0]

    def to_json(self) -> dict[str, str | None]:
        """The finding as the reports write it."""
        return asdict(self)


def ok(id: str, summary: str, observed: str | None = None, expected: str | None = None) -> Finding:
    """The check passes."""
    return Finding(id, "ok", summary, observed, expected)


def warn(
    id: str,
    summary: str,
    *,
    observed: str | None = None,
    expected: str | None = None,
    fix: str,
    reference: str | None = None,
) -> Finding:
    """It works, but it costs something or may break later; blocks only with `strict`."""
    return Finding(id, "warn", summary, observed, expected, fix, reference)


def fail(
    id: str,
    summary: str,
    *,
    observed: str | None = None,
    expected: str | None = None,
    fix: str,
    reference: str | None = None,
) -> Finding:
    """The deployment would stop here."""
    return Finding(id, "fail", summary, observed, expected, fix, reference)


def skipped(id: str, why: str) -> Finding:
    """It could not be read or does not apply, and why. Never ok by silence."""
    return Finding(id, "skipped", why)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Findings ordered by status (fail, warn, skipped, ok), then by id."""
    return sorted(findings, key=lambda f: (WORST_FIRST.index(f.status), f.id))
