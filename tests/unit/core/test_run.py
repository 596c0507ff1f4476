"""How a run ends: with what was said, a true exit code, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.interrupt import farewell


def ending(raised: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a run prints and returns when pyinfra's command line raises this."""
    program = f"""
import sys
from tasks.run import ended
from pyinfra.api.exceptions import PyinfraError
from pyinfra_cli.exceptions import UnexpectedInternalError, WrappedError
def cli(standalone_mode):
    try:
        {raised}
    except PyinfraError as error:
        raise WrappedError(error)
    except Exception as error:
        raise UnexpectedInternalError(error)
sys.exit(ended(cli))
"""
    words = [sys.executable, "-c", program]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)


def test_pyinfra_s_own_last_words_are_left_out_when_each_host_has_said_its_reason(tmp_path: Path) -> None:
    done = ending('raise PyinfraError("No hosts remaining!")', tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("raised", "said"),
    [("raise EOFError", "No answer, so nothing more was done"), ("{}['x']", "unexpected KeyError: 'x'")],
)
def test_no_log_is_left_in_the_current_folder(raised: str, said: str, tmp_path: Path) -> None:
    done = ending(raised, tmp_path)
    assert (done.returncode, said in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_of_pyinfra_are_kept(tmp_path: Path) -> None:
    assert [ending(f"sys.exit({code})", tmp_path).returncode for code in (0, 1, 2)] == [0, 1, 2]


def test_whoever_ends_a_followed_log_is_told_nothing_of_attaching() -> None:
    assert farewell("logs") == ""
    assert "attach" not in farewell("status")
    assert "Run the same command again to attach" in farewell("site")
