"""The deep probe against a stand-in for torch, and what is made of its documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composed_hosts import gpu_host

from tasks.checks import GpuNeed, Needs
from tasks.checks.deep import deep_findings, proven_advice
from tasks.facts.links import Matrix, NvLinks
from tasks.onhost.deep_probe import BOOT, unproven, verdict

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tasks" / "onhost" / "deep_probe.py"
FAKE_TORCH = ROOT / "tests" / "replay" / "fake_torch"
MakeNeeds = Callable[..., Needs]


def environment(faults: str = "", **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TORCH_", "FAKE_"))}
    return {**clean, "PYTHONPATH": str(FAKE_TORCH), "FAKE_TORCH_FAULTS": faults, **more}


def deep(faults: str = "", deadline: float = 4, request: dict[str, Any] | None = None, **more: str) -> Any:
    asked = {"pythons": [sys.executable], "deadline_s": deadline, "bytes": 1 << 20, **(request or {})}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--stdin"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment(faults, **more),
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_good_gpus_are_proven_at_two_and_at_all() -> None:
    code, document, progress = deep(deadline=20, FAKE_TORCH_GPUS="3")
    assert code == 0
    assert [(run["ranks"], run["p2p"], run["status"]) for run in document["all_reduce"]] == [
        (2, True, "ok"),
        (3, True, "ok"),
    ]
    assert len(document["copies"]["host_device"]) == 3 and len(document["copies"]["peers"]) == 6
    assert document["verdict"] == {
        "p2p": True, "works": True, "env": {}, "flags": {}, "why": "all_reduce is right over 2 and 3 GPUs",
    }  # fmt: skip
    lines = [json.loads(line.removeprefix("#progress ")) for line in progress.splitlines()]
    assert lines and all({"phase", "done", "total", "unit", "note"} <= set(line) for line in lines)


@pytest.mark.slow
def test_a_hang_with_p2p_is_ended_and_the_way_without_it_proven() -> None:
    started = time.monotonic()
    code, document, _ = deep("hang-p2p-2")
    assert time.monotonic() - started < 40
    assert code == 0
    assert [(run["p2p"], run["status"]) for run in document["all_reduce"]] == [(True, "hang"), (False, "ok")]
    assert document["all_reduce"][0]["at"] == "first all_reduce"
    assert document["verdict"]["env"] == {"NCCL_P2P_DISABLE": "1"}
    assert document["verdict"]["flags"] == {"disable-custom-all-reduce": True}


@pytest.mark.parametrize(
    ("faults", "statuses", "words"),
    [
        ("wrong-p2p", ["wrong_sum", "ok"], "gives a wrong sum, without P2P it works"),
        ("die", ["error", "error"], "fails, and without P2P it does not work either"),
    ],
)
def test_wrong_sums_and_dying_ranks_are_told_apart(faults: str, statuses: list[str], words: str) -> None:
    code, document, _ = deep(faults, deadline=20)
    assert [run["status"] for run in document["all_reduce"]] == statuses
    assert words in document["verdict"]["why"]
    assert code == (0 if "ok" in statuses else 1)
    if statuses[0] == "error":
        assert "NCCL error" in document["all_reduce"][0]["error"]


def test_damaged_peer_copies_turn_p2p_off_although_the_sum_is_right() -> None:
    code, document, _ = deep("damage-copy", deadline=20)
    assert (code, document["copies"]["status"]) == (1, "wrong_data")
    assert (document["verdict"]["p2p"], document["verdict"]["why"]) == (
        False, "peer copies arrive damaged, without P2P it works",
    )  # fmt: skip


@pytest.mark.slow
def test_a_copy_that_hangs_names_its_pair_and_keeps_what_was_measured() -> None:
    _, document, _ = deep("hang-copy")
    copies = document["copies"]
    assert (copies["status"], copies["at"]) == ("hang", "GPU 0 to GPU 1")
    assert len(copies["host_device"]) == 2


def test_no_torch_and_no_gpu_are_reasons_and_no_crash() -> None:
    code, document, _ = deep("import", deadline=10)
    assert code == 1
    assert "libcudart" in document["torch"]["tried"][sys.executable]
    _, document, _ = deep("no-gpu", deadline=10)
    assert "sees no GPU" in document["torch"]["tried"][sys.executable]


def test_the_gpus_that_are_named_are_the_ones_that_are_used(tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = {"gpus": [4, 6]}
    code, document, _ = deep(deadline=20, request=asked, FAKE_TORCH_GPUS="8", FAKE_TORCH_LOG=str(log))
    assert (code, document["verdict"]["works"]) == (0, True)
    assert [row["gpu"] for row in document["copies"]["host_device"]] == [4, 6]
    assert [(row["from"], row["to"]) for row in document["copies"]["peers"]] == [(4, 6), (6, 4)]
    first = json.loads(log.read_text().splitlines()[0])
    assert (first["CUDA_VISIBLE_DEVICES"], first["CUDA_DEVICE_ORDER"]) == ("4,6", "PCI_BUS_ID")


@pytest.mark.parametrize(("gpus", "seen"), [(4, 2), ([0, 5], 1), (2, 1)])
def test_fewer_gpus_than_were_asked_for_prove_nothing(gpus: Any, seen: int) -> None:
    code, document, _ = deep(deadline=20, request={"gpus": gpus}, FAKE_TORCH_GPUS=str(min(seen, 2)))
    wanted = gpus if isinstance(gpus, int) else len(gpus)
    assert code == 1
    assert document["verdict"] == unproven(f"torch sees {seen} of {wanted} GPUs")
    assert len(document["copies"]["host_device"]) == seen


@pytest.mark.parametrize(
    ("runs", "works", "words"),
    [
        ([(2, True, "ok"), (4, True, "ok")], True, "right over 2 and 4"),
        ([(2, True, "ok")], None, "not tried over 4 GPUs"),
        ([], None, "not tried over 4 GPUs"),
        ([(2, True, "hang"), (2, False, "ok")], None, "without P2P it was not tried over 4 GPUs"),
        ([(2, True, "hang")], None, "without P2P it was not tried over 4 GPUs"),
        ([(2, True, "hang"), (2, False, "ok"), (4, False, "ok")], True, "without P2P it works"),
        ([(2, True, "hang"), (2, False, "hang")], False, "does not work either"),
    ],
)
def test_a_proof_is_a_right_sum_over_all_gpus(runs: list[Any], works: bool | None, words: str) -> None:
    said = [{"ranks": ranks, "p2p": p2p, "status": status} for ranks, p2p, status in runs]
    found = verdict(said, {"status": "ok"}, 4)
    assert found["works"] is works and words in found["why"]
    assert (proven_advice({"verdict": found}) is not None) is (works is True)


def test_multicast_is_off_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deep(deadline=20, FAKE_TORCH_LOG=str(log))
    first = json.loads(log.read_text().splitlines()[0])
    assert (first["NCCL_NVLS_ENABLE"], first["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    assert first["MASTER_ADDR"] == "127.0.0.1"
    log.unlink()
    deep(deadline=20, FAKE_TORCH_LOG=str(log), NCCL_NVLS_ENABLE="1")
    assert json.loads(log.read_text().splitlines()[0])["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.slow
def test_piped_it_does_all_of_it_and_leaves_no_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    request = {"pythons": [sys.executable], "deadline_s": 20, "bytes": 1 << 20}
    given = {"program": PROGRAM.read_text("utf-8"), "request": request}
    done = subprocess.run(
        [sys.executable, "-B", "-c", BOOT, "--stdin"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=home,
        env=environment(HOME=str(home), TMPDIR=str(home), PYTHONPYCACHEPREFIX=str(home)),
        timeout=60,
    )
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]["p2p"]) == (0, True)
    assert [run["ranks"] for run in document["all_reduce"]] == [2]
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_what_killed_ranks_leave_in_shared_memory_is_removed(tmp_path: Path) -> None:
    others = [Path(f"/dev/shm/{name}-{os.getpid()}") for name in ("nccl-before", "unrelated")]
    ours = Path(f"/dev/shm/nccl-{os.getpid()}-rank")
    for path in others:
        path.write_text("x")
    try:
        _, document, _ = deep("hang-p2p", FAKE_TORCH_SHM=str(ours))
        assert document["all_reduce"][0]["status"] == "hang"
        assert not ours.exists()
        assert all(path.exists() for path in others)
    finally:
        for path in (*others, ours):
            path.unlink(missing_ok=True)


def test_p2p_that_the_environment_turns_off_is_still_tried(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deep(deadline=20, FAKE_TORCH_LOG=str(log), NCCL_P2P_DISABLE="1")
    assert json.loads(log.read_text().splitlines()[0])["NCCL_P2P_DISABLE"] is None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_probe(how: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    probe = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment("hang", FAKE_TORCH_LOG=str(log)),
    )
    assert probe.stdin
    probe.stdin.write(json.dumps({"pythons": [sys.executable], "deadline_s": 60, "bytes": 1 << 20}))
    probe.stdin.close()
    for _ in range(200):
        if log.exists() and len(log.read_text().splitlines()) == 2:
            break
        time.sleep(0.1)
    ranks = [json.loads(line)["pid"] for line in log.read_text().splitlines()]
    assert len(ranks) == 2 and all(_runs(pid) for pid in ranks)
    probe.send_signal(how)
    probe.wait(20)
    for _ in range(50):
        if not any(_runs(pid) for pid in ranks):
            break
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in ranks)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"bytes": 0}, "bytes must be a positive number"),
        ({"bytes": 10}, "bytes must be at least"),
        ({"gpus": 0}, "gpus must be"),
        ({"gpus": []}, "gpus must be"),
        ({"gpus": [0, -1]}, "gpus must be"),
        ({"gpus": True}, "gpus must be"),
        ({"p2p": "maybe"}, "p2p must be auto, on or off"),
        ({"colour": "red"}, "unknown keys: colour"),
        ([], "must be a JSON object"),
        ("not json", "Expecting value"),
    ],
)
def test_wrong_requests_are_refused_with_the_key(request_: Any, words: str) -> None:
    text = request_ if isinstance(request_, str) else json.dumps(request_)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--stdin"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr


# -- findings ---------------------------------------------------------------------------------------

RTX = GpuNeed(("RTX PRO 6000 Blackwell",), 4, "12.0")


def document(**changes: Any) -> dict[str, Any]:
    peers = [
        {"from": a, "to": b, "gb_s": 54.0, "direct": True, "whole": True}
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    rows = [{"gpu": i, "to_device_gb_s": 55.0, "to_host_gb_s": 54.0, "whole": True} for i in range(4)]
    base: dict[str, Any] = {
        "torch": {"python": "/p", "gpus": 4},
        "copies": {"status": "ok", "host_device": rows, "peers": peers},
        "all_reduce": [{"ranks": 4, "p2p": True, "status": "ok", "bus_gb_s": 40.0, "latency_us": 30.0}],
        "stuck": [],
        "verdict": {
            "p2p": True,
            "works": True,
            "env": {},
            "flags": {},
            "why": "all_reduce is right over 4 GPUs",
        },
    }
    return {**base, **changes}


def judged(needs: MakeNeeds, name: str = "rtx-pro-6000-x4", **changes: Any) -> dict[str, tuple[str, str]]:
    wanted = needs(gpu=RTX)
    findings = deep_findings(wanted, gpu_host(name), document(**changes))
    return {finding.id: (finding.status, finding.summary) for finding in findings}


def test_a_good_document_is_all_ok(needs: MakeNeeds) -> None:
    assert {status for status, _ in judged(needs).values()} == {"ok"}


def test_a_real_hosts_answer_is_all_ok_and_proves_p2p(needs: MakeNeeds) -> None:
    real = json.loads((ROOT / "tests" / "fixtures" / "h200x2" / "deep.json").read_text("utf-8"))
    wanted = needs(gpu=GpuNeed(("H200",), 2, "9.0"))
    findings = deep_findings(wanted, gpu_host("h200-x2"), real)
    assert {finding.id: finding.status for finding in findings} == {
        "deep.host_device": "ok",
        "deep.peer": "ok",
        "deep.all_reduce": "ok",
    }
    advice = proven_advice(real)
    assert advice is not None and (advice.p2p, advice.env, advice.flags) == (True, {}, {})


def test_p2p_that_hangs_warns_and_gives_the_proven_settings(needs: MakeNeeds) -> None:
    runs = [
        {"ranks": 2, "p2p": True, "status": "hang", "at": "first all_reduce"},
        {"ranks": 2, "p2p": False, "status": "ok", "bus_gb_s": 12.0, "latency_us": 60.0},
    ]
    verdict = {
        "p2p": False, "works": True, "env": {"NCCL_P2P_DISABLE": "1"},
        "flags": {"disable-custom-all-reduce": True},
        "why": "with P2P all_reduce over 2 GPUs hangs, without P2P it works",
    }  # fmt: skip
    found = judged(needs, all_reduce=runs, verdict=verdict)
    assert found["deep.all_reduce"][0] == "warn"
    advice = proven_advice(document(all_reduce=runs, verdict=verdict))
    assert advice and (advice.p2p, advice.proven, advice.env) == (False, True, {"NCCL_P2P_DISABLE": "1"})


def test_nothing_that_works_fails(needs: MakeNeeds) -> None:
    runs = [{"ranks": 2, "p2p": p2p, "status": "error", "at": "start", "error": "x"} for p2p in (True, False)]
    verdict = {"p2p": None, "works": False, "env": {}, "flags": {}, "why": "it does not work"}
    assert judged(needs, all_reduce=runs, verdict=verdict)["deep.all_reduce"][0] == "fail"
    assert proven_advice(document(verdict=verdict)) is None


def test_slow_and_damaged_copies_are_judged_by_the_link(needs: MakeNeeds) -> None:
    good = document()["copies"]
    slow = {**good, "host_device": [{**row, "to_device_gb_s": 11.0} for row in good["host_device"]]}
    assert judged(needs, copies=slow)["deep.host_device"][0] == "warn"
    damaged = {**good, "host_device": [{**good["host_device"][0], "whole": False}]}
    assert judged(needs, copies=damaged)["deep.host_device"][0] == "fail"
    slow_peer = {**good, "peers": [{**good["peers"][0], "gb_s": 9.0}]}
    assert judged(needs, copies=slow_peer)["deep.peer"][0] == "warn"
    through_host = {**good, "peers": [{**good["peers"][0], "gb_s": 9.0, "direct": False}]}
    assert judged(needs, copies=through_host)["deep.peer"] == (
        "ok",
        "copies between GPUs go through the host",
    )
    hang = {**good, "status": "hang", "at": "GPU 0 to GPU 1", "peers": []}
    assert judged(needs, copies=hang)["deep.peer"][0] == "fail"


def test_nvlink_is_held_to_its_own_rate(needs: MakeNeeds) -> None:
    wanted = needs(gpu=GpuNeed(("H200",), 2))
    findings = {f.id: f for f in deep_findings(wanted, gpu_host("h200-x2"), document())}
    assert findings["deep.peer"].status == "warn" and findings["deep.peer"].expected == ">= 239 GB/s"
    assert findings["deep.all_reduce"].status == "warn"


def test_bridged_pairs_are_held_to_nvlink_and_the_others_to_pcie(needs: MakeNeeds) -> None:
    bridged = ({0, 1}, {2, 3})
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    host = gpu_host("rtx-pro-6000-x4")
    matrix = Matrix((0, 1, 2, 3), {(a, b): "NV12" if {a, b} in bridged else "SYS" for a, b in pairs})
    gpus = tuple(replace(gpu, link_gen_max=4, link_width=16) for gpu in host.gpu.gpus)
    links = NvLinks(dict.fromkeys(range(4), (25.0,) * 12), {})
    host = replace(host, gpu=replace(host.gpu, gpus=gpus, nvlink=links, topology=matrix))

    def peer(bridge: float, other: float) -> tuple[str, str | None]:
        rows = [
            {
                "from": a,
                "to": b,
                "gb_s": bridge if {a, b} in bridged else other,
                "whole": True,
                "direct": True,
            }
            for a, b in pairs
        ]
        slow_bus = [{"ranks": 4, "p2p": True, "status": "ok", "bus_gb_s": 20.0, "latency_us": 30.0}]
        said = document(copies={**document()["copies"], "peers": rows}, all_reduce=slow_bus)
        found = {f.id: f for f in deep_findings(needs(gpu=GpuNeed((), 4)), host, said)}
        assert found["deep.all_reduce"].status == "ok"
        return found["deep.peer"].status, found["deep.peer"].expected

    assert peer(240.0, 22.0)[0] == "ok"
    assert peer(100.0, 22.0) == ("warn", ">= 150 GB/s")
    assert peer(240.0, 9.0) == ("warn", ">= 12 GB/s")


def test_torch_that_sees_fewer_gpus_than_the_recipe_uses_fails(needs: MakeNeeds) -> None:
    for seen in (1, 2):
        rows = document()["copies"]["host_device"][:seen]
        found = judged(
            needs,
            torch={"python": "/p", "gpus": seen},
            copies={"status": "ok", "host_device": rows, "peers": []},
            all_reduce=[],
            verdict=unproven("fewer"),
        )
        assert found["deep.all_reduce"][0] == "fail" and "fewer GPUs" in found["deep.all_reduce"][1]


def test_time_that_ran_out_is_skipped_and_a_hang_that_nothing_mends_fails(needs: MakeNeeds) -> None:
    right = {"ranks": 2, "p2p": True, "status": "ok", "bus_gb_s": 40.0, "latency_us": 30.0}
    early = judged(needs, all_reduce=[right], verdict=verdict([right], {"status": "ok"}, 4))
    assert early["deep.all_reduce"][0] == "skipped"
    hang = {"ranks": 2, "p2p": True, "status": "hang", "at": "first all_reduce"}
    stuck = judged(needs, all_reduce=[hang], verdict=verdict([hang], {"status": "ok"}, 4))
    assert stuck["deep.all_reduce"][0] == "fail"


def test_one_gpu_of_several_has_nothing_to_prove(needs: MakeNeeds) -> None:
    one = {**document()["copies"], "host_device": document()["copies"]["host_device"][:1], "peers": []}
    wanted = needs(gpu=replace(RTX, count=1))
    verdict = {
        "p2p": None,
        "works": True,
        "env": {},
        "flags": {},
        "why": "a single GPU needs no NCCL settings",
    }
    said = document(copies=one, all_reduce=[], verdict=verdict)
    found = {f.id: (f.status, f.summary) for f in deep_findings(wanted, gpu_host("rtx-pro-6000-x4"), said)}
    assert found["deep.all_reduce"] == ("ok", "a single GPU needs no NCCL settings")
    assert "deep.peer" not in found


def test_processes_that_cannot_be_ended_fail(needs: MakeNeeds) -> None:
    assert judged(needs, stuck=[4242])["deep.processes"][0] == "fail"


@pytest.mark.parametrize(
    "broken", [None, {}, {"torch": 1}, {"verdict": {}, "copies": {}, "torch": {}}, {"copies": None}]
)
def test_a_document_that_cannot_be_read_is_skipped(broken: Any, needs: MakeNeeds) -> None:
    findings = deep_findings(needs(gpu=RTX), gpu_host("rtx-pro-6000-x4"), broken)
    assert {finding.status for finding in findings} == {"skipped"}
    assert proven_advice(broken) is None


def test_no_torch_is_skipped_with_what_was_tried(needs: MakeNeeds) -> None:
    findings = deep_findings(
        needs(gpu=RTX),
        gpu_host("rtx-pro-6000-x4"),
        document(
            torch={"python": None, "tried": {"/usr/bin/python3": "No module named 'torch'"}},
            copies=None,
            all_reduce=[],
            verdict={"p2p": None, "works": None, "env": {}, "flags": {}, "why": "no Python with torch"},
        ),
    )
    assert {finding.status for finding in findings} == {"skipped"}
    assert "No module named 'torch'" in findings[0].summary
