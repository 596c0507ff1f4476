#!/usr/bin/env python3
"""Have an engine's image in this host's Docker Engine, and prove that it is the one that was asked for.

Runs on the host with any Python >= 3.8 and the docker program, standard library only. With --stdin:

    image        NAME:TAG                                                                  required
    digest       the registry's digest of it (sha256:...), or null
    image_id     the image's own id, or null
    recorded     {"digest", "id"} that an earlier run saw under this name, or null
    replacement  what to use where the tag has been purged
    archives     `docker save` archives to load instead of pulling: [{"path", "sha256"}]
    mirrors      registries to pull from first (HOST or HOST/PREFIX); what they serve is compared
    offline      true: pull nothing
    bytes        room that the image needs
    versions     {distribution: version} that must be inside
    cuda_major   CUDA major of the torch inside
    gpus         how many GPUs a container of this image must see; 0: none is asked for

A digest is a promise: without one the digest that is seen is in the answer, and when it is told again as
`recorded` another one is refused. An archive is hashed before it is loaded: it does not hold the registry's
digest, so whoever made it has compared that one. An image is only looked at and never started as a service
here: versions by a container without network, GPUs by nvidia-smi in a container of this very image.

stdout: {"image", "ref", "id", "digest", "how", "versions", "cuda", "gpu", "gpus", "bytes", "changed",
"seconds"}, where `ref` is what to run and `gpu` how GPUs are given ("runtime", "cdi", "gpus" or null); or
{"error": {"id", "what", "file", "fix"}} with exit status 1. Ids: usage (status 2), docker, permission,
purged, unreachable, digest, disk_full, damaged, contents, toolkit, gpus, system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

try:
    from .shared import Problem, of_the_system
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import Problem, of_the_system  # type: ignore[import-not-found,no-redef]

TIMEOUT = 600
VERSIONS = r"""
import json, sys
from importlib import metadata
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
cuda = None
try:
    import torch
    cuda = torch.version.cuda
except Exception as error:
    print(error, file=sys.stderr)
print("\n" + json.dumps({"versions": found, "cuda": cuda}))
"""
ALWAYS = ("vllm", "torch", "flashinfer-python", "flashinfer-cubin")


def log(line: str) -> None:
    """A line for the log."""
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- pure


def repository(image: str) -> str:
    """An image's name without its tag."""
    head, _, last = image.rpartition("/")
    return (head + "/" if head else "") + last.split(":")[0]


def mirrored(image: str, mirror: str) -> str:
    """The same image at a registry's mirror. Official names get `library/` there."""
    name = image
    first, _, rest = image.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        name = rest
    elif not rest:
        name = "library/" + image
    return mirror.rstrip("/") + "/" + name


def spellings(image: str) -> Set[str]:
    """An image's name as a recipe may write it and as docker prints it."""
    short = re.sub(r"^(index\.)?docker\.io/(library/)?", "", image)
    return {image, short, short if ":" in short.rpartition("/")[2] else short + ":latest"}


def names_loaded(text: str) -> Set[str]:
    """The names that `docker load` gave."""
    return set(re.findall(r"(?m)^Loaded image: (\S+)", text))


def layers_done(lines: Dict[str, str]) -> Tuple[int, int]:
    """Layers that are finished, and all, from the last word that docker said of each."""
    finished = ("Pull complete", "Already exists")
    return sum(word in finished for word in lines.values()), len(lines)


def telling(text: str) -> str:
    """The line of docker's output that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("See 'docker", "Run 'docker"))]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["docker said nothing"])[-1]


def why_pull_failed(text: str, image: str, replacement: Optional[str]) -> Problem:
    """docker's words about a pull that failed, as a Problem."""
    last = telling(text)
    if re.search(r"manifest unknown|manifest for .* not found|not found: manifest|: not found", text):
        fix = "use %s in the recipe" % replacement if replacement else "choose a tag that the registry has"
        return Problem("purged", "the registry does not have %s any more: %s" % (image, last), fix)
    if re.search(r"no space left on device", text):
        return Problem(
            "disk_full", last, "free space where Docker keeps its images (docker info: Docker Root Dir)"
        )
    if re.search(r"denied|unauthorized", text):
        return Problem("unreachable", last, "check the name, or log in to the registry (docker login)")
    fix = "set registry_mirrors, or load the image from a bundle"
    return Problem("unreachable", "%s cannot be pulled: %s" % (image, last), fix)


