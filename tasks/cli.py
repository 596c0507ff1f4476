"""The guard in front of pyinfra: `rackwright VERB INVENTORY [pyinfra options]`.

pyinfra ends with 0 on a misspelt inventory, on a limit that matches nothing and on Ctrl-C. The guard
catches those and every mistake in recipe and inventory before any host is touched; then it hands over.

Exit codes: 0 all good · 1 a host failed or a check says no · 2 wrong usage · 130 interrupted.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from tasks import __version__
from tasks.choices import choices_of, origin
from tasks.compare import main as compare
from tasks.interrupt import INTERRUPTED
from tasks.mistakes import Mistakes, nearest
from tasks.paths import DEPLOYS, INVENTORIES, ROOT, host_folder
from tasks.redact import redact
from tasks.streams import guard_streams
from tasks.typed import remember, typed_from
from tasks.writable import no_folder

USAGE = 2
# Verbs that change nothing on a host have nothing to confirm.
READ_ONLY = {"preflight", "status", "accept", "bench", "support", "logs", "manifest", "report"}
# Verbs that leave no file on this machine.
NO_REPORT = {"status", "logs"}
_LOG_LINES = re.compile(r"(?:-n|--lines(?==|$))=?(.*)")
# short options that stand together, as in -fn 5 and -vf; what follows -n is its value
_SHORT = re.compile(r"-([fvy]*)(n.*)?")
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
    if "/" in name or name.endswith(".py"):
        kind = "a folder, not a file" if Path(name).is_dir() else "not a .py file"
        raise Usage(f"inventory {name}: {kind if Path(name).exists() else 'no such file'}")
    raise Usage(f"no inventory {name!r}; {nearest(name, inventories())}")


def is_inventory(words: Sequence[str]) -> bool:
    """The first word names an inventory."""
    try:
        return bool(words) and bool(inventory_path(words[0]))
    except Usage:
        return False


def load_hosts(path: Path, options: Mapping[str, Any]) -> list[Any]:
    """The hosts of an inventory that `--limit` and `--exclude` leave, in order.

    Raises Usage when the file cannot be read, has no hosts, or a limit matches nothing.
    """
    from pyinfra.api.state import State
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory

    data = override_data(options)
    state = State()
    state.cwd = str(ROOT)
    try:
        with ctx_state.use(state):
            inventory = make_inventory(
                str(path), override_data=data, cwd=str(ROOT), group_data_directories=options["group_data"]
            )
    except (Exception, SystemExit) as error:
        raise Usage(unreadable(path, error)) from error
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

    split = [word for item in options["limit"] for word in item.split(",")]
    left = chosen(split) if split else hosts
    excluded = chosen([word for item in options["exclude"] for word in item.split(",")])
    left = [host for host in left if host not in excluded]
    if not left:
        raise Usage(f"{path.name}: --exclude leaves no host")
    return left


def unreadable(path: Path, error: BaseException) -> str:
    """What an inventory (or the data of its groups) raised, with file and line, in one line."""
    cause = getattr(error, "exception", None) or error.__cause__ or error
    if isinstance(cause, SyntaxError):
        file, line, what = Path(cause.filename or path), cause.lineno, cause.msg
    else:
        file, line, what = Path(getattr(error, "filename", path)), None, " ".join(str(cause).split())
        for frame in traceback.extract_tb(cause.__traceback__):
            where = Path(frame.filename)
            if where in (path, file) or where.parent.name == "group_data":
                file, line = where, frame.lineno
    place = file.name if line is None else f"{file.name}, line {line}"
    told = f"{type(cause).__name__}{f': {what}' if what else ''}"
    if line is None and type(cause) in (TypeError, ValueError, IndexError):  # pyinfra took it apart
        told = f"each host must be 'NAME' or ('NAME', {{'key': value}}), and no name empty ({told})"
    return f"{place}: cannot be read: {told}"


def override_data(options: Mapping[str, Any]) -> dict[str, Any]:
    """`--data` and the SSH options as pyinfra reads them. Raises Usage."""
    from pyinfra_cli.util import parse_cli_arg

    data: dict[str, Any] = {}
    for item in options["data"]:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise Usage(redact(f"--data {item!r}: must be KEY=VALUE, e.g. --data port=8001"))
        data[key] = parse_cli_arg(value)
    for key in ("ssh_user", "ssh_port", "ssh_key", "ssh_password"):
        if options[key] is not None:
            data[key] = options[key]
    return data


def check_hosts(path: Path, hosts: Sequence[Any], *, writes: bool = False) -> None:
    """Every mistake in settings and recipes of these hosts; with `writes`, reports must be writable.

    Raises Mistakes.
    """
    lines: list[str] = []
    for host in hosts:
        try:
            settings, _ = choices_of(host, path.name)
        except Mistakes as mistakes:
            lines += [line for line in mistakes.lines if line not in lines]
            continue
        why = unwritable(host_folder(settings.reports, str(host.name))) if writes else None
        if why and not any(why in line for line in lines):
            place = "" if origin(host, "reports") == f"host {host.name}" else f"{origin(host, 'reports')}: "
            lines.append(f"{path.name}: {place}reports = {settings.reports!r}: {why}")
    if lines:
        raise Mistakes(lines)


def unwritable(folder: Path) -> str | None:
    """Why no report can be written in a folder, and the fix; None when one can."""
    found = no_folder(folder)
    if found is None:
        return None
    there, why = found
    return (
        f"{why}; make it writable (sudo chown -R $USER {there}) or give another folder: --data reports=FOLDER"
    )


def understood(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """pyinfra's own reading of its options.

    Raises Usage on an option that it does not know, a bad value or setting, and words that are no option.
    """
    import click
    from pyinfra_cli.cli import cli as pyinfra

    try:
        context = pyinfra.make_context("rackwright", ["INVENTORY", "DEPLOY", *words])
    except click.NoSuchOption as error:
        known = [
            word for option in pyinfra.params if isinstance(option, click.Option) for word in option.opts
        ]
        hint = nearest(error.option_name, [*known, *(("-f", "-n") if verb == "logs" else ())])
        raise Usage(
            f"no option {error.option_name}; {hint if 'mean' in hint else 'see rackwright --help'}"
        ) from error
    except click.ClickException as error:
        raise Usage(error.format_message()) from error
    except click.exceptions.Exit as done:  # --support, --version
        sys.exit(done.exit_code)
    extra = context.params["operations"][1:]
    if extra:
        raise Usage(
            f"unexpected {' '.join(map(repr, extra))}: one inventory after the verb, then options only; "
            "several hosts are one inventory"
        )
    override_data(context.params)
    return dict(context.params)


def log_options(words: Sequence[str]) -> list[str]:
    """The options of `logs` as settings. Raises Usage."""
    out: list[str] = []
    rest = iter([part for word in words for part in _apart(word)])
    for word in rest:
        lines = _LOG_LINES.fullmatch(word)
        if word in ("-f", "--follow"):
            out += ["--data", "follow=true"]
        elif lines:
            count = lines[1] or next(rest, "")
            if not re.fullmatch("[0-9]{1,6}", count) or not int(count):
                raise Usage(f"{word} needs a number of lines, e.g. -n 100")
            out += ["--data", f"lines={int(count)}"]
        else:
            out.append(word)
    return out


def _apart(word: str) -> list[str]:
    """Short options that stand together, one by one."""
    found = _SHORT.fullmatch(word) if len(word) > 2 else None
    if found is None:
        return [word]
    return [f"-{letter}" for letter in found[1]] + ([f"-{found[2]}"] if found[2] else [])


def plain(words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Options as pyinfra can take them.

    `--limit a,b` becomes two: pyinfra takes it for one name, finds none, and ends with 0. A recipe's path
    is made whole: the run does not happen in the folder where it was typed.
    """
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--limit", "--exclude", "--data"):
            next(rest, "")
        elif not word.startswith(("--limit=", "--exclude=", "--data=")):
            out.append(word)
    for item in options["data"]:
        key, _, value = item.partition("=")
        whole = key == "recipe" and value.endswith(".toml")
        out += ["--data", f"recipe={Path(value).absolute()}" if whole else item]
    for key in ("limit", "exclude"):
        for name in (name for item in options[key] for name in item.split(",")):
            out += [f"--{key}", name]
    return out


