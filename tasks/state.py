"""What rackwright itself has left on a host: read in the probe's one round trip, parsed here."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.installed import Installed, installed_section, parse_installed
from tasks.jobs import JobState, parse_status
from tasks.onhost.fetch_weights import WORK
from tasks.receipts import Receipt, parse_receipt
from tasks.remote import quote
from tasks.settings import Layout


@dataclass(frozen=True)
class HostState:
    """Receipts and cheap checks. What is missing is absent, never an error.

    `damaged`: receipts that are there and cannot be read. `installed`: units and programs by path.
    """

    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    sums: Mapping[str, str] = field(default_factory=dict)
    installed: Mapping[str, Installed] = field(default_factory=dict)
    model_stat: str | None = None
    model_bytes: int = 0
    foreign_root: bool = False
    ours: bool = False
    jobs: Mapping[str, JobState] = field(default_factory=dict)

    def has(self, flag: str) -> bool:
        """Whether something is in place: `lib`, `env`, `tools`, `engine`, `key`, `made-user`, …"""
        return flag in self.flags


def parts_folder(model_dir: str) -> str:
    """Where `onhost/fetch_weights.py` keeps the half files of a model."""
    parent, _, name = model_dir.rpartition("/")
    return f"{parent}/{WORK}/{name}/parts"


def state_section(layout: Layout, *, lib: str, model_dir: str, files: tuple[str, ...]) -> str:
    """The sh of the probe's section: receipts as base64, one a line, then `key=value` lines.

    `files` are the rendered files whose content is compared by SHA-256 (units, programs).
    """
    root, model = quote(layout.root), quote(model_dir)
    tests = {
        "lib": f"-f {quote(lib + '/.whole')}",
        "env": f"-f {quote(layout.env + '/.rackwright-env')} && -x {quote(layout.env + '/bin/python')}",
        "tools": f"-f {quote(layout.tools + '/.rackwright-env')} && -x {quote(layout.tools + '/bin/python')}",
        "engine": f"-x {quote(layout.env + '/bin/vllm')}",
        "broken-env": f"-e {quote(layout.env + '/.rackwright-installing')}",
        "broken-tools": f"-e {quote(layout.tools + '/.rackwright-installing')}",
        "key": f"-s {quote(layout.key_file)}",
        "uninstalling": f"-e {quote(layout.run + '/uninstalling')}",
        "made-user": f"-f {quote(layout.run + '/made-user')}",
    }
    lines = [
        f"for f in {quote(layout.receipts)}/*.json; do"
        ' [ -f "$f" ] && printf "receipt=%s %s\\n" "${f##*/}" "$(base64 <"$f" | tr -d "\\n")"; done',
        *(
            "if [ " + test.replace(" && ", " ] && [ ") + f" ]; then echo flag={flag}; fi"
            for flag, test in tests.items()
        ),
        f'if [ -d {root} ] && [ ! -e {root}/.rackwright ] && [ -n "$(ls -A {root} 2>/dev/null)" ];'
        " then echo flag=foreign-root; fi",
        f"[ -d {model} ] && echo model=$(cd {model} && find -L . -type f -printf '%P %s %T@\\n' 2>/dev/null"
        " | LC_ALL=C sort | sha256sum | cut -d' ' -f1)",
        # what is there of the model, half files beside it too
        f"echo model-bytes=$(find -L {model} {quote(parts_folder(model_dir))} -type f -printf '%s\\n'"
        " 2>/dev/null | { sum=0; while read -r n; do sum=$((sum + n)); done; echo $sum; })",
        *(f'[ -f {quote(path)} ] && echo "sum=$(sha256sum {quote(path)} 2>/dev/null)"' for path in files),
        installed_section(files),
    ]
    lines += [
        f"[ -e {root}/.rackwright ] && echo flag=ours",
        f'for d in {quote(layout.jobs)}/*/; do if [ -f {quote(lib)}/job.sh ] && [ -d "$d" ]; then'
        f' d=${{d%/}}; echo "job=${{d##*/}}"; sh {quote(lib)}/job.sh status "$d" 0; fi; done',
    ]
    return "\n".join(lines) + "\n:"


def parse_state(text: str) -> HostState:
    """What `state_section` printed. Damaged receipts are left out, so their steps run again."""
    receipts: dict[str, Receipt] = {}
    damaged: list[str] = []
    flags: set[str] = set()
    sums: dict[str, str] = {}
    installed: dict[str, Installed] = {}
    model_stat = None
    model_bytes = 0
    jobs: dict[str, list[str]] = {}
    job: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "receipt":
            name, _, encoded = value.partition(" ")
            try:
                receipt = parse_receipt(base64.b64decode(encoded).decode())
            except ValueError:
                receipt = None
            if receipt is not None and name == f"{receipt.step}.json":
                receipts[receipt.step] = receipt
            else:
                damaged.append(name)
        elif key == "flag":
            flags.add(value)
        elif key == "model":
            model_stat = value
        elif key == "model-bytes":
            model_bytes = int(value) if value.isdigit() else 0
        elif key == "sum":
            digest, _, path = value.partition("  ")
            sums[path] = digest
        elif key == "installed":
            try:
                path, found = parse_installed(value)
            except ValueError:
                continue
            installed[path] = found
        elif key == "job":
            job = jobs.setdefault(value, [])
        else:
            job.append(line)
    return HostState(
        receipts=receipts,
        damaged=tuple(damaged),
        flags=frozenset(flags - {"foreign-root", "ours"}),
        sums=sums,
        installed=installed,
        model_stat=model_stat,
        model_bytes=model_bytes,
        foreign_root="foreign-root" in flags,
        ours="ours" in flags,
        jobs={name: parse_status("\n".join(text)) for name, text in jobs.items()},
    )
