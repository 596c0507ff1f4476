"""The GPUs: there, answering, the right ones, healthy, free, and at full width."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tasks.checks.needs import Needs
from tasks.checks.words import names, plural
from tasks.facts import HostFacts
from tasks.facts.gpu import Gpu, GpuFacts, GpuProcess, Xid
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
VISIBLE = "CUDA_VISIBLE_DEVICES"
# nvidia-smi prints these in place of values (nvml.h, NVML_ERROR_RESET_REQUIRED and NVML_ERROR_GPU_IS_LOST).
_BROKEN = re.compile(r"requires reset|is lost", re.IGNORECASE)


def unavailable(id: str, needs: Needs, facts: GpuFacts) -> Finding | None:
    """`skipped` for checks that need GPUs where none of the recipe's could be read."""
    if chosen(needs, facts):
        return None
    if facts.gpus:
        return skipped(id, f"the recipe's {VISIBLE}={needs.env.get(VISIBLE)} names no GPU of this host")
    why = facts.smi.message or "nvidia-smi lists no GPU"
    return skipped(id, f"no GPU could be read ({why})")


def _which(gpus: list[Gpu]) -> str:
    return names(f"GPU {gpu.index}" for gpu in gpus)


def visible(needs: Needs, facts: GpuFacts) -> tuple[Gpu, ...]:
    """The GPUs that the engine would see: those that the recipe's CUDA_VISIBLE_DEVICES lists, else all.

    Read as CUDA does: indices (by bus, as the engine is started) or UUIDs, which may be cut; from the first
    word on that names no GPU, nothing is seen. (CUDA C++ Programming Guide, environment variables.)
    """
    listed = needs.env.get(VISIBLE)
    if listed is None:
        return facts.gpus
    found: list[Gpu] = []
    for word in (part.strip() for part in listed.split(",")):
        gpu = next((one for one in facts.gpus if _named(one, word)), None)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpu: Gpu, word: str) -> bool:
    uuid = (gpu.uuid or "").casefold()
    return word == str(gpu.index) or (word.startswith("GPU-") and uuid.startswith(word.casefold()))


def chosen(needs: Needs, facts: GpuFacts) -> tuple[Gpu, ...]:
    """The GPUs that the recipe would use: the first so many that it sees (all, where it says no number)."""
    count = needs.gpu.count if needs.gpu else 0
    return visible(needs, facts)[:count] if count else visible(needs, facts)


def spare(needs: Needs, facts: GpuFacts) -> list[Gpu]:
    """The GPUs that the recipe would not use."""
    used = chosen(needs, facts)
    return [gpu for gpu in facts.gpus if gpu not in used]


def broken(gpu: Gpu) -> str | None:
    """What the driver says in place of values when a GPU is out of order: `GPU requires reset`."""
    return next((said.strip("[]") for said in gpu.reasons.values() if _BROKEN.search(said)), None)


def _of_a_spare(finding: Finding) -> Finding:
    """The same about a GPU that the recipe does not use: nothing that blocks."""
    return replace(finding, status="warn", summary=f"{finding.summary} (the recipe does not use it)")


def _unread(gpus: list[Gpu], *fields: str) -> str:
    """Which GPUs did not say something, and what they said instead."""
    whys = ((gpu, next((gpu.reasons[f] for f in fields if f in gpu.reasons), "not printed")) for gpu in gpus)
    return names(f"GPU {gpu.index} ({why.strip('[]')})" for gpu, why in whys)


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
        if found := _out_of_order(chosen(needs, host.gpu)):
            return found
        if found := _out_of_order(spare(needs, host.gpu)):
            return _of_a_spare(found)
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


def _out_of_order(gpus: Iterable[Gpu]) -> Finding | None:
    """A failure where the driver gives a GPU up."""
    said = {gpu.index: words for gpu in gpus if (words := broken(gpu))}
    if not said:
        return None
    which = ",".join(str(index) for index in said)
    return fail(
        "gpu.driver_communication",
        f"{names(f'GPU {index}' for index in said)} is out of order",
        observed=names(f"GPU {index}: {words}" for index, words in said.items()),
        expected="every GPU answers",
        fix=f"Stop what uses it, then nvidia-smi --gpu-reset -i {which}; else reboot the host.",
        reference="nvml.h, NVML_ERROR_RESET_REQUIRED and NVML_ERROR_GPU_IS_LOST; Xid catalogue, 79 and 95",
    )


