"""What the machine is: system, kernel, libc, CPU, memory and what a container may use of them, clock,
init, privilege, limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.facts.text import Section, get_section, int_of, version_key, yes

# cgroup v1 writes "no limit" as the largest page-aligned number (kernel: memory.limit_in_bytes).
_V1_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class SystemFacts:
    """System, kernel, init and privilege.

    `boot_id` changes with every boot; `epoch` is the host's clock. `cmdline` holds only those words of the
    kernel's command line that matter to GPUs. `memlock_*` are KiB.
    """

    sysname: str | None = None
    kernel: str | None = None
    machine: str | None = None
    hostname: str | None = None
    os_name: str | None = None
    libc: str | None = None
    libc_version: str | None = None
    uid: int | None = None
    user: str | None = None
    groups: tuple[str, ...] = ()
    home: str | None = None
    path: str | None = None
    sudo: str | None = None
    pid1: str | None = None
    systemd: bool | None = None
    systemd_state: str | None = None
    systemd_user: bool | None = None
    linger: bool | None = None
    container: str | None = None
    autodl: bool | None = None
    epoch: int | None = None
    clock_skew_s: float | None = None
    uptime_s: int | None = None
    boot_id: str | None = None
    nofile_soft: int | None = None
    nofile_hard: int | None = None
    memlock_soft: int | None = None
    memlock_hard: int | None = None
    cmdline: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> bool:
        """The probe ran as root."""
        return self.uid == 0


@dataclass(frozen=True)
class CpuFacts:
    """Cores and instruction sets. `cpus` is the machine's count, `usable` what this process may run on."""

    model: str | None = None
    cpus: int | None = None
    usable: int | None = None
    flags: frozenset[str] | None = None
    numa_nodes: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryFacts:
    """The machine's memory in bytes (what a container may use of it: `CgroupFacts`)."""

    total: int | None = None
    available: int | None = None
    swap_total: int | None = None
    swap_used: int | None = None
    huge_pages: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CgroupFacts:
    """What the cgroup allows. A limit that is not set is None and `limited` says so.

    `cpus` is the quota in cores (fractions are usual), `cpuset` the number of CPUs in the set.
    """

    version: int | None = None
    memory_max: int | None = None
    memory_current: int | None = None
    memory_inactive: int | None = None
    cpus: float | None = None
    cpuset: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_used(self) -> int | None:
        """Memory that cannot be reclaimed at once: usage less the inactive page cache."""
        if self.memory_current is None:
            return None
        return max(0, self.memory_current - (self.memory_inactive or 0))


@dataclass(frozen=True)
class UpgradeFacts:
    """Whether packages replace themselves, and the driver's packages with their holds."""

    unattended: bool | None = None
    packages: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    blacklisted: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


def parse_system(sections: Mapping[str, Section], received_at: float | None = None) -> SystemFacts:
    """System facts. `received_at` is the controller's clock when the answer came, for the clock's skew."""
    section = get_section(sections, "system")
    pairs = section.pairs()
    reasons: dict[str, str] = {}

    def text(key: str) -> str | None:
        value = pairs.get(key)
        if value:
            return value
        reasons[key] = section.why if not pairs else "not printed by the host"
        return None

    def limit(key: str) -> int | None:
        raw = pairs.get(key, "")
        if raw == "unlimited":
            return _V1_UNLIMITED
        return int(raw) if raw.isdigit() and len(raw) < 19 else None

    libc = text("libc")
    epoch = int_of(get_section(sections, "end").text) or int_of(pairs.get("epoch"))
    state = pairs.get("systemd_state") or None
    return SystemFacts(
        sysname=text("sysname"),
        kernel=text("kernel"),
        machine=text("machine"),
        hostname=text("hostname"),
        os_name=_unquoted(pairs.get("os.PRETTY_NAME")),
        libc=_libc_name(libc),
        libc_version=_libc_version(libc),
        uid=int_of(pairs.get("uid")),
        user=text("user"),
        groups=tuple(pairs.get("groups", "").split()),
        home=text("home"),
        path=text("path"),
        sudo=text("sudo"),
        pid1=text("pid1"),
        systemd=yes(pairs.get("systemd")),
        systemd_state=state,
        systemd_user=yes(pairs.get("systemd_user")),
        linger=yes(pairs.get("linger")),
        container=pairs.get("container") or None,
        autodl=yes(pairs.get("autodl")),
        epoch=epoch,
        clock_skew_s=None if received_at is None or epoch is None else epoch - received_at,
        uptime_s=int_of(pairs.get("uptime")),
        boot_id=text("boot_id"),
        nofile_soft=limit("nofile_soft"),
        nofile_hard=limit("nofile_hard"),
        memlock_soft=limit("memlock_soft"),
        memlock_hard=limit("memlock_hard"),
        cmdline=pairs.get("cmdline", "") if pairs.get("cmdline_read") == "yes" else None,
        reasons=reasons,
    )


