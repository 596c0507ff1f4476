"""An engine's source repository in small: the same shape as vLLM's, built in seconds.

What is the same: CMake and ninja driven by a setup.py of its own (job pools, MAX_JOBS over NVCC_THREADS,
FETCHCONTENT_BASE_DIR, per-component install), two native extensions, git dependencies declared in
CMakeLists.txt (by tag, through a variable) and below cmake/external_projects (by commit, with a submodule),
requirements/{common,cuda}.txt and requirements/build/cuda.txt with the one extra-index line, a version from
setuptools-scm. What is not: the extensions are a few lines of C against Python's stable ABI, `torch` is a
stand-in (an operator registry), and the `vllm` program is tests/standin/engine.py.

A compile step can be made slow or hungry on the host, by files that it reads: SLOW (seconds a step) and
HUNGRY (MiB that a step takes and holds).
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW, HUNGRY = "/srv/slow", "/srv/hungry"
UNITS = 24
VERSION = "20260717"
FLASHINFER = "0.6.14"
# what the build really uses, from an index; a mirror of the tests serves it
BUILD_TOOLS = ("cmake", "ninja", "setuptools", "setuptools-scm", "wheel", "packaging", "uv")

PYPROJECT = """\
[build-system]
requires = ["cmake>=3.26", "ninja", "packaging>=24.2", "setuptools>=77", "setuptools-scm>=8", "torch==2.11.0"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
dynamic = ["version"]
requires-python = ">=3.10"
[project.scripts]
vllm = "vllm.entry:run"
"""

SETUP = """\
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import torch  # the build needs it installed, as vLLM's does
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools_scm import get_version

HERE = Path(__file__).parent


class CMakeExtension(Extension):
    def __init__(self, name):
        super().__init__(name, sources=[], py_limited_api=True)


class cmake_build_ext(build_ext):
    def build_extensions(self):
        os.makedirs(self.build_temp, exist_ok=True)
        jobs = max(1, int(os.environ.get("MAX_JOBS", "1")) // int(os.environ.get("NVCC_THREADS", "1")))
        args = ["cmake", str(HERE), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                "-DVLLM_PYTHON_EXECUTABLE=" + sys.executable,
                "-DFETCHCONTENT_BASE_DIR=" + os.environ.get("FETCHCONTENT_BASE_DIR", str(HERE / ".deps")),
                "-DCMAKE_JOB_POOL_COMPILE:STRING=compile", "-DCMAKE_JOB_POOLS:STRING=compile=%d" % jobs]
        assert which("ninja"), "no ninja"
        subprocess.check_call(args + os.environ.get("CMAKE_ARGS", "").split(), cwd=self.build_temp)
        targets = [ext.name.split(".")[-1] for ext in self.extensions]
        build = ["cmake", "--build", ".", "-j=%d" % jobs] + ["--target=" + name for name in targets]
        subprocess.check_call(build, cwd=self.build_temp)
        for ext in self.extensions:
            prefix = Path(self.get_ext_fullpath(ext.name)).parent.parent.absolute()
            subprocess.check_call(["cmake", "--install", ".", "--prefix", str(prefix), "--component",
                                   ext.name.split(".")[-1]], cwd=self.build_temp)


setup(
    version=os.environ.get("VLLM_VERSION_OVERRIDE") or get_version(),
    packages=["vllm"],
    ext_modules=[CMakeExtension("vllm._C_stable_libtorch"), CMakeExtension("vllm._moe_C_stable_libtorch")],
    cmdclass={"build_ext": cmake_build_ext},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(vllm_extensions LANGUAGES C)
include(FetchContent)
# Keep in sync with the one below. GIT_TAG in a comment must not be read.
set(CUTLASS_REVISION "v4.4.2")
if(VLLM_CUTLASS_SRC_DIR)
  FetchContent_Declare(cutlass SOURCE_DIR ${VLLM_CUTLASS_SRC_DIR})
else()
  FetchContent_Declare(
      cutlass
      GIT_REPOSITORY @BASE@/cutlass.git
      # If the GIT_TAG above is updated to a commit hash, GIT_SHALLOW must be FALSE
      GIT_TAG ${CUTLASS_REVISION}
      GIT_PROGRESS TRUE
      GIT_SHALLOW TRUE
  )
endif()
FetchContent_MakeAvailable(cutlass)
include(cmake/external_projects/deepgemm.cmake)

execute_process(COMMAND ${VLLM_PYTHON_EXECUTABLE} -c
    "import sysconfig; print(sysconfig.get_path('include'), end='')" OUTPUT_VARIABLE PY_INCLUDE)
set_property(GLOBAL PROPERTY RULE_LAUNCH_COMPILE "sh ${CMAKE_SOURCE_DIR}/tools/launch.sh")
foreach(name _C_stable_libtorch _moe_C_stable_libtorch)
  set(sources csrc/${name}.c)
  foreach(number RANGE 1 @HALF@)
    list(APPEND sources csrc/${name}_${number}.c)
  endforeach()
  add_library(${name} MODULE ${sources})
  target_include_directories(${name} PRIVATE ${PY_INCLUDE} ${cutlass_SOURCE_DIR}/include
      ${deepgemm_SOURCE_DIR}/include ${deepgemm_SOURCE_DIR}/third-party/fmt)
  target_compile_definitions(${name} PRIVATE Py_LIMITED_API=0x030a0000)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".abi3.so")
  install(TARGETS ${name} LIBRARY DESTINATION vllm COMPONENT ${name})
endforeach()
"""

DEEPGEMM = """\
include(FetchContent)
set(_DEEPGEMM_UPSTREAM_REPO "@BASE@/deepgemm.git")
set(_DEEPGEMM_UPSTREAM_TAG "@DEEPGEMM@")
set(_deepgemm_src "${FETCHCONTENT_BASE_DIR}/deepgemm-src")
if(EXISTS "${_deepgemm_src}/include/deepgemm.h")
  set(deepgemm_SOURCE_DIR "${_deepgemm_src}")
else()
  FetchContent_Populate(
    deepgemm
    SOURCE_DIR "${_deepgemm_src}"
    GIT_REPOSITORY "${_DEEPGEMM_UPSTREAM_REPO}"
    GIT_TAG "${_DEEPGEMM_UPSTREAM_TAG}"
    GIT_SUBMODULES "third-party/fmt"
    GIT_PROGRESS TRUE
  )
endif()
"""

OTHER_DEVICE = """\
include(FetchContent)
FetchContent_Declare(oneDNN GIT_REPOSITORY @BASE@/none.git GIT_TAG v3.10)
"""

LAUNCH = f"""\
#!/bin/sh
# a compile step as slow and as hungry as the host's files say
if [ -f {HUNGRY} ]; then
  python3 -c "import time; b = b'x' * ($(cat {HUNGRY}) << 20); time.sleep(0.5)" || {{
    echo "cc: fatal error: Killed signal terminated program cc1" >&2; exit 1; }}
fi
[ ! -f {SLOW} ] || sleep "$(cat {SLOW})"
exec "$@"
"""

MODULE = """\
#include <Python.h>
#include <cutlass.h>
#include <deepgemm.h>
#include <fmt.h>
{declarations}
static PyObject *answer(PyObject *self, PyObject *args) {{
    return PyLong_FromLong(CUTLASS + DEEPGEMM + FMT{calls});
}}
static PyMethodDef methods[] = {{{{"answer", answer, METH_NOARGS, 0}}, {{0}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", 0, -1, methods}};
PyMODINIT_FUNC PyInit_{name}(void) {{
    PyObject *torch = PyImport_ImportModule("torch");
    if (!torch) return 0;
    PyObject *done = PyObject_CallMethod(torch, "register", "ss", "_C", "{op}");
    Py_DECREF(torch);
    if (!done) return 0;
    Py_DECREF(done);
    return PyModule_Create(&module);
}}
"""

ENTRY = """\
import sys
from vllm import standin


def run():
    sys.exit(standin.main(sys.argv[1:]))
"""

TORCH = {
    "torch/__init__.py": """\
from torch import version
class _Space: pass
class _Ops:
    def __getattr__(self, name):
        space = _Space()
        setattr(self, name, space)
        return space
ops = _Ops()
def register(space, op):
    setattr(getattr(ops, space), op, lambda *args: None)
class cuda:
    @staticmethod
    def device_count(): return 0
""",
    "torch/version.py": "cuda = '13.0'\n",
}


def git(folder: Path, *words: str) -> str:
    """git, as one fixed person at one fixed time."""
    moment = "2026-07-17T00:00:00Z"
    identity = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
                for what, value in (("NAME", "t"), ("EMAIL", "t@example.com"), ("DATE", moment))}  # fmt: skip
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", "-C", folder, *words],
        env={**os.environ, **identity}, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def repository(folder: Path, files: dict[str, str], tag: str | None = None) -> str:
    """A repository of these files; its commit."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "state")
    if tag:
        git(folder, "tag", tag)
    return git(folder, "rev-parse", "HEAD")


class Source:
    """The repositories, as bare ones below `folder`/git; `base` is their address where they are used."""

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self.base = folder, base
        self.bare = folder / "git"
        work = folder / "work"
        fmt = repository(work / "fmt", {"fmt.h": "#define FMT 1\n"})
        self.cutlass = repository(work / "cutlass", {"include/cutlass.h": "#define CUTLASS 40\n"}, "v4.4.2")
        deepgemm = work / "deepgemm"
        repository(deepgemm, {"include/deepgemm.h": "#define DEEPGEMM 1\n"})
        git(deepgemm, "submodule", "--quiet", "add", str(work / "fmt"), "third-party/fmt")
        git(deepgemm, "config", "-f", ".gitmodules", "submodule.third-party/fmt.url", f"{base}/fmt.git")
        git(deepgemm, "add", ".gitmodules")
        git(deepgemm, "commit", "-q", "-m", "submodule")
        self.deepgemm = git(deepgemm, "rev-parse", "HEAD")
        assert git(deepgemm, "ls-tree", "HEAD", "third-party/fmt").split()[2] == fmt
        self.tag = "sm120-preview"
        # an older commit first: the pinned one is not the only one there
        vllm = work / "vllm"
        repository(vllm, {"README.md": "older\n"})
        for name, text in self.files().items():
            (vllm / name).parent.mkdir(parents=True, exist_ok=True)
            (vllm / name).write_text(text)
        git(vllm, "add", "-A", "-f")
        git(vllm, "commit", "-q", "-m", "preview")
        self.commit = git(vllm, "rev-parse", "HEAD")
        self.tree = git(vllm, "rev-parse", "HEAD^{tree}")
        git(vllm, "tag", self.tag)
        (vllm / "README.md").write_text("newer\n")
        git(vllm, "commit", "-q", "-a", "-m", "the branch went on")
        self.newer = git(vllm, "rev-parse", "HEAD")
        for name in ("fmt", "cutlass", "deepgemm", "vllm"):
            git(folder, "clone", "-q", "--bare", str(work / name), str(self.bare / f"{name}.git"))
            git(self.bare / f"{name}.git", "config", "uploadpack.allowAnySHA1InWant", "true")

    @property
    def repo(self) -> str:
        """The engine's address."""
        return f"{self.base}/vllm.git"

    def files(self) -> dict[str, str]:
        """The engine's tree."""
        half = UNITS // 2
        values = {"@BASE@": self.base, "@DEEPGEMM@": self.deepgemm, "@HALF@": str(half)}

        def filled(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        files = {
            "pyproject.toml": PYPROJECT,
            "setup.py": SETUP,
            "CMakeLists.txt": filled(CMAKE),
            "cmake/external_projects/deepgemm.cmake": filled(DEEPGEMM),
            "cmake/rocm_extension.cmake": filled(OTHER_DEVICE),
            "tools/launch.sh": LAUNCH,
            "vllm/__init__.py": "",
            "vllm/entry.py": ENTRY,
            "vllm/standin.py": (ROOT / "tests" / "standin" / "engine.py").read_text("utf-8"),
            "requirements/common.txt": "packaging>=24.2\n",
            "requirements/cuda.txt": "-r common.txt\n\ntorch==2.11.0\n"
            "--extra-index-url https://flashinfer.ai/whl/\n"
            f"flashinfer-python=={FLASHINFER}\nflashinfer-cubin=={FLASHINFER}\n",
            "requirements/build/cuda.txt": "cmake>=3.26.1\nninja\npackaging>=24.2\n"
            "setuptools>=77.0.3,<81.0.0\n"
            "setuptools-scm>=8\ntorch==2.11.0\nwheel\n",
            ".gitignore": "build/\n*.egg-info/\n.deps/\n*-rackwright.txt\n",
            "README.md": "preview\n",
        }
        for name, op in (
            ("_C_stable_libtorch", "scaled_fp4_quant"),
            ("_moe_C_stable_libtorch", "topk_softmax"),
        ):
            units = range(1, half + 1)
            files[f"csrc/{name}.c"] = MODULE.format(
                name=name, op=op,
                declarations="\n".join(f"long {name}_{n}(void);" for n in units),
                calls="".join(f" + {name}_{n}()" for n in units),
            )  # fmt: skip
            for n in units:
                files[f"csrc/{name}_{n}.c"] = f"long {name}_{n}(void) {{ return 0; }}\n"
        return files

    def clone_tar(self, path: Path, *, newest: bool = False) -> Path:
        """What a person would upload: a tar of a shallow clone of the tag, or of the newest commit."""
        place = self.folder / "clones" / path.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        bare = f"file://{self.bare / 'vllm.git'}"
        git(place, "clone", "-q", "--depth", "1", "--branch", "main" if newest else self.tag, bare, "vllm")
        subprocess.run(["tar", "-C", str(place), "-cf", str(path), "vllm"], check=True)
        return path


def wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """A small pure wheel, byte for byte the same each time."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content = {
        **files,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in content.items():
            archive.writestr(zipfile.ZipInfo(file, (2026, 7, 17, 0, 0, 0)), text)
    return path


def standin_wheels(folder: Path) -> dict[str, Path]:
    """torch and the two FlashInfer wheels, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "torch": wheel(folder, "torch", "2.11.0", TORCH),
        "flashinfer-python": wheel(folder, "flashinfer-python", FLASHINFER, {"flashinfer/__init__.py": ""}),
        "flashinfer-cubin": wheel(
            folder, "flashinfer-cubin", FLASHINFER, {"flashinfer_cubin/__init__.py": ""}
        ),
    }


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
