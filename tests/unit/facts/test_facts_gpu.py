from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.facts import HostFacts, ProbeRequest, build_probe, parse_probe
from tasks.facts.cuda import nvcc_release, parse_cuda, parse_docker
from tasks.facts.gpu import (
    GpuFacts,
    merge_gpus,
    parse_driver,
    parse_gpu,
    parse_kernel_log,
    parse_pci,
    parse_query_csv,
    parse_smi_state,
    parse_smi_table,
    parse_smi_xml,
)
from tasks.facts.links import parse_acs, parse_matrix, parse_nvlink
from tasks.facts.text import Section, split_sections

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "replay"))
from replay_profiles import PROFILES, install, profile

Read = Callable[[str], str]
SH = Path(__file__).resolve().parents[3] / "tasks" / "facts" / "sh"
RTX_CUT = "NVIDIA RTX PRO 6000 Blac..."


def gpu_facts(**texts: str) -> GpuFacts:
    """GPU facts from the texts of sections; a text may end in its own `@@rc:` line."""
    parts = [
        f"@@rw:gpu.{name}\n{text}\n" + ("" if "@@rc" in text else "@@rc:0\n") for name, text in texts.items()
    ]
    return parse_gpu(split_sections("".join(parts)))


def test_a_real_h200_host_is_read_whole(recorded: Read) -> None:
    files = profile("h200-x2").files
    facts = gpu_facts(
        smi=files["smi.txt"], query=files["query.csv"], xml=files["smi_q.xml"], topo=files["topo.txt"],
        p2p_read=files["p2p_read.txt"], p2p_write=files["p2p_write.txt"], nvlink=files["nvlink.txt"],
    )  # fmt: skip
    assert (facts.driver, facts.cuda, facts.smi.trouble) == ("580.159.04", "13.0", None)
    first, second = facts.gpus
    assert (first.name, first.compute_capability, first.memory_total, first.memory_used) == (
        "NVIDIA H200", "9.0", 143771, 0,
    )  # fmt: skip
    assert (second.bus, second.mig, second.ecc, second.ecc_uncorrected) == (
        "00000000:00:07.0",
        False,
        True,
        0,
    )
    assert (first.link_gen, first.link_width, first.power_limit, first.event_reasons) == (5, 16, 700.0, 1)
    assert (first.fabric_state, first.remap_pending) == ("Completed", False)
    assert facts.topology and facts.topology.among() == {"NV18"} and facts.topology.numa == {0: "0", 1: "0"}
    assert facts.p2p_read and facts.p2p_read.among() == {"OK"}
    assert facts.nvlink and facts.nvlink.speeds[1] == (26.562,) * 18


def test_the_probes_own_answer_from_a_real_host_is_read_whole(recorded: Read) -> None:
    request = ProbeRequest("/opt/rackwright", "/data/models", ports=(8000,), want_gpu=True, want_docker=True)
    facts = parse_probe(recorded("h200x2/probe.txt"), request, received_at=1796015660.0)
    assert facts.complete and facts.reasons == {}
    assert (facts.system.systemd, facts.system.pid1, facts.system.clock_skew_s) == (False, "tini", -2.0)
    assert (facts.cgroup.version, facts.cgroup.memory_max) == (2, 256 * 1024**3)
    assert facts.cgroup.memory_used == 952287232 - 839147520
    assert [gpu.reasons for gpu in facts.gpu.gpus] == [{}, {}], "every field that is asked for is known"
    assert facts.gpu.kernel.libcuda_version == facts.gpu.kernel.module_version == "580.159.04"
    assert facts.gpu.xids == () and facts.gpu.acs_redirect is None
    assert facts.cuda.toolkits[0].release == "13.0" and len(facts.cuda.toolkits[0].headers) == 4
    assert facts.tools.env and facts.tools.env.packages["torch"] == "2.11.0"
    assert facts.disk.at("/dev/shm").total_bytes == 256 * 1024**3
    assert facts.docker and facts.docker.why == "there is no docker"


def test_xml_alone_tells_the_same(recorded: Read) -> None:
    log, why = parse_smi_xml(recorded("h200x2/smi_q.xml"))
    assert why is None
    assert (log.driver, log.cuda, len(log.gpus)) == ("580.159.04", "13.0", 2)
    assert log.gpus[0].memory_total == 143771 and log.gpus[0].persistence is True


