"""pyinfra's own command line with our endings.

Ctrl-C, at any moment, detaches and ends with 130. A host that cannot be reached says why. What a step or a
verb has said is not followed by pyinfra's own words for it, and no log is left in the current folder.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from gevent import monkey

monkey.patch_all()

import click  # noqa: E402
from pyinfra.context import ctx_state  # noqa: E402
from pyinfra_cli import cli as pyinfra_cli  # noqa: E402
from pyinfra_cli import main as pyinfra_main  # noqa: E402
from pyinfra_cli.exceptions import UnexpectedInternalError, WrappedError  # noqa: E402

from tasks.failed import failed_lines  # noqa: E402
from tasks.interrupt import catch_interrupts  # noqa: E402
from tasks.paths import DEPLOYS  # noqa: E402
from tasks.preflight import show_at_end  # noqa: E402
from tasks.redact import clean  # noqa: E402
from tasks.unreachable import explain_connections  # noqa: E402

# pyinfra's words for hosts that failed, which it shows as faults of the file that it was reading
NOBODY_LEFT = "No hosts remaining!"
TOO_MANY = "% of hosts failed"


def main() -> NoReturn:
    """Run pyinfra; its main() sets a SIGINT handler that ends with 0, so ours is set after it."""
    cli = pyinfra_main.cli

    def guarded() -> NoReturn:
        catch_interrupts()
        explain_connections()
        if "--dry" in sys.argv:
            # a dry run goes on with the hosts that are left, and asks nobody
            pyinfra_cli._set_fail_prompts = lambda state, config: None
        preflight = sys.argv[-1:] == [str(DEPLOYS / "preflight.py")]
        if preflight:
            show_at_end()
        code = ended(cli)
        if not preflight:  # which has a table of all hosts
            tell_failed()
        sys.exit(code)

    pyinfra_main.cli = guarded  # type: ignore[assignment]
    pyinfra_main.main()
    sys.exit(0)


def ended(cli: Callable[..., Any]) -> int:
    """Run pyinfra's command line to its end; its exit code."""
    try:
        cli(standalone_mode=False)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except UnexpectedInternalError as unexpected:
        _tell_unexpected(unexpected.exception)
        return 1
    except WrappedError as error:
        if TOO_MANY in error.message:
            print(f"--> Stopped: {error.message}", file=sys.stderr)
        elif NOBODY_LEFT not in error.message:  # each host has said its reason
            error.show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 1
    return 0


def _tell_unexpected(error: BaseException) -> None:
    if isinstance(error, EOFError):
        print("\n--> No answer, so nothing more was done. Add -y, or answer at a terminal.", file=sys.stderr)
        return
    print(clean("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    what = clean(f"unexpected {type(error).__name__}: {error}")
    print(f"--> {what} (a fault of rackwright: please report it, with the lines above)", file=sys.stderr)


def tell_failed() -> None:
    """With several hosts: which of them failed, and why, in one line each."""
    state = ctx_state.get() if ctx_state.isset() else None
    if state is None or not state.initialised:
        return
    count = sum(state.is_host_in_limit(host) for host in state.inventory)
    for line in failed_lines([str(host.name) for host in state.failed_hosts], count):
        print(f"--> {line}" if not line.startswith(" ") else f"    {line.strip()}", file=sys.stderr)


if __name__ == "__main__":
    main()
