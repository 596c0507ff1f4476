"""Jobs: the mechanism on the host (run here), and what the controller makes of its answers."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from this_machine import Here

from tasks.jobs import (
    Job,
    JobState,
    Meter,
    Outcome,
    Progress,
    in_time,
    last_progress,
    outcome_of,
    parse_status,
    run_job,
    start_script,
    status,
)
from tasks.remote import LostHost, Remote, Result
from tasks.steps import is_left

# real processes, and time that they are given
pytestmark = pytest.mark.slow

tags = count(1)
JOB_SH = str(Path(__file__).parents[3] / "tasks" / "onhost" / "job.sh")


class OnHost:
    """`job.sh` on this machine, in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, key: str, command: str, stdin: str = "") -> str:
        argv = self.argv(key, command, stdin)
        return subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.strip()

    def argv(self, key: str, command: str, stdin: str = "") -> list[str]:
        """Leave the files of one controller, and what it then calls."""
        self.folder.mkdir(exist_ok=True)
        tag = f"{next(tags)}"
        (self.folder / f"command.{tag}").write_text(command)
        (self.folder / f"input.{tag}").write_text(stdin)
        return ["sh", JOB_SH, "start", str(self.folder), key, tag]

    def status(self) -> JobState:
        done = subprocess.run(
            ["sh", JOB_SH, "status", str(self.folder), "4000"], capture_output=True, text=True, timeout=30
        )
        return parse_status(done.stdout)

    def wait(self, condition: Callable[[JobState], bool]) -> JobState:
        for _ in range(200):
            now = self.status()
            if condition(now):
                return now
            time.sleep(0.05)
        raise AssertionError(f"never came: {now}")

    def cancel(self) -> None:
        subprocess.run(["sh", JOB_SH, "cancel", str(self.folder)], check=True, timeout=30)


@pytest.fixture
def job(tmp_path: Path) -> OnHost:
    return OnHost(tmp_path / "job")


def test_a_job_reads_its_input_and_leaves_result_log_and_exit_code(job: OnHost) -> None:
    assert job.start("k1", "cat; echo note >&2; exit 3", "hello") == "started"
    now = job.wait(lambda state: state.state == "done")
    assert (now.rc, now.result.strip(), now.log, now.key) == (3, "hello", "note\n", "k1")


def test_a_finished_job_is_not_run_again_for_the_same_key(job: OnHost, tmp_path: Path) -> None:
    count = f"echo x >> {tmp_path}/count"
    job.start("k1", count)
    job.wait(lambda state: state.state == "done")
    assert job.start("k1", count) == "done"
    assert job.start("k2", count) == "started"
    job.wait(lambda state: state.state == "done" and state.key == "k2")
    assert (tmp_path / "count").read_text() == "x\nx\n"


def test_a_failed_job_is_run_again_for_the_same_key(job: OnHost, tmp_path: Path) -> None:
    command = f"test -f {tmp_path}/mended"
    job.start("k1", command)
    assert job.wait(lambda state: state.state == "done").rc == 1
    (tmp_path / "mended").touch()
    assert job.start("k1", command) == "started"
    job.wait(lambda state: state.state == "done" and state.rc == 0)


def test_a_start_that_was_killed_holds_up_nobody(job: OnHost, tmp_path: Path) -> None:
    job.folder.mkdir()
    killed = subprocess.Popen(["sleep", "30"])
    hold(job.folder, killed.pid)
    assert job.start("k1", "true") == "busy"
    killed.kill()
    killed.wait()
    assert job.start("k1", "true") == "started"
    assert not (job.folder / "starter").is_symlink()
    assert job.wait(lambda state: state.state == "done").rc == 0


def test_a_start_whose_controller_died_ends_all_the_same(job: OnHost, tmp_path: Path) -> None:
    start = job.argv("k1", f"echo x >> {tmp_path}/count; exec sleep 30")
    orphan = subprocess.Popen(start, stdout=subprocess.PIPE)
    assert orphan.stdout is not None
    orphan.stdout.close()
    job.wait(lambda state: state.key == "k1")
    orphan.send_signal(signal.SIGHUP)
    orphan.wait(timeout=30)
    try:
        assert not (job.folder / "starter").is_symlink()
        assert job.start("k1", "exit 1") == "attached"
        assert (tmp_path / "count").read_text() == "x\n"
    finally:
        job.cancel()