def count(needs: Needs, host: HostFacts) -> Finding:
    """As many usable GPUs as the recipe needs, among those it sees; those split by MIG do not count."""
    facts = host.gpu
    if not facts.gpus:
        return unavailable("gpu.count", needs, facts) or skipped("gpu.count", "no GPU could be read")
    wanted = needs.gpu.count if needs.gpu else 1
    seen = visible(needs, facts)
    whole = [gpu for gpu in seen if gpu.mig is not True]
    split = len(seen) - len(whole)
    observed = plural(len(facts.gpus), "GPU") + (f", {split} of them split by MIG" if split else "")
    listed, inherited = needs.env.get(VISIBLE), facts.kernel.env.get(VISIBLE)
    if listed is not None and len(seen) < wanted <= len(facts.gpus):
        return fail(
            "gpu.count",
            f"the recipe's {VISIBLE} shows the engine fewer GPUs than the recipe uses",
            observed=f"{VISIBLE}={listed}: {plural(len(seen), 'GPU')} of this host's {len(facts.gpus)}",
            expected=str(wanted),
            fix=f"List {wanted} of this host's GPUs (nvidia-smi -L) in the recipe's [serve.env].",
            reference="CUDA C++ Programming Guide, environment variables",
        )
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
    hidden = inherited is not None and len([part for part in inherited.split(",") if part.strip()]) < wanted
    if hidden and listed is None:
        return warn(
            "gpu.count",
            f"{VISIBLE} hides GPUs that the recipe needs",
            observed=f"{VISIBLE}={inherited}",
            expected=plural(wanted, "GPU"),
            fix=f"unset {VISIBLE}",
        )
    return ok("gpu.count", "enough", observed, str(wanted))


def model(needs: Needs, host: HostFacts) -> Finding:
    """The GPUs are those that the recipe was proven on, all of one kind."""
    facts = host.gpu
    if missing := unavailable("gpu.model", needs, facts):
        return missing
    used = chosen(needs, facts)
    kinds = list(dict.fromkeys(gpu.name or "unnamed" for gpu in used))
    wanted = needs.gpu.names if needs.gpu else ()
    strangers = [
        gpu for gpu in used if gpu.name and wanted and not any(_fits(gpu.name, name) for name in wanted)
    ]
    if strangers:
        fitting = [g for g in facts.gpus if g.name and any(_fits(g.name, name) for name in wanted)]
        enough = fitting[: len(used)] if len(fitting) >= len(used) else []
        indices = ",".join(str(gpu.index) for gpu in enough)
        return fail(
            "gpu.model",
            "not the GPU that this recipe is for",
            observed=names(f"{gpu.name} (GPU {gpu.index})" for gpu in strangers)
            if enough
            else names(dict.fromkeys(gpu.name for gpu in strangers)),
            expected=" or ".join(wanted),
            fix=f'Set {VISIBLE} = "{indices}" in the recipe\'s [serve.env]: these fit.'
            if enough
            else "Choose a recipe for this GPU, or a host with the recipe's.",
        )
    unnamed = [gpu for gpu in used if not gpu.name]
    if wanted and unnamed:
        return skipped("gpu.model", f"no name could be read: {_unread(unnamed, 'name', 'product_name')}")
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
    if missing := unavailable("gpu.compute_capability", needs, facts):
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
    if missing := unavailable("gpu.memory", needs, facts):
        return missing
    wanted = needs.gpu.memory_mib if needs.gpu else None
    used = chosen(needs, facts)
    known = [gpu for gpu in used if gpu.memory_total is not None]
    unread = [gpu for gpu in used if gpu.memory_total is None]
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
    if unread:
        told = _unread(unread, "memory.total", "fb_memory_usage/total")
        return skipped("gpu.memory", f"memory could not be read: {told}")
    return ok("gpu.memory", "enough", observed, f">= {wanted} MiB" if wanted else None)


