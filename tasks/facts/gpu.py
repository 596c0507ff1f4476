"""NVIDIA GPUs: what nvidia-smi says (CSV by field name, XML, the plain table), and what the kernel says."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from xml.etree import ElementTree

from tasks.facts.links import Matrix, NvLinks, parse_acs, parse_matrix, parse_nvlink
from tasks.facts.text import MISSING, Section, first_line, get_section, int_of, number_of, value_of, yes

# Why nvidia-smi gave no answer; each has its own cause and cure.
Trouble = Literal[
    "no_tool", "hang", "mismatch", "no_driver", "no_devices", "access_lost", "permission", "gpu_lost", "other"
]


@dataclass(frozen=True)
class Smi:
    """How nvidia-smi itself fared. `trouble` is None when it answered."""

    path: str | None = None
    version: str | None = None
    trouble: Trouble | None = None
    message: str | None = None
    address: str | None = None
    library_version: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU, as far as this container may see it. `ancestors` are pids, the parent first."""

    pid: int
    name: str | None = None
    memory_mib: int | None = None
    ancestors: tuple[int, ...] = ()
    exe: str | None = None
    cwd: str | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB, power in W. `reasons` says why a field is None."""

    index: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    compute_capability: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    repair_pending: bool | None = None
    recovery_action: str | None = None
    compute_mode: str | None = None
    pstate: str | None = None
    utilization: int | None = None
    link_gen: int | None = None
    link_gen_max: int | None = None
    link_gen_device: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    temperature: int | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    power_max: float | None = None
    event_reasons: int | None = None
    fabric_state: str | None = None
    processes: tuple[GpuProcess, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PciGpu:
    """A GPU as the bus shows it, with or without a driver. `iommu` is the type of its IOMMU domain.

    `bridges` are those between the root complex and the GPU; None where the host does not say.
    """

    address: str
    device: str | None = None
    numa_node: int | None = None
    driver: str | None = None
    iommu: str | None = None
    bridges: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Xid:
    """One Xid line of the kernel log; `at` is in seconds after the boot, where the line says it."""

    address: str
    code: int
    text: str
    at: float | None = None


@dataclass(frozen=True)
class DriverFacts:
    """The kernel's side of the driver, and its libraries."""

    module_version: str | None = None
    open_module: bool | None = None
    libcuda: str | None = None
    libcuda_version: str | None = None
    libml_version: str | None = None
    modules: tuple[str, ...] = ()
    nodes: Mapping[str, bool] = field(default_factory=dict)
    persistenced: bool | None = None
    fabricmanager: str | None = None
    hmm_disabled: bool | None = None
    iommu_groups: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuFacts:
    """Everything about this host's GPUs. `asked` is False when no GPU was looked for.

    `xids` is None when the kernel's log may not be read. `acs_redirect` names the bridges, whatever is below
    them, that send peer traffic through the root complex; None when that cannot be read (it takes root and
    lspci).
    """

    asked: bool = False
    smi: Smi = Smi()
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    topology: Matrix | None = None
    p2p_read: Matrix | None = None
    p2p_write: Matrix | None = None
    nvlink: NvLinks | None = None
    kernel: DriverFacts = field(default_factory=DriverFacts)
    pci: tuple[PciGpu, ...] | None = None
    xids: tuple[Xid, ...] | None = None
    acs_redirect: tuple[str, ...] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_no_driver(self) -> str:
        """Why `driver` is None."""
        return self.reasons.get("driver", "not read")


_TROUBLES: tuple[tuple[str, Trouble], ...] = (
    (r"Driver/library version mismatch", "mismatch"),
    (r"couldn't communicate with the NVIDIA driver|Driver Not Loaded", "no_driver"),
    (r"No devices were found|No devices found", "no_devices"),
    (
        r"Unable to determine the device handle for (?:gpu|GPU) ?(?:\d{1,3}: )?([0-9A-Fa-f:.]{7,16})",
        "gpu_lost",
    ),
    (r"GPU is lost|fallen off the bus", "gpu_lost"),
    (r"Failed to initialize NVML: Insufficient Permissions", "permission"),
    (r"Failed to initialize NVML: Unknown Error", "access_lost"),
)


