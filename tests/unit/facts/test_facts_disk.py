from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.facts.disk import parse_df_row, parse_disk, parse_mounts
from tasks.facts.text import split_sections

GIB = 1024**3


def test_rows_of_a_rented_container_are_read(recorded: Callable[[str], str]) -> None:
    lines = recorded("public/C-rented-container/df-h-autodl.txt").splitlines()
    rows = {row.mount: row for line in lines if (row := parse_df_row(line))}
    assert len(rows) == len(lines) - 1  # all but the header
    assert (rows["/"].total, rows["/"].free) == (30 * GIB, int(8.6 * GIB))
    assert rows["/root/autodl-fs"].source == "AutoFS:fs1"


def test_inode_rows_are_counts(recorded: Callable[[str], str]) -> None:
    lines = recorded("public/C-rented-container/df-i-autodl.txt").splitlines()
    rows = {row.mount: row for line in lines if (row := parse_df_row(line, unit=1))}
    assert (rows["/root/autodl-fs"].free, rows["/root/autodl-tmp"].free) == (2, 155286399)


def test_a_chinese_header_is_no_row_and_its_rows_are_read(recorded: Callable[[str], str]) -> None:
    lines = recorded("public/D-failures/df-zh-cn.txt").splitlines()
    assert parse_df_row(lines[0]) is None
    rows = [parse_df_row(line) for line in lines[1:]]
    assert [row.mount for row in rows if row] == ["/", "/root/autodl-tmp", "/dev/shm"]


@pytest.mark.parametrize(
    "line",
    ["Filesystem 1024-blocks Used Available Capacity Mounted on", "", "df: /x: Permission denied", "a b c"],
)
def test_lines_that_are_no_rows_give_none(line: str) -> None:
    assert parse_df_row(line) is None


def test_names_with_spaces_and_dashes_for_inodes_are_read() -> None:
    row = parse_df_row("//nas/my share  100 40 60 40% /mnt/my data")
    assert row and (row.source, row.mount, row.free) == ("//nas/my share", "/mnt/my data", 60 * 1024)
    btrfs = parse_df_row("/dev/sda2 0 0 0 - /data", unit=1)
    assert btrfs and btrfs.total == 0
    fat = parse_df_row("/dev/sda1 - - - - /boot/efi", unit=1)
    assert fat and fat.total is None


def test_mount_points_with_escaped_spaces_are_found() -> None:
    mounts = parse_mounts("/dev/sdb1 /mnt/my\\040data xfs ro,noexec 0 0\nbad line\n")
    assert mounts == {"/mnt/my data": ("/dev/sdb1", "xfs", frozenset({"ro", "noexec"}))}


DISKS = """
@@rw:mounts
overlay / overlay rw,relatime 0 0
/dev/md0 /root/autodl-tmp ext4 rw 0 0
fs1 /root/autodl-fs fuse.juicefs rw 0 0
/dev/sdc1 /ro ext4 ro,noexec 0 0
@@rc:0
@@rw:disk.0
path=/root/autodl-tmp/rackwright
at=/root/autodl-tmp
exists=no
directory=yes
writable=yes
device=2304
space=/dev/md0 314572800 49283072 265289728 16% /root/autodl-tmp
inodes=/dev/md0 157286400 2000001 155286399 2% /root/autodl-tmp
@@rc:0
@@rw:disk.1
path=/root/autodl-tmp/cache
at=/root/autodl-tmp
exists=no
directory=yes
writable=yes
device=2304
space=/dev/md0 314572800 49283072 265289728 16% /root/autodl-tmp
inodes=/dev/md0 157286400 2000001 155286399 2% /root/autodl-tmp
@@rc:0
@@rw:disk.2
path=/root/autodl-fs/models
at=/root/autodl-fs
exists=no
directory=yes
writable=yes
device=77
space=fs1 209715200 5872026 203843174 3% /root/autodl-fs
inodes=fs1 0 0 0 - /root/autodl-fs
@@rc:0
@@rw:disk.3
path=/gone/models
at=/gone
@@rc:124
"""


def test_two_paths_on_one_disk_share_its_file_system() -> None:
    facts = parse_disk(split_sections(DISKS))
    first, second = facts.at("/root/autodl-tmp/rackwright"), facts.at("/root/autodl-tmp/cache")
    assert first.filesystem == second.filesystem == "/dev/md0"
    assert facts.at("/root/autodl-fs/models").filesystem == "device 77"
    assert (first.type, first.network, first.free_inodes) == ("ext4", False, 155286399)


def test_a_network_file_system_without_inode_count_says_so() -> None:
    facts = parse_disk(split_sections(DISKS)).at("/root/autodl-fs/models")
    assert facts.network
    assert facts.free_inodes is None
    assert facts.reasons["inodes"] == "this file system does not count inodes"


def test_a_mount_that_does_not_answer_is_named_as_such() -> None:
    facts = parse_disk(split_sections(DISKS)).at("/gone/models")
    assert facts.free_bytes is None
    assert "did not answer within the deadline" in facts.reasons["space"]


def test_a_path_that_was_not_asked_for_has_a_reason() -> None:
    assert "did not look" in parse_disk({}).at("/x").reasons["*"]
