"""What the acceptance tests share: accept.py as a module, and stand-in engines in threads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ACCEPT = ROOT / "tasks" / "onhost" / "accept.py"
ENGINE = ROOT / "tests" / "standin" / "engine.py"
MODEL = "deepseek-v4-flash"
KEY = "sk-standin-0123456789"
FULL = [
    "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}', "--kv-transfer-config", "{}",
]  # fmt: skip


def load(name: str, path: Path) -> ModuleType:
    """A program that is no package, as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


accept = load("rackwright_accept", ACCEPT)
engine = load("rackwright_standin", ENGINE)


class Bench:
    """Starts stand-ins and runs the acceptance against them, impatiently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Any] = []

    def serve(self, faults: Any = None, *flags: str, key: str = "", max_model_len: int = 8192) -> Any:
        """A stand-in with faults, on a free port."""
        argv = ["serve", "/models/m", "--host", "127.0.0.1", "--port", "0", "--served-model-name", MODEL]
        argv += [
            "--max-model-len",
            str(max_model_len),
            "--standin-log",
            str(self.folder / "engine.log"),
            *flags,
        ]
        one = engine.StandIn(argv, env={"VLLM_API_KEY": key})
        one.faults_given = faults
        self.started.append(one.start())
        return one

    def run(self, one: Any, checks: list[str] | None = None, key: str | None = None, **values: Any) -> Any:
        """The result of an acceptance run; limits and waits are a twentieth of the real ones."""
        asked = {"base_url": one.url, "model": MODEL, "patience": 0.05, "checks": checks or [], **values}
        return accept.accept(accept.parameters_from(asked), key)

    def verdict(self, one: Any, check: str, **values: Any) -> tuple[str, str]:
        """Verdict and summary of one check."""
        result = self.run(one, [*values.pop("first", []), check], **values)
        found = next(c for c in result["checks"] if c["id"] == check)
        return found["verdict"], found["summary"]

    def close(self) -> None:
        """Stop every stand-in."""
        for one in self.started:
            one.stop()
