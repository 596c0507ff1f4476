"""Bring an engine up, and say how far it is: run the caller's scripts, then wait for a token.

    bring_up.py < request.json        progress on stderr, one JSON document on stdout; exit code 0 up, 1 not

Request:
    kind, names      the supervisor's kind ("systemd", "systemd-user", "supervisord") and all service names
    name             the service to wait for
    before           sh scripts that are run first (stop, reload, start), each with a deadline of its own
    status, log      sh scripts that print the supervisor's status and the engine's last log lines
    stop             sh script that stops the service: run when it fails, so that it does not crash for ever
    probe            {"base_url", "model", "key_file", "timeout"}: what a real token is asked of
    ready_seconds    until the token; `phase_seconds` {phase: seconds} for single phases
    warmup           a request of warmup.py without the engine's address, or null
    warmup_seconds   for all of the warm-up
    crashes          starts that may fail before it is given up
    history, spec    file that keeps this host's last starts, and the digest of what is started
    receipt          {"folder", "draft"}: written when it is up, so that a lost controller finds it done
    put_back         {"script", "service"}: when it does not come up, the script puts the files of what served
                     before back, and that service is started and waited for

Result: {"verdict": "pass|fail", "reason", "why", "seconds", "phases": [[name, seconds]], "facts", "warmup",
"log", "compiles", "identity", "pid", "before": {...} of the last start here,
"put_back": {"name", "up", "why"}}.
`reason`: "" or one of script, port, crash, ended, gave-up, phase, silent, deadline, warm-up, cancelled,
fault. Standard library, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable

try:
    from . import ready, service_state, startup_log, warmup
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import ready  # type: ignore[import-not-found,no-redef]
    import service_state  # type: ignore[import-not-found,no-redef]
    import startup_log  # type: ignore[import-not-found,no-redef]
    import warmup  # type: ignore[import-not-found,no-redef]

LOG_LINES = 400
# An engine whose log says that it is ready listens, or never will.
SILENT_SECONDS = 60.0
HISTORY = 20
STRANGER_SECONDS = 5.0
DOWN_LOOKS = 3
SAY_SECONDS = 2.0
SCRIPT_SECONDS = 1200


class Failed(Exception):
    """It is not up: `reason` is one of the words of this file's docstring."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason
        self.why = why


def as_failed(error: Exception) -> Failed:
    """Any exception as a start that failed: a fault of ours must not leave the host as nobody wants it."""
    return error if isinstance(error, Failed) else Failed("fault", told(error))


def told(error: Exception) -> str:
    """An exception in words."""
    return "%s: %s" % (type(error).__name__, error)


def progress(phase: str, done: int, total: int, unit: str, note: str) -> None:
    """One progress line."""
    line = {"phase": phase, "done": done, "total": total, "unit": unit, "note": note}
    tell("#progress " + json.dumps(line))


def tell(text: str) -> None:
    """One line on stderr: a full disk, where that is the job's log, must not fail a start."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def sh(script: str, seconds: float = SCRIPT_SECONDS) -> tuple[int, str, str]:
    """Run a script of the caller's: exit code, output, errors; foreign bytes are replaced."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 124, "", "no end within %d s" % seconds
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def must(script: str) -> None:
    """Run a script that has to succeed. Raises Failed."""
    rc, out, err = sh(script)
    if rc != 0:
        raise Failed("script", (err.strip() or out.strip() or "exit code %d" % rc)[-600:])


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    """A file that appears whole or not at all."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(new, mode)
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise


def read_json(path: str) -> Any:
    """The file's value, or None when there is none or it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def write_receipt(folder: str, draft: dict[str, Any], seconds: float, **detail: Any) -> None:
    """A receipt that the controller drafted, with what only the host knows."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    whole = {**draft, "seconds": round(seconds, 1), "at": stamp, "detail": {**draft["detail"], **detail}}
    write_json("%s/%s.json" % (folder, draft["step"]), whole)


class Service:
    """One service under a supervisor, as the request describes it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.name = request["name"]

    def state(self) -> dict[str, Any]:
        """How it stands now."""
        _, out, _ = sh(self.request["status"], 60)
        found = service_state.parse(self.request["kind"], out, self.request["names"])
        return found.get(self.name, dict(service_state.ABSENT))

    def log(self) -> str:
        """What this start of it has written."""
        return startup_log.this_start(sh(self.request["log"], 60)[1])

    def log_lines(self) -> list[str]:
        """The last lines, for people: of all tries, since a supervisor may just be trying again."""
        return startup_log.tidy(sh(self.request["log"], 60)[1])[-LOG_LINES:]

    def stop(self) -> None:
        """Stop it; what goes wrong then is not what people need to read."""
        sh(self.request["stop"])

    def look(self, pid: int | None, patience: float = 120) -> dict[str, Any]:
        """Does a token come out, within so many seconds? Never raises, whatever the port answers."""
        probe = self.request["probe"]
        try:
            return ready.look({**probe, "pid": pid, "timeout": min(float(probe["timeout"]), patience)})
        except Exception as error:
            return {"ready": False, "stage": "error", "why": told(error)}


