"""The support archive: what is in it, what is missing, and that no secret is."""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.facts import HostFacts
from tasks.findings import ok
from tasks.jobs import parse_status
from tasks.receipts import Receipt
from tasks.remote import LostHost, Result
from tasks.support import Support, masked, packed

KEY = "f3a9c1d27b6e48058a1c9d3e7f206b54a1b2c3d4e5f60718"
LOG = f"INFO ready\nhf_abcdefghijklmnopqrstuvwxyz012345\nlistening on 10.1.2.3\nkey {KEY} used\n\xff\n"


class Host:
    """Answers the few commands that the archive asks."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def run(self, script: str, **more: Any) -> Result:
        self.asked.append(script)
        for word, text in self.answers.items():
            if word in script:
                if text == "lost":
                    raise LostHost("no answer")
                coded = base64.b64encode(text.encode("latin-1")).decode() if "base64" in script else text
                return Result(0, coded, "")
        return Result(0, "", "")


def plan_of(folder: Path, host: Host, *, installed: bool = True) -> Any:
    """A plan as far as the archive looks at it."""
    spec = SimpleNamespace(name="rw-eager", log="/r/logs/rw-eager.log", key_file="/r/run/api-key")
    return SimpleNamespace(
        name="gpu1",
        mode="eager",
        engine_label="vllm 0.32.0",
        recipe=SimpleNamespace(name="r", serve=SimpleNamespace(modes={"eager": None})),
        layout=SimpleNamespace(jobs="/r/jobs", env="/r/env"),
        record=SimpleNamespace(page=folder / "index.html"),
        remote=host,
        facts=HostFacts(),
        findings=[ok("disk.root", "fine", observed="/r")],
        services={"rw-eager": SimpleNamespace(installed=installed)},
        supervisor=SimpleNamespace(logs=lambda name, log, lines, follow: f"tail -n {lines} {log}"),
        spec=lambda mode=None: spec,
        state=SimpleNamespace(
            receipts={
                "engine": Receipt("engine", "d1", 3.0, {"token": "hf_abcdefghijklmnopqrstuvwxyz012345"})
            },
            jobs={"weights": parse_status("state=done\nrc=0\n")},
            has=lambda flag: flag == "env",
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A host's reports: one run, one older archive."""
    path = tmp_path / "reports" / "gpu1"
    path.mkdir(parents=True)
    (path / "site.json").write_text(json.dumps({"verb": "site", "log": [f"key {KEY}"]}))
    (path / "index.html").write_text(f"<p>Bearer {KEY}</p>")
    (path / "support-gpu1-20260101T000000Z.tar.gz").write_bytes(b"old")
    return path


HOST = {
    "ls -1": "weights\n",
    "cat ": KEY + "\n",
    "rw-eager.log": LOG,
    "weights/log": "fetched\n",
    "importlib": "torch==2.13.0\n",
}


def contents(path: Path) -> dict[str, str]:
    """The archive's files without the folder that they lie in."""
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file}
    assert all(name.startswith(path.name.removesuffix(".tar.gz") + "/") for name in texts)
    return {name.split("/", 1)[1]: text for name, text in texts.items()}


def test_everything_that_a_reader_of_an_issue_needs_is_there(folder: Path) -> None:
    path = Support(plan_of(folder, Host(HOST))).write()
    assert re.fullmatch(r"support-gpu1-\d{8}T\d{6}Z\.tar\.gz", path.name)
    found = contents(path)
    assert set(found) == {
        "README.txt", "missing.txt", "host.json", "findings.json", "packages.txt", "report/site.json",
        "report/index.html", "receipts/engine.json", "jobs/states.json", "jobs/weights.log",
        "logs/rw-eager.log",
    }  # fmt: skip
    assert "INFO ready" in found["logs/rw-eager.log"]
    assert found["packages.txt"] == "torch==2.13.0\n"
    assert found["missing.txt"] == "nothing\n"
    assert json.loads(found["jobs/states.json"])["weights"]["state"] == "done"
    assert json.loads(found["findings.json"])[0]["id"] == "disk.root"


def test_no_secret_is_in_any_file(folder: Path) -> None:
    everything = "\n".join(contents(Support(plan_of(folder, Host(HOST))).write()).values())
    for secret in (KEY, "hf_abcdefghijklmnopqrstuvwxyz012345", "10.1.2.3"):
        assert secret not in everything
    assert "[redacted]" in everything and "private-ip" in everything


def test_a_secret_that_one_file_names_is_masked_in_all_others() -> None:
    secret = "Zq8-4kfj2-Lm31"
    texts = {"a.json": json.dumps({"password": secret}), "b.log": f"login failed with {secret}\n"}
    clean = masked(texts, [])
    assert secret not in "".join(clean.values())
    assert json.loads(clean["a.json"]) == {"password": "[redacted]"}


def test_what_cannot_be_read_is_told_and_does_not_stop_the_rest(folder: Path) -> None:
    found = contents(Support(plan_of(folder, Host({**HOST, "rw-eager.log": ""}))).write())
    assert found["missing.txt"] == "logs/rw-eager.log: nothing there\n"
    assert "logs/rw-eager.log" not in found and "jobs/weights.log" in found


def test_a_service_that_is_not_installed_has_no_log_to_miss(folder: Path) -> None:
    found = contents(Support(plan_of(folder, Host(HOST), installed=False)).write())
    assert found["missing.txt"] == "nothing\n"


def test_a_lost_host_leaves_no_half_archive(folder: Path) -> None:
    with pytest.raises(LostHost):
        Support(plan_of(folder, Host({**HOST, "weights/log": "lost"}))).write()
    assert [path.name for path in folder.glob("support-*")] == ["support-gpu1-20260101T000000Z.tar.gz"]


def test_damaged_json_is_packed_as_text() -> None:
    assert masked({"x.json": '{"cut'}, []) == {"x.json": '{"cut'}


def test_the_archive_says_nothing_of_the_machine_that_wrote_it() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed("s", {"a": "x"}))) as tar:
        member = tar.getmembers()[0]
    assert (member.name, member.uname, member.uid, member.mtime) == ("s/a", "", 0, 0)
