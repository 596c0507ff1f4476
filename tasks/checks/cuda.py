"""CUDA toolkit for kernels that are compiled at build and at serve time; Docker and its GPU runtime."""

from __future__ import annotations

from tasks.checks.needs import Needs
from tasks.checks.words import names
from tasks.facts import HostFacts
from tasks.facts.cuda import Toolkit
from tasks.facts.text import at_least, version_key
from tasks.findings import Finding, fail, ok, skipped, warn

# What kernels compiled while serving include: the engine's image installs these "for runtime JIT".
JIT_HEADERS = ("cuda_runtime.h", "cublas_v2.h", "curand.h")
_PACKAGE_OF_HEADER = {
    "cuda_runtime.h": "cuda-cudart-dev",
    "cublas_v2.h": "libcublas-dev",
    "curand.h": "libcurand-dev",
}
_JIT = (
    "vLLM issues #49497 and #50705, flashinfer issue #1781: kernels are compiled while serving, "
    "so nvcc, ninja and a host compiler are needed then as well"
)


def best_toolkit(needs: Needs, host: HostFacts) -> Toolkit | None:
    """The newest toolkit whose CUDA major the engine can use (any, where none is asked for)."""
    fitting = [
        toolkit
        for toolkit in host.cuda.toolkits
        if toolkit.release and (not needs.cuda_major or version_key(toolkit.release)[0] == needs.cuda_major)
    ]
    return max(fitting, key=lambda toolkit: version_key(toolkit.release), default=None)


def toolkit(needs: Needs, host: HostFacts) -> Finding:
    """An nvcc that can compile for this GPU, at build and at serve time."""
    id = "cuda.toolkit"
    if needs.route == "docker":
        return skipped(id, "the image brings its own toolkit")
    if host.cuda.reasons.get("*"):
        return skipped(id, host.cuda.reasons["*"])
    floor = needs.cuda_toolkit
    if floor is None:
        return skipped(id, "the recipe asks for none")
    seen = names(f"{found.release or 'no nvcc'} at {found.path}" for found in host.cuda.toolkits) or "none"
    best = best_toolkit(needs, host)
    package = "-".join(map(str, (*version_key(floor), 0)[:2]))
    fix = f"apt-get install -y cuda-toolkit-{package}   (NVIDIA's repository), or `conda install cuda-nvcc`"
    if best is None:
        older = [found for found in host.cuda.toolkits if found.release]
        return fail(
            id,
            f"no nvcc of CUDA {needs.cuda_major or floor}" if older else "no nvcc on this host",
            observed=seen,
            expected=f">= {floor}",
            fix=fix,
            reference=_JIT,
        )
    if not at_least(best.release, floor):
        return fail(
            id,
            "nvcc is too old for this GPU and engine",
            observed=seen,
            expected=f">= {floor}",
            fix=fix,
            reference=_JIT,
        )
    driver_cuda = host.gpu.cuda
    if driver_cuda and version_key(best.release)[0] > version_key(driver_cuda)[0]:
        return fail(
            id,
            "the toolkit is of a newer CUDA major than the driver: what it compiles will not load",
            observed=f"toolkit {best.release}, driver for CUDA {driver_cuda}",
            expected=f"a toolkit of CUDA {version_key(driver_cuda)[0]}, or a newer driver",
            fix="Upgrade the driver, or install a toolkit of the driver's CUDA major.",
            reference="CUDA compatibility guide: majors do not mix without the compatibility package",
        )
    return ok(id, "found", f"{best.release} at {best.path}", f">= {floor}")


