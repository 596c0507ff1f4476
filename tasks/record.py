"""The evidence of one run on one host, kept on the controller and rewritten after every step.

A run that stops anywhere (failure, Ctrl-C, a dead controller) has already left its report. The document is
written at every change; the page when work begins or ends, else every two seconds, and at the end.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tasks import __version__
from tasks.report import write_index, write_report
from tasks.report_view import page_name
from tasks.typed import filled, filled_in

# A page takes ten times as long as its document, and a run with nothing to do has many words and little time.
PAGE_SECONDS = 2

_indexes: set[Path] = set()


def _index_at_end(folder: Path) -> None:
    """The page over all hosts, once when the run is over."""
    if folder not in _indexes:
        _indexes.add(folder)
        atexit.register(_write, write_index, folder)


_told: set[str] = set()


def _write(write: Callable[..., None], *what: Any) -> None:
    """Write a report; where that fails, say so once: work on the hosts is worth more than its report."""
    try:
        write(*what)
    except OSError as error:
        if not _told:
            print(
                f"--> the report cannot be written: {error}"
                + filled("\n    Fix: free space or make it writable, then: rackwright report INVENTORY"),
                file=sys.stderr,
            )
        _told.add(str(error))


class Record:
    """Builds the evidence document (its fields: docs/report.md) and writes it."""

    def __init__(self, folder: Path, verb: str, host: str, fixed: dict[str, Any]) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._steps: dict[str, dict[str, Any]] = {}
        self._writes = False
        self._page_at: float | None = None
        self._page_is_old = False
        self.evidence: dict[str, Any] = {
            "schema": 1,
            "tool": f"rackwright {__version__}",
            "verb": verb,
            "host": host,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "verdict": "running",
            "why": None,
            **fixed,
        }

    @property
    def page(self) -> Path:
        """Where a person looks."""
        return self._folder / page_name(f"{self.evidence['verb']}.json")

    def expect(self, name: str, label: str) -> None:
        """A step of this run, not yet begun."""
        self._steps[name] = {"name": name, "label": label, "status": "pending", "seconds": None}

    def open(self) -> None:
        """From now on every change is written; before (a dry run) nothing is."""
        self._writes = True
        self._write()

    def step(self, name: str, status: str, **more: Any) -> None:
        """How a step stands: running, done, unchanged, failed."""
        self._steps.setdefault(name, {"name": name, "label": name})
        self._steps[name].update(status=status, **more)
        if self.evidence["verdict"] == "running" and all(
            step["status"] in ("done", "unchanged") for step in self._steps.values()
        ):
            self.evidence["verdict"] = "pass"
        self._write(page=status != "unchanged")

    def note(self, **fields: Any) -> None:
        """Set fields of the document."""
        self.evidence.update(fields)
        self._write()

    def finish(self, verdict: str, why: str | None = None) -> None:
        """The run's verdict: pass, warn, fail or refused. Steps that never began are skipped."""
        for step in self._steps.values():
            if step["status"] in ("pending", "running"):
                step["status"] = "skipped" if step["status"] == "pending" else "failed"
        self.evidence.update(verdict=verdict, why=why)
        self._write(page=True)
        if self._writes:
            _index_at_end(self._folder.parent)

    def _write(self, *, page: bool = False) -> None:
        self.evidence["steps"] = list(self._steps.values())
        now = time.monotonic()
        self.evidence["seconds"] = round(now - self._began, 1)
        if not self._writes:
            return
        if self._page_at is None:
            atexit.register(self._last_page)
        page = page or self._page_at is None or now - self._page_at >= PAGE_SECONDS
        self._page_is_old = not page
        if page:
            self._page_at = now
        _write(partial(write_report, page=page), self._folder, filled_in(self.evidence))

    def _last_page(self) -> None:
        if self._page_is_old:
            self._write(page=True)
