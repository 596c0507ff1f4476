"""Recordings for the stand-in nvidia-smi: a real H200 host, and hosts derived from it and from public logs.

    install("rtx-pro-6000-x4", folder)            # folder/nvidia-smi, to be put on PATH
    install("h200-x2", folder, mode="hang")       # …which then fails in one of the ways of the real one

`h200-x2` is a recording (tests/fixtures/h200x2). The others are derived: names, memory, addresses, driver and
links come from the public recordings named in tests/fixtures/public/*/INDEX.md, and the XML is the H200's
with those values put in. They say what a checker must make of such a host, not what one real host printed.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
Mode = Literal["hang", "hang-later", "mismatch", "no_driver", "no_devices", "access_lost", "gpu_lost"]

HEADER = (
    "index, name, uuid, pci.bus_id, compute_cap, memory.total [MiB], memory.used [MiB], driver_version, "
    "persistence_mode, ecc.mode.current, ecc.errors.uncorrected.volatile.total, mig.mode.current, "
    "pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, pcie.link.width.max, "
    "temperature.gpu, power.draw [W], power.limit [W], clocks_event_reasons.active"
)


def recorded(name: str) -> str:
    """A recorded output by its path under tests/fixtures."""
    return (FIXTURES / name).read_text("utf-8")


@dataclass(frozen=True)
class Profile:
    """The files of one host's recordings, and query fields that its tool does not know."""

    files: dict[str, str]
    unknown_fields: tuple[str, ...] = ()
    modes: dict[str, str] = field(default_factory=dict)


def _h200_topology() -> dict[str, str]:
    """The parts of the recorded topo.txt: matrix, two P2P matrices, NVLink states."""
    text = recorded("h200x2/topo.txt")
    first, *rest = text.split(" \t\x1b[4m" if "\x1b" in text else " \t[4m")
    p2p_read, last = (" \t[4m" + part for part in rest)
    p2p_write, _, nvlink = last.partition("GPU 0: ")
    return {
        "topo.txt": first,
        "p2p_read.txt": p2p_read,
        "p2p_write.txt": p2p_write,
        "nvlink.txt": "GPU 0: " + nvlink,
    }


def _h200_query() -> str:
    lines = recorded("h200x2/query.txt").splitlines()
    return "\n".join(lines[:3]) + "\n"


def csv_of(rows: list[dict[str, str]]) -> str:
    """A CSV in the recorded field order; fields that a row lacks are `[N/A]`."""
    names = [re.sub(r" \[.*", "", name) for name in HEADER.split(", ")]
    lines = [", ".join(row.get(name, "[N/A]") for name in names) for row in rows]
    return "\n".join([HEADER, *lines]) + "\n"


def xml_of(rows: list[dict[str, str]], cuda: str) -> str:
    """The recorded H200's XML with these GPUs' values put in."""
    text = recorded("h200x2/smi_q.xml")
    head, block, _ = re.split(r"(\t<gpu id=.*?</gpu>\n)", text, maxsplit=1, flags=re.S)
    head = re.sub(r"(<driver_version>).*?<", rf"\g<1>{rows[0]['driver_version']}<", head)
    head = re.sub(r"(<cuda_version>).*?<", rf"\g<1>{cuda}<", head)
    head = re.sub(r"(<attached_gpus>).*?<", rf"\g<1>{len(rows)}<", head)
    out = [head]
    for row in rows:
        values = {
            "product_name": row["name"],
            "uuid": row["uuid"],
            "pci_bus_id": row["pci.bus_id"],
            "current_mig": row["mig.mode.current"].strip("[]"),
            "current_ecc": row["ecc.mode.current"].strip("[]"),
            "current_power_limit": row["power.limit"],
            "default_power_limit": row["power.limit"],
            "max_power_limit": row["power.limit"],
        }
        gpu = re.sub(r'<gpu id="[^"]*">', f'<gpu id="{row["pci.bus_id"]}">', block)
        for tag, value in values.items():
            gpu = re.sub(rf"(<{tag}>)[^<]*<", rf"\g<1>{value}<", gpu, count=1)
        if row["ecc.mode.current"] != "Enabled":  # counters are N/A then, not 0
            gpu = re.sub(r"(<[sd]ram_\w+>)[^<]*<", r"\g<1>N/A<", gpu)
        if "RTX" in row["name"]:  # no NVLink fabric
            gpu = gpu.replace("<state>Completed<", "<state>N/A<").replace("<status>Success<", "<status>N/A<")
        memory = f"<fb_memory_usage>\n<total>{row['memory.total']}</total>\n<used>{row['memory.used']}</used>"
        gpu = re.sub(
            r"<fb_memory_usage>\s*<total>.*?</total>.*?<used>.*?</used>", memory, gpu, count=1, flags=re.S
        )
        out.append(gpu)
    return "".join(out) + "</nvidia_smi_log>\n"


def _rows_of_csv(text: str) -> list[dict[str, str]]:
    header, *lines = [line.split(", ") for line in text.splitlines() if line.strip()]
    names = [re.sub(r" \[.*", "", name) for name in header]
    return [dict(zip(names, line, strict=True)) for line in lines]


