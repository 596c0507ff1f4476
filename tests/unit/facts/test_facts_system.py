from __future__ import annotations

from collections.abc import Callable

from tasks.facts.system import (
    cpu_list_size,
    parse_cgroup,
    parse_cpu,
    parse_memory,
    parse_system,
    parse_upgrades,
)
from tasks.facts.text import split_sections

GIB = 1024**3


def section(name: str, text: str) -> dict[str, object]:
    return split_sections(f"@@rw:{name}\n{text}\n@@rc:0\n")  # type: ignore[return-value]


def test_cgroup_v1_limits_of_a_rented_container(recorded: Callable[[str], str]) -> None:
    facts = parse_cgroup(section("cgroup", recorded("public/C-rented-container/cgroup-v1-limits.txt")))
    assert (facts.version, facts.memory_max, facts.cpus, facts.cpuset) == (1, 480 * GIB, 48.0, 192)
    assert facts.memory_used == 20 * GIB


def test_cgroup_v2_limits_of_a_rented_container(recorded: Callable[[str], str]) -> None:
    facts = parse_cgroup(section("cgroup", recorded("public/C-rented-container/cgroup-v2-limits.txt")))
    assert (facts.version, facts.memory_max, facts.cpus, facts.cpuset) == (2, 512 * GIB, 64.0, 128)


def test_the_tightest_limit_of_all_parents_counts() -> None:
    cg = "/sys/fs/cgroup"
    text = f"{cg}/a/b/memory.max:max\n{cg}/a/memory.max:1073741824\n{cg}/memory.max:max"
    assert parse_cgroup(section("cgroup", text)).memory_max == GIB


def test_the_v1_way_of_saying_no_limit_is_no_limit() -> None:
    text = (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes:9223372036854771712\n"
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us:-1\n/sys/fs/cgroup/cpu/cpu.cfs_period_us:100000"
    )
    facts = parse_cgroup(section("cgroup", text))
    assert (facts.version, facts.memory_max, facts.cpus) == (1, None, None)


def test_inactive_page_cache_is_not_counted_as_used() -> None:
    text = (
        "/sys/fs/cgroup/memory.max:10000000000\n/sys/fs/cgroup/memory.current:9000000000\n"
        "/sys/fs/cgroup/memory.inactive_own:8000000000"
    )
    assert parse_cgroup(section("cgroup", text)).memory_used == 1_000_000_000


def test_usage_is_that_of_the_group_with_the_limit() -> None:
    text = (
        "/sys/fs/cgroup/a/b/memory.max:max\n/sys/fs/cgroup/a/b/memory.current:1000\n"
        "/sys/fs/cgroup/a/memory.max:9000\n/sys/fs/cgroup/a/memory.current:8000\n"
    )
    facts = parse_cgroup(section("cgroup", text))
    assert (facts.memory_max, facts.memory_used) == (9000, 8000)


def test_no_cgroup_files_is_said_and_not_guessed() -> None:
    facts = parse_cgroup({})
    assert facts.version is None
    assert facts.reasons["*"] == "the probe did not get here"


def test_cpu_lists_are_counted() -> None:
    assert cpu_list_size("0-63,128-191") == 128
    assert cpu_list_size("5") == 1
    assert cpu_list_size("") is None
    assert cpu_list_size("0-x") is None


def test_meminfo_is_bytes_with_a_reason_for_what_is_missing() -> None:
    facts = parse_memory(section("memory", "MemTotal=1000\nSwapTotal=10\nSwapFree=4"))
    assert (facts.total, facts.available, facts.swap_used) == (1_024_000, None, 6144)
    assert facts.reasons == {"MemAvailable": "/proc/meminfo has no MemAvailable"}


def test_flags_of_arm_and_x86_are_a_set() -> None:
    assert parse_cpu(section("cpu", "cpus=2\nflags=fpu avx2 sse4_2")).flags == {"fpu", "avx2", "sse4_2"}
    assert parse_cpu(section("cpu", "cpus=2")).flags is None


def test_system_of_a_container_without_systemd() -> None:
    facts = parse_system(
        section(
            "system",
            'sysname=Linux\nkernel=6.8.0\nmachine=x86_64\nuid=0\nuser=root\nsudo=root\npid1=bash\nsystemd=no\n'
            'libc=glibc 2.35\nos.ID=ubuntu\nos.VERSION_ID="22.04"\nos.PRETTY_NAME="Ubuntu 22.04.4 LTS"\n'
            "container=docker\nautodl=yes\nepoch=1000\nnofile_soft=1024\nnofile_hard=unlimited\ncmdline_read=yes\n"
            "cmdline=iommu=pt",
        ),
        received_at=1400.0,
    )  # fmt: skip
    assert (facts.systemd, facts.pid1, facts.root, facts.autodl) == (False, "bash", True, True)
    assert facts.os_name == "Ubuntu 22.04.4 LTS"
    assert (facts.libc, facts.libc_version) == ("glibc", "2.35")
    assert facts.clock_skew_s == -400
    assert (facts.nofile_soft, facts.nofile_hard) == (1024, 1 << 60)
    assert facts.cmdline == "iommu=pt"


def test_the_clock_is_compared_as_it_was_at_the_end_of_the_probe() -> None:
    sections = split_sections("@@rw:system\nepoch=1000\n@@rc:0\n@@rw:end\n1030\n@@rc:0\n")
    assert parse_system(sections, received_at=1030.5).clock_skew_s == -0.5


def test_ldd_lines_of_glibc_and_musl_are_told_apart() -> None:
    ubuntu = parse_system(section("system", "libc=ldd (Ubuntu GLIBC 2.39-0ubuntu8.9) 2.39"))
    alpine = parse_system(section("system", "libc=musl libc (x86_64) Version 1.2.4"))
    assert (ubuntu.libc, ubuntu.libc_version) == ("glibc", "2.39")
    assert (alpine.libc, alpine.libc_version) == ("musl", "1.2.4")


def test_missing_fields_carry_the_reason() -> None:
    facts = parse_system(split_sections("@@rw:system\n@@rc:124\n"))
    assert facts.kernel is None
    assert facts.reasons["kernel"] == "no answer within the deadline"


def test_held_driver_packages_and_unattended_upgrades_are_seen() -> None:
    facts = parse_upgrades(
        section(
            "upgrades",
            'periodic=APT::Periodic::Update-Package-Lists "1";\n'
            'periodic=APT::Periodic::Unattended-Upgrade "1";\n'
            "unattended=yes\npackage=hold nvidia-driver-580-open 580.95.05-0ubuntu1\n"
            "package=install libnvidia-compute-580 580.95.05-0ubuntu1",
        )
    )
    assert facts.unattended is True
    assert facts.packages == ("nvidia-driver-580-open", "libnvidia-compute-580")
    assert facts.held == ("nvidia-driver-580-open",)
