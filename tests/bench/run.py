#!/usr/bin/env python3
"""Every figure of `make bench` in one table: name, value, budget, whether it is kept.

A module beside this one gives figures by a function `figures() -> [(name, value, budget)]`; a budget is "" or
a comparison such as "<= 3". Exit code 1 when a budget is missed or a module breaks.

    make bench
    python tests/bench/run.py preflight      only that module
"""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "hosts")]

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def kept(value: float, budget: str) -> bool | None:
    """Whether a value keeps its budget; None where there is none. Raises ValueError for another form."""
    if not budget:
        return None
    sign, _, bound = budget.partition(" ")
    if sign not in COMPARE:
        raise ValueError(f"budget {budget!r}: begins with one of {', '.join(COMPARE)}")
    return COMPARE[sign](value, float(bound))


def shown(value: float) -> str:
    """Counts whole, others with what matters."""
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def main() -> int:
    """Run the modules that are asked for (all), one after the other, and print the table."""
    there = sorted(path.stem for path in HERE.glob("*.py") if "def figures(" in path.read_text("utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("module", nargs="*", choices=[*there, []], help=", ".join(there))
    # people keep compiled modules; where this is set, ours would be compiled at every start, and others not
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    missed, rows = 0, [("figure", "value", "budget", "")]
    for name in parser.parse_args().module or there:
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            figures = importlib.import_module(name).figures()
        except Exception:
            traceback.print_exc()
            rows.append((f"{name}: broke, see above", "", "", "FAIL"))
            missed += 1
            continue
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for figure, value, budget in figures:
            good = kept(value, budget)
            missed += good is False
            rows.append((figure, shown(value), budget, {True: "ok", False: "MISSED", None: ""}[good]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            row[1].rjust(widths[1]),
            row[2].ljust(widths[2]),
            row[3].ljust(widths[3]),
        ]
        print("  ".join(cells).rstrip())
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
