#!/usr/bin/env python3
"""Build an engine's wheel from a source tree, with as many jobs as cores and memory allow.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    src, deps          the source tree, and its build-time dependencies (both from fetch_source.py)  required
    python, uv         the environment's Python, and uv                                             required
    lock               the environment's lock; its digest is part of what was built from            required
    wheelhouse         folder of finished builds, one folder a key                                  required
    commit, repo       what the tree is                                                             required
    source             the answer of fetch_source.py, for the provenance
    env                the build's environment variables                                            required
    cuda_home          CUDA's folder; nvcc there must be of `cuda_toolkit` (null: nothing of CUDA is built)
    cuda_toolkit       "13.0": the least release of that major
    max_jobs, nvcc_threads  what a person chose, instead of computing it
    bytes_per_job      memory of one compiler process (default 5 GiB: nvcc on attention kernels)
    cache              folder for ccache or sccache
    state              file that remembers how earlier tries ended                                  required
    boot               what tells one boot of this host from another (default: the kernel's boot id)

Objects that are built stay built: ninja goes on where a killed build was. A build that was killed for memory
is recognized (the kernel's counters, the compiler's last words) and goes on with half the jobs.

The result is WHEELHOUSE/KEY/: the wheel, engine.lock, build.log, provenance.json (written last). KEY is the
digest of commit, torch, nvcc's CUDA, arch list, Python, glibc and machine.

stdout: {"key": {...}, "id", "wheel": {"file", "sha256", "bytes"}, "folder", "jobs", "tries", "seconds",
"changed"} or {"error": {"id", "what", "file", "fix"}} with exit status 1. Ids: usage (status 2), memory,
compiler, cuda, disk_full, permission, system, tools, interrupted.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Tuple

try:
    from .shared import Problem, of_the_system, sha256_of
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import Problem, of_the_system, sha256_of  # type: ignore[import-not-found,no-redef]

GIB = 1 << 30
BYTES_PER_JOB = 5 * GIB  # vLLM's kernels take nvcc 4 to 6 GB (vLLM issues on MAX_JOBS)
# from so many times the room on, what ran out of memory before may be tried again
MORE_ROOM = 1.5
# in the environment of a build's processes: whose they are
TOKEN = "RACKWRIGHT_BUILD"
STEP = re.compile(r"\[(\d+)/(\d+)\]\s*(.*)")
# gcc's driver, clang's, nvcc's and ninja's or sh's way of saying that a process got SIGKILL
KILLED = re.compile(
    r"Killed signal terminated program|fatal error: Killed|died due to signal 9|^\s*Killed\s*$|"
    r"Killed\s+.*(cicc|ptxas|cudafe|cc1plus|nvcc)|unable to execute command: Killed|"
    r"Cannot allocate memory|virtual memory exhausted|std::bad_alloc|out of memory allocating",
    re.M,
)


# ---------------------------------------------------------------- pure: how many jobs


class Jobs(NamedTuple):
    """Compiler processes at once, and nvcc's threads in each."""

    jobs: int
    threads: int
    why: str

    @property
    def max_jobs(self) -> int:
        """MAX_JOBS as vLLM's setup.py reads it: it divides by NVCC_THREADS."""
        return self.jobs * self.threads


