from __future__ import annotations

from tasks.facts.text import split_sections
from tasks.facts.tools import parse_tools

TOOLS = """
@@rw:tools
at.gcc=/usr/bin/gcc
version.gcc=12.2.0
at.g++=
at.git=/usr/bin/git
version.git=git version 2.39.5
at.nvcc=/usr/local/cuda/bin/nvcc
library.libnuma.so.1=/lib/x86_64-linux-gnu/libnuma.so.1
library.libnope.so.9=
@@rc:0
@@rw:conda
conda=/root/miniconda3/bin/conda
prefix=/root/miniconda3
meta=conda-24.5.0-py312h06a4308_0.json
@@rc:0
@@rw:python.python3
python=/usr/bin/python3
version=3.11.2
prefix=/usr
venv=no
ssl=yes
headers=no
@@rc:0
@@rw:python.python3.12
python=/root/.pyenv/shims/python3.12
pyenv: python3.12: command not found
@@rc:127
@@rw:env
python=/opt/rackwright/env/bin/python
version=3.12.3
package.torch=2.11.0
package.flashinfer-python=0.6.14
cuda_majors=12 13
@@rc:0
"""


def test_programs_have_path_and_version() -> None:
    facts = parse_tools(split_sections(TOOLS))
    assert facts.found["gcc"].version == "12.2.0"
    assert facts.found["git"].version == "2.39.5"
    assert "g++" not in facts.found
    assert facts.has("g++", "gcc") == "gcc"


def test_libraries_have_a_path_or_none() -> None:
    facts = parse_tools(split_sections(TOOLS))
    assert facts.libraries == {"libnuma.so.1": "/lib/x86_64-linux-gnu/libnuma.so.1", "libnope.so.9": ""}


def test_condas_version_comes_from_its_meta_file() -> None:
    conda = parse_tools(split_sections(TOOLS)).conda
    assert conda and (conda.version, conda.prefix) == ("24.5.0", "/root/miniconda3")


def test_an_interpreter_that_does_not_run_says_why() -> None:
    debian, shim = parse_tools(split_sections(TOOLS)).pythons
    assert (debian.version, debian.venv, debian.headers) == ("3.11.2", False, False)
    assert (shim.version, shim.why) == (None, "pyenv: python3.12: command not found")


def test_packages_and_mixed_cuda_majors_of_the_environment_are_seen() -> None:
    env = parse_tools(split_sections(TOOLS)).env
    assert env and env.packages == {"torch": "2.11.0", "flashinfer-python": "0.6.14"}
    assert env.cuda_majors == (12, 13)


def test_no_environment_is_none() -> None:
    assert parse_tools(split_sections("@@rw:env\n@@rc:skip\n")).env is None