def parse_gpu(sections: Mapping[str, Section], asked: bool = True) -> GpuFacts:
    """GPU facts from every source that answered; values of the CSV query come first, then XML, then table."""
    plain_smi = get_section(sections, "gpu.smi")
    if not asked and not plain_smi.present:
        return GpuFacts(reasons={"*": "no GPU was looked for"})
    smi = parse_smi_state(plain_smi)
    table = parse_smi_table(plain_smi.text)
    query = parse_query_csv(get_section(sections, "gpu.query").text)
    log, why_no_xml = parse_smi_xml(get_section(sections, "gpu.xml").text)
    if smi.trouble is None and not table.gpus and not query and not log.gpus:
        smi = replace(smi, trouble="other", message=smi.message or plain_smi.why)
    gpus = with_owners(merge_gpus(query, log.gpus, table.gpus), get_section(sections, "gpu.procs").text)
    driver = log.driver or table.driver or next((d for d in (driver_of(query)) if d), None)
    reasons: dict[str, str] = {}
    if driver is None:
        reasons["driver"] = smi.message or "nvidia-smi names no driver version"
    if why_no_xml and smi.trouble is None:
        reasons["xml"] = why_no_xml
    matrices: dict[str, Matrix | None] = {}
    for name in ("topo", "p2p_read", "p2p_write"):
        section = get_section(sections, f"gpu.{name}")
        matrices[name] = parse_matrix(section.text)
        if matrices[name] is None and len(gpus) > 1:
            reasons[name] = section.why
    nvlink = get_section(sections, "gpu.nvlink")
    xids, why_no_log = parse_kernel_log(get_section(sections, "gpu.log"))
    if why_no_log:
        reasons["xids"] = why_no_log
    lspci = sections.get("gpu.lspci", MISSING)
    acs = parse_acs(lspci.text)
    if acs is None:
        reasons["acs"] = (
            "no lspci on this host" if lspci.skipped else "lspci shows no ACS lines (it takes root)"
        )
    pci = get_section(sections, "gpu.pci")
    return GpuFacts(
        asked=True,
        smi=replace(smi, version=table.smi_version),
        driver=driver,
        cuda=log.cuda or table.cuda,
        gpus=gpus,
        topology=matrices["topo"],
        p2p_read=matrices["p2p_read"],
        p2p_write=matrices["p2p_write"],
        nvlink=parse_nvlink(nvlink.text) if nvlink.present and not nvlink.skipped else None,
        kernel=parse_driver(get_section(sections, "gpu.nodes")),
        pci=parse_pci(pci.text) if pci.present and not pci.timed_out else None,
        xids=xids,
        acs_redirect=acs,
        reasons=reasons,
    )


def parse_smi_state(section: Section) -> Smi:
    """Whether nvidia-smi answered, and if not, which of the known troubles it printed."""
    lines = [line for line in section.text.splitlines() if not line.startswith("path=")]
    path = section.pairs().get("path") or None
    text = "\n".join(lines)
    if not section.present:
        return Smi(path, trouble="other", message=section.why)
    for pattern, trouble in _TROUBLES:
        match = re.search(pattern, text)
        if match:
            library = re.search(r"NVML library version: (\d[\d.]*)", text)
            return Smi(
                path,
                trouble=trouble,
                message=first_line(text),
                address=match.group(1).rstrip(".:") if match.groups() and match.group(1) else None,
                library_version=library.group(1) if library else None,
            )
    if section.timed_out:
        return Smi(path, trouble="hang", message="nvidia-smi gave no answer within its deadline")
    if section.rc == 127:
        return Smi(path, trouble="no_tool", message="there is no nvidia-smi on this host")
    if section.rc not in (0, None):
        return Smi(path, trouble="other", message=first_line(text) or section.why)
    return Smi(path)


