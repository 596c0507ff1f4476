"""The GPUs: there, answering, the right ones, healthy, free, and at full width."""

from __future__ import annotations

from collections import Counter

from tasks.checks.needs import Needs
from tasks.checks.words import names, plural
from tasks.facts import HostFacts
from tasks.facts.gpu import Gpu, GpuFacts, GpuProcess
from tasks.findings import Finding, fail, ok, skipped, warn

# Compute capability by product name, for tools too old to say it (NVIDIA, "CUDA GPUs" list).
_CAPABILITY_BY_NAME = (
    ("RTX PRO 6000 Blackwell", "12.0"), ("RTX PRO 5000 Blackwell", "12.0"), ("RTX 5090", "12.0"),
    ("B200", "10.0"), ("B300", "10.3"), ("H20", "9.0"), ("H100", "9.0"), ("H800", "9.0"), ("L40", "8.9"),
    ("RTX 6000 Ada", "8.9"), ("RTX 4090", "8.9"), ("A100", "8.0"), ("A800", "8.0"),
)  # fmt: skip

# What holds a GPU's memory while nothing runs: context of the persistence daemon, ECC, display.
IDLE_MIB = 1024
DEFAULT_UTILIZATION = 0.9  # vLLM's --gpu-memory-utilization
# Bits of clocks_event_reasons.active (nvml.h, nvmlClocksEventReasons).
IDLE_BIT = 0x1
SLOWDOWN_BITS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
} | {0x80: "hardware power brake"}


def unavailable(id: str, facts: GpuFacts) -> Finding | None:
    """`skipped` for checks that need GPUs where none could be read."""
    if facts.gpus:
        return None
    why = facts.smi.message or "nvidia-smi lists no GPU"
    return skipped(id, f"no GPU could be read ({why})")


def _which(gpus: list[Gpu]) -> str:
    return names(f"GPU {gpu.index}" for gpu in gpus)


def chosen(needs: Needs, facts: GpuFacts) -> tuple[Gpu, ...]:
    """The GPUs that the recipe would use: the first so many (all, where it says no number)."""
    count = needs.gpu.count if needs.gpu else 0
    return facts.gpus[:count] if count else facts.gpus


def present(needs: Needs, host: HostFacts) -> Finding:
    """There is an NVIDIA GPU at all, on the bus or by the driver's word."""
    facts = host.gpu
    if facts.gpus:
        models = Counter(gpu.name or "unnamed" for gpu in facts.gpus)
        return ok("gpu.present", "found", names(f"{count}x {name}" for name, count in models.items()))
    if facts.pci:
        return ok("gpu.present", "on the PCI bus, though the driver does not show them",
                  names(f"{gpu.address} ({gpu.device or 'unknown'})" for gpu in facts.pci))  # fmt: skip
    if facts.pci is None and facts.smi.trouble not in ("no_tool", "no_devices"):
        return skipped("gpu.present", "neither the PCI bus nor nvidia-smi could be read")
    return fail(
        "gpu.present",
        "no NVIDIA GPU on this host",
        observed=facts.smi.message or "none on the PCI bus",
        expected=plural(needs.gpu.count if needs.gpu else 1, "GPU"),
        fix="Use a host with GPUs; have them passed through to a virtual machine or container (--gpus all).",
    )


