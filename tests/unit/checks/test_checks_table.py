from __future__ import annotations

import re

import pytest

from tasks.checks.table import render_blocked, render_host, render_hosts, verdict, verdict_line
from tasks.findings import Finding, fail, ok, skipped, warn
from tasks.terminal import columns

GOOD = ok("host.os", "Linux that the engine is built for", "Ubuntu 24.04.3 LTS, x86_64")
UNREAD = skipped("gpu.xid", "the kernel's log may not be read")
WARNED = warn(
    "disk.type", "a path lies on a network disk", observed="nfs4", fix="Keep `root` on a local disk."
)
FAILED = fail(
    "gpu.count",
    "fewer GPUs than the recipe needs",
    observed="2",
    expected="4",
    fix="Use a host with 4 GPUs, or a recipe for 2; `nvidia-smi -L` lists what this container has",
    reference="vLLM documentation, tensor parallel size",
)


@pytest.mark.parametrize(
    ("findings", "strict", "status", "line"),
    [
        ([GOOD], False, "ok", "ready"),
        ([], False, "ok", "ready"),
        ([GOOD, UNREAD], False, "ok", "ready"),
        ([GOOD, WARNED], False, "warn", "ready with 1 warning"),
        ([WARNED, WARNED], False, "warn", "ready with 2 warnings"),
        ([GOOD, WARNED], True, "fail", "not ready: 1 warning (strict: warnings block)"),
        ([FAILED, WARNED], False, "fail", "not ready: 1 failure, 1 warning"),
        ([FAILED, FAILED], True, "fail", "not ready: 2 failures"),
    ],
)
def test_the_verdict_follows_from_the_worst_finding(
    findings: list[Finding], strict: bool, status: str, line: str
) -> None:
    assert verdict(findings, strict) == status
    assert verdict_line(findings, strict) == line


def test_the_worst_group_comes_first_and_the_verdict_last() -> None:
    lines = render_host("gpu1", [GOOD, WARNED, UNREAD, FAILED]).splitlines()
    assert lines[0] == "gpu1"
    assert [line.strip() for line in lines if re.fullmatch(r"  \S.*", line) and "." not in line] == [
        "GPUs",
        "disks",
        "host",
    ]
    assert lines[-1] == "gpu1: not ready: 1 failure, 1 warning"


def test_a_failure_says_what_was_seen_wanted_how_to_mend_it_and_who_says_so() -> None:
    text = render_host("gpu1", [FAILED])
    for part in (
        "FAIL  gpu.count",
        "seen    2",
        "wanted  4",
        "mend    Use a host",
        "source  vLLM documentation",
    ):
        assert part in text


def test_what_passed_takes_one_line_with_what_was_seen() -> None:
    text = render_host("gpu1", [GOOD])
    assert "ok    host.os" in text
    assert "Ubuntu 24.04.3 LTS, x86_64" in text
    assert "mend" not in text


@pytest.mark.parametrize("width", [20, 60, 80, 100, 200])
def test_lines_keep_to_the_width_unless_one_word_is_longer(width: int) -> None:
    text = render_host("gpu1", [FAILED, WARNED, GOOD, UNREAD], width=width)
    too_long = [line for line in text.splitlines() if len(line) > max(width, 48)]
    assert too_long == []


def test_commands_are_never_cut_inside_a_word() -> None:
    path = "/root/autodl-tmp/" + "a-long-folder/" * 8
    text = render_host("gpu1", [fail("disk.space", "full", fix=f"rm -r {path}")], width=60)
    assert path in text


def test_colour_only_where_asked_for() -> None:
    assert "\x1b[" not in render_host("gpu1", [FAILED, GOOD])
    assert "\x1b[31;1mFAIL\x1b[0m" in render_host("gpu1", [FAILED, GOOD], colour=True)


def test_many_hosts_are_one_line_each_worst_first() -> None:
    text = render_hosts(
        {"b": [GOOD], "a": [GOOD, WARNED], "rig-with-a-name": [FAILED, WARNED, UNREAD]}, width=80
    )
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["rig-with-a-name", "a", "b"]
    assert re.search(r"not ready\s+1\s+1\s+1\s+gpu.count: fewer GPUs", lines[1])
    assert lines[-1] == "3 hosts: 1 not ready, 1 ready with warnings, 1 ready"
    assert all(len(line) <= 80 for line in lines)


def test_warnings_block_only_on_hosts_that_are_strict() -> None:
    text = render_hosts({"a": [WARNED], "b": [WARNED]}, strict={"b"})
    assert [line.split()[:2] for line in text.splitlines()[1:3]] == [["b", "not"], ["a", "warnings"]]


def test_a_brief_table_counts_what_passed() -> None:
    text = render_host("gpu1", [GOOD, GOOD, WARNED], brief=True)
    assert "host.os" not in text and "2 checks passed" in text and "disk.type" in text
    assert "passed" not in render_host("gpu1", [WARNED], brief=True)


def test_no_hosts_is_said() -> None:
    assert render_hosts({}) == "no hosts"


HOSTILE = "\x1b]0;mine\x07\x1b[2J\x1b[1;32mPASS\x1b[0m\u202e\x9b31m of GPU 0"


def test_what_a_host_says_moves_no_cursor_and_paints_nothing_while_our_colours_stay() -> None:
    bad = fail("deep.copies", HOSTILE, observed=HOSTILE, expected=HOSTILE, fix=HOSTILE, reference=HOSTILE)
    drawn = [
        render_host("gpu1", [bad, ok("host.os", HOSTILE, HOSTILE)], colour=True),
        render_hosts({"gpu1": [bad], "gpu2": [GOOD]}, colour=True),
        render_blocked([bad], colour=True),
    ]
    for text in drawn:
        ours = re.sub(r"\x1b\[(?:31;1|33;1|32|2|0)m", "", text)
        assert "PASS31m of GPU 0" in ours
        assert ours.isprintable() or set(filter(lambda c: not c.isprintable(), ours)) == {"\n"}
        assert "\x1b[31;1m" in text


def test_columns_stand_below_each_other_where_names_are_wide() -> None:
    text = render_hosts({"工作站一号": [GOOD], "gpu1": [fail("a.b", "坏" * 60, fix="x")]}, width=80)
    head, first, second = text.splitlines()[:3]
    starts = [columns(line[: line.index(word)]) for line, word in ((first, "not ready"), (second, "ready"))]
    assert starts == [columns(head[: head.index("verdict")])] * 2
    assert columns(first) <= 80 and first.endswith("坏…")


def test_scripts_without_spaces_are_wrapped_and_paths_in_them_stay_whole() -> None:
    path = "/数据/模型" * 12
    text = render_host("gpu1", [fail("disk.writable", "磁盘已满" * 30, observed=path, fix="x")], width=80)
    assert [line for line in text.splitlines() if columns(line) > 80] == [f"        seen    {path}"]
    assert "".join(text.split()).count("磁盘已满") == 30


def test_room_between_a_command_and_its_remark_stays() -> None:
    text = render_host("gpu1", [fail("a.b", "x", fix="modprobe nvidia   (then reboot)")])
    assert "modprobe nvidia   (then reboot)" in text
