"""The verbs: what each deploy does on one host. `deploys/*.py` only name them."""

from __future__ import annotations

from typing import Any

from tasks.acceptance import Acceptance
from tasks.bench import Benchmark
from tasks.deep_step import Deep
from tasks.engines import engine_step
from tasks.env import Environment, Tools
from tasks.failed import host_failed
from tasks.mirrors import Mirrors
from tasks.model.proof import Manifest
from tasks.model.step import Weights
from tasks.plan import Plan, plan_for, stop_host
from tasks.promote import Promote, Rollback
from tasks.redact import clean
from tasks.remote import LostHost
from tasks.service import Service, readable, refuse_unless_serving
from tasks.status import status_lines
from tasks.steps import StepFailed, run_step
from tasks.summary import Summary, retell
from tasks.support import archive
from tasks.switch import Start, Stopped
from tasks.uninstall import Uninstall
from tasks.unreachable import by_hand


def site(host: Any) -> None:
    """Provision a host end to end."""
    plan = plan_for(host, "site")
    if plan:
        prepare(plan)
        run_step(Tools(plan))
        run_step(engine_step(plan))
        if plan.settings.deep:
            run_step(Deep(plan))
        for step in (Weights(plan), Service(plan), Acceptance(plan), Summary(plan)):
            run_step(step)


def mirrors(plan: Plan) -> tuple[Mirrors, ...]:
    """The measurement of mirrors, where the site wants one and the network is used at all."""
    wanted = plan.settings.mirrors == "auto" and plan.settings.bundle is None
    return (Mirrors(plan),) if wanted else ()


def prepare(plan: Plan) -> None:
    """What every verb that installs begins with."""
    for step in mirrors(plan):
        run_step(step)
    run_step(Environment(plan))


def environment(host: Any) -> None:
    """The engine's Python environment and the tools'."""
    plan = plan_for(host, "environment")
    if plan:
        prepare(plan)
        run_step(Tools(plan))


def engine(host: Any) -> None:
    """The engine, into its environment."""
    plan = plan_for(host, "engine")
    if plan:
        prepare(plan)
        run_step(engine_step(plan))


def build(host: Any) -> None:
    """The engine built on this host (source route), and its wheel kept for the other hosts."""
    plan = plan_for(host, "build")
    if plan:
        prepare(plan)
        run_step(engine_step(plan, build=True))


def weights(host: Any) -> None:
    """The weights, delivered and proven whole."""
    plan = plan_for(host, "weights")
    if plan:
        prepare(plan)
        run_step(Tools(plan))
        run_step(Weights(plan))


def manifest(host: Any) -> None:
    """What each host has, proved and compared with its recipe; its manifest comes here."""
    plan = plan_for(host, "manifest", preflight=False)
    if plan:
        run_step(Manifest(plan))


def serve(host: Any) -> None:
    """The engine as a service, ready and warm."""
    plan = plan_for(host, "serve")
    if plan:
        run_step(Service(plan))
        run_step(Summary(plan))


def _serves(host: Any, plan: Plan) -> bool:
    """Something is there to be asked; else this host stops here, and its last report stays."""
    try:
        refuse_unless_serving(plan)
    except (StepFailed, LostHost) as why:
        stop_host(host, plan.host, str(why))
        return False
    return True


def accept(host: Any) -> None:
    """Ask the running engine again, whatever an earlier run found."""
    plan = plan_for(host, "accept", preflight=False)
    if plan and _serves(host, plan):
        run_step(Acceptance(plan, again=True))
        run_step(Summary(plan))


def bench(host: Any) -> None:
    """Measure the running engine; exit code 1 when the figures do not count."""
    plan = plan_for(host, "bench", preflight=False)
    if plan and _serves(host, plan):
        run_step(Benchmark(plan))
        run_step(Summary(plan))


def support(host: Any) -> None:
    """One redacted archive of this host: reports, receipts, logs, versions."""
    plan = plan_for(host, "support", preflight=False)
    if plan:
        archive(plan=plan, name="support archive")


def promote(host: Any) -> None:
    """Let the faster mode earn its place; if it does not, the safe one is back up."""
    plan = plan_for(host, "promote")
    if plan:
        run_step(Promote(plan))
        run_step(Summary(plan))


def rollback(host: Any) -> None:
    """Back to the safe mode, at any time."""
    plan = plan_for(host, "rollback", preflight=False)
    if plan:
        run_step(Rollback(plan))


def report(host: Any) -> None:
    """The report of what is on a host, written anew; exit code 1 when nothing was accepted there."""
    plan = plan_for(host, "report", preflight=False)
    if plan is None:
        return
    if retell(plan):
        run_step(Summary(plan))
    else:
        host.state.fail_hosts({plan.host})


def restart(host: Any) -> None:
    """Stop the mode that runs, start it again, and wait until it is warm."""
    plan = plan_for(host, "restart", preflight=False)
    if plan:
        run_step(Start(plan, again=True))


def start(host: Any) -> None:
    """Start the mode that was proven last, and wait until a token comes out."""
    plan = plan_for(host, "start", preflight=False)
    if plan:
        run_step(Start(plan))


def stop(host: Any) -> None:
    """Stop the service; it stays installed."""
    plan = plan_for(host, "stop", preflight=False)
    if plan:
        run_step(Stopped(plan))


def uninstall(host: Any) -> None:
    """Take away what rackwright put on the host, and nothing else."""
    plan = plan_for(host, "uninstall", preflight=False)
    if plan:
        run_step(Uninstall(plan))


def _stop_lost(host: Any, plan: Plan, lost: LostHost) -> None:
    """This host went away amid the verb: it stops here, and the others go on."""
    how = by_hand(plan.name, plan.host.data.dict())
    stop_host(host, plan.host, f"{plan.name} does not answer any more: {lost}\nFix: {how}")


def status(host: Any) -> None:
    """How the service stands; exit code 1 when no token comes out."""
    plan = plan_for(host, "status", preflight=False)
    if plan is None:
        return
    try:
        lines, good = status_lines(plan)
    except LostHost as lost:
        _stop_lost(host, plan, lost)
        return
    plan.say("\n" + "\n".join(lines))
    if not good:
        host_failed(plan.name, "no token comes out")
        host.state.fail_hosts({plan.host})


def logs(host: Any) -> None:
    """The engine's log: the last lines, or as it grows."""
    plan = plan_for(host, "logs", preflight=False)
    if plan is None:
        return
    receipt = plan.receipt("service")
    if receipt is None and not any(service.installed for service in plan.services.values()):
        stop_host(host, plan.host, "no service is installed here\nFix: rackwright site INVENTORY")
        return
    # by its name: the recipe may have lost the mode since
    name = str(receipt.detail.get("name") or "") if receipt else ""
    name = plan.trial_name if plan.services[plan.trial_name].running else name or plan.spec().name
    log = f"{plan.layout.logs}/{name}.log"
    script = plan.supervisor.logs(name, log, plan.settings.lines, plan.settings.follow)
    try:
        if plan.settings.follow:
            plan.remote.stream(readable(script))
            return
        answer = plan.remote.run(readable(script))
    except LostHost as lost:
        _stop_lost(host, plan, lost)
        return
    for line in clean(answer.stdout).splitlines():
        print(line if len(host.state.inventory) == 1 else f"[{plan.name}] {line}")
    if not answer.stdout.strip():
        plan.say(f"no log of {name} here; is it installed? rackwright status INVENTORY")
