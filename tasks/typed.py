"""The command line as the person typed it: a command that we suggest acts on the same hosts and ports.

Texts name it `rackwright VERB INVENTORY`; `filled` puts in the rest, where a text leaves for a person or a
report.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.paths import INVENTORIES

_SUGGESTED = re.compile(r"\brackwright ([a-z]+) INVENTORY\b")
_VARIABLE = re.compile(r"\bRACKWRIGHT_[A-Z0-9_]+\b")
_SECRET = re.compile(r"PASSWORD|TOKEN|SECRET|KEY", re.IGNORECASE)
# settings of one verb only, given by its own options
_NOT_REPEATED = ("follow", "lines")
# pyinfra's options that say which hosts, and how to get there
_REPEATED = (
    *("limit", "exclude", "group_data", "ssh_user", "ssh_port", "ssh_key", "ssh_password_prompt"),
    *("sudo", "sudo_user", "use_sudo_password", "same_sudo_password", "use_sudo_login", "su_user"),
    *("dzdo", "dzdo_user"),
)


@dataclass(frozen=True)
class Typed:
    """An inventory as typed, the options to repeat (each with its value), and variables to set before."""

    inventory: str = "INVENTORY"
    options: tuple[tuple[str, ...], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def filled(self, text: str) -> str:
        """A text with each `rackwright VERB INVENTORY` as it must be typed here."""

        def suggestion(match: re.Match[str]) -> str:
            rest = match.string[match.end() :].split("\n", 1)[0]
            words = ["rackwright", match[1], _quoted(self.inventory)]
            words += [shlex.join(option) for option in self.options if not _says(rest, option)]
            before = [f"{name}={shlex.quote(value)}" for name, value in self.variables]
            return " ".join([*before, *words])

        return _SUGGESTED.sub(suggestion, text)


def typed_from(
    inventory: str, options: Mapping[str, Any], inventory_text: str, environ: Mapping[str, str]
) -> Typed:
    """What must be repeated of a command line, from pyinfra's reading of its options.

    No password is: it is asked for. Variables count where the inventory names them.
    """
    repeated: list[tuple[str, ...]] = []
    for item in options.get("data") or ():
        key = item.split("=", 1)[0]
        if "password" not in key and key not in _NOT_REPEATED:
            repeated.append(("--data", item))
    for key in _REPEATED:
        value, flag = options.get(key), "--" + key.replace("_", "-")
        if value is True:
            repeated.append((flag,))
        elif isinstance(value, (list, tuple)):
            repeated += [(flag, str(one)) for one in value]
        elif value:
            repeated.append((flag, str(value)))
    if options.get("ssh_password") and ("--ssh-password-prompt",) not in repeated:
        repeated.append(("--ssh-password-prompt",))
    names = sorted(set(_VARIABLE.findall(inventory_text)))
    variables = tuple(
        (name, environ[name]) for name in names if environ.get(name) and not _SECRET.search(name)
    )
    return Typed(inventory, tuple(repeated), variables)


_typed: Typed | None = None


def remember(typed: Typed) -> None:
    """This process's command line, once the guard has read it."""
    global _typed
    _typed = typed


def filled(text: str) -> str:
    """A text for the person, with the commands that it suggests as they must be typed here."""
    return (_typed or _of_pyinfra()).filled(text)


def filled_in(value: Any) -> Any:
    """The same for every text of a document."""
    if isinstance(value, str):
        return filled(value) if "INVENTORY" in value else value
    if isinstance(value, dict):
        return {key: filled_in(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled_in(one) for one in value]
    return value


def _of_pyinfra() -> Typed:
    """A run of plain pyinfra: only the inventory is known."""
    if Path(sys.argv[0]).name != "pyinfra":
        return Typed()
    found = (word for word in sys.argv[1:] if word.endswith(".py") and Path(word).is_file())
    path = next(found, None)
    if path is None:
        return Typed()
    ours = Path(path).resolve().parent == INVENTORIES
    return Typed(Path(path).stem if ours else path, variables=_set_here(path))


def _set_here(path: str) -> tuple[tuple[str, str], ...]:
    return typed_from("", {}, Path(path).read_text("utf-8", "replace"), os.environ).variables


def _quoted(inventory: str) -> str:
    return inventory if inventory == "INVENTORY" else shlex.quote(inventory)


def _says(rest: str, option: tuple[str, ...]) -> bool:
    """The suggestion names this option itself; of `--data`, this key."""
    if option[0] == "--data":
        return f"--data {option[1].split('=', 1)[0]}=" in rest
    return f"{option[0]} " in f"{rest} "
