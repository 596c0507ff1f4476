"""The service step: LaunchSpec -> supervisor -> started, a token, warmed up; and what looks at a service."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from tasks.checks.host import ports, stranger_on, strangers_among
from tasks.deep import nccl_of
from tasks.digest import digest_of
from tasks.former import end_supervisord, meant, remove_units
from tasks.installed import Installed, differences, has_other_flags, installed_of
from tasks.jobs import log_lines
from tasks.launch import JIT, LaunchSpec
from tasks.needs import needs_of
from tasks.paths import ONHOST
from tasks.plan import Plan, Stop
from tasks.proven import boot_mode, proven_as_installed, proven_mode
from tasks.receipts import Receipt
from tasks.recipe import SAFE_MODE
from tasks.remote import quote, write_file
from tasks.startup import (
    JOB,
    PROBE_SECONDS,
    Cancelled,
    bring_up,
    done_of,
    log_script,
    probe_request,
    service_request,
)
from tasks.steps import Done, StepFailed, python_of

READY = (ONHOST / "ready.py").read_text("utf-8")
WRAPPER = (ONHOST / "start-engine.sh").read_text("utf-8")
CONTAINER_WRAPPER = (ONHOST / "docker-engine.sh").read_text("utf-8")
PROMOTE_JOB = "promote"
KEPT_CACHES = 3
SERVE_ANEW = "rackwright serve INVENTORY"
LOOK = "rackwright status INVENTORY"


class Service:
    """The engine of one mode, kept alive and ready."""

    name = "service"

    def __init__(self, plan: Plan, mode: str | None = None) -> None:
        self.plan = plan
        self._mode = mode

    @property
    def spec(self) -> LaunchSpec:
        """The engine process of this step's mode."""
        return self.plan.spec(self._mode)

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"service: {self.spec.name} under {self.plan.supervisor.name}"

    def digest(self) -> str:
        """The LaunchSpec, its rendered files, and the engine and weights that it starts."""
        receipts = [self.plan.receipt(step) for step in ("engine", "weights")]
        return digest_of(
            [self.spec.digest, files_of(self.plan, self.spec), [r.digest if r else None for r in receipts]]
        )

    def unchanged(self) -> str | None:
        """Installed as rendered, running, proven mode starts at boot, and a token comes out."""
        plan, receipt, service = self.plan, self.plan.receipt(self.name), self.plan.services[self.spec.name]
        if not receipt or receipt.digest != self.digest() or not service.running:
            return None
        if not files_are_there(plan, self.spec) or not plan.services[_boot_name(plan, self.spec)].at_boot:
            return None
        if not look_ready(plan, self.spec)["ready"]:
            return None
        plan.record.note(startup=startup_note(receipt.detail))
        return f"{self.spec.name} runs (pid {service.pid}) and answers"

    def act(self) -> Done:
        """Install, start or restart once, and wait until it is warm."""
        plan, spec = self.plan, self.spec
        refuse_while_promoting(plan)
        receipt, state = plan.receipt(self.name), plan.services[spec.name]
        port_is_ours(plan, spec)
        same = receipt is not None and receipt.digest == self.digest() and files_are_there(plan, spec)
        # an engine that refuses its own key was started with another one
        stays = same and state.running and look_ready(plan, spec)["stage"] != "key"
        before = [plan.supervisor.at_boot(_boot_name(plan, spec), plan.service_names)]
        old = None if same else what_serves(plan)
        if old:
            keep_files(plan, spec)
        prepare(plan, spec)
        if not stays:
            retire_former(plan)
            before = [
                plan.supervisor.stop(spec.name),
                plan.supervisor.reload(),
                *before,
                plan.supervisor.start(spec.name),
            ]
        try:
            result = bring_up(plan, spec, before, self.draft(), put_back(plan, spec, old) if old else None)
        except StepFailed as failed:
            if old or isinstance(failed, Cancelled):
                raise
            raise fall_back(plan, spec, failed) from failed
        plan.record.note(startup=startup_note({"start": done_of(result)}))
        draft = self.draft()
        detail = {**draft.detail, "ready_seconds": result["seconds"], "start": done_of(result)}
        return Done(detail=detail, paths=draft.paths)

    def draft(self) -> Receipt:
        """The receipt, without what only the start can tell."""
        plan, spec = self.plan, self.spec
        outside = (path for path in files_of(plan, spec) if not path.startswith(plan.layout.root + "/"))
        old = plan.receipt(self.name)
        return Receipt(
            self.name,
            self.digest(),
            0,
            {
                "mode": spec.mode,
                "supervisor": plan.supervisor.name,
                "why": plan.supervisor_why,
                "user": spec.user or plan.facts.system.user,
                "endpoint": f"{spec.base_url}/v1",
                "argv": list(spec.argv),
                "cache_key": cache_key(spec),
                "name": spec.name,
                "spec": spec.digest,
                "nccl": asdict(nccl_of(plan)),
            },
            paths=tuple(dict.fromkeys((*(old.paths if old else ()), *outside))),
        )


