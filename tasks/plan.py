"""One host's plan: recipe + settings + probe, validated, or the host stops here.

Everything a deploy needs, gathered in one round trip before anything is changed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from pyinfra import logger

from tasks.bundle import Bundle, bundle_for, ship
from tasks.checks import Needs, run_checks
from tasks.checks.links import nccl_env_flags
from tasks.checks.table import render_blocked, verdict, verdict_line
from tasks.choices import choices_of
from tasks.deep import deep_look, nccl_of
from tasks.digest import digest_of
from tasks.endpoints import endpoints_of
from tasks.engines.docker_launch import container_of, docker_spec
from tasks.facts import Endpoint, HostFacts, ProbeRequest, build_probe, parse_probe
from tasks.facts.shown import facts_shown, topology_shown
from tasks.failed import host_failed
from tasks.findings import Finding, fail
from tasks.interrupt import catch_interrupts
from tasks.launch import LaunchSpec, launch_spec
from tasks.mistakes import Mistakes
from tasks.model import sources
from tasks.needs import needs_of
from tasks.paths import host_folder
from tasks.receipts import Receipt
from tasks.recipe import SAFE_MODE, TRIAL, Recipe, WheelRoute
from tasks.record import Record
from tasks.redact import clean
from tasks.remote import LostHost, Remote, steady
from tasks.settings import Layout, Settings, layout_of
from tasks.state import HostState, parse_state, state_section
from tasks.supervisors import ServiceState, Supervisor, Supervisord, Systemd, choose, version_in
from tasks.terminal import shape
from tasks.typed import filled
from tasks.unreachable import by_hand

SERVICE_USER = "rackwright"
# programs between a supervisor and the engine, below <root>/run
WRAPPERS = ("start-engine.sh", "docker-engine.sh")


class Stop(Exception):
    """This host cannot go on; the message is for the person at the terminal."""


class Plan:
    """What will be served on one host, how, and how that host stands. Refreshed after changes."""

    def __init__(self, host: Any, settings: Settings, recipe: Recipe, verb: str) -> None:
        self.host = host
        self.name = str(host.name)
        self.verb = verb
        self.settings = settings
        self.recipe = recipe
        self.layout: Layout = layout_of(settings)
        self.route: str = settings.route or recipe.engine.default
        # the mode that is asked for, else the one proven last (known after `look`), else the safe one
        self.mode: str = settings.mode or SAFE_MODE
        self.model_dir = f"{self.layout.model_root}/{recipe.model.name}"
        self.bundle: Bundle = bundle_for(recipe)
        self.lib: str = self.bundle.folder(self.layout.lib)
        self.remote = Remote(host)
        self.dirty = False
        self.failed = False
        self.jobs_used: list[str] = []
        self.facts: HostFacts = HostFacts()
        self.state: HostState = HostState()
        self.services: dict[str, ServiceState] = {}
        self.supervisor: Supervisor = Supervisord(self.layout, settings.instance)
        self.supervisor_why = ""
        self.needs: Needs = Needs(self.layout.root)
        self.findings: list[Finding] = []
        self.record = Record(
            host_folder(settings.reports, self.name),
            verb,
            self.name,
            {
                "mode": self.mode,
                "recipe": {
                    "name": recipe.name,
                    "summary": recipe.summary,
                    "proven": recipe.proven,
                    "digest": recipe.digest,
                },
                "engine": {"route": self.route, "label": self.engine_label},
            },
        )

    # -- names ---------------------------------------------------------------------------------

    @property
    def engine_label(self) -> str:
        """The engine as people say it."""
        pins = self.recipe.route(self.route)
        return f"{pins.package} {pins.version}" if isinstance(pins, WheelRoute) else f"vLLM ({self.route})"

    @property
    def service_names(self) -> tuple[str, ...]:
        """The service of each mode of the recipe, and that of a mode on trial."""
        return tuple(f"{self.settings.instance}-{mode}" for mode in (*self.recipe.serve.modes, TRIAL))

    @property
    def user(self) -> str | None:
        """The user that the engine runs as; None is the user that we are.

        Not root where the host allows it: installing users takes root, and everything the engine reads
        must be readable for that user, so not below a home folder.
        """
        if self.facts.system.uid != 0:
            return None
        if self.settings.service_user:
            return self.settings.service_user
        private = any(
            path.startswith(("/root/", "/home/"))
            for path in (self.layout.root, self.model_dir, self._base_python)
        )
        return None if private else SERVICE_USER

    @property
    def _base_python(self) -> str:
        receipt = self.state.receipts.get("environment")
        return str(receipt.detail.get("base", "")) if receipt else ""

    @property
    def trial_name(self) -> str:
        """The service of a mode on trial."""
        return f"{self.settings.instance}-{TRIAL}"

    def spec(self, mode: str | None = None, *, trial_port: int | None = None) -> LaunchSpec:
        """The engine process of one mode; with `trial_port` the same on trial, where no client reaches it."""
        spec = launch_spec(
            self.recipe,
            self.settings,
            self.layout,
            mode or self.mode,
            user=self.user,
            trial_port=trial_port,
            nccl=nccl_env_flags(nccl_of(self)),
            cache_key=self._cache_key,
        )
        container = container_of(self.recipe.route(self.route), self.receipt("engine"))
        return docker_spec(spec, container, f"{self.layout.run}/docker-engine.sh") if container else spec

    @property
    def _cache_key(self) -> str:
        """Of what compiled kernels fit: engine, driver and GPUs; the last one where the driver is silent."""
        engine, service = self.receipt("engine"), self.receipt("service")
        gpu = self.facts.gpu
        if self.recipe.hardware.count and gpu.driver is None and service and service.detail.get("cache_key"):
            return str(service.detail["cache_key"])
        names = sorted({f"{one.name} {one.compute_capability}" for one in gpu.gpus})
        pins = [engine.detail.get(key) for key in ("package", "version", "commit", "ref")] if engine else []
        return digest_of([self.engine_label, pins, gpu.driver, names])[:12]

    @property
    def service(self) -> ServiceState:
        """How the service of this plan's mode stands."""
        return self.services[self.spec().name]

    def receipt(self, step: str) -> Receipt | None:
        """What an earlier run left for a step."""
        return self.state.receipts.get(step)

    # -- reading the host ----------------------------------------------------------------------

    def look(self, *, network: bool = False) -> None:
        """Read the host in one round trip; with `network`, try the servers that its steps need.

        Raises LostHost.
        """
        systemd = Systemd()
        names = self.service_names
        run = self.layout.run
        files = (
            *(systemd.unit_path(name) for name in names),
            *(f"{run}/programs/{name}.conf" for name in names),
            *(f"{run}/{name}" for name in ("supervisord.conf", "sv.py", "up.sh", *WRAPPERS)),
        )
        user_units = Systemd(user=True, home="$HOME").status(names)
        supervisord = Supervisord(self.layout, self.settings.instance)
        request = ProbeRequest(
            root=self.layout.root,
            model_root=self.layout.model_root,
            ports=(self.settings.port,),
            endpoints=tuple(Endpoint(need.url, need.unless) for need in endpoints_of(self))
            if network
            else (),
            links=(*self.settings.find_links, self.layout.wheels),
            want_gpu=self.recipe.hardware.count > 0,
            want_docker=self.route == "docker",
            python=self.settings.python,
            env_python=f"{self.layout.env}/bin/python" if self.recipe.hardware.count else None,
            extra_sections=(
                (
                    "state",
                    state_section(self.layout, lib=self.lib, model_dir=self.model_dir, files=files),
                ),
                ("systemd", f"[ -d /run/systemd/system ] && {{ {systemd.status(names)}; }}; :"),
                (
                    "systemd-user",
                    f"[ -d /run/user/$(id -u)/systemd ] && {{ {user_units}; }}; :",
                ),
                ("supervisord", f"cd / && {supervisord.status(names)}"),
            ),
        )
        answer = self.remote.run(build_probe(request), timeout=120)
        self.facts = parse_probe(answer.stdout, request, received_at=time.time())
        known = self.state.damaged
        self.state = parse_state(self.facts.extra.get("state", ""))
        for name in set(self.state.damaged) - set(known):
            self.say(f"receipts/{name} is damaged: its step counts as not done, and `site` does it again")
        system = self.facts.system
        kind, self.supervisor_why = choose(
            self.settings.supervisor,
            systemd=bool(system.systemd),
            privileged=system.uid == 0,
            lingering=bool(system.linger and system.systemd_user),
        )
        if kind == "supervisord":
            self.supervisor = supervisord
        else:
            version = version_in(self.facts.extra.get(kind, ""))
            self.supervisor = Systemd(user=kind == "systemd-user", home=system.home or "", version=version)
        self.services = self.supervisor.parse_status(self.facts.extra.get(kind, ""), names)
        proven = self.state.receipts.get("proven")
        last = str(proven.detail.get("mode")) if proven else SAFE_MODE
        self.mode = self.settings.mode or (last if last in self.recipe.serve.modes else SAFE_MODE)
        self.dirty = False
        self.record.note(
            mode=self.mode,
            facts=self.facts_shown(),
            topology=topology_shown(self.facts),
            supervisor=self.supervisor.name,
            commands=self.remote.commands,
        )

    def fresh(self) -> None:
        """Read the host again if something was changed since it was read."""
        if self.dirty:
            self.look()

    def facts_shown(self) -> dict[str, Any]:
        """The facts that a report shows, without what is only for the checks."""
        return facts_shown(self.facts, gpus=self.recipe.hardware.count > 0)

    def check(self, *, deep: bool = False) -> list[Finding]:
        """Every finding about this host for this recipe; with `deep` also those that take minutes.

        Raises LostHost.
        """
        self.needs = needs_of(self)
        found = run_checks(self.needs, self.facts)
        if self.state.foreign_root:
            found.append(
                fail(
                    "disk.root",
                    f"{self.layout.root} holds files that rackwright did not put there",
                    observed=self.layout.root,
                    expected="an empty or new folder",
                    fix="set root to a new folder in the inventory",
                    reference="uninstall removes what lies below root",
                )
            )
        wanted = sources.digest(self.recipe, self.settings, self.model_dir)
        if not sources.verified(self.receipt("weights"), wanted, self.state.model_stat):
            found += sources.findings(self.recipe, self.settings, os.environ)
        if deep:
            found += deep_look(self)
        self.findings = found
        self.record.note(commands=self.remote.commands)
        self.record.note(findings=[finding.to_json() for finding in found])
        return found

    # -- speaking ------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line for the person at the terminal, with the host's name."""
        self.show(clean(text))

    def show(self, text: str) -> None:
        """The same for what we have drawn: its colours stay, and what the host said in it was cleaned."""
        self.host.log(filled(text), logger.info)

    def complain(self, text: str) -> None:
        """An error, line by line; the first one is why this host failed, if it does."""
        host_failed(self.name, text)
        _log_error(self.host, text)

    def ship(self) -> None:
        """Have the onhost programs on the host. Raises Stop."""
        if not self.state.has("lib"):
            why = ship(self.remote, self.bundle, self.layout.lib)
            if why:
                raise Stop(f"cannot write below {self.layout.root}: {why}\nFix: free space or inodes there")


