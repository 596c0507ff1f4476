"""CUDA toolkits on the host, and what containers need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.facts.text import Section, get_section


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit: its folder, the release of its nvcc, and which headers it has."""

    path: str
    release: str | None = None
    headers: frozenset[str] = frozenset()
    ptxas: bool = False


@dataclass(frozen=True)
class CudaFacts:
    """Toolkits in the order in which they would be found, and the variables that choose one.

    `cuda_home_real` is where CUDA_HOME leads once links are followed.
    """

    cuda_home: str | None = None
    cuda_home_real: str | None = None
    cuda_path: str | None = None
    nvcc_on_path: str | None = None
    toolkits: tuple[Toolkit, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DockerFacts:
    """Docker Engine. `server` is None with `why` when the daemon does not answer.

    `own_pids` are the first processes of containers that this deployment runs.
    """

    path: str | None = None
    server: str | None = None
    why: str | None = None
    runtimes: tuple[str, ...] = ()
    default_runtime: str | None = None
    root: str | None = None
    storage: str | None = None
    toolkit: str | None = None
    cdi: tuple[str, ...] = ()
    own_pids: tuple[int, ...] = ()


def nvcc_release(text: str) -> str | None:
    """Release of `nvcc --version`: `Cuda compilation tools, release 13.0, V13.0.88` is 13.0."""
    match = re.search(r"release (\d{1,3}\.\d{1,3})", text)
    return match.group(1) if match else None


def parse_cuda(sections: Mapping[str, Section]) -> CudaFacts:
    """CUDA facts."""
    section = get_section(sections, "cuda")
    pairs = section.pairs()
    toolkits: list[Toolkit] = []
    for line in section.text.splitlines():
        key, _, value = line.partition("=")
        if key == "home":
            toolkits.append(Toolkit(value.strip()))
        elif not toolkits:
            continue
        elif key == "nvcc":
            toolkits[-1] = _changed(toolkits[-1], release=nvcc_release(value))
        elif key == "header":
            toolkits[-1] = _changed(toolkits[-1], header=value.strip())
        elif key == "ptxas":
            toolkits[-1] = _changed(toolkits[-1], ptxas=True)
    return CudaFacts(
        cuda_home=pairs.get("CUDA_HOME") or None,
        cuda_home_real=pairs.get("CUDA_HOME_REAL") or None,
        cuda_path=pairs.get("CUDA_PATH") or None,
        nvcc_on_path=pairs.get("on_path") or None,
        toolkits=tuple(toolkits),
        reasons={} if pairs else {"*": section.why},
    )


def _changed(
    toolkit: Toolkit, release: str | None = None, header: str | None = None, ptxas: bool = False
) -> Toolkit:
    headers = toolkit.headers | {header} if header else toolkit.headers
    return Toolkit(toolkit.path, release or toolkit.release, headers, ptxas or toolkit.ptxas)


def parse_docker(sections: Mapping[str, Section]) -> DockerFacts | None:
    """Docker facts, or None when Docker was not looked for."""
    section = get_section(sections, "docker")
    if not section.present:
        return None
    pairs = section.pairs()
    toolkit = get_section(sections, "container_toolkit")
    tool_pairs = toolkit.pairs()
    version = re.search(r"\d+\.\d+(?:\.\d+)?", tool_pairs.get("ctk") or tool_pairs.get("cli") or "")
    server = pairs.get("server") or None
    lines = [line for line in section.text.splitlines() if "=" not in line and line.strip()]
    why = None
    if server is None:
        why = (
            (lines[-1].strip()[:200] if lines else section.why) if pairs.get("path") else "there is no docker"
        )
    return DockerFacts(
        path=pairs.get("path") or None,
        server=server,
        why=why,
        runtimes=tuple(pairs.get("runtimes", "").split()),
        default_runtime=pairs.get("default_runtime") or None,
        root=pairs.get("root") or None,
        storage=pairs.get("storage") or None,
        toolkit=version.group() if version else None,
        cdi=tuple(line[4:] for line in toolkit.text.splitlines() if line.startswith("cdi=")),
        own_pids=tuple(int(word) for word in pairs.get("pids", "").split() if word.isdigit() and word != "0"),
    )
