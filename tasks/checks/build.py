"""What compiles: for a source build, and for kernels that are compiled while serving."""

from __future__ import annotations

from tasks.checks.needs import Needs
from tasks.checks.words import names, size
from tasks.facts import HostFacts
from tasks.facts.text import version_key
from tasks.facts.tools import PythonFacts
from tasks.findings import Finding, fail, ok, skipped, warn

# cmake and ninja are not asked of the host: the build's requirements and the locks bring their wheels, whose
# programs are in the environment's bin, first on PATH while building and serving
_APT = {"C compiler": "gcc", "C++ compiler": "g++", "git": "git", "make": "make"}
# what the onhost programs run on
OLDEST_PYTHON = (3, 8)
_AT_RUN_TIME = (
    "FlashInfer, DeepGEMM, TileLang, Triton and TorchInductor compile kernels while serving "
    "(vLLM issue #49497, flashinfer issue #1781)"
)


def tools(needs: Needs, host: HostFacts) -> Finding:
    """Compilers and build tools of the route; a compiler is needed while serving too."""
    if needs.route == "docker":
        return skipped("build.tools", "the image brings its own")
    facts = host.tools
    if not facts.found:
        return skipped("build.tools", f"programs could not be listed: {facts.reasons.get('*')}")
    wanted: dict[str, tuple[str, ...]] = {"C compiler": ("gcc", "cc", "clang")}
    if needs.want_gpu or needs.route == "source":
        wanted["C++ compiler"] = ("g++", "c++")
    if needs.route == "source":
        wanted |= {"git": ("git",), "make": ("make",)}
    missing = [what for what, programs in wanted.items() if not facts.has(*programs)]
    have = [
        f"{name} {facts.found[name].version or ''}".strip()
        for programs in wanted.values()
        if (name := facts.has(*programs))
    ]
    if missing:
        return fail(
            "build.tools",
            f"no {names(missing)} on this host",
            observed=names(have) or "none of them",
            expected=names(wanted),
            fix="apt-get install -y " + " ".join(_APT[what] for what in missing),
            reference=_AT_RUN_TIME,
        )
    if (needs.want_gpu or needs.route == "source") and _venv_python_without_headers(needs, host):
        return fail(
            "build.tools",
            "Python.h of the interpreter that the environment is made from is missing",
            observed=names(have),
            expected="Python headers",
            fix=f"apt-get install -y python{needs.python or '3'}-dev",
            reference="Triton and TorchInductor compile against Python.h while serving",
        )
    if needs.compiles_later and not needs.want_gpu:
        later = [] if facts.has("g++", "c++") else ["g++"]
        if _venv_python_without_headers(needs, host):
            later.append(f"python{needs.python or '3'}-dev")
        if later:
            return warn(
                "build.tools",
                "the mode that does not compile can serve, the faster one cannot start",
                observed=names(have),
                expected="a C++ compiler and Python headers",
                fix="apt-get install -y " + " ".join(later),
                reference="TorchInductor compiles C++ against Python.h at the start",
            )
    return ok("build.tools", "found", names(have))


def _venv_python_without_headers(needs: Needs, host: HostFacts) -> bool:
    if host.tools.conda is not None and needs.env_kind != "venv":
        return False
    python = fitting_python(needs, host)
    return python is not None and python.headers is False


