from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.facts import Endpoint, HostFacts, ProbeRequest, Unless, build_probe, facts_to_json, parse_probe
from tasks.facts.text import split_sections

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
BASIC = [
    *[
        "sh",
        "sleep",
        "head",
        "tail",
        "tr",
        "sed",
        "grep",
        "cat",
        "cut",
        "uname",
        "id",
        "date",
        "df",
        "stat",
        "ls",
        "readlink",
        "sort",
        "nproc",
        "getconf",
        "env",
    ]
]

SHELLS = [argv for argv in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(argv[0])]
SH = Path(__file__).resolve().parents[3] / "tasks" / "facts" / "sh"


def request(**changes: object) -> ProbeRequest:
    return ProbeRequest(root="/opt/rackwright", model_root="/data/models", **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_shell_reads_this_machine(shell: list[str], run_probe: Run) -> None:
    asked = request(ports=(1,), env_python=sys.executable)
    done = run_probe(build_probe(asked), shell)
    facts = parse_probe(done.stdout.decode("ascii"), asked, received_at=time.time())
    assert (done.returncode, done.stderr) == (0, b"")
    assert facts.complete and facts.reasons == {}
    assert facts.system.sysname == "Linux" and facts.system.kernel and facts.system.boot_id
    assert facts.system.clock_skew_s is not None and abs(facts.system.clock_skew_s) < 60
    assert facts.cpu.cpus and facts.cpu.flags and facts.memory.available
    assert facts.disk.at("/opt/rackwright").free_bytes and facts.disk.at("/dev/shm").total_bytes
    assert facts.net.listeners is not None
    assert facts.tools.env and facts.tools.env.version == ".".join(map(str, sys.version_info[:3]))


def test_nothing_is_written_on_the_host(
    run_probe: Run, tmp_path: Path, tool_folder: Callable[..., Path]
) -> None:
    asked = ProbeRequest(root=str(tmp_path / "a" / "root"), model_root=str(tmp_path / "models"))
    done = run_probe(build_probe(asked), ["dash"], only=tool_folder(*BASIC))
    assert {path.name for path in tmp_path.iterdir()} == {"tools"}
    facts = parse_probe(done.stdout.decode(), asked)
    assert facts.disk.at(str(tmp_path / "a" / "root")).at == str(tmp_path)
    assert facts.disk.at(str(tmp_path / "models")).exists is False


def test_it_works_where_next_to_nothing_is_installed(
    shell: list[str], run_probe: Run, tool_folder: Callable[..., Path]
) -> None:
    asked = request(endpoints=(Endpoint("https://x.test/"),), env_python="/no/such/python")
    done = run_probe(build_probe(asked), shell, only=tool_folder(*BASIC))
    facts = parse_probe(done.stdout.decode("ascii"), asked)
    assert facts.complete
    assert facts.memory.available and facts.disk.at("/tmp").free_bytes
    # the system's own interpreters are looked for by path
    assert {str(Path(python.path).parent) for python in facts.tools.pythons} <= {"/usr/bin", "/usr/local/bin"}
    assert facts.tools.env is None
    # busybox carries a wget of its own, dash has nothing left to connect with
    assert facts.net.endpoints["https://x.test/"].reachable is not True


# One section whose command hangs, and one whose process cannot be ended at all: it leaves the process
# group, ignores TERM and keeps the pipe open, like nvidia-smi in uninterruptible sleep on a dead GPU.
STUCK = """
rw slow 3 1000 t 1 sh -c 'echo before; sleep 31.25'
rw stuck 2 1000 t 1 sh -c 'echo got; setsid sh -c "trap : TERM; sleep 7.25; sleep 7.25" & wait'
rw after 3 1000 echo fine
rw end 3 64 true
"""


@pytest.mark.slow
def test_what_hangs_is_given_up_and_the_rest_is_read(tool_folder: Callable[..., Path]) -> None:
    folder = tool_folder(*BASIC, "setsid", "timeout")
    bare = {"PATH": str(folder)}
    script = (SH / "prelude.sh").read_text("utf-8")
    runs = {}
    started = time.monotonic()
    for argv in SHELLS:
        for fallback in (False, True):  # with `timeout`, and where there is none
            text = script + ("\nrw_timeout=\n" if fallback else "") + STUCK
            program = shutil.which(argv[0])
            assert program
            command = [program, *argv[1:], "-c", text]
            runs[argv[0], fallback] = subprocess.Popen(command, env=bare, stdout=subprocess.PIPE, text=True)
    printed = {key: run.communicate(timeout=60)[0] for key, run in runs.items()}
    assert time.monotonic() - started < 7, "the process that cannot be ended was waited for"
    for key, text in printed.items():
        sections = split_sections(text)
        assert sections["slow"].text.startswith("before") and sections["slow"].timed_out, key
        assert sections["stuck"].text.startswith("got") and sections["stuck"].timed_out, key
        assert sections["after"].text == "fine" and sections["end"].rc == 0, key
    # busybox's own `timeout` ends the command but not the command's children
    assert len(_alive("31.25")) <= sum(argv[0] == "busybox" for argv in SHELLS)


@pytest.mark.slow
def test_no_helper_process_is_left_behind(run_probe: Run, tool_folder: Callable[..., Path]) -> None:
    marker = "31.4159"
    script = build_probe(request()).replace('sleep "$1"', f"sleep {marker}")
    run_probe(script, ["dash"], only=tool_folder(*BASIC))
    time.sleep(0.3)
    assert not _alive(marker)


def _alive(marker: str) -> list[Path]:
    """Processes with this word in their command line, after a moment's grace."""
    time.sleep(0.3)
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if marker.encode() in _bytes(path)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_bytes_that_are_no_text_and_forged_headers_stay_inside_their_section(
    shell: list[str], run_probe: Run, tool_folder: Callable[..., Path]
) -> None:
    snippet = r"printf 'a\000b\377\033[1mc\n@@rw:system\nsysname=Forged\n'; head -c 4000 /dev/urandom"
    script = build_probe(request(extra_sections=(("junk", snippet),)))
    done = run_probe(script, shell, only=tool_folder(*BASIC))
    text = done.stdout.decode("ascii")
    assert not set(text) - {chr(c) for c in range(32, 127)} - {"\n", "\t"}
    facts = parse_probe(text)
    assert facts.system.sysname == "Linux"
    assert facts.extra["junk"].startswith("ab?[1mc\n @@rw:system")


def test_output_is_bounded(run_probe: Run, tool_folder: Callable[..., Path]) -> None:
    script = build_probe(request(extra_sections=(("big", "yes x | head -c 3000000"),)))
    done = run_probe(script, ["dash"], only=tool_folder(*BASIC, "yes"))
    assert 500_000 < len(done.stdout) < 700_000
    assert parse_probe(done.stdout.decode()).complete


def test_the_owner_of_a_busy_port_is_found(
    shell: list[str], run_probe: Run, tool_folder: Callable[..., Path]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        asked = request(ports=(port, 1))
        done = run_probe(build_probe(asked), shell, only=tool_folder(*BASIC))
        facts = parse_probe(done.stdout.decode(), asked)
        assert [one.address for one in facts.net.listening(port)] == ["127.0.0.1"]
        assert "python" in facts.net.owners[port][0].name or "pytest" in facts.net.owners[port][0].name
        assert facts.net.listening(1) == ()


def test_an_endpoint_that_answers_and_one_that_refuses(
    run_probe: Run, tool_folder: Callable[..., Path]
) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", "/var/empty"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout
        port = int(server.stdout.readline().split("port ")[1].split()[0])
        good, bad = f"http://127.0.0.1:{port}/", "http://127.0.0.1:1/"
        asked = request(endpoints=(Endpoint(good), Endpoint(bad)))
        done = run_probe(build_probe(asked), ["dash"], only=tool_folder(*BASIC, "curl"))
        facts = parse_probe(done.stdout.decode(), asked)
    finally:
        server.kill()
        server.wait()
    assert facts.net.endpoints[good].reachable is True
    assert facts.net.endpoints[bad].reachable is False
    assert facts.net.endpoints[bad].why


PIP_CONF = """[global]
index-url = https://user:secret@127.0.0.1:1/simple
find-links =
    {folder}
    https://pages.test/wheels
extra-index-url = https://more.test/simple
"""


def test_the_hosts_own_pip_says_where_packages_come_from(
    shell: list[str],
    run_probe: Run,
    tmp_path: Path,
    tool_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheels, mine = tmp_path / "wheels", tmp_path / "mine"
    for folder in (wheels, mine):
        folder.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    (mine / "uv-0.13.9-py3-none-any.whl").touch()
    (tmp_path / "pip.conf").write_text(PIP_CONF.format(folder=wheels.as_uri()))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    torch = Unless("false", ("torch-2.13.0+cpu-*.whl",))
    asked = request(
        links=(str(mine),),
        endpoints=(
            Endpoint("pip:pip", (torch, Unless("false", ("uv-0.13.9-py3-none-any.whl", "anyio-4*.whl")))),
            Endpoint("http://127.0.0.1:1/torch/", (torch,)),
            Endpoint("http://127.0.0.1:1/done/", (Unless("[ -d / ]"), torch)),
            Endpoint("http://127.0.0.1:1/half/", (Unless("[ -d / ]"), Unless())),
        ),
    )
    done = run_probe(build_probe(asked), shell, only=tool_folder(*BASIC, "curl"))
    net = parse_probe(done.stdout.decode(), asked).net
    index, spared, finished, half = (net.endpoints[endpoint.url] for endpoint in asked.endpoints)
    assert (index.spared, index.reachable, index.at_hand) == (False, False, (1, 2))
    assert index.at == "http://127.0.0.1:1/simple/pip/".replace("http:", "https:")
    assert "secret" not in done.stdout.decode()
    assert [one.spared for one in (spared, finished, half)] == [True, True, False]
    assert net.pip == ("find-links", "extra-index-url")


def test_a_variable_wins_over_pips_files_and_a_folder_is_an_index(
    run_probe: Run, tmp_path: Path, tool_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simple").mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/simple")
    asked = request(endpoints=(Endpoint("pip:pip"), Endpoint("file:///no/such/index/pip/")))
    done = run_probe(build_probe(asked), ["dash"], only=tool_folder(*BASIC))
    there, gone = (parse_probe(done.stdout.decode(), asked).net.endpoints[one.url] for one in asked.endpoints)
    assert (there.reachable, there.at) == (True, f"file://{tmp_path}/simple/pip/")
    assert (gone.reachable, gone.why) == (False, "no such folder")


def test_a_conda_is_asked_about_its_own_channel(
    run_probe: Run, tmp_path: Path, tool_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "miniforge3"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "conda").write_text("#!/bin/sh\n")
    (prefix / "bin" / "conda").chmod(0o755)
    monkeypatch.setenv("CONDA_EXE", str(prefix / "bin" / "conda"))
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = request(endpoints=(Endpoint("conda:"),))
    tools = tool_folder(*BASIC)

    def channel() -> str | None:
        done = run_probe(build_probe(asked), ["dash"], only=tools)
        return parse_probe(done.stdout.decode(), asked).net.endpoints["conda:"].at

    (tools / "curl").symlink_to("/bin/false")
    assert channel() == "https://conda.anaconda.org/conda-forge/linux-64/repodata.json.zst"
    (tmp_path / ".condarc").write_text("channels:\n  - http://127.0.0.1:1/mirror/main\n")
    assert channel() == "http://127.0.0.1:1/mirror/main/linux-64/repodata.json.zst"


def test_paths_and_urls_cannot_run_commands(
    run_probe: Run, tmp_path: Path, tool_folder: Callable[..., Path]
) -> None:
    evil = f"/x'; touch {tmp_path}/owned; echo '"
    asked = ProbeRequest(
        root=evil,
        model_root="/$(touch /tmp/no)",
        endpoints=(Endpoint(f"https://a/$(touch {tmp_path}/o2)", (Unless("false", ("$(touch o3)",)),)),),
        links=(f"/y' $(touch {tmp_path}/o4)",),
    )
    done = run_probe(build_probe(asked), ["dash"], only=tool_folder(*BASIC, "touch", "curl"))
    facts = parse_probe(done.stdout.decode(), asked)
    assert {path.name for path in tmp_path.iterdir()} == {"tools"}
    assert facts.disk.at(evil).at == "/"


def test_extra_sections_have_plain_names() -> None:
    with pytest.raises(ValueError, match="a name is letters"):
        build_probe(request(extra_sections=(("a b", "true"),)))


def test_a_cut_answer_is_incomplete_and_says_so(run_probe: Run, tool_folder: Callable[..., Path]) -> None:
    text = run_probe(build_probe(request()), ["dash"], only=tool_folder(*BASIC)).stdout.decode()
    facts = parse_probe(text[: len(text) // 2])
    assert facts.complete is False
    assert "cut off" in facts.reasons["*"]


def test_nothing_at_all_gives_empty_facts_with_reasons() -> None:
    facts = parse_probe("")
    assert facts.system.kernel is None
    assert facts.system.reasons["kernel"] == "the probe did not get here"


@pytest.mark.slow
def test_random_damage_never_raises(run_probe: Run) -> None:
    asked = request(ports=(22,), endpoints=(Endpoint("https://x.test/"),))
    good = run_probe(build_probe(asked), ["dash"]).stdout.decode()
    rng = random.Random(20261130)
    for _ in range(120):
        text = list(good)
        for _ in range(rng.randint(1, 400)):
            position = rng.randrange(len(text))
            text[position] = rng.choice(
                ["", "\n", "=", " ", "9" * 30, "-", "[N/A]", "\x00", "é", ":", "@@rw:"]
            )
        facts = parse_probe("".join(text), asked, received_at=0.0)
        assert isinstance(facts, HostFacts)
        assert not [why for name, why in facts.reasons.items() if name != "*"], facts.reasons


def test_facts_become_json(run_probe: Run, tool_folder: Callable[..., Path]) -> None:
    asked = request()
    done = run_probe(build_probe(asked), ["dash"], only=tool_folder(*BASIC))
    data = facts_to_json(parse_probe(done.stdout.decode(), asked))
    assert data["system"]["sysname"] == "Linux"
    assert isinstance(data["cpu"]["flags"], list)
