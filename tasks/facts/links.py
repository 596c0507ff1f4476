"""How GPUs reach each other: nvidia-smi's matrices, NVLink states, ACS bits of the bridges."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tasks.facts.text import number_of, plain


@dataclass(frozen=True)
class Matrix:
    """A matrix of `nvidia-smi topo`: what lies between two GPUs, by their indices (each pair both ways).

    `numa` is the NUMA node of a GPU where the matrix has that column.
    """

    gpus: tuple[int, ...]
    between: Mapping[tuple[int, int], str]
    numa: Mapping[int, str] = field(default_factory=dict)

    def among(self, gpus: Collection[int] | None = None) -> set[str]:
        """What lies between these GPUs (all of them by default)."""
        those = self.gpus if gpus is None else gpus
        return {kind for (a, b), kind in self.between.items() if a in those and b in those}


@dataclass(frozen=True)
class NvLinks:
    """NVLinks by GPU: GB/s of each link that is up, and how many are down."""

    speeds: Mapping[int, tuple[float, ...]]
    inactive: Mapping[int, int]


def parse_matrix(text: str) -> Matrix | None:
    """A matrix of `nvidia-smi topo -m` or `-p2p`, or None when there is none.

    The header may be underlined with terminal escapes even in a pipe; rows of network cards are left out.
    """
    lines = [plain(line) for line in text.splitlines()]
    start = next(
        (i for i, line in enumerate(lines) if re.match(r"^\s*GPU\d+(\t|\s*$)", line) and "X" not in line), -1
    )
    if start < 0:
        return None
    columns = [name.strip() for name in lines[start].strip().split("\t")]
    between: dict[tuple[int, int], str] = {}
    numa: dict[int, str] = {}
    gpus: list[int] = []
    for line in lines[start + 1 :]:
        row = re.match(r"^\s*GPU(\d{1,3})\t(.*)$", line)
        if not row:
            continue
        own = int(row.group(1))
        gpus.append(own)
        for name, cell in zip(columns, row.group(2).split("\t"), strict=False):
            other = re.fullmatch(r"GPU(\d{1,3})", name)
            value = cell.strip()
            if other and value and value != "X":
                between[own, int(other.group(1))] = value
            elif name == "NUMA Affinity" and value and value != "N/A":
                numa[own] = value
    return Matrix(tuple(gpus), between, numa) if gpus else None


def parse_nvlink(text: str) -> NvLinks:
    """`nvidia-smi nvlink -s`: links that are up with their speed, and those that are not."""
    speeds: dict[int, list[float]] = {}
    inactive: dict[int, int] = {}
    gpu: int | None = None
    for line in plain(text).splitlines():
        head = re.match(r"GPU (\d{1,3}):", line)
        link = re.match(r"\s*Link \d{1,3}: (.*)$", line)
        if head:
            gpu = int(head.group(1))
            speeds.setdefault(gpu, [])
        elif link and gpu is not None:
            speed = number_of(link.group(1))
            if speed:
                speeds[gpu].append(speed)
            else:
                inactive[gpu] = inactive.get(gpu, 0) + 1
    return NvLinks({index: tuple(values) for index, values in speeds.items()}, inactive)


def parse_acs(text: str) -> tuple[str, ...] | None:
    """Bridges whose ACS redirects peer traffic; None when `lspci` shows no ACS line at all."""
    device = ""
    redirecting: list[str] = []
    seen = False
    for line in text.splitlines():
        head = re.match(r"^((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) ", line)
        if head:
            device = head.group(1)
        elif "ACSCtl:" in line:
            seen = True
            if "ReqRedir+" in line or "CmpltRedir+" in line:
                redirecting.append(device)
    return tuple(dict.fromkeys(redirecting)) if seen else None
