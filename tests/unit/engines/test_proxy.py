"""A provider's proxy script: used where it is wanted and there, for the servers that it is for alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.endpoints import endpoints_of
from tasks.plan import Plan
from tasks.proxy import direct, served, through_proxy
from tasks.recipe import load_recipe
from tasks.settings import settings_from

PROGRAM = Path(__file__).parents[3] / "tasks" / "onhost" / "with_proxy.sh"
TURBO = "/etc/network_turbo"
SHOW = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'proxy' in k.lower()}))"
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


def run(script: Path, *command: str, direct: str = "localhost,127.0.0.1", **more: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(
        ["sh", str(PROGRAM), str(script), direct, sys.executable, "-c", *command],
        env=clean | more, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What AutoDL's looks like: bash, with words of its own."""
    path = tmp_path / "network_turbo"
    path.write_text(
        "if [[ -n yes ]]; then\n  export http_proxy=http://10.0.0.1:12798 && "
        "export https_proxy=http://10.0.0.1:12798\nfi\nexport OTHER=thing\necho set; echo note >&2\n"
    )
    return path


def test_the_scripts_proxy_is_set_for_the_command_and_nothing_else_of_it(script: Path) -> None:
    done = run(script, SHOW + "; assert 'OTHER' not in os.environ", NO_PROXY="10.1.1.1")
    seen = json.loads(done.stdout)
    assert seen["http_proxy"] == seen["https_proxy"] == "http://10.0.0.1:12798"
    assert seen["no_proxy"] == seen["NO_PROXY"] == "localhost,127.0.0.1,10.1.1.1"
    assert "10.0.0.1" not in done.stderr, "the address may hold a password"
    assert str(script) in done.stderr


def test_without_the_script_the_command_runs_as_it_is_and_it_is_said(tmp_path: Path) -> None:
    done = run(tmp_path / "none", SHOW, https_proxy="http://mine:1")
    assert json.loads(done.stdout) == {"https_proxy": "http://mine:1"}
    assert "is not on this host; going without it" in done.stderr


def test_a_script_that_fails_or_sets_nothing_changes_nothing(script: Path) -> None:
    for text in ("exit 3\n", "syntax ( error\n", "true\n"):
        script.write_text(text)
        done = run(script, SHOW)
        assert (done.returncode, json.loads(done.stdout)) == (0, {}), text
        assert "sets no http_proxy" in done.stderr


def test_the_commands_exit_code_and_input_are_its_own(script: Path) -> None:
    assert run(script, "import sys; sys.exit(7)").returncode == 7


@pytest.fixture
def server() -> Iterator[Any]:
    """Answers with what it was asked for, as a proxy and as a server."""

    class Echo(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

    made = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_github_goes_through_the_proxy_and_the_host_itself_does_not(script: Path, server: Any) -> None:
    own = f"http://127.0.0.1:{server.server_port}"
    script.write_text(f"export http_proxy={own} https_proxy={own}\n")
    assert run(script, ASK, "http://github.com/a/b").stdout.strip() == "http://github.com/a/b"
    assert run(script, ASK, f"{own}/here").stdout.strip() == "/here"


def plan_of(**settings: Any) -> Plan:
    known = {"recipe": "deepseek-v4-flash-sm120", "env_kind": "venv", **settings}
    made = settings_from(known, lambda key: key)
    host = SimpleNamespace(name="gpu1", data={}, connector=None)
    return Plan(host, made, load_recipe(made.recipe), "preflight")


def test_a_download_goes_behind_it_only_where_the_site_wants_it() -> None:
    argv = ("python3", "fetch_files.py", "--stdin")
    assert through_proxy(plan_of(), argv) == argv
    assert through_proxy(plan_of(proxy_script=TURBO, bundle="/srv/bundle"), argv) == argv
    shell, program, script, hosts, *rest = through_proxy(plan_of(proxy_script=TURBO), argv)
    assert (shell, script, tuple(rest)) == ("sh", TURBO, argv)
    assert program.endswith("/with_proxy.sh")
    assert {"127.0.0.1", "pypi.tuna.tsinghua.edu.cn", "hf-mirror.com", "ghfast.top"} <= set(hosts.split(","))
    assert not any(served(f"https://{host}/") for host in hosts.split(","))


def test_every_server_of_the_sites_own_is_asked_directly() -> None:
    site = plan_of(
        index_url="https://pypi.test/simple",
        hub_endpoint="https://huggingface.co",
        s3_endpoint="https://s3.test:9000",
        url_mirrors={"https://github.com/": "https://gh.test/https://github.com/"},
        find_links=["/srv/wheels", "https://wheels.test/x"],
        peer_address="10.0.0.7",
    ).settings
    found = set(direct(site, []))
    assert {"pypi.test", "s3.test", "gh.test", "wheels.test", "10.0.0.7", "modelscope.cn"} <= found
    assert "huggingface.co" not in found


def test_preflight_does_not_ask_what_goes_through_the_proxy_where_the_host_has_the_script() -> None:
    plain = {need.url: need for need in endpoints_of(plan_of())}
    needs = {need.url: need for need in endpoints_of(plan_of(proxy_script=TURBO))}
    assert needs.keys() == plain.keys()
    for url, need in needs.items():
        there = [f"|| [ -r '{TURBO}' ]" in case.done for case in need.unless]
        assert (all(there) and there != []) is served(url), url
    assert any(map(served, needs)) and not all(map(served, needs))


@pytest.mark.parametrize("url", ["https://notgithub.com/", "https://github.com.evil.test/", "/srv/x"])
def test_only_the_documented_servers_count(url: str) -> None:
    assert not served(url)
    assert served("https://raw.githubusercontent.com/x") and served("https://huggingface.co/api")
