"""A job goes through the proxy of the session that started it, and leaves its address nowhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

JOB_SH = str(Path(__file__).parents[3] / "tasks" / "onhost" / "job.sh")


def test_the_sessions_proxies_and_certificates_reach_work_that_begins_with_an_empty_environment(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "command.1").write_text("env")
    (folder / "input.1").write_text("")
    session = {
        "https_proxy": 'http://me:it\'s "secret" $HOME@proxy.example:3128',
        "NO_PROXY": "127.0.0.1,localhost\n",  # as secrets that were made by echo end
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
        "SECRET_TOKEN": "abc",
    }
    # `start` in a session, but what it starts gets nothing of it: as a system unit would
    empty = tmp_path / "setsid"
    empty.write_text('#!/bin/sh\nexec env -i PATH="$PATH" "$@"\n')
    empty.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **session}
    script = f"umask 077; sh {JOB_SH} start {folder} k 1"
    started = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=30)
    assert started.stdout.strip() == "started", started.stderr
    subprocess.run(["sh", "-c", f"while [ ! -f {folder}/rc ]; do sleep 0.1; done"], check=True, timeout=30)
    seen = dict(line.split("=", 1) for line in (folder / "result").read_text().splitlines() if "=" in line)
    assert {name: seen.get(name) for name in session} == {
        **session,
        "NO_PROXY": "127.0.0.1,localhost",
        "SECRET_TOKEN": None,
    }
    left = [path.name for path in folder.iterdir() if path.name != "result" and "secret" in path.read_text()]
    assert left == []
