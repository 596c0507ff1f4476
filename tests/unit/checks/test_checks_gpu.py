from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from composed_hosts import HEALTHY, gpu_facts, gpu_host
from replay_profiles import p2p_matrix, profile, recorded

from tasks.checks import GPU_CHECKS, GpuNeed, Needs, cuda, driver, gpu, links, run_checks
from tasks.facts import HostFacts
from tasks.facts.cuda import CudaFacts, DockerFacts, Toolkit
from tasks.facts.gpu import GpuFacts, GpuProcess, PciGpu, Smi, parse_gpu
from tasks.facts.system import UpgradeFacts
from tasks.facts.text import split_sections
from tasks.findings import Finding

MakeNeeds = Callable[..., Needs]

RTX = GpuNeed(("RTX PRO 6000 Blackwell",), 4, "12.0", 97000)
H20 = GpuNeed(("H20",), 8, "9.0", 97000)
H200 = GpuNeed(("H200",), 2, "9.0", 140000)
CUDA13: dict[str, Any] = {"driver": "580", "cuda_major": 13, "cuda_toolkit": "13.0"}


@pytest.fixture
def rtx(needs: MakeNeeds) -> Needs:
    return needs(gpu=RTX, **CUDA13)


@pytest.fixture
def h20(needs: MakeNeeds) -> Needs:
    return needs(gpu=H20, **CUDA13)


@pytest.fixture
def h200(needs: MakeNeeds) -> Needs:
    return needs(gpu=H200, **CUDA13)


def with_gpus(host: HostFacts, *changes: dict[str, Any], **common: Any) -> HostFacts:
    """A host whose GPUs have values changed, each its own, or all the same."""
    own = list(changes) + [{}] * (len(host.gpu.gpus) - len(changes))
    gpus = tuple(replace(one, **{**common, **mine}) for one, mine in zip(host.gpu.gpus, own, strict=True))
    return replace(host, gpu=replace(host.gpu, gpus=gpus))


def with_facts(host: HostFacts, **changes: Any) -> HostFacts:
    return replace(host, gpu=replace(host.gpu, **changes))


def with_kernel(host: HostFacts, **changes: Any) -> HostFacts:
    return with_facts(host, kernel=replace(host.gpu.kernel, **changes))


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.id: finding.status for finding in findings}


@pytest.mark.parametrize(("name", "wanted"), [("h200-x2", H200), ("h20-x8", H20)])
def test_good_nvlink_hosts_pass_everything(name: str, wanted: GpuNeed, needs: MakeNeeds) -> None:
    findings = run_checks(needs(gpu=wanted, tensor_parallel=wanted.count, **CUDA13), gpu_host(name))
    assert {f.id: f.summary for f in findings if f.status not in ("ok", "skipped")} == {}
    assert {f.id for f in findings if f.status == "skipped"} <= {"host.glibc"}


def test_a_good_workstation_warns_only_about_its_sockets(rtx: Needs) -> None:
    findings = run_checks(rtx, gpu_host("rtx-pro-6000-x4"))
    assert {f.id for f in findings if f.status not in ("ok", "skipped")} == {"gpu.topology"}


def test_a_recipe_for_another_gpu_fails_for_the_right_reasons_only(rtx: Needs) -> None:
    failed = {f.id for f in run_checks(rtx, gpu_host("h200-x2")) if f.status == "fail"}
    assert failed == {"gpu.count", "gpu.model", "gpu.compute_capability"}


def test_nothing_about_gpus_is_reported_where_none_is_wanted(needs: MakeNeeds) -> None:
    ids = {finding.id for finding in run_checks(needs(), HEALTHY)}
    assert not [id for id in ids if id.split(".")[0] in ("gpu", "driver", "cuda", "docker")]
    assert "host.iommu_acs" not in ids


def test_without_a_driver_the_cause_fails_and_the_rest_is_skipped(rtx: Needs) -> None:
    facts = parse_gpu(split_sections("@@rw:gpu.smi\n@@rc:127\n@@rw:gpu.log\nsource=denied\n@@rc:0\n"))
    found = statuses(run_checks(rtx, replace(HEALTHY, gpu=facts)))
    asked = {id: status for id, status in found.items() if id in GPU_CHECKS and not id.startswith("cuda")}
    assert asked.pop("gpu.driver_communication") == "fail"
    assert asked.pop("gpu.present") == "fail"
    assert asked.pop("driver.auto_upgrade") == "ok"
    assert set(asked.values()) == {"skipped"}


@pytest.mark.parametrize(
    ("text", "rc", "words"),
    [
        ("public/D-failures/nvml-mismatch-570.txt", 18, "the driver was upgraded underneath"),
        ("public/D-failures/smi-driver-not-loaded.txt", 9, "kernel module is not loaded"),
        ("public/D-failures/nvml-unknown-error-container.txt", 255, "lost its devices"),
        ("public/D-failures/device-handle-unknown-error.txt", 15, "(0000:20:00.0)"),
    ],
)
def test_each_broken_driver_has_its_own_cause_and_cure(rtx: Needs, text: str, rc: int, words: str) -> None:
    facts = parse_gpu(split_sections(f"@@rw:gpu.smi\n{recorded(text)}\n@@rc:{rc}\n"))
    finding = gpu.driver_communication(rtx, replace(HEALTHY, gpu=facts))
    assert finding.status == "fail" and words in finding.summary
    assert finding.fix and finding.observed and finding.reference


