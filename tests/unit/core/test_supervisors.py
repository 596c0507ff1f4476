"""What supervisors render and read; that it works on real hosts is proved in tests/hosts."""

from __future__ import annotations

import configparser
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.launch import LaunchSpec, launch_spec
from tasks.recipe import load_recipe
from tasks.settings import layout_of, settings_from
from tasks.supervisors import Supervisord, Systemd, choose
from tasks.supervisors.systemd import systemd_assignment, systemd_word

NAMES = ("rackwright-eager", "rackwright-optimized")


def spec(**more: object) -> LaunchSpec:
    settings = settings_from({"recipe": "deepseek-v4-flash-sm120", "root": "/opt/rw"}, lambda key: "here")
    made = launch_spec(
        load_recipe("deepseek-v4-flash-sm120"),
        settings,
        layout_of(settings),
        "optimized",
        user="rackwright",
    )
    return replace(made, **more)  # type: ignore[arg-type]


def unit(made: LaunchSpec) -> str:
    return Systemd(version=252).files(made, NAMES)["/etc/systemd/system/rackwright-optimized.service"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"systemd": True, "privileged": True, "lingering": False}, "systemd"),
        ({"systemd": True, "privileged": False, "lingering": True}, "systemd-user"),
        ({"systemd": True, "privileged": False, "lingering": False}, "supervisord"),
        ({"systemd": False, "privileged": True, "lingering": False}, "supervisord"),
    ],
)
def test_the_supervisor_is_the_one_that_outlives_logout(facts: dict[str, bool], expected: str) -> None:
    assert choose("auto", **facts)[0] == expected
    assert choose("supervisord", **facts)[0] == "supervisord"


def test_the_key_is_in_no_argv_unit_or_program_only_its_file_is() -> None:
    made = spec()
    assert "LoadCredential=api-key:/opt/rw/run/api-key" in unit(made)
    assert "--api-key" not in made.argv
    assert not any("KEY" in name for name, _ in made.env)
    program = Supervisord(layout(), "rackwright").files(made, NAMES)
    text = program["/opt/rw/run/programs/rackwright-optimized.conf"]
    assert " RACKWRIGHT_KEY_FILE=/opt/rw/run/api-key " in text


def layout():  # type: ignore[no-untyped-def]
    return layout_of(settings_from({"recipe": "r", "root": "/opt/rw"}, lambda key: "here"))


def test_the_unit_conflicts_with_its_rivals_and_not_with_itself() -> None:
    lines = unit(spec()).splitlines()
    assert [line for line in lines if line.startswith("Conflicts=")] == ["Conflicts=rackwright-eager.service"]


def test_systemd_words_survive_quotes_percent_and_dollar() -> None:
    assert systemd_word('{"a":"50%$x"}') == '"{\\"a\\":\\"50%%$$x\\"}"'


def test_a_dollar_of_the_environment_is_one_since_only_command_lines_expand_it() -> None:
    assert systemd_assignment('A=50%$x \\"') == '"A=50%%$x \\\\\\""'
    assert (
        'Environment="PRICE=5$ # and ; 50%%"' in unit(spec(env=(("PRICE", "5$ # and ; 50%"),))).splitlines()
    )


ODD = (
    '{"a": "it\'s 50%", "b": "x # y"}',
    "a #b",
    "c ;d",
    " # ",
    "#e",
    "; f",
    "tab\u3000#g",
    "\\ \\n",
    "",
    "$H `x`",
    "%(ENV_HOME)s",
)


def test_a_supervisord_command_reads_back_as_the_same_argv_and_environment() -> None:
    env = tuple((f"E{number}", value) for number, value in enumerate(ODD))
    made = spec(argv=("/x/vllm", "serve", *ODD), env=env)
    text = Supervisord(layout(), "rackwright").files(made, NAMES)[
        "/opt/rw/run/programs/rackwright-optimized.conf"
    ]
    # as supervisor 4.3.0 makes it (options.py, UnhosedConfigParser), then expands values
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    parser.read_string(text)
    program, *words = shlex.split(parser["program:rackwright-optimized"]["command"] % {})
    assert program == "/usr/bin/env"
    assert words[-len(made.command) :] == list(made.command)
    assert {f"{name}={value}" for name, value in env} < set(words[: -len(made.command)])
    assert "environment" not in parser["program:rackwright-optimized"]


def test_a_unit_that_is_not_there_is_absent() -> None:
    text = "unit=rackwright-eager\nLoadState=not-found\nActiveState=inactive\nMainPID=0\nnow=100\nup=50\n"
    state = Systemd().parse_status(text, ("rackwright-eager",))["rackwright-eager"]
    assert (state.installed, state.running) == (False, False)


def test_a_running_unit_tells_pid_restarts_and_since() -> None:
    text = (
        "unit=rackwright-eager\nLoadState=loaded\nActiveState=active\nSubState=running\nMainPID=42\nNRestarts=2\n"
        "ActiveEnterTimestampMonotonic=40000000\nnow=1000\nup=50\n"
    )
    state = Systemd().parse_status(text, ("rackwright-eager",))["rackwright-eager"]
    assert (state.running, state.pid, state.restarts, state.since) == (True, 42, 2, 990)
    assert state.identity == "42@40000000"


def test_a_unit_that_gave_up_says_so() -> None:
    text = "unit=rackwright-eager\nLoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0"
    assert Systemd().parse_status(text, ("rackwright-eager",))["rackwright-eager"].gave_up


def test_supervisord_states_are_read_and_damage_is_absence() -> None:
    item = {"name": "rackwright-eager", "state": "STARTING", "pid": 7, "start": 100, "restarts": 1}
    supervisord = Supervisord(layout(), "rackwright")
    states = supervisord.parse_status(json.dumps([item]), NAMES)
    assert (states["rackwright-eager"].running, states["rackwright-eager"].identity) == (True, "7@100")
    assert not states["rackwright-optimized"].installed
    assert not supervisord.parse_status("Traceback", NAMES)["rackwright-eager"].installed


def test_the_same_flag_gives_the_same_digest_and_another_flag_another() -> None:
    assert spec().digest == spec().digest
    assert spec().digest != spec(argv=(*spec().argv, "--x")).digest


def test_an_engine_that_listens_everywhere_is_asked_over_loopback() -> None:
    assert spec(bind="0.0.0.0").base_url == "http://127.0.0.1:8000"
    assert spec(bind="::1").base_url == "http://[::1]:8000"


def test_templates_are_where_the_package_expects_them() -> None:
    assert (Path(__file__).parents[3] / "templates" / "systemd" / "engine.service.j2").is_file()