def looked(real: Any, verb: str, *, network: bool, deep: bool = False) -> Plan:
    """The plan of one host, read and checked, whatever the findings are.

    With `network` the servers that its steps need are tried; with `deep` the deep probe runs, where the site
    asks for it. Raises Mistakes or LostHost.
    """
    catch_interrupts()
    steady(real)
    settings, recipe = choices_of(real)
    plan = Plan(real, settings, recipe, verb)
    plan.look(network=network)
    plan.check(deep=deep and settings.deep)
    return plan


def plan_for(host: Any, verb: str, *, preflight: bool = True) -> Plan | None:
    """The plan of one host, or None when that host stops here (the others go on).

    With `preflight`, findings that block stop the host before anything is changed, with their table.
    """
    real = host.state.inventory.get_host(host.name)
    try:
        plan = looked(real, verb, network=preflight)
    except Mistakes as mistakes:
        stop_host(host, real, "\n".join(mistakes.lines))
        return None
    except LostHost as lost:
        stop_host(
            host,
            real,
            f"{host.name} does not answer: {lost}\nFix: {by_hand(str(real.name), real.data.dict())}",
        )
        return None
    strict = plan.settings.strict
    if preflight and verdict(plan.findings, strict) == "fail":
        width, colour = shape(sys.stderr)
        plan.record.open()
        plan.record.finish("refused", verdict_line(plan.findings, strict))
        plan.complain(f"{plan.name}: {verdict_line(plan.findings, strict)}; nothing was changed")
        plan.say(f"report: {plan.record.page}")
        plan.show("\n" + render_blocked(plan.findings, strict=strict, width=width, colour=colour))
        host.state.fail_hosts({real})
        return None
    return plan


def stop_host(host: Any, real: Any, message: str) -> None:
    """End the run of one host with a message; the others go on."""
    host_failed(str(real.name), message)
    _log_error(real, message)
    host.state.fail_hosts({real})


def _log_error(real: Any, text: str) -> None:
    for line in clean(filled(text)).splitlines():
        real.log_styled(line, fg="red", log_func=logger.error)
