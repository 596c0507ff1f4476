#!/usr/bin/env python3
"""Write the lock of a source build's environment: every package that the tree asks for, each with its hashes.

Runs on the host with any Python >= 3.8, standard library only. With --stdin, one JSON object:

    src            the source tree                                                        required
    requirements   requirement files of the tree, relative to it                          required
    python         the environment's Python                                               required
    uv             the uv program                                                          required
    lock           the lock to write                                                      required
    drop_lines     regular expressions; each must match exactly one line of the files, which is left out
    pinned         [{"package", "version", "sha256", "file"}]: wheels that are had by hash, not resolved
    pinned_folder  folder that holds them
    torch_backend  uv's --torch-backend (cu130), or null
    torch_index    another index for PyTorch's packages, used instead of torch_backend
    index_url, extra_index_urls, find_links, offline, cache

uv resolves; nothing is installed here: the lock is installed by install_wheels.py, which checks every wheel
against it. The pinned wheels are entered with their own hash and version.

stdout: {"packages", "lock_sha256", "dropped": [...], "torch"} or {"error": {"id", "what", "file", "fix"}}
with exit status 1. Ids: usage (status 2), drop_lines, resolve, network, missing, disk_full, permission,
system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Tuple

try:
    from .shared import Problem, of_the_system, redact
    from .wheel_lock import canonical
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import Problem, of_the_system, redact  # type: ignore[import-not-found,no-redef]
    from wheel_lock import canonical  # type: ignore[import-not-found,no-redef]

POSIX = {"[[:space:]]": r"\s", "[[:digit:]]": r"\d", "[[:alnum:]]": "[A-Za-z0-9]", "[[:alpha:]]": "[A-Za-z]"}


def as_python(expression: str) -> "re.Pattern[str]":
    """A POSIX extended expression, as grep -E takes it, for Python."""
    for posix, python in POSIX.items():
        expression = expression.replace(posix, python)
    try:
        return re.compile(expression)
    except re.error as error:
        raise Problem(
            "drop_lines", "%r is not an expression: %s" % (expression, error), "correct the recipe"
        ) from error


def filtered(texts: Dict[str, str], expressions: List[str]) -> Tuple[Dict[str, str], List[str]]:
    """The texts without the lines that the expressions name, and those lines.

    Every expression must match exactly one line: none means that the tree has changed or the expression is
    garbled, several that it takes away too much.
    """
    dropped: List[str] = []
    left = dict(texts)
    for expression in expressions:
        pattern = as_python(expression)
        hits = [(name, line) for name in texts for line in texts[name].splitlines() if pattern.search(line)]
        if len(hits) != 1:
            what = "%r matches %d lines of %s, not exactly one" % (expression, len(hits), ", ".join(texts))
            raise Problem("drop_lines", what, "compare the recipe's drop_lines with the tree's file")
        name, line = hits[0]
        left[name] = "\n".join(text for text in left[name].splitlines() if text != line) + "\n"
        dropped.append(line)
    return left, dropped


def pinned_lines(text: str, pinned: List[Dict[str, Any]]) -> str:
    """A requirement that contradicts a pinned wheel is a Problem; the text itself stays."""
    for pin in pinned:
        name = re.sub(r"[-_.]+", "[-_.]", pin["package"])
        found = re.search(r"(?mi)^\s*%s\s*==\s*([^\s;#]+)" % name, text)
        if found and found[1] != pin["version"]:
            what = "the tree asks for %s %s, the recipe pins %s" % (pin["package"], found[1], pin["version"])
            raise Problem("resolve", what, "pin the wheel of the version that the tree asks for")
    return text


def uv_argv(request: Dict[str, Any], inputs: List[str], out: str) -> List[str]:
    """The resolver's command line."""
    argv = [request["uv"], "pip", "compile", *inputs, "--output-file", out, "--python", request["python"]]
    argv += ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
    argv += ["--no-emit-find-links", "--only-binary", ":all:", "--no-progress", "--no-config"]
    for pin in request["pinned"]:
        argv += ["--no-emit-package", pin["package"]]
    if request["pinned"]:
        argv += ["--find-links", request["pinned_folder"]]
    for place in request["find_links"]:
        argv += ["--find-links", place]
    if request["offline"]:
        return [*argv, "--no-index", "--offline"]
    if request["index_url"]:
        argv += ["--default-index", request["index_url"]]
    extra = [*request["extra_index_urls"]]
    if request["torch_index"]:
        extra.insert(0, request["torch_index"])
    elif request["torch_backend"]:
        argv += ["--torch-backend", request["torch_backend"]]
    for url in extra:
        argv += ["--index", url]
    # an index beside the first one may hold old copies of common packages
    return [*argv, "--index-strategy", "unsafe-best-match"] if extra else argv


