"""This machine in the place of a host."""

from __future__ import annotations

import subprocess

from tasks.remote import Result


class Here:
    """This machine as a host."""

    def run(self, script: str, *, stdin: str | None = None, timeout: float = 60) -> Result:
        """Run it with sh."""
        done = subprocess.run(
            ["sh", "-c", script], input=stdin or "", capture_output=True, text=True, timeout=timeout
        )
        return Result(done.returncode, done.stdout, done.stderr)
