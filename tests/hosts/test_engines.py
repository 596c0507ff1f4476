"""The source route on real hosts: an engine in small, built for real, killed, resumed, refused, passed on."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_sites import SOURCE_ON_HOST, SourceSite, build_tools, index_of, standin
from machines import Machine

ROOT = "/opt/rackwright"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> standin.Source:
    return standin.Source(tmp_path_factory.mktemp("source"), f"file://{SOURCE_ON_HOST}/git")


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("index")
    wheels = [*build_tools().glob("*.whl"), *standin.standin_wheels(folder / "made").values()]
    with index_of(folder, wheels) as server:
        yield server


@pytest.fixture
def rented(container_host: Machine, tmp_path: Path, index: Any, source: standin.Source) -> SourceSite:
    """A site on a host without systemd, where the kind of host makes no difference."""
    made = SourceSite(tmp_path, [container_host], index, source)
    made.prepare(container_host)
    return made


@pytest.fixture
def site(host: Machine, tmp_path: Path, index: Any, source: standin.Source) -> SourceSite:
    made = SourceSite(tmp_path, [host], index, source)
    made.prepare(host)
    return made


def receipt(machine: Machine, step: str = "engine") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.run(f"cat {ROOT}/receipts/{step}.json").stdout)
    return found


def test_site_builds_serves_and_changes_nothing_the_second_time(host: Machine, site: SourceSite) -> None:
    output = site.run("site", "-y", timeout=600)
    detail = receipt(host)["detail"]
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
    assert site.source.commit in host.run(f"git -C {ROOT}/src/vllm rev-parse HEAD").stdout
    provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
    assert provenance["key"]["commit"] == site.source.commit
    assert {one["name"]: one["proven"] for one in provenance["source"]["dependencies"]} == {
        "cutlass": False,
        "deepgemm": True,
    }
    assert "acceptance" in output
    again = site.run("site", "-y", timeout=200)
    assert "No changes" in again
    assert "] Success" not in again


def begin_slow_build(host: Machine, site: SourceSite, seconds: str = "0.6") -> Any:
    """Start a build whose steps take a while; its process, once a few objects are there."""
    host.write(standin.SLOW, seconds)
    process = site.start("engine", "-y")
    objects = f"find {ROOT}/src/vllm/build -name '*.o' 2>/dev/null | wc -l"
    deadline = time.monotonic() + 180
    while int(host.run(objects).stdout) < standin.UNITS // 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return process


def compiled(host: Machine) -> int:
    """Compile steps that ninja has on record, over all tries."""
    script = f"cat $(find {ROOT}/src/vllm/build -name .ninja_log) | grep -c '\\.o'"
    return int(host.run(script, check=False).stdout or 0)


def builds_running(host: Machine) -> int:
    """How many ninjas run on the host."""
    return int(host.run("pgrep -cx ninja", check=False).stdout or 0)


def test_a_build_that_is_killed_halfway_goes_on_and_compiles_nothing_twice(
    host: Machine, site: SourceSite
) -> None:
    process = begin_slow_build(host, site)
    host.run("pkill -KILL -f '[b]uild_engine.py --stdin'")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "exit code 137" in output
    before = compiled(host)
    assert before >= standin.UNITS // 2 - 2
    host.run(f"rm {standin.SLOW}")
    output = site.run("engine", "-y", timeout=300)
    assert receipt(host)["detail"]["how"] == "built"
    assert builds_running(host) == 0
    # each object once, but for those that were in the compiler's hands when it was killed
    assert compiled(host) <= standin.UNITS + 2 + 2


def test_a_lost_connection_and_a_dead_controller_leave_the_build_running(
    host: Machine, site: SourceSite
) -> None:
    process = begin_slow_build(host, site, "2.5")
    host.kill_ssh_sessions()
    time.sleep(4)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert builds_running(host) == 1
    # what is left takes long, until somebody is attached again
    host.write(standin.SLOW, "15")
    process = site.start("engine", "-y")
    assert process.stdout
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "attached to it" in line:
            host.run(f"rm {standin.SLOW}")
    assert process.wait() == 0, "".join(seen)
    assert any("engine-build: already running" in line for line in seen), "".join(seen)
    assert receipt(host)["detail"]["how"] == "built"
    assert builds_running(host) == 0
    tries = json.loads(host.run(f"cat {ROOT}/src/vllm-build.json").stdout)["tries"]
    assert len(tries) == 1


def test_progress_has_percent_and_steps(container_host: Machine, rented: SourceSite) -> None:
    site = rented
    container_host.write(standin.SLOW, "1")
    output = site.run("engine", "-y", timeout=300)
    lines = [line for line in output.splitlines() if "engine-build: " in line and " % " in line]
    assert lines, output
    assert any(" steps" in line and " left" in line for line in lines)


def test_a_build_without_its_server_takes_an_archive_and_only_the_right_one(
    container_host: Machine, tmp_path: Path, index: Any
) -> None:
    """The engine's server cannot be reached; its dependencies' can."""
    host = container_host
    source = standin.Source(tmp_path / "s", f"file://{SOURCE_ON_HOST}/git")
    site = SourceSite(tmp_path, [host], index, source)
    site.prepare(host)
    site.write_recipe(repo="http://127.0.0.1:9/vllm.git")
    output = site.run("engine", "-y", rc=1, timeout=120)
    # preflight knows already, and names the ways around it
    assert "cannot be reached" in output
    assert "source_archive" in output
    wrong = source.clone_tar(tmp_path / "wrong.tar", newest=True)
    output = site.run("engine", "-y", "--data", f"source_archive={wrong}", rc=1, timeout=120)
    assert f"the archive holds another commit than {source.commit}" in output
    assert host.run(f"test -e {ROOT}/wheels/built", check=False).returncode != 0
    right = source.clone_tar(tmp_path / "right.tar")
    site.run("engine", "-y", "--data", f"source_archive={right}", timeout=300)
    provenance = json.loads(host.run(f"cat {ROOT}/wheels/built/*/provenance.json").stdout)
    assert provenance["source"]["how"] == "archive"
    assert host.run(f"git -C {ROOT}/src/vllm rev-parse HEAD").stdout.strip() == source.commit


def test_a_wheel_with_a_flipped_byte_is_never_installed(container_host: Machine, rented: SourceSite) -> None:
    host, site = container_host, rented
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
    container_host: Machine, rented: SourceSite, tmp_path: Path
) -> None:
    site = rented
    text = (tmp_path / "source.toml").read_text()
    (tmp_path / "source.toml").write_text(text.replace("^[[:space:]]*--extra", "^--other-extra"))
    output = site.run("engine", "-y", rc=1, timeout=200)
    assert "matches 0 lines" in output
    assert "torch" not in container_host.run(f"ls {ROOT}/env/lib/python3.*/site-packages").stdout


def test_a_build_killed_for_memory_is_named_and_goes_on_with_fewer_jobs(
    host: Machine, site: SourceSite, memory_limit: Callable[[Machine, int], None]
) -> None:
    memory_limit(host, 700)
    host.write(standin.HUNGRY, "320")
    output = site.run("engine", "-y", "--data", "max_jobs=4", timeout=600)
    assert receipt(host)["detail"]["how"] == "built"
    log = host.run(f"cat {ROOT}/jobs/engine-build/log").stdout
    assert "memory ran out with 4 jobs; going on with 2" in log
    tries = json.loads(host.run(f"cat {ROOT}/src/vllm-build.json").stdout)["tries"]
    assert [one["ended"] for one in tries][-1] == "done"
    assert tries[0]["ended"] == "memory"
    assert tries[-1]["jobs"] < 4
    assert output


def test_a_host_too_small_for_one_job_is_told_so(
    container_host: Machine, rented: SourceSite, memory_limit: Callable[[Machine, int], None]
) -> None:
    site = rented
    memory_limit(container_host, 700)
    container_host.write(standin.HUNGRY, "900")
    output = site.run("engine", "-y", rc=1, timeout=300)
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
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_another_host_installs_from_the_wheelhouse_and_another_kind_of_host_is_refused(
    new_host: Callable[..., Machine], tmp_path: Path, index: Any, source: standin.Source
) -> None:
    builder, second = new_host("systemd", "builder"), new_host("container", "second")
    site = SourceSite(tmp_path, [builder, second], index, source)
    site.prepare(builder)
    site.prepare(second, repositories=False)
    site.run("build", "-y", "--limit", "builder", timeout=300)
    (entry,) = (tmp_path / "wheelhouse").iterdir()
    assert {path.name for path in entry.iterdir()} >= {"provenance.json", "engine.lock", "build.log"}
    output = site.run("engine", "-y", timeout=300)
    assert receipt(second)["detail"]["how"] == "wheelhouse"
    assert receipt(builder)["detail"]["how"] == "built"
    assert "operator scaled_fp4_quant" in receipt(second)["detail"]["checks"]
    # nothing was compiled there, and nothing to compile with is needed
    assert second.run(f"test -e {ROOT}/src", check=False).returncode != 0
    again = site.run("engine", "-y", timeout=200)
    assert "] Success" not in again, output
    # the same engine, built for another glibc
    provenance = json.loads((entry / "provenance.json").read_text())
    provenance["key"]["glibc"] = "2.99"
    from tasks.digest import digest_of

    other = entry.with_name(digest_of(provenance["key"])[:16])
    entry.rename(other)
    (other / "provenance.json").write_text(json.dumps(provenance))
    second.run(f"rm -rf {ROOT}/receipts/engine.json {ROOT}/wheels/built")
    output = site.run("engine", "-y", "--limit", "second", rc=1, timeout=200)
    assert "glibc: built with 2.99, here 2.36" in output
    assert "rackwright build INVENTORY --limit second" in output


def test_a_wheel_of_the_wheelhouse_that_was_changed_is_not_installed(
    new_host: Callable[..., Machine], tmp_path: Path, index: Any, source: standin.Source
) -> None:
    builder, second = new_host("container", "builder"), new_host("container", "second")
    site = SourceSite(tmp_path, [builder, second], index, source)
    site.prepare(builder)
    site.prepare(second, repositories=False)
    site.run("build", "-y", "--limit", "builder", timeout=300)
    (wheel,) = (tmp_path / "wheelhouse").glob("*/*.whl")
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(bytes(data))
    output = site.run("engine", "-y", "--limit", "second", rc=1, timeout=200)
    assert "expected SHA-256" in output
    assert second.run(f"test -x {ROOT}/env/bin/vllm", check=False).returncode != 0
