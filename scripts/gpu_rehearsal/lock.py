#!/usr/bin/env python3
"""Write the two locks of the GPU rehearsal: the engine's whole lock, and what a PyTorch image lacks of it.

    python scripts/gpu_rehearsal/lock.py vllm==0.26.0 --have PIP_LIST --drop NAME ... --pin NAME==VERSION ...

Like scripts/lock_engine.py, for a Python that is not here: uv resolves for CPython 3.12 on Linux, and prefers
the versions that `pip list` of the image (--have) shows, so that as little as possible must travel. Every
wheel is downloaded and hashed here. The first lock names all of them (inventories/recipes/locks), the second
(--beside) only those that the image does not have at just that version, less --host-has.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import lock_engine as locks

PYTHON = "3.12"
SPOKEN = "CPython 3.12 on linux_x86_64"
HERE = Path(__file__).resolve().parent
REASONS = {
    "nvidia-cutlass-dsl-libs-cu12": "the library for CUDA 12; the one for CUDA 13 is in the lock",
}


def pip_list(text: str) -> dict[str, str]:
    """Name -> version in what `pip list` printed."""
    rows = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)\s+(\d[\w.!+]*)\s*$", text)
    return {locks.canonical(name): version for name, version in rows if name != "pip"}


def resolve(given: argparse.Namespace, have: dict[str, str], scratch: Path) -> list[str]:
    """`name==version` of everything, as uv chooses it for the target."""
    wanted, chosen, pins = scratch / "wanted.in", scratch / "chosen.txt", scratch / "pins.txt"
    wanted.write_text(given.engine + "\n")
    pins.write_text("\n".join(given.pin) + "\n")
    # uv keeps the versions of an output file that is already there, where they fit
    chosen.write_text("".join(f"{name}=={version}\n" for name, version in sorted(have.items())))
    words = [given.uv, "pip", "compile", str(wanted), "--constraint", str(pins), "--python-version", PYTHON]
    words += [
        "--python-platform",
        f"x86_64-manylinux_{given.glibc.replace('.', '_')}",
        "--only-binary",
        ":all:",
    ]
    words += ["--no-header", "--no-annotate", "--quiet", "--output-file", str(chosen)]
    subprocess.run(words, check=True, stdout=sys.stderr)
    return [line.split(";")[0].strip() for line in chosen.read_text().splitlines() if "==" in line]


def download(pins: list[str], wheels: Path, glibc: str, scratch: Path) -> None:
    """Every wheel into `wheels`; those that are there are not fetched again."""
    listed = scratch / "pinned.txt"
    listed.write_text("\n".join(pins) + "\n")
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON]
    words += ["--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    words += locks.platform_options((2, int(glibc.partition(".")[2])))
    locks.pip(*words, "--find-links", str(wheels), "--dest", str(wheels), "-r", str(listed))


def command_line(given: argparse.Namespace) -> str:
    """The command that writes both locks again, wrapped for a comment."""
    words = ["python scripts/gpu_rehearsal/lock.py", given.engine, f"--have {given.have}"]
    words += [f"--pin {pin}" for pin in given.pin] + [f"--drop {name}" for name in given.drop]
    words += [f"--host-has {name}" for name in given.host_has] + [f"--take {name}" for name in given.take]
    lines = textwrap.wrap(
        " ".join(word.replace(" ", "\0") for word in words),
        locks.WIDTH,
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    return " \\\n".join(lines).replace("\0", " ")


def main() -> int:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", metavar="NAME==VERSION")
    parser.add_argument("--have", required=True, type=Path, help="what `pip list` prints on the image")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--drop", action="append", default=[], metavar="NAME", help="in neither lock")
    parser.add_argument(
        "--host-has", action="append", default=[], metavar="NAME", help="not in the second lock"
    )
    parser.add_argument("--take", action="append", default=[], metavar="NAME", help="in it all the same")
    parser.add_argument("--glibc", default="2.31")
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--wheels", type=Path, required=True, help="where the downloads stay")
    given = parser.parse_args()
    unexplained = sorted(set(given.drop) - set(REASONS))
    if unexplained:
        parser.error(f"--drop {unexplained[0]}: give the reason in REASONS of this script first")
    locks.REASONS.update(REASONS)
    have = pip_list(given.have.read_text())
    given.wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-lock-") as folder:
        chosen = [
            p for p in resolve(given, have, Path(folder)) if locks.requirement_name(p) not in given.drop
        ]
        download(chosen, given.wheels, given.glibc, Path(folder))
    wanted = dict(pin.split("==") for pin in chosen)
    wanted = {locks.canonical(name): version for name, version in wanted.items()}
    files = {}
    for wheel in given.wheels.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        if wanted.get(locks.canonical(name)) == version:
            files[locks.canonical(name)] = wheel
    missing = sorted(set(wanted) - set(files))
    if missing:
        raise SystemExit(f"error: no wheel came for {', '.join(missing)}")
    entries = sorted((locks.locked(wheel) for wheel in files.values()), key=lambda entry: entry.name)
    name, version = given.engine.split("==")
    whole = locks.LOCKS / f"{locks.canonical(name)}-{version}-cu130-py312-linux_x86_64.txt"
    command = command_line(given)
    whole.write_text(locks.render(given.engine, entries, given.drop, command, SPOKEN))
    left = [
        entry
        for entry in entries
        if entry.name in given.take
        or (have.get(entry.name) != entry.version and entry.name not in given.host_has)
    ]
    beside = HERE / "beside-torch.lock"
    beside.write_text(
        f"# What an image with PyTorch 2.11 for CUDA 13 lacks of {whole.name}: {len(left)} wheels,"
        f" {sum(entry.size for entry in left):,} bytes.\n"
        + "".join(f"#     {line}\n" for line in command.split("\n"))
        + "".join(
            f"{e.name}=={e.version} \\\n    --hash=sha256:{e.sha256}\n    # {e.file} {e.size}\n" for e in left
        )
    )
    print(whole, beside, shlex.quote(str(len(left))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