def test_xml_without_the_lists_of_clocks_is_read_as_well(recorded: Read) -> None:
    text = re.sub(
        r"\s*<supported_clocks>.*?</supported_clocks>", "", recorded("h200x2/smi_q.xml"), flags=re.S
    )
    assert len(parse_smi_xml(text)[0].gpus) == 2


def test_cut_or_hostile_xml_is_refused_with_the_reason(recorded: Read) -> None:
    log, why = parse_smi_xml(recorded("h200x2/smi_q.xml")[:9000])
    assert log.gpus == () and why and "cut or damaged" in why
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    assert parse_smi_xml(bomb)[1] == "the XML declares entities"
    assert parse_smi_xml("")[1] == "nvidia-smi -q -x printed nothing"


def test_processes_of_xml_are_listed() -> None:
    xml = """<?xml version="1.0" ?><nvidia_smi_log><gpu id="0"><processes><process_info><pid>812</pid>
    <process_name>/usr/bin/python3</process_name><used_memory>90000 MiB</used_memory></process_info>
    <process_info><pid>N/A</pid></process_info></processes></gpu></nvidia_smi_log>"""
    (process,) = parse_smi_xml(xml)[0].gpus[0].processes
    assert (process.pid, process.name, process.memory_mib) == (812, "/usr/bin/python3", 90000)


@pytest.mark.parametrize(
    ("name", "driver", "cuda", "count", "first"),
    [
        ("public/A-rtx-pro-6000/smi-4x-workstation-580.txt", "580.178.04", "13.0", 4, RTX_CUT),
        ("public/A-rtx-pro-6000/smi-8x-server-595.txt", "595.58.03", "13.2", 8, RTX_CUT),
        ("public/B-h20/smi-8x-h20-96g-580.txt", "580.95.05", "13.0", 8, "NVIDIA H20"),
        ("public/B-h20/smi-8x-h20-141g-550.txt", "550.144.03", "12.4", 8, "NVIDIA H20-3e"),
        ("public/C-rented-container/smi-container-no-processes.txt", "580.105.08", "13.0", 4,
         RTX_CUT),
        ("public/D-failures/smi-610-kmd-header.txt", "610.57.04", "13.3", 1, "NVIDIA GeForce RTX 2080 ..."),
        ("public/D-failures/smi-470-tool-on-580-driver.txt", "580.95.05", "13.0", 1, "NVIDIA RTX PRO ..."),
        ("public/D-failures/smi-table-err-power-v100.txt", "470.182.03", "11.4", 2, "Tesla V100-PCIE..."),
        ("public/D-failures/smi-h200-mig-enabled.txt", "590.48.01", "13.1", 1, "NVIDIA H200"),
    ],
)  # fmt: skip
def test_tables_of_many_versions_are_read(
    recorded: Read, name: str, driver: str, cuda: str, count: int, first: str
) -> None:
    table = parse_smi_table(recorded(name))
    assert (table.driver, table.cuda, len(table.gpus)) == (driver, cuda, count)
    assert table.gpus[0].name == first
    assert all(gpu.memory_total for gpu in table.gpus)


def test_memory_of_hidden_processes_is_seen_in_a_container(recorded: Read) -> None:
    gpus = parse_smi_table(recorded("public/C-rented-container/smi-container-no-processes.txt")).gpus
    assert [gpu.memory_used for gpu in gpus] == [90412, 90412, 90412, 90408]
    assert all(gpu.processes == () for gpu in gpus)


def test_processes_of_the_table_are_listed(recorded: Read) -> None:
    (gpu,) = parse_smi_table(recorded("public/D-failures/smi-610-kmd-header.txt")).gpus
    assert [(p.pid, p.name, p.memory_mib) for p in gpu.processes] == [
        (1720, "/usr/bin/gnome-shell", 173),
        (4556, "/usr/bin/Xwayland", 3),
    ]


def test_mig_rows_are_no_gpus(recorded: Read) -> None:
    (gpu,) = parse_smi_table(recorded("public/D-failures/smi-h200-mig-enabled.txt")).gpus
    assert (gpu.mig, gpu.memory_total, gpu.utilization) == (True, 143771, None)


