"""How the GPUs reach each other, and which NCCL settings follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tasks.checks.gpu import chosen, place_on_bus, unavailable
from tasks.checks.needs import Needs
from tasks.checks.words import names
from tasks.facts import HostFacts
from tasks.facts.gpu import PciGpu
from tasks.findings import Finding, fail, ok, skipped, warn

P2P_OFF = "NCCL_P2P_DISABLE=1 together with --disable-custom-all-reduce"
_HANGS = (
    "vLLM issues #33041 and #51513, NCCL issues #1999 and #2079, local-inference-lab/rtx6kpro issue #15: "
    "P2P reads OK, and the first all_reduce hangs"
)
# Products with an NVLink fabric on their baseboard. The PCIe and NVL editions have their own names.
_SXM = re.compile(r"\b(H20(-3e)?|H200|H800|H100 80GB HBM3|A100-SXM4\S*|A800-SXM4\S*|B200|B300)$")


@dataclass(frozen=True)
class NcclAdvice:
    """The NCCL settings that this host needs, and why. `proven` is True when a deep check decided it."""

    p2p: bool
    why: str
    env: dict[str, str] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    proven: bool = False


def nccl_env_flags(advice: NcclAdvice | None) -> tuple[dict[str, str], dict[str, bool]]:
    """Environment and flags that an advice adds to an engine's own; both empty where P2P stays on."""
    return (dict(advice.env), dict(advice.flags)) if advice and not advice.p2p else ({}, {})


def readable(needs: Needs, host: HostFacts) -> bool:
    """The P2P status is known, or does not matter."""
    return not _several(needs) or _p2p_statuses(needs, host) is not None


def _several(needs: Needs) -> bool:
    return needs.gpu is not None and needs.gpu.count > 1


def nccl_advice(needs: Needs, host: HostFacts) -> NcclAdvice:
    """Settings before any proof: P2P stays on where NVLink or a clean status speaks for it.

    NCCL_P2P_DISABLE and --disable-custom-all-reduce always go together: one alone moves the hang to the
    other path (vLLM issue #51513).
    """
    off_env, off_flags = {"NCCL_P2P_DISABLE": "1"}, {"disable-custom-all-reduce": True}
    if not _several(needs):
        return NcclAdvice(True, "fewer than two GPUs are used")
    if needs.env.get("NCCL_P2P_DISABLE") == "1":
        return NcclAdvice(False, "the recipe turns P2P off", off_env, off_flags)
    statuses = _p2p_statuses(needs, host)
    if statuses is None:
        return NcclAdvice(True, "the P2P status could not be read, so the recipe's settings stand")
    if statuses - {"OK"}:
        return NcclAdvice(False, f"P2P status {names(sorted(statuses))}", off_env, off_flags)
    if all_nvlink(needs, host):
        return NcclAdvice(True, "all GPUs are joined by NVLink")
    if redirecting(needs, host):
        return NcclAdvice(False, "the bridges redirect peer traffic (ACS)", off_env, off_flags)
    return NcclAdvice(True, "P2P reads OK; only a real all_reduce proves it")


def _p2p_statuses(needs: Needs, host: HostFacts) -> set[str] | None:
    matrices = [m for m in (host.gpu.p2p_read, host.gpu.p2p_write) if m is not None]
    if not matrices:
        return None
    used = [gpu.index for gpu in chosen(needs, host.gpu)]
    return set().union(*(matrix.among(used) for matrix in matrices)) or None


def all_nvlink(needs: Needs, host: HostFacts) -> bool:
    """Every two GPUs that are used are joined by NVLink."""
    used = [gpu.index for gpu in chosen(needs, host.gpu)]
    kinds = host.gpu.topology.among(used) if host.gpu.topology else set()
    return bool(kinds) and all(kind.startswith("NV") for kind in kinds)


def redirecting(needs: Needs, host: HostFacts) -> list[str] | None:
    """The bridges above the GPUs that are used which send peer traffic through the root complex.

    Where the host does not say which bridges are above them, all of the host's; None when unreadable.
    """
    if host.gpu.acs_redirect is None:
        return None
    used = _on_the_bus(needs, host)
    above = {bridge.removeprefix("0000:") for gpu in used for bridge in (gpu.bridges or ())}
    known = bool(used) and all(gpu.bridges is not None for gpu in used)
    return [one for one in host.gpu.acs_redirect if not known or one.removeprefix("0000:") in above]


