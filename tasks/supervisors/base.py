"""The interface of a supervisor, and what both kinds share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.launch import LaunchSpec
from tasks.paths import TEMPLATES

# A crash loop ends after this many starts in this time; each try costs minutes of loading.
LIMIT_STARTS = 5
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class ServiceState:
    """How one mode's service stands.

    `pid` is the engine's; `since` is Unix seconds; `identity` tells one start of it from another.
    """

    installed: bool
    state: str
    running: bool
    pid: int | None = None
    restarts: int | None = None
    since: int | None = None
    identity: str | None = None

    @property
    def gave_up(self) -> bool:
        """The supervisor stopped trying to start it."""
        return self.state in ("failed", "FATAL")


ABSENT = ServiceState(installed=False, state="absent", running=False)


class Supervisor(Protocol):
    """Renders a LaunchSpec and says which scripts do what. All scripts are POSIX sh and idempotent."""

    name: str

    def files(self, spec: LaunchSpec, others: tuple[str, ...]) -> dict[str, str]:
        """Path -> content of what has to be in place for `spec`; `others` are its rival modes."""
        ...

    def install(self, spec: LaunchSpec) -> str:
        """Make the supervisor know the files and start `spec` at boot, not its rivals; starts nothing."""
        ...

    def start(self, name: str) -> str:
        """Start a service by name; does not wait until it is ready."""
        ...

    def stop(self, name: str) -> str:
        """Stop a service with its whole process group; done when it is gone."""
        ...

    def status(self, names: tuple[str, ...]) -> str:
        """Print what `parse_status` reads. Read-only."""
        ...

    def parse_status(self, text: str, names: tuple[str, ...]) -> dict[str, ServiceState]:
        """State by name; a service that is not there is `ABSENT`."""
        ...

    def logs(self, spec_name: str, log: str, lines: int, follow: bool) -> str:
        """Print the last lines of the engine's log."""
        ...

    def remove(self, names: tuple[str, ...]) -> str:
        """Stop the services and take away what `files` put outside the root."""
        ...


def template(name: str, **context: Any) -> str:
    """Render a template of `templates/`; a missing variable is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # units and ini files, not HTML
    )
    return environment.get_template(name).render(**context)