@dataclass(frozen=True)
class SmiLog:
    """What one form of nvidia-smi's output says about the whole host."""

    driver: str | None = None
    cuda: str | None = None
    smi_version: str | None = None
    gpus: tuple[Gpu, ...] = ()


_TABLE_GPU = re.compile(
    r"^\|\s+(?P<index>\d{1,3})\s+(?P<name>\S.*?)\s{1,}(?P<persistence>On|Off|N/A|ERR!)\s*\|"
    r"\s*(?P<bus>[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s+\S+\s*\|\s*(?P<ecc>\S+)\s*\|"
)
_TABLE_MEMORY = re.compile(r"\|\s*(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB\s*\|\s*(?P<util>\S+)\s")
_TABLE_PROCESS = re.compile(r"^\|\s+(\d{1,3})\s+\S+\s+\S+\s+(\d{1,10})\s+\S+\s+(\S.*?)\s+(\d+)MiB\s*\|$")


def parse_smi_table(text: str) -> SmiLog:
    """The plain table, which is all that some hosts give: header words and widths differ by version."""
    driver = re.search(r"(?:Driver|KMD) Version:\s*(\d[\d.]*)", text)
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d[\d.]*)", text)
    version = re.search(r"NVIDIA-SMI\s+(\d[\d.]*)", text)
    gpus: list[Gpu] = []
    processes: dict[int, list[GpuProcess]] = {}
    in_gpus, in_processes = True, False
    for line in text.splitlines():
        if "Processes:" in line:
            in_gpus, in_processes = False, True
        elif "MIG devices:" in line:
            in_gpus = False
        row = _TABLE_GPU.match(line) if in_gpus else None
        memory = _TABLE_MEMORY.search(line) if in_gpus else None
        process = _TABLE_PROCESS.match(line) if in_processes else None
        if row:
            ecc = int_of(row["ecc"])
            state = {"On": True, "Off": False}.get(row["persistence"])
            gpus.append(
                Gpu(int(row["index"]), row["name"], bus=row["bus"], persistence=state, ecc_uncorrected=ecc)
            )
        elif memory and gpus:
            used, total = int_of(memory["used"]), int_of(memory["total"])
            gpus[-1] = replace(
                gpus[-1], memory_used=used, memory_total=total, utilization=int_of(memory["util"])
            )
        elif in_gpus and gpus and (mig := re.search(r"\|\s*(Enabled|Disabled)\*?\s*\|$", line)):
            gpus[-1] = replace(gpus[-1], mig=mig.group(1) == "Enabled")
        elif process:
            found = GpuProcess(int(process.group(2)), process.group(3), int_of(process.group(4)))
            processes.setdefault(int(process.group(1)), []).append(found)
    return SmiLog(
        driver=driver.group(1) if driver else None,
        cuda=cuda.group(1) if cuda else None,
        smi_version=version.group(1) if version else None,
        gpus=tuple(replace(gpu, processes=tuple(processes.get(gpu.index, ()))) for gpu in gpus),
    )