def test_a_failed_power_reading_takes_nothing_else_along(recorded: Read) -> None:
    second = parse_smi_table(recorded("public/D-failures/smi-table-err-power-v100.txt")).gpus[1]
    assert (second.bus, second.memory_used, second.persistence) == ("00004C1A:00:00.0", 812, True)


def test_ecc_off_gives_no_counts_and_no_zero(recorded: Read) -> None:
    text = recorded("public/A-rtx-pro-6000/query-4x-workstation-ecc-off.csv")
    gpu = gpu_facts(smi="fine", query=text).gpus[0]
    assert (gpu.ecc, gpu.ecc_uncorrected, gpu.mig) == (False, None, None)
    assert gpu.reasons["mig.mode.current"] == "[N/A]"


def test_four_faults_of_one_host_stay_apart(recorded: Read) -> None:
    gpus = gpu_facts(
        smi="fine", query=recorded("public/A-rtx-pro-6000/query-4x-server-link-degraded-load.csv")
    ).gpus
    assert (gpus[1].link_width, gpus[1].link_width_max) == (8, 16)
    assert (gpus[2].link_gen, gpus[2].link_gen_max) == (4, 5)
    assert (gpus[3].ecc_uncorrected, gpus[3].mig, gpus[3].event_reasons) == (2, True, 0x68)


def test_missing_columns_are_none(recorded: Read) -> None:
    gpu = gpu_facts(smi="fine", query=recorded("public/A-rtx-pro-6000/query-4x-server-idle-gen1.csv")).gpus[0]
    assert (gpu.link_gen, gpu.link_gen_max, gpu.compute_capability, gpu.power_max) == (1, None, None, 600.0)


def test_five_kinds_of_no_value_in_one_row(recorded: Read) -> None:
    facts = gpu_facts(smi="fine", query=recorded("public/D-failures/query-mig-insufficient-permissions.csv"))
    (gpu,) = facts.gpus
    assert (gpu.name, gpu.memory_total, gpu.temperature) == ("NVIDIA A100-SXM4-80GB", None, 44)
    assert gpu.reasons["memory.total"] == "[Insufficient Permissions]"
    assert gpu.reasons["power.default_limit"] == "[Unknown Error]"
    assert facts.driver == "535.161.08"


def test_a_complaint_about_a_field_is_no_csv(recorded: Read) -> None:
    assert parse_query_csv(recorded("public/D-failures/query-invalid-field-compute-cap.txt")) == ()


def test_warnings_before_the_csv_are_skipped() -> None:
    rows = parse_query_csv("WARNING: infoROM is corrupted at gpu 0000:01:00.0\nindex, name\n0, NVIDIA H20\n")
    assert rows == ({"index": "0", "name": "NVIDIA H20"},)


@pytest.mark.parametrize(
    ("text", "rc", "trouble"),
    [
        ("public/D-failures/nvml-mismatch-570.txt", 18, "mismatch"),
        ("public/D-failures/smi-driver-not-loaded.txt", 9, "no_driver"),
        ("public/D-failures/nvml-unknown-error-container.txt", 255, "access_lost"),
        ("public/D-failures/device-handle-unknown-error.txt", 15, "gpu_lost"),
    ],
)
def test_each_way_to_fail_is_told_apart(recorded: Read, text: str, rc: int, trouble: str) -> None:
    state = parse_smi_state(Section(recorded(text), rc))
    assert state.trouble == trouble
    assert state.message


def test_details_of_failures_are_kept(recorded: Read) -> None:
    mismatch = parse_smi_state(Section(recorded("public/D-failures/nvml-mismatch-570.txt"), 18))
    assert mismatch.library_version == "570.124"
    lost = parse_smi_state(Section(recorded("public/D-failures/device-handle-unknown-error.txt"), 15))
    assert lost.address == "0000:20:00.0"
    older = parse_smi_state(
        Section("Unable to determine the device handle for GPU 0000:20:00.0: Unknown Error", 15)
    )
    assert older.address == "0000:20:00.0"


