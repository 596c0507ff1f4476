from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from composed_hosts import place

from tasks import checks
from tasks.checks import DiskNeed, Needs, build, disk, run_checks
from tasks.checks import host as host_checks
from tasks.checks.table import verdict
from tasks.facts import HostFacts, parse_probe
from tasks.facts.cuda import DockerFacts
from tasks.facts.disk import UNCOUNTED, parse_disk
from tasks.facts.net import Listener, NetFacts, Owner
from tasks.facts.text import split_sections
from tasks.facts.tools import CondaFacts, EnvFacts, PythonFacts, Tool, ToolFacts
from tasks.findings import Finding

GIB = 1024**3
MakeHost = Callable[..., HostFacts]
MakeNeeds = Callable[..., Needs]


def test_a_healthy_host_passes_every_check(healthy: HostFacts, needs: MakeNeeds, by_id: Any) -> None:
    found = by_id(run_checks(needs(), healthy))
    assert {id for id, finding in found.items() if finding.status in ("fail", "warn")} == set()
    assert {"host.os", "host.memory", "host.ports", "disk.space", "disk.inodes", "python.conda"} <= set(found)


def test_an_unread_host_is_skipped_everywhere_and_never_ok(needs: MakeNeeds) -> None:
    statuses = {finding.id: finding.status for finding in run_checks(needs(), HostFacts())}
    del statuses["recipe.pairing"]  # about the recipe alone
    assert statuses.pop("host.probe") == "fail"
    assert set(statuses.values()) == {"skipped"}


def test_an_answer_that_is_not_whole_fails_and_an_odd_part_of_it_warns(healthy: HostFacts) -> None:
    wanted = Needs("/opt/rackwright")
    for cut in (parse_probe(""), replace(healthy, complete=False, reasons={"*": "the probe was cut off"})):
        assert [f.status for f in host_checks.probe(wanted, cut)] == ["fail"]
        assert verdict(run_checks(wanted, cut)) == "fail"
    unknown = parse_probe("@@rw:x.state\n@@rc:124\n@@rw:end\n1\n@@rc:0\n")
    assert unknown.complete
    (finding,) = host_checks.probe(wanted, unknown)
    assert (finding.status, finding.observed) == ("fail", "state: no answer within the deadline")
    odd = replace(healthy, reasons={"gpu": "the answer could not be read (ValueError: x)"})
    assert [f.status for f in host_checks.probe(wanted, odd)] == ["warn"]
    assert host_checks.probe(wanted, healthy) == []


def test_every_failure_says_how_to_mend_it_and_what_was_wanted(needs: MakeNeeds, host: MakeHost) -> None:
    bad = host(
        system={"sysname": "FreeBSD", "libc_version": "2.17", "clock_skew_s": -90000.0, "nofile_hard": 256,
                "sudo": "password", "uid": 1000, "systemd": False},
        cpu={"flags": frozenset({"sse2"})},
        memory={"available": GIB},
        cgroup={"memory_max": 2 * GIB},
        net=NetFacts(listeners=(Listener(8000, "0.0.0.0", 7),)),
        tools=ToolFacts(found={"tar": Tool("/usr/bin/tar")}),
        disk=[place("/opt/rackwright", free_bytes=GIB, free_inodes=10, writable=False),
              place("/dev/shm", mount="/dev/shm", total_bytes=64 * 1024**2, free_bytes=64 * 1024**2)],
    )  # fmt: skip
    findings = run_checks(needs(needs_root=True, supervisor="systemd", shm_bytes=GIB), bad)
    failed = [finding for finding in findings if finding.status == "fail"]
    assert len(failed) == 16
    for finding in failed:
        assert finding.fix and finding.observed and finding.expected, finding


