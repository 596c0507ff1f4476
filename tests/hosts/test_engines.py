"""The source route on real hosts: an engine in small, built for real, killed, resumed, refused, passed on.

A host of each kind is provisioned once; a test begins on one that has its environment and no engine.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_sites import SOURCE_ON_HOST, SourceSite, build_tools, index_of, standin
from machines import Kind, Machine
from sites import Site

from tasks.digest import digest_of

ROOT = "/opt/rackwright"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> standin.Source:
    return standin.Source(tmp_path_factory.mktemp("source"), f"file://{SOURCE_ON_HOST}/git")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("index")
    wheels = [*build_tools().glob("*.whl"), *standin.standin_wheels(folder / "made").values()]
    with index_of(folder, wheels) as server:
        yield server


@dataclass(frozen=True)
class Provisioned:
    """A host that was provisioned from bare, and what was seen of it."""

    host: Machine
    source: standin.Source
    first: str
    again: str
    receipt: dict[str, Any]
    provenance: dict[str, Any]
    head: str


@pytest.fixture(scope="module")
def provisioned(
    hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory, index: Any, source: standin.Source
) -> Iterator[Callable[[Kind], Provisioned]]:
    """`provisioned("systemd")`: that kind of host; `site` ran on it twice, then the engine was stopped."""
    made: dict[Kind, Provisioned] = {}

    def get(kind: Kind) -> Provisioned:
        if kind not in made:
            host = Machine(kind, "gpu1")
            stack.callback(host.stop)
            host.start()
            site = SourceSite(tmp_path_factory.mktemp(f"first-{kind}"), [host], index, source)
            site.prepare(host)
            first, again = site.run("site", "-y", timeout=600), site.run("site", "-y", timeout=300)
            provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
            head = host.run(f"git -C {ROOT}/src/vllm rev-parse HEAD").stdout.strip()
            made[kind] = Provisioned(host, source, first, again, receipt(host), provenance, head)
            site.run("stop", "-y")
        return made[kind]

    with contextlib.ExitStack() as stack:
        yield get


def without_engine(host: Machine) -> Machine:
    """Take away the engine, its build and what belongs to them; the environment's other packages stay."""
    packages = f"{ROOT}/env/lib/python3.*/site-packages"
    host.run(
        f"for d in {ROOT}/jobs/engine*; do for j in {ROOT}/lib/*/job.sh; do"
        ' [ -d "$d" ] && sh $j cancel $d; done; done; '
        f"rm -rf {ROOT}/src {ROOT}/wheels/built {ROOT}/wheels/flashinfer* {ROOT}/jobs/engine*"
        f" {packages}/vllm* {packages}/flashinfer* {ROOT}/env/bin/vllm {ROOT}/receipts/engine.json"
        f" {standin.SLOW} {standin.HUNGRY}"
    )
    return host


@pytest.fixture(params=["systemd", "container"])
def host(request: pytest.FixtureRequest, provisioned: Callable[[Kind], Provisioned]) -> Machine:
    """Each kind of host in turn, without an engine."""
    return without_engine(provisioned(request.param).host)


@pytest.fixture
def site(host: Machine, tmp_path: Path, index: Any, source: standin.Source) -> SourceSite:
    return SourceSite(tmp_path, [host], index, source)


@pytest.fixture
def container(provisioned: Callable[[Kind], Provisioned]) -> Machine:
    """One host, where its kind makes no difference."""
    return without_engine(provisioned("container").host)


@pytest.fixture
def rented(container: Machine, tmp_path: Path, index: Any, source: standin.Source) -> SourceSite:
    return SourceSite(tmp_path, [container], index, source)


def receipt(machine: Machine, step: str = "engine") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.run(f"cat {ROOT}/receipts/{step}.json").stdout)
    return found


