"""`support`: one archive of a host, redacted, ready to be attached to a public issue.

It holds the reports of the controller, and of the host: receipts, states and logs of jobs, the end of the
engine's logs, versions of the engine's packages, and the findings of preflight. Everything goes through
`redact`, with the API key of this host among the known secrets; only then is it written.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyinfra.api import FunctionCommand, operation

from tasks import __version__
from tasks.plan import Plan
from tasks.redact import redact
from tasks.remote import LostHost, quote

LOG_LINES = 2000
LARGEST_FILE = 2_000_000  # bytes of one text; the end is kept
README = """\
rackwright support archive of {host}, {when}
tool: {tool}; recipe: {recipe}; engine: {engine}; mode: {mode}

report/    what the controller's runs found (open report/index.html)
receipts/  what was done on the host, from which inputs
jobs/      states and logs of long work
logs/      the end of the engine's logs, by service
host.json  the host as the probe saw it; findings.json: what preflight says of it
packages.txt  versions in the engine's environment
missing.txt   what could not be read, and why

Secrets, keys, tokens and private addresses were masked ([redacted], private-ip). Look it over
before you publish it: no program knows every secret of yours.
"""


class Support:
    """Collects, masks and packs. The host is only read, and its reports stay as they are."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.missing: list[str] = []

    def write(self) -> Path:
        """Write `support-<host>-<time>.tar.gz` beside the host's reports. Raises LostHost, OSError."""
        plan = self.plan
        folder = plan.record.page.parent
        secrets = self._secrets()
        texts = {**self._of_controller(folder), **self._of_host()}
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        texts["README.txt"] = README.format(
            host=plan.name,
            when=when,
            tool=f"rackwright {__version__}",
            recipe=plan.recipe.name,
            engine=plan.engine_label,
            mode=plan.mode,
        )
        texts["missing.txt"] = "\n".join(self.missing) + "\n" if self.missing else "nothing\n"
        path = folder / f"support-{folder.name}-{when}.tar.gz"
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(packed(path.name.removesuffix(".tar.gz"), masked(texts, secrets)))
        part.replace(path)
        return path

    def _secrets(self) -> list[str]:
        """The API key of this host, so that it is masked wherever it turns up. It is never written."""
        key_file = self.plan.spec().key_file
        if not key_file:
            return []
        answer = self.plan.remote.run(f"cat {quote(key_file)} 2>/dev/null || :")
        return [line for line in answer.stdout.split() if line]

    def _of_controller(self, folder: Path) -> dict[str, str]:
        """The reports of this host; not the archives that lie beside them."""
        found = {}
        for path in sorted(folder.glob("*")) if folder.is_dir() else []:
            if path.suffix in (".json", ".html") and path.is_file():
                found[f"report/{path.name}"] = path.read_text("utf-8", "replace")
        return found

    def _of_host(self) -> dict[str, str]:
        """Receipts, jobs, logs, versions and what the probe saw."""
        plan = self.plan
        receipts = {f"receipts/{name}.json": item.text() for name, item in plan.state.receipts.items()}
        findings = [finding.to_json() for finding in plan.findings]
        return {
            **receipts,
            "host.json": _json(asdict(plan.facts)),
            "findings.json": _json(findings),
            "jobs/states.json": _json({name: asdict(state) for name, state in plan.state.jobs.items()}),
            **self._logs(),
            "packages.txt": self._packages(),
        }

    def _logs(self) -> dict[str, str]:
        """The end of every engine's log and of every job's; what is not there is told in `missing`."""
        plan = self.plan
        scripts = {}
        for mode in plan.recipe.serve.modes:
            spec = plan.spec(mode)
            if plan.services[spec.name].installed:
                scripts[f"logs/{spec.name}.log"] = plan.supervisor.logs(spec.name, spec.log, LOG_LINES, False)
        # listed, not taken from the probe: that needs this version's programs on the host
        listed = plan.remote.run(f"ls -1 {quote(plan.layout.jobs)} 2>/dev/null || :").stdout.split()
        for name in listed:
            log = quote(f"{plan.layout.jobs}/{name}/log")
            scripts[f"jobs/{name}.log"] = f"tail -n {LOG_LINES} {log}"
        found = {}
        for name, script in scripts.items():
            text = self._read(name, script)
            if text:
                found[name] = text
        return found

    def _packages(self) -> str:
        """Names and versions in the engine's environment."""
        program = (
            "from importlib.metadata import distributions as d;"
            "print('\\n'.join(sorted({(x.metadata['Name'] or '?')+'=='+x.version for x in d()})))"
        )
        python = f"{self.plan.layout.env}/bin/python"
        if not self.plan.state.has("env"):
            self.missing.append("packages.txt: there is no engine environment")
            return ""
        return self._read("packages.txt", f"{quote(python)} -c {quote(program)}")

    def _read(self, name: str, script: str) -> str:
        """A command's output, whatever its bytes; empty, and told in `missing`, when it fails."""
        answer = self.plan.remote.run(
            f"{{ {script}; }} 2>&1 | tail -c {LARGEST_FILE} | base64 | tr -d '\\n'", timeout=120
        )
        try:
            text = base64.b64decode(answer.stdout).decode("utf-8", "replace")
        except ValueError:
            text = ""
        if not answer.ok or not text.strip():
            self.missing.append(f"{name}: {answer.stderr.strip()[-200:] or 'nothing there'}")
            return ""
        return text


@operation(is_idempotent=False)
def archive(plan: Plan) -> Any:
    """One host's archive; a dry run writes none."""
    yield FunctionCommand(_write, (plan,), {})


def _write(state: Any, host: Any, plan: Plan) -> bool:
    try:
        path = Support(plan).write()
    except LostHost as lost:
        plan.complain(f"{plan.name} does not answer: {lost}")
        return False
    except OSError as error:
        plan.complain(f"the archive cannot be written: {error}")
        return False
    plan.say(f"support archive: {path} ({path.stat().st_size / 1000:.0f} kB); look it over, then attach it")
    return True


def masked(texts: dict[str, str], secrets: list[str]) -> dict[str, str]:
    """Every text without secrets; JSON keeps its form, and what one file gives away is masked in all.

    All files are masked in one go: a secret that is known by its name in one is found bare in another.
    """
    parsed = {name: _parsed(name, text) for name, text in texts.items()}
    clean = redact(parsed, secrets)
    return {name: value if isinstance(value, str) else _json(value) for name, value in clean.items()}


def _parsed(name: str, text: str) -> Any:
    if name.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def packed(folder: str, texts: dict[str, str]) -> bytes:
    """The texts as one tar.gz with everything below one folder; no owner, no time of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in sorted(texts):
            content = texts[name].encode("utf-8", "replace")[-LARGEST_FILE:]
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str) + "\n"
