"""Pages as trees, with the standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures" / "report"
SAMPLES = ("rehearsal-pass", "refused", "engine-failed", "gpu-bench")
VOID = {"meta", "link", "input", "br", "img", "base"}


def sample(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
    return found


@dataclass
class Node:
    """One element: its tag, attributes, children and text."""

    tag: str
    attrs: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str = "", **attrs: str) -> list[Node]:
        """Descendants of a tag, with attributes (`cls` for a class among others)."""
        cls = attrs.pop("cls", None)
        return [
            node
            for node in self.walk()
            if tag in ("", node.tag)
            and (cls is None or cls in (node.attrs.get("class") or "").split())
            and all(node.attrs.get(key) == value for key, value in attrs.items())
        ]

    def one(self, tag: str = "", **attrs: str) -> Node:
        found = self.all(tag, **attrs)
        assert len(found) == 1, f"{len(found)} of {tag} {attrs}"
        return found[0]

    def text(self, language: str = "en") -> str:
        """The text in one language, as the switch shows it."""
        other = "zh" if language == "en" else "en"
        if other in (self.attrs.get("class") or "").split():
            return ""
        parts = [child if isinstance(child, str) else child.text(language) for child in self.children]
        return "".join(parts)

    def words(self, language: str = "en") -> str:
        """The text with single spaces."""
        return " ".join(self.text(language).split())


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("#root", {})
        self.stack = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.stack[-1].children.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].tag == tag, f"</{tag}> closes <{self.stack[-1].tag}>"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def parse(html: str) -> Node:
    """The page as a tree. Fails on elements that are not closed in order."""
    tree = _Tree()
    tree.feed(html)
    tree.close()
    assert tree.stack == [tree.root], f"never closed: {[node.tag for node in tree.stack[1:]]}"
    return tree.root


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every place in a document, containers before what they hold."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
