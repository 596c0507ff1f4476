"""The guard in front of pyinfra: `rackwright VERB INVENTORY [pyinfra options]`.

pyinfra ends with 0 on a misspelt inventory, on a limit that matches nothing and on Ctrl-C. The guard
catches those and every mistake in recipe and inventory before any host is touched; then it hands over.

Exit codes: 0 all good · 1 a host failed or a check says no · 2 wrong usage · 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from tasks import __version__
from tasks.choices import choices_of
from tasks.compare import main as compare
from tasks.mistakes import Mistakes, nearest
from tasks.paths import DEPLOYS, INVENTORIES, ROOT

USAGE = 2
# Verbs that change nothing on a host have nothing to confirm.
READ_ONLY = {"preflight", "status", "accept", "bench", "support", "logs", "manifest", "report"}
HELP = """\
usage: rackwright VERB INVENTORY [options]

Takes a GPU host from what it is to a proven OpenAI-compatible endpoint.

verbs:
{verbs}

without a host:
  compare A B        two benchmarks side by side (files, hosts, or HOST/MODE)
  manifest RECIPE    what hubs publish of its model, compared, kept as a list of hashes
  bundle RECIPE      everything that a host needs, in one folder, for hosts without a network

inventories:
  {inventories}, or a path to one of your own