def parse_query_csv(text: str) -> tuple[dict[str, str], ...]:
    """Rows of `nvidia-smi --query-gpu … --format=csv`, by field name with the unit taken off."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(r"[a-z_.]+( \[\w+%?\])?(, |$)", line)), None)
    if start is None:
        return ()
    reader = csv.reader(io.StringIO("\n".join(lines[start:])), skipinitialspace=True)
    try:
        header = [re.sub(r"\s*\[.*?\]$", "", name) for name in next(reader)]
        rows = [dict(zip(header, row, strict=True)) for row in reader if len(row) == len(header)]
    except (csv.Error, StopIteration):
        return ()
    return tuple(rows) if len(header) > 1 else ()


def driver_of(rows: tuple[dict[str, str], ...]) -> list[str | None]:
    """The driver version that each row names."""
    return [value_of(row.get("driver_version")) for row in rows]


_ENABLED = {"Enabled": True, "Disabled": False, "Yes": True, "No": False}


def _gpu_of_row(position: int, row: Mapping[str, str]) -> Gpu:
    def text(name: str) -> str | None:
        return value_of(row.get(name))

    def number(name: str) -> int | None:
        return int_of(row.get(name))

    def switch(name: str) -> bool | None:
        return _ENABLED.get(text(name) or "")

    index = number("index")
    reasons = {name: raw.strip() for name, raw in row.items() if value_of(raw) is None}
    events = row.get("clocks_event_reasons.active", row.get("clocks_throttle_reasons.active"))
    return Gpu(
        index=position if index is None else index,
        name=text("name"),
        uuid=text("uuid"),
        bus=text("pci.bus_id"),
        compute_capability=text("compute_cap"),
        memory_total=number("memory.total"),
        memory_used=number("memory.used"),
        persistence=switch("persistence_mode"),
        mig=switch("mig.mode.current"),
        ecc=switch("ecc.mode.current"),
        ecc_uncorrected=number("ecc.errors.uncorrected.volatile.total"),
        ecc_uncorrected_lifetime=number("ecc.errors.uncorrected.aggregate.total"),
        remap_pending=switch("remapped_rows.pending"),
        remap_failed=switch("remapped_rows.failure"),
        compute_mode=text("compute_mode"),
        pstate=text("pstate"),
        utilization=number("utilization.gpu"),
        link_gen=number("pcie.link.gen.current"),
        link_gen_max=number("pcie.link.gen.max"),
        link_gen_device=number("pcie.link.gen.gpumax"),
        link_width=number("pcie.link.width.current"),
        link_width_max=number("pcie.link.width.max"),
        temperature=number("temperature.gpu"),
        power_draw=number_of(row.get("power.draw")),
        power_limit=number_of(row.get("power.limit")),
        power_default=number_of(row.get("power.default_limit")),
        power_max=number_of(row.get("power.max_limit")),
        event_reasons=int_of(events),
        reasons=reasons,
    )


def parse_smi_xml(text: str) -> tuple[SmiLog, str | None]:
    """`nvidia-smi -q -x`, and why it could not be read. Tags are looked up by name; unknown ones are left."""
    start = text.find("<?xml")
    if start < 0:
        return SmiLog(), first_line(text) or "nvidia-smi -q -x printed nothing"
    # A document type with entities has no business here and could be made to explode.
    if "<!ENTITY" in text:
        return SmiLog(), "the XML declares entities"
    try:
        root = ElementTree.fromstring(text[start:].strip())
    except ElementTree.ParseError as error:
        return SmiLog(), f"the XML is cut or damaged ({error})"
    driver = _first(root, "driver_version", "kmd_version")
    cuda = _first(root, "cuda_version", "cuda_umd_version")
    gpus = tuple(_gpu_of_xml(i, element) for i, element in enumerate(root.findall("gpu")))
    return SmiLog(driver=driver, cuda=cuda, gpus=gpus), None


def _first(element: ElementTree.Element, *paths: str) -> str | None:
    for path in paths:
        value = value_of(element.findtext(path))
        if value is not None:
            return value
    return None


def _gpu_of_xml(position: int, gpu: ElementTree.Element) -> Gpu:
    reasons: dict[str, str] = {}

    def text(*paths: str) -> str | None:
        value = _first(gpu, *paths)
        said = next((raw.strip() for path in paths if (raw := gpu.findtext(path))), "")
        if value is None and said:
            reasons[paths[0]] = said
        return value

    def number(*paths: str) -> int | None:
        return int_of(text(*paths))

    def switch(*paths: str) -> bool | None:
        return _ENABLED.get(text(*paths) or "")

    def total(folder: str) -> int | None:
        """Uncorrectable errors: newer drivers split SRAM by kind, older ones have one number."""
        found = [
            count
            for tag in (
                "sram_uncorrectable",
                "sram_uncorrectable_parity",
                "sram_uncorrectable_secded",
                "dram_uncorrectable",
            )
            if (count := int_of(gpu.findtext(f"ecc_errors/{folder}/{tag}"))) is not None
        ]
        return sum(found) if found else None

    repairs = [switch(f"ecc_errors/{tag}") for tag in ("channel_repair_pending", "tpc_repair_pending")]
    # here "None" is a value: nothing is asked for
    action = _first(gpu, "gpu_recovery_action", "gpu_recovery_action/action")
    pci = "pci/pci_gpu_link_info"
    power = "gpu_power_readings"
    return Gpu(
        index=position,
        name=text("product_name"),
        uuid=text("uuid"),
        bus=text("pci/pci_bus_id") or value_of(gpu.get("id")),
        memory_total=number("fb_memory_usage/total"),
        memory_used=number("fb_memory_usage/used"),
        persistence=switch("persistence_mode"),
        mig=switch("mig_mode/current_mig"),
        ecc=switch("ecc_mode/current_ecc"),
        ecc_uncorrected=total("volatile"),
        ecc_uncorrected_lifetime=total("aggregate"),
        remap_pending=switch("remapped_rows/remapped_row_pending"),
        remap_failed=switch("remapped_rows/remapped_row_failure"),
        repair_pending=None if all(r is None for r in repairs) else any(repairs),
        recovery_action=action,
        compute_mode=text("compute_mode"),
        pstate=text("performance_state"),
        utilization=number("utilization/gpu_util"),
        link_gen=number(f"{pci}/pcie_gen/current_link_gen"),
        link_gen_max=number(f"{pci}/pcie_gen/max_link_gen"),
        link_gen_device=number(f"{pci}/pcie_gen/max_device_link_gen"),
        link_width=number(f"{pci}/link_widths/current_link_width"),
        link_width_max=number(f"{pci}/link_widths/max_link_width"),
        temperature=number("temperature/gpu_temp"),
        power_draw=number_of(
            text(f"{power}/average_power_draw", f"{power}/power_draw", "power_readings/power_draw")
        ),
        power_limit=number_of(text(f"{power}/current_power_limit", "power_readings/power_limit")),
        power_default=number_of(text(f"{power}/default_power_limit", "power_readings/default_power_limit")),
        power_max=number_of(text(f"{power}/max_power_limit", "power_readings/max_power_limit")),
        fabric_state=text("fabric/state"),
        processes=tuple(_processes(gpu)),
        reasons=reasons,
    )


def _processes(gpu: ElementTree.Element) -> list[GpuProcess]:
    found = []
    for info in gpu.findall("processes/process_info"):
        pid = int_of(info.findtext("pid"))
        if pid is not None:
            name = value_of(info.findtext("process_name"))
            found.append(GpuProcess(pid, name, int_of(info.findtext("used_memory"))))
    return found


def merge_gpus(
    query: tuple[dict[str, str], ...], xml: tuple[Gpu, ...], table: tuple[Gpu, ...]
) -> tuple[Gpu, ...]:
    """One record a GPU from three sources, matched by bus or else by index; the first to know wins."""
    merged = [_gpu_of_row(i, row) for i, row in enumerate(query)]
    for source in (xml, table):
        if not merged:
            merged = list(source)
            continue
        by_bus = {_bus(gpu.bus): gpu for gpu in source if gpu.bus}
        by_index = {gpu.index: gpu for gpu in source}
        merged = [_filled(gpu, by_bus.get(_bus(gpu.bus)) or by_index.get(gpu.index)) for gpu in merged]
    return tuple(sorted(merged, key=lambda gpu: gpu.index))


def _bus(address: str | None) -> str:
    """A bus address without its domain's leading zeros, for comparing."""
    return (address or "").lower().lstrip("0")


