"""LaunchSpec as a supervisord program: for containers and hosts without systemd or root."""

from __future__ import annotations

import re
import shlex

from tasks.launch import LaunchSpec
from tasks.onhost import service_state
from tasks.paths import ONHOST
from tasks.remote import quote
from tasks.settings import Layout
from tasks.supervisors.base import LIMIT_STARTS, ServiceState, start_seconds, template

SV = (ONHOST / "sv.py").read_text("utf-8")


class Supervisord:
    """supervisord (the PyPI package, in the tools env) with one program a mode and its own log rotation."""

    name = "supervisord"

    def __init__(self, layout: Layout, instance: str) -> None:
        self._layout = layout
        self._instance = instance
        self._python = quote(layout.tools + "/bin/python")
        self._sv = f"{self._python} {quote(layout.run + '/sv.py')} {quote(layout.run)}"

    def files(self, spec: LaunchSpec, others: tuple[str, ...]) -> dict[str, str]:
        """supervisord's own configuration and the program of `spec`."""
        env = {
            **dict(spec.env),
            **spec.wrapper_env,
            "RACKWRIGHT_GROUP": f"{self._layout.tmp}/engine/{spec.name}.group",
        }
        if spec.key_file:
            env["RACKWRIGHT_KEY_FILE"] = spec.key_file
        if spec.user:
            env["USER"] = spec.user
        # by env(1), for supervisor reads `environment=` without escapes: no value can hold both quotes
        command = ("/usr/bin/env", *(f"{name}={value}" for name, value in sorted(env.items())), *spec.command)
        run = self._layout.run
        return {
            f"{run}/supervisord.conf": template(
                "supervisor/supervisord.conf.j2", run=run, logs=self._layout.logs, instance=self._instance
            ),
            f"{run}/programs/{spec.name}.conf": template(
                "supervisor/program.conf.j2",
                spec=spec,
                command=" ".join(map(_word, command)),
                start_seconds=start_seconds(spec),
                limit_starts=LIMIT_STARTS,
            ),
        }

    def helpers(self) -> dict[str, str]:
        """What speaks to supervisord, and what a boot command calls: `sh <root>/run/up.sh`."""
        run = self._layout.run
        line = f"exec {self._sv} up"
        return {
            f"{run}/sv.py": SV,
            f"{run}/up.sh": f"#!/bin/sh\n# Starts the mode that was proven last.\n{line}\n",
        }

    def reload(self) -> str:
        """Start supervisord where it does not run yet, and make it read the files."""
        return f"{self._sv} reload"

    def at_boot(self, name: str, others: tuple[str, ...]) -> str:
        """`sv.py up` starts this program from now on."""
        return f"{self._sv} boot {quote(name)}"

    def start(self, name: str) -> str:
        """Start a program, after its rivals of this instance have stopped."""
        return f"{self._sv} start {quote(name)}"

    def stop(self, name: str) -> str:
        """Stop a program with its whole process group."""
        return f"{self._sv} stop {quote(name)}"

    def status(self, names: tuple[str, ...]) -> str:
        """Print JSON about the programs; prints `[]` where there is no supervisord."""
        return f"if [ -x {self._python} ]; then {self._sv} status; else echo '[]'; fi"

    def parse_status(self, text: str, names: tuple[str, ...]) -> dict[str, ServiceState]:
        """States from `sv.py status`."""
        found = service_state.parse_supervisord(text, names)
        return {name: ServiceState(**fields) for name, fields in found.items()}

    def logs(self, spec_name: str, log: str, lines: int, follow: bool) -> str:
        """The engine's log file."""
        return f"tail -n {lines} {'-F ' if follow else ''}{quote(log)}"

    def remove(self, names: tuple[str, ...]) -> str:
        """Stop everything and supervisord itself, where a service was ever installed.

        Its files lie under the root.
        """
        helper = quote(self._layout.run + "/sv.py")
        return f"if [ -x {self._python} ] && [ -f {helper} ]; then {self._sv} shutdown; fi"


def _word(word: str) -> str:
    """One word of `command=`, quoted.

    supervisor expands `%(name)s`, and cuts what follows a space and ; or # even inside quotes
    (inline_comment_prefixes of its UnhosedConfigParser): quotes that end and begin there keep them apart.
    """
    return re.sub(r"(\s)([;#])", r"\1''\2", shlex.quote(word)).replace("%", "%%")
