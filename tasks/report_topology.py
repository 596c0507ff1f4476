"""The host's topology as a drawing: sockets, PCIe switches and GPUs as boxes, what lies between as lines.

Pure. It reads what `facts.shown.topology_shown` writes (link kinds are those of `nvidia-smi topo -m`): NVLink
above the GPUs, as a bar where all are joined alike and as arcs where only some are; PCIe below them, a switch
where two GPUs share one (PIX, PXB), their socket (PHB, NODE), and the line between the sockets (SYS).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MOST_GPUS = 16

_PAIR = re.compile(r"GPU (\d{1,3}) to (\d{1,3})")
_SWITCH = ("PIX", "PXB")
# Sizes in the drawing's own units; one is a pixel on a desktop.
_GPU_WIDTH, _GPU_HEIGHT, _GAP, _SIDE, _RIM = 50, 44, 10, 2, 8
_BAR_HEIGHT, _SWITCH_HEIGHT, _SOCKET_HEIGHT, _RISE = 22, 24, 34, 26

Pair = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """A rectangle with a text: `kind` is gpu, nvlink, switch or socket."""

    kind: str
    text: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Line:
    """A line or an arc (`d` of an SVG path): `kind` is nvlink, pcie or sys; `text` is said on hovering."""

    kind: str
    d: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """What the page draws. `kinds` are the links that occur, for the legend; `rows` the matrix."""

    width: float
    height: float
    boxes: list[Box]
    lines: list[Line]
    gpus: list[int]
    between: Mapping[Pair, str]
    kinds: list[str]
    nvlink: str
    p2p: Mapping[str, str] = field(default_factory=dict)

    def cell(self, a: int, b: int) -> str:
        """What lies between two GPUs, as the tool says it."""
        return self.between.get((min(a, b), max(a, b)), "")


def drawing_of(topology: Any) -> Drawing | None:
    """The drawing of a report's `topology`; None where it has no links, or more GPUs than can be drawn."""
    found = topology if isinstance(topology, dict) else {}
    between = _pairs(found.get("links"))
    gpus = sorted({index for pair in between for index in pair})
    if not 2 <= len(gpus) <= MOST_GPUS:
        return None
    numa = _numa(found.get("numa"))
    sockets = _sockets(gpus, between, numa)
    order = [gpu for _, members in sockets for gpu in members]
    joined = {pair: kind for pair, kind in between.items() if kind.startswith("NV")}
    uniform = len(joined) == len(gpus) * (len(gpus) - 1) // 2 and len(set(joined.values())) == 1
    top = _SIDE + (_BAR_HEIGHT + _RISE if uniform else _arc_height(joined, order))
    x = _places(sockets)
    boxes = [Box("gpu", f"GPU {gpu}", x[gpu] - _GPU_WIDTH / 2, top, _GPU_WIDTH, _GPU_HEIGHT) for gpu in order]
    width = max(x.values()) + _GPU_WIDTH / 2 + _RIM + _SIDE
    lines: list[Line] = []
    if uniform:
        kind = next(iter(joined.values()))
        boxes.append(Box("nvlink", kind, _SIDE, _SIDE, width - 2 * _SIDE, _BAR_HEIGHT))
        lines += [
            Line("nvlink", f"M{x[gpu]:g} {_SIDE + _BAR_HEIGHT:g}V{top:g}", f"GPU {gpu}: {kind}")
            for gpu in order
        ]
    else:
        lines += [
            Line("nvlink", _arc(x[a], x[b], top), f"GPU {a}, GPU {b}: {kind}")
            for (a, b), kind in joined.items()
        ]
    below, bottom = _pcie(sockets, between, x, top + _GPU_HEIGHT, known=bool(numa) or not uniform)
    boxes += [part for part in below if isinstance(part, Box)]
    lines += [part for part in below if isinstance(part, Line)]
    return Drawing(
        width=width,
        height=bottom + _SIDE,
        boxes=boxes,
        lines=lines,
        gpus=order,
        between=between,
        kinds=sorted(set(between.values())),
        nvlink="all" if uniform else "some" if joined else "none",
        p2p={name: _said(found.get(name)) for name in ("p2p_read", "p2p_write") if _said(found.get(name))},
    )


def _pairs(links: Any) -> dict[Pair, str]:
    """Links by pair, the lower index first; what does not read as one is left out."""
    found = {}
    for key, kind in (links if isinstance(links, dict) else {}).items():
        match = _PAIR.fullmatch(str(key))
        if match and isinstance(kind, str) and kind.strip():
            a, b = sorted(int(number) for number in match.groups())
            if a != b:
                found[a, b] = kind.strip()[:12]
    return found


def _numa(value: Any) -> dict[int, str]:
    """NUMA node by GPU."""
    nodes = value if isinstance(value, dict) else {}
    return {
        int(match.group(1)): str(node)[:8]
        for key, node in nodes.items()
        if (match := re.fullmatch(r"GPU (\d{1,3})", str(key)))
    }


