"""The interface of a supervisor, and what both kinds share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.launch import LaunchSpec
from tasks.onhost import service_state
from tasks.paths import TEMPLATES

# A crash loop ends after so many starts that did not get as far as being ready.
LIMIT_STARTS = 5
SHORTEST_START = 600


@dataclass(frozen=True)
class ServiceState:
    """How one mode's service stands.

    `pid` is the engine's; `since` is Unix seconds; `identity` tells one start of it from another;
    `at_boot` says that it starts when the host does.
    """

    installed: bool
    state: str
    running: bool
    pid: int | None = None
    restarts: int | None = None
    since: int | None = None
    identity: str | None = None
    at_boot: bool = False

    @property
    def gave_up(self) -> bool:
        """The supervisor stopped trying to start it."""
        return self.state in service_state.GAVE_UP

    @property
    def settled(self) -> bool:
        """It does not run, and nobody will start it by itself."""
        return self.state in service_state.SETTLED


ABSENT = ServiceState(**service_state.ABSENT)


class Supervisor(Protocol):
    """Renders a LaunchSpec and says which scripts do what. All scripts are POSIX sh and idempotent."""

    name: str

    def files(self, spec: LaunchSpec, others: tuple[str, ...]) -> dict[str, str]:
        """Path -> content of what has to be in place for `spec`; `others` are its rival modes.

        A change of it restarts the engine.
        """
        ...

    def helpers(self) -> dict[str, str]:
        """Path -> content of more files; a change of them restarts nothing."""
        ...

    def reload(self) -> str:
        """Make the supervisor know changed files; starts nothing."""
        ...

    def at_boot(self, name: str, others: tuple[str, ...]) -> str:
        """From now on `name` starts with the host, and `others` do not."""
        ...

    def start(self, name: str) -> str:
        """Start a service by name, after its rivals have stopped; does not wait until it is ready."""
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


def start_seconds(spec: LaunchSpec) -> int:
    """How long a start may take; a crash before that counts as one that did not get ready."""
    return max(SHORTEST_START, spec.ready_seconds)


def template(name: str, **context: Any) -> str:
    """Render a template of `templates/`; a missing variable is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # units and ini files, not HTML
    )
    return environment.get_template(name).render(**context)