def without_yes(words: Sequence[str]) -> list[str]:
    """Options without `-y`: with it pyinfra leaves out what a dry run is for."""
    kept = [word for word in words if word not in ("-y", "--yes")]
    return [word.replace("y", "") if re.fullmatch(r"-[vy]+", word) else word for word in kept]


def command(argv: Sequence[str], *, terminal: bool = True) -> list[str]:
    """The pyinfra command line for ours; without a `terminal` nobody can confirm.

    Raises Usage or Mistakes: then no host has been touched.
    """
    if not argv or argv[0].startswith("-"):
        raise Usage("a verb and an inventory are needed: rackwright VERB INVENTORY; see rackwright --help")
    verb = argv[0]
    known = verbs()
    if verb not in known:
        raise Usage(f"no verb {verb!r}; {nearest(verb, known)}")
    if len(argv) < 2:
        raise Usage(
            f"a verb and an inventory are needed: rackwright {verb} INVENTORY; "
            f"inventories: {', '.join(inventories())}, or a path"
        )
    name, words = argv[1], list(argv[2:])
    if name.startswith("-"):
        raise Usage(f"the inventory comes right after the verb: rackwright {verb} INVENTORY [options]")
    if verb == "logs":
        words = log_options(words)
    options = understood(verb, words)
    if options["no_wait"]:
        raise Usage("--no-wait is refused: with it pyinfra ends with 0 although a host failed")
    path = inventory_path(name)
    words = plain(words, options)
    if options["dry"]:
        words = without_yes(words)
        os.environ.pop("PYINFRA_YES", None)
    elif verb in READ_ONLY and not options["yes"]:
        words.append("-y")
    elif not (options["yes"] or options["json_output"] or terminal):
        raise Usage("not a terminal: add -y (nobody can confirm here), or --dry to see what would change")
    hosts = load_hosts(path, options)
    remember(typed_from(name, options, path.read_text("utf-8", "replace"), os.environ))
    check_hosts(path, hosts, writes=not options["dry"] and verb not in NO_REPORT)
    return [*words, str(path), str(DEPLOYS / f"{verb}.py")]