def _h20_rows() -> list[dict[str, str]]:
    text = recorded("public/B-h20/smi-8x-h20-96g-580.txt")
    buses = re.findall(r"\|\s+\d\s+NVIDIA H20 .*?\|\s+([0-9A-F]{8}:[0-9A-F]{2}:00\.0)", text)
    return [
        {
            "index": str(i), "name": "NVIDIA H20", "uuid": f"GPU-0000000{i}-0000-0000-0000-00000000000{i}",
            "pci.bus_id": bus, "compute_cap": "9.0", "memory.total": "97871 MiB", "memory.used": "0 MiB",
            "driver_version": "580.95.05", "persistence_mode": "Enabled", "ecc.mode.current": "Enabled",
            "ecc.errors.uncorrected.volatile.total": "0", "mig.mode.current": "[N/A]",
            "pcie.link.gen.current": "5", "pcie.link.gen.max": "5", "pcie.link.width.current": "16",
            "pcie.link.width.max": "16", "temperature.gpu": "33", "power.draw": "73.10 W",
            "power.limit": "500.00 W", "clocks_event_reasons.active": "0x0000000000000001",
        }
        for i, bus in enumerate(buses)
    ]  # fmt: skip


def _nvlink(count: int, names: list[str], links: int) -> str:
    lines = []
    for i in range(count):
        lines.append(f"GPU {i}: {names[i]} (UUID: GPU-0000000{i}-0000-0000-0000-00000000000{i})")
        lines += [f"\t Link {link}: 26.562 GB/s" for link in range(links)]
    return "\n".join(lines) + "\n"


def p2p_matrix(count: int, status: str = "OK") -> str:
    """A P2P matrix in the printed form, the same status between all pairs."""
    names = [f"GPU{i}" for i in range(count)]
    rows = [
        f" GPU{i}\t" + "\t".join("X" if i == j else status for j in range(count)) + "\t" for i in range(count)
    ]
    return (
        "\n".join([" \t" + "\t".join(names) + "\t", *rows])
        + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    )


def profile(name: str) -> Profile:
    """The recordings of one named host. Raises KeyError for a name that there is not."""
    if name == "h200-x2":
        files = {
            "smi.txt": recorded("h200x2/smi.txt"),
            "query.csv": _h200_query(),
            "smi_q.xml": recorded("h200x2/smi_q.xml"),
            **_h200_topology(),
        }
        return Profile(files)
    if name == "rtx-pro-6000-x4":
        query = recorded("public/A-rtx-pro-6000/query-4x-workstation-ecc-off.csv")
        files = {
            "smi.txt": recorded("public/A-rtx-pro-6000/smi-4x-workstation-580.txt"),
            "query.csv": query,
            "smi_q.xml": xml_of(_rows_of_csv(query), "13.0"),
            "topo.txt": recorded("public/A-rtx-pro-6000/topo-4x-node-sys.txt"),
            "p2p_read.txt": recorded("public/A-rtx-pro-6000/p2p-write-4x-ok.txt"),
            "p2p_write.txt": recorded("public/A-rtx-pro-6000/p2p-write-4x-ok.txt"),
            "nvlink.txt": "",
        }
        return Profile(files)
    if name == "h20-x8":
        rows = _h20_rows()
        files = {
            "smi.txt": recorded("public/B-h20/smi-8x-h20-96g-580.txt"),
            "query.csv": csv_of(rows),
            "smi_q.xml": xml_of(rows, "13.0"),
            "topo.txt": recorded("public/B-h20/topo-8x-h20-nv18-nic.txt"),
            "p2p_read.txt": p2p_matrix(8),
            "p2p_write.txt": p2p_matrix(8),
            "nvlink.txt": _nvlink(8, ["NVIDIA H20"] * 8, 18),
        }
        return Profile(files)
    if name == "old-tool":
        made = profile("h200-x2")
        unknown = (
            "compute_cap",
            "clocks_event_reasons.active",
            "remapped_rows.pending",
            "remapped_rows.failure",
        )
        return Profile(made.files, unknown)
    raise KeyError(name)


PROFILES = ("h200-x2", "rtx-pro-6000-x4", "h20-x8", "old-tool")


def install(name: str, folder: Path, mode: Mode | None = None) -> Path:
    """Put the stand-in with one host's recordings into a folder; returns the program's path."""
    made = profile(name)
    data = folder / "replay"
    data.mkdir(parents=True, exist_ok=True)
    for file, text in made.files.items():
        (data / file).write_text(text, "utf-8")
    failures = {
        "mismatch.txt": "nvml-mismatch-570.txt",
        "no_driver.txt": "smi-driver-not-loaded.txt",
        "access_lost.txt": "nvml-unknown-error-container.txt",
        "gpu_lost.txt": "device-handle-unknown-error.txt",
    }
    for file, source in failures.items():
        (data / file).write_text(recorded(f"public/D-failures/{source}"), "utf-8")
    (data / "unknown_fields").write_text("".join(f"{field}\n" for field in made.unknown_fields), "utf-8")
    (data / "mode").write_text(mode or "", "utf-8")
    (data / "calls").write_text("", "utf-8")
    program = folder / "nvidia-smi"
    shutil.copyfile(HERE / "nvidia-smi", program)
    program.chmod(0o755)
    return program
