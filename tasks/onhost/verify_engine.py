#!/usr/bin/env python3
"""Whether an installed engine is the one that was asked for, by its properties, not by its version string.

Run it with the environment's Python; standard library only. With --stdin, one JSON object, all optional:

    extensions   modules that must import (native code)
    ops          operators that must be registered, NAME or NAMESPACE.NAME (default namespace _C)
    imports      other modules that must import
    files        files that must be in site-packages, relative to it
    equal        [[distribution, distribution]]: versions that must be the same (without +local parts)
    versions     {distribution: version}
    cuda_major   the one CUDA major of every NVIDIA wheel and of torch
    gpus         how many devices torch must see
    capability   their compute capability, "12.0"

Native code can end a process, so each import runs in one of its own. Every failure says what it means.

stdout: {"checks": [{"id", "ok", "observed", "expected", "means"}], "versions", "seconds"}; on failure also
"error": {"id": "verify", "what", "fix"} and exit status 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from typing import Any, Dict, List, Optional

IMPORT = r"""
import importlib, json, sys
wanted = json.loads(sys.argv[1])
torch = None
if wanted["ops"]:
    import torch
found = {"file": None, "ops": {}}
for name in wanted["modules"]:
    found["file"] = getattr(importlib.import_module(name), "__file__", None)
for name in wanted["ops"]:
    space, _, op = name.rpartition(".")
    found["ops"][name] = hasattr(getattr(torch.ops, space or "_C"), op)
