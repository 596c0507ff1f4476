"""A service on this machine: the stand-in engine behind scripts that speak as systemd does."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[3]
ONHOST = REPO / "tasks" / "onhost"
STANDIN = REPO / "tests" / "standin" / "engine.py"
NAME = "test-eager"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineBench:
    """One service: its request for `bring_up.py`, its faults, its processes."""

    def __init__(self, folder: Path, name: str = NAME, faults: tuple[str, ...] = ()) -> None:
        self.folder, self.name = folder, name
        self.port = free_port()
        self.faults(*faults)
        argv = [sys.executable, str(STANDIN), "serve", "/models/m", "--served-model-name", "m"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "2048"]
        run = f"STANDIN_FAULT_FILE={self._faults} setsid sh {ONHOST}/start-engine.sh {shlex.join(argv)}"
        pid, log = shlex.quote(str(folder / f"{name}.pid")), shlex.quote(str(folder / f"{name}.log"))
        self.start_script = f"{run} >>{log} 2>&1 </dev/null & echo $! >{pid}"
        state = 'cut -d" " -f3 /proc/$p/stat 2>/dev/null'
        self.stop_script = (
            f"p=$(cat {pid} 2>/dev/null) || exit 0; kill -s KILL -- -$p 2>/dev/null;"
            f" while s=$({state}) && [ $s != Z ]; do sleep 0.02; done; :"
        )
        self.status_script = (
            f"echo unit={name}; echo LoadState=loaded; p=$(cat {pid} 2>/dev/null || echo 0);"
            f" s=$({state} || echo X);"
            ' if [ "$s" = X ] || [ "$s" = Z ]; then echo ActiveState=failed; echo MainPID=0;'
            " else echo ActiveState=active; echo MainPID=$p; fi;"
            " echo ActiveEnterTimestampMonotonic=1; echo UnitFileState=enabled"
        )
        self.log_script = f"tail -n 3000 {log} 2>/dev/null"

    @property
    def _faults(self) -> Path:
        return self.folder / f"{self.name}.faults"

    def faults(self, *names: str) -> None:
        """What is wrong with the engine."""
        self._faults.write_text(json.dumps(list(names)))

    def request(self, **more: Any) -> dict[str, Any]:
        """What `bring_up.py` is asked."""
        return {
            "kind": "systemd",
            "names": [self.name],
            "name": self.name,
            "mode": self.name,
            "before": [self.start_script],
            "start": self.start_script,
            "stop": self.stop_script,
            "status": self.status_script,
            "log": self.log_script,
            "probe": {
                "base_url": f"http://127.0.0.1:{self.port}",
                "model": "m",
                "key_file": None,
                "timeout": 20,
            },
            "ready_seconds": 120,
            "phase_seconds": {},
            "warmup": {"concurrency": [1], "prompt_tokens": [16], "forms": ["chat"], "max_tokens": 2},
            "warmup_seconds": 120,
            "crashes": 1,
            "history": str(self.folder / f"{self.name}.json"),
            "spec": "spec-1",
            **more,
        }

    def bring_up(self, **more: Any) -> tuple[int, dict[str, Any], str]:
        """Exit code, result and progress of a run."""
        done = subprocess.run(
            [sys.executable, str(ONHOST / "bring_up.py")],
            input=json.dumps(self.request(**more)),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def pid(self) -> int:
        """The engine's process, 0 when none was started."""
        path = self.folder / f"{self.name}.pid"
        return int(path.read_text()) if path.exists() else 0

    def alive(self) -> bool:
        """The engine runs."""
        try:
            state = Path(f"/proc/{self.pid()}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        return state != "Z"

    def close(self) -> None:
        """End it."""
        subprocess.run(["sh", "-c", self.stop_script], env={"PATH": os.environ["PATH"]}, timeout=20)
