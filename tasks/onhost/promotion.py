"""Let a faster mode earn its place on this host, or bring the safe mode back. Runs without the controller.

    promotion.py run FOLDER < request.json      the promotion; progress on stderr, one JSON document on stdout
    promotion.py guard FOLDER                   waits until the promotion is over; if it was killed, brings
                                                the safe mode back (started by `run` itself)

A file FOLDER/cancel asks it to bring the safe mode back; with FOLDER/abandoned nobody wants that any more.

The mode on trial listens on a loopback port that no client knows: whatever it answers, no user sees it.
Only when it has passed the acceptance and is not slower than the safe mode by more than the margin, it is
started on the clients' port; until then the safe mode is what starts with the host.

Request: `safe`, `trial`, `candidate` (each as bring_up.py takes a service, with `start`), `reload`,
`boot` {"safe", "candidate"} and `tidy` (sh scripts), `accept` (a request of accept.py), `final` (what differs
in the last check, on the clients' port), `bench` (of quickbench.py), `margin`, `baseline` {"acceptance",
"bench"} of the safe mode as far as it was proven before, `receipts` {"folder", "kept": [...], "back": [...],
"promotion"}, `deadline` in seconds for all of it, `python`, `instance`.

Result: {"verdict": "promoted|rolled-back|failed", "why", "reason", "safe", "candidate", "margin", "steps",
"away_seconds" (without a service for clients), "log"}. Exit code 0 promoted, 1 not. Python >= 3.8.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

try:
    from . import bring_up as bu
    from . import quickbench, ready, startup_log
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import bring_up as bu  # type: ignore[import-not-found,no-redef]
    import quickbench  # type: ignore[import-not-found,no-redef]
    import ready  # type: ignore[import-not-found,no-redef]
    import startup_log  # type: ignore[import-not-found,no-redef]

BACK_TRIES = 3
TRIAL_PORT = "the port that was chosen for the trial was taken"
HERE = os.path.dirname(os.path.abspath(__file__))


class Refused(Exception):
    """The faster mode did not earn its place: `reason` is a word, `why` a sentence, `log` what it wrote."""

    def __init__(self, reason: str, why: str, log: Any = ()) -> None:
        super().__init__(why)
        self.reason, self.why, self.log = reason, why, list(log)


class Promotion:
    """One promotion, its state in FOLDER/state.json, so that a guard can take over."""

    def __init__(self, request: dict[str, Any], folder: str) -> None:
        self.request = request
        self.folder = folder
        self.began = time.monotonic()
        self.steps: list[list[Any]] = []
        self.step_began = self.began
        self.step_name = ""
        self.away_since: float | None = None
        self.away = 0.0
        self.rolling_back = False
        self.result: dict[str, Any] = {
            "margin": request["margin"],
            "safe": {"mode": request["safe"]["mode"]},
            "candidate": {"mode": request["candidate"]["mode"]},
        }

    # -- state ---------------------------------------------------------------------------------------

    def save(self, **fields: Any) -> None:
        """Keep where it stands; a full disk must not stop a rollback."""
        state = {
            "phase": self.step_name,
            "steps": self.steps,
            "result": self.result,
            "boot": boot_id(),
            "settled": False,
            **fields,
        }
        try:
            bu.write_json(self.folder + "/state.json", state)
        except OSError as error:
            sys.stderr.write("cannot keep the state: %s\n" % error)

    def step(self, name: str) -> None:
        """Begin the next step."""
        self.still_wanted()
        now = time.monotonic()
        if self.step_name:
            self.steps.append([self.step_name, round(now - self.step_began, 1)])
        self.step_name, self.step_began = name, now
        sys.stderr.write("%s\n" % name)
        self.say(name, 0, 0, "", "")
        self.save()

    def say(self, phase: str, done: int, total: int, unit: str, note: str) -> None:
        """Progress of the present step."""
        name = self.step_name if phase == self.step_name else "%s: %s" % (self.step_name, phase)
        bu.progress(name, done, total, unit, note)

    def check(self) -> None:
        """Raise when somebody asked to end it, or when it takes too long."""
        self.still_wanted()
        if self.rolling_back:
            return
        if os.path.exists(self.folder + "/cancel"):
            raise Refused("cancelled", "a rollback was asked for while: %s" % self.step_name)
        if time.monotonic() - self.began > float(self.request["deadline"]):
            took = bu.spoken(self.request["deadline"])
            raise Refused("deadline", "it was not over within %s, at: %s" % (took, self.step_name))

    def still_wanted(self) -> None:
        """End at once where the host is uninstalled: whatever is started or written now would stay."""
        if os.path.exists(self.folder + "/abandoned") or not os.path.isdir(self.folder):
            sys.exit(1)

    # -- parts ---------------------------------------------------------------------------------------

    def service(self, which: str) -> Any:
        """One of the three services."""
        return bu.Service(self.request[which])

    def must(self, script: str) -> None:
        """Run a script of the controller's that has to succeed."""
        self.still_wanted()
        bu.must(script)

    def up(self, which: str) -> dict[str, Any]:
        """Start a service and wait until it is warm. Raises Refused with its log."""
        service = self.service(which)
        began = time.monotonic()
        try:
            self.must(self.request[which]["start"])
            return {"verdict": "pass", **bu.await_up(service, self.say, self.check)}
        except bu.Failed as error:
            failed = bu.failure(service, error, time.monotonic() - began)
            taken = which == "trial" and (
                error.reason == "port" or bu.port_is_refused("\n".join(failed["log"]))
            )
            if taken:
                raise Refused("trial-port", "%s: %s" % (TRIAL_PORT, failed["why"]), failed["log"]) from None
            raise Refused(error.reason, failed["why"], failed["log"]) from None

    def accept(self, which: str, **more: Any) -> dict[str, Any]:
        """Ask a service whether it serves the model: the same program, the same questions for every mode."""
        probe = self.request[which]["probe"]
        state = self.service(which).state()
        request = {**self.request["accept"], **more}
        request.update(base_url=probe["base_url"], api_key_file=probe["key_file"])
        expect = dict(request.get("expect") or {})
        if not probe.get("container"):  # a container's processes are not of the supervisor's making
            expect["identity"] = {**(expect.get("identity") or {}), "pid": state["pid"]}
        request["expect"] = expect
        document = self.program([self.request["python"], HERE + "/accept.py", "--stdin"], request)
        if not isinstance(document, dict) or "verdict" not in document:
            raise Refused(
                "acceptance", "the acceptance ended without a verdict", self.service(which).log_lines()
            )
        return document

    def program(self, argv: list[str], request: Any) -> Any:
        """Run a program with JSON in and out, passing its progress on; ended when the promotion is."""
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            reader = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
            reader.start()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request))
                process.stdin.close()
                while process.poll() is None:
                    self.check()
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                reader.join(5)
            out.seek(0)
            try:
                return json.loads(out.read())
            except ValueError:
                return None

    def _pass_on(self, stream: Any) -> None:
        for line in stream:
            if line.startswith("#progress "):
                try:
                    one = json.loads(line[len("#progress ") :])
                    self.say(one["phase"], one["done"], one["total"], one["unit"], one["note"])
                except (ValueError, KeyError, TypeError):
                    continue
            else:
                sys.stderr.write(line)

    def bench(self, which: str) -> list[Any]:
        """The short benchmark of a service. Raises Refused when a request fails."""
        probe = self.request[which]["probe"]
        wanted = {key: probe[key] for key in ("base_url", "model", "key_file")}
        result = quickbench.bench({**self.request["bench"], **wanted}, self.say, self.check)
        if result["verdict"] != "pass":
            mode = self.request[which]["mode"]
            why = "%s did not answer every request of the short benchmark: %s" % (mode, result["why"])
            raise Refused("benchmark", why, self.service(which).log_lines())
        rows: list[Any] = result["rows"]
        return rows

    def gone(self) -> None:
        """Clients have no service from now on."""
        if self.away_since is None:
            self.away_since = time.monotonic()

    def back(self) -> None:
        """Clients have a service again."""
        if self.away_since is not None:
            self.away += time.monotonic() - self.away_since
            self.away_since = None

    # -- the way up ----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Do all of it; whatever happens, a service is up at the end."""
        try:
            self.measure_safe()
            self.try_candidate()
            self.open_to_clients()
        except Refused as refused:
            return self.roll_back(refused.reason, refused.why, refused.log)
        except bu.Failed as failed:
            return self.roll_back(failed.reason, failed.why)
        except Exception as error:  # a fault of ours must not leave the host without a service
            return self.roll_back("fault", "%s: %s" % (type(error).__name__, error))
        return self.finish()

    def measure_safe(self) -> None:
        """The safe mode's column: it has to be up, accepted and measured, or there is nothing to compare."""
        mode = self.request["safe"]["mode"]
        self.step("measuring %s" % mode)
        safe, column = self.service("safe"), self.result["safe"]
        state = safe.state()
        if not state["running"] or not safe.look(state["pid"])["ready"]:
            self.gone()
            self.must(self.request["reload"])  # its files may just have been written anew
            column["start"] = brief(self.up("safe"))
            self.back()
        known = self.request.get("baseline") or {}
        column["acceptance"] = known.get("acceptance")
        if not column["acceptance"]:
            result = self.accept("safe")
            column["acceptance"] = counts(result)
            if result["verdict"] != "pass":
                raise Refused("safe-mode", "%s itself is not accepted: %s" % (mode, failed_checks(result)))
        # the better of this and an earlier measurement: clients may be asking meanwhile
        column["bench"] = quickbench.better(known.get("bench") or [], self.bench("safe"))

    def try_candidate(self) -> None:
        """On trial: start, warm-up, acceptance, benchmark, where no client can reach it."""
        mode, column = self.request["candidate"]["mode"], self.result["candidate"]
        self.step("starting %s on trial" % mode)
        taken = why_taken(self.request["trial"]["probe"])
        if taken:
            raise Refused("trial-port", "%s; nothing was stopped" % taken)
        self.gone()
        self.must(self.request["safe"]["stop"])
        self.must(self.request["reload"])
        started = self.up("trial")
        column["trial"] = brief(started)
        self.step("acceptance of %s" % mode)
        result = self.accept("trial")
        column["acceptance"] = result
        if result["verdict"] != "pass":
            why = "%s does not pass the acceptance: %s" % (mode, failed_checks(result))
            raise Refused("acceptance", why, self.service("trial").log_lines())
        self.step("short benchmark of %s" % mode)
        column["bench"] = self.bench("trial")
        column["compiles_after_warmup"] = self.compiled_since("trial", started)
        slow = quickbench.compare(self.result["safe"]["bench"], column["bench"], self.request["margin"])
        if slow:
            raise Refused("slower", "%s is slower: %s" % (mode, slow))
        state = self.service("trial").state()
        if not state["running"] or state["identity"] != started["identity"]:
            log = self.service("trial").log_lines()
            raise Refused("crash", "%s ended during its trial" % mode, log)

    def compiled_since(self, which: str, started: dict[str, Any]) -> int:
        """Kernels compiled while requests waited, after the warm-up."""
        return max(0, startup_log.compiles(self.service(which).log()) - int(started["compiles"]))

    def open_to_clients(self) -> None:
        """The same engine on the clients' port, checked once more."""
        mode, column = self.request["candidate"]["mode"], self.result["candidate"]
        self.step("starting %s for clients" % mode)
        self.must(self.request["trial"]["stop"])
        started = self.up("candidate")
        self.back()
        column["start"] = brief(started)
        self.step("last check of %s" % mode)
        result = self.accept("candidate", **self.request["final"])
        column["last_check"] = counts(result)
        if result["verdict"] != "pass":
            why = "%s does not pass the last check: %s" % (mode, failed_checks(result))
            raise Refused("acceptance", why, self.service("candidate").log_lines())

    def finish(self) -> dict[str, Any]:
        """Keep it; a mode whose proof cannot be written down (a full disk) does not stay. Idempotent."""
        try:
            return self.keep()
        except (OSError, bu.Failed) as error:
            mode = self.request["candidate"]["mode"]
            return self.roll_back(
                "disk", "%s earned its place, but its proof cannot be kept: %s" % (mode, error)
            )

    def keep(self) -> dict[str, Any]:
        """It has earned its place: from now on it starts with the host. Raises OSError and Failed."""
        self.step("keeping %s" % self.request["candidate"]["mode"])
        self.save(phase="keep")
        column = self.result["candidate"]
        state = self.service("candidate").state()
        more = {
            "proven": {"proofs": {**self.proof("safe"), **self.proof("candidate")}},
            "service": {"start": column["start"], "ready_seconds": column["start"]["seconds"]},
            "acceptance": {"result": column["acceptance"]},
        }
        for draft in self.request["receipts"]["kept"]:
            self.write_receipt(draft, more.get(draft["step"], {}), state["identity"])
        self.must(self.request["boot"]["candidate"])
        return self.settle("promoted", "", "", [])

    def proof(self, which: str) -> dict[str, Any]:
        """What this promotion proved of a mode, by mode; {} when it did not."""
        column, service = self.result[which], self.request[which]
        found = column.get("acceptance") or {}
        found = counts(found) if "checks" in found else found
        if not found.get("pass") or found.get("fail"):
            return {}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        proof = {
            "at": stamp,
            "spec": service["spec"],
            "acceptance": found,
            "bench": column.get("bench") or [],
        }
        return {service["mode"]: proof}

    def write_receipt(self, draft: dict[str, Any], more: dict[str, Any], identity: str | None) -> None:
        """A receipt from its draft; `proofs` go to their modes, a digest may need the identity."""
        draft = json.loads(json.dumps(draft))
        inputs = draft.pop("digest_inputs", None)
        if inputs is not None:
            draft["digest"] = digest_of([identity if item == "@identity" else item for item in inputs])
        if "proofs" in more:
            draft["detail"]["modes"].update(more.pop("proofs"))
        bu.write_receipt(self.request["receipts"]["folder"], draft, time.monotonic() - self.began, **more)

    # -- the way back --------------------------------------------------------------------------------

    def roll_back(self, reason: str, why: str, log: Any = ()) -> dict[str, Any]:
        """Bring the safe mode back up, however often it takes. Cancelling and signals do not stop this."""
        self.rolling_back = True
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.result.update(why=why, reason=reason)
        self.step("bringing %s back" % self.request["safe"]["mode"])
        safe = self.service("safe")
        state = safe.state()
        if not state["running"] or not safe.look(state["pid"])["ready"]:
            self.gone()
            for which in ("trial", "candidate"):
                self.service(which).stop()
            problem = self._back_up()
            if problem:
                return self.settle("failed", reason, "%s; and %s" % (why, problem), log)
            self.back()
        try:
            self.must(self.request["boot"]["safe"])  # first: it matters more than the receipts do
            for draft in self.request["receipts"]["back"]:
                more = {"proofs": self.proof("safe")} if draft["step"] == "proven" else {}
                if draft["step"] == "service" and "start" in self.result["safe"]:
                    start = self.result["safe"]["start"]
                    more = {"start": start, "ready_seconds": start["seconds"]}
                self.write_receipt(draft, more, None)
        except (OSError, bu.Failed) as error:
            why = "%s (also: %s)" % (why, error)
        return self.settle("rolled-back", reason, why, log)

    def _back_up(self) -> str:
        problem = ""
        for _ in range(BACK_TRIES):
            try:
                self.must(self.request["reload"])
                self.result["safe"]["start"] = brief(self.up("safe"))
                return ""
            except (Refused, bu.Failed) as error:
                problem = "%s did not come back: %s" % (self.request["safe"]["mode"], error)
                time.sleep(2)
        return problem

    def settle(self, verdict: str, reason: str, why: str, log: Any) -> dict[str, Any]:
        """Write the end down: state, receipt; take the trial's files away."""
        self.still_wanted()
        self.steps.append([self.step_name, round(time.monotonic() - self.step_began, 1)])
        self.step_name = ""
        self.back()
        self.result.update(
            verdict=verdict,
            reason=reason,
            why=why,
            steps=self.steps,
            seconds=round(time.monotonic() - self.began, 1),
            away_seconds=round(self.away, 1),
        )
        bu.sh(self.request["tidy"])
        draft = self.request["receipts"]["promotion"]
        kept = {key: value for key, value in self.result.items() if key != "log"}
        try:
            self.write_receipt(draft, {"result": kept}, None)
        except OSError as error:
            sys.stderr.write("cannot keep the receipt: %s\n" % error)
        self.save(settled=True, phase="over")
        return {**self.result, "log": list(log)[-bu.LOG_LINES :]}


