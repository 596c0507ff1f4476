"""An archive is unpacked by root before anything proves it: it writes nowhere else and runs nothing."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import fetch_source
from tasks.onhost.fetch_source import DEFAULTS, Git, Problem, Reporter, bring_about, unpack, without_links

PROGRAM = Path(__file__).parents[3] / "tasks" / "onhost" / "fetch_source.py"
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def link(name: str, to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, to
    return info


def hard(name: str, to: str) -> tarfile.TarInfo:
    info = link(name, to)
    info.type = tarfile.LNKTYPE
    return info


def folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info


def file(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = 5, 0o644
    return info


def tar_with(path: Path, *members: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"evil\n") if member.isreg() else None)
    return str(path)


def long_chain() -> list[tarfile.TarInfo]:
    """A link whose target is longer than a path may be: realpath gives up there, the kernel does not."""
    members, at = [], ""
    for step in "abcdefghijklmnop":
        deep = step * 247
        members += [folder(at + deep), link(at + step, deep)]
        at += deep + "/"
    short = "/".join("abcdefghijklmnop")
    members += [link(short + "/last", "../" * 16), link("way", short + "/last"), link("up", "way/..")]
    return [*members, file("up/escaped")]


ESCAPES = [
    [folder("sub"), link("sub/q", ".."), link("sub/up", "q/../.."), file("sub/up/escaped")],
    [folder("sub"), link("sub/q", ".."), link("sub/up", "q/../../escaped"), file("sub/up")],
    [folder("a"), folder("a/b"), link("a/b/l", "../.."), hard("m", "a/b/l"), file("m/escaped")],
    [folder("a"), link("a/l", "../escaped"), hard("m", "a/l"), file("m")],
    [folder("sub"), link("sub/q", ".."), link("./sub//up", "q/../.."), hard("h", "sub/up/secret")],
    [link("x", "/etc")],
    [link("x", "..")],
    [link("x", "../into/y/../../..")],
    [hard("h", "../secret")],
    [file("../escaped")],
    [file("/tmp/escaped")],
    long_chain(),
]


@pytest.mark.parametrize("members", ESCAPES, ids=range(len(ESCAPES)))
def test_nothing_is_written_or_linked_outside_whatever_the_links_say(
    members: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("mine")
    archive = tar_with(tmp_path / "evil.tar", *members)
    into = tmp_path / "deep" / "into"
    with pytest.raises(Problem, match="outside of itself") as problem:
        unpack(archive, str(into))
    assert problem.value.id == "damaged"
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "evil.tar", "deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["into"]
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_links_of_an_honest_tree_stay_and_no_right_is_more_than_a_work_tree_has(tmp_path: Path) -> None:
    shell = file("d/sh")
    shell.mode = 0o6777
    members = [folder("d"), folder("d/docs"), shell, link("d/docs/README", "../sh"), link("d/here", ".")]
    copy = hard("d/copy", "d/sh")
    copy.mode = shell.mode
    into = unpack(tar_with(tmp_path / "a.tar", *members, copy), str(tmp_path / "into"))
    assert into == str(tmp_path / "into" / "d")
    assert (Path(into) / "docs" / "README").read_text() == "evil\n"
    assert (Path(into) / "sh").stat().st_mode & 0o7777 == 0o755
    assert (Path(into) / "copy").read_text() == "evil\n"


def git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *IDENTITY, "-C", str(where), *words], capture_output=True, check=True)
    return done.stdout.decode().strip()


def repository(where: Path, cmake: str = "project(x)\n") -> tuple[str, str]:
    """A repository with one commit and the tag v1; the commit and its tree."""
    where.mkdir(parents=True)
    (where / "CMakeLists.txt").write_text(cmake)
    git(where, "init", "-q")
    git(where, "add", "-A")
    git(where, "commit", "-q", "-m", "one")
    git(where, "tag", "-a", "-m", "t", "v1")
    return git(where, "rev-parse", "HEAD"), git(where, "rev-parse", "HEAD^{tree}")


def packed(where: Path, path: Path) -> str:
    with tarfile.open(path, "w") as tar:
        tar.add(where, arcname=where.name)
    return str(path)


@pytest.fixture
def trap(tmp_path: Path) -> Callable[[], bool]:
    """`TMP/trap` leaves a trace when it is run; the fixture says whether it was."""
    program = tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    program.chmod(0o755)
    return lambda: (tmp_path / "ran").exists()


def bring(tmp_path: Path, commit: str, archive: str, **more: Any) -> dict[str, Any]:
    request = {
        **DEFAULTS, "repo": "https://127.0.0.1:9/x", "commit": commit, "dest": str(tmp_path / "h" / "x"),
        "deps": str(tmp_path / "h" / "deps"), "archive": archive, "offline": True, **more,
    }  # fmt: skip
    return bring_about(request, Reporter())


def test_an_export_whose_git_is_a_file_runs_none_of_the_commands_that_it_points_to(
    tmp_path: Path, trap: Callable[[], bool]
) -> None:
    commit, tree = repository(tmp_path / "x")
    (tmp_path / "x" / ".git").rename(tmp_path / "x" / "g")
    (tmp_path / "x" / ".git").write_text("gitdir: g\n")
    with (tmp_path / "x" / "g" / "config").open("a") as config:
        config.write(f"\tfsmonitor = {tmp_path}/trap\n\tworktree = ..\n")
    with pytest.raises(Problem) as problem:
        bring(tmp_path, commit, packed(tmp_path / "x", tmp_path / "a.tar"), tree=tree)
    assert problem.value.id == "wrong_commit"  # g/ is none of that tree
    assert not trap()
    assert not (tmp_path / "h" / "x.unpacked").exists()


def test_a_clone_that_names_a_program_for_missing_objects_never_gets_it_run(
    tmp_path: Path, trap: Callable[[], bool]
) -> None:
    """Such a clone (CVE-2024-32004) lacks an object, and says how to have it: by a program of its own."""
    repository(tmp_path / "dep-src")
    tag = git(tmp_path / "dep-src", "rev-parse", "v1")
    (tmp_path / "dep-src" / ".git" / "objects" / tag[:2] / tag[2:]).unlink()
    with (tmp_path / "dep-src" / ".git" / "config").open("a") as config:
        config.write('\trepositoryformatversion = 1\n[extensions]\n\tpartialClone = o\n[remote "o"]\n')
        config.write(f"\turl = {tmp_path}\n\tpromisor = true\n\tuploadpack = {tmp_path}/trap\n")
    (tmp_path / "deps").mkdir()
    packed(tmp_path / "dep-src", tmp_path / "deps" / "dep-src.tar")
    declaration = "FetchContent_Declare(dep GIT_REPOSITORY https://127.0.0.1:9/d GIT_TAG v1)\n"
    commit, _ = repository(tmp_path / "main", declaration)
    archive = packed(tmp_path / "main", tmp_path / "main.tar")
    answer = bring(tmp_path, commit, archive, archives=str(tmp_path / "deps"))
    assert not trap()
    assert answer["dependencies"][0]["proven"] is False


def test_a_clone_keeps_its_commit_and_loses_its_configuration(tmp_path: Path) -> None:
    commit, tree = repository(tmp_path / "x")
    git(tmp_path / "x", "config", "remote.origin.url", "https://127.0.0.1:9/x")
    (tmp_path / "x" / ".git" / "commondir").write_text("../elsewhere\n")
    (tmp_path / "x" / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\n")
    archive = packed(tmp_path / "x", tmp_path / "a.tar")
    clone = Path(unpack(archive, str(tmp_path / "into")))
    assert not (clone / ".git" / "commondir").exists() and not (clone / ".git" / "hooks").exists()
    assert (
        clone / ".git" / "config"
    ).read_text() == "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"
    assert bring(tmp_path, commit, archive)["tree"] == tree


def test_a_submodules_clone_is_not_looked_for_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "clone" / "third" / "a").mkdir(parents=True)
    (tmp_path / "clone" / "way").symlink_to("third")
    assert without_links(str(tmp_path / "clone"), "third/a") == str(tmp_path / "clone" / "third" / "a")
    assert without_links(str(tmp_path / "clone"), "way/a") is None


def test_a_full_disk_while_unpacking_is_no_damaged_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tar_with(tmp_path / "a.tar", file("CMakeLists.txt"))

    def full(*words: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    request = {"repo": "https://127.0.0.1:9/x", "commit": "a" * 40, "dest": str(tmp_path / "h/x")}
    text = json.dumps({**request, "deps": str(tmp_path / "h/d"), "archive": archive, "offline": True})
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert fetch_source.main(["--stdin"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["id"] == "disk_full"


def test_an_address_that_looks_like_an_option_is_an_address(
    tmp_path: Path, trap: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_source, "ATTEMPTS", 1)
    monkeypatch.setattr(fetch_source.time, "sleep", lambda seconds: None)
    wanted = fetch_source.Wanted(
        "x", f"--upload-pack={tmp_path}/trap", "v1", None, str(tmp_path / "d"), None, None
    )
    with pytest.raises(Problem):
        fetch_source.Fetcher(Git(None, Reporter()), [], False, Reporter()).bring(wanted)
    assert not trap()


def test_the_program_says_a_refusal_as_one_document(tmp_path: Path) -> None:
    archive = tar_with(tmp_path / "evil.tar", *ESCAPES[0])
    request = {"repo": "https://127.0.0.1:9/x", "commit": "a" * 40, "dest": str(tmp_path / "h/x")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--stdin"],
        input=json.dumps({**request, "deps": str(tmp_path / "h/d"), "archive": archive, "offline": True}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["id"] == "damaged"
    assert not (tmp_path / "h" / "x.unpacked").exists()
