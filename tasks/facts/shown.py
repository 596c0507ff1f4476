"""The facts that a report shows, as plain JSON values; what is only for the checks is left out."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tasks.facts.links import Matrix
from tasks.facts.probe import HostFacts


def facts_shown(facts: HostFacts, *, gpus: bool) -> dict[str, Any]:
    """What the host is; with `gpus` also what it computes on. Sizes in bytes, GPU memory in MiB."""
    system, cpu, memory, cgroup = facts.system, facts.cpu, facts.memory, facts.cgroup
    found: dict[str, Any] = {
        "system": {
            "os": system.os_name,
            "kernel": system.kernel,
            "libc": f"{system.libc or ''} {system.libc_version or ''}".strip(),
            "init": "systemd" if system.systemd else "no systemd",
            "container": system.container or "no",
            "user": system.user,
        },
        "cpu": {"model": cpu.model, "usable": cpu.usable, "cores_at_most": cgroup.cpus},
        "memory": {"total": memory.total, "available": memory.available, "limit": cgroup.memory_max},
    }
    if gpus:
        models = Counter(gpu.name or "unnamed" for gpu in facts.gpu.gpus)
        found["gpus"] = {
            "count": len(facts.gpu.gpus),
            "models": [f"{count}x {name}" for name, count in models.items()],
            "memory_mib": [gpu.memory_total for gpu in facts.gpu.gpus],
            "driver": facts.gpu.driver,
            "cuda": facts.gpu.cuda,
            "toolkits": [toolkit.release for toolkit in facts.cuda.toolkits],
        }
    return found


def topology_shown(facts: HostFacts) -> dict[str, Any] | None:
    """What lies between each two GPUs, their P2P status and NUMA nodes; None with fewer than two."""
    matrices = {
        "links": facts.gpu.topology,
        "p2p_read": facts.gpu.p2p_read,
        "p2p_write": facts.gpu.p2p_write,
    }
    found = {name: _rows(matrix) for name, matrix in matrices.items() if matrix and len(matrix.gpus) > 1}
    nodes = facts.gpu.topology.numa if found and facts.gpu.topology else {}
    if nodes:
        found["numa"] = {f"GPU {index}": node for index, node in sorted(nodes.items())}
    return found or None


def _rows(matrix: Matrix) -> dict[str, str]:
    return {f"GPU {a} to {b}": kind for (a, b), kind in sorted(matrix.between.items()) if a < b}