def run(argv: List[str], env: Dict[str, str]) -> Tuple[int, List[str]]:
    """Run the resolver, its lines to the log. Returns status and the last lines."""
    lines: List[str] = []
    began = shown = time.monotonic()
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            if not line.startswith("    --hash") and not re.match(r"\S+==\S+ \\$", line):
                lines = [*lines[-40:], line]
                print(redact(line), file=sys.stderr, flush=True)
            if time.monotonic() - shown > 1:
                shown = time.monotonic()
                state = {"phase": "resolve", "done": 0, "total": 0, "unit": "packages",
                         "note": "%d s" % (shown - began)}  # fmt: skip
                print("#progress " + json.dumps(state), file=sys.stderr, flush=True)
        return child.wait(), lines


def entries(text: str) -> Dict[str, str]:
    """Version of each package in a lock."""
    return {
        canonical(name): version
        for name, version in re.findall(r"(?m)^([A-Za-z0-9][\w.\[\],-]*?)==([^\s;\\]+)", text)
    }


def bring_about(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the lock; the answer document."""
    texts = {}
    for name in request["requirements"]:
        path = os.path.join(request["src"], name)
        try:
            with open(path, encoding="utf-8") as stream:
                texts[name] = stream.read()
        except OSError as error:
            raise Problem(
                "missing", "the tree has no %s" % name, "correct the recipe's requirements", path
            ) from error
    left, dropped = filtered(texts, request["drop_lines"])
    inputs = []
    for name, text in left.items():
        pinned_lines(text, request["pinned"])
        # beside the original: `-r common.txt` in it is relative
        stem, suffix = os.path.splitext(os.path.join(request["src"], name))
        path = stem + "-rackwright" + suffix
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        inputs.append(path)
    out = request["lock"] + ".resolved"
    os.makedirs(os.path.dirname(out), exist_ok=True)
    env = dict(
        os.environ, UV_NATIVE_TLS="1", UV_HTTP_TIMEOUT="600", UV_NO_CONFIG="1", UV_PYTHON_DOWNLOADS="never"
    )
    env["UV_CACHE_DIR"] = request["cache"] or os.path.join(os.path.dirname(out), ".uv-cache")
    if os.path.exists(out):
        os.unlink(out)
    status, lines = run(uv_argv(request, inputs, out), env)
    if status:
        words = " ".join(lines)
        full = re.search(r"No space left on device|[Qq]uota exceeded", words)
        network = re.search(r"(?i)failed to fetch|error sending request|dns error|timed out|connect", words)
        what = (
            "the tree's requirements cannot be resolved: "
            + " ".join(line.strip() for line in lines[-6:])[:600]
        )
        if full:
            raise Problem("disk_full", what, "free space there and run again", request["lock"])
        fix = "make the index reachable (index_url, torch_index_url)" if network else "read the log above"
        raise Problem("network" if network else "resolve", what, fix)
    with open(out, encoding="utf-8") as stream:
        text = stream.read()
    for pin in request["pinned"]:
        text += "%s==%s \\\n    --hash=sha256:%s\n    # %s %d\n" % (
            pin["package"], pin["version"], pin["sha256"], pin["file"], pin.get("bytes") or 0,
        )  # fmt: skip
    partial = request["lock"] + ".partial"
    with open(partial, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, request["lock"])
    os.unlink(out)
    versions = entries(text)
    return {
        "packages": len(versions),
        "lock_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "dropped": dropped,
        "torch": versions.get("torch"),
    }


DEFAULTS: Dict[str, Any] = {
    "drop_lines": [], "pinned": [], "pinned_folder": "", "torch_backend": None, "torch_index": None,
    "index_url": None, "extra_index_urls": [], "find_links": [], "offline": False, "cache": None,
}  # fmt: skip


def parse_request(text: str) -> Dict[str, Any]:
    """Check the parameters; a mistake is a Problem with id "usage"."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Problem("usage", "stdin is not JSON: %s" % error, "see --help") from error
    needed = {"src", "requirements", "python", "uv", "lock"}
    if not isinstance(given, dict) or needed - set(given) or set(given) - needed - set(DEFAULTS):
        raise Problem("usage", "needed: %s" % ", ".join(sorted(needed)), "see --help")
    return {**DEFAULTS, **given}


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        answer = bring_about(parse_request(sys.stdin.read()))
    except Problem as problem:
        print(json.dumps(problem.document()))
        return 2 if problem.id == "usage" else 1
    except OSError as error:
        print(json.dumps(of_the_system(error).document()))
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
