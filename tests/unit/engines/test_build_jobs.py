"""How many jobs a build gets, and what it learns from tries that ran out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import build_engine
from tasks.onhost.build_engine import (
    GIB,
    KILLED,
    STEP,
    History,
    Jobs,
    build_env,
    cgroup_paths,
    end_leftover,
    fewer,
    memory_room,
    number_in,
    plan_jobs,
)


def planned(cores: int, gib: float, **more: int | None) -> Jobs:
    given = {"chosen": None, "threads": None, "at_most": None, **more}
    return plan_jobs(cores, int(gib * GIB), 5 * GIB, **given)


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(8, 1000, 8), (64, 64, 12), (2, 3, 1), (1, 500, 1), (128, 250, 50)]
)
def test_cores_and_memory_both_bound_the_jobs(cores: int, gib: float, jobs: int) -> None:
    assert planned(cores, gib).jobs == jobs


def test_threads_of_nvcc_share_cores_and_memory_and_max_jobs_is_what_setup_py_divides() -> None:
    found = planned(16, 64, threads=2)
    assert (found.jobs, found.threads, found.max_jobs) == (6, 2, 12)
    assert found.max_jobs // found.threads == found.jobs


def test_a_person_may_choose_but_memory_that_ran_out_still_counts() -> None:
    assert planned(2, 4, chosen=8).jobs == 8
    assert planned(2, 4, chosen=8, threads=2).jobs == 4
    found = planned(64, 500, chosen=8, at_most=2)
    assert (found.jobs, found.why) == (2, "fewer, since memory ran out before")


def test_fewer_ends_at_one() -> None:
    assert [fewer(8), fewer(3), fewer(2), fewer(1)] == [4, 1, 1, None]


def test_a_try_that_died_without_a_word_counts_as_memory_only_with_evidence(tmp_path: Path) -> None:
    def tried(boot: str, kills_then: int, low: int, kills_now: int) -> int | None:
        history = History(str(tmp_path / "s.json"), "b1", "inputs")
        history.data["tries"] = []
        one = history.begin(Jobs(4, 1, ""), kills_then, 100 * GIB, None)
        one["low"], one["boot"] = low, boot
        history.save()
        return History(str(tmp_path / "s.json"), "b1", "inputs").at_most(kills_now, 100 * GIB, None)

    assert tried("b1", 3, 50 * GIB, 3) is None
    assert tried("b1", 3, 50 * GIB, 4) == 2
    assert tried("b0", 3, 50 * GIB, 4) is None
    assert tried("b0", 3, 1 * GIB, 0) == 2


def test_other_inputs_begin_a_new_history(tmp_path: Path) -> None:
    history = History(str(tmp_path / "s.json"), "b", "one")
    history.begin(Jobs(8, 1, ""), 0, GIB, None)["ended"] = "memory"
    history.save()
    assert History(str(tmp_path / "s.json"), "b", "one").at_most(0, GIB, None) == 4
    assert History(str(tmp_path / "s.json"), "b", "two").at_most(0, GIB, None) is None


def test_what_memory_taught_holds_for_that_room_and_that_choice(tmp_path: Path) -> None:
    """The same inventory run again does not run out of memory again; what somebody changed since is tried."""

    def learnt(chosen: int | None, room: int, chosen_now: int | None) -> int | None:
        history = History(str(tmp_path / "s.json"), "b", str(chosen))
        history.data["tries"] = []
        history.begin(Jobs(8, 1, ""), 0, 8 * GIB, chosen)["ended"] = "memory"
        return history.at_most(0, room, chosen_now)

    assert learnt(None, 8 * GIB, None) == 4
    assert learnt(None, 10 * GIB, None) == 4
    assert learnt(None, 512 * GIB, None) is None
    assert learnt(8, 8 * GIB, 8) == 4
    assert learnt(8, 8 * GIB, 6) is None
    assert learnt(8, 8 * GIB, None) == 4


def test_a_build_that_ended_well_forgets_the_memory_that_ran_out(tmp_path: Path) -> None:
    history = History(str(tmp_path / "s.json"), "b", "one")
    history.begin(Jobs(8, 1, ""), 0, GIB, None)["ended"] = "memory"
    history.begin(Jobs(4, 1, ""), 0, GIB, None)["ended"] = "done"
    history.save()
    assert History(str(tmp_path / "s.json"), "b", "one").at_most(0, GIB, None) is None


@pytest.mark.parametrize(
    "line",
    [
        "g++: fatal error: Killed signal terminated program cc1plus",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "cc1plus: out of memory allocating 65536 bytes after a total of 9 bytes",
        "virtual memory exhausted: Cannot allocate memory",
        "/bin/sh: line 1: 12345 Killed                  /usr/local/cuda/bin/nvcc -c x.cu",
    ],
)
def test_the_compilers_ways_of_saying_killed_are_known(line: str) -> None:
    assert KILLED.search("FAILED: x.o\n" + line + "\nninja: build stopped")


@pytest.mark.parametrize(
    "line", ["error: 'x' was not declared", "g++: fatal error: no input files", "ninja: build stopped"]
)
def test_an_ordinary_error_is_not_taken_for_memory(line: str) -> None:
    assert not KILLED.search(line)


def test_ninjas_steps_are_read_with_pips_and_uvs_indentation() -> None:
    found = STEP.search("  [13/328] Building CUDA object CMakeFiles/_C.dir/csrc/x.cu.o")
    assert found and (found[1], found[2]) == ("13", "328")
    assert not STEP.search("[setuptools] building")


def test_cgroup_folders_of_both_versions_and_of_a_container(tmp_path: Path) -> None:
    for folder in ("system.slice/a.service", "memory/docker/abc"):
        (tmp_path / folder).mkdir(parents=True)
    found = cgroup_paths("0::/system.slice/a.service\n", str(tmp_path))
    assert found == [f"{tmp_path}/system.slice/a.service", f"{tmp_path}/system.slice", str(tmp_path)]
    found = cgroup_paths("9:memory:/docker/abc\n8:cpu,cpuacct:/x\n", str(tmp_path))
    assert found == [f"{tmp_path}/memory/docker/abc", f"{tmp_path}/memory/docker", f"{tmp_path}/memory"]
    # inside a container the path of the machine below does not exist
    assert cgroup_paths("0::/machine.slice/gone\n", str(tmp_path)) == [str(tmp_path)]


def test_the_tightest_cgroup_decides_how_much_memory_there_is(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("2000000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000000\n")
    assert memory_room([str(tmp_path)]) == 1_500_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_room([str(tmp_path)]) > 0


def test_numbers_of_kernel_files(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("low 0\noom_kill 7\noom_group_kill 1\n")
    assert number_in(str(tmp_path / "f"), "oom_kill") == 7
    assert number_in(str(tmp_path / "f"), "missing") is None
    assert number_in(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("found", "used"), [([], None), (["ccache"], "ccache"), (["ccache", "sccache"], "sccache")]
)
def test_a_compiler_cache_is_used_where_it_is_found_with_the_caches_of_serving(
    found: list[str], used: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in found:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://elsewhere.test/simple")
    request = {"env": {"TORCH_CUDA_ARCH_LIST": "12.0a"}, "python": "/r/env/bin/python", "cuda_home": "/c"}
    env = build_env({**request, "deps": "/r/deps", "cache": "/r/cache"}, Jobs(3, 2, "cores"))
    assert env.get("CMAKE_CUDA_COMPILER_LAUNCHER") == env.get("CMAKE_CXX_COMPILER_LAUNCHER") == used
    assert {env.get("CCACHE_DIR"), env.get("SCCACHE_DIR")} - {None} == (
        {f"/r/cache/{used}"} if used else set()
    )
    assert (env["MAX_JOBS"], env["NVCC_THREADS"]) == ("6", "2")
    assert "PIP_INDEX_URL" not in env and env["PATH"].startswith("/r/env/bin:/c/bin:")


def nvcc(tmp_path: Path, release: str) -> dict[str, Any]:
    """A build's request on a host with that nvcc, for CUDA 13.1."""
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.10'\n")
    program.chmod(0o755)
    more = {"python": sys.executable, "commit": "c", "env": {"TORCH_CUDA_ARCH_LIST": "12.0a"}}
    return {"cuda_home": str(tmp_path), "cuda_toolkit": "13.1", **more}