def _on_the_bus(needs: Needs, host: HostFacts) -> list[PciGpu]:
    """The GPUs that are used as the bus shows them; all of them where they cannot be told apart."""
    places = {place_on_bus(gpu.bus) for gpu in chosen(needs, host.gpu)}
    found = [gpu for gpu in host.gpu.pci or () if place_on_bus(gpu.address) in places]
    return found if len(found) == len(places) else list(host.gpu.pci or ())


def topology(needs: Needs, host: HostFacts) -> Finding:
    """What joins the GPUs: NVLink, PCIe switches, or the link between sockets."""
    facts = host.gpu
    if missing := unavailable("gpu.topology", needs, facts):
        return missing
    used = chosen(needs, facts)
    if len(used) < 2:
        return ok("gpu.topology", "a single GPU")
    kinds = facts.topology.among([gpu.index for gpu in used]) if facts.topology else set()
    if facts.topology is None or not kinds:
        return skipped(
            "gpu.topology", f"the matrix could not be read: {facts.reasons.get('topo', 'not printed')}"
        )
    told = names(sorted(kinds))
    fabric = {gpu.name or "" for gpu in used if _SXM.search(gpu.name or "")}
    unfinished = [
        gpu for gpu in used if gpu.fabric_state and gpu.fabric_state not in ("Completed", "Not Started")
    ]
    no_nvlink = not any(kind.startswith("NV") for kind in kinds)
    down = facts.nvlink.inactive if facts.nvlink else {}
    broken_links = {gpu.index: down[gpu.index] for gpu in used if down.get(gpu.index)}
    reference = "NVIDIA Fabric Manager user guide; NVIDIA/nccl-tests issue #338"
    if fabric and (no_nvlink or unfinished):
        return fail(
            "gpu.topology",
            f"{names(sorted(fabric))} without its NVLink fabric",
            observed=f"{told}; fabric manager {facts.kernel.fabricmanager or 'not seen'}"
            + (f"; fabric {unfinished[0].fabric_state}" if unfinished else ""),
            expected="NVLink between all GPUs",
            fix="systemctl enable --now nvidia-fabricmanager   (its version must equal the driver's)",
            reference=reference,
        )
    if fabric and broken_links:
        return warn(
            "gpu.topology",
            "some NVLinks are down: less bandwidth between these GPUs",
            observed=names(f"GPU {index}: {number} down" for index, number in broken_links.items()),
            expected="all links up",
            fix="systemctl restart nvidia-fabricmanager; look for Xid 74 in `dmesg`; then the baseboard.",
            reference=reference,
        )
    if not no_nvlink and all(kind.startswith("NV") for kind in kinds):
        return ok("gpu.topology", "NVLink between all GPUs", told)
    if "SYS" in kinds:
        nodes = sorted(set(facts.topology.numa.values()))
        across = f" (NUMA nodes {names(nodes)})" if nodes else ""
        return warn(
            "gpu.topology",
            f"some GPUs reach each other only across CPU sockets or NUMA nodes{across}",
            observed=told,
            expected="NVLink, or PCIe below one socket",
            fix="No cure in software; put tensor-parallel groups on one socket where the count allows "
            "(CUDA_VISIBLE_DEVICES).",
            reference="nvidia-smi topo -m legend; NCCL issue #2127",
        )
    return ok("gpu.topology", "PCIe below one socket, no NVLink", told)


