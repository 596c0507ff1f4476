"""What a source tree fetches while it is built, read from its CMake files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.onhost.fetch_source import (
    Dependency,
    Problem,
    declared,
    dependencies_of,
    joined,
    mirrored,
    parse_request,
    without_comments,
)

RECORDED = Path(__file__).parents[2] / "fixtures" / "engines" / "vllm-0.26.0-cmake.txt"


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """The declarations of vLLM 0.26.0 as a tree."""
    for part in RECORDED.read_text("utf-8").split("=== ")[1:]:
        name, _, text = part.partition("\n")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_eight_dependencies_of_vllm_for_cuda(vllm: Path) -> None:
    found = {one.name: one.ref for one in dependencies_of(str(vllm), "cuda", [])}
    assert found == {
        "cutlass": "v4.4.2",
        "deepgemm": "a6b593d2826719dcf4892609af7b84ee23aaf32a",
        "flashmla": "a8f794d1251cbfd88a5011445dd5582289c727e4",
        "fmha_sm100": "2e63ec37a0fc29bc20f39cd1a52e0f5affc33a73",
        "qutlass": "830d2c4537c7396e14a02a46fbddd18b5d107c65",
        "tml_fa4": "b206834606ed5b5f21f8eed6b0683f528ea9cf7d",
        "triton_kernels": "v3.5.1",
        "vllm-flash-attn": "caaa4eb59845388a20b1f435ecaafb4bd9517ad8",
    }


def test_submodules_and_folders_are_as_cmake_wants_them(vllm: Path) -> None:
    found = {one.name: one for one in dependencies_of(str(vllm), "cuda", [])}
    assert found["deepgemm"].submodules == ("third-party/cutlass", "third-party/fmt")
    assert found["cutlass"].submodules is None
    assert found["vllm-flash-attn"].folder == "vllm-flash-attn-src"


def test_two_declarations_of_one_name_are_refused_unless_the_recipe_skips_it(vllm: Path) -> None:
    with pytest.raises(Problem, match="oneDNN is declared twice"):
        dependencies_of(str(vllm), "cpu", [])
    names = [one.name for one in dependencies_of(str(vllm), "cpu", ["onednn"])]
    assert "oneDNN" not in names
    assert "cutlass" in names


def test_a_variable_that_the_tree_does_not_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "FetchContent_Declare(x GIT_REPOSITORY ${WHERE}/x.git GIT_TAG v1)"
    )
    with pytest.raises(Problem, match="does not say what that is"):
        dependencies_of(str(tmp_path), "cuda", [])


@pytest.mark.parametrize("value", ["", "${NOTHING}"])
def test_a_tag_that_the_tree_does_not_say_is_refused(value: str, tmp_path: Path) -> None:
    declaration = f"FetchContent_Declare(x GIT_REPOSITORY https://h/x.git GIT_TAG {value})"
    (tmp_path / "CMakeLists.txt").write_text(declaration)
    with pytest.raises(Problem, match="declares x at https://h/x"):
        dependencies_of(str(tmp_path), "cuda", [])
    assert dependencies_of(str(tmp_path), "cuda", ["x"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "# FetchContent_Declare(x GIT_REPOSITORY u GIT_TAG t)\n",
        "#[[ FetchContent_Declare(x GIT_REPOSITORY u GIT_TAG t) ]]",
        "#[==[\nFetchContent_Declare(x GIT_REPOSITORY u GIT_TAG t)\n]==]",
        "FetchContent_Declare(x SOURCE_DIR /here)",
    ],
)
def test_comments_and_local_folders_declare_nothing(text: str) -> None:
    assert declared(text, "f") == []


def test_a_hash_inside_a_string_is_no_comment() -> None:
    text = 'FetchContent_Declare(x GIT_REPOSITORY "https://h/a#b.git" GIT_TAG "v1") # end'
    assert declared(text, "f") == [Dependency("x", "https://h/a#b.git", "v1", None, "f")]
    assert without_comments(text).endswith('"v1") ')


def test_relative_submodules_are_relative_to_the_repository() -> None:
    assert joined("https://h/org/repo.git", "../other.git") == "https://h/org/other.git"
    assert joined("https://h/org/repo.git", "https://x/y.git") == "https://x/y.git"


def test_mirrors_replace_prefixes_in_order() -> None:
    mirrors = [["https://github.com/", "https://m1/gh/"], ["https://github.com/", "https://m2/"]]
    assert mirrored("https://github.com/a/b.git", mirrors) == ["https://m1/gh/a/b.git", "https://m2/a/b.git"]
    assert mirrored("https://gitlab.com/a/b.git", mirrors) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"commit": "main"}, "40 hex digits"),
        ({"dest": "relative"}, "absolute"),
        ({"repo": "--upload-pack=x"}, "must not begin with -"),
        ({"tags": 1}, "unknown parameter: tags"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, object], words: str) -> None:
    import json

    good = {"repo": "https://h/r.git", "commit": "a" * 40, "dest": "/d", "deps": "/e"}
    assert parse_request(json.dumps(good))["target"] == "cuda"
    with pytest.raises(Problem, match=words):
        parse_request(json.dumps({**good, **change}))
