"""The driver: new enough, one version throughout, and not replaced behind our back."""

from __future__ import annotations

from tasks.checks.gpu import unavailable
from tasks.checks.needs import Needs
from tasks.checks.words import names
from tasks.facts import HostFacts
from tasks.facts.text import at_least, version_key
from tasks.findings import Finding, fail, ok, skipped, warn

# Least driver of each CUDA major (CUDA release notes, "minor version compatibility").
DRIVER_OF_CUDA = {11: "450.80.02", 12: "525.60.13", 13: "580"}


def version(needs: Needs, host: HostFacts) -> Finding:
    """The driver can run the CUDA that the engine was built for (CUDA 13 needs 580 or newer)."""
    facts = host.gpu
    if facts.driver is None:
        return skipped("driver.version", f"no driver version: {facts.why_no_driver}")
    of_cuda = DRIVER_OF_CUDA.get(needs.cuda_major or 0)
    floors = [floor for floor in (needs.driver, of_cuda) if floor]
    floor = max(floors, key=version_key, default=None)
    if floor is None:
        return ok("driver.version", "no floor is asked for", facts.driver)
    if at_least(facts.driver, floor):
        return ok("driver.version", "new enough", facts.driver, f">= {floor}")
    because = f"CUDA {needs.cuda_major} needs it" if floor == of_cuda else "the recipe needs it"
    major = floor.split(".")[0]
    # vLLM publishes images for CUDA 12.9 beside those for 13, and none for anything older
    older = "Or use an engine build for CUDA 12 (its -cu129 image)." if needs.cuda_major == 13 else ""
    newer = f"apt-get install -y nvidia-driver-{major}-server-open && reboot  "
    if host.system.container:
        newer = "The driver is the machine's: rent a host with a newer one."
    return fail(
        "driver.version",
        f"the driver is too old ({because})",
        observed=facts.driver,
        expected=f">= {floor}",
        fix=f"{newer} {older}".strip(),
        reference="NVIDIA CUDA release notes, minimum driver; symptom: 'driver too old (found 12080)'",
    )


def library_match(needs: Needs, host: HostFacts) -> Finding:
    """Kernel module, libcuda and nvidia-smi are of one version."""
    facts = host.gpu
    id = "driver.library_match"
    module = facts.kernel.module_version or facts.driver
    if facts.smi.trouble == "mismatch":
        return fail(
            id,
            "the loaded kernel module and the driver's libraries differ: no CUDA program can start",
            observed=f"module {facts.kernel.module_version or 'unknown'}, "
            f"library {facts.smi.library_version or facts.kernel.libml_version or 'unknown'}",
            expected="one version",
            fix="reboot   (the new module is loaded then)",
            reference="tinygrad/open-gpu-kernel-modules issue #47",
        )
    libraries = {v for v in (facts.kernel.libcuda_version, facts.kernel.libml_version) if v}
    if module is None or not (libraries or facts.smi.version):
        return skipped(id, "neither module nor library version could be read")
    different = [v for v in sorted(libraries) if not _same(v, module)]
    if different:
        return fail(
            id,
            "the driver's libraries are not of the loaded module's version",
            observed=f"module {module}, libraries {names(different)}",
            expected=f"{module} throughout",
            fix="reboot   (in a container: restart it, so that the machine's libraries are mounted anew)",
            reference="NVIDIA driver documentation: user-space and kernel components must match",
        )
    if facts.smi.version and not _same(facts.smi.version, module):
        return warn(
            id,
            "nvidia-smi is of another version than the driver",
            observed=f"nvidia-smi {facts.smi.version}, driver {module}",
            expected="one version",
            fix="Remove the extra nvidia-utils package, or the tool that an image brought along.",
            reference="canonical/inference-snaps issue #89",
        )
    return ok(id, "one version throughout", module)


def _same(one: str, other: str) -> bool:
    """Versions agree on the parts that both have: NVML prints two parts, files three."""
    a, b = version_key(one), version_key(other)
    width = min(len(a), len(b))
    return width > 0 and a[:width] == b[:width]


def auto_upgrade(needs: Needs, host: HostFacts) -> Finding:
    """Unattended upgrades would not replace the loaded driver."""
    id = "driver.auto_upgrade"
    facts = host.upgrades
    if facts.reasons.get("*"):
        return skipped(id, facts.reasons["*"])
    if host.system.container:
        return ok(id, "the driver is the machine's, not this container's")
    drivers = [package for package in facts.packages if package not in facts.held]
    if not facts.unattended:
        return ok(id, "no unattended upgrades")
    if not facts.packages:
        return ok(id, "unattended upgrades run, but the driver is not from a package they know")
    if facts.blacklisted or not drivers:
        return ok(id, "the driver's packages are held", names(facts.held) or "blacklisted in apt.conf.d")
    return warn(
        id,
        "unattended upgrades may replace the driver under a running engine; nothing starts until a reboot",
        observed=f"not held: {names(drivers[:4])}",
        expected="driver packages on hold",
        fix=f"apt-mark hold {' '.join(drivers)}",
        reference="pando85/homelab pull request #4110; NVIDIA/ubuntu-packaging-nvidia-driver issue #3",
    )


def open_module(needs: Needs, host: HostFacts) -> list[Finding]:
    """Blackwell needs the open kernel module; said only when the closed one is loaded."""
    facts = host.gpu
    if unavailable("driver.module", needs, facts) or facts.kernel.open_module is not False:
        return []
    blackwell = [gpu for gpu in facts.gpus if (gpu.compute_capability or "").startswith(("10.", "12."))]
    if not blackwell:
        return []
    return [
        warn(
            "driver.module",
            "Blackwell GPUs on the closed kernel module, which does not support them",
            observed="proprietary module",
            expected="open kernel module",
            fix="apt-get install -y nvidia-driver-580-server-open && reboot",
            reference="NVIDIA open GPU kernel modules: required for Blackwell",
        )
    ]
