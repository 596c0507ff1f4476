"""The one probe: build its sh script, and turn what it printed into typed facts.

    request = ProbeRequest(root="/opt/rackwright", model_root="/data/models", ports=(8000,), want_gpu=True)
    script = build_probe(request)               # POSIX sh: needs no python, no root, writes nothing
    printed = <run `sh -c SCRIPT` on the host>  # its exit status is always 0; stdout is plain ASCII
    facts = parse_probe(printed, request, received_at=time.time())
    findings = run_checks(needs, facts)         # tasks.checks

The script is one argument of `sh -c` (about 25 KB; its parts are `tasks/facts/sh/*.sh`). It ends by itself:
every part has a deadline, and a program that cannot be killed (nvidia-smi on a dead GPU) is left behind
instead of waited for. `parse_probe` never raises, whatever it is given: what could not be read is None with
a reason beside it.

A section of one's own (receipts, jobs, the service) is a pair in `ProbeRequest.extra_sections`:
`("receipts", "cat /opt/rackwright/receipts/*.json")` -> `facts.extra["receipts"]`. The snippet is run by
`sh -c` under a deadline of 20 s; non-ASCII bytes arrive as `?`, and at most 512 KiB arrive.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks.facts.cuda import CudaFacts, DockerFacts, parse_cuda, parse_docker
from tasks.facts.disk import DiskFacts, parse_disk
from tasks.facts.gpu import GpuFacts, parse_gpu
from tasks.facts.net import NetFacts, parse_net
from tasks.facts.request import ProbeRequest, Unless
from tasks.facts.system import (
    CgroupFacts,
    CpuFacts,
    MemoryFacts,
    SystemFacts,
    UpgradeFacts,
    parse_cgroup,
    parse_cpu,
    parse_memory,
    parse_system,
    parse_upgrades,
)
from tasks.facts.text import Section, split_sections
from tasks.facts.tools import ToolFacts, parse_tools

__all__ = ["HostFacts", "build_probe", "facts_to_json", "parse_probe"]

_EXTRA_DEADLINE_S = 20
_EXTRA_BYTES = 512 * 1024
_END = "end"
_SH = Path(__file__).parent / "sh"
F = TypeVar("F")


@dataclass(frozen=True)
class HostFacts:
    """What one host is. Facts never judge.

    `complete` is False when the probe's end did not arrive; `reasons` names parts that gave no answer.
    """

    system: SystemFacts = field(default_factory=SystemFacts)
    cpu: CpuFacts = field(default_factory=CpuFacts)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    cgroup: CgroupFacts = field(default_factory=CgroupFacts)
    upgrades: UpgradeFacts = field(default_factory=UpgradeFacts)
    disk: DiskFacts = field(default_factory=DiskFacts)
    net: NetFacts = field(default_factory=NetFacts)
    tools: ToolFacts = field(default_factory=ToolFacts)
    gpu: GpuFacts = field(default_factory=GpuFacts)
    cuda: CudaFacts = field(default_factory=CudaFacts)
    docker: DockerFacts | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)


def build_probe(request: ProbeRequest) -> str:
    """The probe's script for one host.

    Raises ValueError for a name of an extra section that is not letters, digits, `.`, `_` or `-`.
    """
    lines = [_sh("prelude"), f"rw_want_gpu={'y' if request.want_gpu else ''}", _sh("system"), _sh("disk")]
    for i, path in enumerate(request.disk_paths):
        lines.append(f"rw disk.{i} 12 4096 rw_disk {shlex.quote(path)}")
    lines.append(_sh("tools"))
    if request.python:
        lines.append(f"rw python.site 10 2048 rw_python {shlex.quote(request.python)}")
    if request.env_python:
        python = shlex.quote(request.env_python)
        lines.append(f"if [ -x {python} ]; then rw env 15 8192 rw_packages {python}; else rw_none env; fi")
    if request.want_gpu:
        lines += [
            f"rw_smi_s={request.smi_deadline_s}",
            f"rw_env_python={shlex.quote(request.env_python or '')}",
        ]
        lines += [_sh("gpu"), _sh("cuda")]
    if request.want_docker:
        lines.append(_sh("docker"))
    for name, snippet in request.extra_sections:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError(f"extra section {name!r}: a name is letters, digits, '.', '_' or '-'")
        inner = f"t {_EXTRA_DEADLINE_S - 2} sh -c {shlex.quote(snippet)}"
        lines.append(f"rw x.{name} {_EXTRA_DEADLINE_S} {_EXTRA_BYTES} {inner}")
    lines.append(_sh("net"))
    if request.ports:
        lines.append(f"rw owners 8 8192 rw_owner {' '.join(f'{port:04X}' for port in request.ports)}")
    if request.endpoints:
        lines += _endpoint_lines(request)
    lines.append(f"rw {_END} 5 64 date +%s\nexit 0\n")  # the clock last: the probe itself takes seconds
    return "\n".join(lines)


def _sh(name: str) -> str:
    return (_SH / f"{name}.sh").read_text("utf-8")


def _endpoint_lines(request: ProbeRequest) -> list[str]:
    """All endpoints side by side, each printing one line."""
    calls = []
    for i, endpoint in enumerate(request.endpoints):
        words = (str(i), endpoint.url, str(request.endpoint_deadline_s))
        ask = f"rw_endpoint {' '.join(shlex.quote(word) for word in words)}"
        if endpoint.unless:
            spared = " && ".join(_unless(case) for case in endpoint.unless)
            ask = f"if {spared}; then rw_said {i} skip 0 ''; else {ask}; fi"
        calls.append(f"( rw_q=; {ask} ) &")
    deadline = 2 * request.endpoint_deadline_s + 4
    links = " ".join(shlex.quote(path) for path in request.links)
    return [f"rw_net() {{ rw_where_to {links}", *calls, "wait; }", f"rw net {deadline} 32768 rw_net"]


def _unless(case: Unless) -> str:
    wheels = " ".join(shlex.quote(name) for name in case.wheels)
    at_hand = f" || rw_at_hand {wheels}" if wheels else ""
    return f"{{ {{ {case.done}; }} >/dev/null 2>&1{at_hand}; }}"


def parse_probe(
    text: str, request: ProbeRequest | None = None, received_at: float | None = None
) -> HostFacts:
    """Facts from what the probe printed. Never raises.

    `received_at` (seconds since the epoch, by the controller) lets the host's clock be judged.
    """
    sections = split_sections(text)
    reasons: dict[str, str] = {}

    def read(name: str, parser: Callable[[], F], empty: F) -> F:
        try:
            return parser()
        except Exception as error:
            reasons[name] = f"the answer could not be read ({type(error).__name__}: {error})"
            return empty

    endpoints = tuple(endpoint.url for endpoint in request.endpoints) if request else ()
    if _END not in sections:
        reasons["*"] = "the probe was cut off: its last section is missing"
    reasons |= {name[2:]: s.why for name, s in sections.items() if name.startswith("x.") and s.timed_out}
    return HostFacts(
        system=read("system", lambda: parse_system(sections, received_at), SystemFacts()),
        cpu=read("cpu", lambda: parse_cpu(sections), CpuFacts()),
        memory=read("memory", lambda: parse_memory(sections), MemoryFacts()),
        cgroup=read("cgroup", lambda: parse_cgroup(sections), CgroupFacts()),
        upgrades=read("upgrades", lambda: parse_upgrades(sections), UpgradeFacts()),
        disk=read("disk", lambda: parse_disk(sections), DiskFacts()),
        net=read("net", lambda: parse_net(sections, endpoints), NetFacts()),
        tools=read("tools", lambda: parse_tools(sections), ToolFacts()),
        gpu=read("gpu", lambda: parse_gpu(sections, asked=bool(request and request.want_gpu)), GpuFacts()),
        cuda=read("cuda", lambda: parse_cuda(sections), CudaFacts()),
        docker=read("docker", lambda: parse_docker(sections), None),
        extra=_extra(sections),
        complete=_END in sections,
        reasons=reasons,
    )


def _extra(sections: Mapping[str, Section]) -> dict[str, str]:
    return {name[2:]: section.text for name, section in sections.items() if name.startswith("x.")}


def facts_to_json(facts: object) -> Any:
    """Facts as plain JSON values, for the report."""
    if is_dataclass(facts) and not isinstance(facts, type):
        return {key: facts_to_json(value) for key, value in asdict(facts).items()}
    if isinstance(facts, Mapping):
        return {str(key): facts_to_json(value) for key, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [facts_to_json(value) for value in facts]
    if isinstance(facts, (set, frozenset)):
        return sorted(facts_to_json(value) for value in facts)
    return facts