class Timeline:
    """Which phase began when, what it may take, and how long it all will take by this host's last start."""

    def __init__(self, last: dict[str, Any] | None, limits: dict[str, int]) -> None:
        self.began = time.monotonic()
        self.last = last
        self.limits = {phase.name: phase.seconds for phase in startup_log.PHASES}
        self.limits.update(limits)
        self.rows: list[list[Any]] = []
        self.since = self.began
        self.mark = ""

    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.began

    def enter(self, reading: Any) -> None:
        """Note the phase, and before it those that came and went since the last look (as taking no time)."""
        now = time.monotonic()
        mark = "%s %d %d %s" % (reading.phase, reading.done, reading.total, reading.note)
        known = [row[0] for row in self.rows]
        self.rows += [[name, 0.0] for name in reading.seen if name not in known and name != reading.phase]
        if not self.rows or self.rows[-1][0] != reading.phase:
            self.rows.append([reading.phase, 0.0])
        if mark != self.mark:
            # a phase that gets on is not stuck: kernels are compiled one by one for an hour on cold caches
            self.mark, self.since = mark, now
        self.rows[-1][1] = now - self.began - sum(row[1] for row in self.rows[:-1])

    def overdue(self) -> str:
        """Why the present phase has taken too long, or ""."""
        phase = self.rows[-1][0] if self.rows else ""
        stuck, limit = time.monotonic() - self.since, self.limits.get(phase, 10**9)
        return "%s made no progress for %d s" % (phase, stuck) if stuck > limit else ""

    def left(self) -> str:
        """When it will be up, as far as the last start here tells."""
        if not self.last:
            return "the first start here: no estimate"
        rest = self._rest()
        took = spoken(float(self.last["seconds"]))
        return "up in about %s" % spoken(rest) if rest > 1 else "the last start took %s" % took

    def _rest(self) -> float:
        """Seconds that the last start took from this phase on; kept caches shorten those before."""
        last = self.last or {}
        name, spent = (self.rows[-1][0], self.rows[-1][1]) if self.rows else ("", 0.0)
        phases = last.get("phases") or []
        for place, (phase, seconds) in enumerate(phases):
            if phase == name:
                later: float = sum(took for _, took in phases[place + 1 :])
                return max(0.0, float(seconds) - spent) + later
        return float(last["seconds"]) - self.elapsed()

    def phases(self) -> list[list[Any]]:
        """Seconds by phase, in order; a phase that was entered twice has one row."""
        found: dict[str, float] = {}
        for name, seconds in self.rows:
            found[name] = found.get(name, 0.0) + seconds
        return [[name, round(seconds, 1)] for name, seconds in found.items()]


