"""What rackwright left on a host, read by real sh from a real folder."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import steps
from tasks.receipts import Artifact, Receipt, parse_receipt
from tasks.settings import Layout
from tasks.state import HostState, parse_state, state_section


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "root"), str(tmp_path / "models"))


def read(layout: Layout, *files: str) -> HostState:
    section = state_section(layout, lib=f"{layout.lib}/1", model_dir=f"{layout.model_root}/m", files=files)
    done = subprocess.run(["sh", "-c", section], capture_output=True, text=True, check=True)
    return parse_state(done.stdout)


def test_a_bare_host_has_nothing(layout: Layout) -> None:
    assert read(layout) == HostState()


def test_receipts_come_back_as_they_were_written(layout: Layout) -> None:
    receipt = Receipt(
        "engine", "d1", 1.5, {"wörds": "你好 'x'"}, (Artifact("a.whl", "0" * 64, 3),), ("/etc/x",)
    )
    subprocess.run(["sh", "-c", receipt.write(layout.receipts)], check=True)
    assert read(layout).receipts == {"engine": receipt}


def test_a_damaged_receipt_is_left_out_so_that_its_step_runs_again(layout: Layout) -> None:
    folder = Path(layout.receipts)
    folder.mkdir(parents=True)
    (folder / "engine.json").write_text('{"step": "engine", "dig')
    (folder / "weights.json").write_bytes(b"\xff\xfe\x00")
    (folder / "tools.json").write_text('{"step": "other", "digest": "d", "seconds": 1}')
    found = read(layout)
    assert found.receipts == {}
    assert found.damaged == ("engine.json", "tools.json", "weights.json")


@pytest.mark.parametrize("text", ["", "[]", "null", '{"step": 1}', '{"artifacts": 3}'])
def test_what_is_no_receipt_is_none(text: str) -> None:
    assert parse_receipt(text) is None


def test_a_root_with_foreign_files_is_seen_and_ours_is_not_foreign(layout: Layout) -> None:
    root = Path(layout.root)
    root.mkdir()
    assert not read(layout).foreign_root
    (root / "thesis.doc").touch()
    assert read(layout).foreign_root
    (root / ".rackwright").touch()
    state = read(layout)
    assert (state.foreign_root, state.ours) == (False, True)


def test_a_touched_model_file_changes_the_cheap_check(layout: Layout) -> None:
    shard = Path(layout.model_root) / "m" / "sub" / "a.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"1")
    before = read(layout).model_stat
    assert before
    assert read(layout).model_stat == before
    shard.write_bytes(b"22")
    assert read(layout).model_stat != before


def test_rendered_files_are_compared_by_content(layout: Layout, tmp_path: Path) -> None:
    unit = tmp_path / "x.service"
    unit.write_text("[Unit]\n")
    assert read(layout, str(unit), "/nowhere").sums == {str(unit): hashlib.sha256(b"[Unit]\n").hexdigest()}


def test_environments_count_only_when_whole(layout: Layout) -> None:
    python = Path(layout.env) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    assert not read(layout).has("env")
    (Path(layout.env) / ".rackwright-env").touch()
    assert read(layout).has("env")
    (Path(layout.env) / ".rackwright-installing").touch()
    assert read(layout).has("broken-env")


def test_what_a_unit_or_program_really_starts_is_read(layout: Layout) -> None:
    folder = Path(layout.run) / "programs"
    folder.mkdir(parents=True)
    unit, program, broken = folder / "rw-eager.service", folder / "rw-fast.conf", folder / "rw-x.conf"
    unit.write_text(
        "# LaunchSpec 00aa\n[Service]\n"
        'ExecStart="/bin/sh" "/w.sh" "vllm" "--port" "8017" "--host" "::"\nUser=root\n'
    )
    program.write_text(
        "; LaunchSpec 11bb\ncommand=/bin/sh /w.sh 'a b' --port 8018 --served-model-name m\nuser=nobody-here\n"
    )
    broken.write_text("command=/bin/sh 'open\n")
    found = read(layout, str(unit), str(program), str(broken), f"{folder}/missing.conf").installed
    assert set(found) == {str(unit), str(program), str(broken)}
    eager, fast = found[str(unit)], found[str(program)]
    assert (eager.spec, eager.port, eager.bind, eager.model, eager.uid) == ("00aa", 8017, "::", None, 0)
    assert (fast.spec, fast.port, fast.model, fast.uid) == ("11bb", 8018, "m", None)
    assert "a b" in fast.argv
    assert found[str(broken)].port is None


class Work:
    """A step that would do something, on a host that changes while it is being looked at."""

    name, label = "summary", "summary"

    def __init__(self, before: HostState, now: HostState) -> None:
        self.plan: Any = SimpleNamespace(
            state=before,
            failed=False,
            host=SimpleNamespace(state=SimpleNamespace(is_executing=True)),
            record=SimpleNamespace(open=lambda: None),
            fresh=lambda: setattr(self.plan, "state", now),
        )

    def unchanged(self) -> str | None:
        return None


UNINSTALLING = frozenset({"uninstalling"})


@pytest.mark.parametrize(
    ("before", "now", "ends"),
    [
        (HostState(ours=True), HostState(), True),
        (HostState(ours=True), HostState(ours=True, flags=UNINSTALLING), True),
        # broken off before this run began
        (HostState(ours=True, flags=UNINSTALLING), HostState(ours=True, flags=UNINSTALLING), False),
        (HostState(), HostState(ours=True), False),
        (HostState(), HostState(), False),
    ],
)
def test_a_run_ends_when_its_host_is_uninstalled_meanwhile(
    before: HostState, now: HostState, ends: bool
) -> None:
    (command,) = steps._step._inner(work=Work(before, now))  # type: ignore[attr-defined]
    assert (command.args[1:] == (steps.GONE, [])) is ends
