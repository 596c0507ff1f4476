"""Whether the host can: pure checks over recipe needs and facts.

`run_checks(needs, facts)` gives every finding of one host. A check is a function
`(Needs, HostFacts) -> Finding | list[Finding]`; checks never touch a host, and their order means nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tasks.checks import build, cuda, disk, driver, gpu, host, links, net, pairing
from tasks.checks.needs import DiskNeed, EndpointNeed, GpuNeed, Needs
from tasks.facts import HostFacts
from tasks.findings import Finding, skipped

__all__ = ["CHECKS", "GPU_CHECKS", "DiskNeed", "EndpointNeed", "GpuNeed", "Needs", "run_checks"]

Check = Callable[[Needs, HostFacts], Finding | list[Finding]]

CHECKS: dict[str, Check] = {
    "recipe.pairing": pairing.pairing,
    "recipe.known_issues": pairing.known_issues,
    "host.probe": host.probe,
    "host.os": host.os_release,
    "host.kernel": host.kernel,
    "host.glibc": host.glibc,
    "host.cpu": host.cpu,
    "host.libraries": host.libraries,
    "host.memory": host.memory,
    "host.cgroup_limits": host.cgroup_limits,
    "host.clock": host.clock,
    "host.init": host.init,
    "host.privilege": host.privilege,
    "host.ulimits": host.ulimits,
    "host.ports": host.ports,
    "host.hugepages": host.hugepages,
    "host.swap": host.swap,
    "disk.space": disk.space,
    "disk.inodes": disk.inodes,
    "disk.shm": disk.shm,
    "disk.writable": disk.writable,
    "disk.type": disk.kind,
    "python.conda": build.conda,
    "build.tools": build.tools,
    "build.memory_per_job": build.memory_per_job,
    "build.cuda_wheels": build.one_cuda_major,
    "docker.engine": cuda.docker_engine,
    "net": net.endpoints,
}

# Asked only where the recipe uses GPUs: otherwise nothing about GPUs is reported at all.
GPU_CHECKS: dict[str, Check] = {
    "gpu.present": gpu.present,
    "gpu.driver_communication": gpu.driver_communication,
    "gpu.count": gpu.count,
    "gpu.model": gpu.model,
    "gpu.compute_capability": gpu.compute_capability,
    "gpu.memory": gpu.memory,
    "gpu.mig": gpu.mig,
    "gpu.ecc": gpu.ecc,
    "gpu.xid": gpu.xid,
    "gpu.persistence": gpu.persistence,
    "gpu.idle": gpu.idle,
    "gpu.pcie_link": gpu.pcie_link,
    "gpu.power_limit": gpu.power_limit,
    "gpu.device_nodes": gpu.device_nodes,
    "gpu.topology": links.topology,
    "gpu.p2p": links.p2p,
    "host.iommu_acs": links.iommu_acs,
    "driver.version": driver.version,
    "driver.library_match": driver.library_match,
    "driver.auto_upgrade": driver.auto_upgrade,
    "driver.module": driver.open_module,
    "cuda.toolkit": cuda.toolkit,
    "cuda.home": cuda.home,
    "cuda.container_toolkit": cuda.container_toolkit,
}


def run_checks(needs: Needs, facts: HostFacts) -> list[Finding]:
    """Every finding about one host. A check that breaks becomes `skipped` with the reason, never a crash."""
    findings: list[Finding] = []
    for id, check in (CHECKS | GPU_CHECKS if needs.want_gpu else CHECKS).items():
        try:
            found = check(needs, facts)
        except Exception as error:
            found = skipped(id, f"this check broke ({type(error).__name__}: {error}); please report it")
        findings.extend(found if isinstance(found, list) else [found])
    return findings