def test_a_check_that_breaks_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, healthy: HostFacts, needs: MakeNeeds
) -> None:
    def broken(needs: Needs, host: HostFacts) -> Finding:
        raise KeyError("oops")

    monkeypatch.setitem(checks.CHECKS, "host.os", broken)
    found = {finding.id: finding for finding in run_checks(needs(), healthy)}
    assert found["host.os"].status == "skipped"
    assert "KeyError" in found["host.os"].summary
    assert found["host.kernel"].status == "ok"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"libc_version": "2.28"}, "ok"),
        ({"libc_version": "2.17"}, "fail"),
        ({"libc": "musl", "libc_version": "1.2.4"}, "fail"),
        ({"libc_version": None}, "skipped"),
    ],
)
def test_glibc_is_held_against_the_wheels_floor(
    changes: dict[str, Any], status: str, host: MakeHost, needs: MakeNeeds
) -> None:
    assert host_checks.glibc(needs(), host(system=changes)).status == status


def test_an_image_brings_its_own_libc_python_and_compiler(host: MakeHost, needs: MakeNeeds) -> None:
    musl = host(system={"libc": "musl"}, tools=ToolFacts())
    wanted = needs(route="docker")
    assert {c(wanted, musl).status for c in (host_checks.glibc, build.conda, build.tools)} == {"skipped"}


def test_arm_is_refused_where_the_lock_is_for_x86(host: MakeHost, needs: MakeNeeds) -> None:
    assert host_checks.os_release(needs(), host(system={"machine": "aarch64"})).status == "fail"
    assert (
        host_checks.os_release(needs(machine=("aarch64",)), host(system={"machine": "aarch64"})).status
        == "ok"
    )


def test_an_old_kernel_is_a_warning(host: MakeHost, needs: MakeNeeds) -> None:
    assert host_checks.kernel(needs(), host(system={"kernel": "3.10.0-1160.el7"})).status == "warn"


def test_the_missing_instruction_set_is_named(host: MakeHost, needs: MakeNeeds) -> None:
    finding = host_checks.cpu(needs(), host(cpu={"flags": frozenset({"sse2"})}))
    assert (finding.status, finding.summary) == ("fail", "the CPU has no AVX2")


def test_a_library_that_the_engine_is_linked_against_is_named_with_its_package(
    host: MakeHost, needs: MakeNeeds
) -> None:
    wanted = needs(libraries=("libnuma.so.1",))
    missing = host_checks.libraries(wanted, host(tools={"libraries": {"libnuma.so.1": ""}}))
    assert isinstance(missing, Finding)
    assert (missing.status, missing.fix) == ("fail", "apt-get install -y libnuma1")
    path = "/lib/x86_64-linux-gnu/libnuma.so.1"
    there = host_checks.libraries(wanted, host(tools={"libraries": {"libnuma.so.1": path}}))
    assert isinstance(there, Finding) and (there.status, there.observed) == ("ok", path)
    unknown = host_checks.libraries(wanted, host(tools={"libraries": {}}))
    assert isinstance(unknown, Finding) and unknown.status == "skipped"
    assert host_checks.libraries(needs(libraries=()), host()) == []


def test_the_container_limit_counts_and_not_what_free_shows(host: MakeHost, needs: MakeNeeds) -> None:
    rented = host(
        memory={"total": 1007 * GIB, "available": 900 * GIB},
        cgroup={
            "version": 1,
            "memory_max": 8 * GIB,
            "memory_current": 4 * GIB,
            "memory_inactive": 0,
            "cpus": 48.0,
        },
        cpu={"cpus": 192},
    )
    assert host_checks.memory(needs(), rented).status == "ok"
    finding = host_checks.cgroup_limits(needs(), rented)
    assert finding.status == "fail"
    assert "4.0 GiB more" in finding.summary
    assert finding.observed == "memory 8.0 GiB and 48 cores (cgroup v1; the machine has 1007 GiB, 192 cores)"


def test_page_cache_in_the_container_is_room(host: MakeHost, needs: MakeNeeds) -> None:
    cached = host(cgroup={"memory_max": 8 * GIB, "memory_current": 7 * GIB, "memory_inactive": 6 * GIB})
    assert host_checks.cgroup_limits(needs(), cached).status == "ok"


