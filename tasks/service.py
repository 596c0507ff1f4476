"""The service step: LaunchSpec -> supervisor -> started, and waited for until a token comes out."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from tasks.digest import digest_of
from tasks.jobs import SHOW_SECONDS, in_time, log_lines
from tasks.launch import LaunchSpec
from tasks.paths import ONHOST
from tasks.plan import Plan, Stop
from tasks.remote import LostHost, quote, write_file
from tasks.steps import Done, StepFailed, python_of

PROBE_SECONDS = 120
READY = (ONHOST / "ready.py").read_text("utf-8")
WITH_KEY = (ONHOST / "with-key.sh").read_text("utf-8")


class Service:
    """The engine of one mode, kept alive and ready."""

    name = "service"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"service: {self.plan.spec().name} under {self.plan.supervisor.name}"

    def _files(self) -> dict[str, str]:
        """Path -> content; none of it changes with rackwright's version unless its content does."""
        spec = self.plan.spec()
        return {**self.plan.supervisor.files(spec, self.plan.service_names), spec.wrapper: WITH_KEY}

    def digest(self) -> str:
        """The LaunchSpec, its rendered files, and the engine and weights that it starts."""
        receipts = [self.plan.receipt(step) for step in ("engine", "weights")]
        return digest_of(
            [self.plan.spec().digest, self._files(), [r.digest if r else None for r in receipts]]
        )

    def unchanged(self) -> str | None:
        """Installed as rendered, running, and a token comes out."""
        plan, receipt = self.plan, self.plan.receipt(self.name)
        if not receipt or receipt.digest != self.digest() or not plan.service.running:
            return None
        if any(
            plan.state.sums.get(path) != _sha(text)
            for path, text in self._files().items()
            if path in plan.state.sums
        ):
            return None
        answer = look_ready(plan, plan.spec())
        if not answer["ready"]:
            return None
        return f"{plan.spec().name} runs (pid {plan.service.pid}) and answers"

    def act(self) -> Done:
        """Install, start or restart once, and wait for a real completion."""
        plan = self.plan
        spec = plan.spec()
        receipt = plan.receipt(self.name)
        same = receipt is not None and receipt.digest == self.digest()
        began = int(time.time())
        self._port_is_ours(spec)
        self._prepare(spec)
        if not same or not plan.service.running:
            self._sh(plan.supervisor.stop(spec.name), "stopped", spec.stop_seconds + 60)
            self._sh(plan.supervisor.install(spec), "installed", 120)
            self._sh(plan.supervisor.start(spec.name), "started", spec.stop_seconds + 180)
        seconds = wait_ready(plan, spec)
        paths = tuple(path for path in self._files() if not path.startswith(plan.layout.root + "/"))
        return Done(
            detail={
                "mode": spec.mode,
                "supervisor": plan.supervisor.name,
                "why": plan.supervisor_why,
                "user": spec.user or plan.facts.system.user,
                "endpoint": f"{spec.base_url}/v1",
                "argv": list(spec.argv),
                "ready_seconds": seconds,
                "asked_at": began,
                "name": spec.name,
            },
            paths=paths,
        )

    def _prepare(self, spec: LaunchSpec) -> None:
        """Folders, user, key and files. All of it is safe to repeat."""
        plan = self.plan
        lines = [
            "set -e",
            "umask 022",
            f"mkdir -p {quote(spec.cwd)} {quote(plan.layout.logs)} {quote(spec.cwd)}/programs",
        ]
        lines += [
            f"mkdir -p {quote(value)}"
            for name, value in spec.env
            if name in plan.layout.caches() or name == "HOME"
        ]
        if spec.user:
            user = quote(spec.user)
            lines.append(
                f"id -u {user} >/dev/null 2>&1 || {{ useradd --system --user-group --no-create-home"
                f" --home-dir {quote(plan.layout.root + '/cache/home')} --shell /usr/sbin/nologin {user}"
                f" && : >{quote(plan.layout.run)}/made-user; }}"
            )
            lines.append(f"chown -R {user}: " + " ".join(quote(path) for path in spec.writable))
            # GPU device nodes are world-readable or of these groups, where they exist
            lines.append(
                f"for g in video render; do ! getent group $g >/dev/null || usermod -a -G $g {user}; done"
            )
        if spec.key_file:
            key = quote(spec.key_file)
            owner = f"chown {quote(spec.user)} {key}" if spec.user else ":"
            lines.append(
                f"if [ ! -s {key} ]; then (umask 077; od -An -N24 -tx1 /dev/urandom"
                f" | tr -d ' \\n' >{key}.new) && mv {key}.new {key}; fi; chmod 600 {key}; {owner}"
            )
        lines += [write_file(path, text) for path, text in self._files().items()]
        done = plan.remote.run("\n".join(lines), timeout=120)
        if not done.ok:
            raise StepFailed(f"cannot prepare the service: {done.stderr.strip() or done.stdout.strip()}")

    def _port_is_ours(self, spec: LaunchSpec) -> None:
        """A stranger on the port is named, where the host lets us see it."""
        plan = self.plan
        listeners = [item for item in plan.facts.net.listeners or () if item.port == spec.port]
        if not listeners or any(state.running for state in plan.services.values()):
            return
        owners = plan.facts.net.owners.get(spec.port, ())
        who = ", ".join(f"pid {owner.pid} ({owner.name})" for owner in owners) or "a process of another user"
        raise StepFailed(f"port {spec.port} is taken by {who}\nFix: stop it, or run with --data port=ANOTHER")

    def _sh(self, script: str, word: str, timeout: float) -> None:
        done = self.plan.remote.run(script, timeout=timeout)
        if not done.ok:
            raise StepFailed(
                f"the service cannot be {word}: {done.stderr.strip() or done.stdout.strip()}",
                tail(self.plan, self.plan.spec(), 15),
            )