def driver_communication(needs: Needs, host: HostFacts) -> Finding:
    """nvidia-smi talks to the driver; each way in which it does not has its own cause and cure."""
    smi = host.gpu.smi
    id = "gpu.driver_communication"
    if smi.trouble is None:
        return ok(id, "nvidia-smi answers", f"driver {host.gpu.driver}" if host.gpu.driver else None)
    contained = host.system.container is not None
    on_bus = bool(host.gpu.pci)
    restart = "Restart the container: it lost its access to the GPUs."
    cures: dict[str, tuple[str, str, str | None]] = {
        "no_tool": (
            "the driver's tools are not installed" if on_bus else "no nvidia-smi, and no GPU on the bus",
            "Start the container with --gpus all (NVIDIA Container Toolkit)."
            if contained
            else "apt-get install -y nvidia-driver-580-server-open && reboot",
            "NVIDIA driver installation guide",
        ),
        "hang": (
            "nvidia-smi does not answer: the driver is stuck, usually on a GPU that fell off the bus",
            "Reboot the host; if it comes back, look for Xid lines with `dmesg | grep -i xid`.",
            "NVIDIA Xid catalogue, 79 and 119",
        ),
        "mismatch": (
            f"the loaded module is not of the version of the libraries ({smi.library_version or 'unknown'}): "
            "the driver was upgraded underneath",
            "reboot   (or unload nvidia_uvm, nvidia_drm, nvidia_modeset and nvidia, then `modprobe nvidia`)",
            "tinygrad/open-gpu-kernel-modules issue #47; nvidia-smi exits 18",
        ),
        "no_driver": (
            "the kernel module is not loaded",
            "modprobe nvidia   (if it fails: `dkms status`, kernel headers, Secure Boot, then reboot)",
            "microsoft/WSL issue #3847; nvidia-smi exits 9",
        ),
        "no_devices": (
            "the driver is loaded and finds no GPU it can use",
            "Check `lspci -nn | grep -i nvidia` and `dmesg | grep NVRM`: GPU in use by vfio-pci, "
            "RmInitAdapter failures, or a closed module where the open one is needed (Blackwell).",
            "NVIDIA open GPU kernel modules: Blackwell needs the open module",
        ),
        "access_lost": (
            "this container lost its devices (its cgroup was reloaded, as by `systemctl daemon-reload`)",
            restart,
            "NVIDIA/nvidia-docker issue #1671",
        ),
        "permission": (
            "this user may not open the GPU's device nodes",
            "sudo usermod -aG video,render $USER   (then log in again), or run as root",
            None,
        ),
        "gpu_lost": (
            f"a GPU does not answer any more{f' ({smi.address})' if smi.address else ''}",
            f"Reboot the host; if {smi.address or 'that address'} fails again, reseat or replace the GPU.",
            "NVIDIA/open-gpu-kernel-modules issue #387; Xid 79",
        ),
    }  # fmt: skip
    summary, fix, reference = cures.get(
        smi.trouble, ("nvidia-smi fails", "Run nvidia-smi on the host and mend what it prints.", None)
    )
    return fail(
        id, summary, observed=smi.message, expected="nvidia-smi answers", fix=fix, reference=reference
    )