def plan_jobs(
    cores: int,
    room: int,
    per_job: int,
    *,
    chosen: Optional[int],
    threads: Optional[int],
    at_most: Optional[int],
) -> Jobs:
    """Jobs that cores and memory allow. `chosen` is MAX_JOBS of a person, `at_most` what memory taught."""
    threads = max(1, threads or 1)
    by_cores, by_memory = max(1, cores // threads), max(1, room // (per_job * threads))
    jobs = max(1, chosen // threads) if chosen else min(by_cores, by_memory)
    why = "chosen" if chosen else "%d cores, %.1f GiB for %.1f GiB a job" % (cores, room / GIB, per_job / GIB)
    if at_most is not None and jobs > at_most:
        jobs, why = at_most, "fewer, since memory ran out before"
    return Jobs(jobs, threads, why)


def fewer(jobs: int) -> Optional[int]:
    """Jobs for the try after memory ran out; None when there is nothing less."""
    return jobs // 2 if jobs > 1 else None


def cgroup_paths(own: str, root: str = "/sys/fs/cgroup") -> List[str]:
    """Folders of this process's cgroup and all above it, from the text of /proc/self/cgroup.

    In a container the path may not exist below its mount: then only the mount itself counts.
    """
    found = []
    for line in own.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            tops = [root, root + "/unified"]
        elif "memory" in controllers.split(","):
            tops = [root + "/memory"]
        else:
            continue
        for top in tops:
            part = path.rstrip("/")
            while part:
                found.append(top + part)
                part = part.rpartition("/")[0]
            found.append(top)
    return [folder for folder in dict.fromkeys(found) if os.path.isdir(folder)]


def number_in(path: str, key: Optional[str] = None) -> Optional[int]:
    """A number of a kernel file, or of the line that begins with `key`."""
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            text = stream.read()
    except OSError:
        return None
    if key is not None:
        found = re.search(r"(?m)^%s[: ]\s*(\d+)" % re.escape(key), text)
        return int(found[1]) if found else None
    text = text.strip()
    return int(text) if text.isdigit() and len(text) < 19 else None


def memory_room(folders: List[str]) -> int:
    """Bytes that a build may still take: the machine's, and what each cgroup leaves."""
    kib = number_in("/proc/meminfo", "MemAvailable") or number_in("/proc/meminfo", "MemTotal") or 4 << 20
    rooms = [kib * 1024]
    for folder in folders:
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most = number_in(os.path.join(folder, limit))
            if most is not None and most < 1 << 60:
                used = number_in(os.path.join(folder, usage)) or 0
                stat = os.path.join(folder, "memory.stat")
                cached = number_in(stat, "inactive_file") or number_in(stat, "total_inactive_file") or 0
                rooms.append(most - max(0, used - cached))
    return max(0, min(rooms))


def usable_cores(folders: List[str]) -> int:
    """Cores by affinity and by the quota of every cgroup above."""
    counts = [float(len(os.sched_getaffinity(0)))]
    for folder in folders:
        try:
            with open(os.path.join(folder, "cpu.max"), encoding="ascii") as stream:
                quota, period = stream.read().split()
            if quota.isdigit():
                counts.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
    for cpu in glob.glob("/sys/fs/cgroup/cpu*/cpu.cfs_quota_us"):
        quota_us, period_us = number_in(cpu), number_in(cpu.replace("quota", "period"))
        if quota_us and period_us:
            counts.append(quota_us / period_us)
    return max(1, int(min(counts)))


def oom_kills(folders: List[str]) -> int:
    """How often the kernel has killed for memory, in our cgroups (with all below them) or anywhere."""
    counts = [number_in(os.path.join(folder, "memory.events"), "oom_kill") for folder in folders]
    counts += [number_in(os.path.join(folder, "memory.oom_control"), "oom_kill") for folder in folders]
    counts.append(number_in("/proc/vmstat", "oom_kill"))
    return max((count for count in counts if count is not None), default=0)


# ---------------------------------------------------------------- what earlier tries taught


class History:
    """How earlier tries of this build ended, in a file."""

    def __init__(self, path: str, boot: str, inputs: str) -> None:
        self.path = path
        self.data: Dict[str, Any] = {}
        try:
            with open(path, encoding="utf-8") as stream:
                self.data = json.load(stream)
        except (OSError, ValueError):
            pass
        if not isinstance(self.data, dict) or self.data.get("inputs") != inputs:
            self.data = {"inputs": inputs, "tries": []}
        self.boot = boot

    @property
    def tries(self) -> List[Dict[str, Any]]:
        """Every try, oldest first."""
        tries: List[Dict[str, Any]] = self.data["tries"]
        return tries

    def at_most(self, kills_now: int, room: int, chosen: Optional[int]) -> Optional[int]:
        """Jobs that memory allowed, from tries that ran out of it; also one that died without a word.

        That says nothing where there is much more room by now, or a person has chosen another number since.
        """
        if self.tries and self.tries[-1]["ended"] is None:
            last = self.tries[-1]
            more = last["boot"] == self.boot and kills_now > last["kills"]
            low = last.get("low") is not None and last["low"] < last["room"] * 0.03
            last["ended"] = "memory" if more or low else "killed"
            self.save()
        for one in reversed(self.tries):
            if one["ended"] == "memory":
                other = room > one["room"] * MORE_ROOM or chosen not in (None, one.get("chosen"))
                return None if other else fewer(one["jobs"]) or 1
            if one["ended"] == "done":
                return None
        return None

    def begin(self, jobs: Jobs, kills: int, room: int, chosen: Optional[int]) -> Dict[str, Any]:
        """A new try, on record before it starts; `chosen` is what a person asked for."""
        one = {
            "boot": self.boot, "jobs": jobs.jobs, "threads": jobs.threads, "kills": kills, "room": room,
            "low": room, "chosen": chosen, "started": int(time.time()), "ended": None,
        }  # fmt: skip
        self.data["tries"] = [*self.tries[-20:], one]
        self.save()
        return one

    def save(self) -> None:
        """Whole or not at all."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path + ".new", "w", encoding="utf-8") as stream:
            json.dump(self.data, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(self.path + ".new", self.path)


# ---------------------------------------------------------------- running the build


class Reporter:
    """ninja's steps as progress lines, at most two a second, at least one in ten seconds."""

    def __init__(self) -> None:
        self.shown, self.done, self.total, self.note = 0.0, 0, 0, "configuring"

    def line(self, text: str) -> None:
        """A line of the build."""
        found = STEP.search(text)
        if found:
            self.done, self.total = int(found[1]), int(found[2])
            self.note = re.sub(r"CMakeFiles/\S*?\.dir/", "", found[3])[:80]
        self.show()

    def show(self, force: bool = False, wait: float = 0.5) -> None:
        """Print, if it is time."""
        if force or time.monotonic() - self.shown >= wait:
            self.shown = time.monotonic()
            state = {
                "phase": "build",
                "done": self.done,
                "total": self.total,
                "unit": "steps",
                "note": self.note,
            }
            print("#progress " + json.dumps(state), file=sys.stderr, flush=True)


def members(group: int) -> List[int]:
    """Processes of a process group."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(stat, encoding="ascii", errors="replace") as stream:
                fields = stream.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.split("/")[2]))
    return found


def carries(pid: int, token: str) -> bool:
    """The process inherited the token of a build."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as stream:
            return ("%s=%s" % (TOKEN, token)).encode() in stream.read().split(b"\0")
    except OSError:
        return False


def end_leftover(mark: str, boot: str) -> None:
    """End what a killed run of this program left running: two ninjas in one folder ruin the build.

    A group's number is given anew once the group is empty, so that one of its processes has to carry the
    build's token.
    """
    try:
        with open(mark, encoding="utf-8") as stream:
            left = json.load(stream)
        group, token = int(left["group"]), str(left["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    os.unlink(mark)
    if left.get("boot") != boot or not any(carries(pid, token) for pid in members(group)):
        return
    print("ending what a build left running (group %d)" % group, file=sys.stderr, flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        ends = time.monotonic() + 15
        while members(group) and time.monotonic() < ends:
            time.sleep(0.1)


def run(
    argv: List[str],
    env: Dict[str, str],
    cwd: str,
    log: str,
    report: Reporter,
    watch: Callable[[], None],
    began: Callable[[int], None],
) -> Tuple[int, str]:
    """Run the build, keep its output in `log`; its status and last 40 kB. Its whole group ends with us.

    `began` is told the process group.
    """
    tail = ""
    with open(log, "ab") as out, subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        pipe, rest = child.stdout.fileno(), b""
        try:
            began(child.pid)
            while True:
                if select.select([pipe], [], [], 1.0)[0]:
                    block = os.read(pipe, 65536)
                    if not block:
                        break
                    out.write(block)
                    out.flush()
                    *lines, rest = (rest + block).split(b"\n")
                    for raw in lines:
                        text = raw.decode("utf-8", "replace").rstrip("\r")
                        tail = (tail + text + "\n")[-40000:]
                        report.line(text)
                        if not STEP.search(text):
                            print(text[:500], file=sys.stderr, flush=True)
                else:
                    report.show(wait=10)
                watch()
            status = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return status, tail + rest.decode("utf-8", "replace")


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


PROBE = r"""
import json, os, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
try:
    import torch
    cuda = torch.version.cuda
except Exception as error:
    cuda, _ = None, print("torch: %s" % error, file=sys.stderr)
json.dump({"python": "%d.%d" % sys.version_info[:2], "torch": version("torch"), "cuda": cuda,
           "libc": os.confstr("CS_GNU_LIBC_VERSION") or ""}, sys.stdout)
"""


def key_of(request: Dict[str, Any], release: Optional[str]) -> Dict[str, str]:
    """What a host must have in common with this one to use the wheel. `release` is nvcc's."""
    done = subprocess.run(
        [request["python"], "-c", PROBE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise Problem("tools", "the environment's Python does not run", "make the environment anew")
    seen = json.loads(done.stdout.decode())
    env = request["env"]
    return {
        "commit": request["commit"],
        "torch": seen["torch"] or "none",
        "cuda": release or request["cuda_toolkit"] or seen["cuda"] or "none",
        "arch": env.get("TORCH_CUDA_ARCH_LIST") or env.get("VLLM_TARGET_DEVICE") or "none",
        "python": seen["python"],
        "glibc": seen["libc"].split()[-1] if seen["libc"] else "none",
        "machine": platform.machine(),
    }


def version_of(release: str) -> Tuple[int, ...]:
    """A release as numbers that compare."""
    return tuple(int(part) for part in release.split("."))


def check_cuda(request: Dict[str, Any]) -> Optional[str]:
    """nvcc's release; None where nothing of CUDA is built.

    It has to be of the major that torch was built for, since mixing two fails hours later, and no older than
    what the recipe names. A newer one of that major is taken, as preflight does, and is part of the key.
    """
    home, wanted = request["cuda_home"], request["cuda_toolkit"]
    if not home:
        return None
    nvcc = os.path.join(home, "bin", "nvcc")
    try:
        text = subprocess.run(
            [nvcc, "--version"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        fix = "install CUDA toolkit %s, or set CUDA_HOME in the recipe's env" % wanted
        raise Problem("cuda", "no working nvcc: %s" % error, fix, nvcc) from error
    found = re.search(r"release (\d+\.\d+)", text)
    release = found[1] if found else "0.0"
    fits = not wanted or version_of(release)[0] == version_of(wanted)[0]
    if not fits or (wanted and version_of(release) < version_of(wanted)):
        what = "nvcc is of CUDA %s, this build is for CUDA %s" % (found[1] if found else "?", wanted)
        raise Problem(
            "cuda", what, "install CUDA toolkit %s beside it and point CUDA_HOME there" % wanted, nvcc
        )
    return release


def build_env(request: Dict[str, Any], jobs: Jobs) -> Dict[str, str]:
    """The build's environment: the recipe's, and where everything is."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    env.update(request["env"])
    programs = os.path.dirname(request["python"])
    path = [programs, *([os.path.join(request["cuda_home"], "bin")] if request["cuda_home"] else [])]
    env["PATH"] = os.pathsep.join([*path, os.environ.get("PATH", os.defpath)])
    if request["cuda_home"]:
        env["CUDA_HOME"] = request["cuda_home"]
    env["MAX_JOBS"], env["NVCC_THREADS"] = str(jobs.max_jobs), str(jobs.threads)
    env["CMAKE_BUILD_PARALLEL_LEVEL"] = str(jobs.jobs)
    env["FETCHCONTENT_BASE_DIR"] = request["deps"]
    # everything is there already; a build that still wants the network is a fault that should show at once
    env["CMAKE_ARGS"] = (env.get("CMAKE_ARGS", "") + " -DFETCHCONTENT_FULLY_DISCONNECTED=ON").strip()
    env.update(
        UV_NO_CONFIG="1", UV_OFFLINE="1", UV_PYTHON_DOWNLOADS="never", PYTHONUNBUFFERED="1", NO_COLOR="1"
    )
    env["UV_CACHE_DIR"] = os.path.join(request["cache"], "uv")
    env.pop("VLLM_PRECOMPILED_WHEEL_LOCATION", None)
    for tool, variable in (("sccache", "SCCACHE_DIR"), ("ccache", "CCACHE_DIR")):
        if shutil.which(tool, path=env["PATH"]):
            env[variable] = os.path.join(request["cache"], tool)
            for language in ("C", "CXX", *(("CUDA",) if request["cuda_home"] else ())):
                env["CMAKE_%s_COMPILER_LAUNCHER" % language] = tool
            break
    return env


def finished(folder: str, inputs: str) -> Optional[Dict[str, Any]]:
    """The provenance of a build from these inputs whose wheel is whole."""
    try:
        with open(os.path.join(folder, "provenance.json"), encoding="utf-8") as stream:
            found: Dict[str, Any] = json.load(stream)
        wheel = os.path.join(folder, found["wheel"]["file"])
        if found["inputs"] == inputs and sha256_of(wheel) == found["wheel"]["sha256"]:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def bring_about(request: Dict[str, Any], report: Reporter) -> Dict[str, Any]:
    """Build, or find it built; the answer document."""
    began = time.monotonic()
    key = key_of(request, check_cuda(request))
    name = digest_of(key)[:16]
    lock_sha256 = sha256_of(request["lock"])
    inputs = digest_of([key, lock_sha256, request["env"]])
    folder = os.path.join(request["wheelhouse"], name)
    done = finished(folder, inputs)
    if done:
        return answer(done, folder, name, changed=False)
    mark = request["state"] + ".group"
    end_leftover(mark, request["boot"])
    out = folder + ".building"
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    log = request["state"] + ".log"
    groups = cgroup_paths(open("/proc/self/cgroup", encoding="ascii").read())
    history = History(request["state"], request["boot"], inputs)
    chosen = request["max_jobs"]
    at_most = history.at_most(oom_kills(groups), memory_room(groups), chosen)
    if at_most is None or not os.path.exists(log):
        open(log, "wb").close()
    token = os.urandom(16).hex()

    def started(group: int) -> None:
        with open(mark, "w", encoding="utf-8") as stream:
            json.dump({"group": group, "boot": history.boot, "token": token}, stream)

    tries = 0
    while True:
        room = memory_room(groups)
        jobs = plan_jobs(
            usable_cores(groups), room, request["bytes_per_job"], chosen=request["max_jobs"],
            threads=request["nvcc_threads"], at_most=at_most,
        )  # fmt: skip
        print(
            "building with %d jobs (%s), NVCC_THREADS %d" % (jobs.jobs, jobs.why, jobs.threads),
            file=sys.stderr,
        )
        tries += 1
        kills = oom_kills(groups)
        one = history.begin(jobs, kills, room, chosen)
        saved = [time.monotonic()]

        def watch(one: Dict[str, Any] = one, saved: List[float] = saved) -> None:
            low = memory_room(groups)
            if low < one["low"]:
                one["low"] = low
                if time.monotonic() - saved[0] > 5 or low < one["room"] * 0.1:
                    saved[0] = time.monotonic()
                    history.save()

        argv = [request["uv"], "build", "--wheel", "--no-build-isolation", "--python", request["python"]]
        argv += ["--out-dir", out, request["src"]]

        try:
            env = {**build_env(request, jobs), TOKEN: token}
            status, tail = run(argv, env, request["src"], log, report, watch, started)
        except BaseException:
            one["ended"] = "memory" if oom_kills(groups) > kills else "killed"
            history.save()
            raise
        finally:
            end_leftover(mark, history.boot)
        if status == 0:
            one["ended"] = "done"
            history.save()
            break
        memory = oom_kills(groups) > kills or KILLED.search(tail) is not None or status == -signal.SIGKILL
        one["ended"] = "memory" if memory else "failed"
        history.save()
        if not memory:
            explain(tail, log, status)
        at_most = fewer(jobs.jobs)
        if at_most is None:
            what = "memory ran out with a single job (%.1f GiB were free at the start)" % (room / GIB)
            raise Problem("memory", what, "give this host more memory or swap, or build on another one", log)
        print(
            "memory ran out with %d jobs; going on with %d" % (jobs.jobs, at_most),
            file=sys.stderr,
            flush=True,
        )
        request = {**request, "max_jobs": None}
    wheels = glob.glob(os.path.join(out, "*.whl"))
    if len(wheels) != 1:
        raise Problem("compiler", "the build left %d wheels" % len(wheels), "read the log", log)
    file = os.path.basename(wheels[0])
    seconds = round(time.monotonic() - began, 1)
    shutil.copyfile(request["lock"], os.path.join(out, "engine.lock"))
    shutil.copyfile(log, os.path.join(out, "build.log"))
    provenance = {
        "schema": 1,
        "key": key,
        "inputs": inputs,
        "wheel": {"file": file, "sha256": sha256_of(wheels[0]), "bytes": os.path.getsize(wheels[0])},
        "lock_sha256": lock_sha256,
        "repo": request["repo"],
        "source": request["source"],
        "env": request["env"],
        "jobs": {
            "jobs": jobs.jobs,
            "nvcc_threads": jobs.threads,
            "why": jobs.why,
            "tries": len(history.tries),
        },
        "log": {"file": "build.log", "sha256": sha256_of(log), "bytes": os.path.getsize(log)},
        "host": {"name": platform.node(), "kernel": platform.release(), "compilers": compilers(request)},
        "seconds": seconds,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with open(os.path.join(out, "provenance.json"), "w", encoding="utf-8") as stream:
        json.dump(provenance, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(out, folder)
    report.show(force=True)
    return answer(provenance, folder, name, changed=True, tries=tries)


def answer(
    provenance: Dict[str, Any], folder: str, name: str, changed: bool, tries: int = 0
) -> Dict[str, Any]:
    """The document on stdout."""
    jobs = provenance["jobs"]["jobs"]
    return {
        "key": provenance["key"], "id": name, "wheel": provenance["wheel"], "folder": folder, "jobs": jobs,
        "tries": tries, "seconds": provenance["seconds"], "changed": changed,
    }  # fmt: skip


def compilers(request: Dict[str, Any]) -> Dict[str, str]:
    """First line of each tool's version."""
    found = {}
    programs = os.path.dirname(request["python"])
    path = os.pathsep.join(
        [programs, (request["cuda_home"] or programs) + "/bin", os.environ.get("PATH", "")]
    )
    for tool in ("gcc", "g++", "nvcc", "cmake", "ninja", "ccache"):
        at = shutil.which(tool, path=path)
        if at:
            done = subprocess.run(
                [at, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                check=False,
            )  # fmt: skip
            lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
            found[tool] = next((line for line in lines if "release" in line), lines[0] if lines else "")
    return found


def explain(tail: str, log: str, status: int) -> NoReturn:
    """The first error of a failed build, in words."""
    if re.search(r"No space left on device", tail):
        raise Problem(
            "disk_full", "no space left while compiling", "free space and run again: it goes on", log
        )
    network = re.search(
        r"(?i)Could not resolve host|Failed to clone|unable to access '(\S+)'|git fetch", tail
    )
    if network:
        what = "the build asks the network for more: %s" % network[0]
        raise Problem(
            "tools", what, "report it: its dependencies should be found in the tree's CMake files", log
        )
    lines = tail.splitlines()
    at = next((i for i, line in enumerate(lines) if re.search(r"(?i)\berror\b[: ]|FAILED:", line)), None)
    what = " | ".join(line.strip() for line in (lines[at : at + 3] if at is not None else lines[-3:]))[:500]
    raise Problem(
        "compiler", "the build ended with status %d: %s" % (status, what), "read the whole log", log
    )


DEFAULTS: Dict[str, Any] = {
    "source": {}, "cuda_home": None, "cuda_toolkit": None, "max_jobs": None, "nvcc_threads": None,
    "bytes_per_job": BYTES_PER_JOB, "boot": None,
}  # fmt: skip
NEEDED = ("src", "deps", "python", "uv", "lock", "wheelhouse", "commit", "repo", "env", "cache", "state")


def parse_request(text: str) -> Dict[str, Any]:
    """Check the parameters; a mistake is a Problem with id "usage"."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Problem("usage", "stdin is not JSON: %s" % error, "see --help") from error
    if not isinstance(given, dict) or set(NEEDED) - set(given) or set(given) - set(NEEDED) - set(DEFAULTS):
        raise Problem("usage", "needed: %s" % ", ".join(NEEDED), "see --help")
    request = {**DEFAULTS, **given}
    if not request["boot"]:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            request["boot"] = stream.read().strip()
    return request


def interrupted(number: int, _frame: Any) -> NoReturn:
    """A signal ends the build's whole process group on the way out."""
    raise Problem("interrupted", "ended by signal %d" % number, "run again: it goes on where it was")


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    signal.signal(signal.SIGTERM, interrupted)
    signal.signal(signal.SIGINT, interrupted)
    try:
        result = bring_about(parse_request(sys.stdin.read()), Reporter())
    except Problem as problem:
        print(json.dumps(problem.document()))
        return 2 if problem.id == "usage" else 1
    except OSError as error:
        print(json.dumps(of_the_system(error).document()))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
