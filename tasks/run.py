"""pyinfra's own command line with one difference: Ctrl-C, at any moment, detaches and ends with 130."""

from __future__ import annotations

import sys

from gevent import monkey

monkey.patch_all()

from pyinfra_cli import main as pyinfra_main  # noqa: E402

from tasks.interrupt import catch_interrupts  # noqa: E402
from tasks.paths import DEPLOYS  # noqa: E402
from tasks.preflight import show_at_end  # noqa: E402


def main() -> None:
    """Run pyinfra; its main() sets a SIGINT handler that ends with 0, so ours is set after it."""
    cli = pyinfra_main.cli

    def guarded() -> None:
        catch_interrupts()
        if sys.argv[-1:] == [str(DEPLOYS / "preflight.py")]:
            show_at_end()
        cli()

    pyinfra_main.cli = guarded  # type: ignore[assignment]
    pyinfra_main.main()


if __name__ == "__main__":
    main()