def _filled(gpu: Gpu, other: Gpu | None) -> Gpu:
    if other is None:
        return gpu
    missing = {
        name: value
        for name, value in vars(other).items()
        if name not in ("index", "reasons") and getattr(gpu, name) in (None, ()) and value not in (None, ())
    }
    return replace(gpu, **missing, reasons={**other.reasons, **gpu.reasons})


def with_owners(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """The GPUs with what the host's own process table says about their processes."""
    known: dict[int, tuple[tuple[int, ...], str | None, str | None]] = {}
    for line in text.splitlines():
        fields = line.removeprefix("proc=").split("\t")
        pid = int_of(fields[0]) if line.startswith("proc=") and len(fields) == 5 else None
        if pid is not None:
            ancestors = tuple(int(word) for word in fields[1].split(",") if word.isdigit() and len(word) < 10)
            known[pid] = (ancestors, fields[3] or None, fields[4] or None)
    if not known:
        return gpus

    def told(process: GpuProcess) -> GpuProcess:
        if process.pid not in known:
            return process
        ancestors, exe, cwd = known[process.pid]
        return replace(process, ancestors=ancestors, exe=exe, cwd=cwd)

    return tuple(replace(gpu, processes=tuple(told(process) for process in gpu.processes)) for gpu in gpus)


def parse_driver(section: Section) -> DriverFacts:
    """Modules, device nodes and libraries of the driver."""
    pairs = section.pairs()
    proc = pairs.get("proc", "")
    from_proc = re.search(r"\b(\d{3}\.\d[\d.]*)\b", proc)
    libcuda = pairs.get("library.libcuda.so.1") or None
    return DriverFacts(
        module_version=pairs.get("module") or (from_proc.group(1) if from_proc else None),
        open_module=("Open Kernel Module" in proc) if proc else None,
        libcuda=libcuda,
        libcuda_version=_library_version(libcuda),
        libml_version=_library_version(pairs.get("library.libnvidia-ml.so.1")),
        modules=tuple(key.removeprefix("loaded.") for key in pairs if key.startswith("loaded.")),
        nodes={
            key.removeprefix("node."): value == "yes"
            for key, value in pairs.items()
            if key.startswith("node.")
        },
        persistenced=yes(pairs.get("persistenced")),
        fabricmanager=pairs.get("fabricmanager") or None,
        hmm_disabled={"Y": True, "1": True, "N": False, "0": False}.get(pairs.get("hmm_disabled", "")),
        iommu_groups=int_of(pairs.get("iommu_groups")),
        env={key.removeprefix("env."): value for key, value in pairs.items() if key.startswith("env.")},
    )


def _library_version(path: str | None) -> str | None:
    match = re.search(r"\.so\.(\d{3}\.[\d.]*\d)$", path or "")
    return match.group(1) if match else None


def parse_pci(text: str) -> tuple[PciGpu, ...]:
    """GPUs from sysfs."""
    found = []
    bridges: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        words = line.removeprefix("pci=").split()
        if line.startswith("pci=") and len(words) == 5:
            address, device, numa, driver, iommu = words
            found.append(PciGpu(address, value_of(device), int_of(numa), value_of(driver), value_of(iommu)))
        elif line.startswith("above=") and words:
            bridges[words[0].removeprefix("above=")] = tuple(words[1:])
    return tuple(replace(gpu, bridges=bridges.get(gpu.address)) for gpu in found)


_STAMP = re.compile(r"(?:log=)?\[\s*(\d{1,12}\.\d{1,9})\]")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{7,16})\): (\d{1,3}),?\s*(.*)$")


def parse_kernel_log(section: Section) -> tuple[tuple[Xid, ...] | None, str | None]:
    """Xid lines of the kernel's log, oldest first; None with the reason when it may not be read."""
    if not section.present or section.timed_out:
        return None, section.why
    if section.pairs().get("source", "denied") == "denied":
        return None, "the kernel's log may not be read by this user or in this container"
    xids = [
        Xid(
            match.group(1),
            int(match.group(2)),
            match.group(3).strip()[:200],
            float(stamp.group(1)) if (stamp := _STAMP.match(line)) else None,
        )
        for line in section.text.splitlines()
        if (match := _XID.search(line))
    ]
    return tuple(xids), None
