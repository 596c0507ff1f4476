"""The guard: wrong usage ends with 2 before anything is touched, and says what would have been right.

The guard runs in a process of its own: it imports pyinfra's command line, which patches the whole process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import cli

INVENTORY = """
hosts = [("gpu1", {"recipe": "rehearsal-cpu"}), ("gpu2", {"recipe": "rehearsal-cpu"})]
rack = ["gpu2"]
"""


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(INVENTORY)
    return str(path)


def python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def guard(*words: str) -> subprocess.CompletedProcess[str]:
    return python("from tasks.cli import main; main()", *words)


def handed_over(*words: str) -> list[str]:
    """The command line that pyinfra would get."""
    done = python(
        "import json, sys; from tasks import cli; print(json.dumps(cli.command(sys.argv[1:])))", *words
    )
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout)
    return result


def refused(*words: str) -> str:
    """What the guard says about wrong usage."""
    done = guard(*words)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sit", "rehearsal"], "no verb 'sit'; did you mean 'site'?"),
        (["site", "rehersal"], "no inventory 'rehersal'; did you mean 'rehearsal'?"),
        (["site"], "a verb and an inventory are needed"),
        (["site", "--dry", "rehearsal"], "the inventory comes right after the verb"),
        (["site", "rehearsal", "--no-wait"], "--no-wait is refused"),
        (["site", "rehearsal", "--data", "port"], "must be KEY=VALUE"),
        (["logs", "rehearsal", "-n", "many"], "-n needs a number"),
    ],
)
def test_wrong_usage_says_what_would_be_right(words: list[str], answer: str) -> None:
    assert answer in refused(*words)


def test_a_limit_that_matches_nothing_is_refused_with_the_nearest(inventory: str) -> None:
    assert "no host or group 'gpu3'; did you mean 'gpu" in refused("site", inventory, "--limit", "gpu3")


@pytest.mark.parametrize("limit", ["gpu1", "rack", "gpu*"])
def test_a_limit_may_be_a_host_a_group_or_a_pattern(inventory: str, limit: str) -> None:
    assert inventory in handed_over("site", inventory, "--limit", limit)


@pytest.mark.slow
def test_mistakes_of_hosts_outside_the_limit_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(INVENTORY.replace('"gpu2", {', '"gpu2", {"port": 0, '))
    assert handed_over("site", str(path), "--limit", "gpu1")
    assert "mixed.py: host gpu2: port = 0" in refused("site", str(path))


def test_a_broken_inventory_is_wrong_usage_and_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("hosts = [(\n")
    said = refused("site", str(path))
    assert "broken.py: cannot be read: SyntaxError" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_verbs_that_change_nothing_do_not_ask(inventory: str) -> None:
    assert "-y" in handed_over("status", inventory)
    assert "-y" not in handed_over("site", inventory)


def test_log_options_become_settings(inventory: str) -> None:
    words = handed_over("logs", inventory, "-f", "-n", "7")
    assert "follow=true" in words
    assert "lines=7" in words


def test_help_is_no_mistake_and_no_words_are() -> None:
    assert guard().returncode == 2
    helped = guard("--help")
    assert (helped.returncode, "exit codes" in helped.stdout) == (0, True)


def test_every_deploy_is_a_verb_with_a_line_of_help() -> None:
    assert {"preflight", "site", "status", "accept", "logs", "stop", "start", "uninstall"} <= set(cli.verbs())
    assert all(cli.verbs().values())
