"""How a run ends: with what was said, a true exit code, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tasks.interrupt import farewell

ENDINGS = {
    "nobody left": 'raise PyinfraError("No hosts remaining!")',
    "too many": 'raise PyinfraError("Over 20% of hosts failed (50%)")',
    "other": 'raise PyinfraError("something else")',
    "no answer": "raise EOFError",
    "fault": "{}['x']",
    "good": "sys.exit(0)",
    "failed": "sys.exit(1)",
    "usage": "sys.exit(2)",
}
PROGRAM = """
import contextlib, io, json, sys
from tasks.run import ended
from pyinfra.api.exceptions import PyinfraError
from pyinfra_cli.exceptions import UnexpectedInternalError, WrappedError
from pyinfra_cli.log import setup_logging
def cli(standalone_mode):
    try:
        exec(raised)
    except PyinfraError as error:
        raise WrappedError(error)
    except Exception as error:
        raise UnexpectedInternalError(error)
setup_logging(20)
found = {}
for name, raised in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = ended(cli)
    found[name] = [code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit code and words of each ending, and the files left; in a process that pyinfra may patch."""
    folder = tmp_path_factory.mktemp("current")
    words = [sys.executable, "-c", PROGRAM, json.dumps(ENDINGS)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "left": [path.name for path in folder.iterdir()]}


def test_pyinfra_s_own_last_words_are_left_out_when_hosts_have_said_their_reasons(
    ends: dict[str, Any],
) -> None:
    assert ends["nobody left"] == [1, ""]
    assert ends["too many"] == [1, "--> Stopped: Over 20% of hosts failed (50%)\n"]
    assert ends["other"][0] == 1
    assert "something else" in ends["other"][1]


def test_what_was_not_foreseen_is_told_and_leaves_no_log_in_the_current_folder(ends: dict[str, Any]) -> None:
    assert ends["no answer"][0] == ends["fault"][0] == 1
    assert "No answer, so nothing more was done" in ends["no answer"][1]
    assert "unexpected KeyError: 'x' (a fault of rackwright" in ends["fault"][1]
    assert ends["left"] == []


def test_exit_codes_of_pyinfra_are_kept(ends: dict[str, Any]) -> None:
    assert [ends[name] for name in ("good", "failed", "usage")] == [[0, ""], [1, ""], [2, ""]]


def test_whoever_ends_a_followed_log_is_told_nothing_of_attaching() -> None:
    assert farewell("logs") == ""
    assert "attach" not in farewell("status")
    assert "Run the same command again to attach" in farewell("site")
