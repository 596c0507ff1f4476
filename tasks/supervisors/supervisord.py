"""LaunchSpec as a supervisord program: for containers and hosts without systemd or root."""

from __future__ import annotations

import json
import shlex

from tasks.launch import LaunchSpec
from tasks.remote import quote
from tasks.settings import Layout
from tasks.supervisors.base import ABSENT, LIMIT_SECONDS, LIMIT_STARTS, ServiceState, template


class Supervisord:
    """supervisord (the PyPI package, in the tools env) with one program a mode and its own log rotation."""

    name = "supervisord"

    def __init__(self, layout: Layout, lib: str, instance: str) -> None:
        self._layout = layout
        self._instance = instance
        self._sv = f"{quote(layout.tools + '/bin/python')} {quote(lib + '/sv.py')} {quote(layout.run)}"

    def files(self, spec: LaunchSpec, others: tuple[str, ...]) -> dict[str, str]:
        """supervisord's own configuration and the program of `spec`."""
        env = dict(spec.env)
        if spec.key_file:
            env["RACKWRIGHT_KEY_FILE"] = spec.key_file
        if spec.unset:
            env["RACKWRIGHT_UNSET"] = " ".join(spec.unset)
        if spec.user:
            env["USER"] = spec.user
        run = self._layout.run
        return {
            f"{run}/supervisord.conf": template(
                "supervisor/supervisord.conf.j2", run=run, logs=self._layout.logs, instance=self._instance
            ),
            f"{run}/programs/{spec.name}.conf": template(
                "supervisor/program.conf.j2",
                spec=spec,
                command=" ".join(_percent(shlex.quote(word)) for word in spec.command),
                environment=",".join(f"{name}={_value(value)}" for name, value in sorted(env.items())),
                limit_seconds=LIMIT_SECONDS,
                limit_starts=LIMIT_STARTS,
            ),
        }

    def install(self, spec: LaunchSpec) -> str:
        """Start supervisord where it does not run yet, and make it read the files; starts no engine."""
        return f"{self._sv} install {quote(spec.name)}"

    def start(self, name: str) -> str:
        """Start a program, after its rivals of this instance have stopped."""
        return f"{self._sv} start {quote(name)}"

    def stop(self, name: str) -> str:
        """Stop a program with its whole process group."""
        return f"{self._sv} stop {quote(name)}"

    def status(self, names: tuple[str, ...]) -> str:
        """Print JSON about the programs; prints `[]` where supervisord does not run."""
        python = quote(self._layout.tools + "/bin/python")
        return f"if [ -x {python} ]; then {self._sv} status; else echo '[]'; fi"

    def parse_status(self, text: str, names: tuple[str, ...]) -> dict[str, ServiceState]:
        """States from `sv.py status`."""
        try:
            programs = {item["name"]: item for item in json.loads(text.strip() or "[]")}
        except (ValueError, TypeError, KeyError):
            programs = {}
        return {name: _state(programs[name]) if name in programs else ABSENT for name in names}

    def logs(self, spec_name: str, log: str, lines: int, follow: bool) -> str:
        """The engine's log file."""
        return f"tail -n {lines} {'-F ' if follow else ''}{quote(log)}"

    def remove(self, names: tuple[str, ...]) -> str:
        """Stop everything and supervisord itself; its files lie under the root."""
        python = quote(self._layout.tools + "/bin/python")
        return f"if [ -x {python} ]; then {self._sv} shutdown; fi"


def _state(item: dict[str, object]) -> ServiceState:
    state = str(item.get("state", "UNKNOWN"))
    pid, restarts, since = item.get("pid"), item.get("restarts"), item.get("start")
    running = state in ("STARTING", "RUNNING")
    return ServiceState(
        installed=True,
        state=state,
        running=running,
        pid=pid if isinstance(pid, int) and pid else None,
        restarts=restarts if isinstance(restarts, int) else None,
        since=since if running and isinstance(since, int) and since else None,
        identity=f"{pid}@{since}" if running and pid else None,
    )


def _percent(text: str) -> str:
    """supervisor expands `%(name)s` in every value."""
    return text.replace("%", "%%")


def _value(text: str) -> str:
    """A value of `environment=`: double-quoted, read by supervisor with shlex."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_percent(escaped)}"'
