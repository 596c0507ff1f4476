#!/usr/bin/env python3
"""Write down which options an engine version's `serve` knows, so that a recipe's flags can be checked here.

    python scripts/snapshot_options.py 0.32.0 --program ENV/bin/vllm      # asks its own parser
    python scripts/snapshot_options.py 0.26.0 --wheel vllm-0.26.0-*.whl   # reads its source, runs nothing

The first way is the engine's word (`vllm serve --help=all`). The second is for versions that do not run on
this machine (CUDA wheels): every `--name` that is given to `add_argument` in vllm/engine/arg_utils.py and
the frontend's cli_args.py, and every field of the frontend's argument classes, which vLLM turns into
options by itself. With both, the second is compared with the first and the differences are printed.

The result goes to inventories/recipes/options/vllm-VERSION.txt: one option a line, without `--` and without
the `no-` twins of switches.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

OPTIONS = Path(__file__).resolve().parent.parent / "inventories" / "recipes" / "options"
# the frontend's has moved: entrypoints/openai/ in 0.26, launchers/ in 0.32, common/ in 0.33
SOURCES = re.compile(r"vllm/engine/arg_utils\.py|vllm/entrypoints/(openai|launchers|common)/cli_args\.py")
FRONTEND = re.compile(r"FrontendArgs$")


def options_of_help(text: str) -> set[str]:
    """Option names in the output of `--help=all`: what begins a line, with its aliases."""
    found: set[str] = set()
    for line in text.splitlines():
        if re.match(r"\s{1,4}-", line):
            head = re.split(r"\s{2,}\S", line.strip() + "  x")[0]
            found |= set(re.findall(r"--([a-z0-9][a-z0-9_-]*)", head))
    return {name for name in found if not (name.startswith("no-") and name[3:] in found)}


def options_of_source(text: str) -> set[str]:
    """Option names that a source file of the parser declares."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found |= {str(word)[2:] for word in words if str(word).startswith("--")}
        if isinstance(node, ast.ClassDef) and FRONTEND.search(node.name):
            names = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
            found |= {name.replace("_", "-") for name in names if not name.startswith("_")}
    return {name for name in found if not (name.startswith("no-") and name[3:] in found)}


def main() -> int:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="the engine's version")
    parser.add_argument("--program", type=Path, help="its vllm program")
    parser.add_argument("--wheel", type=Path, help="its wheel")
    given = parser.parse_args()
    by_help: set[str] = set()
    by_source: set[str] = set()
    if given.program:
        words = [str(given.program), "serve", "--help=all"]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        by_help = options_of_help(done.stdout)
        if done.returncode or not by_help:
            raise SystemExit(f"error: {' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    if given.wheel:
        with zipfile.ZipFile(given.wheel) as archive:
            for name in filter(SOURCES.fullmatch, archive.namelist()):
                by_source |= options_of_source(archive.read(name).decode())
    if not by_help | by_source:
        parser.error("name --program, --wheel or both")
    if by_help and by_source:
        print(f"only in --help: {sorted(by_help - by_source)}", file=sys.stderr)
        print(f"only in the source: {sorted(by_source - by_help)}", file=sys.stderr)
    read = "declarations in the wheel's arg_utils.py and cli_args.py"
    how = "vllm serve --help=all" if by_help else read
    names = sorted(by_help or by_source)
    OPTIONS.mkdir(exist_ok=True)
    output = OPTIONS / f"vllm-{given.version}.txt"
    head = f"# Options of `vllm serve`, vLLM {given.version}: {how}.\n"
    head += "# Written by scripts/snapshot_options.py.\n"
    output.write_text(head + "\n".join(names) + "\n")
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