options (all of pyinfra's work; these are the useful ones):
  -y                 do not ask before changing anything
  --dry              say what would change, change nothing
  --limit HOST       only this host or group (may be repeated)
  --data KEY=VALUE   override a setting, e.g. --data port=8001
  -f, -n LINES       logs: follow; how many lines

exit codes: 0 all good, 1 a host failed or a check says no, 2 wrong usage, 130 interrupted
"""


class Usage(Exception):
    """Wrong usage, with what would have been right."""


def verbs() -> dict[str, str]:
    """Each verb with the first line of its deploy's docstring."""
    found = {}
    for path in sorted(DEPLOYS.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        found[path.stem] = doc.split("  pyinfra")[0].strip()
    return found


def inventories() -> list[str]:
    """Names of the inventories that ship with the project."""
    return sorted(path.stem for path in INVENTORIES.glob("*.py"))


def inventory_path(name: str) -> Path:
    """The file of an inventory: a name of `inventories/`, or a path.

    Raises Usage with the nearest name.
    """
    for path in (Path(name), INVENTORIES / f"{name}.py"):
        if path.suffix == ".py" and path.is_file():
            return path.resolve()
    raise Usage(f"no inventory {name!r}; {nearest(name, inventories())}")


def is_inventory(words: Sequence[str]) -> bool:
    """The first word names an inventory."""
    try:
        return bool(words) and bool(inventory_path(words[0]))
    except Usage:
        return False


def load_hosts(path: Path, options: argparse.Namespace) -> list[Any]:
    """The hosts of an inventory that `--limit` and `--exclude` leave, in order.

    Raises Usage when the file cannot be read, has no hosts, or a limit matches nothing.
    """
    from pyinfra.api.state import State
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory

    state = State()
    state.cwd = str(ROOT)
    try:
        with ctx_state.use(state):
            inventory = make_inventory(
                str(path),
                override_data=override_data(options),
                cwd=str(ROOT),
                group_data_directories=options.group_data,
            )
    except Exception as error:
        cause = error.__cause__ or error
        raise Usage(f"{path.name}: cannot be read: {type(cause).__name__}: {cause}") from error
    hosts = list(inventory)
    if not hosts:
        raise Usage(f"{path.name}: has no hosts")
    names = [host.name for host in hosts] + list(inventory.groups)

    def chosen(words: Sequence[str]) -> list[Any]:
        found = []
        for word in words:
            matches = [
                host for host in hosts if fnmatch(host.name, word) or word in getattr(host, "groups", ())
            ]
            if not matches:
                raise Usage(f"{path.name}: no host or group {word!r}; {nearest(word, names)}")
            found += [host for host in matches if host not in found]
        return found

    split = [word for item in options.limit or [] for word in item.split(",")]
    left = chosen(split) if split else hosts
    excluded = chosen([word for item in options.exclude or [] for word in item.split(",")])
    left = [host for host in left if host not in excluded]
    if not left:
        raise Usage(f"{path.name}: --exclude leaves no host")
    return left


def override_data(options: argparse.Namespace) -> dict[str, Any]:
    """`--data` and the SSH options as pyinfra reads them."""
    from pyinfra_cli.util import parse_cli_arg

    data: dict[str, Any] = {}
    for item in options.data or []:
        key, equals, value = item.partition("=")
        if not equals:
            raise Usage(f"--data {item!r}: must be KEY=VALUE")
        data[key] = parse_cli_arg(value)
    for key in ("ssh_user", "ssh_port", "ssh_key", "ssh_password"):
        value = getattr(options, key)
        if value is not None:
            data[key] = value
    return data


def check_hosts(path: Path, hosts: Sequence[Any]) -> None:
    """Every mistake in settings and recipes of these hosts. Raises Mistakes."""
    lines: list[str] = []
    for host in hosts:
        try:
            choices_of(host, path.name)
        except Mistakes as mistakes:
            lines += [line for line in mistakes.lines if line not in lines]
    if lines:
        raise Mistakes(lines)


def parser() -> argparse.ArgumentParser:
    """The options that the guard itself must understand; all others pass through."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--limit", action="append")
    options.add_argument("--exclude", action="append")
    options.add_argument("--data", action="append")
    options.add_argument("--group-data", action="append")
    options.add_argument("--ssh-user", "--user")
    options.add_argument("--ssh-port", "--port", type=int)
    options.add_argument("--ssh-key", "--key")
    options.add_argument("--ssh-password", "--password")
    return options


def passed_on(verb: str, words: list[str]) -> list[str]:
    """The options for pyinfra: ours translated, `--no-wait` refused, `-y` added where nothing changes."""
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--no-wait":
            raise Usage("--no-wait is refused: with it pyinfra ends with 0 although a host failed")
        if verb == "logs" and word in ("-f", "--follow"):
            out += ["--data", "follow=true"]
        elif verb == "logs" and word in ("-n", "--lines"):
            count = next(rest, "")
            if not count.isdigit():
                raise Usage("-n needs a number of lines")
            out += ["--data", f"lines={count}"]
        else:
            out.append(word)
    if verb in READ_ONLY and not {"-y", "--yes", "--dry"} & set(out):
        out.append("-y")
    return out


def command(argv: Sequence[str]) -> list[str]:
    """The pyinfra command line for ours.

    Raises Usage or Mistakes: then no host has been touched.
    """
    if len(argv) < 2:
        raise Usage("a verb and an inventory are needed: rackwright VERB INVENTORY; see rackwright --help")
    verb, name, *rest = argv
    known = verbs()
    if verb not in known:
        raise Usage(f"no verb {verb!r}; {nearest(verb, known)}")
    if name.startswith("-"):
        raise Usage(f"the inventory comes right after the verb: rackwright {verb} INVENTORY [options]")
    path = inventory_path(name)
    words = passed_on(verb, rest)
    options, _ = parser().parse_known_args(words)
    check_hosts(path, load_hosts(path, options))
    return [*words, str(path), str(DEPLOYS / f"{verb}.py")]


def main() -> NoReturn:
    """Check, then go on as pyinfra: in this process, since starting another takes longer than the checks."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(len(verb) for verb in verbs())
        lines = "\n".join(f"  {verb.ljust(width)}  {doc}" for verb, doc in verbs().items())
        print(HELP.format(verbs=lines, inventories=", ".join(inventories())), end="")
        sys.exit(0 if argv else USAGE)
    if argv[0] == "bundle":
        from tasks.bundling import main as bundle

        sys.exit(bundle(argv[1:]))
    if argv[0] == "manifest" and not is_inventory(argv[1:2]):
        from tasks.model.cli import main as manifest

        sys.exit(manifest(argv[1:]))
    if argv[0] in ("-V", "--version"):
        print(f"rackwright {__version__}")
        sys.exit(0)
    if argv[0] == "compare":
        sys.exit(compare(argv[1:], ROOT / "reports"))
    from gevent import monkey

    monkey.patch_all()  # before anything imports pyinfra, which `command` does
    try:
        words = command(argv)
    except Usage as usage:
        print(f"rackwright: {usage}", file=sys.stderr)
        sys.exit(USAGE)
    except Mistakes as mistakes:
        count = len(mistakes.lines)
        print(f"rackwright: {count} mistake{'s' if count != 1 else ''}; no host was touched", file=sys.stderr)
        for line in mistakes.lines:
            print(f"  {line}", file=sys.stderr)
        sys.exit(USAGE)
    from tasks.run import main as run

    sys.argv = ["pyinfra", "--chdir", str(ROOT), *words]
    run()
    sys.exit(0)