def _unquoted(value: str | None) -> str | None:
    return None if value is None else value.strip().strip("\"'")


def _libc_name(text: str | None) -> str | None:
    if text is None:
        return None
    if "musl" in text.lower():
        return "musl"
    return "glibc" if re.search(r"glibc|gnu libc|\d\.\d", text, re.I) else None


def _libc_version(text: str | None) -> str | None:
    match = re.search(r"(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)\s*$", text or "")
    return match.group(1) if match else None


def parse_cpu(sections: Mapping[str, Section]) -> CpuFacts:
    """CPU facts from `/proc/cpuinfo`, nproc and sysfs."""
    section = get_section(sections, "cpu")
    pairs = section.pairs()
    reasons = {
        key: section.why if not pairs else "not in /proc/cpuinfo"
        for key in ("model", "cpus", "flags")
        if not pairs.get(key)
    }
    flags = pairs.get("flags")
    return CpuFacts(
        model=pairs.get("model") or None,
        cpus=int_of(pairs.get("cpus")) or None,
        usable=int_of(pairs.get("usable")) or None,
        flags=frozenset(flags.split()) if flags else None,
        numa_nodes=int_of(pairs.get("numa_nodes")) or None,
        reasons=reasons,
    )


def parse_memory(sections: Mapping[str, Section]) -> MemoryFacts:
    """Memory facts from `/proc/meminfo` (kB there, bytes here)."""
    section = get_section(sections, "memory")
    pairs = section.pairs()
    reasons: dict[str, str] = {}

    def kib(key: str) -> int | None:
        value = int_of(pairs.get(key))
        if value is None:
            reasons[key] = section.why if not pairs else f"/proc/meminfo has no {key}"
            return None
        return value * 1024

    swap_total, swap_free = kib("SwapTotal"), kib("SwapFree")
    return MemoryFacts(
        total=kib("MemTotal"),
        available=kib("MemAvailable"),
        swap_total=swap_total,
        swap_used=None if swap_total is None or swap_free is None else swap_total - swap_free,
        huge_pages=int_of(pairs.get("HugePages_Total")),
        reasons=reasons,
    )


