"""Which finished build a host may use."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tasks.digest import digest_of
from tasks.engines.wheelhouse import choose, differences, entries_here, parse_entry, parse_list

KEY = {
    "commit": "f" * 40, "torch": "2.11.0+cu130", "cuda": "13.0", "arch": "12.0a", "python": "3.12",
    "glibc": "2.35", "machine": "x86_64",
}  # fmt: skip
WANTED = {name: value for name, value in KEY.items() if name != "torch"}
ENV = {"TORCH_CUDA_ARCH_LIST": "12.0a"}


def provenance(key: dict[str, str] = KEY, **more: Any) -> str:
    return json.dumps(
        {
            "key": key,
            "wheel": {"file": "vllm-1-cp38-abi3-linux_x86_64.whl", "sha256": "a" * 64, "bytes": 3},
            "lock_sha256": "b" * 64,
            "env": ENV,
            "at": "2026-07-17T00:00:00Z",
            **more,
        }
    )


def place(key: dict[str, str] = KEY) -> str:
    return f"/w/{digest_of(key)[:16]}"


def test_the_same_key_fits_and_torch_comes_with_the_entry() -> None:
    entry = parse_entry(place(), provenance())
    assert entry
    assert choose([entry], WANTED, ENV) == (entry, [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("glibc", "2.31", "glibc: built with 2.35, here 2.31"),
        ("python", "3.11", "Python: built with 3.12, here 3.11"),
        ("arch", "9.0a", "GPU architectures: built with 12.0a, here 9.0a"),
        ("cuda", "12.8", "CUDA: built with 13.0, here 12.8"),
        ("cuda", "13.1", "CUDA: built with 13.0, here 13.1"),
    ],
)
def test_another_key_is_refused_with_the_difference_named(name: str, value: str, words: str) -> None:
    entry = parse_entry(place(), provenance())
    assert entry
    chosen, why = choose([entry], {**WANTED, name: value}, ENV)
    assert chosen is None
    assert why == [f"{entry.id}: {words}"]


@pytest.mark.parametrize(
    ("built", "fits"), [("13.2", True), ("13.10", True), ("14.0", False), ("none", False)]
)
def test_a_newer_compiler_of_the_same_cuda_fits_under_its_own_release(built: str, fits: bool) -> None:
    key = {**KEY, "cuda": built}
    entry = parse_entry(place(key), provenance(key))
    assert entry
    assert differences(entry, WANTED, ENV) == ([] if fits else [f"CUDA: built with {built}, here 13.0"])


def test_other_build_settings_are_a_difference() -> None:
    entry = parse_entry(place(), provenance())
    assert entry
    assert differences(entry, WANTED, {**ENV, "NVCC_FLAGS": "-g"}) == [
        "build settings: built with NVCC_FLAGS=None, the recipe says -g"
    ]


def test_another_commit_is_no_reason_to_refuse() -> None:
    entry = parse_entry(place(), provenance())
    assert entry
    assert choose([entry], {**WANTED, "commit": "e" * 40}, ENV) == (None, [])


def test_the_newest_of_two_that_fit_is_taken() -> None:
    old, new = parse_entry(place(), provenance()), parse_entry(place(), provenance(at="2026-08-01T00:00:00Z"))
    assert old and new
    assert choose([new, old], WANTED, ENV)[0] is new


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        provenance({**KEY, "glibc": "2.99"}),
        json.dumps({"key": KEY}),
        provenance(wheel={"file": "../x.whl", "sha256": "a" * 64, "bytes": 3}),
    ],
)
def test_damaged_provenance_is_as_if_it_were_not_there(text: str) -> None:
    assert parse_entry(place(), text) is None


def test_what_a_host_lists_is_read_line_by_line() -> None:
    encoded = base64.b64encode(provenance().encode()).decode()
    found = parse_list(f"{place()} {encoded}\n/w/broken !!!\n\n")
    assert [entry.place for entry in found] == [place()]


def test_an_entry_on_the_controller_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / digest_of(KEY)[:16]
    folder.mkdir()
    (folder / "provenance.json").write_text(provenance())
    assert entries_here(tmp_path) == []
    for name, text in (
        ("engine.lock", "x"),
        ("build.log", "x"),
        ("vllm-1-cp38-abi3-linux_x86_64.whl", "abc"),
    ):
        (folder / name).write_text(text)
    assert len(entries_here(tmp_path)) == 1
    (folder / "vllm-1-cp38-abi3-linux_x86_64.whl").write_text("ab")
    assert entries_here(tmp_path) == []