def count(needs: Needs, host: HostFacts) -> Finding:
    """As many usable GPUs as the recipe needs; those split by MIG do not count."""
    facts = host.gpu
    if missing := unavailable("gpu.count", facts):
        return missing
    wanted = needs.gpu.count if needs.gpu else 1
    whole = [gpu for gpu in facts.gpus if gpu.mig is not True]
    split = len(facts.gpus) - len(whole)
    observed = plural(len(facts.gpus), "GPU") + (f", {split} of them split by MIG" if split else "")
    visible = facts.kernel.env.get("CUDA_VISIBLE_DEVICES")
    if len(whole) < wanted:
        on_bus = len(facts.pci or ())
        lost = f" ({on_bus} on the PCI bus)" if on_bus > len(facts.gpus) else ""
        return fail(
            "gpu.count",
            "fewer usable GPUs than the recipe needs",
            observed=observed + lost,
            expected=str(wanted),
            fix=f"Use a host with {plural(wanted, 'GPU')}, or a recipe for {len(whole)}."
            if not lost
            else "Reboot, then look at `dmesg | grep NVRM`: a GPU on the bus is not taken by the driver.",
        )
    if visible is not None and len([part for part in visible.split(",") if part.strip()]) < wanted:
        return warn(
            "gpu.count",
            "CUDA_VISIBLE_DEVICES hides GPUs that the recipe needs",
            observed=f"CUDA_VISIBLE_DEVICES={visible}",
            expected=plural(wanted, "GPU"),
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    return ok("gpu.count", "enough", observed, str(wanted))


def model(needs: Needs, host: HostFacts) -> Finding:
    """The GPUs are those that the recipe was proven on, all of one kind."""
    facts = host.gpu
    if missing := unavailable("gpu.model", facts):
        return missing
    used = chosen(needs, facts)
    kinds = list(dict.fromkeys(gpu.name or "unnamed" for gpu in used))
    wanted = needs.gpu.names if needs.gpu else ()
    strangers = [
        gpu for gpu in used if gpu.name and wanted and not any(_fits(gpu.name, name) for name in wanted)
    ]
    if strangers:
        return fail(
            "gpu.model",
            "not the GPU that this recipe is for",
            observed=names(dict.fromkeys(gpu.name for gpu in strangers)),
            expected=" or ".join(wanted),
            fix="Choose a recipe for this GPU, or a host with the recipe's.",
        )
    if len(kinds) > 1:
        return warn(
            "gpu.model",
            "GPUs of different editions: clocks and power limits differ, and the slowest sets the pace",
            observed=names(kinds),
            expected="one edition",
            fix="Set one power limit for all (`nvidia-smi -pl WATTS`), or use GPUs of one edition.",
        )
    return ok("gpu.model", "the recipe's GPU" if wanted else "one kind", names(kinds))


def _fits(name: str, pattern: str) -> bool:
    """A name holds the pattern as whole words; nvidia-smi's table cuts long names with dots."""
    have, want = name.casefold(), pattern.casefold()
    if have.endswith("..."):
        return want in have or have.removesuffix("...").strip().removeprefix("nvidia ") in want
    position = have.find(want)
    end = position + len(want)
    return position >= 0 and (end == len(have) or not have[end].isalnum())


def compute_capability(needs: Needs, host: HostFacts) -> Finding:
    """The compute capability that the engine's kernels and the recipe's flags are for."""
    facts = host.gpu
    if missing := unavailable("gpu.compute_capability", facts):
        return missing
    wanted = needs.gpu.compute_capability if needs.gpu else None
    have = {gpu.index: capability_of(gpu) for gpu in chosen(needs, facts)}
    unknown = [index for index, value in have.items() if value is None]
    observed = names(dict.fromkeys(value for value in have.values() if value)) or "unknown"
    if wanted is None:
        return ok("gpu.compute_capability", "none is asked for", observed)
    if any(value not in (None, wanted) for value in have.values()):
        return fail(
            "gpu.compute_capability",
            "the engine of this recipe is built and flagged for another GPU generation",
            observed=observed,
            expected=wanted,
            fix="Choose a recipe for this GPU.",
            reference="NVIDIA, CUDA GPUs: compute capability by product",
        )
    if unknown:
        return skipped(
            "gpu.compute_capability",
            "this nvidia-smi is too old to say it, and the product's name is not in the table",
        )
    return ok("gpu.compute_capability", "the recipe's", observed, wanted)


def capability_of(gpu: Gpu) -> str | None:
    """Compute capability of a GPU, from the driver or else by its name."""
    if gpu.compute_capability or not gpu.name:
        return gpu.compute_capability
    return next(
        (value for name, value in _CAPABILITY_BY_NAME if name.casefold() in gpu.name.casefold()), None
    )


def memory(needs: Needs, host: HostFacts) -> Finding:
    """Every GPU has the memory that the recipe was sized for."""
    facts = host.gpu
    if missing := unavailable("gpu.memory", facts):
        return missing
    wanted = needs.gpu.memory_mib if needs.gpu else None
    used = chosen(needs, facts)
    known = [gpu for gpu in used if gpu.memory_total is not None]
    if not known:
        why = next((gpu.reasons.get("memory.total") for gpu in used if gpu.reasons.get("memory.total")), None)
        return skipped("gpu.memory", f"memory could not be read ({why or 'not printed'})")
    observed = names(dict.fromkeys(f"{gpu.memory_total} MiB" for gpu in known)) + " a GPU"
    small = [gpu for gpu in known if wanted and (gpu.memory_total or 0) < wanted]
    if small:
        return fail(
            "gpu.memory",
            f"{_which(small)} has less memory than the recipe was sized for",
            observed=observed,
            expected=f">= {wanted} MiB",
            fix="Use GPUs with more memory, or a recipe for these.",
        )
    return ok("gpu.memory", "enough", observed, f">= {wanted} MiB" if wanted else None)


def mig(needs: Needs, host: HostFacts) -> Finding:
    """MIG is off: a split GPU cannot take part in tensor parallelism."""
    facts = host.gpu
    if missing := unavailable("gpu.mig", facts):
        return missing
    split = [gpu for gpu in facts.gpus if gpu.mig]
    if split:
        return fail(
            "gpu.mig",
            f"{_which(split)} is split by MIG",
            observed="MIG enabled",
            expected="MIG disabled",
            fix=f"nvidia-smi -i {','.join(str(gpu.index) for gpu in split)} -mig 0   (then reset or reboot)",
            reference="NVIDIA MIG user guide: no peer-to-peer or NCCL between MIG instances",
        )
    known = [gpu.mig for gpu in facts.gpus if gpu.mig is not None]
    return ok("gpu.mig", "off" if known else "these GPUs do not do MIG, or not in this mode")


def ecc(needs: Needs, host: HostFacts) -> Finding:
    """No uncorrected memory errors, no repair that waits for a reset."""
    facts = host.gpu
    if missing := unavailable("gpu.ecc", facts):
        return missing
    reference = "NVIDIA GPU memory error management: row remapping, reset to apply"
    failed = [gpu for gpu in facts.gpus if gpu.remap_failed]
    errors = [gpu for gpu in facts.gpus if gpu.ecc_uncorrected]
    asked = [gpu for gpu in facts.gpus if gpu.recovery_action]
    pending = [gpu for gpu in facts.gpus if gpu.remap_pending or gpu.repair_pending]
    if failed:
        return fail(
            "gpu.ecc",
            f"{_which(failed)} could not remap a bad memory row",
            observed="row remapping failure",
            expected="none",
            fix="Replace the GPU (RMA): its spare rows are used up.",
            reference=reference,
        )
    if errors or pending:
        bad = [gpu for gpu in facts.gpus if gpu in errors or gpu in pending]
        told = [f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in errors]
        told += [f"GPU {gpu.index}: a repair waits for a reset" for gpu in pending]
        return fail(
            "gpu.ecc",
            f"memory errors on {_which(bad)}",
            observed="; ".join(told),
            expected="0 uncorrected errors, no repair pending",
            fix=f"Stop what uses it, then nvidia-smi --gpu-reset -i {','.join(str(g.index) for g in bad)} "
            "(or reboot); replace the GPU if errors come back.",
            reference=reference,
        )
    if asked:
        return fail(
            "gpu.ecc",
            f"the driver asks for a recovery of {_which(asked)}",
            observed=names(f"GPU {gpu.index}: {gpu.recovery_action}" for gpu in asked),
            expected="no recovery action",
            fix="Do what it names: reset the GPU (nvidia-smi --gpu-reset -i INDEX), or reboot.",
            reference="nvidia-smi -q, GPU Recovery Action; Xid 154",
        )
    on = [gpu for gpu in facts.gpus if gpu.ecc]
    off = [gpu for gpu in facts.gpus if gpu.ecc is False]
    if not on and not off and all(gpu.ecc_uncorrected is None for gpu in facts.gpus):
        return skipped("gpu.ecc", "ECC state could not be read")
    if off and not on:
        return ok("gpu.ecc", "ECC is off: errors are not counted, and a little memory is gained")
    lifetime = sum(gpu.ecc_uncorrected_lifetime or 0 for gpu in facts.gpus)
    return ok("gpu.ecc", "no uncorrected errors", f"{lifetime} over the GPUs' life" if lifetime else None)


# The common ones of the NVIDIA Xid catalogue: what it means, and whether hardware or driver is at fault.
XIDS: dict[int, tuple[str, bool]] = {
    8: ("a channel was reset after a timeout", False),
    13: ("graphics engine exception, usually an illegal access by the program", False),
    31: ("GPU memory page fault, usually an illegal access by the program", False),
    32: ("corrupted push buffer, driver or PCIe", True),
    38: ("driver firmware error", True),
    43: ("the program was stopped after an error of its own", False),
    45: ("channels of an ended program were cleaned up", False),
    46: ("the GPU stopped processing", True),
    48: ("uncorrectable (double bit) memory error", True),
    61: ("internal micro-controller breakpoint", True),
    62: ("internal micro-controller halt", True),
    63: ("a memory row will be remapped at the next reset", True),
    64: ("remapping a memory row failed", True),
    69: ("graphics engine class error", False),
    74: ("NVLink error", True),
    79: ("the GPU fell off the bus", True),
    92: ("high rate of corrected memory errors", True),
    94: ("contained memory error: the program was ended", True),
    95: ("uncontained memory error: the GPU needs a reset", True),
    109: ("context switch timeout", True),
    119: ("the GPU's firmware (GSP) did not answer in time", True),
    120: ("the GPU's firmware (GSP) had an error", True),
    121: ("C2C link error", True),
    136: ("link training failed", True),
    140: ("unrecovered memory error", True),
    143: ("GPU initialization error", True),
    145: ("NVLink RLW error", True),
    149: ("NVLink NETIR error", True),
    154: ("the driver says what recovers the GPU", True),
}


def xid(needs: Needs, host: HostFacts) -> Finding:
    """No recent Xid lines in the kernel's log; the common ones are explained."""
    facts = host.gpu
    if facts.xids is None:
        return skipped("gpu.xid", facts.reasons.get("xids", "the kernel's log could not be read"))
    if not facts.xids:
        return ok("gpu.xid", "no Xid in the kernel's log since it begins")
    counts = Counter((one.address, one.code) for one in facts.xids)
    told = []
    for (address, code), number in counts.items():
        meaning = XIDS.get(code, ("not in the table of common ones", True))[0]
        last = next(one.text for one in reversed(facts.xids) if (one.address, one.code) == (address, code))
        action = f" ({last})" if code == 154 and last else ""
        told.append(
            f"Xid {code} on {address}" + (f", {number} times" if number > 1 else "") + f": {meaning}{action}"
        )
    serious = [one for one in facts.xids if XIDS.get(one.code, ("", True))[1]]
    reboot = any("Node Reboot" in one.text for one in facts.xids) or any(one.code == 79 for one in serious)
    if serious:
        return fail(
            "gpu.xid",
            "the driver reported faults of GPUs",
            observed="; ".join(told),
            expected="no Xid",
            fix="Reboot the host; replace the GPU if the same address comes back."
            if reboot
            else "nvidia-smi --gpu-reset -i INDEX (while unused), else reboot; watch `dmesg | grep Xid`.",
            reference="NVIDIA Xid catalogue",
        )
    return warn(
        "gpu.xid",
        "programs made errors on the GPUs since boot",
        observed="; ".join(told),
        expected="no Xid",
        fix="Nothing to mend if that program is gone; look into it if it was the engine.",
        reference="NVIDIA Xid catalogue",
    )


def persistence(needs: Needs, host: HostFacts) -> Finding:
    """The driver stays loaded while nothing runs: without it every first call takes seconds."""
    facts = host.gpu
    if missing := unavailable("gpu.persistence", facts):
        return missing
    off = [gpu for gpu in facts.gpus if gpu.persistence is False]
    if facts.kernel.persistenced or not off:
        if not off and all(gpu.persistence is None for gpu in facts.gpus) and not facts.kernel.persistenced:
            return skipped("gpu.persistence", "persistence mode could not be read")
        return ok("gpu.persistence", "nvidia-persistenced runs" if facts.kernel.persistenced else "on")
    return warn(
        "gpu.persistence",
        f"off on {_which(off)}: each start initialises the GPU anew, and power settings are forgotten",
        observed="disabled",
        expected="enabled",
        fix="systemctl enable --now nvidia-persistenced   (or: nvidia-smi -pm 1)",
        reference="NVIDIA driver persistence documentation: the daemon replaces the legacy mode",
    )


def idle(needs: Needs, host: HostFacts) -> Finding:
    """Nobody else holds the GPUs' memory. In containers processes are hidden, so memory is what is judged."""
    facts = host.gpu
    if missing := unavailable("gpu.idle", facts):
        return missing
    used = chosen(needs, facts)
    strangers = {
        (process.pid, process.name)
        for gpu in used
        for process in gpu.processes
        if not is_ours(process, needs)
    }
    ours = {process.pid for gpu in used for process in gpu.processes} - {pid for pid, _ in strangers}
    busy = [gpu for gpu in used if (gpu.memory_used or 0) > IDLE_MIB]
    closed = [gpu for gpu in used if gpu.compute_mode == "Prohibited"]
    if closed:
        return fail(
            "gpu.idle",
            f"{_which(closed)} takes no programs: its compute mode is Prohibited",
            observed="compute mode Prohibited",
            expected="Default",
            fix=f"nvidia-smi -i {','.join(str(gpu.index) for gpu in closed)} -c 0",
            reference="nvidia-smi(1), compute mode",
        )
    if all(gpu.memory_used is None for gpu in used) and not strangers:
        return skipped("gpu.idle", "memory in use could not be read")
    if not busy:
        return ok("gpu.idle", "free", f"at most {max(gpu.memory_used or 0 for gpu in used)} MiB in use")
    if not strangers and (ours or needs.own_pids):
        return ok("gpu.idle", "held by this deployment's own service", _held(busy))
    who = names(f"pid {pid} ({name or 'unnamed'})" for pid, name in sorted(strangers, key=lambda p: p[0]))
    utilization = needs.flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION)
    share = float(utilization) if isinstance(utilization, (int, float)) else DEFAULT_UTILIZATION
    too_full = [
        gpu
        for gpu in busy
        if gpu.memory_total and gpu.memory_total - (gpu.memory_used or 0) < share * gpu.memory_total
    ]
    hidden = "its holders are not visible from here (another container or user)"
    finding = fail if too_full else warn
    return finding(
        "gpu.idle",
        "another program holds GPU memory" + (": the engine would not get its share" if too_full else ""),
        observed=f"{_held(busy)}; {who or hidden}",
        expected=f"at most {IDLE_MIB} MiB in use",
        fix=f"Stop {who}." if who else "Find and stop what holds it: `nvidia-smi` on the machine itself.",
        reference="vLLM refuses to start when free memory is below gpu-memory-utilization of the total",
    )