def p2p(needs: Needs, host: HostFacts) -> Finding:
    """The P2P status, which settings follow, and that OK is no proof."""
    facts = host.gpu
    if missing := unavailable("gpu.p2p", needs, facts):
        return missing
    if len(chosen(needs, facts)) < 2:
        return ok("gpu.p2p", "a single GPU needs no P2P")
    statuses = _p2p_statuses(needs, host)
    if statuses is None:
        return skipped(
            "gpu.p2p", f"the status could not be read: {facts.reasons.get('p2p_read', 'not printed')}"
        )
    advice = nccl_advice(needs, host)
    observed = f"status {names(sorted(statuses))}"
    disabled = needs.env.get("NCCL_P2P_DISABLE") == "1"
    flag = bool(needs.flags.get("disable-custom-all-reduce"))
    if disabled != flag and (disabled or statuses - {"OK"}):
        only = "NCCL_P2P_DISABLE" if disabled else "--disable-custom-all-reduce"
        return warn(
            "gpu.p2p",
            f"the recipe sets only {only}: one without the other moves the hang to the other path",
            observed=observed,
            expected=P2P_OFF,
            fix=f"The engine is started with both; set {P2P_OFF} in the recipe, or neither.",
            reference=_HANGS,
        )
    if statuses - {"OK"} and not disabled:
        return warn(
            "gpu.p2p",
            f"the GPUs cannot reach each other's memory: the engine is started with {P2P_OFF}",
            observed=observed,
            expected="OK",
            fix="In a virtual machine, change the emulated PCIe layout; else see host.iommu_acs.",
            reference="aikitoria/open-gpu-kernel-modules issue #24; nvidia-smi topo -p2p legend",
        )
    if disabled:
        return ok("gpu.p2p", f"{advice.why}: {P2P_OFF}", observed)
    if all_nvlink(needs, host):
        return ok(
            "gpu.p2p", "NVLink; an OK here is still no proof (deep=true runs a real all_reduce)", observed
        )
    return ok(
        "gpu.p2p",
        "reads OK, which is no proof: run with deep=true for a real all_reduce"
        + ("" if advice.p2p else f"; will serve with {P2P_OFF} ({advice.why})"),
        observed,
    )


def iommu_acs(needs: Needs, host: HostFacts) -> Finding:
    """IOMMU translation and ACS redirection, which make P2P over PCIe slow or hang."""
    id = "host.iommu_acs"
    facts = host.gpu
    if len(chosen(needs, facts)) < 2:
        return skipped(id, "it matters between GPUs, and fewer than two are used")
    if all_nvlink(needs, host):
        return ok(id, "the GPUs are joined by NVLink and do not need PCIe peer access")
    words = [w for w in (host.system.cmdline or "").split() if "iommu" in w]
    types = {gpu.iommu for gpu in _on_the_bus(needs, host) if gpu.iommu}
    off = any(w.endswith("=off") for w in words) or (host.gpu.kernel.iommu_groups == 0 and not types)
    through = any(w.split("=")[-1] == "pt" for w in words) or types == {"identity"}
    translated = bool(types & {"DMA", "DMA-FQ"})
    told = [f"kernel command line: {names(words)}" if words else "no iommu word on the kernel command line"]
    if types:
        told.append(f"IOMMU domains of the GPUs: {names(sorted(types))}")
    fix = (
        "Turn ACS off on the bridges above the GPUs (BIOS, or setpci -s BRIDGE ECAP_ACS+6.w=0000 "
        "at each boot) and boot with iommu=pt (AMD: amd_iommu=on iommu=pt)."
    )
    redirects = redirecting(needs, host)
    if redirects:
        told.append(f"ACS redirects peer traffic at {names(redirects[:6])}")
        status = fail if translated and not off and not through else warn
        return status(
            id,
            "peer traffic is sent through the root complex: NCCL may hang, and is slow if it does not",
            observed="; ".join(told),
            expected="no ACS redirection on the bridges above the GPUs",
            fix=fix if needs.env.get("NCCL_P2P_DISABLE") != "1" else fix + " Or stay with P2P turned off.",
            reference="NVIDIA/nccl issue #2079; NCCL troubleshooting guide, PCI Access Control Services",
        )
    if translated and not through:
        return warn(
            id,
            "the IOMMU translates the GPUs' addresses: P2P may hang although its status is OK",
            observed="; ".join(told),
            expected="iommu=pt or off",
            fix="Boot with iommu=pt (or intel_iommu=off / amd_iommu=off).",
            reference="vLLM issue #33041; NCCL troubleshooting guide",
        )
    if redirects is None:
        why = facts.reasons.get("acs", "no ACS line")
        if off:
            return ok(id, "the IOMMU is off; ACS bits could not be read", "; ".join(told))
        return skipped(id, f"ACS bits could not be read ({why}); {'; '.join(told)}")
    return ok(id, "no ACS redirection", "; ".join(told))
