"""What the benchmark tests share: recorded results, stand-in engines, and benchmarks of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tasks.onhost import bench

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "bench"
sys.path.insert(0, str(ROOT / "tests" / "standin"))
import engine  # noqa: E402

MODEL = "deepseek-v4-flash"
CASE = {"input": 32, "output": 4, "concurrency": 2, "prompts": 6}


def recorded(name: str) -> Any:
    """A recorded JSON document."""
    return json.loads((FIXTURES / name).read_text("utf-8"))


def page(name: str) -> Any:
    """A recorded page of /metrics, parsed."""
    return bench.accept.parse_metrics((FIXTURES / name).read_text("utf-8"))


class Rig:
    """Starts stand-ins and benchmarks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Any] = []
        self.log = folder / "engine.log"

    def serve(self, *faults: str, key: str = "") -> Any:
        """A stand-in engine with faults, on a free port."""
        argv = ["serve", "/models/m", "--host", "127.0.0.1", "--port", "0", "--served-model-name", MODEL]
        one = engine.StandIn([*argv, "--standin-log", str(self.log)], env={"VLLM_API_KEY": key})
        one.faults_given = list(faults)
        self.started.append(one.start())
        return one

    def session(self, one: Any, key: str | None = None, **values: Any) -> bench.Session:
        """A benchmark with the built-in client, one small case, one run, impatient."""
        asked = {
            "base_url": one.url,
            "model": MODEL,
            "cases": [CASE],
            "runs": 1,
            "patience": 0.5,
            "limit": 20.0,
            "folder": str(self.folder),
            "log_script": f"cat {self.log}",
            **values,
        }
        return bench.Session(bench.parameters_from(asked), key)

    def run(self, one: Any, key: str | None = None, **values: Any) -> Any:
        """The result of a benchmark."""
        return bench.benchmark(self.session(one, key, **values))

    def reasons(self, *faults: str, **values: Any) -> list[str]:
        """Why the one run against a stand-in with these faults does not count."""
        result = self.run(self.serve(*faults), **values)
        return [why for row in result["cases"] for run in row["runs"] for why in run["why"]]

    def client(self, text: str) -> str:
        """A program in the place of the engine's command; `bench serve` arguments are its own to read."""
        path = self.folder / "vllm"
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
        return str(path)

    def close(self) -> None:
        """Stop every stand-in."""
        for one in self.started:
            one.stop()