@pytest.mark.parametrize("kind", ["systemd", "container"])
def test_site_builds_serves_and_changes_nothing_the_second_time(
    kind: Kind, provisioned: Callable[[Kind], Provisioned]
) -> None:
    seen = provisioned(kind)
    detail = seen.receipt["detail"]
    assert detail["how"] == "built"
    assert detail["checks"] == [
        "commit",
        "version torch",
        "flashinfer-python == flashinfer-cubin",
        "one CUDA major",
        "import vllm._C_stable_libtorch",
        "import vllm._moe_C_stable_libtorch",
        "operator scaled_fp4_quant",
    ]
    assert seen.head == seen.source.commit
    assert seen.provenance["key"]["commit"] == seen.source.commit
    assert {one["name"]: one["proven"] for one in seen.provenance["source"]["dependencies"]} == {
        "cutlass": False,
        "deepgemm": True,
    }
    assert "acceptance" in seen.first
    assert "No changes" in seen.again
    assert "] Success" not in seen.again


def until(process: subprocess.Popen[str], *words: str) -> str:
    """What a run prints until one line holds all of these words; it must, before it ends."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if all(word in line for word in words):
            return text
    raise AssertionError(f"no line has {words}:\n{text}")


def begin_slow_build(host: Machine, site: SourceSite, seconds: str, objects: int) -> subprocess.Popen[str]:
    """Start a build of two jobs whose steps take a while; its process, once so many objects are there."""
    host.write(standin.SLOW, seconds)
    process = site.start("engine", "-y", "--data", "max_jobs=2")
    count = f"find {ROOT}/src/vllm/build -name '*.o' 2>/dev/null | wc -l"
    deadline = time.monotonic() + 180
    while int(host.run(count).stdout) < objects:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return process


def compiled(host: Machine) -> int:
    """Compile steps that ninja has on record, over all tries."""
    script = f"cat $(find {ROOT}/src/vllm/build -name .ninja_log) | grep -c '\\.o'"
    return int(host.run(script, check=False).stdout or 0)


def builds_running(host: Machine) -> int:
    """How many ninjas run on the host."""
    return int(host.run("pgrep -cx ninja", check=False).stdout or 0)


def test_a_build_shows_its_progress_and_killed_halfway_it_goes_on_and_compiles_nothing_twice(
    host: Machine, site: SourceSite
) -> None:
    process = begin_slow_build(host, site, "2", 1)
    until(process, "engine-build: ", " % ", " steps", " left")
    while compiled(host) < standin.UNITS // 2:
        time.sleep(0.3)
    host.run("pkill -KILL -f '[b]uild_engine.py --stdin'")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "exit code 137" in output
    assert compiled(host) < standin.UNITS
    host.run(f"rm {standin.SLOW}")
    site.run("engine", "-y", timeout=300)
    assert receipt(host)["detail"]["how"] == "built"
    assert builds_running(host) == 0
    # each object once, but for those that were in the compiler's hands when it was killed
    assert compiled(host) <= standin.UNITS + 2 + 2


def test_a_lost_connection_and_a_dead_controller_leave_the_build_running(
    host: Machine, site: SourceSite
) -> None:
    process = begin_slow_build(host, site, "1", 1)
    # from here on it would take minutes: nothing below has to be quick
    host.write(standin.SLOW, "8")
    host.kill_ssh_sessions()
    until(process, "connection lost", "the job goes on")
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert builds_running(host) == 1
    process = site.start("engine", "-y", "--data", "max_jobs=2")
    seen = until(process, "attached to it")
    host.run(f"rm {standin.SLOW}")
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, seen + rest
    assert "engine-build: already running" in seen
    assert receipt(host)["detail"]["how"] == "built"
    assert builds_running(host) == 0
    tries = json.loads(host.run(f"cat {ROOT}/src/vllm-build.json").stdout)["tries"]
    assert len(tries) == 1


def test_a_build_without_its_server_takes_an_archive_and_only_the_right_one(
    rented: SourceSite, container: Machine, tmp_path: Path
) -> None:
    """The engine's server cannot be reached; its dependencies' can."""
    host, site = container, rented
    site.write_recipe(repo="http://127.0.0.1:9/vllm.git")
    output = site.run("engine", "-y", rc=1, timeout=120)
    # preflight knows already, and names the ways around it
    assert "cannot be reached" in output
    assert "source_archive" in output
    wrong = site.source.clone_tar(tmp_path / "wrong.tar", newest=True)
    output = site.run("engine", "-y", "--data", f"source_archive={wrong}", rc=1, timeout=120)
    assert f"the archive holds another commit than {site.source.commit}" in output
    assert host.run(f"test -e {ROOT}/wheels/built", check=False).returncode != 0
    right = site.source.clone_tar(tmp_path / "right.tar")
    site.run("engine", "-y", "--data", f"source_archive={right}", timeout=300)
    provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
    assert provenance["source"]["how"] == "archive"
    assert host.run(f"git -C {ROOT}/src/vllm rev-parse HEAD").stdout.strip() == site.source.commit


def test_a_wheel_with_a_flipped_byte_is_never_installed(rented: SourceSite, container: Machine) -> None:
    host, site = container, rented
    pinned = site.pins["flashinfer-cubin"]
    good = pinned.read_bytes()
    served = Path(site.index.folder) / "files" / pinned.name
    served.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    try:
        output = site.run("engine", "-y", rc=1, timeout=200)
    finally:
        served.write_bytes(good)
    assert "is not the file that the recipe names" in output
    assert pinned.name in output
    names = host.run(f"ls {ROOT}/wheels").stdout.split()
    assert pinned.name not in names
    assert f"{pinned.name}.rejected" in names
    assert "flashinfer" not in host.run(f"ls {ROOT}/env/lib/python3.*/site-packages").stdout
    site.run("engine", "-y", timeout=300)
    assert receipt(host)["detail"]["how"] == "built"


def test_a_garbled_expression_for_requirements_stops_before_anything_is_installed(
    rented: SourceSite, container: Machine, tmp_path: Path
) -> None:
    text = (tmp_path / "source.toml").read_text()
    (tmp_path / "source.toml").write_text(text.replace("^[[:space:]]*--extra", "^--other-extra"))
    output = rented.run("engine", "-y", rc=1, timeout=200)
    assert "matches 0 lines" in output
    left = container.run(f"ls -d {ROOT}/jobs/engine-packages {ROOT}/src/vllm.lock 2>/dev/null || :").stdout
    assert left == "", "neither a lock nor an installation was begun"
    assert "flashinfer" not in container.run(f"ls {ROOT}/env/lib/python3.*/site-packages").stdout


def test_a_build_killed_for_memory_is_named_and_goes_on_with_fewer_jobs(
    host: Machine, site: SourceSite, memory_limit: Callable[[Machine, int], None]
) -> None:
    memory_limit(host, 700)
    host.write(standin.HUNGRY, "320")
    site.run("engine", "-y", "--data", "max_jobs=4", timeout=600)
    assert receipt(host)["detail"]["how"] == "built"
    log = host.run(f"cat {ROOT}/jobs/engine-build/log").stdout
    assert "memory ran out with 4 jobs; going on with 2" in log
    tries = json.loads(host.run(f"cat {ROOT}/src/vllm-build.json").stdout)["tries"]
    assert [one["ended"] for one in tries][-1] == "done"
    assert tries[0]["ended"] == "memory"
    assert tries[-1]["jobs"] < 4


def test_a_host_too_small_for_one_job_is_told_so(
    rented: SourceSite, container: Machine, memory_limit: Callable[[Machine, int], None]
) -> None:
    memory_limit(container, 700)
    container.write(standin.HUNGRY, "900")
    output = rented.run("engine", "-y", rc=1, timeout=300)
    assert "memory ran out with a single job" in output
    assert "give this host more memory" in output


@pytest.fixture
def memory_limit() -> Iterator[Callable[[Machine, int], None]]:
    """Bound a host's memory, in MiB, as a container's cgroup does."""
    made: list[Path] = []

    def bound(machine: Machine, mib: int) -> None:
        group = Path("/sys/fs/cgroup/memory") / f"rackwright-test-memory-{machine.home.name}"
        group.mkdir()
        made.append(group)
        (group / "memory.limit_in_bytes").write_text(str(mib << 20))
        for pid in machine._processes():
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))

    if not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        pytest.skip("no cgroup version 1 with memory here")
    yield bound
    for group in made:
        (group / "memory.limit_in_bytes").write_text("-1")
        deadline = time.monotonic() + 60
        while pids := (group / "cgroup.procs").read_text().split():  # also of what starts meanwhile
            assert time.monotonic() < deadline
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_another_host_installs_a_whole_wheel_from_the_wheelhouse_and_another_kind_of_host_is_refused(
    provisioned: Callable[[Kind], Provisioned],
    new_host: Callable[..., Machine],
    tmp_path: Path,
    index: Any,
    source: standin.Source,
) -> None:
    builder, second = without_engine(provisioned("systemd").host), new_host("container", "second")
    site = SourceSite(tmp_path, [builder, second], index, source)
    site.prepare(second, repositories=False)
    site.run("build", "-y", "--limit", "gpu1", timeout=300)
    (entry,) = (tmp_path / "wheelhouse").iterdir()
    assert {path.name for path in entry.iterdir()} >= {"provenance.json", "engine.lock", "build.log"}
    # one bit of the wheel is wrong: it is not installed
    (wheel,) = entry.glob("*.whl")
    good = wheel.read_bytes()
    wheel.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
    output = site.run("engine", "-y", "--limit", "second", rc=1, timeout=200)
    assert "expected SHA-256" in output
    assert second.run(f"test -x {ROOT}/env/bin/vllm", check=False).returncode != 0
    wheel.write_bytes(good)
    site.run("engine", "-y", timeout=300)
    assert receipt(second)["detail"]["how"] == "wheelhouse"
    assert receipt(builder)["detail"]["how"] == "built"
    assert "operator scaled_fp4_quant" in receipt(second)["detail"]["checks"]
    # nothing was compiled there, and nothing to compile with is needed
    assert second.run(f"test -e {ROOT}/src", check=False).returncode != 0
    again = site.run("engine", "-y", timeout=200)
    assert "] Success" not in again
    # the same engine, built for another glibc
    provenance = json.loads((entry / "provenance.json").read_text())
    provenance["key"]["glibc"] = "2.99"
    other = entry.with_name(digest_of(provenance["key"])[:16])
    entry.rename(other)
    (other / "provenance.json").write_text(json.dumps(provenance))
    second.run(f"rm -rf {ROOT}/receipts/engine.json {ROOT}/wheels/built")
    output = site.run("engine", "-y", "--limit", "second", rc=1, timeout=200)
    assert "glibc: built with 2.99, here 2.36" in output
    assert f"rackwright build {site.inventory} --limit second" in output


# what a person's miniconda is to us: it makes a prefix with a Python and pip, or says why not
CONDA = '#!/bin/sh\necho "$@" >>/root/asked\nexec python3 -m venv "$5"\n'
BROKEN_CONDA = "#!/bin/sh\necho 'CondaHTTPError: HTTP 000 CONNECTION FAILED for url' >&2\nexit 1\n"


def test_a_conda_of_the_host_makes_the_environment_and_a_broken_one_is_told(
    container_host: Machine, tmp_path: Path, index: Any
) -> None:
    host, conda = container_host, "/root/miniconda3/bin/conda"
    host.write("/root/.condarc", f"channels:\n  - {index.url}/conda\n")
    site = Site(tmp_path, [host], env_kind="conda")
    site.prepare(host)
    host.write(conda, BROKEN_CONDA, mode="755")
    output = site.run("engine", "-y", rc=1)
    assert f"{conda} create failed" in output
    assert "CondaHTTPError: HTTP 000" in output
    assert "~/.condarc" in output
    assert host.run(f"test -e {ROOT}/env", check=False).returncode != 0
    host.write(conda, CONDA, mode="755")
    output = site.run("engine", "-y")
    assert "environment: conda, Python 3.11" in output
    assert receipt(host, "environment")["detail"]["kind"] == "conda"
    assert host.run("cat /root/asked").stdout == (
        f"create --yes --quiet --prefix {ROOT}/env python=3.11 pip\n"
    )
    assert "] Success" not in site.run("engine", "-y")
