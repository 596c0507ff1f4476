"""Manifests from hubs, compared and merged: what is known is used, what is not known is never assumed."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.model import manifest as m
from tasks.recipe import load_recipe, recipe_names

A, B = "a" * 64, "b" * 64
ONE, TWO = "1" * 40, "2" * 40


def listing(*entries: m.Published) -> m.Listing:
    return {e.path: e for e in entries}


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("../x", {"size": 1, "git_sha1": ONE}),
        ("/x", {"size": 1, "git_sha1": ONE}),
        ("x", {"size": 1, "git_sha1": "zz"}),
        ("x", {"size": -1, "git_sha1": ONE}),
        ("x", {"size": 1, "sha256": "short"}),
    ],
)
def test_an_entry_that_cannot_be_trusted_is_an_error(path: str, entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="x"):
        m.from_fetch({"name": "hf", "files": {path: entry}})


def test_the_list_mode_of_the_fetcher_is_read() -> None:
    files = {
        "x": {"size": 1, "sha256": A, "git_sha1": None},
        "y": {"size": 2, "sha256": None, "git_sha1": ONE},
    }
    assert m.from_fetch({"name": "hf", "files": files}) == listing(
        m.Published("x", 1, A), m.Published("y", 2, None, ONE)
    )


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        (m.Published("x", 1, A), m.Published("x", 1, A), None),
        (m.Published("x", None, A), m.Published("x", 1, A), None),
        (m.Published("x", 1, None, ONE), m.Published("x", 1, None, ONE), None),
        (m.Published("x", 1, A), m.Published("x", 1, B), "hash"),
        (m.Published("x", 1, None, ONE), m.Published("x", 1, None, TWO), "hash"),
        (m.Published("x", 1, A), m.Published("x", 2, B), "size"),
        (m.Published("x", 1), m.Published("x", 2), "size"),
        (m.Published("x", 1), m.Published("x", 1), "unknown"),
        (m.Published("x", 1, A), m.Published("x", 1, None, ONE), "unknown"),
    ],
)
def test_two_files_are_compared_by_what_both_sides_know(
    left: m.Published, right: m.Published, kind: str | None
) -> None:
    found = m.compare(listing(left), listing(right))
    assert [d.kind for d in found] == ([kind] if kind else [])


def test_files_that_only_one_side_has_are_differences() -> None:
    found = m.compare(listing(m.Published("a", 1, A)), listing(m.Published("b", 1, A)))
    assert [(d.kind, d.path) for d in found] == [("only_left", "a"), ("only_right", "b")]


def test_differences_are_told_file_by_file_with_both_hashes() -> None:
    left = listing(
        m.Published("a", 1, A), m.Published("s", 1, A), m.Published("u", 1), m.Published("l", 1, A)
    )
    right = listing(m.Published("a", 1, B), m.Published("s", 2, A), m.Published("u", 1, A))
    lines = m.explain(m.compare(left, right), "hub", "mirror")
    assert lines == [
        f"a: {A} in hub, {B} in mirror",
        "l: only in hub",
        "s: 1 bytes in hub, 2 in mirror",
        f"u: nothing says that both are the same (no hash, {A})",
    ]


def test_one_source_fills_in_what_the_other_does_not_say() -> None:
    hub = listing(m.Published("shard", 9, A), m.Published("config.json", 3, None, ONE))
    mirror = listing(m.Published("shard", 9, A), m.Published("config.json", 3, B), m.Published("extra", 1, B))
    merged, contradictions = m.merge([hub, mirror])
    assert merged["config.json"] == m.Published("config.json", 3, B, ONE)
    assert sorted(merged) == ["config.json", "shard"]
    assert contradictions == []


def test_a_contradiction_is_reported_and_the_first_word_stays() -> None:
    merged, contradictions = m.merge([listing(m.Published("x", 1, A)), listing(m.Published("x", 1, B))])
    assert merged["x"].sha256 == A
    assert [(d.kind, d.path) for d in contradictions] == [("hash", "x")]
    assert m.merge([]) == ({}, [])


def test_what_no_engine_reads_can_be_left_out() -> None:
    names = [
        ".gitattributes",
        "README.md",
        "LICENSE",
        "docs/guide.md",
        "assets/fig.png",
        "configuration.json",
    ]
    kept = ["config.json", "encoding/encoding_dsv4.py", "model-00001-of-00002.safetensors", "tokenizer.json"]
    everything = listing(*(m.Published(name, 1, A) for name in names + kept))
    assert sorted(m.without(everything)) == sorted(kept)
    assert sorted(m.without(everything, ())) == sorted(names + kept)
    assert "config.json" not in m.without(everything, ["config.*"])


def test_a_manifest_survives_being_written_and_read() -> None:
    digests = {"b/ü x.json": A, "a": B, "back\\slash": A}
    text = m.render(digests)
    assert text.splitlines()[0] == f"{B}  a"
    assert m.parse(text) == digests
    assert m.compare(m.from_digests(m.parse(text)), m.from_digests(digests)) == []
    assert m.digest(digests) == m.digest(dict(reversed(digests.items())))
    assert m.digest(digests) != m.digest({**digests, "a": A})


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_manifest_names_its_shards_without_a_gap(name: str) -> None:
    recipe = load_recipe(name)
    if recipe.model.manifest is None:
        pytest.skip("this recipe has none")
    text = recipe.beside(recipe.model.manifest).read_text("utf-8")
    digests = m.parse(text)
    assert m.render(digests) == text, "sorted, and nothing but digests"
    total = recipe.model.shards
    shards = {path for path in digests if path.endswith(".safetensors")}
    assert shards == {f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)}
    assert len({digests[path] for path in shards}) == total
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= set(digests)