# -- pieces ---


def counts(result: Any) -> dict[str, int]:
    """How many checks passed, failed and were skipped."""
    verdicts = [one.get("verdict") for one in (result or {}).get("checks", [])]
    return {word: verdicts.count(word) for word in ("pass", "fail", "skipped")}


def why_taken(probe: dict[str, Any]) -> str:
    """Why the mode on trial could not listen on its port; "" when it can."""
    host, port = probe["base_url"].split("//", 1)[1].rsplit(":", 1)
    with socket.socket() as one:
        one.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: old connections do not count
        try:
            one.bind((host, int(port)))
        except OSError as error:
            held = ready.strangers(int(port), os.getpid())
            return "%s: port %s, %s" % (
                TRIAL_PORT,
                port,
                " and ".join(held) or "by whom cannot be seen (%s)" % error,
            )
    return ""


def failed_checks(result: dict[str, Any]) -> str:
    """The checks that say no, with why."""
    bad = [one for one in result.get("checks", []) if one.get("verdict") == "fail"]
    return "; ".join("%s: %s" % (one["id"], one.get("reason") or one.get("summary")) for one in bad[:3])


def brief(started: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a start."""
    return {key: value for key, value in started.items() if key not in ("pid", "verdict")}


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON-able value, as the controller's tasks/digest.py makes it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def boot_id() -> str:
    """Of this boot of the host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def shutting_down() -> bool:
    """Whether systemd is stopping the host."""
    return (
        os.path.isdir("/run/systemd/system")
        and bu.sh("systemctl is-system-running", 10)[1].strip() == "stopping"
    )


class Lock:
    """FOLDER/lock, held while a promotion or its guard works; the kernel lets go of it when they die."""

    def __init__(self, folder: str) -> None:
        self.file = open(folder + "/lock", "a", encoding="ascii")  # held until the process ends

    def take(self) -> None:
        """Wait for it."""
        fcntl.flock(self.file, fcntl.LOCK_EX)


def start_guard(folder: str, instance: str) -> None:
    """A process of its own that outlives this one and everything of its process group and control group."""
    argv = [sys.executable, os.path.abspath(__file__), "guard", folder]
    if os.path.isdir("/run/systemd/system") and os.geteuid() == 0:
        unit = "--unit=%s-guard-%d" % (instance, os.getpid())
        done = subprocess.run(
            ["systemd-run", "--quiet", "--collect", unit, *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        if done.returncode == 0:
            return
    with open(folder + "/guard.log", "ab") as log:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )


def ended(number: int, frame: Any) -> None:
    """A signal ends the promotion, not the host's service."""
    if shutting_down() or os.path.exists(sys.argv[2] + "/abandoned"):
        os._exit(1)  # the safe mode comes up with the host, or nobody wants it any more
    raise Refused("cancelled", "it was ended by signal %d" % number)


def run(folder: str) -> int:
    """The promotion itself."""
    request = json.load(sys.stdin)
    os.makedirs(folder, exist_ok=True)
    lock = Lock(folder)
    lock.take()
    bu.write_json(folder + "/request.json", request, 0o600)
    for word in ("cancel", "abandoned"):
        if os.path.exists("%s/%s" % (folder, word)):
            os.unlink("%s/%s" % (folder, word))
    promotion = Promotion(request, folder)
    promotion.save(phase="beginning")
    start_guard(folder, request["instance"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ended)
    result = promotion.run()
    print(json.dumps(result, ensure_ascii=False))
    return 0 if result["verdict"] == "promoted" else 1


def guard(folder: str) -> int:
    """Wait until the promotion is over; finish what it left undone."""
    lock = Lock(folder)
    lock.take()
    state, request = bu.read_json(folder + "/state.json"), bu.read_json(folder + "/request.json")
    if not state or not request or state.get("settled") or os.path.exists(folder + "/abandoned"):
        return 0
    if shutting_down() or state["boot"] != boot_id():
        return 0
    promotion = Promotion(request, folder)
    promotion.result.update(state.get("result") or {})
    promotion.steps = state.get("steps") or []
    if state["phase"] == "keep":
        promotion.finish()
    else:
        promotion.roll_back("killed", "the promotion was killed while: %s" % state["phase"])
    return 0


def main(argv: list[str]) -> int:
    """Do one verb."""
    if len(argv) != 2 or argv[0] not in ("run", "guard"):
        print(__doc__, file=sys.stderr)
        return 2
    verb, folder = argv
    return run(folder) if verb == "run" else guard(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
