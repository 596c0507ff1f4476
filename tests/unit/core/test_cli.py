"""The guard: wrong usage ends with 2 before anything is touched, and says what would have been right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks import cli
from tasks.mistakes import Mistakes

INVENTORY = "hosts = [('gpu1', {'recipe': 'rehearsal-cpu'}), ('gpu2', {'recipe': 'rehearsal-cpu'})]\nrack = ['gpu2']\n"


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(INVENTORY)
    return str(path)


def guard(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from tasks.cli import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


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
    with pytest.raises(cli.Usage, match=answer.split(";")[0].replace("'", ".").replace("(", ".")) as caught:
        cli.command(words)
    assert answer in str(caught.value)


def test_a_limit_that_matches_nothing_is_refused_with_the_nearest(inventory: str) -> None:
    with pytest.raises(cli.Usage, match="no host or group 'gpu3'; did you mean 'gpu"):
        cli.command(["site", inventory, "--limit", "gpu3"])


def test_a_limit_may_be_a_host_a_group_or_a_pattern(inventory: str) -> None:
    for limit in ("gpu1", "rack", "gpu*"):
        assert inventory in cli.command(["site", inventory, "--limit", limit])


def test_mistakes_of_hosts_outside_the_limit_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(
        "hosts = [('good', {'recipe': 'rehearsal-cpu'}), ('bad', {'recipe': 'rehearsal-cpu', 'port': 0})]\n"
    )
    assert cli.command(["site", str(path), "--limit", "good"])
    with pytest.raises(Mistakes, match="mixed.py: host bad: port = 0"):
        cli.command(["site", str(path)])


def test_a_broken_inventory_is_wrong_usage_and_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("hosts = [(\n")
    with pytest.raises(cli.Usage, match="broken.py: cannot be read: SyntaxError"):
        cli.command(["site", str(path)])


def test_verbs_that_change_nothing_do_not_ask(inventory: str) -> None:
    assert "-y" in cli.command(["status", inventory])
    assert "-y" not in cli.command(["site", inventory])


def test_log_options_become_settings(inventory: str) -> None:
    words = cli.command(["logs", inventory, "-f", "-n", "7"])
    assert "follow=true" in words
    assert "lines=7" in words


def test_the_exit_code_of_wrong_usage_is_2_and_help_is_0() -> None:
    assert guard("sit", "rehearsal").returncode == 2
    assert guard().returncode == 2
    helped = guard("--help")
    assert (helped.returncode, "exit codes" in helped.stdout) == (0, True)


def test_every_deploy_is_a_verb_with_a_line_of_help() -> None:
    assert {"preflight", "site", "status", "accept", "logs", "stop", "start", "uninstall"} <= set(cli.verbs())
    assert all(cli.verbs().values())