def test_work_whose_leader_was_killed_is_still_the_job(job: OnHost, tmp_path: Path) -> None:
    work = f"echo x >> {tmp_path}/count; exec sleep 30"
    job.start("k1", work)
    job.wait(lambda state: (tmp_path / "count").exists())
    os.kill(int((job.folder / "pid").read_text()), signal.SIGKILL)
    try:
        time.sleep(0.2)
        assert job.status().state == "running"
        assert job.start("k1", work) == "attached"
    finally:
        job.cancel()
    assert job.status().state == "dead"
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_dead_leader_that_nobody_reaps_is_not_running(job: OnHost) -> None:
    job.start("k1", "exec sleep 30")
    job.cancel()
    zombie = subprocess.Popen(["true"])
    try:
        while Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        since = Path(f"/proc/{zombie.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        (job.folder / "pid").write_text(f"{zombie.pid}\n")
        (job.folder / "start").write_text(f"{since}\n")
        assert job.status().state == "dead"
    finally:
        zombie.wait()


def test_work_that_cannot_be_recorded_is_not_begun(job: OnHost, tmp_path: Path) -> None:
    (job.folder / "boot").mkdir(parents=True)
    assert job.start("k1", f"touch {tmp_path}/begun") == ""
    assert not (tmp_path / "begun").exists()


def test_a_controller_that_is_refused_changes_nothing_of_the_job_that_runs(job: OnHost) -> None:
    first = job.argv("k1", "sleep 1; cat", "first")
    second = job.argv("k2", "sleep 1; cat", "second")
    answers = [subprocess.run(argv, capture_output=True, text=True).stdout for argv in (first, second)]
    assert answers == ["started\n", "other k1\n"]
    assert job.wait(lambda state: state.state == "done").result == "first"
    left = {path.name for path in job.folder.iterdir() if path.name.startswith(("command", "input"))}
    assert left == {"command", "input"}


def one_of_them_starts(job: OnHost, work: str, controllers: int) -> None:
    """Controllers that begin at once start one job."""
    argvs = [job.argv("k1", work) for _ in range(controllers)]
    racing = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for argv in argvs]
    answers = [process.communicate(timeout=30)[0].strip() for process in racing]
    assert answers.count("started") == 1
    assert set(answers) <= {"started", "attached", "busy"}


def test_two_controllers_that_find_a_killed_start_begin_one_job(job: OnHost, tmp_path: Path) -> None:
    killed = subprocess.Popen(["sleep", "30"])
    job.folder.mkdir()
    hold(job.folder, killed.pid)
    killed.kill()
    killed.wait()
    work = f"echo x >> {tmp_path}/count; exec sleep 20"
    try:
        one_of_them_starts(job, work, 6)
        assert job.start("k1", work) in ("started", "attached")
        job.wait(lambda state: (tmp_path / "count").exists())
        assert (tmp_path / "count").read_text() == "x\n"
    finally:
        job.cancel()


def test_a_clock_that_is_set_changes_nothing_of_how_long_a_job_has_run(job: OnHost) -> None:
    job.start("k1", "exec sleep 30")
    try:
        (job.folder / "started").write_text("1000\n")
        assert job.wait(lambda state: state.state == "running").elapsed < 30
    finally:
        job.cancel()


def test_a_status_that_cannot_be_asked_is_no_answer(tmp_path: Path) -> None:
    class Full(Here):
        def run(self, script: str, **more: Any) -> Result:
            return Result(2, "", "sh: 1: Cannot fork")

    with pytest.raises(LostHost, match="Cannot fork"):
        status(cast(Remote, Full()), JOB_SH, str(tmp_path))
    gone = status(cast(Remote, Here()), str(tmp_path / "job.sh"), str(tmp_path))
    assert gone.state == "absent"


def test_the_same_key_attaches_and_another_is_refused_while_it_runs(job: OnHost) -> None:
    job.start("k1", "exec sleep 30")
    try:
        job.wait(lambda state: state.state == "running")
        assert job.start("k1", "exit 1") == "attached"
        assert job.start("k2", "exit 1") == "other k1"
    finally:
        job.cancel()
    assert job.wait(lambda state: state.state != "running").state in ("done", "dead")


def test_many_starts_at_once_make_one_job(job: OnHost, tmp_path: Path) -> None:
    try:
        one_of_them_starts(job, f"echo x >> {tmp_path}/count; exec sleep 20", 8)
        job.wait(lambda state: (tmp_path / "count").exists())
        assert (tmp_path / "count").read_text() == "x\n"
    finally:
        job.cancel()