def _said(statuses: Any) -> str:
    """One word where all pairs have the same P2P status, else each status with its number of pairs."""
    words = [str(word) for word in statuses.values()] if isinstance(statuses, dict) else []
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return (
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} x {word}" for word, n in counts.items())
    )


def _sockets(
    gpus: list[int], between: Mapping[Pair, str], numa: Mapping[int, str]
) -> list[tuple[str, list[int]]]:
    """GPUs by socket: by their NUMA node, else by which are joined without crossing sockets."""
    if all(gpu in numa for gpu in gpus):
        nodes = sorted(set(numa.values()), key=lambda node: (len(node), node))
        groups = [(node, [gpu for gpu in gpus if numa[gpu] == node]) for node in nodes]
    else:
        near = _components(gpus, [pair for pair, kind in between.items() if kind != "SYS"])
        groups = [("", group) for group in near]
    # those that share a switch stand side by side
    pairs = [pair for pair, kind in between.items() if kind in _SWITCH]
    return [(node, [gpu for part in _components(group, pairs) for gpu in part]) for node, group in groups]


def _components(gpus: Iterable[int], pairs: Iterable[Pair]) -> list[list[int]]:
    """Sets of GPUs that pairs join, in order."""
    group = {gpu: {gpu} for gpu in gpus}
    for a, b in pairs:
        if a in group and b in group and group[a] is not group[b]:
            group[a] |= group[b]
            for member in group[b]:
                group[member] = group[a]
    return sorted({min(members): sorted(members) for members in group.values()}.values())


def _places(sockets: list[tuple[str, list[int]]]) -> dict[int, float]:
    """The middle of every GPU."""
    places: dict[int, float] = {}
    left = float(_SIDE + _RIM)
    for _, members in sockets:
        for gpu in members:
            places[gpu] = left + _GPU_WIDTH / 2
            left += _GPU_WIDTH + _GAP
        left += 2 * _GAP
    return places


def _arc(a: float, b: float, y: float) -> str:
    """A curve over the GPUs from one to another."""
    rise = y - _rise(abs(b - a))
    return f"M{a:g} {y:g}C{a:g} {rise:g} {b:g} {rise:g} {b:g} {y:g}"


def _rise(distance: float) -> float:
    return 24 + distance * 0.22


def _arc_height(joined: Mapping[Pair, str], order: list[int]) -> float:
    """Room above the GPUs for the highest arc."""
    if not joined:
        return 0
    steps = max(abs(order.index(a) - order.index(b)) for a, b in joined)
    return 0.75 * _rise(steps * (_GPU_WIDTH + _GAP) + 4 * _GAP)


def _pcie(
    sockets: list[tuple[str, list[int]]],
    between: Mapping[Pair, str],
    x: Mapping[int, float],
    top: float,
    *,
    known: bool,
) -> tuple[list[Box | Line], float]:
    """What lies below the GPUs, and where it ends. Nothing where NVLink hides it (`known` is false)."""
    if not known:
        return [], top
    switches = [
        group
        for _, members in sockets
        for group in _components(members, [p for p, kind in between.items() if kind in _SWITCH])
        if len(group) > 1
    ]
    shelf = top + (2 * _RISE + _SWITCH_HEIGHT if switches else _RISE)
    parts: list[Box | Line] = []
    under: dict[int, list[int]] = {gpu: group for group in switches for gpu in group}
    for group in switches:
        left, right = x[group[0]] - _GPU_WIDTH / 2, x[group[-1]] + _GPU_WIDTH / 2
        y = top + _RISE
        parts.append(Box("switch", "PCIe", left, y, right - left, _SWITCH_HEIGHT))
        kinds = {between.get((a, b), "") for a in group for b in group if a < b} - {""}
        middle = (left + right) / 2
        parts.append(Line("pcie", f"M{middle:g} {y + _SWITCH_HEIGHT:g}V{shelf:g}", " ".join(sorted(kinds))))
    for node, members in sockets:
        left, right = x[members[0]] - _GPU_WIDTH / 2 - _RIM, x[members[-1]] + _GPU_WIDTH / 2 + _RIM
        parts.append(Box("socket", node, left, shelf, right - left, _SOCKET_HEIGHT))
        for gpu in members:
            foot = top + _RISE if gpu in under else shelf
            parts.append(Line("pcie", f"M{x[gpu]:g} {top:g}V{foot:g}", f"GPU {gpu}"))
    middle_y = shelf + _SOCKET_HEIGHT / 2
    for (_, one), (_, other) in pairwise(sockets):
        start, end = x[one[-1]] + _GPU_WIDTH / 2 + _RIM, x[other[0]] - _GPU_WIDTH / 2 - _RIM
        parts.append(Line("sys", f"M{start:g} {middle_y:g}H{end:g}", "SYS"))
    return parts, shelf + _SOCKET_HEIGHT