def cache_key(spec: LaunchSpec) -> str:
    """The name of the folder of compiled kernels that a spec uses."""
    return next(path for path in spec.writable if f"/{JIT}/" in path).rsplit("/", 1)[1]


def files_of(plan: Plan, spec: LaunchSpec) -> dict[str, str]:
    """Path -> content; none of it changes with rackwright's version unless its content does."""
    inner = {f"{plan.layout.run}/docker-engine.sh": CONTAINER_WRAPPER} if plan.route == "docker" else {}
    return {**plan.supervisor.files(spec, plan.service_names), spec.wrapper: WRAPPER, **inner}


def files_are_there(plan: Plan, spec: LaunchSpec) -> bool:
    """The files are on the host as they would be written now, as far as they were read."""
    wanted = {**files_of(plan, spec), **plan.supervisor.helpers()}
    sums = plan.state.sums
    return all(
        sums[path] == hashlib.sha256(text.encode()).hexdigest()
        for path, text in wanted.items()
        if path in sums
    )


def _boot_name(plan: Plan, spec: LaunchSpec) -> str:
    return plan.spec(boot_mode(plan, spec.mode)).name


def startup_note(detail: dict[str, Any]) -> dict[str, Any]:
    """What a report says of the last start, and of the one before it."""
    return dict(detail.get("start") or {})


def refuse_while_promoting(plan: Plan) -> None:
    """Nobody else starts or stops modes while a promotion does. Raises StepFailed."""
    now = plan.state.jobs.get(PROMOTE_JOB)
    if now is not None and now.state == "running":
        raise StepFailed(
            "a promotion is running on this host\n"
            "Fix: attach to it (rackwright promote INVENTORY), or end it (rackwright rollback INVENTORY)"
        )
    if now is not None and now.rc != 0 and guard_works(plan):
        raise StepFailed(
            f"a promotion was killed on this host, and {SAFE_MODE} is being brought back\n"
            f"Fix: wait for it: {LOOK}"
        )


def guard_works(plan: Plan) -> bool:
    """The guard of a promotion that was killed is finishing what it left undone."""
    lock = quote(f"{plan.layout.run}/promotion/lock")
    return not plan.remote.run(f"[ ! -e {lock} ] || flock --nonblock {lock} true").ok


def refuse_unless_serving(plan: Plan, *, ask: bool = True) -> LaunchSpec:
    """The engine that runs and may be asked; what is amiss is told at once. Raises StepFailed.

    Without `ask` it is not asked whether it answers yet.
    """
    refuse_while_promoting(plan)
    spec, service = plan.spec(), plan.service
    if service.running and (not ask or look_ready(plan, spec)["stage"] != "closed"):
        refuse_other_settings(plan, spec)
        refuse_other_flags(plan, spec)
        return spec
    refuse_other_settings(plan, spec)
    others = [
        plan.spec(mode) for mode in plan.recipe.serve.modes if plan.services[plan.spec(mode).name].running
    ]
    if not service.running and others:
        raise StepFailed(
            f"{others[0].name} serves here, not {spec.name}\nFix: add --data mode={others[0].mode}"
        )
    if service.settled and not is_coming_up(plan):
        verb = "start" if plan.receipt("service") else "site"
        raise StepFailed(f"nothing serves here: {spec.name} does not run\nFix: rackwright {verb} INVENTORY")
    raise StepFailed(f"{spec.name} is starting and does not answer yet\nFix: wait for it: {LOOK}")


def is_coming_up(plan: Plan) -> bool:
    """A service is being brought up by a run of a verb."""
    job = plan.state.jobs.get(JOB)
    return job is not None and job.state == "running"


def fall_back(plan: Plan, spec: LaunchSpec, failed: StepFailed) -> StepFailed:
    """When a mode does not start and another one was proven, that one is started again."""
    mode = proven_mode(plan)
    if mode is None or mode == spec.mode or differences(plan, plan.spec(mode)):
        return failed
    proven = plan.spec(mode)
    plan.say(f"service: {spec.name} does not start; starting {proven.name} again, which was proven")
    try:
        bring_up(plan, proven, [plan.supervisor.start(proven.name)])
    except StepFailed as again:
        return StepFailed(f"{failed}\nAlso: {proven.name} did not come back: {again}", failed.log)
    what = str(failed).replace("it is stopped now", f"{proven.name} is up again", 1)
    return StepFailed(what, failed.log)


