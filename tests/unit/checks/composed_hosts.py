"""Hosts made of pieces: healthy ones, and single parts of them replaced."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.facts import HostFacts
from tasks.facts.cuda import CudaFacts, Toolkit
from tasks.facts.disk import DiskFacts, PathFacts
from tasks.facts.gpu import DriverFacts, GpuFacts, PciGpu, parse_gpu
from tasks.facts.net import Listener, NetFacts
from tasks.facts.system import CgroupFacts, CpuFacts, MemoryFacts, SystemFacts
from tasks.facts.text import split_sections
from tasks.facts.tools import PythonFacts, Tool, ToolFacts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "replay"))
from replay_profiles import profile

GIB = 1024**3


def place(path: str, **changes: Any) -> PathFacts:
    """A path on a roomy local disk."""
    base = PathFacts(
        path=path,
        at="/opt",
        exists=False,
        directory=True,
        writable=True,
        filesystem="/dev/vda",
        source="/dev/vda",
        mount="/",
        type="ext4",
        read_only=False,
        no_exec=False,
        total_bytes=500 * GIB,
        free_bytes=200 * GIB,
        free_inodes=9_000_000,
    )
    return replace(base, **changes)


SHM = place(
    "/dev/shm", at="/dev/shm", exists=True, filesystem="device 27", source="tmpfs", mount="/dev/shm",
    type="tmpfs",
    total_bytes=32 * GIB, free_bytes=32 * GIB,
)  # fmt: skip

HEALTHY = HostFacts(
    system=SystemFacts(
        sysname="Linux", kernel="6.8.0-45-generic", machine="x86_64", hostname="gpu1",
        os_name="Ubuntu 24.04.3 LTS", libc="glibc", libc_version="2.39",
        uid=0, user="root", sudo="root", pid1="systemd", systemd=True, systemd_state="running",
        systemd_user=True, linger=False, autodl=False, epoch=1000, clock_skew_s=0.4,
        nofile_soft=1024, nofile_hard=1048576, memlock_soft=8192, memlock_hard=8192, cmdline="",
    ),
    cpu=CpuFacts(model="AMD EPYC", cpus=64, usable=64, flags=frozenset({"avx2", "sse4_2"}), numa_nodes=2),
    memory=MemoryFacts(
        total=256 * GIB, available=240 * GIB, swap_total=0, swap_used=0, huge_pages=0
    ),
    cgroup=CgroupFacts(version=2),
    disk=DiskFacts({"/opt/rackwright": place("/opt/rackwright"), "/dev/shm": SHM}),
    net=NetFacts(listeners=(Listener(22, "0.0.0.0", 0),)),
    tools=ToolFacts(
        found={n: Tool(f"/usr/bin/{n}", "12.2") for n in ("gcc", "g++", "git", "make", "ninja", "curl")},
        pythons=(PythonFacts("/usr/bin/python3", "3.12.3", "/usr", True, True, True),),
    ),
    complete=True,
)  # fmt: skip


def gpu_facts(name: str, **texts: str) -> GpuFacts:
    """GPU facts of a replayed host, as the parser reads its recordings; `texts` replace sections.

    Kernel side composed: module, libraries and device nodes that fit the recording.
    """
    files = profile(name).files
    names = {
        "smi": "smi.txt", "query": "query.csv", "xml": "smi_q.xml", "topo": "topo.txt",
        "p2p_read": "p2p_read.txt", "p2p_write": "p2p_write.txt", "nvlink": "nvlink.txt",
    }  # fmt: skip
    parts = {key: files[file] for key, file in names.items()} | {"log": "source=dmesg"} | texts
    printed = "".join(f"@@rw:gpu.{key}\n{text}\n@@rc:0\n" for key, text in parts.items())
    facts = parse_gpu(split_sections(printed))
    nodes = {f"/dev/nvidia{gpu.index}": True for gpu in facts.gpus}
    nodes |= {"/dev/nvidiactl": True, "/dev/nvidia-uvm": True}
    kernel = DriverFacts(
        module_version=facts.driver, open_module=True, libcuda_version=facts.driver,
        libml_version=facts.driver, nodes=nodes, persistenced=True, iommu_groups=0,
    )  # fmt: skip
    pci = tuple(PciGpu((gpu.bus or "")[4:].lower(), driver="nvidia", iommu="identity") for gpu in facts.gpus)
    return replace(facts, kernel=kernel, pci=pci, acs_redirect=())


TOOLKIT = CudaFacts(
    nvcc_on_path="/usr/local/cuda/bin/nvcc",
    toolkits=(
        Toolkit(
            "/usr/local/cuda-13.0", "13.0", frozenset({"cuda_runtime.h", "cublas_v2.h", "curand.h"}), True
        ),
    ),
)


def gpu_host(name: str, **texts: str) -> HostFacts:
    """The healthy machine with the GPUs of a replayed host and a CUDA 13.0 toolkit."""
    return replace(HEALTHY, gpu=gpu_facts(name, **texts), cuda=TOOLKIT)
