"""Rendered units of every recipe and mode, judged by systemd's own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.engines.docker_launch import Container, docker_spec
from tasks.launch import LaunchSpec, launch_spec
from tasks.recipe import TRIAL, load_recipe, recipe_names
from tasks.settings import layout_of, settings_from
from tasks.supervisors import Supervisord, Systemd
from tasks.supervisors.base import LIMIT_STARTS

MOST_EXPOSURE = 4.0
CASES = [(recipe, mode) for recipe in recipe_names() for mode in (*load_recipe(recipe).serve.modes, TRIAL)]
DOCKER = "in a container"
CASES += [(DOCKER, "eager"), (DOCKER, "optimized")]

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


def settings(recipe: str):  # type: ignore[no-untyped-def]
    return settings_from({"recipe": recipe, "root": "/opt/rw"}, lambda key: "here")


def spec(recipe: str, mode: str) -> LaunchSpec:
    made = settings(recipe)
    loaded = load_recipe(recipe)
    trial = 8001 if mode == TRIAL else None
    real = list(loaded.serve.modes)[-1] if mode == TRIAL else mode
    return launch_spec(loaded, made, layout_of(made), real, user="rackwright", trial_port=trial)


def docker_case(mode: str) -> LaunchSpec:
    """The same engine in a container."""
    made = spec("deepseek-v4-flash-sm120", mode)
    return docker_spec(
        made, Container("sha256:" + "1" * 64, "vllm", "runtime"), "/opt/rw/lib/docker-engine.sh"
    )


def names(recipe: str) -> tuple[str, ...]:
    return tuple(f"rackwright-{mode}" for mode in (*load_recipe(recipe).serve.modes, TRIAL))


def unit(recipe: str, mode: str, version: int = 0) -> str:
    made = docker_case(mode) if recipe == DOCKER else spec(recipe, mode)
    rivals = names("deepseek-v4-flash-sm120" if recipe == DOCKER else recipe)
    (text,) = Systemd(version=version).files(made, rivals).values()
    return text


@needs_systemd
@pytest.mark.parametrize("version", [239, 252])
@pytest.mark.parametrize(("recipe", "mode"), CASES)
def test_systemd_finds_no_fault_in_a_unit_and_its_exposure_is_low(
    recipe: str, mode: str, version: int, tmp_path: Path
) -> None:
    path = tmp_path / f"rackwright-{mode}.service"
    path.write_text(unit(recipe, mode, version))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found.group(1)) <= MOST_EXPOSURE


@needs_systemd
def test_all_modes_together_make_no_ordering_cycle(tmp_path: Path) -> None:
    recipe = "deepseek-v4-flash-sm120"
    paths = []
    for mode in (*load_recipe(recipe).serve.modes, TRIAL):
        path = tmp_path / f"rackwright-{mode}.service"
        path.write_text(unit(recipe, mode))
        paths.append(str(path))
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, timeout=60)
    assert "cycle" not in done.stderr


def test_of_each_pair_of_rivals_one_waits_for_the_other_to_stop() -> None:
    recipe = "deepseek-v4-flash-sm120"
    after = {
        (mode, other)
        for mode in ("eager", "optimized", TRIAL)
        for other in ("eager", "optimized", TRIAL)
        if f"After=rackwright-{other}.service" in unit(recipe, mode)
    }
    assert after == {("optimized", "eager"), (TRIAL, "eager"), (TRIAL, "optimized")}


def test_a_mode_on_trial_is_not_restarted_and_listens_where_no_client_is() -> None:
    trial = spec("deepseek-v4-flash-sm120", TRIAL)
    serving = spec("deepseek-v4-flash-sm120", "optimized")
    assert (trial.bind, trial.port, trial.restart) == ("127.0.0.1", 8001, False)
    differ = [(a, b) for a, b in zip(trial.argv, serving.argv, strict=True) if a != b]
    assert differ == [("8001", "8000")], "apart from its port it is the very same engine"
    assert "Restart=no" in unit("deepseek-v4-flash-sm120", TRIAL)
    text = "\n".join(
        Supervisord(layout_of(settings("rehearsal-cpu")), "rackwright").files(trial, ()).values()
    )
    assert "autorestart=false" in text
    assert "startretries=0" in text


def test_a_systemd_that_hands_over_no_credentials_hands_over_a_copy_of_the_key() -> None:
    name, key = "deepseek-v4-flash-sm120", "/opt/rw/run/api-key"
    copy = f"{key}.rackwright-eager"
    # 239: RHEL 8; 245: Ubuntu 20.04; 0: it did not say
    for version in (0, 239, 245):
        text = unit(name, "eager", version)
        assert "LoadCredential" not in text
        assert f"ExecStartPre=+/usr/bin/install -m 400 -o rackwright {key} {copy}" in text.splitlines()
        assert f'Environment="RACKWRIGHT_KEY_FILE={copy}"' in text.splitlines()
    assert f"-o root {key} {copy}" in unit(DOCKER, "eager", 245)
    for version in (247, 257):
        text = unit(name, "eager", version)
        assert f"LoadCredential=api-key:{key}" in text.splitlines()
        assert "ExecStartPre" not in text and "RACKWRIGHT_KEY_FILE" not in text


def test_no_engine_that_has_a_key_file_starts_without_its_key_under_any_supervisor() -> None:
    made = spec("deepseek-v4-flash-sm120", "eager")
    layout = layout_of(settings("rehearsal-cpu"))
    for supervisor in (Systemd(version=245), Systemd(version=252), Systemd(user=True, home="/h")):
        (text,) = supervisor.files(made, ()).values()
        assert 'Environment="RACKWRIGHT_KEY=required"' in text.splitlines()
    assert " RACKWRIGHT_KEY=required " in "".join(Supervisord(layout, "rackwright").files(made, ()).values())
    assert "RACKWRIGHT_KEY" not in replace(made, key_file=None).wrapper_env


def test_back_off_grows_where_systemd_can_do_it_and_a_crash_loop_ends_everywhere() -> None:
    for version, grows in ((252, False), (254, True), (257, True)):
        text = unit("deepseek-v4-flash-sm120", "eager", version)
        assert ("RestartSteps=" in text) == grows
        assert f"StartLimitBurst={LIMIT_STARTS}" in text
    # starts that take the whole ready_seconds still come to the limit
    made = spec("deepseek-v4-flash-sm120", "eager")
    interval = int(re.findall(r"StartLimitIntervalSec=(\d+)", text)[0])
    assert interval >= LIMIT_STARTS * made.ready_seconds


def test_a_stop_ends_the_whole_group_in_a_bounded_time_and_no_line_of_the_log_is_dropped() -> None:
    made, text = spec("deepseek-v4-flash-sm120", "eager"), unit("deepseek-v4-flash-sm120", "eager")
    lines = set(text.splitlines())
    assert {
        f"TimeoutStartSec={made.ready_seconds}",
        f"TimeoutStopSec={made.stop_seconds}",
        "KillMode=control-group",
        "Restart=always",
        "RestartSec=10",
        "OOMPolicy=stop",
        "LogRateLimitIntervalSec=0",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
    } <= lines
    assert (made.ready_seconds, made.stop_seconds) == (3600, 120)
    program = "\n".join(
        Supervisord(layout_of(settings("rehearsal-cpu")), "rackwright").files(made, ()).values()
    ).splitlines()
    assert {"stopsignal=TERM", "stopasgroup=true", "killasgroup=true", "stopwaitsecs=120"} <= set(program)


def test_a_container_is_taken_away_however_its_unit_ended_and_docker_is_there_before_it() -> None:
    made, text = docker_case("eager"), unit(DOCKER, "eager")
    (after,) = re.findall("^ExecStopPost=-(.*)$", text, re.MULTILINE)
    assert after == f'"/bin/sh" "/opt/rw/lib/docker-engine.sh" "--remove" "{made.name}"'
    assert re.search("^After=.* docker.service$", text, re.MULTILINE)
    # docker ends the container before systemd would end docker's own client
    assert int(made.argv[3]) < made.stop_seconds
    assert "ExecStopPost" not in unit("deepseek-v4-flash-sm120", "eager")


def test_gpu_memory_is_waited_for_on_gpu_hosts_only() -> None:
    assert spec("deepseek-v4-flash-sm120", "eager").wrapper_env["RACKWRIGHT_GPU_FREE"] == "0.85"
    assert "RACKWRIGHT_GPU_FREE" not in spec("rehearsal-cpu", "eager").wrapper_env


def test_the_service_user_cannot_put_a_link_where_root_writes_logs() -> None:
    made = spec("deepseek-v4-flash-sm120", "eager")
    assert not any(made.log.startswith(path + "/") for path in made.writable)


def test_the_stray_variables_of_the_tutorial_are_unset() -> None:
    unset = set(spec("deepseek-v4-flash-sm120", "eager").wrapper_env["RACKWRIGHT_UNSET"].split())
    assert unset >= {"VLLM_USE_DEEP_GEMM", "VLLM_DISABLED_KERNELS", "FLASHINFER_DISABLE_VERSION_CHECK"}
