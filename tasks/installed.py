"""What is installed for one service: the unit or program as it lies on the host."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.remote import quote

if TYPE_CHECKING:
    from tasks.launch import LaunchSpec
    from tasks.plan import Plan

_LINES = "^([#;] LaunchSpec |ExecStart=|command=|[Uu]ser=)"


@dataclass(frozen=True)
class Installed:
    """`spec` is the beginning of the LaunchSpec's digest, `argv` what the supervisor runs, `uid` as whom.

    What could not be read is None or empty.
    """

    argv: tuple[str, ...] = ()
    spec: str | None = None
    uid: int | None = None

    @property
    def port(self) -> int | None:
        """Where it listens."""
        found = _after(self.argv, "--port")
        return int(found) if found and found.isdigit() else None

    @property
    def bind(self) -> str | None:
        """The address that it listens on."""
        return _after(self.argv, "--host")

    @property
    def model(self) -> str | None:
        """The name by which it serves its model."""
        return _after(self.argv, "--served-model-name")


def _after(argv: Sequence[str], flag: str) -> str | None:
    """The word after the last `flag`."""
    places = [place for place, word in enumerate(argv[:-1]) if word == flag]
    return argv[places[-1] + 1] if places else None


def installed_section(files: tuple[str, ...]) -> str:
    """The sh that prints one line for each unit or program that is there."""
    wanted = [path for path in files if path.endswith(".service") or "/programs/" in path]
    return "\n".join(
        f"f={quote(path)}; if [ -f $f ]; then u=$(sed -n 's/^[Uu]ser=//p' $f | head -n 1);"
        f' echo "installed=$(id -u ${{u:+"$u"}} 2>/dev/null)'
        f" $(grep -E {quote(_LINES)} $f | base64 | tr -d '\\n') {path}\"; fi"
        for path in wanted
    )


def parse_installed(value: str) -> tuple[str, Installed]:
    """Path and content of one such line. Raises ValueError when it is damaged."""
    uid, encoded, path = value.split(" ", 2)
    text = base64.b64decode(encoded).decode("utf-8", "replace")
    spec = re.search(r"^[#;] LaunchSpec ([0-9a-f]+)$", text, re.M)
    command = re.search(r"^(?:ExecStart|command)=(.*)$", text, re.M)
    try:
        argv = tuple(shlex.split(command.group(1))) if command else ()
    except ValueError:  # an open quote
        argv = ()
    return path, Installed(argv, spec.group(1) if spec else None, int(uid) if uid.isdigit() else None)


def installed_of(plan: Plan, name: str) -> Installed | None:
    """What the supervisor of this host starts for a service; from its receipt where the file is not read."""
    paths = (path for path in plan.state.installed if path.endswith((f"/{name}.service", f"/{name}.conf")))
    wanted = ".conf" if plan.supervisor.name == "supervisord" else ".service"
    found = [plan.state.installed[path] for path in paths if path.endswith(wanted)]
    if found:
        return found[0]
    receipt = plan.receipt("service")
    if receipt and receipt.detail.get("name") == name and receipt.detail.get("argv"):
        return Installed(tuple(str(word) for word in receipt.detail["argv"]))
    return None


def has_other_flags(plan: Plan, spec: LaunchSpec) -> bool:
    """A service is installed with other flags than `spec` has, or was started last with others.

    The second where its files were written anew and the start never came (a controller that was killed).
    """
    now, receipt = installed_of(plan, spec.name), plan.receipt("service")
    begun = receipt.detail.get("spec") if receipt and receipt.detail.get("name") == spec.name else None
    return any(one and not spec.digest.startswith(one) for one in (now.spec if now else None, begun))


def differences(plan: Plan, spec: LaunchSpec) -> str | None:
    """What of an installed service is not as the inventory says and clients would meet; None: nothing."""
    now, wanted = installed_of(plan, spec.name), Installed(spec.argv)
    if now is None:
        return None
    pairs = (
        ("port", now.port, wanted.port),
        ("address", now.bind, wanted.bind),
        ("model", now.model, wanted.model),
    )
    odd = [f"{what} {has}, the inventory says {says}" for what, has, says in pairs if has and has != says]
    return "; ".join(odd) or None