def test_a_lost_gpu_is_recognised_in_every_spelling_and_before_a_table_too(recorded: Read) -> None:
    table = recorded("h200x2/smi.txt")
    for spelling in ("GPU1: 0000:34:00.0", "GPU 0000:34:00.0", "GPU0000:34:00.0", "gpu 0000:34:00.0"):
        words = f"Unable to determine the device handle for {spelling}: Unknown Error\n{table}"
        state = parse_smi_state(Section(words, 0))
        assert (state.trouble, state.address) == ("gpu_lost", "0000:34:00.0"), spelling


def test_what_a_gpu_out_of_order_says_is_kept_from_xml_and_query() -> None:
    xml = (
        "<?xml version='1.0'?><nvidia_smi_log><gpu id='00000000:34:00.0'><product_name>H20</product_name>"
        "<gpu_recovery_action>None</gpu_recovery_action>"
        "<fb_memory_usage><total>GPU requires reset</total><used>12 MiB</used></fb_memory_usage>"
        "</gpu></nvidia_smi_log>"
    )
    only, _ = parse_smi_xml(xml)
    assert only.gpus[0].memory_total is None
    assert only.gpus[0].reasons == {"fb_memory_usage/total": "GPU requires reset"}
    query = parse_query_csv("index, pci.bus_id, pstate\n0, 00000000:34:00.0, [GPU requires reset]\n")
    merged = merge_gpus(query, only.gpus, ())
    assert merged[0].reasons == {
        "fb_memory_usage/total": "GPU requires reset", "pstate": "[GPU requires reset]",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "trouble"),
    [
        (Section("No devices were found", 6), "no_devices"),
        (Section("", 124), "hang"),
        (Section("", 127), "no_tool"),
        (Section("something odd", 3), "other"),
        (Section("Failed to initialize NVML: Insufficient Permissions", 4), "permission"),
        (Section("GPU is lost. Reboot the system to recover this GPU", 15), "gpu_lost"),
    ],
)
def test_troubles_without_a_recording(section: Section, trouble: str) -> None:
    assert parse_smi_state(section).trouble == trouble


@pytest.mark.parametrize(
    ("name", "count", "kinds"),
    [
        ("public/A-rtx-pro-6000/topo-2x-phb.txt", 2, {"PHB"}),
        ("public/A-rtx-pro-6000/topo-4x-node-sys.txt", 4, {"NODE", "SYS"}),
        ("public/A-rtx-pro-6000/topo-4x-sys-only.txt", 4, {"SYS"}),
        ("public/A-rtx-pro-6000/topo-8x-server-pcie-switch.txt", 8, {"PIX", "NODE", "SYS"}),
        ("public/B-h20/topo-8x-h20-nv18-nic.txt", 8, {"NV18"}),
        ("public/B-h20/topo-8x-h20-no-nvlink.txt", 8, {"NODE", "SYS"}),
        ("public/A-rtx-pro-6000/p2p-nvlink-4x-ns.txt", 4, {"NS"}),
        ("public/A-rtx-pro-6000/p2p-read-4x-cns.txt", 4, {"CNS"}),
        ("public/A-rtx-pro-6000/p2p-write-4x-ok.txt", 4, {"OK"}),
    ],
)
def test_matrices_with_and_without_underlines_and_network_cards(
    recorded: Read, name: str, count: int, kinds: set[str]
) -> None:
    matrix = parse_matrix(recorded(name))
    assert matrix and len(matrix.gpus) == count
    assert matrix.among() == kinds
    assert len(matrix.between) == count * (count - 1)


def test_a_part_of_a_matrix_can_be_looked_at(recorded: Read) -> None:
    matrix = parse_matrix(recorded("public/A-rtx-pro-6000/topo-4x-node-sys.txt"))
    assert matrix and matrix.among((0, 1)) == {"NODE"}
    assert matrix.numa == {0: "0", 1: "0", 2: "1", 3: "1"}


def test_no_matrix_is_none() -> None:
    assert parse_matrix("") is None
    assert parse_matrix("Failed to initialize NVML: Unknown Error") is None


def test_links_that_are_down_are_counted() -> None:
    links = parse_nvlink("GPU 0: NVIDIA H20 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n")
    assert (links.speeds, links.inactive) == ({0: (26.562,)}, {0: 1})


