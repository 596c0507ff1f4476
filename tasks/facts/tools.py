"""Programs that builds and services need: where they are and which version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tasks.facts.text import Section, first_line, get_section, yes


@dataclass(frozen=True)
class Tool:
    """A program that was found."""

    path: str
    version: str | None = None


@dataclass(frozen=True)
class PythonFacts:
    """An interpreter: whether it can make a virtual environment and compile extensions."""

    path: str
    version: str | None = None
    prefix: str | None = None
    venv: bool | None = None
    ssl: bool | None = None
    headers: bool | None = None
    why: str | None = None


@dataclass(frozen=True)
class CondaFacts:
    """A conda that was found, on PATH or in a usual place."""

    path: str
    prefix: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class EnvFacts:
    """The engine's environment: its Python and the packages that checks ask about."""

    python: str
    version: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    cuda_majors: tuple[int, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class ToolFacts:
    """Programs by name (only those found), interpreters, conda, the engine's environment.

    `libraries`: path of each shared library that was looked for, "" when it is not there.
    """

    found: Mapping[str, Tool] = field(default_factory=dict)
    pythons: tuple[PythonFacts, ...] = ()
    conda: CondaFacts | None = None
    micromamba: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    env: EnvFacts | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def has(self, *names: str) -> str | None:
        """The first of these programs that is there."""
        return next((name for name in names if name in self.found), None)


def parse_tools(sections: Mapping[str, Section]) -> ToolFacts:
    """Tool facts."""
    section = get_section(sections, "tools")
    pairs = section.pairs()
    found = {
        key.removeprefix("at."): Tool(path, _version(pairs.get(f"version.{key.removeprefix('at.')}")))
        for key, path in pairs.items()
        if key.startswith("at.") and path
    }
    conda_pairs = get_section(sections, "conda").pairs()
    conda = None
    if conda_pairs.get("conda"):
        meta = re.match(r"conda-(\d[\w.]*)-", conda_pairs.get("meta", ""))
        conda = CondaFacts(
            conda_pairs["conda"], conda_pairs.get("prefix") or None, meta.group(1) if meta else None
        )
    return ToolFacts(
        found=found,
        pythons=tuple(_python(s) for name, s in sections.items() if name.startswith("python.")),
        conda=conda,
        micromamba=conda_pairs.get("micromamba") or None,
        libraries={
            key.removeprefix("library."): path for key, path in pairs.items() if key.startswith("library.")
        },
        env=_env(sections.get("env")),
        reasons={} if pairs else {"*": section.why},
    )


def _version(line: str | None) -> str | None:
    match = re.search(r"\d{1,4}(?:\.\d{1,5}){0,3}", line or "")
    return match.group() if match else None


def _python(section: Section) -> PythonFacts:
    pairs = section.pairs()
    return PythonFacts(
        path=pairs.get("python", ""),
        version=pairs.get("version"),
        prefix=pairs.get("prefix"),
        venv=yes(pairs.get("venv")),
        ssl=yes(pairs.get("ssl")),
        headers=yes(pairs.get("headers")),
        why=None if pairs.get("version") else _last(section),
    )


def _last(section: Section) -> str:
    lines = [line for line in section.text.splitlines() if line.strip() and not line.startswith("python=")]
    return first_line(lines[-1]) if lines and not section.timed_out else section.why


def _env(section: Section | None) -> EnvFacts | None:
    if section is None or section.skipped:
        return None
    pairs = section.pairs()
    return EnvFacts(
        python=pairs.get("python", ""),
        version=pairs.get("version"),
        packages={
            key.removeprefix("package."): value for key, value in pairs.items() if key.startswith("package.")
        },
        cuda_majors=tuple(int(word) for word in pairs.get("cuda_majors", "").split() if word.isdigit()),
        why=None if pairs.get("version") else _last(section),
    )