def look_ready(plan: Plan, spec: LaunchSpec) -> dict[str, Any]:
    """One look: does a token come out? Raises LostHost."""
    request = {
        "base_url": spec.base_url,
        "model": spec.model_name,
        "key_file": spec.key_file,
        "timeout": PROBE_SECONDS,
    }
    answer = plan.remote.run(
        # sent along, so that a host of an earlier version can be asked too
        f"{quote(python_of(plan))} -c {quote(READY)}",
        stdin=json.dumps(request),
        timeout=PROBE_SECONDS + 30,
    )
    try:
        result = json.loads(answer.stdout)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return {"ready": False, "stage": "down", "why": answer.stderr.strip()[-300:] or "no answer"}
    return result


def tail(plan: Plan, spec: LaunchSpec, lines: int) -> list[str]:
    """The last lines of the engine's log."""
    script = plan.supervisor.logs(spec.name, spec.log, lines, False)
    # The log may hold any bytes, and foreign bytes in output can hang the reader.
    answer = plan.remote.run(
        f"{{ {script}; }} 2>&1 | tr -d '\\000-\\010\\013-\\037\\177' | tr '\\200-\\377' '?'"
    )
    return log_lines(answer.stdout, lines)


def wait_ready(plan: Plan, spec: LaunchSpec) -> float:
    """Wait for a token, with progress. Returns seconds.

    Raises StepFailed when the engine dies for good or the recipe's deadline passes.
    """
    began = shown = time.monotonic()
    names = plan.service_names
    first_restarts: int | None = None
    seen_down = 0
    while True:
        elapsed = time.monotonic() - began
        try:
            status = plan.supervisor.parse_status(
                plan.remote.run(plan.supervisor.status(names)).stdout, names
            )[spec.name]
            answer = (
                look_ready(plan, spec)
                if status.running
                else {"ready": False, "stage": "down", "why": status.state}
            )
        except LostHost as lost:
            plan.say(f"service: connection lost ({lost}); the engine goes on, connecting again")
            time.sleep(3)
            if elapsed > spec.ready_seconds:
                raise
            try:
                plan.remote.reconnect()
            except LostHost:
                time.sleep(5)
            continue
        if answer["ready"]:
            return round(time.monotonic() - began, 1)
        if first_restarts is None:
            first_restarts = status.restarts or 0
        crashes = (status.restarts or 0) - first_restarts
        seen_down = (
            seen_down + 1 if not status.running and status.state not in ("auto-restart", "BACKOFF") else 0
        )
        why = None
        if status.gave_up or seen_down >= 3:
            why = f"the engine ends as soon as it starts (state: {status.state})"
        elif crashes >= 3:
            why = f"the engine has crashed {crashes} times while starting"
        elif elapsed > spec.ready_seconds:
            why = f"no token within {in_time(spec.ready_seconds)} ({answer['why'] or status.state})"
        if why:
            log = tail(plan, spec, 25)
            plan.remote.run(plan.supervisor.stop(spec.name), timeout=spec.stop_seconds + 60)
            raise StepFailed(
                f"{why}; it is stopped now\nFix: read the log lines above, all of it with: "
                f"rackwright logs INVENTORY --limit {plan.name}",
                log,
            )
        if time.monotonic() - shown >= SHOW_SECONDS:
            shown = time.monotonic()
            last = tail(plan, spec, 1)
            plan.say(f"service: {in_time(elapsed)}: {answer['stage']}: {(last or [''])[-1][:140]}")
        time.sleep(1 if elapsed < 20 else 3)


def stop_service(plan: Plan) -> bool:
    """Stop every mode's service. Returns whether one ran. Raises Stop."""
    ran = False
    for name, state in plan.services.items():
        if not state.installed:
            continue
        ran = ran or state.running
        done = plan.remote.run(plan.supervisor.stop(name), timeout=plan.recipe.serve.stop_seconds + 120)
        if not done.ok:
            raise Stop(f"{name} cannot be stopped: {done.stderr.strip() or done.stdout.strip()}")
    return ran


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