def what_serves(plan: Plan) -> LaunchSpec | None:
    """The service that runs, as it is installed (not as the inventory has it now), if that was proven."""
    for mode in plan.recipe.serve.modes:
        spec = plan.spec(mode)
        now = installed_of(plan, spec.name) or Installed()
        if plan.services[spec.name].running and proven_as_installed(plan, spec):
            return replace(
                spec,
                bind=now.bind or spec.bind,
                port=now.port or spec.port,
                model_name=now.model or spec.model_name,
                key_file=plan.layout.key_file if plan.state.has("key") else None,
            )
    return None


def _kept(plan: Plan, spec: LaunchSpec) -> list[tuple[str, str]]:
    """Each file of a service, and where its last version is kept while another one is tried."""
    return [(path, f"{plan.layout.run}/before/{place}") for place, path in enumerate(files_of(plan, spec))]


def keep_files(plan: Plan, spec: LaunchSpec) -> None:
    """Keep the files of what serves beside it, before others take their place. Raises StepFailed."""
    folder = quote(f"{plan.layout.run}/before")
    lines = [f"set -e; rm -rf {folder}; mkdir -m 700 {folder}"]
    lines += [
        f"[ ! -e {quote(path)} ] || cp -p {quote(path)} {quote(kept)}" for path, kept in _kept(plan, spec)
    ]
    done = plan.remote.run("\n".join(lines))
    if not done.ok:
        raise StepFailed(
            f"what serves now cannot be kept beside: {done.stderr.strip()}\nFix: make room there"
        )


def put_back(plan: Plan, spec: LaunchSpec, old: LaunchSpec) -> dict[str, Any]:
    """What `onhost/bring_up.py` does when `spec` does not come up: the files of before, and `old` started."""
    lines = [
        f"[ ! -e {quote(kept)} ] || {{ cp -p {quote(kept)} {quote(path)}.back"
        f" && mv -f {quote(path)}.back {quote(path)}; }}"
        for path, kept in _kept(plan, spec)
    ]
    script = " && ".join([*lines, plan.supervisor.reload()])
    return {"script": script, "service": {**service_request(plan, old), "warmup": None}}


def retire_former(plan: Plan) -> None:
    """Stop and remove what would still start with the host beside what is meant now. Raises StepFailed."""
    script = f"{{ {remove_units(plan, meant(plan))}; }} && {{ {end_supervisord(plan)}; }}"
    done = plan.remote.run(script, timeout=plan.recipe.serve.stop_seconds + 120)
    if not done.ok:
        why = done.stderr.strip() or done.stdout.strip()
        raise StepFailed(
            f"a service of before cannot be removed: {why}\nFix: remove it as root, then {SERVE_ANEW}"
        )


def prepare(plan: Plan, *specs: LaunchSpec) -> None:
    """Folders, user, key and files of one or more modes. All of it is safe to repeat. Raises StepFailed."""
    layout = plan.layout
    lines = [
        "set -e",
        "umask 022",
        f"mkdir -p {quote(layout.run)}/programs {quote(layout.run)}/starts {quote(layout.logs)}",
        f"chown root: {quote(layout.logs)} 2>/dev/null || :",
    ]
    for spec in specs:
        folders = [value for name, value in spec.env if name in layout.caches() or name == "HOME"]
        folders += spec.writable
        lines += [f"mkdir -p {quote(folder)}" for folder in folders]
    spec = specs[0]
    jit, kept = quote(f"{layout.root}/{JIT}"), KEPT_CACHES + 1
    # kernels of engines and drivers of the past: the newest are kept, for the way back
    lines.append(f"cd {jit} && touch {quote(cache_key(spec))}")
    lines.append(f'ls -1t | tail -n +{kept} | while read -r old; do rm -rf "./$old"; done')
    if spec.user:
        user = quote(spec.user)
        lines.append(
            f"id -u {user} >/dev/null 2>&1 || {{ useradd --system --user-group --no-create-home"
            f" --home-dir {quote(layout.root + '/cache/home')} --shell /usr/sbin/nologin {user}"
            f" && echo {user} >>{quote(layout.run)}/made-user; }}"
        )
        lines.append(f"chown -R {user}: " + " ".join(quote(path) for path in spec.writable))
        # GPU device nodes are world-readable or of these groups, where they exist
        lines.append(
            f"for g in video render; do ! getent group $g >/dev/null || usermod -a -G $g {user}; done"
        )
    if spec.key_file:
        key = quote(spec.key_file)
        # systemd hands it over as a credential; elsewhere the wrapper, already the service user, reads it
        reader = spec.user if plan.supervisor.name == "supervisord" else None
        owner = f"chown {quote(reader)} {key}" if reader else ":"
        lines.append(
            f"if [ ! -s {key} ]; then (umask 077; od -An -N24 -tx1 /dev/urandom"
            f" | tr -d ' \\n' >{key}.new) && mv {key}.new {key}; fi; chmod 600 {key}; {owner}"
        )
    files = {path: text for spec in specs for path, text in files_of(plan, spec).items()}
    lines += [write_file(path, text) for path, text in {**files, **plan.supervisor.helpers()}.items()]
    done = plan.remote.run("\n".join(lines), timeout=300)
    if not done.ok:
        raise StepFailed(f"cannot prepare the service: {done.stderr.strip() or done.stdout.strip()}")


