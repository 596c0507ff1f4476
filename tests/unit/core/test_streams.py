"""Closed, broken and full streams end a run without a traceback, and with the fitting exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

GUARD = "from tasks.streams import guard_streams, print_last; guard_streams(); import atexit, os, sys; "
CLI = "from tasks.cli import main; main()"
LONG = "print('line\\n' * 100_000)"


def shell(line: str, program: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `$PROGRAM` in a line of bash; the code is that of a pipe's first."""
    script = f'run() {{ {sys.executable} -c "$PROGRAM" "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script], env={"PROGRAM": program, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_whoever_stops_reading_ends_the_run_as_any_tool() -> None:
    assert shell("run | head -n 1", GUARD + LONG) == (141, "line\n", "")
    assert shell("run 2>&1 | head -n 1", GUARD + LONG.replace(")", ", file=sys.stderr)")) == (
        141,
        "line\n",
        "",
    )


def test_a_full_stdout_is_one_line_and_1() -> None:
    said = "rackwright: stdout cannot be written: No space left on device\n"
    assert shell("run >/dev/full", GUARD + "print('x')") == (1, "", said)
    assert shell("run >/dev/full", GUARD + LONG) == (1, "", said)
    at_the_end = "atexit.register(lambda: print_last('line\\n' * 100_000))"
    assert shell("run >/dev/full", GUARD + at_the_end) == (1, "", said)


def test_progress_without_a_place_is_no_reason_to_stop() -> None:
    program = GUARD + "print('x', file=sys.stderr); print('result'); sys.exit(3)"
    assert shell("run 2>/dev/full", program) == (3, "result\n", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere_and_lend_their_numbers_to_nothing(closed: str) -> None:
    program = GUARD + "print('x'); print('y', file=sys.stderr); a = sys.stdin.read(); f = open('/etc/passwd')"
    assert shell(f"run </dev/null {closed}", program + "; sys.exit(f.fileno() + 4)")[0] > 6


def test_what_is_registered_for_the_end_still_happens_when_the_last_words_find_no_reader() -> None:
    program = GUARD + (
        "atexit.register(lambda: print('written', file=sys.stderr)); "
        "atexit.register(lambda: print_last('line\\n' * 100_000))"
    )
    assert shell("run | head -n 1", program) == (141, "line\n", "written\n")


def test_a_character_that_a_terminal_lacks_is_written_as_its_number() -> None:
    assert shell("PYTHONIOENCODING=ascii run", GUARD + "print('\u4f60')") == (0, "\\u4f60\n", "")


def test_the_command_line_has_these_streams() -> None:
    assert shell("run --help >/dev/full", CLI)[0::2] == (
        1, "rackwright: stdout cannot be written: No space left on device\n",
    )  # fmt: skip
    assert shell("run sit x >&- 2>/dev/full", CLI) == (2, "", "")