def is_ours(process: GpuProcess, needs: Needs) -> bool:
    """A process of this deployment: its main process or started by it, or at home under its root."""
    home = needs.root.rstrip("/") + "/"
    places = (process.name or "", process.exe or "", (process.cwd or "") + "/")
    family = {process.pid, *process.ancestors}
    return bool(family & set(needs.own_pids)) or any(place.startswith(home) for place in places)


def _held(busy: list[Gpu]) -> str:
    return names(f"GPU {gpu.index} {gpu.memory_used} of {gpu.memory_total} MiB" for gpu in busy)


def pcie_link(needs: Needs, host: HostFacts) -> Finding:
    """PCIe generation and width at their maximum; a lower generation of an idle GPU is power saving."""
    facts = host.gpu
    if missing := unavailable("gpu.pcie_link", facts):
        return missing
    used = chosen(needs, facts)
    narrow, slow, resting, known = [], [], [], 0
    for gpu in used:
        if gpu.link_gen is None and gpu.link_width is None:
            continue
        known += 1
        if gpu.link_width and gpu.link_width_max and gpu.link_width < gpu.link_width_max:
            narrow.append(f"GPU {gpu.index} x{gpu.link_width} of x{gpu.link_width_max}")
        if gpu.link_gen and gpu.link_gen_max and gpu.link_gen < gpu.link_gen_max:
            if _at_rest(gpu):
                resting.append(gpu)
            else:
                slow.append(f"GPU {gpu.index} gen {gpu.link_gen} of {gpu.link_gen_max} under load")
        elif gpu.link_gen_max and gpu.link_gen_device and gpu.link_gen_max < gpu.link_gen_device:
            slow.append(
                f"GPU {gpu.index}: its slot does gen {gpu.link_gen_max}, the GPU {gpu.link_gen_device}"
            )
    if not known:
        return skipped("gpu.pcie_link", "the link's state could not be read")
    if narrow or slow:
        return warn(
            "gpu.pcie_link",
            "a PCIe link is below its maximum: loading and, without NVLink, all-reduce are slower",
            observed="; ".join(narrow + slow),
            expected="full width and generation under load",
            fix="Reseat the GPU or its riser; check the slot's lanes and the BIOS setting of its generation.",
            reference="local-inference-lab/rtx6kpro issue #15; nvidia-smi -q, PCI section",
        )
    best = names(dict.fromkeys(_link(gpu) for gpu in used if gpu.link_width))
    if resting:
        return ok("gpu.pcie_link", f"lower generation on {_which(resting)} is power saving at idle", best)
    return ok("gpu.pcie_link", "at full width and generation", best)