print("\n" + json.dumps(found))
"""

DEVICES = r"""
import json, torch
caps = [list(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())]
print("\n" + json.dumps({"caps": caps, "cuda": torch.version.cuda}))
"""


class Answer:
    """What a child process said: its last line as JSON, or why it said nothing."""

    def __init__(self, program: str, argument: str = "", timeout: float = 900) -> None:
        self.value: Optional[Dict[str, Any]] = None
        try:
            done = subprocess.run(
                [sys.executable, "-c", program, argument], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.why = "did not end in %d s" % timeout
            return
        errors = done.stderr.decode("utf-8", "replace").strip()
        if errors:
            print(errors[-3000:], file=sys.stderr, flush=True)
        if done.returncode < 0:
            self.why = "ended Python with %s" % signal.Signals(-done.returncode).name
        elif done.returncode:
            self.why = (errors.splitlines() or ["exit status %d" % done.returncode])[-1]
        else:
            self.why = ""
            self.value = json.loads(done.stdout.decode("utf-8", "replace").strip().splitlines()[-1])


def version_of(name: str) -> Optional[str]:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def public(version: Optional[str]) -> Optional[str]:
    """A version without its local part (+cu130)."""
    return version.split("+")[0] if version else None


def meaning(why: str) -> str:
    """What an import error of native code means."""
    if "undefined symbol" in why:
        return (
            "it was compiled against another torch than the one installed; build it again in this environment"
        )
    if re.search(r"libcudart\.so|libcuda\.so|cannot open shared object", why):
        return "a library that it needs is missing: the NVIDIA driver, or CUDA's wheels of another major"
    if "GLIBC" in why:
        return "it was compiled on a newer system than this one; build it here"
    if "SIGILL" in why:
        return "it was compiled for another processor"
    if "No module named" in why:
        return "the wheel does not hold it: the extension was not compiled (was the target device right?)"
    return "the extension is there and does not load; the message says why"


class Verifier:
    """Collects checks."""

    def __init__(self) -> None:
        self.checks: List[Dict[str, Any]] = []

    def add(self, identifier: str, good: bool, observed: Any, expected: Any, means: str = "") -> None:
        """One check; `means` says what its failure means."""
        self.checks.append(
            {"id": identifier, "ok": bool(good), "observed": observed, "expected": expected,
             "means": "" if good else means}
        )  # fmt: skip
        total = {
            "phase": "verify",
            "done": len(self.checks),
            "total": 0,
            "unit": "checks",
            "note": identifier,
        }
        print("#progress " + json.dumps(total), file=sys.stderr, flush=True)


def cuda_majors() -> List[str]:
    """CUDA majors of the NVIDIA wheels that are installed."""
    majors = set()
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        found = re.search(r"-cu(\d{2})$", name)
        # cutlass-dsl brings compilers for both majors and no library that a process loads
        if found and name.startswith("nvidia-") and "cutlass" not in name:
            majors.add(found[1])
    return sorted(majors)


def bring_about(request: Dict[str, Any]) -> Dict[str, Any]:
    """Check everything; the answer document."""
    began = time.monotonic()
    verify = Verifier()
    versions = {}
    for name, wanted in (request.get("versions") or {}).items():
        versions[name] = version_of(name)
        good = (versions[name] is not None and versions[name] in (wanted, public(wanted))) or public(
            versions[name]
        ) == wanted
        verify.add("version " + name, good, versions[name], wanted, "another install has changed it")
    for left, right in request.get("equal") or []:
        have = (version_of(left), version_of(right))
        versions[left], versions[right] = have
        good = have[0] is not None and public(have[0]) == public(have[1])
        means = "their kernels and their Python would not fit (vLLM issue 49804)"
        verify.add("%s == %s" % (left, right), good, "%s and %s" % have, "the same version", means)
    major = request.get("cuda_major")
    if major is not None:
        majors = cuda_majors()
        means = "wheels of two CUDA majors break each other's libraries (vLLM issue 48602)"
        verify.add("one CUDA major", set(majors) <= {str(major)}, ", ".join(majors) or "none", major, means)
    for name in request.get("files") or []:
        there = [site for site in sys.path if os.path.isfile(os.path.join(site, name))]
        means = "this engine has no kernels for this hardware; take a version that has them"
        verify.add("file " + name, bool(there), "there" if there else "missing", "there", means)
    for name in [*(request.get("extensions") or []), *(request.get("imports") or [])]:
        answer = Answer(IMPORT, json.dumps({"modules": [name], "ops": []}))
        seen = answer.value["file"] if answer.value else answer.why
        verify.add("import " + name, answer.value is not None, seen, "it imports", meaning(answer.why))
    if request.get("ops"):
        wanted = {"modules": request.get("extensions") or [], "ops": request["ops"]}
        answer = Answer(IMPORT, json.dumps(wanted))
        for name in request["ops"]:
            registered = bool(answer.value and answer.value["ops"].get(name))
            means = "the kernel was not compiled: the arch list or the CUDA toolkit left it out"
            seen = "registered" if registered else answer.why or "not registered"
            verify.add("operator " + name, registered, seen, "registered", means)
    if request.get("gpus"):
        answer = Answer(DEVICES)
        caps = answer.value["caps"] if answer.value else []
        means = "torch does not see the GPUs: driver, container devices or CUDA_VISIBLE_DEVICES"
        verify.add("devices", len(caps) >= request["gpus"], answer.why or len(caps), request["gpus"], means)
        if caps and request.get("capability"):
            found = sorted({"%d.%d" % tuple(cap) for cap in caps})
            means = "these are other GPUs than the engine was compiled for"
            verify.add(
                "compute capability", found == [request["capability"]], found, request["capability"], means
            )
    result: Dict[str, Any] = {
        "checks": verify.checks, "versions": versions, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    wrong = [check for check in verify.checks if not check["ok"]]
    if wrong:
        first = wrong[0]
        what = "%s: %s, expected %s" % (first["id"], first["observed"], first["expected"])
        more = "; also: " + ", ".join(check["id"] for check in wrong[1:]) if wrong[1:] else ""
        result["error"] = {"id": "verify", "what": what + more, "file": None, "fix": first["means"]}
    return result


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        request = json.loads(sys.stdin.read())
    except ValueError as error:
        print(json.dumps({"error": {"id": "usage", "what": str(error), "file": None, "fix": "see --help"}}))
        return 2
    result = bring_about(request)
    print(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