@pytest.mark.parametrize(
    ("skew", "status"), [(3.0, "ok"), (-600.0, "warn"), (-86400.0, "fail"), (None, "skipped")]
)
def test_the_clock_is_compared_with_the_controllers(
    skew: float | None, status: str, host: MakeHost, needs: MakeNeeds
) -> None:
    assert host_checks.clock(needs(), host(system={"clock_skew_s": skew})).status == status


def test_a_wrong_clock_only_warns_where_nothing_is_downloaded(host: MakeHost, needs: MakeNeeds) -> None:
    assert host_checks.clock(needs(offline=True), host(system={"clock_skew_s": -86400.0})).status == "warn"


def test_no_systemd_is_fine_unless_it_is_asked_for(host: MakeHost, needs: MakeNeeds) -> None:
    bare = host(system={"systemd": False, "pid1": "bash"})
    finding = host_checks.init(needs(), bare)
    assert (finding.status, finding.observed) == ("ok", "no systemd; process 1 is bash")
    assert host_checks.init(needs(supervisor="systemd"), bare).status == "fail"
    no_user = host(system={"systemd_user": False, "user": "ubuntu"})
    finding = host_checks.init(needs(supervisor="systemd-user"), no_user)
    assert (finding.status, finding.fix) == ("fail", "sudo loginctl enable-linger ubuntu")


def test_root_is_only_asked_of_hosts_that_need_it(host: MakeHost, needs: MakeNeeds) -> None:
    user = host(system={"uid": 1000, "user": "me", "sudo": "password"})
    assert host_checks.privilege(needs(), user).status == "ok"
    assert host_checks.privilege(needs(needs_root=True), user).status == "fail"
    sudoer = host(system={"uid": 1000, "user": "me", "sudo": "passwordless"})
    finding = host_checks.privilege(needs(needs_root=True), sudoer)
    assert finding.status == "fail" and "_sudo" in (finding.fix or "")
    assert host_checks.privilege(needs(needs_root=True), host()).status == "ok"


def test_few_open_files_warn_where_no_unit_can_raise_them(host: MakeHost, needs: MakeNeeds) -> None:
    assert host_checks.ulimits(needs(), host(system={"nofile_hard": 20000})).status == "ok"
    container = host(system={"nofile_hard": 20000, "systemd": False})
    assert host_checks.ulimits(needs(), container).status == "warn"
    assert host_checks.ulimits(needs(nofile=8192), container).status == "ok"
    rdma = host(system={"systemd": False})
    assert host_checks.ulimits(needs(rdma=True), rdma).status == "warn"


def test_a_stranger_on_the_port_is_named_and_our_own_service_is_not_a_stranger(
    host: MakeHost, needs: MakeNeeds
) -> None:
    listener = Listener(8000, "0.0.0.0", 1000)
    stranger = Owner(77, "nginx", "/usr/sbin/nginx", "/", "nginx:")
    taken = host(net=NetFacts(listeners=(listener,), owners={8000: (stranger,)}))
    finding = host_checks.ports(needs(), taken)
    assert (finding.status, finding.observed) == ("fail", "8000 on 0.0.0.0 by nginx (pid 77)")
    hidden = host_checks.ports(needs(), host(net=NetFacts(listeners=(listener,))))
    assert hidden.status == "fail" and "uid 1000 that is not visible" in (hidden.observed or "")
    ours = Owner(
        78, "vllm", "/usr/bin/python3.12", "/", "/opt/rackwright/env/bin/python /opt/rackwright/env/bin/vllm"
    )
    running = host(net=NetFacts(listeners=(listener,), owners={8000: (ours,)}))
    assert host_checks.ports(needs(), running).status == "fail", "no service of ours started it"
    assert host_checks.ports(needs(own_pids=(78,)), running).status == "ok"
    child = host(net=NetFacts(listeners=(listener,), owners={8000: (replace(ours, pid=90, kin=(78, 2)),)}))
    assert host_checks.ports(needs(own_pids=(78,)), child).status == "ok"
    both = host(net=NetFacts(listeners=(listener,), owners={8000: (ours, stranger)}))
    assert host_checks.ports(needs(own_pids=(78,)), both).observed == "8000 on 0.0.0.0 by nginx (pid 77)"


