"""What goes wrong on real hosts, and what a person is told: nothing lost, nothing half, the others go on."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machine, free_port
from sites import PACKAGE, WHEEL, WHEELS_ON_HOST, Site

ROOT = "/opt/rackwright"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"it did not come within {seconds} s")


class SlowIndex:
    """A package index on loopback that serves one wheel a few kilobytes at a time, and counts."""

    def __init__(self, wheel: Path, seconds: float) -> None:
        self.wheel_requests = 0
        body = wheel.read_bytes()
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.path.endswith(".whl"):
                    page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
                    self.send_response(200)
                    self.send_header("Content-Type", "text/html")
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                    return
                index.wheel_requests += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                step = len(body) // 20 + 1
                for start in range(0, len(body), step):
                    self.wfile.write(body[start : start + step])
                    self.wfile.flush()
                    time.sleep(seconds / 20)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def slow(tmp_path: Path, systemd_host: Machine) -> Iterator[tuple[Site, SlowIndex]]:
    site = Site(tmp_path, find_links=[])
    index = SlowIndex(site.wheel, 12)
    site.data["index_url"] = index.url
    site.hosts([(systemd_host.name, systemd_host.inventory_data())])
    yield site, index
    index.close()


def begin_slow_install(site: Site, index: SlowIndex) -> subprocess.Popen[str]:
    """A run that is in the middle of the engine's download."""
    run = site.start("engine", "-y")
    wait_for(lambda: index.wheel_requests > 0)
    return run


def installed_once(host: Machine, site: Site, index: SlowIndex) -> None:
    """Run again: it ends well, attached to the first job, with one download in all."""
    output = site.run("engine", "-y")
    assert "attached" in output or "No changes" in output
    assert index.wheel_requests == 1
    assert host.run(f"{ROOT}/env/bin/vllm --version").stdout.strip()


def test_a_killed_controller_loses_nothing_and_the_next_run_attaches(
    systemd_host: Machine, slow: tuple[Site, SlowIndex]
) -> None:
    site, index = slow
    run = begin_slow_install(site, index)
    run.kill()
    run.communicate()
    installed_once(systemd_host, site, index)


def test_dropped_ssh_sessions_are_taken_up_again(systemd_host: Machine, slow: tuple[Site, SlowIndex]) -> None:
    site, index = slow
    run = begin_slow_install(site, index)
    assert systemd_host.kill_ssh_sessions() > 0
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "connection lost" in output
    installed_once(systemd_host, site, index)


def test_ctrl_c_detaches_says_so_and_ends_with_130(
    systemd_host: Machine, slow: tuple[Site, SlowIndex]
) -> None:
    site, index = slow
    run = begin_slow_install(site, index)
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=20)
    assert run.returncode == 130, output
    assert "detached" in output
    assert "goes on" in output
    installed_once(systemd_host, site, index)


def test_another_engine_is_refused_while_one_installs(
    systemd_host: Machine, slow: tuple[Site, SlowIndex]
) -> None:
    site, index = slow
    run = begin_slow_install(site, index)
    run.kill()
    run.communicate()
    recipe = site.folder / "standin.toml"
    text = recipe.read_text()
    recipe.write_text(
        text.replace("imports = []", "imports = []") + '\n[[engine.wheel.shims]]\nname = "x"\nversion = "1"\n'
    )
    output = site.run("engine", "-y", rc=1)
    assert "another engine job is running for other inputs" in output
    recipe.write_text(text)
    installed_once(systemd_host, site, index)


FILL = {
    "disk full": f"dd if=/dev/zero of={ROOT}/filler bs=1M 2>/dev/null || :",
    "no inodes": f"mkdir {ROOT}/filler; cd {ROOT}/filler; seq 99999 | xargs touch 2>/dev/null || :",
}


@pytest.mark.parametrize("what", FILL)
def test_a_disk_that_fills_up_midway_is_named_and_the_next_run_goes_on(
    systemd_host: Machine, slow: tuple[Site, SlowIndex], what: str
) -> None:
    site, index = slow
    systemd_host.tmpfs(ROOT, "300m", 9000)
    run = begin_slow_install(site, index)
    systemd_host.run(FILL[what])
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert {"disk full": "space", "no inodes": "inode"}[what] in output.lower()
    assert "Fix:" in output
    systemd_host.run(f"rm -rf {ROOT}/filler")
    site.run("engine", "-y")
    assert systemd_host.run(f"{ROOT}/env/bin/vllm --version").stdout.strip()