def spoken(seconds: float) -> str:
    """Seconds as people say them."""
    whole = int(seconds)
    return "%d s" % whole if whole < 60 else "%d min %d s" % (whole // 60, whole % 60)


def last_start(history: list[Any], spec: str) -> dict[str, Any] | None:
    """The newest start of the same thing, else the newest start of its service."""
    same = [entry for entry in history if entry.get("spec") == spec]
    newest: dict[str, Any] | None = (same or history or [None])[-1]
    return newest


def await_up(
    service: Service,
    say: Callable[[str, int, int, str, str], None] = progress,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Wait until a token comes out and the warm-up is done. Raises Failed, and what `check` raises."""
    request = service.request
    history = read_json(request["history"]) if request.get("history") else None
    history = history if isinstance(history, list) else []
    last = last_start(history, request.get("spec", ""))
    timeline = Timeline(last, request.get("phase_seconds") or {})
    state, reading = _await_token(service, timeline, say, check)
    ready_after = timeline.elapsed()
    warmed = None
    if request.get("warmup"):
        warmed = _warm(service, timeline, say, check)
        now = service.state()
        if not now["running"] or now["identity"] != state["identity"]:
            raise Failed("warm-up", "the engine ended during the warm-up (%s)" % now["state"])
    seconds = timeline.elapsed()
    compiles = startup_log.compiles(service.log())
    phases = timeline.phases() + ([[startup_log.WARM_UP, round(seconds - ready_after, 1)]] if warmed else [])
    entry = {
        "at": int(time.time()),
        "spec": request.get("spec", ""),
        "seconds": round(seconds, 1),
        "ready_seconds": round(ready_after, 1),
        "phases": phases,
        "compiles": compiles,
        "identity": state["identity"],
    }
    if request.get("history"):
        try:
            write_json(request["history"], [*history, entry][-HISTORY:])
        except OSError as error:  # a full disk does not make a start a failed one
            tell("this start is not remembered: %s" % error)
    before = (
        {key: last[key] for key in ("at", "seconds", "ready_seconds", "spec") if key in last}
        if last
        else None
    )
    return {**entry, "pid": state["pid"], "facts": reading.facts, "warmup": warmed, "before": before}


def _await_token(service: Service, timeline: Timeline, say: Any, check: Any) -> tuple[dict[str, Any], Any]:
    request = service.request
    seen: str | None = None
    failures, down = 0, 0
    strange_since: float | None = None
    said = 0.0
    crashed = False
    while True:
        check()
        state = service.state()
        text = service.log()
        reading = startup_log.read(text)
        timeline.enter(reading)
        answer: dict[str, Any] = {"ready": False, "stage": "closed", "why": ""}
        if state["running"]:
            if seen is not None and state["identity"] != seen:
                failures += 1
                crashed = True
            seen = state["identity"]
            left = float(request["ready_seconds"]) - timeline.elapsed()
            answer = service.look(state["pid"], max(5.0, left))
        if answer["ready"]:
            again = service.state()
            if again["running"] and again["identity"] == seen:
                reading = startup_log.read(service.log())  # it went on while the token was waited for
                timeline.enter(reading)
                return again, reading
        silent = reading.phase == "ready" and state["running"] and answer["stage"] == "closed"
        # a rival that is still stopping may hold the port for a moment, so strangers must stay to count
        strange = answer["stage"] == "stranger"
        strange_since = (strange_since or time.monotonic()) if strange else None
        if strange_since and (crashed or time.monotonic() - strange_since > STRANGER_SECONDS):
            raise Failed("port", answer["why"])
        waits = state["state"] in ("auto-restart", "BACKOFF")
        crashed = crashed or waits or state["state"] in service_state.GAVE_UP
        if crashed and not state["running"]:
            held = ready.strangers(
                _port(request), state["pid"] or os.getpid(), request["probe"].get("container")
            )
            if held and port_is_refused(text):
                raise Failed("port", "port %d is taken by %s" % (_port(request), " and ".join(held)))
        if state["state"] in service_state.GAVE_UP:
            raise Failed("gave-up", "the engine ends as soon as it starts")
        down = down + 1 if not state["running"] and not waits else 0
        if down >= DOWN_LOOKS and (seen is not None or timeline.elapsed() > 5):
            raise Failed("ended", "the engine ended (%s)" % state["state"])
        if failures >= int(request.get("crashes", 3)):
            raise Failed("crash", "the engine crashed %d times while starting" % failures)
        if timeline.elapsed() > float(request["ready_seconds"]) and crashed:
            took = spoken(request["ready_seconds"])
            raise Failed("crash", "the engine crashes while starting; no token within %s" % took)
        if timeline.elapsed() > float(request["ready_seconds"]):
            raise Failed(
                "deadline",
                "no token within %s; it is at: %s%s"
                % (
                    spoken(request["ready_seconds"]),
                    reading.phase,
                    ": " + answer["why"] if answer["why"] else "",
                ),
            )
        late = timeline.overdue()
        if silent and (late or time.monotonic() - timeline.since > SILENT_SECONDS):
            raise Failed("silent", "the engine says that it is ready, but %s" % answer["why"])
        if late:
            raise Failed("phase", late)
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            phase = "waiting to try again" if waits else reading.phase
            note = ", ".join(part for part in (reading.note, timeline.left()) if part)
            say(phase, reading.done, reading.total, reading.unit, note)
        time.sleep(0.25 if timeline.elapsed() < 10 else 1.5)


def port_is_refused(log: str) -> bool:
    """The log says that the engine's port was not free."""
    return re.search("[Aa]ddress already in use|attempting to bind", log) is not None


def _port(request: dict[str, Any]) -> int:
    return int(request["probe"]["base_url"].rsplit(":", 1)[1])


def _warm(service: Service, timeline: Timeline, say: Any, check: Any) -> dict[str, Any]:
    request, probe = service.request, service.request["probe"]
    end = time.monotonic() + float(request.get("warmup_seconds", 3600))

    def patient() -> None:
        check()
        if time.monotonic() > end:
            raise Failed("warm-up", "the warm-up took longer than %s" % spoken(request["warmup_seconds"]))

    wanted = {key: probe[key] for key in ("base_url", "model", "key_file")}
    try:
        result = warmup.warm_up({**request["warmup"], **wanted}, say, patient)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # odd answers
        raise Failed("warm-up", told(error)) from error
    if result["verdict"] != "pass":
        raise Failed("warm-up", "a warm-up request failed: %s" % result["why"])
    return result


def failure(service: Service, error: Failed, seconds: float) -> dict[str, Any]:
    """The result of a start that failed, with the log."""
    text = service.log()
    reading = startup_log.read(text)
    return {
        "verdict": "fail",
        "reason": error.reason,
        "why": error.why,
        "phase": reading.phase,
        "seconds": round(seconds, 1),
        "log": service.log_lines(),
    }


def put_back(request: dict[str, Any]) -> dict[str, Any]:
    """Start again what served before: whether it is up, and why not."""
    service = Service(request["service"])
    tell("it does not come up: %s is put back" % service.name)
    try:
        must(request["script"])
        must(request["service"]["start"])
        await_up(service)
    except Exception as error:
        return {"name": service.name, "up": False, "why": as_failed(error).why}
    return {"name": service.name, "up": True, "why": ""}


def main() -> int:
    """Run it as a program."""
    request = json.load(sys.stdin)
    service = Service(request)
    began = time.monotonic()
    try:
        for script in request.get("before") or []:
            must(script)
        result = {"verdict": "pass", "reason": "", "why": "", **await_up(service)}
    except Exception as error:
        result = failure(service, as_failed(error), time.monotonic() - began)
        service.stop()
        if request.get("put_back"):
            result["put_back"] = put_back(request["put_back"])
        print(json.dumps(result))
        return 1
    if request.get("receipt"):
        draft = request["receipt"]["draft"]
        detail = {
            "ready_seconds": result["seconds"],
            "start": {k: v for k, v in result.items() if k != "pid"},
        }
        try:
            write_receipt(request["receipt"]["folder"], draft, time.monotonic() - began, **detail)
        except OSError as error:  # the engine is up; the controller says it when it cannot write one either
            tell("the receipt cannot be written: %s" % error)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
