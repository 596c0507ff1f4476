"""Recorded outputs for the parsers, and running the probe in the shells of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SHELLS = [argv for argv in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(argv[0])]


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Text of a recorded output by its path under tests/fixtures."""
    return lambda name: (FIXTURES / name).read_text("utf-8")


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    """Each POSIX shell that this machine has."""
    return list(request.param)


@pytest.fixture
def run_probe() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run a probe script in a shell, optionally with folders of tools in front of PATH or as all of it."""

    def run(
        script: str,
        argv: list[str],
        *,
        front: Path | None = None,
        only: Path | None = None,
        limit: float = 60,
    ) -> subprocess.CompletedProcess[bytes]:
        env = dict(os.environ)
        if front is not None:
            env["PATH"] = f"{front}:{env['PATH']}"
        if only is not None:
            env["PATH"] = str(only)
        program = shutil.which(argv[0])
        assert program
        return subprocess.run([program, *argv[1:], "-c", script], capture_output=True, env=env, timeout=limit)

    return run


@pytest.fixture
def tool_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder of links to this machine's programs (as PATH: everything else is missing)."""

    def make(*names: str) -> Path:
        folder = tmp_path / "tools"
        folder.mkdir()
        for name in names:
            found = shutil.which(name)
            if found:
                (folder / name).symlink_to(found)
        return folder

    return make