def test_a_wheel_with_a_flipped_byte_is_refused_and_named(systemd_host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [systemd_host])
    site.prepare(systemd_host)
    flip(systemd_host, f"{WHEELS_ON_HOST}/{WHEEL}")
    output = site.run("engine", "-y", rc=1)
    assert PACKAGE in output or WHEEL in output
    assert "sha256" in output.lower() or "SHA-256" in output
    assert systemd_host.run(f"test -e {ROOT}/env/bin/vllm", check=False).returncode != 0
    site.prepare(systemd_host)
    site.run("engine", "-y")


def flip(host: Machine, path: str) -> None:
    """Change one byte in the middle of a file, keeping its size."""
    host.run(
        f"""python3 - <<'E'
import os
path = {path!r}
with open(path, "r+b") as file:
    file.seek(os.path.getsize(path) // 2)
    byte = file.read(1)
    file.seek(-1, 1)
    file.write(bytes([byte[0] ^ 1]))
E"""
    )


def test_a_shard_with_a_flipped_byte_is_refused_named_and_mended(
    systemd_host: Machine, tmp_path: Path
) -> None:
    site = Site(tmp_path, [systemd_host])
    site.prepare(systemd_host)
    site.run("weights", "-y")
    copy, shard = "/srv/copy", "model-00002-of-00003.safetensors"
    systemd_host.run(f"cp -a {ROOT}/models/rehearsal {copy} && rm -rf {ROOT}/models && chmod -R u+w {copy}")
    flip(systemd_host, f"{copy}/{shard}")
    bad = Site(tmp_path, [systemd_host], sources=["path"], model_path=copy)
    output = bad.run("weights", "-y", rc=1)
    assert shard in output
    assert systemd_host.run(f"test -e {ROOT}/models/rehearsal/{shard}", check=False).returncode != 0
    Site(tmp_path, [systemd_host]).run("weights", "-y")


def test_a_port_that_a_stranger_holds_is_named_with_its_owner(systemd_host: Machine, tmp_path: Path) -> None:
    site = Site(tmp_path, [systemd_host])
    port = site.data["port"]
    systemd_host.run(f"setsid -f python3 -m http.server {port} --bind 127.0.0.1 >/dev/null 2>&1 </dev/null")
    wait_for(lambda: systemd_host.run(f"curl -s -m 2 127.0.0.1:{port}", check=False).returncode == 0)
    output = site.run("site", "-y", rc=1)
    assert str(port) in output
    assert "python3" in output
    assert systemd_host.run(f"test -e {ROOT}", check=False).returncode != 0


def test_an_unreachable_host_and_a_wrong_key_do_not_stop_the_others(
    systemd_host: Machine, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.prepare(systemd_host)
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    good = systemd_host.inventory_data()
    site.hosts(
        [
            ("gone", {**good, "ssh_port": free_port()}),
            ("locked", {**good, "ssh_key": str(key)}),
            (systemd_host.name, good),
        ]
    )
    output = site.run("site", "-y", rc=1)
    assert "gone" in output
    assert "locked" in output
    assert site.report(systemd_host.name)["verdict"] == "pass"


def test_a_host_that_fails_midway_does_not_stop_the_other(
    new_host: Callable[..., Machine], tmp_path: Path
) -> None:
    one, two = new_host("systemd", "gpu1"), new_host("systemd", "gpu2")
    site = Site(tmp_path)
    site.prepare(two)  # gpu1 finds no wheel
    site.hosts([(host.name, {**host.inventory_data(), "port": free_port()}) for host in (one, two)])
    output = site.run("site", "-y", rc=1)
    assert "engine failed on gpu1" in output
    assert site.report("gpu1")["verdict"] == "fail"
    assert site.report("gpu2")["verdict"] == "pass"


def test_verbs_for_what_is_installed_leave_nothing_where_nothing_is(
    systemd_host: Machine, tmp_path: Path
) -> None:
    site = Site(tmp_path, [systemd_host])
    site.prepare(systemd_host)
    for verb in ("start", "restart", "rollback", "promote", "serve", "accept", "bench", "manifest"):
        assert "rackwright site" in site.run(verb, "-y", rc=1), verb
        assert systemd_host.run(f"ls -A {ROOT} 2>/dev/null || :").stdout == "", verb
