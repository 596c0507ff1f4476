"""The documentation names what exists: files, verbs, settings; and both languages show the same commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.cli import HELP, verbs
from tasks.paths import ROOT
from tasks.settings import Settings

PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md")])
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
readmes = pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """Language and lines of each code block, without comments: those are translated."""
    found = FENCE.findall(page.read_text("utf-8"))
    return [(name, [re.sub(r"\s*#\s.*", "", line) for line in text.splitlines()]) for name, text in found]


def verbs_without_a_host() -> set[str]:
    section = HELP.split("without a host:\n")[1].split("\n\n")[0]
    return set(re.findall(r"^  ([a-z]+) ", section, re.MULTILINE))


def settings_named(page: Path) -> list[str]:
    """Names in the first column of each table of settings."""
    tables = re.findall(r"^\| (?:Key|键) \|.*\n\|[-|]+\n((?:\|.*\n)+)", prose(page), re.MULTILINE)
    return [
        name for table in tables for row in table.splitlines() for name in SPAN.findall(row.split("|")[1])
    ]


@pages
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(SPAN.sub("", prose(page))) if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in links if not (page.parent / link.split("#")[0]).exists()] == []


def test_both_languages_link_the_same_pages_for_each_verb() -> None:
    def links(page: Path) -> dict[str, list[str]]:
        rows = re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", page.read_text("utf-8"), re.MULTILINE)
        return {" ".join(SPAN.findall(verb)): LINK.findall(text) for verb, text in rows}

    english, chinese = map(links, READMES)
    assert english == chinese
    assert ["docs/serving.md"] in english.values()


@pages
def test_verbs_exist(page: Path) -> None:
    code = [*SPAN.findall(prose(page)), *(text for _, text in FENCE.findall(page.read_text("utf-8")))]
    named = {verb for text in code for verb in re.findall(r"(?<![\w/.-])rackwright\s+([a-z]+)", text)}
    assert named - set(verbs()) - verbs_without_a_host() == set()


def test_verbs_without_a_host_are_found() -> None:
    assert verbs_without_a_host() >= {"compare", "bundle"}


@readmes
def test_settings_exist(page: Path) -> None:
    named = settings_named(page)
    assert "recipe" in named
    assert [name for name in named if name not in Settings.model_fields] == []


def test_both_readmes_show_the_same_code() -> None:
    english, chinese = map(blocks, READMES)
    assert english
    assert chinese == english
