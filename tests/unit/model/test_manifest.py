"""Manifests from hubs, compared and merged: what is known is used, what is not known is never assumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.model import manifest as m
from tasks.model.index import against_listing, draft_methods, parse_index
from tasks.recipe import load_recipe, recipe_names

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoint"
A, B = "a" * 64, "b" * 64
ONE, TWO = "1" * 40, "2" * 40


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text())


def listing(*entries: m.Published) -> m.Listing:
    return {e.path: e for e in entries}


def test_hugging_face_publishes_sha256_as_lfs_oid_and_git_ids_for_the_rest() -> None:
    found = m.from_huggingface(fixture("hf-api-tree-main.json"))
    shard = found["model-00001-of-00046.safetensors"]
    assert (shard.size, shard.sha256, shard.git_sha1) == (3571241824, A, None)  # neither oid nor xetHash
    assert found["config.json"] == m.Published("config.json", 1794, None, "3" * 40)
    assert "inference" not in found  # a folder
    digests, unknown = m.to_manifest(found)
    assert sorted(digests) == ["model-00001-of-00046.safetensors", "model-00002-of-00046.safetensors"]
    assert unknown == [".gitattributes", "config.json", "model.safetensors.index.json"]


def test_modelscope_publishes_sha256_of_all_files() -> None:
    files = [
        {"Path": "config.json", "Type": "blob", "Size": 3, "Sha256": A},
        {"Path": "encoding", "Type": "tree", "Size": 0, "Sha256": ""},
        {"Path": "encoding/x.py", "Type": "blob", "Size": 4, "Sha256": B},
    ]
    found = m.from_modelscope({"Code": 200, "Success": True, "Data": {"Files": files}})
    assert m.to_manifest(found) == ({"config.json": A, "encoding/x.py": B}, [])


@pytest.mark.parametrize(
    "answer",
    [
        fixture("modelscope-repo-files-error.json"),
        {"Success": True, "Data": None},
        {"Success": True, "Data": {"Files": []}},
        {"Success": True},
        [],
    ],
)
def test_modelscope_saying_no_is_no_empty_model(answer: Any) -> None:
    with pytest.raises(ValueError, match="ModelScope"):
        m.from_modelscope(answer)


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "../x", "size": 1, "oid": ONE},
        {"type": "file", "path": "/x", "size": 1, "oid": ONE},
        {"type": "file", "path": "x", "size": 1, "oid": "zz"},
        {"type": "file", "path": "x", "size": -1, "oid": ONE},
        {"type": "file", "path": "x", "size": 1, "oid": ONE, "lfs": {"oid": "short", "size": 1}},
        "x",
    ],
)
def test_an_entry_that_cannot_be_trusted_is_an_error(entry: Any) -> None:
    with pytest.raises(ValueError):
        m.from_huggingface([entry])


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


def test_an_index_is_held_against_a_listing_by_names_not_patterns() -> None:
    odd = parse_index(fixture("index-odd-shard-names.json"), "model.safetensors.index.json")
    assert against_listing(odd, odd.shards).complete
    paths = [*list(odd.shards)[1:], "model-00001-of-00002.safetensors", "config.json"]
    shards = against_listing(odd, paths)
    assert shards.missing == (next(iter(odd.shards)),)
    assert shards.extra == ("model-00001-of-00002.safetensors",)
    assert not shards.complete


@pytest.mark.parametrize(
    ("config", "methods"),
    [
        ({"num_nextn_predict_layers": 1}, ("mtp",)),
        ({"num_nextn_predict_layers": 1, "dspark_block_size": 5}, ("dspark",)),
        ({"dspark_block_size": 5}, ("dspark",)),
        ({"num_nextn_predict_layers": 0}, ()),
        ({}, ()),
    ],
)
def test_a_checkpoint_says_how_it_can_draft(config: dict[str, Any], methods: tuple[str, ...]) -> None:
    assert draft_methods(config) == methods


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
