"""What the deep probe (`onhost/deep_probe.py`) measured, as findings, and the NCCL settings it proves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tasks.checks.gpu import chosen
from tasks.checks.links import P2P_OFF, NcclAdvice, all_nvlink
from tasks.checks.needs import Needs
from tasks.checks.words import names, plural
from tasks.facts import HostFacts
from tasks.findings import Finding, fail, ok, skipped, warn

# GB/s that a x16 link of each PCIe generation gives in practice, one way (rtx6kpro: 53 to 56 on gen 5).
PCIE_X16_GB_S = {3: 12.0, 4: 25.0, 5: 52.0, 6: 104.0}
# Below this part of what a link can give, something is wrong with it.
POOR = 0.5
POOR_BUS = 0.3

_HANG = "local-inference-lab/rtx6kpro issue #15, vLLM issues #33041 and #51513, NCCL issue #2079"
_SAID = {
    "hang": "does not end",
    "error": "fails",
    "wrong_sum": "gives a wrong sum",
    "wrong_data": "delivers damaged data",
    "ok": "is right",
}


def deep_findings(needs: Needs, host: HostFacts, result: Mapping[str, Any] | None) -> list[Finding]:
    """Findings of one deep probe's document. One that cannot be read gives `skipped`, never a crash."""
    if not result:
        return [skipped("deep.all_reduce", "the deep probe gave no answer")]
    try:
        return [*_copies(needs, host, result), *_all_reduce(needs, host, result), *_stuck(result)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [skipped("deep.all_reduce", f"the deep probe's answer could not be read ({error!r})")]


def proven_advice(result: Mapping[str, Any] | None) -> NcclAdvice | None:
    """The NCCL settings that the deep probe proved to work, for the service; None when it proved none."""
    verdict = (result or {}).get("verdict")
    if not isinstance(verdict, Mapping) or verdict.get("works") is not True:
        return None
    p2p = verdict.get("p2p")
    if not isinstance(p2p, bool):
        return None
    env = {str(name): str(value) for name, value in dict(verdict.get("env") or {}).items()}
    flags = {str(name): bool(value) for name, value in dict(verdict.get("flags") or {}).items()}
    return NcclAdvice(p2p, str(verdict.get("why", "")), env, flags, proven=True)


def _copies(needs: Needs, host: HostFacts, result: Mapping[str, Any]) -> list[Finding]:
    copies = result.get("copies")
    if copies is None:
        tried = result["torch"].get("tried") or {}
        why = names(f"{python}: {reason}" for python, reason in tried.items()) or "none was found"
        return [skipped("deep.host_device", f"no Python with torch that sees a GPU ({why})")]
    findings = [_host_device(needs, host, copies)]
    if copies["peers"] or copies["status"] in ("hang", "error"):
        findings.append(_peers(needs, host, copies))
    return findings


def _host_device(needs: Needs, host: HostFacts, copies: Mapping[str, Any]) -> Finding:
    id = "deep.host_device"
    rows = copies["host_device"]
    if not rows:
        return fail(
            id,
            f"copying to a GPU {_SAID[copies['status']]}",
            observed=f"at: {copies.get('at')}; {copies.get('error') or 'no words'}",
            expected="every GPU takes and gives data",
            fix="Look for Xid lines in `dmesg`; reboot, and replace the GPU if it comes back.",
        )
    floors = {gpu.index: _pcie_floor(gpu.link_gen_max, gpu.link_width) for gpu in chosen(needs, host.gpu)}
    told = "; ".join(
        f"GPU {row['gpu']} {row['to_device_gb_s']:.1f} in, {row['to_host_gb_s']:.1f} out" for row in rows
    )
    damaged = [row["gpu"] for row in rows if not row["whole"]]
    if damaged:
        return fail(
            id,
            f"data comes back changed from {names(f'GPU {gpu}' for gpu in damaged)}",
            observed=f"{told} GB/s",
            expected="the same bytes",
            fix="Do not use this GPU: run `nvidia-smi -q -d ECC` and replace it.",
        )
    slow = [
        row["gpu"]
        for row in rows
        if (floor := floors.get(row["gpu"])) and min(row["to_device_gb_s"], row["to_host_gb_s"]) < floor
    ]
    if slow:
        floor = min(floors[gpu] or 0 for gpu in slow)
        return warn(
            id,
            f"{names(f'GPU {gpu}' for gpu in slow)} is slow to reach: loading weights takes longer",
            observed=f"{told} GB/s",
            expected=f">= {floor:.0f} GB/s for this PCIe link",
            fix="Check the link under load (gpu.pcie_link), NUMA placement, and the slot.",
            reference="local-inference-lab/rtx6kpro: 53 to 56 GB/s one way on PCIe 5 x16",
        )
    return ok(id, "host and GPUs exchange data", f"{told} GB/s")


def _pcie_floor(gen: int | None, width: int | None) -> float | None:
    full = PCIE_X16_GB_S.get(gen or 0)
    return POOR * full * (width or 16) / 16 if full else None


def _peers(needs: Needs, host: HostFacts, copies: Mapping[str, Any]) -> Finding:
    id = "deep.peer"
    rows = copies["peers"]
    if copies["status"] in ("hang", "error"):
        return fail(
            id,
            f"copying between GPUs {_SAID[copies['status']]}",
            observed=f"at: {copies.get('at')}; {copies.get('error') or 'no words'}",
            expected="every pair copies",
            fix=f"Serve with {P2P_OFF}; then see host.iommu_acs.",
            reference=_HANG,
        )
    damaged = [f"{row['from']} to {row['to']}" for row in rows if not row["whole"]]
    if damaged:
        return fail(
            id,
            "data copied between GPUs arrives damaged",
            observed=f"GPU {names(damaged)}",
            expected="the same bytes",
            fix=f"Serve with {P2P_OFF}; turn the IOMMU's translation off (iommu=pt) and try again.",
            reference=_HANG,
        )
    lowest = min(rows, key=lambda row: float(row["gb_s"]))
    told = f"{lowest['gb_s']:.1f} GB/s at least (GPU {lowest['from']} to {lowest['to']})"
    direct = all(row["direct"] for row in rows)
    slow = {
        float(row["gb_s"]) / floor: (row, floor) for row in rows if (floor := _peer_floor(needs, host, row))
    }
    if slow and min(slow) < 1:
        row, floor = slow[min(slow)]
        return warn(
            id,
            "copies between GPUs are slower than their link allows",
            observed=f"{row['gb_s']:.1f} GB/s (GPU {row['from']} to {row['to']})",
            expected=f">= {floor:.0f} GB/s",
            fix="See gpu.topology and gpu.pcie_link for the pair that is named.",
            reference="half of the link's rate as nvidia-smi and the PCIe generation give it",
        )
    return ok(id, "direct copies between GPUs" if direct else "copies between GPUs go through the host", told)


def _peer_floor(needs: Needs, host: HostFacts, row: Mapping[str, Any]) -> float | None:
    """What a pair's own link must give: its NVLinks where the matrix says `NV4`, else PCIe if direct."""
    pair = (row["from"], row["to"])
    kind = host.gpu.topology.between.get(pair, "") if host.gpu.topology else ""
    speeds = host.gpu.nvlink.speeds.get(row["from"], ()) if host.gpu.nvlink else ()
    links = re.fullmatch(r"NV(\d{1,3})", kind)
    if links:
        return POOR * int(links[1]) * min(speeds) if speeds else None
    ends = [gpu for gpu in chosen(needs, host.gpu) if gpu.index in pair]
    floors = [floor for gpu in ends if (floor := _pcie_floor(gpu.link_gen_max, gpu.link_width))]
    return min(floors) if floors and row["direct"] else None


def _all_reduce(needs: Needs, host: HostFacts, result: Mapping[str, Any]) -> list[Finding]:
    id = "deep.all_reduce"
    verdict = result["verdict"]
    runs = result["all_reduce"]
    if result.get("copies") is None:
        return [skipped(id, str(verdict["why"]))]
    gpus = chosen(needs, host.gpu)
    wanted = len(gpus) or (needs.gpu.count if needs.gpu else 0)
    seen = int(result["torch"].get("gpus", wanted))
    if seen < wanted:
        return [
            fail(
                id,
                "torch sees fewer GPUs than the recipe uses: the engine would not start on them",
                observed=f"{seen} of {wanted}, by {result['torch'].get('python')}",
                expected=plural(wanted, "GPU"),
                fix="See gpu.mig and gpu.device_nodes, and which GPUs the container was given.",
                reference="torch.cuda.device_count",
            )
        ]
    if not runs:
        single = len(result["copies"]["host_device"]) < 2
        return [ok(id, str(verdict["why"])) if single else skipped(id, "time ran out before it was tried")]
    told = "; ".join(_run(run) for run in runs)
    if verdict["works"] is None and all(run["status"] == "ok" for run in runs):
        return [skipped(id, f"{verdict['why']}: time ran out ({told})")]
    if not verdict["works"]:
        return [
            fail(
                id,
                str(verdict["why"]),
                observed=told,
                expected="the right sum, in time",
                fix="Look at `dmesg` (Xid, NVRM) and the size of /dev/shm; reboot, then deep=true again.",
                reference=_HANG,
            )
        ]
    good = [run for run in runs if run["status"] == "ok"]
    if verdict["p2p"] is False:
        return [
            warn(
                id,
                f"{verdict['why']}: the engine will be started that way",
                observed=told,
                expected="a right all_reduce with P2P",
                fix=f"Serve with {P2P_OFF}; the cure is iommu=pt and ACS off (see host.iommu_acs).",
                reference=_HANG,
            )
        ]
    nvlink = host.gpu.nvlink if all_nvlink(needs, host) else None
    speeds = [sum(nvlink.speeds.get(gpu.index, ())) for gpu in gpus] if nvlink else []
    bus = min(float(run["bus_gb_s"]) for run in good)
    if speeds and min(speeds) > 0 and bus < POOR_BUS * min(speeds):
        return [
            warn(
                id,
                "all_reduce is right, and slow for these NVLinks",
                observed=told,
                expected=f">= {POOR_BUS * min(speeds):.0f} GB/s",
                fix="See gpu.topology for links that are down; NCCL_DEBUG=INFO shows the path that is taken.",
                reference="Azure azurehpc-health-checks: 460 to 480 GB/s on 8x H100 and H200",
            )
        ]
    return [ok(id, str(verdict["why"]), told)]


def _run(run: Mapping[str, Any]) -> str:
    where = f"{plural(int(run['ranks']), 'GPU')}, P2P {'on' if run['p2p'] else 'off'}"
    if run["status"] == "ok":
        return f"{where}: {float(run['bus_gb_s']):.1f} GB/s, {float(run['latency_us']):.0f} us"
    words = f" ({run['error']})" if run.get("error") else ""
    return f"{where}: {_SAID[run['status']]} at {run.get('at', 'the sum')}{words}"


def _stuck(result: Mapping[str, Any]) -> list[Finding]:
    pids = result.get("stuck") or []
    if not pids:
        return []
    return [
        fail(
            "deep.processes",
            "processes of the probe hang in the driver and cannot be ended",
            observed=f"pid {names(pids)}",
            expected="none left",
            fix="reboot",
            reference="NVIDIA Xid catalogue, 119: the GPU's firmware does not answer",
        )
    ]