def test_redirecting_bridges_are_named(recorded: Read) -> None:
    assert parse_acs(recorded("public/A-rtx-pro-6000/lspci-vvv-acs-redirect-on.txt")) == (
        "40:01.1",
        "60:03.1",
    )
    assert parse_acs(recorded("public/A-rtx-pro-6000/lspci-vvv-acs-srcvalid-upstreamfwd.txt")) == ()


def test_no_acs_line_is_unknown_and_not_off(recorded: Read) -> None:
    assert parse_acs(recorded("public/A-rtx-pro-6000/lspci-vvv-unprivileged.txt")) is None


def test_xid_lines_of_both_kinds_of_log_are_found(recorded: Read) -> None:
    log = "source=dmesg\n" + recorded("public/A-rtx-pro-6000/dmesg-xid-79-154.txt")
    xids, why = parse_kernel_log(Section(log, 0))
    assert why is None and xids is not None
    assert [(x.address, x.code) for x in xids] == [("0000:41:00", 79), ("0000:41:00", 154)]
    assert "Node Reboot Required" in xids[1].text
    gsp, _ = parse_kernel_log(
        Section("source=journal\n" + recorded("public/A-rtx-pro-6000/dmesg-xid-119-gsp.txt"), 0)
    )
    assert gsp and {x.code for x in gsp} == {119}
    assert [x.at for x in xids] == [186412.402121, 186412.403001] and {x.at for x in gsp} == {None}
    monotonic = "source=journal\nlog=[   12.500000] gpu1 kernel: NVRM: Xid (PCI:0000:41:00): 63, row"
    assert [(x.code, x.at) for x in parse_kernel_log(Section(monotonic, 0))[0] or ()] == [(63, 12.5)]


def test_a_log_that_may_not_be_read_is_not_an_empty_one() -> None:
    xids, why = parse_kernel_log(Section("source=denied", 0))
    assert xids is None and why and "may not be read" in why
    assert parse_kernel_log(Section("source=dmesg", 0)) == ((), None)


def test_the_drivers_pieces_are_read() -> None:
    facts = parse_driver(
        Section(
            "node./dev/nvidia0=yes\nnode./dev/nvidiactl=yes\nnode./dev/nvidia-uvm=no\n"
            "proc=NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
            "loaded.nvidia=yes\nloaded.nvidia_uvm=yes\nhmm_disabled=N\n"
            "library.libcuda.so.1=/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04\n"
            "persistenced=yes\niommu_groups=0\nenv.NCCL_P2P_DISABLE=1",
            0,
        )
    )
    assert (facts.module_version, facts.open_module, facts.libcuda_version) == (
        "580.159.04",
        True,
        "580.159.04",
    )
    assert facts.nodes == {"/dev/nvidia0": True, "/dev/nvidiactl": True, "/dev/nvidia-uvm": False}
    assert (facts.hmm_disabled, facts.persistenced, facts.iommu_groups) == (False, True, 0)
    assert facts.env == {"NCCL_P2P_DISABLE": "1"}


def test_gpus_on_the_bus_are_read_with_driver_and_iommu() -> None:
    bound, free = parse_pci(
        "pci=0000:06:00.0 0x2bb5 0 nvidia DMA-FQ\nother\npci=0000:07:00.0 0x2bb5 -1 - -\n"
    )
    assert (bound.address, bound.device, bound.driver, bound.iommu) == (
        "0000:06:00.0",
        "0x2bb5",
        "nvidia",
        "DMA-FQ",
    )
    assert (free.driver, free.iommu) == (None, None)
    assert bound.bridges is None, "older answers do not say"