@pytest.mark.parametrize(
    ("own_ports", "status"),
    [
        (((8000, 1000),), "ok"),
        (((8000, None),), "ok"),
        (((8001, 1000),), "fail"),
        (((8000, 999),), "fail"),
        ((), "fail"),
    ],
)
def test_a_hidden_owner_is_our_service_only_when_that_is_installed_for_this_port_and_user(
    host: MakeHost, needs: MakeNeeds, own_ports: tuple[tuple[int, int | None], ...], status: str
) -> None:
    net = NetFacts(listeners=(Listener(8000, "0.0.0.0", 1000),), users={1000: "lee"})
    finding = host_checks.ports(needs(own_pids=(99,), own_ports=own_ports), host(net=net))
    assert finding.status == status
    assert status == "ok" or "a process of lee (uid 1000)" in str(finding.observed)


def test_a_port_that_only_root_may_listen_on_is_refused_with_the_cure(
    host: MakeHost, needs: MakeNeeds
) -> None:
    usual, lowered = (NetFacts(listeners=(), unprivileged=lowest) for lowest in (None, 80))
    finding = host_checks.ports(needs(ports=(80,)), host(net=usual))
    assert finding.status == "fail"
    assert "below 1024" in str(finding.observed) and "another `port`" in str(finding.fix)
    assert host_checks.ports(needs(ports=(80,)), host(net=lowered)).status == "ok"
    assert host_checks.ports(needs(ports=(80,), low_ports=True), host(net=usual)).status == "ok"


def test_what_shares_one_disk_is_added_up(host: MakeHost, needs: MakeNeeds) -> None:
    wanted = needs(
        disk=(
            DiskNeed("/opt/rackwright", 120 * GIB, 100, "env"),
            DiskNeed("/models", 120 * GIB, 50, "model", "model"),
        )
    )
    one_disk = host(disk=[place("/models")])
    finding = disk.space(wanted, one_disk)
    assert finding.status == "fail"
    assert finding.observed == "/ (env, model): 200 GiB free, 240 GiB needed, 40.0 GiB short"
    two_disks = host(disk=[place("/models", filesystem="/dev/vdb", mount="/models")])
    assert disk.space(wanted, two_disks).status == "ok"


def test_an_image_goes_where_dockers_folder_really_is(host: MakeHost, needs: MakeNeeds) -> None:
    wanted = needs(disk=(DiskNeed("/var/lib/docker", 30 * GIB, 0, "image"),))
    moved = host(
        disk=[place("/data/docker", filesystem="/dev/vdb", mount="/data", free_bytes=10 * GIB)],
        docker=DockerFacts("/usr/bin/docker", "27.3.1", root="/data/docker"),
    )
    finding = disk.space(wanted, moved)
    assert finding.status == "fail" and "/data (image): 10.0 GiB free" in (finding.observed or "")


def test_next_to_nothing_left_over_is_a_warning(host: MakeHost, needs: MakeNeeds) -> None:
    assert disk.space(needs(), host(disk=[place("/opt/rackwright", free_bytes=9 * GIB)])).status == "warn"