def parse_cgroup(sections: Mapping[str, Section]) -> CgroupFacts:
    """cgroup limits, v1 and v2: the tightest of this process's cgroup and all above it."""
    section = get_section(sections, "cgroup")
    folders: dict[str, dict[str, str]] = {}
    for line in section.text.splitlines():
        match = re.match(r"(/\S*)/([a-z_.]+):(.*)$", line)
        if match:
            folders.setdefault(match.group(1), {}).setdefault(match.group(2), match.group(3).strip())
    if not folders:
        return CgroupFacts(reasons={"*": section.why if not section.text else "no cgroup files may be read"})
    v2 = any(name in files for files in folders.values() for name in ("memory.max", "cpu.max"))
    limits = [
        value
        for files in folders.values()
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes", "memory.hierarchical")
        if (value := _limit(files.get(name))) is not None
    ]
    quotas = [quota for files in folders.values() if (quota := _quota(files)) is not None]
    sets = [
        count
        for files in folders.values()
        for name in ("cpuset.cpus.effective", "cpuset.cpus")
        if (count := cpu_list_size(files.get(name))) is not None
    ]
    limiting = _limiting(list(folders.values()))
    return CgroupFacts(
        version=2 if v2 else 1,
        memory_max=min(limits, default=None),
        memory_current=_limit(limiting.get("memory.current") or limiting.get("memory.usage_in_bytes")),
        memory_inactive=_limit(limiting.get("memory.inactive") or limiting.get("memory.inactive_own")),
        cpus=min(quotas, default=None),
        cpuset=min(sets, default=None),
    )


def _limiting(folders: list[dict[str, str]]) -> dict[str, str]:
    """The cgroup whose own limit is the tightest: what is used there counts, not this process's share.

    The nearest one that tells its usage, where no limit is set (or only one above all that may be read).
    """
    usage = [files for files in folders if "memory.current" in files or "memory.usage_in_bytes" in files]
    own = [
        (min(limits), position)
        for position, files in enumerate(usage)
        if (
            limits := [
                value
                for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
                if (value := _limit(files.get(name))) is not None
            ]
        )
    ]
    return usage[min(own)[1]] if own else next(iter(usage), {})


def _limit(raw: str | None) -> int | None:
    """A cgroup number, or None for `max`, the v1 way of saying it, and nonsense."""
    if raw is None or not re.fullmatch(r"\d{1,20}", raw) or int(raw) >= _V1_UNLIMITED:
        return None
    return int(raw)


def _quota(files: Mapping[str, str]) -> float | None:
    """CPU quota in cores, from `cpu.max` (v2) or the cfs pair (v1); None when there is none."""
    match = re.fullmatch(r"(\d{1,15}) (\d{1,15})", files.get("cpu.max", ""))
    v1 = (files.get("cpu.cfs_quota_us"), files.get("cpu.cfs_period_us"))
    quota, period = match.groups() if match else v1
    quota_us, period_us = _limit(quota), _limit(period)
    return quota_us / period_us if quota_us and period_us else None


def cpu_list_size(raw: str | None) -> int | None:
    """How many CPUs a kernel list names: `0-63,128-191` is 128."""
    if not raw or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", raw.strip()):
        return None
    count = 0
    for part in raw.strip().split(","):
        low, _, high = part.partition("-")
        count += int(high or low) - int(low) + 1
    return count if count > 0 else None


def parse_upgrades(sections: Mapping[str, Section]) -> UpgradeFacts:
    """Automatic upgrades and the driver's packages (Debian family; timers of dnf-automatic as well)."""
    section = get_section(sections, "upgrades")
    if not section.present or section.skipped or section.timed_out:
        return UpgradeFacts(reasons={"*": section.why})
    packages, held = [], []
    periodic: list[bool] = []
    unattended_there = blacklisted = timer = False
    for line in section.text.splitlines():
        key, _, value = line.partition("=")
        if key == "package" and len(value.split()) >= 2:
            want, name = value.split()[:2]
            packages.append(name)
            if want == "hold":
                held.append(name)
        elif key == "periodic" and "Unattended-Upgrade" in value:
            periodic.append(bool(version_key(value) and version_key(value)[-1] > 0))
        elif key == "blacklist":
            blacklisted = True
        elif key == "unattended":
            unattended_there = True
        elif key.startswith("timer.dnf") and value.strip() == "enabled":
            timer = True
    return UpgradeFacts(
        unattended=(unattended_there and periodic[-1]) if periodic else timer,
        packages=tuple(packages),
        held=tuple(held),
        blacklisted=blacklisted,
    )