def test_the_key_holds_the_release_of_the_compiler_that_built(tmp_path: Path) -> None:
    request = nvcc(tmp_path, "13.2")
    release = build_engine.check_cuda(request)
    assert build_engine.key_of(request, release)["cuda"] == "13.2"
    assert build_engine.check_cuda({**request, "cuda_home": None}) is None


@pytest.mark.parametrize("release", ["12.8", "13.0", "14.1", "of its own"])
def test_a_compiler_of_another_major_or_an_older_one_does_not_build(release: str, tmp_path: Path) -> None:
    with pytest.raises(build_engine.Problem, match=r"this build is for CUDA 13\.1"):
        build_engine.check_cuda(nvcc(tmp_path, release))


# leads a group, starts one more process in it, says so, and ends after a while
LEADER = (
    "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); time.sleep(%d)"
)


@pytest.fixture
def group() -> Iterator[Any]:
    """`group(SECONDS, TOKEN)` is a process group of two; its leader ends after that time."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(seconds: int, token: str = "") -> int:
        env = {**os.environ, build_engine.TOKEN: token} if token else dict(os.environ)
        argv = [sys.executable, "-c", LEADER % seconds]
        child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, start_new_session=True)
        begun.append(child)
        assert child.stdout is not None and child.stdout.readline()
        if not seconds:
            child.wait()
        return child.pid

    yield begin
    for child in begun:
        for pid in build_engine.members(child.pid):
            os.kill(pid, 9)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def mark_of(tmp_path: Path, group: int, token: str) -> str:
    path = tmp_path / "b.group"
    path.write_text(json.dumps({"group": group, "boot": "b", "token": token}))
    return str(path)


@pytest.mark.parametrize("seconds", [60, 0], ids=["its leader lives", "its leader is gone"])
def test_a_build_that_was_left_running_is_ended(seconds: int, tmp_path: Path, group: Any) -> None:
    number = group(seconds, "t1")
    assert build_engine.members(number)
    end_leftover(mark_of(tmp_path, number, "t1"), "b")
    assert build_engine.members(number) == []
    assert not (tmp_path / "b.group").exists()


@pytest.mark.parametrize("token", ["", "t2"], ids=["a stranger", "another build"])
def test_whoever_got_the_number_of_a_build_that_ended_is_left_alone(
    token: str, tmp_path: Path, group: Any
) -> None:
    number = group(60, token)
    end_leftover(mark_of(tmp_path, number, "t1"), "b")
    assert len(build_engine.members(number)) == 2


UV = """#!/bin/sh
[ -z "$FAIL" ] || exit 1
sleep 60 >/dev/null 2>&1 &
exit 1
"""


@pytest.mark.parametrize("fails", ["", "1"], ids=["leaves a process behind", "ends whole"])
def test_a_failed_build_leaves_neither_a_mark_nor_a_process(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "lock").write_text("")
    monkeypatch.setattr(build_engine, "key_of", lambda *words: {"commit": "c"})
    end = build_engine.end_leftover

    def ended(mark: str, boot: str) -> None:
        if Path(mark).exists():
            groups.append(json.loads(Path(mark).read_text())["group"])
        end(mark, boot)

    monkeypatch.setattr(build_engine, "end_leftover", ended)
    request = {**build_engine.DEFAULTS, "src": str(tmp_path), "deps": "/d", "python": sys.executable}
    request |= {"uv": str(tmp_path / "uv"), "lock": str(tmp_path / "lock"), "cache": str(tmp_path)}
    request |= {"wheelhouse": str(tmp_path / "w"), "commit": "c", "repo": "r", "env": {"FAIL": fails}}
    with pytest.raises(build_engine.Problem, match="ended with status 1"):
        build_engine.bring_about(
            {**request, "state": str(tmp_path / "b.json"), "boot": "b"}, build_engine.Reporter()
        )
    (number,) = groups
    assert not (tmp_path / "b.json.group").exists()
    deadline = time.monotonic() + 10
    while build_engine.members(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert build_engine.members(number) == []