def show_help() -> None:
    """Our own help: pyinfra's names neither verbs nor inventories."""
    width = max(len(verb) for verb in verbs())
    lines = "\n".join(f"  {verb.ljust(width)}  {doc}" for verb, doc in verbs().items())
    print(HELP.format(verbs=lines, inventories=", ".join(inventories())), end="")


def _whole(verb: Callable[[list[str]], int], words: list[str]) -> int:
    """A verb that needs no pyinfra, to its end; its exit code."""
    try:
        return verb(words)
    except KeyboardInterrupt:
        print("\nrackwright: interrupted", file=sys.stderr)
        return INTERRUPTED


def main() -> NoReturn:
    """Check, then go on as pyinfra: in this process, since starting another takes longer than the checks."""
    guard_streams()
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        show_help()
        sys.exit(0 if argv else USAGE)
    if argv[0] == "bundle":
        from tasks.bundling import main as bundle

        sys.exit(_whole(bundle, argv[1:]))
    if argv[0] == "manifest" and not is_inventory(argv[1:2]):
        from tasks.model.cli import main as manifest

        sys.exit(_whole(manifest, argv[1:]))
    if argv[0] in ("-V", "--version"):
        print(f"rackwright {__version__}")
        sys.exit(0)
    if argv[0] == "compare":
        sys.exit(compare(argv[1:], ROOT / "reports"))
    if argv[0] in verbs() and {"-h", "--help"} & set(argv[1:]):
        print(f"rackwright {argv[0]}: {verbs()[argv[0]]}\n")
        show_help()
        sys.exit(0)
    from gevent import monkey

    monkey.patch_all()  # before anything imports pyinfra, which `command` does
    try:
        words = command(argv, terminal=sys.stdin is not None and sys.stdin.isatty())
    except Usage as usage:
        print(f"rackwright: {usage}", file=sys.stderr)
        sys.exit(USAGE)
    except Mistakes as mistakes:
        count = len(mistakes.lines)
        print(f"rackwright: {count} mistake{'s' if count != 1 else ''}; no host was touched", file=sys.stderr)
        for line in mistakes.lines:
            print(f"  {line}", file=sys.stderr)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        print("rackwright: interrupted; no host was touched", file=sys.stderr)
        sys.exit(INTERRUPTED)
    from tasks.run import main as run

    sys.argv = ["pyinfra", "--chdir", str(ROOT), *words]
    run()
