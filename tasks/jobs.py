"""Long work on a host: detached, resumable, watched from the controller.

Started once for a key (the digest of its inputs), it survives everything but the host's death:
a dropped session, a dead controller, Ctrl-C. Whoever comes back with the same key attaches; with
another key they are refused and told what runs. The mechanism on the host is `onhost/job.sh`.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tasks.remote import LostHost, Remote, quote, write_file

HEARTBEAT_SECONDS = 10
SHOW_SECONDS = 5
# What a rate is measured over, and how much of it an estimate needs: connections come up to speed slowly.
RATE_SECONDS = 60
ESTIMATE_SECONDS = 10
LOST_SECONDS = 600
BUSY_SECONDS = 20
REPLACED = "another run with other settings began its own"
LOG_BYTES = 4000


@dataclass(frozen=True)
class JobState:
    """What `job.sh status` said. Times are the host's, in Unix seconds; `cancelled` is by what, if it was."""

    state: str
    key: str
    rc: int | None
    started: int | None
    ended: int | None
    now: int | None
    log: str
    result: str
    cancelled: str | None = None
    ran: int | None = None

    @property
    def elapsed(self) -> int:
        """Seconds from start to end, or to now while it runs (by the uptime: clocks are set)."""
        if self.ran is not None:
            return self.ran
        if self.started is None:
            return 0
        return (self.ended or self.now or self.started) - self.started


@dataclass(frozen=True)
class Progress:
    """One progress line of an onhost program."""

    phase: str
    done: float
    total: float
    unit: str
    note: str


@dataclass(frozen=True)
class Job:
    """Work to do once: where its state lies, what it is, and for which inputs.

    `inputs` is for work that is done anew at every asking, under a key of its own: what the keys of equal
    askings begin with. One of them that runs is attached to.
    """

    name: str
    folder: str
    key: str
    argv: tuple[str, ...]
    stdin: str = ""
    env: tuple[tuple[str, str], ...] = ()
    deadline: float = 6 * 3600
    inputs: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `result` is the JSON document of its program, when it printed one."""

    ok: bool
    seconds: int
    result: dict[str, Any]
    log: str
    why: str | None = None
    cancelled: bool = False


def cancelled_by(whom: str, seconds: int, result: dict[str, Any], log: str) -> Outcome:
    """The outcome of a job that somebody ended on its host."""
    why = f"it was cancelled on the host ({whom})"
    return Outcome(False, seconds, result, log, why, cancelled=True)


def parse_status(text: str) -> JobState:
    """The answer of `job.sh status`. Unknown or missing fields are None or empty, never an error."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(name: str) -> int | None:
        value = fields.get(name, "")
        return int(value) if value.isdigit() else None

    def decoded(name: str) -> str:
        try:
            return base64.b64decode(fields.get(name, "")).decode("utf-8", "replace")
        except ValueError:
            return ""

    return JobState(
        state=fields.get("state", "absent"),
        key=fields.get("key", ""),
        rc=number("rc"),
        started=number("started"),
        ended=number("ended"),
        now=number("now"),
        log=decoded("log"),
        result=decoded("result"),
        cancelled=fields.get("cancelled") or None,
        ran=number("ran"),
    )


def last_progress(log: str) -> Progress | None:
    """The newest `#progress {...}` line of a log."""
    for line in reversed(log.splitlines()):
        if line.startswith("#progress "):
            try:
                data = json.loads(line[len("#progress ") :])
                return Progress(
                    str(data.get("phase", "")),
                    float(data.get("done", 0)),
                    float(data.get("total") or 0),
                    str(data.get("unit", "")),
                    str(data.get("note", "")),
                )
            except (ValueError, TypeError, AttributeError):
                continue
    return None


def log_lines(log: str, count: int = 20) -> list[str]:
    """The last lines of a log without progress lines; `\\r` bars count as line ends."""
    lines = [line.rstrip() for line in log.replace("\r", "\n").splitlines()]
    return [line for line in lines if line and not line.startswith("#progress ")][-count:]


def in_units(value: float, unit: str) -> str:
    """A count in its unit; bytes in the decimal units that hubs and disks use."""
    if unit != "bytes":
        return f"{value:g}"
    for name in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {name}"
        value /= 1000
    return f"{value:.4g} TB"


def in_time(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 10 s, 2 h 5 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Meter:
    """Turns progress into `62 % · 48/78 · 12 MB/s · 40 s left`, phase by phase."""

    def __init__(self) -> None:
        self._phase = ""
        self._seen: deque[tuple[float, float]] = deque()

    def line(self, progress: Progress, clock: float) -> str:
        """What to show; `clock` in seconds, from any steady origin."""
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._seen.clear()
        self._seen.append((clock, progress.done))
        # of those older than the window the newest stays: it is where the window begins
        while len(self._seen) > 2 and clock - self._seen[1][0] >= RATE_SECONDS:
            self._seen.popleft()
        parts = [progress.phase]
        if progress.total > 0:
            parts.append(f"{min(100, 100 * progress.done / progress.total):.0f} %")
            unit = "" if progress.unit == "bytes" else f" {progress.unit}"
            done, total = in_units(progress.done, progress.unit), in_units(progress.total, progress.unit)
            parts.append(f"{done} of {total}{unit}")
        spent, made = clock - self._seen[0][0], progress.done - self._seen[0][1]
        if spent >= SHOW_SECONDS and made > 0:
            rate = made / spent
            if progress.unit == "bytes":
                parts.append(f"{in_units(rate, 'bytes')}/s")
            if progress.total > progress.done and spent >= ESTIMATE_SECONDS:
                parts.append(f"{in_time((progress.total - progress.done) / rate)} left")
        if progress.note:
            parts.append(progress.note)
        return " · ".join(parts)


def start_script(job: Job, program: str) -> str:
    """The sh that hands a job to `job.sh` (at `program`) and starts it; its key decides whether it runs."""
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in job.env)
    command = exports + "exec " + " ".join(quote(part) for part in job.argv) + "\n"
    folder, tag = quote(job.folder), secrets.token_hex(4)
    return (
        f"umask 077; mkdir -p {folder} && {write_file(f'{job.folder}/command.{tag}', command)}"
        f" && cat > {quote(f'{job.folder}/input.{tag}')}"
        f" && sh {quote(program)} start {folder} {quote(job.key)} {tag} {quote('rackwright-job-' + job.name)}"
    )


