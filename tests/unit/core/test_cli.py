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


def all_handed_over(*lines: list[str]) -> list[list[str]]:
    """The command lines that pyinfra would get, all from one process."""
    program = "print(json.dumps([cli.command(words) for words in json.loads(sys.argv[1])]))"
    done = python(f"import json, sys; from tasks import cli; {program}", json.dumps(lines))
    assert done.returncode == 0, done.stderr
    result: list[list[str]] = json.loads(done.stdout)
    return result


def handed_over(*words: str) -> list[str]:
    """The command line that pyinfra would get."""
    return all_handed_over(list(words))[0]


ALL_AT_ONCE = """
import contextlib, io, json, sys
from tasks import cli
found = []
for words in json.loads(sys.argv[1]):
    said, sys.argv = io.StringIO(), ["rackwright", *words]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""


def refusals(*lines: list[str]) -> list[str]:
    """What the guard says about wrong command lines, all in one process."""
    done = python(ALL_AT_ONCE, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [code for code, _ in found] == [2] * len(lines), found
    return [said for _, said in found]


def refused(*words: str) -> str:
    """What the guard says about wrong usage, and that nothing of it is on stdout."""
    done = guard(*words)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


WRONG = [
    (["sit", "rehearsal"], "no verb 'sit'; did you mean 'site'?"),
    (["site", "rehersal"], "no inventory 'rehersal'; did you mean 'rehearsal'?"),
    (["site"], "a verb and an inventory are needed"),
    (["site", "--dry", "rehearsal"], "the inventory comes right after the verb"),
    (["site", "rehearsal", "--no-wait"], "--no-wait is refused"),
    (["site", "rehearsal", "--data", "port"], "must be KEY=VALUE"),
    (["status", "rehearsal", "--data", "=5"], "--data '=5': must be KEY=VALUE"),
    (
        ["status", "rehearsal", "--data", "x hf_abcdefghijklmnopqrst"],
        "--data 'x [redacted]': must be KEY=VALUE",
    ),
    (["logs", "rehearsal", "-n", "many"], "-n needs a number"),
    (["logs", "rehearsal", "-n", "²"], "-n needs a number"),
    (["logs", "rehearsal", "-fnx"], "-nx needs a number"),
    (["status", "rehearsal", "extra", "args"], "unexpected 'extra' 'args'"),
    (["status", "rehearsal", "--dri"], "no option --dri; did you mean '--dry'?"),
    (["status", "rehearsal", "-n", "5"], "no option -n"),
    (["status", "rehearsal", "--ssh-port", "x"], "'x' is not a valid integer"),
    (["status", "rehearsal", "--data", "recipe=/nope/x.toml"], "'/nope/x.toml': no such file"),
    (["status", "rehearsal", "--data", "sources=abc"], """--data 'sources=["a", "b"]'"""),
    (["status", "/nope/x"], "inventory /nope/x: no such file"),
    (["status", "nope.py"], "inventory nope.py: no such file"),
    (["uninstall", "rehearsal"], "not a terminal: add -y"),
]


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What is said about each wrong command line."""
    said = refusals(*(words for words, _ in WRONG))
    return {" ".join(words): answer for (words, _), answer in zip(WRONG, said, strict=True)}


