#!/usr/bin/env python3
"""Pack the GPU rehearsal into pieces for a host that is reached only in small parcels.

    python scripts/gpu_rehearsal/pack.py --bundle BUNDLE --controller WHEELS [--cache FILE] --output DIR

BUNDLE is what `rackwright bundle` made; WHEELS holds the wheels of rackwright's own dependencies for the
host's Python; FILE has the kernel caches of an earlier run (`host.sh bring`). DIR/piece-01, piece-02, ...
hold at most --size MiB each; files that do not fit are cut. What is needed first (the controller, the tools,
the manifest) is in the first piece, so that the host can begin before the last one has come. Each piece has
the plan: every file with its parts and its SHA-256. A host puts them together with unpack.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

MIB = 1 << 20


def wanted(bundle: Path, controller: Path, cache: Path | None) -> list[tuple[str, Path]]:
    """(path on the host, file here), what is needed first in front, small before large."""
    manifest = json.loads((bundle / "manifest.json").read_text("utf-8"))
    first = [(f"controller/{wheel.name}", wheel) for wheel in sorted(controller.glob("*.whl"))]
    first.append(("bundle/manifest.json", bundle / "manifest.json"))
    rest = [("cache.tgz", cache)] if cache else []
    for item in sorted(manifest["files"], key=lambda item: int(item["bytes"])):
        row = (f"bundle/{item['path']}", bundle / item["path"])
        (first if item["part"] == "tools" else rest).append(row)
    return first + rest


def cut(files: list[tuple[str, Path]], out: Path, size: int) -> list[dict[str, object]]:
    """Write the pieces; returns the plan."""
    plan: list[dict[str, object]] = []
    number, room = 1, size
    for target, path in files:
        digest, parts = hashlib.sha256(), []
        with path.open("rb") as stream:
            left = path.stat().st_size
            while left or not parts:
                if room <= 0:
                    number, room = number + 1, size
                take = min(left, room)
                name = f"piece-{number:02d}/{len(plan):04d}.{len(parts):02d}"
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                data = stream.read(take)
                digest.update(data)
                (out / name).write_bytes(data)
                parts.append(name)
                left, room = left - take, room - take
        plan.append({"path": target, "sha256": digest.hexdigest(), "parts": parts})
    return plan


def main() -> int:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--controller", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="kernel caches of an earlier run")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", type=int, default=58, help="MiB a piece (default: 58)")
    given = parser.parse_args()
    shutil.rmtree(given.output, ignore_errors=True)
    given.output.mkdir(parents=True)
    plan = cut(wanted(given.bundle, given.controller, given.cache), given.output, given.size * MIB)
    pieces = sorted(path for path in given.output.iterdir() if path.is_dir())
    for piece in pieces:
        (piece / "plan.json").write_text(json.dumps(plan), "utf-8")
        print(piece, sum(path.stat().st_size for path in piece.iterdir()) // MIB, "MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