def why_no_gpu(text: str, how: str) -> Problem:
    """docker's or nvidia-smi's words about a container without GPUs, as a Problem."""
    last = telling(text)
    if (
        "could not select device driver" in text
        or "nknown runtime" in text
        or "unknown or invalid runtime" in text
    ):
        fix = "install the NVIDIA Container Toolkit, then: nvidia-ctk runtime configure --runtime=docker"
        return Problem("toolkit", "Docker cannot hand GPUs to containers (%s): %s" % (how, last), fix)
    if "CDI" in text or "unresolvable" in text:
        fix = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        return Problem("toolkit", "Docker cannot resolve the GPUs' CDI names: %s" % last, fix)
    if "executable file not found" in text:
        fix = "check that the container toolkit injects driver utilities (NVIDIA_DRIVER_CAPABILITIES)"
        return Problem("gpus", "no nvidia-smi inside the image: %s" % last, fix)
    return Problem(
        "gpus", "the image does not see the GPUs (%s): %s" % (how, last), "check the driver: nvidia-smi"
    )


class Seen(NamedTuple):
    """An image as Docker has it."""

    id: str
    digests: Tuple[str, ...]
    bytes: int

    def digest_of(self, image: str) -> Optional[str]:
        """The digest under which the image's own repository serves it."""
        names = {
            repository(image),
            "docker.io/" + repository(image),
            "docker.io/library/" + repository(image),
        }
        for one in self.digests:
            name, _, digest = one.partition("@")
            if name in names:
                return digest
        return self.digests[0].partition("@")[2] if self.digests else None


def gpu_ways(runtimes: List[str], cdi: bool) -> List[str]:
    """How this Docker may give GPUs, the likeliest first."""
    ways = ["runtime"] if "nvidia" in runtimes else []
    if cdi:
        ways.append("cdi")
    return [*ways, "gpus"] if not ways else ways


def gpu_options(how: str) -> List[str]:
    """docker run's options for all GPUs."""
    return {
        "runtime": ["--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=all",
                    "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"],
        "cdi": ["--device", "nvidia.com/gpu=all"],
        "gpus": ["--gpus", "all"],
    }[how]  # fmt: skip


# ---------------------------------------------------------------- docker


def docker(*words: str, timeout: int = TIMEOUT) -> "subprocess.CompletedProcess[str]":
    """Run docker."""
    return subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", errors="replace", timeout=timeout, check=False,
    )  # fmt: skip


def look(image: str) -> Optional[Seen]:
    """An image that is here, or None."""
    done = docker("image", "inspect", "--format", "{{json .}}", image)
    if done.returncode:
        return None
    data = json.loads(done.stdout)
    return Seen(data["Id"], tuple(data.get("RepoDigests") or ()), int(data.get("Size") or 0))


def engine() -> Dict[str, Any]:
    """What Docker Engine says of itself."""
    if shutil.which("docker") is None:
        raise Problem("docker", "this host has no docker", "install Docker Engine, or choose another route")
    done = docker("info", "--format", "{{json .}}", timeout=60)
    try:
        info: Dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        info = {}
    errors = " ".join(info.get("ServerErrors") or []) or done.stderr.strip()
    if not info.get("ServerVersion"):
        if "permission denied" in errors.lower():
            raise Problem("permission", errors, "use root, or add this user to the docker group")
        raise Problem("docker", "Docker Engine does not answer: %s" % errors, "systemctl start docker")
    return info