def test_the_probe_names_the_bridges_above_a_gpu(
    shell: list[str], tmp_path: Path, run_probe: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    devices, root = tmp_path / "bus/pci/devices", tmp_path / "devices/pci0000:00"
    devices.mkdir(parents=True)
    for path in ("0000:00:01.1/0000:01:00.0/0000:02:00.0", "0000:00:05.0", "0000:00:03.1/0000:09:00.0"):
        folder = root / path
        folder.mkdir(parents=True)
        vendor = "0x15b3" if path.endswith("09:00.0") else "0x10de"
        for name, value in {"vendor": vendor, "class": "0x030200", "device": "0x1", "numa_node": "0"}.items():
            (folder / name).write_text(f"{value}\n")
        (devices / folder.name).symlink_to(folder)
    text = (Path(__file__).resolve().parents[3] / "tasks/facts/sh/gpu.sh").read_text("utf-8")
    function = text[text.index("rw_pci() {") : text.index("rw_kernel_log() {")]
    kv = 'kv() { printf \'%s=%s\\n\' "$1" "$2"; }'
    done = run_probe(f"{kv}\n{function.replace('/sys/', f'{tmp_path}/')}\nrw_pci", shell)
    first, second = parse_pci(done.stdout.decode())
    assert (first.address, first.bridges) == ("0000:00:05.0", ())
    assert (second.address, second.bridges) == ("0000:02:00.0", ("0000:00:01.1", "0000:01:00.0"))


def test_toolkits_are_listed_with_their_headers(recorded: Read) -> None:
    assert nvcc_release(recorded("public/C-rented-container/nvcc-12.4-too-old.txt")) == "12.4"
    facts = parse_cuda(
        split_sections(
            "@@rw:cuda\nCUDA_HOME=/usr/local/cuda\nCUDA_HOME_REAL=/usr/local/cuda-13.0\non_path=/usr/bin/nvcc\n"
            "home=/usr/local/cuda-13.0\nnvcc=Cuda compilation tools, release 13.0, V13.0.88\n"
            "header=cuda_runtime.h\nheader=curand.h\nptxas=yes\nhome=/usr/local/cuda-12.4\n@@rc:0\n"
        )
    )
    new, old = facts.toolkits
    assert (new.release, new.headers, new.ptxas) == ("13.0", {"cuda_runtime.h", "curand.h"}, True)
    assert (old.release, old.headers) == (None, frozenset())


def test_docker_that_does_not_answer_says_why() -> None:
    facts = parse_docker(
        split_sections(
            "@@rw:docker\npath=/usr/bin/docker\nCannot connect to the Docker daemon at unix:///var/run/docker.sock.\n"
            "server=\nroot=\n@@rc:1\n"
            "@@rw:container_toolkit\nctk=NVIDIA Container Toolkit CLI version 1.17.8\n@@rc:0\n"
        )
    )
    assert facts and facts.server is None and facts.why and "Cannot connect" in facts.why
    assert facts.toolkit == "1.17.8"
    assert parse_docker({}) is None


# -- the probe, against the stand-in ------------------------------------------------------------


def probe_with(folder: Path, deadline: int = 5, whole: bool = False) -> tuple[HostFacts, float]:
    """Run the probe with the stand-in on PATH: its GPU part alone (quick), or all of it."""
    request = ProbeRequest(root="/opt/rackwright", model_root="/m", want_gpu=True, smi_deadline_s=deadline)
    part = [(SH / f"{name}.sh").read_text() for name in ("prelude", "gpu")]
    script = (
        build_probe(request) if whole else f"{part[0]}\nrw_smi_s={deadline}\n{part[1]}\nrw end 5 64 true\n"
    )
    started = time.monotonic()
    path = f"{folder}:/usr/bin:/bin:/usr/sbin"
    done = subprocess.run(["sh", "-c", script], capture_output=True, env={"PATH": path}, timeout=60)
    return parse_probe(done.stdout.decode("ascii"), request), time.monotonic() - started


@pytest.mark.parametrize("name", PROFILES)
def test_the_probe_reads_every_replayed_host(name: str, tmp_path: Path) -> None:
    install(name, tmp_path)
    facts, _ = probe_with(tmp_path)
    assert facts.complete and facts.reasons == {}
    assert facts.gpu.smi.trouble is None
    expected = {"h200-x2": 2, "rtx-pro-6000-x4": 4, "h20-x8": 8, "old-tool": 2}[name]
    assert len(facts.gpu.gpus) == expected
    assert facts.gpu.topology and len(facts.gpu.topology.gpus) == expected
    assert facts.gpu.p2p_read and facts.gpu.p2p_read.among() == {"OK"}
    capability = {"rtx-pro-6000-x4": "12.0", "old-tool": None}.get(name, "9.0")
    assert {gpu.compute_capability for gpu in facts.gpu.gpus} == {capability}


def test_processes_on_gpus_are_traced_to_what_started_them(tmp_path: Path) -> None:
    install("h200-x2", tmp_path)
    child = subprocess.Popen(["sleep", "30"], cwd=tmp_path)
    try:
        path = tmp_path / "replay" / "smi_q.xml"
        info = f"<process_info><pid>{child.pid}</pid><process_name>VLLM::Worker</process_name></process_info>"
        path.write_text(path.read_text().replace("<processes>", f"<processes>\n{info}", 1))
        # one tag a line, as the real tool prints it
        path.write_text(path.read_text().replace("><", ">\n<"))
        facts, _ = probe_with(tmp_path)
    finally:
        child.kill()
        child.wait()
    (process,) = facts.gpu.gpus[0].processes
    assert (process.name, process.cwd) == ("VLLM::Worker", str(tmp_path))
    assert process.ancestors[0] == os.getpid()
    assert (process.exe and "sleep" in process.exe) or "coreutils" in (process.exe or "")


def test_an_old_tool_is_asked_again_without_the_fields_it_does_not_know(tmp_path: Path) -> None:
    install("old-tool", tmp_path)
    facts, _ = probe_with(tmp_path)
    gpu = facts.gpu.gpus[0]
    assert (gpu.name, gpu.memory_total, gpu.compute_capability) == ("NVIDIA H200", 143771, None)
    calls = (tmp_path / "replay" / "calls").read_text().splitlines()
    assert sum(call.startswith("--query-gpu") for call in calls) == 5


@pytest.mark.slow
def test_a_tool_that_hangs_is_given_up_after_its_first_deadline(tmp_path: Path) -> None:
    install("h200-x2", tmp_path, "hang")
    facts, seconds = probe_with(tmp_path, deadline=1, whole=True)
    assert facts.complete
    assert facts.gpu.smi.trouble == "hang"
    assert facts.memory.available, "the rest of the host is still read"
    assert (tmp_path / "replay" / "calls").read_text().count("\n") == 1
    assert seconds < 15


def test_a_tool_that_hangs_on_topology_loses_only_that(tmp_path: Path) -> None:
    install("h200-x2", tmp_path, "hang-later")
    facts, _ = probe_with(tmp_path, deadline=1)
    assert len(facts.gpu.gpus) == 2
    assert facts.gpu.topology is None
    assert facts.gpu.reasons["topo"] == "no answer within the deadline"
    assert "earlier command" in facts.gpu.reasons["p2p_read"]


@pytest.mark.parametrize("mode", ["mismatch", "no_driver", "no_devices", "access_lost", "gpu_lost"])
def test_every_failure_of_the_stand_in_is_recognised(mode: str, tmp_path: Path) -> None:
    install("h200-x2", tmp_path, mode)  # type: ignore[arg-type]
    facts, _ = probe_with(tmp_path)
    assert (facts.gpu.smi.trouble, facts.gpu.gpus) == (mode, ())
    assert facts.gpu.why_no_driver != "not read"


def test_a_host_that_was_not_asked_about_gpus_has_none() -> None:
    facts = parse_probe("@@rw:end\n@@rc:0\n", ProbeRequest("/r", "/m"))
    assert facts.gpu.asked is False and facts.gpu.gpus == ()


def test_random_damage_to_gpu_output_never_raises() -> None:
    files = profile("rtx-pro-6000-x4").files
    text = "".join(
        f"@@rw:gpu.{section}\n{files[file]}\n@@rc:0\n"
        for section, file in {
            "smi": "smi.txt", "query": "query.csv", "xml": "smi_q.xml", "topo": "topo.txt",
            "p2p_read": "p2p_read.txt", "p2p_write": "p2p_write.txt",
        }.items()
    )  # fmt: skip
    extra = "@@rw:gpu.nodes\nnode./dev/nvidia0=yes\nmodule=580.1\n@@rw:gpu.pci\npci=0 1 2 3 4\n"
    request = ProbeRequest("/r", "/m", want_gpu=True)
    rng = random.Random(580)
    for _ in range(80):
        damaged = list(text + extra)
        for _ in range(rng.randint(1, 300)):
            position = rng.randrange(len(damaged))
            damaged[position] = rng.choice(
                ["", "\n", ", ", "|", "<", ">", "9" * 40, "[N/A]", "ERR!", "\x00", "GPU", "\t"]
            )
        facts = parse_probe("".join(damaged), request)
        assert [why for name, why in facts.reasons.items() if name != "*"] == []
