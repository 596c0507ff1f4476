"""The real engine, once a session: `make rehearse` in a root that is thrown away.

Needs AVX2, 6 GB of free memory and the package registries; RACKWRIGHT_REQUIRE_ENGINE=1 turns a skip into
a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from socket import create_server

import pytest
from rehearsals import REPOSITORY, Rehearsal, missing, run


@pytest.fixture(scope="session")
def rehearsal() -> Iterator[Rehearsal]:
    """`make rehearse`, for real. The service runs until the session ends; then all of it is removed."""
    why = missing()
    if why:
        if os.environ.get("RACKWRIGHT_REQUIRE_ENGINE") == "1":
            pytest.fail(f"the real engine cannot run here: {why}", pytrace=False)
        pytest.skip(f"the real engine cannot run here: {why}")
    # a service user must be able to read it, so not below a private temporary folder
    base = Path("/opt" if os.geteuid() == 0 else Path.home())
    root = Path(tempfile.mkdtemp(prefix="rackwright-test-", dir=base))
    root.chmod(0o755)
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {
        **os.environ,
        "RACKWRIGHT_REHEARSAL_ROOT": str(root),
        "RACKWRIGHT_REHEARSAL_PORT": str(port),
        "PYINFRA_PROGRESS": "off",
    }
    made: Rehearsal | None = None
    try:
        first = run(env, "make", "--no-print-directory", "rehearse", timeout=1800)
        made = Rehearsal(root, f"http://127.0.0.1:{port}", env, first)
        yield made
    finally:
        guard = [sys.executable, "-c", "from tasks.cli import main; main()"]
        subprocess.run([*guard, "uninstall", "rehearsal", "-y"], cwd=REPOSITORY, env=env, timeout=300)
        shutil.rmtree(root, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the real engine, so that `-m "not engine"` leaves it out."""
    for item in items:
        if "rehearsal" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
