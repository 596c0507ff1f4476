"""A served site on a test host with faults of its own for each mode, and a client that asks all along."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import Kind, Machine
from sites import FAULTS_ON_HOST, Site

ROOT = "/opt/rackwright"
FAST_FAULTS = "/srv/faults-fast.json"
# The same speed for both modes, far above what this machine's own noise changes.
PACE = "slow=0.003"
MORE = f"""
[serve.modes.optimized.env]
STANDIN_FAULT_FILE = "{FAST_FAULTS}"
[serve.warmup]
concurrency = [1, 2]
prompt_tokens = [16, 128]
forms = ["chat", "reasoning", "tool"]
max_tokens = 4
[serve.promote]
concurrency = [1, 2]
prompt_tokens = 64
output_tokens = 32
requests = 4
margin = 0.7
"""


# systemd waits 10 s before it starts a crashed engine again (tests/unit/serving/test_units.py): not here.
SOON = "/usr/local/lib/systemd/system/rackwright-.service.d/soon.conf"


class Served:
    """One host with the stand-in served in its eager mode."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.site = Site(folder, [machine])
        self.site.prepare(machine)
        if machine.kind == "systemd":
            machine.write(SOON, "[Service]\nRestartSec=1s\n")
        # a machine may be slow: what is waited for in vain has a deadline of its own (`fast_deadline`)
        self.site.recipe(ready_seconds=180)
        self._recipe = folder / "standin.toml"
        self._text = self._recipe.read_text() + MORE
        self.calm()

    def calm(self) -> None:
        """Both modes as they should be."""
        self.recipe(self._text)
        self.eager_faults(PACE)
        self.fast_faults(PACE)

    def recipe(self, text: str | None = None) -> str:
        """The recipe; with a text it is another one until `calm`."""
        if text is not None:
            self._recipe.write_text(text)
        return self._recipe.read_text()

    def fast_deadline(self, seconds: int) -> None:
        """What the optimized mode may take until its first token."""
        modes = "[serve.modes.optimized.flags]"
        own = f"[serve.modes.optimized]\nready_seconds = {seconds}\n{modes}"
        self.recipe(self.recipe().replace(modes, own))

    def starts(self, mode: str) -> list[str]:
        """What tells the last starts of a mode from each other, by the host's own record."""
        path = f"{ROOT}/run/starts/rackwright-{mode}.json"
        entries = json.loads(self.machine.run(f"cat {path} 2>/dev/null || echo '[]'").stdout)
        return [f"{entry['identity']} {entry['at']}" for entry in entries]

    def serves(self, mode: str) -> bool:
        """This mode is up, answers, and is the one that starts with the host."""
        return self.mode() == mode and self.at_boot() == mode and self.answers()

    def eager_faults(self, *names: str) -> None:
        """Faults of the eager mode."""
        self.machine.write(FAULTS_ON_HOST, json.dumps(list(names)))

    def fast_faults(self, *names: str) -> None:
        """Faults of the optimized mode."""
        self.machine.write(FAST_FAULTS, json.dumps(list(names)))

    def run(self, verb: str, *options: str, rc: int = 0) -> str:
        """A verb, to its end."""
        return self.site.run(verb, *options, *(() if verb in ("status", "logs") else ("-y",)), rc=rc)

    def report(self, verb: str) -> dict[str, Any]:
        """The evidence of a verb's last run."""
        return self.site.report(self.machine.name, verb)

    def key(self) -> str:
        """The API key, as the host has it."""
        return self.machine.run(f"cat {ROOT}/run/api-key").stdout.strip()

    def engines(self) -> list[list[str]]:
        """Command lines of the engines that run."""
        lines = self.machine.run("pgrep -fa '[v]llm serve' || :").stdout.splitlines()
        return [line.split()[1:] for line in lines]

    def pids(self) -> list[str]:
        """Process ids of the engines that run."""
        return self.machine.run("pgrep -f '[v]llm serve' || :").stdout.split()

    def mode(self) -> str:
        """The mode that serves on the clients' port, "" when none does."""
        port = str(self.site.data["port"])
        found = [words for words in self.engines() if words[words.index("--port") + 1] == port]
        if not found:
            return ""
        return "eager" if "--enforce-eager" in found[0] else "optimized"

    def at_boot(self) -> str:
        """The mode that starts with the host."""
        if self.machine.kind == "systemd":
            listing = self.machine.run("systemctl list-unit-files 'rackwright-*' --no-legend").stdout
            names = [line.split()[0] for line in listing.splitlines() if line.split()[1] == "enabled"]
            return ",".join(name.removeprefix("rackwright-").removesuffix(".service") for name in names)
        return self.machine.run(f"cat {ROOT}/run/boot").stdout.strip().removeprefix("rackwright-")

    def answers(self, key: str | None = None) -> bool:
        """A right answer comes out on the clients' port."""
        status, text = ask(int(self.site.data["port"]), key or self.key())
        return status == 200 and text == "PD_OK"


def ask(port: int, key: str, timeout: float = 5) -> tuple[int, str]:
    """Status (0 when nobody answers) and text of one question with a known answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    body = {
        "model": "rehearsal",
        "messages": [{"role": "user", "content": "只输出：PD_OK"}],
        "max_tokens": 16,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status != 200:
            return answer.status, raw.decode("utf-8", "replace")
        return 200, json.loads(raw)["choices"][0]["message"]["content"] or ""
    except (OSError, http.client.HTTPException, ValueError):
        return 0, ""
    finally:
        connection.close()


def on_trial(served: Served) -> bool:
    """Eager is away, and the faster mode runs where no client is."""
    return bool(served.engines()) and served.mode() == ""


_HOSTS: dict[str, Served] = {}


def provisioned(request: pytest.FixtureRequest, kind: Kind, folder: Path) -> Served:
    """A host of a kind with the stand-in served: provisioned once, by whichever module comes first."""
    if kind not in _HOSTS:
        machine = Machine(kind, "gpu1")
        request.config.add_cleanup(machine.stop)
        served = Served(machine.start(), folder)
        served.run("site")
        _HOSTS[kind] = served
    return _HOSTS[kind]


class Client:
    """Asks all the time; nobody answering is borne, a wrong answer is not."""

    def __init__(self, served: Served) -> None:
        self._port, self._key = int(served.site.data["port"]), served.key()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.right, self.refused, self.wrong = 0, 0, []  # type: int, int, list[str]

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.wait(0.1):
            status, text = ask(self._port, self._key)
            if status == 0:
                self.refused += 1
            elif (status, text) == (200, "PD_OK"):
                self.right += 1
            else:
                self.wrong.append(f"{status}: {text}")


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Raises AssertionError when it does not come true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.3)
    raise AssertionError(f"it did not come within {seconds:.0f} s")


def unchanged(output: str) -> bool:
    """pyinfra's grand total: operations, successes, errors, no changes."""
    total = next(line for line in output.splitlines() if "Grand total" in line).split()[2:]
    return total[1] == "-" and total[2] == "-"