def _link(gpu: Gpu) -> str:
    return f"gen {gpu.link_gen or '?'} x{gpu.link_width}"


def _at_rest(gpu: Gpu) -> bool:
    """The GPU is idle, so a low link generation says nothing. Unknown counts as idle."""
    if gpu.event_reasons is not None and gpu.event_reasons & IDLE_BIT:
        return True
    if gpu.utilization is not None and gpu.utilization > 0:
        return False
    if gpu.pstate in ("P0", "P1", "P2") and gpu.event_reasons is not None:
        return False
    if gpu.event_reasons is not None and gpu.power_draw and gpu.power_limit:
        return gpu.power_draw < 0.3 * gpu.power_limit
    return True


def power_limit(needs: Needs, host: HostFacts) -> Finding:
    """The power limit is the GPU's default, and nothing throttles it."""
    facts = host.gpu
    if missing := unavailable("gpu.power_limit", facts):
        return missing
    used = chosen(needs, facts)
    hot = []
    for gpu in used:
        bits = [word for bit, word in SLOWDOWN_BITS.items() if (gpu.event_reasons or 0) & bit]
        if bits:
            at = f" at {gpu.temperature} C" if gpu.temperature is not None else ""
            hot.append(f"GPU {gpu.index}: {names(bits)}{at}")
    if hot:
        return warn(
            "gpu.power_limit",
            "a GPU is throttled now",
            observed="; ".join(hot),
            expected="no slowdown",
            fix="Check airflow and power cables; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` says more.",
            reference="nvml.h, nvmlClocksEventReasons",
        )
    low = [
        gpu
        for gpu in used
        if gpu.power_limit and (top := gpu.power_default or gpu.power_max) and gpu.power_limit < top - 1
    ]
    known = [gpu for gpu in used if gpu.power_limit]
    if not known:
        return skipped("gpu.power_limit", "power limits could not be read")
    observed = names(dict.fromkeys(f"{gpu.power_limit:.0f} W" for gpu in known))
    if low:
        default = low[0].power_default or low[0].power_max
        return warn(
            "gpu.power_limit",
            f"{_which(low)} is held below its default power",
            observed=observed,
            expected=f"{default:.0f} W",
            fix=f"nvidia-smi -pl {default:.0f}   (unless the limit is meant: expect less speed)",
        )
    return ok("gpu.power_limit", "at the default", observed)