@pytest.mark.parametrize(
    ("root", "data", "together"),
    [
        ("overlay / overlay", "/dev/sda1 /data ext4", True),
        ("tank/root / zfs", "tank/models /data zfs", True),
        ("tank/root / zfs", "pool/models /data zfs", False),
        ("/dev/sdb1 / ext4", "/dev/sda1 /data ext4", False),
    ],
)
def test_a_containers_root_shares_the_disk_of_a_mount_of_the_same_size(
    root: str, data: str, together: bool, healthy: HostFacts, needs: MakeNeeds
) -> None:
    def section(number: int, mount: str, path: str, free: int) -> str:
        source, point, _ = mount.split()
        return (
            f"@@rw:disk.{number}\npath={path}\nat={point}\nexists=no\ndirectory=yes\nwritable=yes\n"
            f"device={number}\nspace={source} 500000000 300000000 {free} 60% {point}\n@@rc:0\n"
        )

    printed = f"@@rw:mounts\n{root} rw 0 0\n{data} rw 0 0\n@@rc:0\n"
    printed += section(0, root, "/opt/rackwright", 200000000) + section(1, data, "/data/models", 199990000)
    read = replace(healthy, disk=parse_disk(split_sections(printed)))
    wanted = needs(
        disk=(
            DiskNeed("/opt/rackwright", 60 * GIB, 1000, "engine", "env"),
            DiskNeed("/data/models", 150 * GIB, 100, "weights", "model"),
        )
    )
    assert disk.space(wanted, read).status == ("fail" if together else "ok")


def test_on_autodl_the_fix_names_its_disks(host: MakeHost, needs: MakeNeeds) -> None:
    small = host(system={"autodl": True}, disk=[place("/opt/rackwright", free_bytes=GIB)])
    assert "/root/autodl-tmp/rackwright" in (disk.space(needs(), small).fix or "")


def test_inodes_can_run_out_while_there_is_space(host: MakeHost, needs: MakeNeeds) -> None:
    full = host(disk=[place("/opt/rackwright", free_inodes=2)])
    assert disk.space(needs(), full).status == "ok"
    finding = disk.inodes(needs(), full)
    assert (finding.status, finding.observed) == ("fail", "/ (env): 2 free, 120 000 needed")
    uncounted = host(disk=[place("/opt/rackwright", free_inodes=None, reasons={"inodes": UNCOUNTED})])
    assert disk.inodes(needs(), uncounted).status == "skipped"
    both = needs(disk=(*needs().disk, DiskNeed("/models", GIB, 50, "model", "model")))
    other: dict[str, Any] = {"filesystem": "/dev/vdb", "mount": "/models", "free_inodes": None}
    assert (
        disk.inodes(both, host(disk=[place("/models", **other, reasons={"inodes": UNCOUNTED})])).status
        == "ok"
    )
    unread = disk.inodes(both, host(disk=[place("/models", **other, reasons={"inodes": "odd"})]))
    assert (unread.status, "odd" in unread.summary) == ("skipped", True)


def test_a_file_system_that_does_not_answer_blocks(host: MakeHost, needs: MakeNeeds) -> None:
    printed = "@@rw:mounts\nnas:/m /models nfs4 rw,hard 0 0\n@@rc:0\n@@rw:disk.0\npath=/models\n@@rc:124\n"
    late = parse_disk(split_sections(printed)).at("/models")
    wanted = needs(disk=(*needs().disk, DiskNeed("/models", 160 * GIB, 100, "weights", "model")))
    found = {f.id: f for f in run_checks(wanted, host(disk=[late]))}
    assert found["disk.writable"].status == "fail"
    assert "/models: the file system did not answer" in (found["disk.writable"].observed or "")
    assert (found["disk.inodes"].status, found["disk.space"].status) == ("skipped", "skipped")
    assert verdict(list(found.values())) == "fail"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"writable": False}, "may not be written by me"),
        ({"read_only": True}, "read-only"),
        ({"no_exec": True}, "noexec"),
        ({"exists": True, "directory": False}, "is a file, not a folder"),
        ({"directory": False, "at": "/opt"}, "/opt is a file, so"),
    ],
)
def test_paths_that_cannot_be_used_fail_with_the_cause(
    changes: dict[str, Any], words: str, host: MakeHost, needs: MakeNeeds
) -> None:
    bad = host(system={"user": "me", "sudo": "none"}, disk=[place("/opt/rackwright", **changes)])
    finding = disk.writable(needs(), bad)
    assert finding.status == "fail"
    assert words in (finding.observed or "")