def same_bytes(archive: str, sha256: str) -> None:
    """Hash an archive, showing how far it is. Problem when its bundle's manifest says another SHA-256."""
    digest, done, shown = hashlib.sha256(), 0, time.monotonic()
    try:
        with open(archive, "rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
                done += len(block)
                if time.monotonic() - shown >= 1:
                    shown = time.monotonic()
                    state = {"phase": "hash", "done": done, "total": total, "unit": "bytes",
                             "note": os.path.basename(archive)}  # fmt: skip
                    print("#progress " + json.dumps(state), file=sys.stderr, flush=True)
    except OSError as error:
        what = "%s cannot be read: %s" % (archive, error.strerror)
        raise Problem("damaged", what, "make the bundle anew", archive) from error
    if digest.hexdigest() != sha256:
        what = "%s has SHA-256 %s, the bundle's manifest says %s" % (archive, digest.hexdigest(), sha256)
        raise Problem("digest", what, "find out who changed it; make the bundle anew", archive)


def pull(ref: str, report_name: str) -> Tuple[bool, str]:
    """Pull with progress in layers. Returns whether it worked, and what docker said."""
    words: Dict[str, str] = {}
    tail: List[str] = []
    shown = 0.0
    with subprocess.Popen(
        ["docker", "pull", ref], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        assert child.stdout is not None
        pipe, rest = child.stdout.fileno(), b""
        while True:
            if select.select([pipe], [], [], 5.0)[0]:
                block = os.read(pipe, 65536)
                if not block:
                    break
                *lines, rest = (rest + block).split(b"\n")
                for raw in lines:
                    line = raw.decode("utf-8", "replace").strip()
                    layer = re.match(r"([0-9a-f]{12}): (.+)", line)
                    if layer:
                        words[layer[1]] = layer[2]
                    elif line:
                        tail = [*tail[-10:], line]
                        log(line)
            if time.monotonic() - shown >= 1:
                shown = time.monotonic()
                done, total = layers_done(words)
                state = {"phase": "pull", "done": done, "total": total, "unit": "layers", "note": report_name}
                print("#progress " + json.dumps(state), file=sys.stderr, flush=True)
        status = child.wait()
    if rest.strip():
        tail.append(rest.decode("utf-8", "replace").strip())
    return status == 0, "\n".join(tail)


# ---------------------------------------------------------------- the whole


def bring(request: Dict[str, Any], info: Dict[str, Any]) -> Tuple[Seen, str]:
    """The image here, from where it was had. Problem when nobody has the right one."""
    image, digest = request["image"], request["digest"]
    for name in [image, *([repository(image) + "@" + digest] if digest else [])]:
        seen = look(name)
        if seen and fits(seen, request):
            return seen, "here"
    if request["archives"]:
        loaded = ""
        for one in request["archives"]:
            archive = one["path"]
            same_bytes(archive, one["sha256"])
            log("loading %s" % archive)
            done = docker("load", "--quiet", "--input", archive, timeout=3600)
            if done.returncode:
                fix = "make the bundle anew"
                if "no space left" in done.stderr:
                    raise Problem(
                        "disk_full", done.stderr.strip(), "free space where Docker keeps its images"
                    )
                raise Problem(
                    "damaged", "%s cannot be loaded: %s" % (archive, done.stderr.strip()), fix, archive
                )
            loaded += done.stdout
        seen = look(image)
        # what had the name before is not what was proved
        if seen is None or not names_loaded(loaded) & spellings(image):
            raise Problem("damaged", "the archives do not hold %s" % image, "make the bundle anew")
        return seen, "archive"
    if request["offline"]:
        raise Problem(
            "unreachable", "%s is not here, and nothing may be pulled" % image, "put it into the bundle"
        )
    room(request, info)
    ref = repository(image) + "@" + digest if digest else image
    failure = None
    for source in [*(mirrored(ref, mirror) for mirror in request["mirrors"]), ref]:
        good, text = pull(source, image)
        if good:
            # the digest is docker's to check; the name is for people and for the next look
            docker("tag", source, image)
            seen = look(image)
            assert seen is not None
            return seen, "pulled" if source == ref else "mirror"
        failure = why_pull_failed(text, image, request["replacement"])
        log("%s: %s" % (source, failure.what))
    assert failure is not None
    raise failure


def fits(seen: Seen, request: Dict[str, Any]) -> bool:
    """An image that is here is the one of the pins; without pins any image of that name is (see `check`)."""
    if request["image_id"]:
        return bool(seen.id == request["image_id"])
    if request["digest"]:
        return any(one.endswith("@" + request["digest"]) for one in seen.digests)
    return True


def check(seen: Seen, how: str, request: Dict[str, Any]) -> None:
    """The pins, and what an earlier run saw under this name. Problem when it is another image."""
    image, recorded = request["image"], request["recorded"] or {}
    if request["image_id"] and seen.id != request["image_id"]:
        what = "%s has id %s, the recipe pins %s" % (image, seen.id, request["image_id"])
        raise Problem("digest", what, "find out who changed it; pull by digest")
    # an archive was proved by its own hash: loading gives no registry's digest
    if request["digest"] and how != "archive" and not fits(seen, request):
        have = ", ".join(seen.digests) or "none"
        what = "%s has digest %s, the recipe pins %s" % (image, have, request["digest"])
        raise Problem("digest", what, "find out who changed it; pull by digest")
    if recorded.get("id") and recorded["id"] != seen.id:
        what = "%s was image %s before and is %s now: the name was given to another image" % (
            image, recorded["id"], seen.id,
        )  # fmt: skip
        raise Problem("digest", what, "pin the digest that you mean in the recipe (engine.docker.digest)")


def room(request: Dict[str, Any], info: Dict[str, Any]) -> None:
    """Room for the image where Docker keeps its data, as far as that can be seen from here."""
    root = info.get("DockerRootDir") or ""
    try:
        stat = os.statvfs(root)
    except OSError:
        return
    free = stat.f_bavail * stat.f_frsize
    if request["bytes"] and free < request["bytes"]:
        what = "%.1f GB free in %s, the image needs %.1f GB" % (free / 1e9, root, request["bytes"] / 1e9)
        raise Problem("disk_full", what, "free space there, or move Docker's data-root", root)


def contents(ref: str, request: Dict[str, Any]) -> Dict[str, Any]:
    """Versions inside, by a container of its own without network. Problem when they are others."""
    names = json.dumps(sorted({*ALWAYS, *request["versions"]}))
    last = ""
    for python in ("python3", "python"):
        done = docker("run", "--rm", "--network", "none", "--entrypoint", python, ref, "-c", VERSIONS, names)
        if done.returncode == 0:
            break
        last = telling(done.stderr)
    else:
        raise Problem("contents", "no Python runs in the image: %s" % last, "this is no engine's image")
    found: Dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for name, wanted in request["versions"].items():
        have = found["versions"].get(name)
        if have is None or have.split("+")[0] != wanted.split("+")[0]:
            what = "the image holds %s %s, the recipe says %s" % (name, have, wanted)
            raise Problem("contents", what, "correct the recipe, or find out which image this is")
    if request["cuda_major"] is not None and str(found["cuda"]).split(".")[0] != str(request["cuda_major"]):
        what = "the image's torch is for CUDA %s, the recipe says %s" % (found["cuda"], request["cuda_major"])
        raise Problem("contents", what, "choose the image for that CUDA, or correct the recipe")
    return found


def gpus_seen(ref: str, wanted: int, info: Dict[str, Any]) -> Tuple[str, List[str]]:
    """How GPUs are given, and which ones a container of this image sees. Problem when too few."""
    cdi = any(
        name.startswith("nvidia") or "nvidia" in name
        for folder in info.get("CDISpecDirs") or ["/etc/cdi", "/var/run/cdi"]
        if os.path.isdir(folder)
        for name in os.listdir(folder)
    )
    failure = None
    for how in gpu_ways(list(info.get("Runtimes") or {}), cdi):
        argv = ["run", "--rm", "--network", "none", *gpu_options(how), "--entrypoint", "nvidia-smi", ref]
        done = docker(*argv, "--query-gpu=name", "--format=csv,noheader", timeout=180)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0 and len(names) >= wanted:
            return how, names
        text = done.stderr or done.stdout
        failure = why_no_gpu(text, how)
        if done.returncode == 0:
            what = "the image sees %d GPUs (%s), the recipe uses %d" % (len(names), how, wanted)
            failure = Problem("gpus", what, "check the driver, and which devices containers may have")
        log("%s: %s" % (how, failure.what))
    assert failure is not None
    raise failure


def bring_about(request: Dict[str, Any]) -> Dict[str, Any]:
    """Have the image, prove it; the answer document."""
    began = time.monotonic()
    info = engine()
    seen, how = bring(request, info)
    check(seen, how, request)
    digest = seen.digest_of(request["image"])
    # the id names exactly these bytes, whatever happens to the name later
    ref = seen.id
    found = contents(ref, request)
    gpu, names = gpus_seen(ref, request["gpus"], info) if request["gpus"] else (None, [])
    return {
        "image": request["image"], "ref": ref, "id": seen.id, "digest": digest, "how": how,
        "versions": {name: version for name, version in found["versions"].items() if version},
        "cuda": found["cuda"], "gpu": gpu, "gpus": names, "bytes": seen.bytes, "changed": how != "here",
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


DEFAULTS: Dict[str, Any] = {
    "digest": None, "image_id": None, "recorded": None, "replacement": None, "archives": [], "mirrors": [],
    "offline": False, "bytes": 0, "versions": {}, "cuda_major": None, "gpus": 0,
}  # fmt: skip


def parse_request(text: str) -> Dict[str, Any]:
    """Check the parameters; a mistake is a Problem with id "usage"."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Problem("usage", "stdin is not JSON: %s" % error, "see --help") from error
    if not isinstance(given, dict) or not isinstance(given.get("image"), str):
        raise Problem("usage", "image must be given", "see --help")
    unknown = sorted(set(given) - {*DEFAULTS, "image"})
    if unknown or given["image"].startswith("-"):
        raise Problem("usage", "unknown parameter: %s" % (unknown or ["image"])[0], "see --help")
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
    except subprocess.TimeoutExpired as error:
        what = "docker did not answer in %d s: %s" % (error.timeout, " ".join(error.cmd)[:120])
        print(json.dumps(Problem("docker", what, "systemctl restart docker").document()))
        return 1
    except OSError as error:
        print(json.dumps(of_the_system(error).document()))
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