def device_nodes(needs: Needs, host: HostFacts) -> Finding:
    """The device nodes that CUDA opens exist and may be opened: `/dev/nvidia-uvm` too."""
    nodes = host.gpu.kernel.nodes
    if not host.gpu.gpus and not nodes:
        return skipped("gpu.device_nodes", "no GPU could be read")
    if "/dev/dxg" in nodes:
        return ok("gpu.device_nodes", "GPUs through /dev/dxg (WSL)")
    wanted = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    cards = [node for node in nodes if node.removeprefix("/dev/nvidia").isdigit()]
    missing = [node for node in wanted if node not in nodes]
    if len(cards) < len(host.gpu.gpus):
        missing.append(f"{len(host.gpu.gpus) - len(cards)} of /dev/nvidia0…")
    closed = [node for node, usable in nodes.items() if not usable and node in (*wanted, *cards)]
    reference = "nvidia-modprobe(1); without /dev/nvidia-uvm CUDA fails with 'unknown error' (999)"
    if missing:
        return fail(
            "gpu.device_nodes",
            f"{names(missing)} missing",
            observed=names(sorted(nodes)) or "none",
            expected="/dev/nvidiactl, /dev/nvidia-uvm and one node a GPU",
            fix="nvidia-modprobe -u -c=0"
            if host.system.container is None
            else "Restart the container with --gpus all, or with --device for each of these nodes.",
            reference=reference,
        )
    if closed:
        return fail(
            "gpu.device_nodes",
            f"{host.system.user or 'this user'} may not open {names(closed)}",
            observed="no read and write permission",
            expected="readable and writable",
            fix="sudo usermod -aG video,render $USER   (then log in again)",
            reference=reference,
        )
    return ok(
        "gpu.device_nodes",
        "all there",
        names(["/dev/nvidia-uvm", "/dev/nvidiactl", plural(len(cards), "card")]),
    )