def status(remote: Remote, program: str, folder: str, log_bytes: int = LOG_BYTES) -> JobState:
    """Ask how a job stands; without its program (uninstalled) it is absent. Raises LostHost."""
    ask = f"sh {quote(program)} status {quote(folder)} {log_bytes}"
    done = remote.run(f"[ ! -f {quote(program)} ] || {ask}", timeout=60)
    if not done.ok:
        raise LostHost(done.stderr.strip() or f"its status could not be read (exit code {done.rc})")
    return parse_status(done.stdout)


def run_job(
    remote: Remote,
    program: str,
    job: Job,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Have a job done: start it or attach to it, show its progress, and wait for its end.

    Lost connections are taken up again for ten minutes; the job goes on meanwhile.
    """
    began = clock()
    while True:
        answer = remote.run(start_script(job, program), stdin=job.stdin or "\n", timeout=90)
        word, _, rest = answer.stdout.strip().partition(" ")
        if word == "other" and job.inputs and rest.startswith(job.inputs):
            job = replace(job, key=rest)
        elif word == "busy":
            sleep(0.5)  # another controller is starting the same job this very moment
        else:
            break
        if clock() - began > BUSY_SECONDS:
            break
    if word == "other":
        why = f"another {job.name} job is running for other inputs ({rest[:12]})"
        return Outcome(False, 0, {}, "", f"{why}\nFix: wait until it ends (rackwright status INVENTORY)")
    if word == "busy":
        why = f"another run has been starting {job.name} for {BUSY_SECONDS} s; run again in two minutes"
        return Outcome(False, 0, {}, "", why)
    if word not in ("started", "attached", "done"):
        why = answer.stderr.strip() or answer.stdout
        fix = "Fix: mend that on the host, then run this again"
        return Outcome(False, 0, {}, "", f"the job could not be started: {why}\n{fix}")
    if word == "attached":
        say(f"{job.name}: already running on the host, attached to it")
    meter, shown, shown_at, lost_at, seen = Meter(), "", clock(), None, word in ("started", "attached")
    while True:
        try:
            now = status(remote, program, job.folder)
            lost_at = None
        except LostHost as lost:
            lost_at = lost_at or clock()
            if clock() - lost_at > LOST_SECONDS:
                return Outcome(
                    False, int(clock() - began), {}, "", f"the host is gone: {lost}; the job may go on there"
                )
            say(f"{job.name}: connection lost ({lost}); the job goes on, connecting again")
            sleep(2)
            try:
                remote.reconnect()
            except LostHost:
                sleep(5)
            continue
        if now.state != "absent" and now.key != job.key:
            # whoever may end a job of other inputs has, and then began its own in the same place
            return cancelled_by(REPLACED, int(clock() - began), {}, "")
        if now.state == "absent" and seen:
            # nothing else takes a job's folder away
            return cancelled_by("uninstall", int(clock() - began), {}, "")
        if now.state in ("done", "dead", "absent"):
            return outcome_of(job, now)
        seen = True
        progress = last_progress(now.log)
        lines = log_lines(now.log, 1)
        line = meter.line(progress, clock()) if progress else (lines[-1] if lines else "")
        since = clock() - shown_at
        if (line != shown and since >= SHOW_SECONDS) or since >= HEARTBEAT_SECONDS:
            say(f"{job.name}: {in_time(now.elapsed)}: {line[:160]}")
            shown, shown_at = line, clock()
        if now.elapsed > job.deadline:
            remote.run(f"sh {quote(program)} cancel {quote(job.folder)}", timeout=60)
            return Outcome(
                False, now.elapsed, {}, now.log, f"took longer than {in_time(job.deadline)}; ended it"
            )
        sleep(0.3 if clock() - began < 5 else 2)


def outcome_of(job: Job, now: JobState) -> Outcome:
    """A finished, dead or vanished job as an outcome with a reason."""
    try:
        result = json.loads(now.result) if now.result.strip() else {}
    except ValueError:
        result = {}
    if not isinstance(result, dict):
        result = {}
    if now.cancelled:
        return cancelled_by(now.cancelled, now.elapsed, result, now.log)
    if now.state == "done" and now.rc == 0:
        return Outcome(True, now.elapsed, result, now.log)
    if now.state == "done":
        why = f"ended with exit code {now.rc}"
    elif now.state == "dead":
        why = "died without a word (killed, out of memory, or the host restarted); run again to go on"
    else:
        why = f"left no state in {job.folder}; run again"
    return Outcome(False, now.elapsed, result, now.log, why)
