from __future__ import annotations

import pytest

from tasks.facts.text import (
    at_least,
    int_of,
    number_of,
    plain,
    size_of,
    split_sections,
    value_of,
    version_key,
)


@pytest.mark.parametrize(
    "printed",
    ["[N/A]", "N/A", "[Not Supported]",
     "ERR!", "[Unknown Error]", "Unknown Error", "[Insufficient Permissions]",
     "[GPU requires reset]", "[GPU is lost]", "Requested functionality has been deprecated", "", "-", "None"],
)  # fmt: skip
def test_what_tools_print_in_place_of_a_value_is_none(printed: str) -> None:
    assert value_of(printed) is None
    assert number_of(printed) is None


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("97887 MiB", 97887),
        ("412.77 W", 412.77),
        ("16x", 16),
        ("0x0000000000000068", 0x68),
        ("-2 C", -2),
        ("0", 0),
    ],
)
def test_numbers_are_read_with_their_units_dropped(printed: str, number: float) -> None:
    assert number_of(printed) == number


def test_an_absurdly_long_number_does_not_raise() -> None:
    assert int_of("9" * 500) is not None


def test_whole_numbers_keep_every_digit() -> None:
    assert int_of("9007199254740993 kB") == 9007199254740993
    assert int_of("0x10") == 16


@pytest.mark.parametrize(
    ("printed", "bytes_"),
    [("8.6G", int(8.6 * 1024**3)), ("30G", 30 * 1024**3), ("64M", 64 * 1024**2), ("0", 0), ("12", 12 * 1024)],
)
def test_sizes_of_df_become_bytes(printed: str, bytes_: int) -> None:
    assert size_of(printed, 1024) == bytes_


def test_sections_keep_text_and_exit_status() -> None:
    sections = split_sections("noise\n@@rw:a\none\n\n@@rc:0\n\n@@rw:b\ntwo\n@@rc:9\n@@rw:c\n@@rc:skip\n")
    assert (sections["a"].text, sections["a"].rc) == ("one", 0)
    assert (sections["b"].text, sections["b"].rc) == ("two", 9)
    assert sections["c"].skipped
    assert set(sections) == {"a", "b", "c"}


def test_a_deadline_wins_over_a_later_status() -> None:
    assert split_sections("@@rw:a\npart\n@@rc:124\n@@rc:0\n")["a"].timed_out


def test_a_section_says_why_it_is_empty() -> None:
    sections = split_sections("@@rw:a\n@@rc:127\n@@rw:b\n@@rc:124\n@@rw:c\nbad thing\n@@rc:3\n")
    assert sections["a"].why == "command not found"
    assert sections["b"].why == "no answer within the deadline"
    assert sections["c"].why == "exit status 3: bad thing"


def test_underlines_are_taken_away_with_and_without_the_escape_byte() -> None:
    assert plain("\x1b[4mGPU0\tGPU1\x1b[0m") == "GPU0\tGPU1"
    assert plain("\t[4mGPU0\tGPU1[0m") == "\tGPU0\tGPU1"


@pytest.mark.parametrize(
    ("version", "floor", "reaches"),
    [("580.159.04", "580", True), ("570.124", "580", False), ("2.36", "2.28", True), ("2.9", "2.28", False),
     ("580", "580.65.06", False), ("13.0", "13", True), (None, "1", None), ("unknown", "1", None)],
)  # fmt: skip
def test_floors_compare_numbers_not_text(version: str | None, floor: str, reaches: bool | None) -> None:
    assert at_least(version, floor) is reaches


def test_version_keys_ignore_words() -> None:
    assert version_key("v0.26.0.post1") == (0, 26, 0, 1)
