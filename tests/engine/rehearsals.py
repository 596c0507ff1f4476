"""A rehearsal in a root of its own: how the engine tests run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 6 * 1024**3


@dataclass(frozen=True)
class Run:
    """What a command did: its output (both streams) and how long it took."""

    output: str
    stdout: str
    seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """A provisioned rehearsal: where it lies, how it is reached, and what the first run printed."""

    root: Path
    url: str
    env: dict[str, str]
    first: Run

    def run(self, *command: str, rc: int = 0, timeout: float = 900) -> Run:
        """Run a command in the repository with this rehearsal's environment."""
        return run(self.env, *command, rc=rc, timeout=timeout)

    def rackwright(self, verb: str, *options: str, rc: int = 0) -> Run:
        """Run a verb on the rehearsal."""
        guard = [sys.executable, "-c", "from tasks.cli import main; main()"]
        return self.run(*guard, verb, "rehearsal", *options, rc=rc)


def run(env: dict[str, str], *command: str, rc: int = 0, timeout: float = 900) -> Run:
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    output = done.stdout + done.stderr
    assert done.returncode == rc, f"{' '.join(command)}: exit code {done.returncode}, not {rc}:\n{output}"
    return Run(output, done.stdout, time.monotonic() - began)


def missing() -> str | None:
    """Why the real engine cannot run here, or None."""
    if " avx2 " not in Path("/proc/cpuinfo").read_text("utf-8").replace("\n", " "):
        return "this CPU has no AVX2"
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines()
        if line.startswith("MemAvailable")
    )
    if available < MEMORY_BYTES:
        return f"{available / 1e9:.1f} GB of memory are free, {MEMORY_BYTES / 1e9:.1f} GB are needed"
    if shutil.which("python3.11") is None:
        return "the engine's lock is for Python 3.11, which is not here"
    return None