@pytest.mark.parametrize("trouble", ["no_tool", "hang", "no_devices", "permission", "other"])
def test_other_troubles_have_a_cure_too(rtx: Needs, trouble: str) -> None:
    facts = GpuFacts(asked=True, smi=Smi(trouble=trouble, message="it said so"))  # type: ignore[arg-type]
    finding = gpu.driver_communication(rtx, replace(HEALTHY, gpu=facts))
    assert (finding.status, finding.observed) == ("fail", "it said so")
    assert finding.fix


def test_in_a_container_the_cure_is_the_containers(rtx: Needs) -> None:
    facts = GpuFacts(asked=True, smi=Smi(trouble="no_tool", message="none"))
    inside = replace(HEALTHY, gpu=facts, system=replace(HEALTHY.system, container="docker"))
    assert "--gpus all" in (gpu.driver_communication(rtx, inside).fix or "")


def test_a_gpu_on_the_bus_without_a_driver_is_present(rtx: Needs) -> None:
    facts = GpuFacts(
        asked=True, smi=Smi(trouble="no_driver", message="x"), pci=(PciGpu("0000:06:00.0", "0x2bb5"),)
    )
    assert gpu.present(rtx, replace(HEALTHY, gpu=facts)).status == "ok"
    empty = GpuFacts(asked=True, smi=Smi(trouble="no_driver", message="x"), pci=())
    assert gpu.present(rtx, replace(HEALTHY, gpu=empty)).status == "fail"


def test_too_few_gpus_fail_and_a_lost_one_is_noticed_on_the_bus(h20: Needs) -> None:
    host = gpu_host("h20-x8")
    seven = with_facts(host, gpus=host.gpu.gpus[:7])
    finding = gpu.count(h20, seven)
    assert (finding.status, finding.observed) == ("fail", "7 GPUs (8 on the PCI bus)")
    assert "dmesg" in (finding.fix or "")
    assert gpu.count(h20, host).status == "ok"


def test_split_gpus_do_not_count(h20: Needs) -> None:
    host = with_gpus(gpu_host("h20-x8"), {"mig": True})
    assert (gpu.count(h20, host).status, gpu.mig(h20, host).status) == ("fail", "fail")
    assert gpu.mig(h20, host).fix == "nvidia-smi -i 0 -mig 0   (then reset or reboot)"
    assert gpu.mig(h20, gpu_host("h20-x8")).status == "ok"


def test_hidden_devices_are_a_warning(h200: Needs) -> None:
    assert (
        gpu.count(h200, with_kernel(gpu_host("h200-x2"), env={"CUDA_VISIBLE_DEVICES": "0"})).status == "warn"
    )
    assert (
        gpu.count(h200, with_kernel(gpu_host("h200-x2"), env={"CUDA_VISIBLE_DEVICES": "0,1"})).status == "ok"
    )


def out_of_order(only: tuple[str, ...] = ()) -> HostFacts:
    """The workstation with GPU 1 in need of a reset: these fields say so, or all that may."""
    kept = {"index", "name", "uuid", "pci.bus_id", "driver_version"}
    rows = [line.split(", ") for line in profile("rtx-pro-6000-x4").files["query.csv"].splitlines()]
    fields = [name.split(" [")[0] for name in rows[0]]
    rows[2] = [
        "[GPU requires reset]" if (field in only if only else field not in kept) else cell
        for field, cell in zip(fields, rows[2], strict=True)
    ]
    query = "\n".join(", ".join(row) for row in rows)
    return gpu_host("rtx-pro-6000-x4", query=query, smi="NVIDIA-SMI 580", **({} if only else {"xml": ""}))


@pytest.mark.parametrize("only", [(), ("temperature.gpu", "pstate", "power.draw")])
def test_a_gpu_that_requires_a_reset_fails_however_little_says_so(rtx: Needs, only: tuple[str, ...]) -> None:
    finding = gpu.driver_communication(rtx, out_of_order(only))
    assert (finding.status, finding.observed) == ("fail", "GPU 1: GPU requires reset")
    assert "nvidia-smi --gpu-reset -i 1" in (finding.fix or "")
    one = replace(rtx, gpu=replace(RTX, count=1))
    assert gpu.driver_communication(one, out_of_order(only)).status == "warn"


def test_what_one_gpu_does_not_say_is_never_ok(rtx: Needs) -> None:
    found = {finding.id: finding for finding in run_checks(rtx, out_of_order())}
    for id in ("memory", "ecc", "idle", "pcie_link", "power_limit"):
        assert found[f"gpu.{id}"].status == "skipped", id
        assert "GPU 1 (GPU requires reset)" in found[f"gpu.{id}"].summary
    host = gpu_host("rtx-pro-6000-x4")
    unnamed = with_gpus(host, {}, {"name": None, "reasons": {"name": "[Unknown Error]"}})
    assert gpu.model(rtx, unnamed).summary == "no name could be read: GPU 1 (Unknown Error)"
    silent = with_kernel(with_gpus(host, {}, {"persistence": None}, persistence=True), persistenced=False)
    assert gpu.persistence(rtx, silent).status == "skipped"