def memory_per_job(needs: Needs, host: HostFacts) -> Finding | list[Finding]:
    """A source build's parallel jobs fit in memory: nvcc takes gigabytes a job; asked only on that route."""
    if needs.route != "source":
        return []
    rooms = [host.memory.available]
    if host.cgroup.memory_max is not None:
        rooms.append(host.cgroup.memory_max - (host.cgroup.memory_used or 0))
    known = [room for room in rooms if room is not None]
    if not known:
        return skipped("build.memory_per_job", "free memory could not be read")
    cores = usable_cores(host)
    jobs = needs.build_jobs or cores
    if jobs is None:
        return skipped("build.memory_per_job", "neither the number of jobs nor of cores is known")
    fits = max(1, min(known) // needs.build_bytes_per_job)
    observed = f"{size(min(known))} for {jobs} jobs"
    expected = f"{size(needs.build_bytes_per_job)} a job"
    if fits < jobs:
        return warn(
            "build.memory_per_job",
            "so many jobs at once would run out of memory, and the compiler would be killed",
            observed=observed,
            expected=expected,
            fix=f"MAX_JOBS={fits} for the build",
            reference="vLLM setup.py divides MAX_JOBS by NVCC_THREADS; 4 to 6 GB a job of nvcc",
        )
    return ok("build.memory_per_job", "the jobs fit in memory", observed, expected)


def usable_cores(host: HostFacts) -> int | None:
    """Cores that this host really has for us: affinity, cpuset and quota."""
    counts = [host.cpu.usable, host.cpu.cpus, host.cgroup.cpuset]
    if host.cgroup.cpus is not None:
        counts.append(max(1, int(host.cgroup.cpus)))
    return min((number for number in counts if number), default=None)


def conda(needs: Needs, host: HostFacts) -> Finding:
    """Something that can make the engine's environment: conda, or an interpreter that can make a venv."""
    facts = host.tools
    if needs.route == "docker":
        return skipped("python.conda", "the image brings its own Python")
    if not facts.found and not facts.pythons and facts.conda is None:
        return skipped("python.conda", f"programs could not be listed: {facts.reasons.get('*')}")
    if facts.conda and needs.env_kind != "venv" and not needs.python_path:
        version = f" {facts.conda.version}" if facts.conda.version else ""
        return ok("python.conda", "conda makes the environment", f"conda{version} at {facts.conda.path}")
    python = fitting_python(needs, host)
    seen = names(f"{p.path} {p.version or '(' + (p.why or 'no answer') + ')'}" for p in facts.pythons)
    if needs.python_path and python is None:
        return fail(
            "python.conda",
            f"the interpreter that the site names is not a Python {needs.python or '3'}",
            observed=seen or "no Python",
            expected=f"Python {needs.python or '3'} at {needs.python_path}",
            fix="Correct `python` in the inventory, or leave it out.",
        )
    no_venv = python is not None and python.venv is False and needs.env_kind == "auto"
    if python is None or no_venv or needs.env_kind == "conda":
        wanted = "conda" if needs.env_kind == "conda" else f"Python {needs.python or '3'} with venv"
        starts = next((p for p in facts.pythons if version_key(p.version) >= OLDEST_PYTHON), None)
        if needs.env_kind != "venv" and starts:
            return ok("python.conda", f"no {wanted} here: Miniforge is installed below root for it", seen)
        package = "python3" if needs.env_kind != "venv" else f"python{needs.python or '3'}-venv"
        return fail(
            "python.conda",
            f"no {wanted}, and no Python 3.8 or newer that could install it"
            if needs.env_kind != "venv"
            else f"no {wanted} to make a venv from, as the settings ask",
            observed=seen or "no Python",
            expected=f"conda, or Python {needs.python or '3'}",
            fix=f"apt-get install -y {package}"
            + ("" if needs.env_kind != "venv" else f" python{needs.python or '3'}-dev, or env_kind = 'auto'"),
        )
    if python.venv is False:
        return fail(
            "python.conda",
            "Python is there, without the venv module",
            observed=f"{python.path} {python.version}",
            expected="python -m venv works",
            fix=f"apt-get install -y python{'.'.join(map(str, version_key(python.version)[:2]))}-venv",
            reference="Debian and Ubuntu split ensurepip into python3.X-venv",
        )
    return ok("python.conda", "no conda: a venv is made", f"{python.path} {python.version}")


def fitting_python(needs: Needs, host: HostFacts) -> PythonFacts | None:
    """The first interpreter with the wanted minor version (any Python 3 when none is wanted).

    Where the site names one it must be that.
    """
    for python in host.tools.pythons:
        if needs.python_path and python.path != needs.python_path:
            continue
        have = version_key(python.version)[:2]
        if have and (have == version_key(needs.python)[:2] if needs.python else have[0] == 3):
            return python
    return None


def one_cuda_major(needs: Needs, host: HostFacts) -> list[Finding]:
    """An existing environment does not mix wheels of two CUDA majors; said only when it does."""
    env = host.tools.env
    if env is None or len(env.cuda_majors) < 2:
        return []
    return [
        warn(
            "build.cuda_wheels",
            "the environment holds NVIDIA wheels of several CUDA majors, which break each other's libraries",
            observed=f"CUDA {names(env.cuda_majors)} in {env.python}",
            expected="one CUDA major",
            fix="Remove the environment and let it be made again from the lock.",
            reference="vLLM issue #48602",
        )
    ]