@pytest.mark.parametrize(("words", "answer"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_usage_says_what_would_be_right(words: list[str], answer: str, told: dict[str, str]) -> None:
    assert answer in told[" ".join(words)]


def test_a_limit_that_matches_nothing_is_refused_with_the_nearest(inventory: str) -> None:
    assert "no host or group 'gpu3'; did you mean 'gpu" in refused("site", inventory, "-y", "--limit", "gpu3")


def test_a_limit_may_be_a_host_a_group_or_a_pattern(inventory: str) -> None:
    limits = ("gpu1", "rack", "gpu*")
    for words in all_handed_over(*(["site", inventory, "--limit", limit] for limit in limits)):
        assert inventory in words


@pytest.mark.slow
def test_mistakes_of_hosts_outside_the_limit_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(INVENTORY.replace('"gpu2", {', '"gpu2", {"port": 0, '))
    assert handed_over("site", str(path), "--limit", "gpu1")
    assert "mixed.py: host gpu2: port = 0" in refused("site", str(path), "-y")


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


def test_ctrl_c_ends_a_verb_without_hosts_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    for module, verb in (("tasks.bundling", "bundle"), ("tasks.model.cli", "manifest")):
        monkeypatch.setattr(f"{module}.main", interrupted)
        monkeypatch.setattr(sys, "argv", ["rackwright", verb, "rehearsal-cpu"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 130
        assert capsys.readouterr().err == "\nrackwright: interrupted\n"


def test_every_deploy_is_a_verb_with_a_line_of_help() -> None:
    assert {"preflight", "site", "status", "accept", "logs", "stop", "start", "uninstall"} <= set(cli.verbs())
    assert all(cli.verbs().values())


RAISES = {
    "import.py": (
        "import os\nimport nonexistent\n",
        "line 2",
        "ModuleNotFoundError: No module named 'nonexistent'",
    ),
    "value.py": ("\nport = int('abc')\n", "line 2", "ValueError: invalid literal"),
    "exit.py": ("raise SystemExit(0)\n", "line 1", "SystemExit: 0"),
    "broken.py": ("hosts = [(\n", "line 1", "SyntaxError: '(' was never closed"),
}


def test_whatever_an_inventory_raises_is_one_line_with_its_place(tmp_path: Path) -> None:
    for name, (text, _, _) in RAISES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "grouped").mkdir()
    (tmp_path / "grouped" / "mine.py").write_text(INVENTORY)
    (tmp_path / "grouped" / "group_data").mkdir()
    (tmp_path / "grouped" / "group_data" / "all.py").write_text("x = 1\ny = x / 0\n")
    *said, grouped = refusals(*(["status", str(tmp_path / name)] for name in (*RAISES, "grouped/mine.py")))
    for (name, (_, line, what)), answer in zip(RAISES.items(), said, strict=True):
        assert answer.startswith(f"rackwright: {name}, {line}: cannot be read: {what}")
        assert answer.count("\n") == 1
    assert "all.py, line 2: cannot be read: ZeroDivisionError" in grouped


def test_a_host_of_a_wrong_shape_is_told_with_the_right_one(tmp_path: Path) -> None:
    hosts = ['("", {})', "(5, {})", '("a",)', '("a", None)']
    for number, host in enumerate(hosts):
        (tmp_path / f"{number}.py").write_text(f"hosts = [{host}]\n")
    for said in refusals(*(["status", str(tmp_path / f"{number}.py")] for number in range(len(hosts)))):
        assert "each host must be 'NAME' or ('NAME', {'key': value}), and no name empty" in said


def test_a_dry_run_shows_changes_whatever_else_is_given(
    inventory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYINFRA_YES", "1")
    given = [["-y", "--dry"], ["--yes", "--dry", "-vy"], ["--dry"]]
    for words in all_handed_over(*(["site", inventory, *options] for options in given)):
        assert "--dry" in words
        assert not {"-y", "--yes", "-vy"} & set(words)
    program = (
        "import os, sys; from tasks import cli; cli.command(sys.argv[1:]); print('PYINFRA_YES' in os.environ)"
    )
    assert python(program, "site", inventory, "--dry").stdout == "False\n"


def test_the_number_of_log_lines_may_be_written_in_every_usual_way(inventory: str) -> None:
    given = [["-n", "5"], ["--lines", "5"], ["--lines=5"], ["-n5"], ["-n=5"], ["-fn", "5"], ["-vfn5"]]
    handed = all_handed_over(*(["logs", inventory, *options] for options in given))
    assert all("lines=5" in words for words in handed)
    assert ["follow=true" in words for words in handed] == [False] * 5 + [True] * 2
    assert "-v" in handed[-1]


def test_names_of_a_limit_are_handed_over_one_by_one(inventory: str) -> None:
    words = handed_over("status", inventory, "--limit=gpu1,gpu2")
    assert [words[at + 1] for at, word in enumerate(words) if word == "--limit"] == ["gpu1", "gpu2"]


def test_a_recipe_is_found_from_where_it_was_typed(inventory: str) -> None:
    program = "import os, sys; from tasks import cli; os.chdir(sys.argv[1]); print(cli.command(sys.argv[2:]))"
    recipes = cli.INVENTORIES / "recipes"
    done = python(program, str(recipes), "status", inventory, "--data", "recipe=rehearsal-cpu.toml")
    assert f"'recipe={recipes}/rehearsal-cpu.toml'" in done.stdout


def test_the_help_of_a_verb_is_ours() -> None:
    done = guard("site", "rehearsal", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("rackwright site: Provision a host")
    assert "Usage: " not in done.stdout


def test_reports_that_cannot_be_written_are_told_before_any_host_is_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "mine.py"
    path.write_text(INVENTORY.replace('"rehearsal-cpu"', f'"rehearsal-cpu", "reports": "{tmp_path}/file/x"'))
    said = refused("site", str(path), "-y")
    assert f"{tmp_path}/file cannot be written: Not a directory; make it writable" in said
    assert "--data reports=FOLDER" in said
    assert handed_over("status", str(path)), "a verb without a report needs no folder"