def home(needs: Needs, host: HostFacts) -> Finding:
    """The toolkit that the engine will find by itself is that one, whole, by a single path."""
    id = "cuda.home"
    if needs.route == "docker":
        return skipped(id, "the image brings its own toolkit")
    if host.cuda.reasons.get("*"):
        return skipped(id, host.cuda.reasons["*"])
    if needs.cuda_toolkit is None:
        return skipped(id, "the recipe asks for no toolkit")
    facts = host.cuda
    for variable, value in (("CUDA_HOME", facts.cuda_home), ("CUDA_PATH", facts.cuda_path)):
        if value and ":" in value:
            return fail(
                id,
                f"{variable} holds several paths, and must hold one",
                observed=value,
                expected="one folder",
                fix=f"export {variable}=/usr/local/cuda",
                reference="flashinfer issue #1781: a leading ':' in the path breaks its compiler call",
            )
    best = best_toolkit(needs, host)
    if best is None:
        return skipped(id, "no fitting toolkit (see cuda.toolkit)")
    if facts.cuda_home and facts.cuda_home_real not in {found.path for found in facts.toolkits}:
        return fail(
            id,
            "CUDA_HOME names a folder that is no toolkit",
            observed=facts.cuda_home,
            expected=best.path,
            fix=f"export CUDA_HOME={best.path}",
            reference=_JIT,
        )
    missing = [header for header in JIT_HEADERS if header not in best.headers]
    if missing:
        return warn(
            id,
            f"the toolkit has no {names(missing)}: some kernels cannot be compiled while serving",
            observed=best.path,
            expected=names(JIT_HEADERS),
            fix="apt-get install -y "
            + " ".join(f"{_PACKAGE_OF_HEADER[header]}-{_dashed(best.release)}" for header in missing),
            reference="vLLM docker/Dockerfile installs cudart, curand and cublas headers for runtime JIT",
        )
    found_by = "CUDA_HOME" if facts.cuda_home else ("PATH" if facts.nvcc_on_path else "its usual place")
    return ok(id, f"found by {found_by}", best.path)


def _dashed(release: str | None) -> str:
    return "-".join(map(str, version_key(release)[:2]))


def container_toolkit(needs: Needs, host: HostFacts) -> Finding | list[Finding]:
    """Docker can hand GPUs to containers; asked only on the docker route."""
    id = "cuda.container_toolkit"
    if needs.route != "docker":
        return []
    if host.docker is None:
        return skipped(id, "Docker was not looked at")
    if host.docker.server is None:
        return skipped(id, "Docker does not answer (see docker.engine)")
    if "nvidia" in host.docker.runtimes or host.docker.cdi:
        how = "runtime nvidia" if "nvidia" in host.docker.runtimes else f"CDI ({host.docker.cdi[0]})"
        version = f", toolkit {host.docker.toolkit}" if host.docker.toolkit else ""
        return ok(id, "configured", how + version)
    installed = host.docker.toolkit is not None
    return fail(
        id,
        "the NVIDIA Container Toolkit is installed, but Docker does not know it"
        if installed
        else "no NVIDIA Container Toolkit: `--gpus all` fails",
        observed=f"runtimes: {names(host.docker.runtimes) or 'none'}",
        expected="runtime nvidia, or a CDI specification",
        fix="nvidia-ctk runtime configure --runtime=docker && systemctl restart docker"
        if installed
        else "apt-get install -y nvidia-container-toolkit && nvidia-ctk runtime configure --runtime=docker "
        "&& systemctl restart docker",
        reference="NVIDIA Container Toolkit installation guide; Docker: 'could not select device driver'",
    )


def docker_engine(needs: Needs, host: HostFacts) -> Finding | list[Finding]:
    """Docker Engine runs, and this user may use it; asked only on the docker route."""
    id = "docker.engine"
    if needs.route != "docker":
        return []
    if host.docker is None:
        return skipped(id, "Docker was not looked at")
    if host.docker.server:
        return ok(id, "answers", f"Docker {host.docker.server}, {host.docker.storage or 'unknown storage'}")
    why = host.docker.why or "no answer"
    if host.docker.path is None:
        fix = "Install Docker Engine (docs.docker.com/engine/install), or choose another route."
        if host.system.container:
            fix = "Docker does not run inside this container: choose the wheel or source route."
        return fail(id, "no Docker on this host", observed=why, expected="Docker Engine", fix=fix)
    if "permission denied" in why.lower():
        return fail(
            id,
            f"{host.system.user or 'this user'} may not use Docker",
            observed=why,
            expected="access to the Docker socket",
            fix="sudo usermod -aG docker $USER   (then log in again), or connect as root",
        )
    return fail(
        id,
        "Docker is installed, and its daemon does not answer",
        observed=why,
        expected="a running daemon",
        fix="systemctl enable --now docker"
        if host.system.systemd
        else "Docker needs its daemon, which does not run here: choose the wheel or source route.",
    )
