"""A site on real hosts with the stand-in engine: provisioned, unchanged, mended, removed; on both kinds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machine
from sites import Site

ROOT = "/opt/rackwright"
# DESIGN §7: `site` with nothing to do, over SSH
MOST_COMMANDS = 12


def wait_for(condition: Callable[[], bool], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.3)
    raise AssertionError(f"it did not come within {seconds} s")


def answers(host: Machine, site: Site) -> bool:
    return host.run(f"curl -fsS -m 5 {site.url}/health", check=False).returncode == 0


def engine_pids(host: Machine) -> list[str]:
    return host.run("pgrep -f '[v]llm serve' || :").stdout.split()


def no_changes(output: str) -> bool:
    """pyinfra's grand total: operations, successes, errors, no changes."""
    total = next(line for line in output.splitlines() if "Grand total" in line).split()[2:]
    return total[1] == "-" and total[2] == "-"


@pytest.fixture(scope="module", params=["systemd", "container"])
def provisioned(
    request: pytest.FixtureRequest, hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machine, Site, str]]:
    """A host of each kind, provisioned once: host, site, and what the run printed."""
    host = Machine(request.param, "gpu1")
    try:
        host.start()
        site = Site(tmp_path_factory.mktemp("site"), [host])
        site.prepare(host)
        yield host, site, site.run("site", "-y")
    finally:
        host.stop()


def test_preflight_reads_in_few_commands_and_leaves_nothing(host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [host])
    files = "find / -xdev -path /var -prune -o -path /tmp -prune -o -type f -printf '%p %T@\\n'"
    listing = f"{files} | sort | sha256sum"
    before = host.run(listing).stdout
    output = site.run("preflight")
    assert "ready" in output
    assert host.run(listing).stdout == before
    report = site.report(host.name, "preflight")
    assert report["commands"] <= 3
    assert {item["id"] for item in report["findings"]} >= {"host.init", "disk.space", "host.ports"}


def test_a_dry_run_names_the_steps_and_changes_nothing(host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [host])
    output = site.run("site", "--dry")
    assert "engine: vllm-standin" in output
    assert host.run(f"test -e {ROOT}", check=False).returncode != 0


def test_site_ends_with_an_endpoint_that_answers_and_says_how_to_go_on(
    provisioned: tuple[Machine, Site, str],
) -> None:
    host, site, output = provisioned
    report = site.report(host.name)
    assert report["verdict"] == "pass"
    assert report["supervisor"] == {"systemd": "systemd", "container": "supervisord"}[host.kind]
    assert {check["verdict"] for check in report["acceptance"]["checks"]} <= {"pass", "skipped"}
    curl = next(line for line in output.splitlines() if "try it" in line).split("try it", 1)[1].strip()
    assert json.loads(host.run(curl).stdout)["choices"]