@pytest.mark.slow
def test_a_killed_job_is_dead_and_runs_again(job: OnHost) -> None:
    job.start("k1", "exec sleep 30")
    job.wait(lambda state: state.state == "running")
    os.killpg(int((job.folder / "pid").read_text()), 9)
    job.wait(lambda state: state.state == "dead")
    assert job.start("k1", "exit 0") == "started"
    job.wait(lambda state: state.state == "done")


def test_a_reused_pid_of_another_process_or_boot_is_not_taken_for_the_job(job: OnHost) -> None:
    job.start("k1", "exec sleep 30")
    job.wait(lambda state: state.state == "running")
    pid = int((job.folder / "pid").read_text())
    try:
        (job.folder / "start").write_text("1\n")
        assert job.status().state == "dead"
    finally:
        os.killpg(pid, 9)


@pytest.mark.slow
def test_cancelling_ends_what_the_job_has_started_too(job: OnHost, tmp_path: Path) -> None:
    job.start("k1", f"sleep 300 & echo $! >{tmp_path}/child; wait")
    job.wait(lambda state: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip() != "")
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    job.cancel()
    for _ in range(100):
        if not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it lives on")


def test_a_cancelled_job_leaves_a_word_for_whoever_watches_it(job: OnHost) -> None:
    job.start("k1", "sleep 300")
    subprocess.run(["sh", JOB_SH, "cancel", str(job.folder), "uninstall"], check=True, timeout=30)
    now = job.wait(lambda now: now.state == "dead")
    outcome = outcome_of(Job("engine", str(job.folder), "k1", ()), now)
    assert outcome.why == "it was cancelled on the host (uninstall)"
    assert outcome.cancelled and not outcome.ok
    job.start("k1", "exit 0")
    now = job.wait(lambda now: now.state == "done")
    assert outcome_of(Job("engine", str(job.folder), "k1", ()), now).ok, "another start is not cancelled"


def test_a_job_whose_folder_is_taken_away_was_cancelled(tmp_path: Path) -> None:
    states = iter(["state=running\nkey=k\n", ""])

    class Host:
        def run(self, script: str, **_: object) -> Result:
            return Result(0, "started\n" if " start " in script else next(states), "")

    job = Job("engine", str(tmp_path), "k", ("true",))
    outcome = run_job(cast(Remote, Host()), "job.sh", job, lambda text: None, sleep=lambda seconds: None)
    assert outcome.why == "it was cancelled on the host (uninstall)"


def test_output_that_is_not_text_does_not_harm_the_answer(job: OnHost) -> None:
    job.start("k1", r"printf '\377\000\033[31mred' >&2")
    now = job.wait(lambda state: state.state == "done")
    assert "red" in now.log


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_damaged_answer_is_an_absent_job_and_never_an_error() -> None:
    assert parse_status("").state == "absent"
    assert parse_status("state=done\nrc=x\nlog=%%%").rc is None


def test_progress_is_the_newest_whole_line() -> None:
    log = (
        '#progress {"phase": "a", "done": 1, "total": 4, "unit": "files"}\nnoise\n'
        '#progress {"phase": "a", "done": 2, "total": 4, "unit": "files", "note": "x"}\n#progress {"pha'
    )
    assert last_progress(log) == Progress("a", 2, 4, "files", "x")


def test_the_meter_gives_rate_and_rest_after_some_seconds() -> None:
    meter = Meter()
    assert meter.line(Progress("get", 0, 1e9, "bytes", ""), 0) == "get · 0 % · 0 B of 1 GB"
    assert meter.line(Progress("get", 1e8, 1e9, "bytes", ""), 5).endswith("1 GB · 20 MB/s")
    assert "50 MB/s · 10 s left" in meter.line(Progress("get", 5e8, 1e9, "bytes", ""), 10)


def test_the_rate_is_that_of_the_last_minute() -> None:
    meter, size = Meter(), 1e12
    for second in range(0, 600, 2):
        meter.line(Progress("get", 1e8 * second, size, "bytes", ""), second)
    for second in range(600, 720, 2):
        line = meter.line(Progress("get", 6e10 + 1e6 * (second - 600), size, "bytes", ""), second)
    assert "1 MB/s" in line
    line = meter.line(Progress("verify", 0, 10, "files", ""), 720)
    assert line == "verify · 0 % · 0 of 10 files", "another phase has a rate of its own"


@pytest.mark.parametrize(("seconds", "words"), [(9, "9 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")])
def test_seconds_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


