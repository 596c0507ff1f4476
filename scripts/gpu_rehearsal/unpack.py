#!/usr/bin/env python3
"""Put the pieces of pack.py together, on the host: `unpack.py PIECE_FOLDER STASH`.

May be called for the pieces in any order, and again. A file appears under STASH when all of its parts are
there and its SHA-256 is right; when every file has, STASH/all-here appears. Exit status 1 when a part is
damaged: its file is dropped, bring its pieces again. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path


def put_together(target: Path, sources: list[Path]) -> str:
    """Write the parts one after the other beside the target; returns the SHA-256."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".new").open("wb") as out:
        for source in sources:
            data = source.read_bytes()
            digest.update(data)
            out.write(data)
    return digest.hexdigest()


def main(piece: Path, stash: Path) -> int:
    """Take one piece in."""
    parts = stash / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for path in piece.iterdir():
        fresh = parts / f"{piece.name}.{path.name}.new"
        shutil.copyfile(path, fresh)
        fresh.replace(parts / f"{piece.name}.{path.name}")
    plan = json.loads((parts / f"{piece.name}.plan.json").read_text("utf-8"))
    whole, damaged = 0, []
    for item in plan:
        target = stash / item["path"]
        sources = [parts / part.replace("/", ".") for part in item["parts"]]
        if target.exists():
            whole += 1
        elif all(source.exists() for source in sources):
            fresh = target.with_name(target.name + ".new")
            right = put_together(target, sources) == item["sha256"]
            for source in sources:
                source.unlink()
            if right:
                fresh.replace(target)
                whole += 1
            else:
                fresh.unlink()
                damaged.append(item["path"])
    print(f"{piece.name}: {whole} of {len(plan)} files are whole", *damaged, sep="; damaged: ")
    if whole == len(plan):
        (stash / "all-here").touch()
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