def test_the_second_run_changes_nothing_in_few_commands(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    before = engine_pids(host)
    assert no_changes(site.run("site", "-y"))
    assert engine_pids(host) == before
    assert site.report(host.name)["commands"] <= MOST_COMMANDS
    assert site.report(host.name)["verdict"] == "pass"


def test_the_engine_is_not_root_and_its_key_shows_nowhere(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, output = provisioned
    key = host.run(f"cat {ROOT}/run/api-key").stdout.strip()
    assert len(key) == 48
    assert host.run(f"stat -c %a {ROOT}/run/api-key").stdout.strip() == "600"
    assert host.run(f"ps -o user= -p {engine_pids(host)[0]}").stdout.strip() not in ("root", "")
    assert host.run(f"curl -s -o /dev/null -w '%{{http_code}}' {site.url}/v1/models").stdout == "401"
    assert key not in output
    assert key not in host.run("ps auxww").stdout
    found = host.run(f"grep -rls {key} {ROOT} /etc/systemd /var/log || :").stdout.split()
    assert found == [f"{ROOT}/run/api-key"]
    assert key not in host.run("journalctl --no-pager 2>/dev/null || :").stdout
    for path in (site.folder / "reports").rglob("*"):
        assert path.is_dir() or key not in path.read_text("utf-8")


def test_a_killed_engine_comes_back(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    before = engine_pids(host)
    host.run(f"kill -9 {' '.join(before)}")
    wait_for(lambda: bool(engine_pids(host)) and engine_pids(host) != before and answers(host, site))
    assert "ready: a token came out" in site.run("status")


def test_stop_and_start_are_idempotent_and_status_tells_the_truth(
    provisioned: tuple[Machine, Site, str],
) -> None:
    host, site, _ = provisioned
    site.run("stop", "-y")
    assert engine_pids(host) == []
    assert no_changes(site.run("stop", "-y"))
    assert "rackwright start" in site.run("status", rc=1)
    site.run("start", "-y")
    assert answers(host, site)
    assert no_changes(site.run("start", "-y"))
    site.run("status")


def test_logs_show_the_engine_s_own_lines(provisioned: tuple[Machine, Site, str]) -> None:
    _, site, _ = provisioned
    assert "Application startup complete" in site.run("logs", "-n", "200")


def test_the_report_of_what_is_there_is_written_anew(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    assert "/v1" in site.run("report")
    found = site.report(host.name, "report")
    assert found["verdict"] == "pass"
    assert {step["name"] for step in found["steps"]} >= {"environment", "engine", "weights", "service"}


def test_a_changed_flag_restarts_once(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    before = engine_pids(host)
    recipe = site.folder / "standin.toml"
    recipe.write_text(recipe.read_text().replace("max-model-len = 8192", "max-model-len = 8191"))
    assert "runs with other flags than the recipe has now" in site.run("accept", rc=1)
    assert engine_pids(host) == before
    site.run("site", "-y")
    after = engine_pids(host)
    assert after != before
    assert "8191" in host.run(f"tr '\\0' ' ' </proc/{after[0]}/cmdline").stdout
    assert no_changes(site.run("site", "-y"))
    assert engine_pids(host) == after


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies_at_start", "start"),
        ("never_ready", "no token within"),
        ("healthy_but_dies_at_first_request", "start"),
        ("wrong_model_name", "serves"),
    ],
)
def test_an_engine_that_never_gives_a_token_is_stopped_and_explained(
    provisioned: tuple[Machine, Site, str], fault: str, words: str
) -> None:
    host, site, _ = provisioned
    site.run("stop", "-y")
    site.faults(host, fault)
    output = site.run("site", "-y", "--data", "ready_seconds=15", rc=1)
    assert words in output
    assert "    | " in output, "the engine's last lines"
    assert engine_pids(host) == []
    assert site.report(host.name)["verdict"] == "fail"
    site.faults(host)
    site.run("site", "-y")


def test_an_engine_that_answers_wrongly_is_not_accepted(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    site.faults(host, "no_done")
    output = site.run("accept", rc=1)
    assert "chat.stream" in output
    assert site.report(host.name, "accept")["acceptance"]["verdict"] == "fail"
    site.faults(host)
    site.run("accept")


def test_a_reboot_brings_the_service_back(provisioned: tuple[Machine, Site, str]) -> None:
    host, site, _ = provisioned
    host.reboot()
    if host.kind == "container":  # nothing starts there by itself; `start` is the documented way
        site.run("start", "-y")
    wait_for(lambda: answers(host, site))
    site.run("status")


def test_uninstall_leaves_the_host_as_it_was_and_foreign_files_alone(
    provisioned: tuple[Machine, Site, str],
) -> None:
    host, site, _ = provisioned
    host.run(f"mkdir -p {ROOT}/mine && echo keep >{ROOT}/mine/file")
    site.run("uninstall", "-y")
    assert host.run(f"find {ROOT} -type f").stdout.split() == [f"{ROOT}/mine/file"]
    assert engine_pids(host) == []
    assert host.run("ls /etc/systemd/system | grep rackwright || :").stdout == ""
    assert host.run("id rackwright", check=False).returncode != 0
    assert host.run("pgrep -f [s]upervisord || :").stdout == ""
    assert no_changes(site.run("uninstall", "-y"))


def test_a_user_without_root_gets_a_service_that_outlives_the_session(
    systemd_host: Machine, tmp_path: Path
) -> None:
    site = Site(tmp_path, root="/home/user/rackwright")
    site.prepare(systemd_host)
    site.hosts([(systemd_host.name, systemd_host.inventory_data("user"))])
    site.run("site", "-y")
    assert site.report(systemd_host.name)["supervisor"] == "supervisord"
    systemd_host.kill_ssh_sessions()
    assert answers(systemd_host, site)
    assert systemd_host.run(f"ps -o user= -p {engine_pids(systemd_host)[0]}").stdout.strip() == "user"
    assert no_changes(site.run("site", "-y"))
    site.run("uninstall", "-y")
    assert systemd_host.run("ls -A /home/user/rackwright 2>/dev/null || :").stdout == ""


def test_stop_and_uninstall_amid_a_start_leave_nothing_that_comes_back(
    systemd_host: Machine, tmp_path: Path
) -> None:
    host, site = systemd_host, Site(tmp_path, [systemd_host])
    site.prepare(host)
    site.run("site", "-y")
    recipe = site.folder / "standin.toml"

    def ended_amid_a_start(length: int, verb: str, *options: str) -> None:
        """What served would be put back when the engine that starts ends."""
        site.faults(host, "never_ready")
        text = recipe.read_text().replace("[serve.flags]", f"[serve.flags]\nmax-num-seqs = {length}", 1)
        recipe.write_text(text)
        start = site.start("serve", "-y", *options)
        wait_for(lambda: host.run(f"pgrep -f '[m]ax-num-seqs {length}'", check=False).returncode == 0)
        site.run(verb, "-y")
        assert f"cancelled on the host ({verb})" in start.communicate(timeout=60)[0]
        time.sleep(3)  # a look at the engine and the start of another one took less
        assert engine_pids(host) == []
        recipe.write_text(text.replace(f"max-num-seqs = {length}\n", ""))
        site.faults(host)

    units = (
        "cd /etc/systemd/system && ls -d rackwright* llm* *.wants/rackwright* *.wants/llm* 2>/dev/null || :"
    )
    ended_amid_a_start(7, "stop")
    assert "rackwright-eager.service" in host.run(units).stdout.split()
    as_llm = ("--data", "instance=llm")
    site.run("site", "-y", *as_llm)
    assert host.run(units).stdout.split() == [
        "llm-eager.service",
        "multi-user.target.wants/llm-eager.service",
    ]
    ended_amid_a_start(9, "uninstall", *as_llm)
    assert host.run(units).stdout == ""
    assert host.run(f"test -e {ROOT}", check=False).returncode != 0