def test_sudo_without_a_password_must_be_asked_for(host: MakeHost, needs: MakeNeeds) -> None:
    sudoer = host(system={"sudo": "passwordless"}, disk=[place("/opt/rackwright", writable=False)])
    finding = disk.writable(needs(), sudoer)
    assert finding.status == "fail" and '"_sudo": True' in (finding.fix or "")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("fuse.fuse-overlayfs", "ok"),
        ("fuse.mergerfs", "ok"),
        ("fuse.sshfs", "warn"),
        ("fuse.juicefs", "warn"),
    ],
)
def test_fuse_is_a_network_only_where_it_leads_to_one(
    kind: str, status: str, host: MakeHost, needs: MakeNeeds
) -> None:
    assert disk.kind(needs(), host(disk=[place("/opt/rackwright", type=kind)])).status == status


def test_network_and_memory_disks_warn_with_their_cost(host: MakeHost, needs: MakeNeeds) -> None:
    wanted = needs(disk=(DiskNeed("/fs/models", GIB, 50, "model", "model"),))
    shared = host(disk=[place("/fs/models", type="nfs4")])
    finding = disk.kind(wanted, shared)
    assert finding.status == "warn" and "reads every shard over the network" in (finding.observed or "")
    ram = host(disk=[place("/fs/models", type="tmpfs")], memory={"available": 6 * GIB + GIB // 2})
    assert "costs RAM" in (disk.kind(wanted, ram).observed or "")
    assert host_checks.memory(wanted, ram).status == "fail"


def test_dockers_64_mib_of_shared_memory_is_recognised(host: MakeHost, needs: MakeNeeds) -> None:
    small = place("/dev/shm", mount="/dev/shm", total_bytes=64 * 1024**2, free_bytes=64 * 1024**2)
    finding = disk.shm(needs(shm_bytes=16 * GIB), host(disk=[small]))
    assert (finding.status, finding.summary) == ("fail", "/dev/shm is Docker's default of 64 MiB")
    assert disk.shm(needs(shm_bytes=16 * GIB), host()).status == "ok"
    on_disk = place("/dev/shm", mount="/")
    assert disk.shm(needs(), host(disk=[on_disk])).status == "fail"


def test_conda_or_a_fitting_python_makes_the_environment(host: MakeHost, needs: MakeNeeds) -> None:
    assert "a venv is made" in build.conda(needs(), host()).summary
    with_conda = host(tools={"conda": CondaFacts("/opt/conda/bin/conda", "/opt/conda", "24.5.0")})
    finding = build.conda(needs(), with_conda)
    assert (finding.status, finding.observed) == ("ok", "conda 24.5.0 at /opt/conda/bin/conda")
    no_venv = host(tools={"pythons": (PythonFacts("/usr/bin/python3", "3.12.3", "/usr", False, True, True),)})
    finding = build.conda(needs(env_kind="venv"), no_venv)
    assert (finding.status, finding.fix) == ("fail", "apt-get install -y python3.12-venv")


def test_any_python_can_bring_in_miniforge_where_nothing_fits(host: MakeHost, needs: MakeNeeds) -> None:
    for wanted in (needs(python="3.11"), needs(env_kind="conda")):
        finding = build.conda(wanted, host())
        assert (finding.status, "Miniforge" in finding.summary) == ("ok", True)
    old = host(tools={"pythons": (PythonFacts("/usr/bin/python3", "3.6.9", "/usr", True, True, True),)})
    assert build.conda(needs(), old).status == "fail"
    none = host(tools={"pythons": ()})
    finding = build.conda(needs(), none)
    assert (finding.status, finding.fix) == ("fail", "apt-get install -y python3")
    assert build.conda(needs(python="3.11", env_kind="venv"), host()).status == "fail"


def test_the_interpreter_that_the_site_names_is_the_one_that_counts(host: MakeHost, needs: MakeNeeds) -> None:
    named = needs(python_path="/opt/py/bin/python3")
    assert build.conda(named, host()).status == "fail"
    there = (PythonFacts("/opt/py/bin/python3", "3.12.1", "/opt/py", True, True, True),)
    finding = build.conda(named, host(tools={"pythons": there}))
    assert (finding.status, finding.observed) == ("ok", "/opt/py/bin/python3 3.12.1")


def test_the_missing_compiler_is_named_with_its_package(host: MakeHost, needs: MakeNeeds) -> None:
    bare = host(tools={"found": {"git": Tool("/usr/bin/git", "2.39")}})
    finding = build.tools(needs(), bare)
    assert (finding.status, finding.fix) == ("fail", "apt-get install -y gcc")
    finding = build.tools(needs(route="source"), bare)
    assert finding.fix == "apt-get install -y gcc g++ make"


def test_cmake_and_ninja_are_the_environments_and_not_asked_of_the_host(
    host: MakeHost, needs: MakeNeeds
) -> None:
    tools = {name: Tool(f"/usr/bin/{name}", "12.2") for name in ("gcc", "g++", "git", "make")}
    bare = host(tools={"found": tools})
    assert build.tools(needs(route="source", env_kind="conda"), bare).status == "ok"


def test_a_venv_from_a_python_without_headers_cannot_compile(host: MakeHost, needs: MakeNeeds) -> None:
    bare = host(tools={"pythons": (PythonFacts("/usr/bin/python3", "3.12.3", "/usr", True, True, False),)})
    assert build.tools(needs(route="source"), bare).fix == "apt-get install -y python3.12-dev"
    assert build.tools(needs(), bare).status == "ok"


def test_what_only_another_mode_compiles_with_is_a_warning(host: MakeHost, needs: MakeNeeds) -> None:
    bare = host(
        tools={
            "found": {"gcc": Tool("/usr/bin/gcc", "12.2")},
            "pythons": (PythonFacts("/usr/bin/python3", "3.12.3", "/usr", True, True, False),),
        }
    )
    finding = build.tools(needs(compiles_later=True, gpu=None), bare)
    assert (finding.status, finding.fix) == ("warn", "apt-get install -y g++ python3.12-dev")
    assert build.tools(needs(compiles_later=False, gpu=None), bare).status == "ok"


def test_build_jobs_are_held_against_the_containers_memory(host: MakeHost, needs: MakeNeeds) -> None:
    rented = host(cgroup={"memory_max": 60 * GIB, "memory_current": 0, "cpus": 48.0})
    finding = build.memory_per_job(needs(route="source"), rented)
    assert isinstance(finding, Finding)
    assert (finding.status, finding.fix) == ("warn", "MAX_JOBS=10 for the build")
    fewer = build.memory_per_job(needs(route="source", build_jobs=8), rented)
    assert isinstance(fewer, Finding) and fewer.status == "ok"
    assert build.memory_per_job(needs(), rented) == []


def test_reserved_huge_pages_and_heavy_swapping_are_said_only_when_they_matter(
    host: MakeHost, needs: MakeNeeds
) -> None:
    assert host_checks.hugepages(needs(), host(memory={"huge_pages": 10})) == []
    (finding,) = host_checks.hugepages(needs(), host(memory={"huge_pages": 65536}))
    assert finding.status == "warn"
    assert host_checks.swap(needs(), host(memory={"swap_used": GIB})) == []
    (finding,) = host_checks.swap(needs(), host(memory={"swap_used": 64 * GIB}))
    assert finding.observed == "64.0 GiB of swap in use"


def test_an_environment_with_two_cuda_majors_is_told(host: MakeHost, needs: MakeNeeds) -> None:
    mixed = host(tools={"env": EnvFacts("/opt/rackwright/env/bin/python", "3.12.3", {}, (12, 13))})
    (finding,) = build.one_cuda_major(needs(), mixed)
    assert finding.reference == "vLLM issue #48602"
    assert build.one_cuda_major(needs(), host()) == []