def port_is_ours(plan: Plan, spec: LaunchSpec) -> None:
    """The engine's user may listen on the port, and nobody else does. Raises StepFailed."""
    needs, net = replace(needs_of(plan), ports=(spec.port,)), plan.facts.net
    finding = ports(needs, plan.facts)
    if finding.status != "fail":
        return
    who = stranger_on(spec.port, needs, plan.facts)
    if who is None:
        raise StepFailed(f"{finding.summary}: {finding.observed}\nFix: {finding.fix}")
    others = strangers_among(net.owners.get(spec.port, ()), needs)
    seen = ", ".join(f"process {owner.pid} ({owner.argv or owner.name})" for owner in others)
    raise StepFailed(
        f"port {spec.port} is taken by {seen or who}\n"
        f"Fix: stop that process, or take another port: {SERVE_ANEW} --data port=ANOTHER"
    )


def refuse_other_settings(plan: Plan, spec: LaunchSpec) -> None:
    """What is installed is what the inventory says, as far as clients meet it. Raises StepFailed."""
    odd = differences(plan, spec)
    if odd:
        raise StepFailed(f"{spec.name} is installed with other settings ({odd})\nFix: {SERVE_ANEW}")


def refuse_other_flags(plan: Plan, spec: LaunchSpec) -> None:
    """What runs was started with the flags that the recipe has now: what it says is their proof.

    Raises StepFailed.
    """
    if has_other_flags(plan, spec):
        raise StepFailed(f"{spec.name} runs with other flags than the recipe has now\nFix: {SERVE_ANEW}")


def ready_script(plan: Plan, spec: LaunchSpec) -> tuple[str, str]:
    """The sh that asks for a token, and what it is given on stdin."""
    request = {**probe_request(plan, spec), "pid": plan.services[spec.name].pid}
    # sent along, so that a host of an earlier version can be asked too
    return f"{quote(python_of(plan))} -c {quote(READY)}", json.dumps(request)


def look_ready(plan: Plan, spec: LaunchSpec) -> dict[str, Any]:
    """One look: does a token come out? Raises LostHost."""
    script, request = ready_script(plan, spec)
    answer = plan.remote.run(script, stdin=request, timeout=PROBE_SECONDS + 30)
    try:
        result = json.loads(answer.stdout)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return {"ready": False, "stage": "error", "why": answer.stderr.strip()[-300:] or "no answer"}
    return result


def readable(script: str) -> str:
    """The same script with foreign bytes of its output as `?`, steps of progress bars as lines.

    A log may hold any bytes, and they can hang the reader. Each line comes when it is written, where there is
    stdbuf (GNU coreutils); tr alone collects 4 KiB.
    """
    return (
        f"b=$(command -v stdbuf >/dev/null 2>&1 && echo stdbuf -oL); {{ {script}; }} 2>&1"
        " | $b tr -d '\\000-\\010\\013\\014\\016-\\037\\177' | $b tr '\\015\\200-\\377' '\\012?'"
    )


def tail(plan: Plan, spec: LaunchSpec, lines: int) -> list[str]:
    """The last lines of the engine's log."""
    answer = plan.remote.run(readable(log_script(plan, spec, lines)))
    return log_lines(answer.stdout, lines)


def stop_service(plan: Plan) -> None:
    """Stop every mode's service, and that of a mode that the recipe had. Raises Stop."""
    names = [name for name, state in plan.services.items() if state.installed]
    for name in (*names, *lost_names(plan)):
        done = plan.remote.run(plan.supervisor.stop(name), timeout=plan.recipe.serve.stop_seconds + 120)
        if not done.ok:
            raise Stop(f"{name} cannot be stopped: {done.stderr.strip() or done.stdout.strip()}")


def lost_names(plan: Plan) -> tuple[str, ...]:
    """The service that was started last, if the recipe has no such mode any more."""
    receipt = plan.receipt("service")
    name = str(receipt.detail.get("name") or "") if receipt else ""
    return (name,) if name and name not in plan.service_names else ()