def test_an_outcome_says_why_it_failed() -> None:
    work = Job("engine", "/jobs/engine", "k", ("true",))
    failed = parse_status(
        f"state=done\nrc=1\nstarted=10\nended=15\nresult={encoded(json.dumps({'error': {}}))}"
    )
    assert (outcome_of(work, failed).ok, outcome_of(work, failed).seconds) == (False, 5)
    assert outcome_of(work, failed).result == {"error": {}}
    assert "died" in str(outcome_of(work, parse_status("state=dead")).why)


def hold(folder: Path, pid: int) -> None:
    """Leave a job's folder as it is while this process starts the job."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    since = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    (folder / "starter").symlink_to(f"{boot} {pid} {since}")


def test_a_start_that_another_controller_is_making_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    hold(folder, os.getpid())
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (folder / "starter").unlink()

    wanted = Job("build", str(folder), "k1", ("echo", '{"a": 1}'))
    outcome = run_job(cast(Remote, Here()), JOB_SH, wanted, lambda text: None, sleep=sleep)
    assert (outcome.ok, outcome.result) == (True, {"a": 1})


def test_a_start_that_never_ends_is_told(tmp_path: Path) -> None:
    hold(tmp_path, os.getpid())
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    wanted = Job("build", str(tmp_path), "k1", ("true",))
    outcome = run_job(
        cast(Remote, Here()), JOB_SH, wanted, lambda text: None, clock=lambda: clock[0], sleep=sleep
    )
    assert not outcome.ok
    assert outcome.why == "another run has been starting build for 20 s; run again in two minutes"


def asked_anew(folder: Path, inputs: str, asking: str, command: str, said: list[str]) -> Outcome:
    job = Job("bench", str(folder), f"{inputs}-{asking}", ("sh", "-c", command), inputs=inputs)
    return run_job(cast(Remote, Here()), JOB_SH, job, said.append, sleep=lambda seconds: time.sleep(0.05))


def test_the_same_asking_again_attaches_to_the_one_that_runs(tmp_path: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        first = pool.submit(asked_anew, tmp_path, "abc", "1", "sleep 2; echo '{\"by\": 1}'", said)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        second = asked_anew(tmp_path, "abc", "2", "echo '{\"by\": 2}'", said)
        assert (first.result().result, second.result) == ({"by": 1}, {"by": 1})
    assert said == ["bench: already running on the host, attached to it"]
    assert asked_anew(tmp_path, "abc", "3", "echo '{\"by\": 3}'", said).result == {"by": 3}


def test_a_run_whose_job_another_replaced_does_not_take_its_result(tmp_path: Path) -> None:
    other = Job("bench", str(tmp_path), "def-1", ("true",))

    def between_two_looks(seconds: float) -> None:
        script = f"sh {JOB_SH} cancel {tmp_path}; {start_script(other, JOB_SH)}"
        assert Here().run(script, stdin="\n").stdout == "started\n"

    first = Job("bench", str(tmp_path), "abc-1", ("sleep", "30"))
    outcome = run_job(cast(Remote, Here()), JOB_SH, first, lambda text: None, sleep=between_two_looks)
    assert (outcome.ok, outcome.cancelled) == (False, True)
    assert outcome.why == "it was cancelled on the host (another run with other settings began its own)"


def test_inputs_of_others_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(asked_anew, tmp_path, "abc", "1", "sleep 2", [])
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        outcome = asked_anew(tmp_path, "def", "1", "true", [])
        assert outcome.why == (
            "another bench job is running for other inputs (abc-1)\n"
            "Fix: wait until it ends (rackwright status INVENTORY)"
        )
        assert first.result().ok


def test_a_result_that_nobody_fetched_is_taken_for_an_hour() -> None:
    ended = JobState("done", "abc-1", 0, 100, 200, 300, "", "")
    assert is_left(ended, "abc")
    assert not is_left(ended, "def")
    assert not is_left(replace(ended, now=4000), "abc")
    assert not is_left(replace(ended, rc=1), "abc")
    assert is_left(replace(ended, state="running", rc=None, now=99999), "abc")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 16 kB")
def test_a_full_disk_is_named_where_a_job_begins(job: OnHost) -> None:
    job.folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", job.folder], check=True)
    try:
        full = subprocess.run(job.argv("k1", "true"), capture_output=True, text=True, timeout=30)
        assert f"{job.folder} cannot be written: " in full.stderr
        assert f"kB are free on {job.folder}" in full.stderr
        assert full.returncode == 1
    finally:
        subprocess.run(["umount", job.folder], check=True)