def mig(needs: Needs, host: HostFacts) -> Finding:
    """MIG is off: a split GPU takes no part in tensor parallelism, and where it is seen hides whole ones."""
    facts = host.gpu
    if missing := unavailable("gpu.mig", needs, facts):
        return missing
    split = [gpu for gpu in facts.gpus if gpu.mig]
    seen = [gpu for gpu in visible(needs, facts) if gpu.mig]
    whole = len(facts.gpus) - len(split)
    if split:
        off = f"nvidia-smi -i {','.join(str(gpu.index) for gpu in seen or split)} -mig 0"
        other = f"; or list whole GPUs only in {VISIBLE} of the recipe's [serve.env]"
        found = fail(
            "gpu.mig",
            f"{_which(seen or split)} is split by MIG",
            observed="MIG enabled",
            expected="MIG disabled",
            fix=f"{off}   (then reset or reboot){other if whole >= len(chosen(needs, facts)) else ''}",
            reference="NVIDIA MIG user guide: no NCCL between MIG instances, and where CUDA sees one it "
            "shows no whole GPU",
        )
        return found if seen else _of_a_spare(found)
    known = [gpu.mig for gpu in facts.gpus if gpu.mig is not None]
    return ok("gpu.mig", "off" if known else "these GPUs do not do MIG, or not in this mode")


def ecc(needs: Needs, host: HostFacts) -> Finding:
    """No uncorrected memory errors, no repair that waits for a reset."""
    facts = host.gpu
    if missing := unavailable("gpu.ecc", needs, facts):
        return missing
    used = list(chosen(needs, facts))
    if found := _memory_trouble(used):
        return found
    unread = [gpu for gpu in used if gpu.ecc_uncorrected is None and gpu.ecc is not False]
    if unread:
        told = _unread(unread, "ecc.errors.uncorrected.volatile.total", "ecc.mode.current")
        return skipped("gpu.ecc", f"memory errors could not be read: {told}")
    if found := _memory_trouble(spare(needs, facts)):
        return _of_a_spare(found)
    if all(gpu.ecc is False for gpu in used):
        return ok("gpu.ecc", "ECC is off: errors are not counted, and a little memory is gained")
    lifetime = sum(gpu.ecc_uncorrected_lifetime or 0 for gpu in used)
    return ok("gpu.ecc", "no uncorrected errors", f"{lifetime} over the GPUs' life" if lifetime else None)


def _memory_trouble(gpus: list[Gpu]) -> Finding | None:
    reference = "NVIDIA GPU memory error management: row remapping, reset to apply"
    failed = [gpu for gpu in gpus if gpu.remap_failed]
    errors = [gpu for gpu in gpus if gpu.ecc_uncorrected]
    asked = [gpu for gpu in gpus if gpu.recovery_action]
    pending = [gpu for gpu in gpus if gpu.remap_pending or gpu.repair_pending]
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
        bad = [gpu for gpu in gpus if gpu in errors or gpu in pending]
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
    return None


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


# What is over once no repair is pending: the row is remapped, the program that met the error was ended.
OVER_WHEN_REPAIRED = (63, 94)
# What a reset mends. It sets volatile error counts to 0 and applies what is pending, so these prove it.
MENDED_BY_RESET = (48, 95, 140)
# An older fault whose GPU answers now is history: of boots the log holds one, of resets it says nothing.
XID_RECENT_S = 3600