def test_the_gpus_that_are_judged_are_those_that_the_recipe_lists(h20: Needs) -> None:
    host = gpu_host("h20-x8")
    half = replace(h20, gpu=replace(H20, count=4), env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    full = [{"memory_used": 90000} if index == 5 else {} for index in range(8)]
    assert gpu.idle(half, with_gpus(host, *full)).status == "fail"
    assert gpu.idle(half, with_gpus(host, {"memory_used": 90000})).status == "ok"
    uuids = ",".join((one.uuid or "")[:12] for one in host.gpu.gpus[6:])
    by_uuid = replace(half, env={"CUDA_VISIBLE_DEVICES": uuids})
    assert [one.index for one in gpu.chosen(by_uuid, host.gpu)] == [6, 7]
    assert gpu.count(half, host).status == "ok"
    cut_off = gpu.count(replace(half, env={"CUDA_VISIBLE_DEVICES": "4,5,9,7"}), host)
    assert (cut_off.status, "2 GPUs of this host's 8" in (cut_off.observed or "")) == ("fail", True)
    nothing = replace(half, env={"CUDA_VISIBLE_DEVICES": "9"})
    assert (gpu.count(nothing, host).status, gpu.idle(nothing, host).status) == ("fail", "skipped")


def test_a_recipe_that_lists_its_gpus_does_not_care_what_the_login_hides(h200: Needs) -> None:
    hidden = with_kernel(gpu_host("h200-x2"), env={"CUDA_VISIBLE_DEVICES": "0"})
    assert gpu.count(replace(h200, env={"CUDA_VISIBLE_DEVICES": "0,1"}), hidden).status == "ok"


def test_a_card_for_the_screen_is_told_from_those_that_fit(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    moved = [replace(one, index=one.index + 1) for one in host.gpu.gpus]
    screen = replace(
        host.gpu.gpus[0], index=0, name="NVIDIA T400 4GB", uuid="GPU-t400", bus="00000000:02:00.0"
    )
    host = with_facts(host, gpus=(screen, *moved))
    finding = gpu.model(rtx, host)
    assert finding.fix == 'Set CUDA_VISIBLE_DEVICES = "1,2,3,4" in the recipe\'s [serve.env]: these fit.'
    assert gpu.model(replace(rtx, env={"CUDA_VISIBLE_DEVICES": "1,2,3,4"}), host).status == "ok"


def test_a_bad_gpu_that_is_not_used_only_warns(h20: Needs) -> None:
    bad = [{}] * 3 + [{"mig": True, "ecc_uncorrected": 2}]
    host = with_gpus(gpu_host("h20-x8"), *bad)
    two = replace(h20, gpu=replace(H20, count=2), env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (gpu.ecc(two, host).status, gpu.mig(two, host).status) == ("warn", "warn")
    three = replace(two, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert (gpu.ecc(three, host).status, gpu.mig(three, host).status) == ("fail", "fail")


def test_a_split_gpu_that_the_engine_sees_fails_although_others_would_do(h20: Needs) -> None:
    two = replace(h20, gpu=replace(H20, count=2))
    finding = gpu.mig(two, with_gpus(gpu_host("h20-x8"), {}, {}, {"mig": True}))
    assert finding.status == "fail" and "list whole GPUs only in CUDA_VISIBLE_DEVICES" in (finding.fix or "")


def test_links_are_judged_between_the_gpus_that_are_used(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    pair = replace(rtx, gpu=replace(RTX, count=2), env={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert links.topology(pair, host).observed == "NODE"
    assert links.topology(replace(pair, env={"CUDA_VISIBLE_DEVICES": "1,2"}), host).observed == "SYS"
    cut = gpu_host("rtx-pro-6000-x4", topo=recorded("public/A-rtx-pro-6000/topo-2x-phb.txt"))
    assert links.topology(pair, cut).status == "skipped"


def test_mixed_editions_are_a_warning(rtx: Needs) -> None:
    lines = recorded("public/A-rtx-pro-6000/list-mixed-editions.txt").splitlines()
    editions = [{"name": line.split(": ", 1)[1].split(" (UUID")[0]} for line in lines]
    finding = gpu.model(rtx, with_gpus(gpu_host("rtx-pro-6000-x4"), *editions))
    assert finding.status == "warn" and "Max-Q" in (finding.observed or "")


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell", True),
        ("NVIDIA RTX PRO 6000 Blac...", "RTX PRO 6000 Blackwell", True),
        ("NVIDIA H20", "H20", True),
        ("NVIDIA H200", "H20", False),
        ("NVIDIA H20-3e", "H20", True),
        ("NVIDIA H200", "h200", True),
        ("NVIDIA RTX PRO ...", "H20", False),
    ],
)
def test_names_fit_as_whole_words(name: str, pattern: str, fits: bool, needs: MakeNeeds) -> None:
    host = with_gpus(gpu_host("h200-x2"), name=name)
    finding = gpu.model(needs(gpu=GpuNeed((pattern,), 2)), host)
    assert finding.status == ("ok" if fits else "fail")


def test_an_old_tool_gives_the_capability_by_name(h200: Needs) -> None:
    old = with_gpus(gpu_host("old-tool"), compute_capability=None)
    assert gpu.compute_capability(h200, old).status == "ok"
    assert gpu.compute_capability(h200, with_gpus(old, name="NVIDIA GRID X")).status == "skipped"


def test_memory_is_held_against_the_recipe(h200: Needs, h20: Needs) -> None:
    assert gpu.memory(h200, with_gpus(gpu_host("h200-x2"), {"memory_total": 97871})).status == "fail"
    assert gpu.memory(h20, gpu_host("h20-x8")).status == "ok"
    unread = with_gpus(
        gpu_host("h200-x2"), memory_total=None, reasons={"memory.total": "[Insufficient Permissions]"}
    )
    assert gpu.memory(h200, unread).status == "skipped"
    assert "Insufficient" in gpu.memory(h200, unread).summary


def test_memory_errors_and_pending_repairs_fail_with_the_gpu_named(h20: Needs) -> None:
    host = gpu_host("h20-x8")
    bad = with_gpus(host, {}, {"ecc_uncorrected": 2}, {"remap_pending": True}, {"repair_pending": True})
    finding = gpu.ecc(h20, bad)
    assert finding.observed == (
        "GPU 1: 2 uncorrected errors; GPU 2: a repair waits for a reset; GPU 3: a repair waits for a reset"
    )
    assert "-i 1,2,3 " in (finding.fix or "")
    assert gpu.ecc(h20, with_gpus(host, {"remap_failed": True})).fix == (
        "Replace the GPU (RMA): its spare rows are used up."
    )
    assert gpu.ecc(h20, host).status == "ok"


def test_a_recovery_that_the_driver_asks_for_fails(h20: Needs) -> None:
    finding = gpu.ecc(h20, with_gpus(gpu_host("h20-x8"), {"recovery_action": "Reset"}))
    assert (finding.status, finding.observed) == ("fail", "GPU 0: Reset")


def test_ecc_that_is_off_is_fine_and_unread_is_skipped(rtx: Needs, h200: Needs) -> None:
    off = gpu_host("rtx-pro-6000-x4")
    assert gpu.ecc(rtx, off).summary.startswith("ECC is off")
    assert gpu.ecc(h200, with_gpus(gpu_host("h200-x2"), ecc=None, ecc_uncorrected=None)).status == "skipped"


def test_xids_are_explained_and_hardware_ones_fail(rtx: Needs) -> None:
    lost = gpu_host(
        "rtx-pro-6000-x4", log="source=dmesg\n" + recorded("public/A-rtx-pro-6000/dmesg-xid-79-154.txt")
    )
    finding = gpu.xid(rtx, lost)
    assert finding.status == "fail"
    assert "Xid 79 on 0000:41:00: the GPU fell off the bus" in (finding.observed or "")
    assert "Node Reboot Required" in (finding.observed or "")
    assert (finding.fix or "").startswith("Reboot the host")
    gsp = gpu_host(
        "rtx-pro-6000-x4", log="source=dmesg\n" + recorded("public/A-rtx-pro-6000/dmesg-xid-119-gsp.txt")
    )
    assert "GSP" in (gpu.xid(rtx, gsp).observed or "")


def test_errors_of_programs_only_warn(rtx: Needs) -> None:
    log = "source=dmesg\nlog=[1.0] NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=python, Ch 00000008\n" * 3
    finding = gpu.xid(rtx, gpu_host("rtx-pro-6000-x4", log=log))
    assert finding.status == "warn" and "3 times" in (finding.observed or "")


def xid_host(code: int, at: float, uptime: int | None = 90_000, address: str | None = None) -> HostFacts:
    host = gpu_host("h20-x8")
    place = address or (host.gpu.gpus[0].bus or "")[4:-2].lower()
    log = f"source=dmesg\nlog=[{at:.6f}] NVRM: Xid (PCI:{place}): {code}, words"
    host = gpu_host("h20-x8", log=log)
    return replace(host, system=replace(host.system, uptime_s=uptime))


def test_a_fault_blocks_while_it_is_recent_or_its_gpu_is_gone(h20: Needs) -> None:
    assert gpu.xid(h20, xid_host(119, 89_000)).status == "fail"
    assert gpu.xid(h20, xid_host(119, 89_000, uptime=None)).status == "fail"
    assert gpu.xid(h20, xid_host(119, 1_000)).status == "warn"
    assert gpu.xid(h20, xid_host(79, 1_000, address="0000:f9:00")).status == "fail", "no such GPU answers"


def test_a_memory_fault_that_a_reset_mended_only_warns(h20: Needs) -> None:
    for code in (63, 94, 48, 95):
        host = xid_host(code, 89_000)
        mended = with_gpus(host, ecc_uncorrected=0, remap_pending=False, remap_failed=False)
        assert gpu.xid(h20, mended).status == "warn"
        for pending in ({"remap_pending": True}, {"remap_pending": None}, {"repair_pending": True}):
            assert gpu.xid(h20, with_gpus(mended, pending)).status == "fail"
        counted = "warn" if code in (63, 94) else "fail"
        assert gpu.xid(h20, with_gpus(mended, {"ecc_uncorrected": 2})).status == counted
        assert gpu.ecc(h20, with_gpus(mended, {"ecc_uncorrected": 2})).status == "fail"


def test_faults_of_unused_gpus_and_unknown_codes_only_warn(h20: Needs) -> None:
    host = xid_host(119, 89_000)
    others = replace(h20, gpu=replace(H20, count=2), env={"CUDA_VISIBLE_DEVICES": "1,2"})
    assert (gpu.xid(others, host).status, gpu.xid(h20, host).status) == ("warn", "fail")
    unknown = gpu.xid(h20, xid_host(999, 89_000))
    assert unknown.status == "warn" and "not in the table" in (unknown.observed or "")


def test_an_unreadable_kernel_log_is_skipped(rtx: Needs) -> None:
    assert gpu.xid(rtx, gpu_host("rtx-pro-6000-x4", log="source=denied")).status == "skipped"
    assert gpu.xid(rtx, gpu_host("rtx-pro-6000-x4")).status == "ok"


def test_persistence_by_the_daemon_or_the_mode(h200: Needs) -> None:
    host = with_gpus(gpu_host("h200-x2"), persistence=False)
    assert gpu.persistence(h200, host).status == "ok"
    assert gpu.persistence(h200, with_kernel(host, persistenced=False)).status == "warn"
    unread = with_kernel(with_gpus(host, persistence=None), persistenced=False)
    assert gpu.persistence(h200, unread).status == "skipped"


def test_memory_in_use_by_hidden_processes_is_judged_by_memory(rtx: Needs) -> None:
    table = recorded("public/C-rented-container/smi-container-no-processes.txt")
    facts = parse_gpu(split_sections(f"@@rw:gpu.smi\n{table}\n@@rc:0\n"))
    finding = gpu.idle(rtx, replace(HEALTHY, gpu=facts))
    assert finding.status == "fail"
    assert "not visible from here" in (finding.observed or "")


def test_our_own_engine_is_no_stranger(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    mine = (GpuProcess(500, "/opt/rackwright/env/bin/python", 80000),)
    running = with_gpus(host, memory_used=85000, processes=mine)
    assert gpu.idle(rtx, running).status == "ok"
    theirs = with_gpus(host, memory_used=85000, processes=(GpuProcess(501, "python3", 80000),))
    finding = gpu.idle(rtx, theirs)
    assert (finding.status, finding.fix) == ("fail", "Stop pid 501 (python3).")
    assert gpu.idle(replace(rtx, own_pids=(501,)), theirs).status == "ok"
    worker = GpuProcess(777, "VLLM::Worker_TP0", 80000, ancestors=(776, 501))
    assert (
        gpu.idle(
            replace(rtx, own_pids=(501,)), with_gpus(host, memory_used=85000, processes=(worker,))
        ).status
        == "ok"
    )
    at_home = GpuProcess(777, "VLLM::Worker_TP0", 80000, cwd="/opt/rackwright/run")
    assert gpu.idle(rtx, with_gpus(host, memory_used=85000, processes=(at_home,))).status == "ok"
    hidden = with_gpus(host, memory_used=85000)
    assert gpu.idle(replace(rtx, own_pids=(7,)), hidden).status == "ok"


def test_a_gpu_that_takes_no_programs_fails(rtx: Needs) -> None:
    host = with_gpus(gpu_host("rtx-pro-6000-x4"), {"compute_mode": "Prohibited"})
    assert gpu.idle(rtx, host).fix == "nvidia-smi -i 0 -c 0"


def test_a_little_memory_in_use_only_warns(rtx: Needs) -> None:
    assert gpu.idle(rtx, with_gpus(gpu_host("rtx-pro-6000-x4"), {"memory_used": 3000})).status == "warn"
    fuller = replace(rtx, flags={"gpu-memory-utilization": 0.99})
    assert gpu.idle(fuller, with_gpus(gpu_host("rtx-pro-6000-x4"), {"memory_used": 3000})).status == "fail"


def test_a_low_generation_at_idle_is_power_saving(rtx: Needs) -> None:
    finding = gpu.pcie_link(rtx, gpu_host("rtx-pro-6000-x4"))
    assert finding.status == "ok" and "power saving at idle" in finding.summary
    bare = replace(HEALTHY, gpu=gpu_facts("rtx-pro-6000-x4", xml="", query=recorded(
        "public/A-rtx-pro-6000/query-4x-server-idle-gen1.csv")))  # fmt: skip
    assert gpu.pcie_link(rtx, bare).status == "ok"


def test_width_and_generation_under_load_are_two_faults(rtx: Needs) -> None:
    query = recorded("public/A-rtx-pro-6000/query-4x-server-link-degraded-load.csv")
    loaded = replace(HEALTHY, gpu=gpu_facts("rtx-pro-6000-x4", query=query, xml=""))
    finding = gpu.pcie_link(rtx, loaded)
    assert finding.status == "warn"
    assert finding.observed == "GPU 1 x8 of x16; GPU 2 gen 4 of 5 under load"
    throttled = gpu.power_limit(rtx, loaded)
    assert throttled.status == "warn"
    assert throttled.observed == (
        "GPU 3: hardware slowdown, software thermal slowdown and hardware thermal slowdown at 84 C"
    )
    assert gpu.ecc(rtx, loaded).status == "fail" and gpu.mig(rtx, loaded).status == "fail"


def test_a_slot_of_an_older_generation_is_a_warning(rtx: Needs) -> None:
    older = with_gpus(gpu_host("rtx-pro-6000-x4"), link_gen=4, link_gen_max=4, link_gen_device=5)
    assert "its slot does gen 4" in (gpu.pcie_link(rtx, older).observed or "")


def test_a_lowered_power_limit_is_a_warning(h200: Needs) -> None:
    assert gpu.power_limit(h200, gpu_host("h200-x2")).status == "ok"
    capped = with_gpus(gpu_host("h200-x2"), {"power_limit": 400.0})
    assert (gpu.power_limit(h200, capped).status, gpu.power_limit(h200, capped).expected) == ("warn", "700 W")
    assert gpu.power_limit(h200, with_gpus(gpu_host("h200-x2"), power_limit=None)).status == "skipped"


def test_missing_and_closed_device_nodes_fail(h200: Needs) -> None:
    host = gpu_host("h200-x2")
    assert gpu.device_nodes(h200, host).status == "ok"
    nodes = dict(host.gpu.kernel.nodes)
    no_uvm = {name: usable for name, usable in nodes.items() if name != "/dev/nvidia-uvm"}
    finding = gpu.device_nodes(h200, with_kernel(host, nodes=no_uvm))
    assert (finding.status, finding.fix) == ("fail", "nvidia-modprobe -u -c=0")
    one_card = {name: usable for name, usable in nodes.items() if name != "/dev/nvidia1"}
    assert "1 of /dev/nvidia0" in gpu.device_nodes(h200, with_kernel(host, nodes=one_card)).summary
    closed = gpu.device_nodes(h200, with_kernel(host, nodes={**nodes, "/dev/nvidia1": False}))
    assert closed.status == "fail" and "may not open /dev/nvidia1" in closed.summary


# -- links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topo", "count", "status"),
    [
        ("topo-4x-node-sys.txt", 4, "warn"),
        ("topo-4x-node-sys.txt", 2, "ok"),
        ("topo-4x-sys-only.txt", 4, "warn"),
    ],
)
def test_gpus_across_sockets_warn(topo: str, count: int, status: str, needs: MakeNeeds) -> None:
    host = gpu_host("rtx-pro-6000-x4", topo=recorded(f"public/A-rtx-pro-6000/{topo}"))
    wanted = needs(gpu=replace(RTX, count=count))
    assert links.topology(wanted, host).status == status


def test_an_sxm_host_without_its_fabric_fails(h20: Needs) -> None:
    host = gpu_host("h20-x8", topo=recorded("public/B-h20/topo-8x-h20-no-nvlink.txt"))
    finding = links.topology(h20, host)
    assert finding.status == "fail" and "fabricmanager" in (finding.fix or "")
    stuck = with_gpus(gpu_host("h20-x8"), fabric_state="In Progress")
    assert links.topology(h20, stuck).status == "fail"
    assert links.topology(h20, gpu_host("h20-x8")).status == "ok"


def test_single_links_that_are_down_warn(h20: Needs) -> None:
    host = gpu_host("h20-x8")
    assert host.gpu.nvlink
    down = with_facts(host, nvlink=replace(host.gpu.nvlink, inactive={3: 2}))
    assert links.topology(h20, down).observed == "GPU 3: 2 down"


def test_an_ok_status_says_that_it_is_no_proof(rtx: Needs) -> None:
    finding = links.p2p(rtx, gpu_host("rtx-pro-6000-x4"))
    assert finding.status == "ok" and "no proof" in finding.summary


def test_no_p2p_turns_both_settings_on(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4", p2p_read=recorded("public/A-rtx-pro-6000/p2p-read-4x-cns.txt"))
    finding = links.p2p(rtx, host)
    assert finding.status == "warn"
    assert "NCCL_P2P_DISABLE=1 together with --disable-custom-all-reduce" in finding.summary
    advice = links.nccl_advice(rtx, host)
    assert (advice.env, advice.flags) == ({"NCCL_P2P_DISABLE": "1"}, {"disable-custom-all-reduce": True})
    both = replace(rtx, env={"NCCL_P2P_DISABLE": "1"}, flags={"disable-custom-all-reduce": True})
    assert links.p2p(both, host).status == "ok"


@pytest.mark.parametrize(
    ("env", "flags"), [({"NCCL_P2P_DISABLE": "1"}, {}), ({}, {"disable-custom-all-reduce": True})]
)
def test_one_setting_without_the_other_warns(env: dict[str, str], flags: dict[str, Any], rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4", p2p_write=p2p_matrix(4, "TNS"))
    finding = links.p2p(replace(rtx, env=env, flags=flags), host)
    assert finding.status == "warn" and "only" in finding.summary


def test_nvlink_needs_no_settings(h20: Needs) -> None:
    advice = links.nccl_advice(h20, gpu_host("h20-x8"))
    assert (advice.p2p, advice.env, advice.flags, advice.proven) == (True, {}, {}, False)


def test_redirecting_bridges_fail_under_a_translating_iommu_and_warn_otherwise(rtx: Needs) -> None:
    host = with_facts(gpu_host("rtx-pro-6000-x4"), acs_redirect=("40:01.1",))
    assert links.iommu_acs(rtx, host).status == "warn"
    pci = tuple(replace(one, iommu="DMA-FQ") for one in host.gpu.pci or ())
    finding = links.iommu_acs(rtx, with_kernel(with_facts(host, pci=pci), iommu_groups=40))
    assert finding.status == "fail" and "40:01.1" in (finding.observed or "")
    assert links.nccl_advice(rtx, host).p2p is False


def test_only_bridges_above_the_gpus_that_are_used_count(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    pci = tuple(
        replace(one, bridges=(f"0000:{number}0:01.1",)) for number, one in enumerate(host.gpu.pci or (), 1)
    )
    host = with_facts(host, pci=pci, acs_redirect=("80:03.1", "40:01.1"))
    finding = links.iommu_acs(rtx, host)
    assert finding.status == "warn" and "at 40:01.1" in (finding.observed or "")
    assert "80:03.1" not in (finding.observed or "")
    pair = replace(rtx, gpu=replace(RTX, count=2))
    assert links.iommu_acs(pair, host).status == "ok" and links.nccl_advice(pair, host).p2p
    unknown = with_facts(host, pci=tuple(replace(one, bridges=None) for one in pci))
    assert links.iommu_acs(pair, unknown).status == "warn"


def test_a_translating_iommu_alone_warns_and_pt_or_off_does_not(rtx: Needs) -> None:
    host = gpu_host("rtx-pro-6000-x4")
    pci = tuple(replace(one, iommu="DMA-FQ") for one in host.gpu.pci or ())
    translated = with_kernel(with_facts(host, pci=pci), iommu_groups=40)
    assert links.iommu_acs(rtx, translated).status == "warn"
    words = recorded("public/A-rtx-pro-6000/cmdline-iommu-pt.txt")
    passthrough = replace(host, system=replace(host.system, cmdline=words))
    assert links.iommu_acs(rtx, passthrough).status == "ok"
    off = replace(host, system=replace(host.system, cmdline="amd_iommu=off iommu=off"))
    assert links.iommu_acs(rtx, with_facts(off, acs_redirect=None)).status == "ok"


def test_unreadable_acs_bits_are_skipped_and_nvlink_does_not_care(rtx: Needs, h20: Needs) -> None:
    host = with_kernel(gpu_host("rtx-pro-6000-x4"), iommu_groups=40)
    assert links.iommu_acs(rtx, with_facts(host, acs_redirect=None)).status == "skipped"
    assert links.iommu_acs(h20, with_facts(gpu_host("h20-x8"), acs_redirect=None)).status == "ok"


# -- driver -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "changes", "status"),
    [
        ("580.65.06", {"driver": "570", "cuda_major": 13}, "ok"),
        ("570.124.06", {"driver": "570", "cuda_major": 13}, "fail"),
        ("570.124.06", {"driver": "570", "cuda_major": 12}, "ok"),
        ("535.161.08", {"driver": None, "cuda_major": 13}, "fail"),
        ("595.58.03", {"driver": "580", "cuda_major": 13}, "ok"),
        ("550.1", {"driver": None, "cuda_major": None}, "ok"),
    ],
)
def test_the_driver_reaches_the_higher_of_both_floors(
    have: str, changes: dict[str, Any], status: str, needs: MakeNeeds
) -> None:
    host = with_facts(gpu_host("h20-x8"), driver=have)
    assert driver.version(needs(gpu=H20, **changes), host).status == status


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"driver": "580"}, "apt-get install -y nvidia-driver-580-server-open && reboot"),
        ({"cuda_major": 12}, "apt-get install -y nvidia-driver-525-server-open && reboot"),
        (
            {"cuda_major": 13},
            "apt-get install -y nvidia-driver-580-server-open && reboot   "
            "Or use an engine build for CUDA 12 (its -cu129 image).",
        ),
    ],
)
def test_the_cure_of_an_old_driver_is_a_command_that_runs(
    changes: dict[str, Any], fix: str, needs: MakeNeeds
) -> None:
    host = with_facts(gpu_host("h20-x8"), driver="470.57.02")
    assert driver.version(needs(gpu=H20, **changes), host).fix == fix


def test_in_a_container_the_driver_is_the_machines(h20: Needs) -> None:
    host = with_facts(gpu_host("h20-x8"), driver="550.144.03")
    inside = replace(host, system=replace(host.system, container="docker"))
    assert "rent a host" in (driver.version(h20, inside).fix or "")
    assert "apt-get install" in (driver.version(h20, host).fix or "")


def test_module_and_libraries_must_be_of_one_version(h200: Needs) -> None:
    host = gpu_host("h200-x2")
    assert driver.library_match(h200, host).status == "ok"
    upgraded = with_kernel(host, libcuda_version="580.200.01")
    assert driver.library_match(h200, upgraded).status == "fail"
    mismatch = parse_gpu(
        split_sections(f"@@rw:gpu.smi\n{recorded('public/D-failures/nvml-mismatch-570.txt')}\n@@rc:18\n")
    )
    finding = driver.library_match(h200, replace(HEALTHY, gpu=mismatch))
    assert (finding.status, finding.observed) == ("fail", "module unknown, library 570.124")


def test_a_stray_old_tool_is_a_warning(needs: MakeNeeds) -> None:
    table = recorded("public/D-failures/smi-470-tool-on-580-driver.txt")
    facts = parse_gpu(split_sections(f"@@rw:gpu.smi\n{table}\n@@rc:0\n"))
    finding = driver.library_match(needs(gpu=GpuNeed()), replace(HEALTHY, gpu=facts))
    assert (finding.status, finding.observed) == ("warn", "nvidia-smi 470.256.02, driver 580.95.05")


def test_unattended_upgrades_of_a_loaded_driver_warn_unless_held(h200: Needs) -> None:
    host = gpu_host("h200-x2")
    packages = ("nvidia-driver-580-open", "libnvidia-compute-580")
    loose = replace(host, upgrades=UpgradeFacts(unattended=True, packages=packages))
    assert (
        driver.auto_upgrade(h200, loose).fix == "apt-mark hold nvidia-driver-580-open libnvidia-compute-580"
    )
    held = replace(host, upgrades=UpgradeFacts(unattended=True, packages=packages, held=packages))
    assert driver.auto_upgrade(h200, held).status == "ok"
    listed = replace(host, upgrades=UpgradeFacts(unattended=True, packages=packages, blacklisted=True))
    assert driver.auto_upgrade(h200, listed).status == "ok"
    manual = replace(host, upgrades=UpgradeFacts(unattended=False, packages=packages))
    assert driver.auto_upgrade(h200, manual).status == "ok"
    unread = replace(host, upgrades=UpgradeFacts(reasons={"*": "no answer"}))
    assert driver.auto_upgrade(h200, unread).status == "skipped"


def test_blackwell_on_the_closed_module_is_told(rtx: Needs, h200: Needs) -> None:
    closed = with_kernel(gpu_host("rtx-pro-6000-x4"), open_module=False)
    (finding,) = driver.open_module(rtx, closed)
    assert finding.status == "warn"
    assert driver.open_module(h200, with_kernel(gpu_host("h200-x2"), open_module=False)) == []


# -- CUDA and Docker --------------------------------------------------------------------------------


def cuda_host(*toolkits: Toolkit, **changes: Any) -> HostFacts:
    return replace(gpu_host("h20-x8"), cuda=CudaFacts(toolkits=toolkits, **changes))


def test_nvcc_must_be_there_and_new_enough(h20: Needs) -> None:
    assert cuda.toolkit(h20, gpu_host("h20-x8")).status == "ok"
    assert cuda.toolkit(h20, cuda_host()).summary == "no nvcc on this host"
    old = cuda.toolkit(h20, cuda_host(Toolkit("/usr/local/cuda-12.4", "12.4")))
    assert (old.status, old.summary) == ("fail", "no nvcc of CUDA 13")
    lower = cuda.toolkit(replace(h20, cuda_toolkit="13.1"), gpu_host("h20-x8"))
    assert (lower.status, lower.summary) == ("fail", "nvcc is too old for this GPU and engine")


def test_a_toolkit_newer_than_the_driver_fails(h20: Needs) -> None:
    host = with_facts(gpu_host("h20-x8"), cuda="12.8")
    assert cuda.toolkit(h20, host).status == "fail"


def test_the_fitting_one_of_several_toolkits_is_chosen(h20: Needs) -> None:
    both = cuda_host(Toolkit("/usr/local/cuda-14.0", "14.0"), Toolkit("/usr/local/cuda-13.0", "13.0"))
    assert cuda.toolkit(h20, both).observed == "13.0 at /usr/local/cuda-13.0"


def test_cuda_home_must_be_one_toolkit(h20: Needs) -> None:
    good = Toolkit("/usr/local/cuda-13.0", "13.0", frozenset(cuda.JIT_HEADERS))
    assert cuda.home(h20, cuda_host(good)).status == "ok"
    linked = cuda_host(good, cuda_home="/usr/local/cuda", cuda_home_real="/usr/local/cuda-13.0")
    assert cuda.home(h20, linked).observed == "/usr/local/cuda-13.0"
    several = cuda.home(h20, cuda_host(good, cuda_home=":/usr/local/cuda"))
    assert (several.status, several.reference) == (
        "fail", "flashinfer issue #1781: a leading ':' in the path breaks its compiler call",
    )  # fmt: skip
    gone = cuda.home(h20, cuda_host(good, cuda_home="/opt/gone", cuda_home_real="/opt/gone"))
    assert (gone.status, gone.fix) == ("fail", "export CUDA_HOME=/usr/local/cuda-13.0")


def test_missing_headers_name_their_packages(h20: Needs) -> None:
    bare = Toolkit("/usr/local/cuda-13.0", "13.0", frozenset({"cuda_runtime.h"}))
    finding = cuda.home(h20, cuda_host(bare))
    assert (finding.status, finding.fix) == (
        "warn", "apt-get install -y libcublas-dev-13-0 libcurand-dev-13-0",
    )  # fmt: skip


def docker_host(**changes: Any) -> HostFacts:
    base = DockerFacts(
        "/usr/bin/docker", "27.3.1", None, ("runc", "nvidia"), "runc", "/var/lib/docker", "overlay2"
    )
    return replace(gpu_host("h20-x8"), docker=replace(base, **changes))


def status_of(found: Finding | list[Finding]) -> str:
    assert isinstance(found, Finding)
    return found.status


def test_docker_is_only_asked_about_on_its_route(h20: Needs) -> None:
    ids = {finding.id for finding in run_checks(h20, docker_host())}
    assert not ids & {"docker.engine", "cuda.container_toolkit"}
    ids = {finding.id for finding in run_checks(replace(h20, route="docker"), docker_host())}
    assert ids >= {"docker.engine", "cuda.container_toolkit"}


def test_docker_without_its_gpu_runtime_fails(h20: Needs) -> None:
    wanted = replace(h20, route="docker")
    assert status_of(cuda.container_toolkit(wanted, docker_host())) == "ok"
    assert (
        status_of(
            cuda.container_toolkit(wanted, docker_host(runtimes=("runc",), cdi=("/etc/cdi/nvidia.yaml",)))
        )
        == "ok"
    )
    missing = cuda.container_toolkit(wanted, docker_host(runtimes=("runc",)))
    assert isinstance(missing, Finding) and "apt-get install -y nvidia-container-toolkit" in (
        missing.fix or ""
    )
    unknown = cuda.container_toolkit(wanted, docker_host(runtimes=("runc",), toolkit="1.17.8"))
    assert isinstance(unknown, Finding) and (unknown.fix or "").startswith("nvidia-ctk runtime configure")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": None, "why": "Cannot connect to the Docker daemon"}, "systemctl enable --now docker"),
        ({"server": None, "why": "permission denied while trying to connect"}, "usermod -aG docker"),
        ({"server": None, "path": None, "why": "there is no docker"}, "docs.docker.com"),
    ],
)
def test_a_docker_that_does_not_answer_has_its_own_cure(
    h20: Needs, changes: dict[str, Any], words: str
) -> None:
    finding = cuda.docker_engine(replace(h20, route="docker"), docker_host(**changes))
    assert isinstance(finding, Finding) and finding.status == "fail"
    assert words in (finding.fix or "")