def xid(needs: Needs, host: HostFacts) -> Finding:
    """No recent Xid lines in the kernel's log; the common ones are explained.

    A fault blocks while it is recent (or nobody knows when it was), unless the GPU's memory shows that it
    was reset since; faults of GPUs that the recipe does not use only warn.
    """
    facts = host.gpu
    if facts.xids is None:
        return skipped("gpu.xid", facts.reasons.get("xids", "the kernel's log could not be read"))
    if not facts.xids:
        return ok("gpu.xid", "no Xid in the kernel's log since it begins")
    counts = Counter((one.address, one.code) for one in facts.xids)
    told = []
    for (address, code), number in counts.items():
        meaning = XIDS.get(code, ("not in the table of common ones", False))[0]
        last = next(one.text for one in reversed(facts.xids) if (one.address, one.code) == (address, code))
        action = f" ({last})" if code == 154 and last else ""
        told.append(
            f"Xid {code} on {address}" + (f", {number} times" if number > 1 else "") + f": {meaning}{action}"
        )
    serious = [one for one in facts.xids if XIDS.get(one.code, ("", False))[1]]
    unused = {place_on_bus(gpu.bus) for gpu in spare(needs, facts)}
    present = [
        one
        for one in serious
        if place_on_bus(one.address) not in unused and not _past(one, host.system.uptime_s, facts.gpus)
    ]
    reboot = any("Node Reboot" in one.text or one.code == 79 for one in present)
    if present:
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
    if serious:
        return warn(
            "gpu.xid",
            "the driver reported faults of GPUs since boot, none of them present in a GPU that is used",
            observed="; ".join(told),
            expected="no Xid",
            fix="Watch `dmesg | grep Xid`; replace the GPU if the same address comes back.",
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


def place_on_bus(address: str | None) -> str:
    """Domain, bus and device of an address, comparable: kernel and nvidia-smi write them differently."""
    return (address or "").lower().lstrip("0").split(".")[0]


def _past(one: Xid, uptime: int | None, gpus: tuple[Gpu, ...]) -> bool:
    """The fault is history: its GPU is there and answers, and it is long ago or was mended by a reset."""
    gpu = next((gpu for gpu in gpus if gpu.bus and place_on_bus(gpu.bus) == place_on_bus(one.address)), None)
    if gpu is None or broken(gpu):
        return False
    if uptime is not None and one.at is not None and uptime - one.at > XID_RECENT_S:
        return True
    if gpu.remap_pending is not False or gpu.remap_failed or gpu.repair_pending:
        return False
    return one.code in OVER_WHEN_REPAIRED or (one.code in MENDED_BY_RESET and gpu.ecc_uncorrected == 0)


def persistence(needs: Needs, host: HostFacts) -> Finding:
    """The driver stays loaded while nothing runs: without it every first call takes seconds."""
    facts = host.gpu
    if missing := unavailable("gpu.persistence", needs, facts):
        return missing
    if facts.kernel.persistenced:
        return ok("gpu.persistence", "nvidia-persistenced runs")
    used = chosen(needs, facts)
    off = [gpu for gpu in used if gpu.persistence is False]
    unread = [gpu for gpu in used if gpu.persistence is None]
    if not off and unread:
        return skipped(
            "gpu.persistence", f"persistence mode could not be read: {_unread(unread, 'persistence_mode')}"
        )
    if not off:
        return ok("gpu.persistence", "on")
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
    if missing := unavailable("gpu.idle", needs, facts):
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
    unread = [gpu for gpu in used if gpu.memory_used is None]
    if unread and (not busy or not strangers):
        told = _unread(unread, "memory.used", "fb_memory_usage/used")
        return skipped("gpu.idle", f"memory in use could not be read: {told}")
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
    if missing := unavailable("gpu.pcie_link", needs, facts):
        return missing
    used = chosen(needs, facts)
    narrow, slow, resting, unread = [], [], [], []
    for gpu in used:
        if gpu.link_gen is None and gpu.link_width is None:
            unread.append(gpu)
            continue
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
    if narrow or slow:
        return warn(
            "gpu.pcie_link",
            "a PCIe link is below its maximum: loading and, without NVLink, all-reduce are slower",
            observed="; ".join(narrow + slow),
            expected="full width and generation under load",
            fix="Reseat the GPU or its riser; check the slot's lanes and the BIOS setting of its generation.",
            reference="local-inference-lab/rtx6kpro issue #15; nvidia-smi -q, PCI section",
        )
    if unread:
        told = _unread(unread, "pcie.link.gen.current", "pci/pci_gpu_link_info/pcie_gen/current_link_gen")
        return skipped("gpu.pcie_link", f"the link's state could not be read: {told}")
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
    if missing := unavailable("gpu.power_limit", needs, facts):
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
    unread = [gpu for gpu in used if not gpu.power_limit or not (gpu.power_default or gpu.power_max)]
    observed = names(dict.fromkeys(f"{gpu.power_limit:.0f} W" for gpu in used if gpu.power_limit))
    if low:
        default = low[0].power_default or low[0].power_max
        return warn(
            "gpu.power_limit",
            f"{_which(low)} is held below its default power",
            observed=observed,
            expected=f"{default:.0f} W",
            fix=f"nvidia-smi -pl {default:.0f}   (unless the limit is meant: expect less speed)",
        )
    if unread:
        told = _unread(unread, "power.limit", "power.default_limit")
        return skipped("gpu.power_limit", f"power limits could not be read: {told}")
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
