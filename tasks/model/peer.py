"""A peer: another host of the inventory that serves its verified copy while one delivery lasts.

The peer runs `onhost/serve_weights.py` as a job of its own for each host that copies from it; certificate and
token are made for that one job. It ends when the delivery does, and by itself after three days (a controller
that died takes nothing with it). A peer that is still downloading is waited for.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pyinfra.api import Host
from pyinfra.api.exceptions import ConnectError, NoHostError

from tasks.choices import choices_of
from tasks.digest import digest_of
from tasks.jobs import (
    HEARTBEAT_SECONDS,
    SHOW_SECONDS,
    Job,
    Meter,
    in_time,
    last_progress,
    log_lines,
    start_script,
    status,
)
from tasks.mistakes import Mistakes
from tasks.model import sources
from tasks.plan import Plan, Stop
from tasks.remote import LostHost, quote, steady, write_file

BEGIN_SECONDS = 60  # how long a peer of the same run may take to begin its own delivery
POLL_SECONDS = 3
LAST_SECONDS = 72 * 3600

# Which hosts of this process deliver at the moment (True) or have ended it (False), and who waits for whom.
_deliveries: dict[tuple[int, str], bool] = {}
_waits: dict[tuple[int, str], str] = {}


class NoPeer(Exception):
    """The peer cannot serve; the message says why."""


@dataclass(frozen=True)
class PeerSource:
    """A peer that serves: the source as the fetcher takes it, and the token that opens it."""

    source: dict[str, Any]
    token: str


@contextmanager
def delivering(plan: Plan) -> Iterator[None]:
    """Let hosts that copy from this one know that it is at work."""
    key = (id(plan.host.state), plan.name)
    _deliveries[key] = True
    try:
        yield
    finally:
        _deliveries[key] = False


def manifest_file(plan: Plan) -> str:
    """Where a host keeps the manifest of the model that it verified."""
    return f"{plan.layout.run}/weights-{plan.recipe.model.name}.sha256"


def stamp_file(plan: Plan) -> str:
    """Where a host keeps the digests that it computed."""
    return f"{plan.layout.run}/weights-{plan.recipe.model.name}.stamp"


def has_model(plan: Plan) -> bool:
    """The host of this plan has the verified model, untouched since, as it was last looked at."""
    wanted = sources.digest(plan.recipe, plan.settings, plan.model_dir)
    return sources.verified(plan.receipt("weights"), wanted, plan.state.model_stat)


def connect(plan: Plan, name: str) -> Plan:
    """A plan of another host of the inventory, over a connection of its own. Raises NoPeer."""
    state = plan.host.state
    if name == plan.name:
        raise NoPeer("a host cannot be its own peer")
    try:
        real = state.inventory.get_host(name)
    except NoHostError:
        names = ", ".join(host.name for host in state.inventory if host.name != plan.name)
        raise NoPeer(f"no such host in this inventory (there are: {names or 'none'})") from None
    twin: Any = Host(real.name, state.inventory, real.groups, real.connector_cls)
    twin.init(state)
    try:
        settings, recipe = choices_of(real)
        twin.connector.connect()
    except Mistakes as mistakes:
        raise NoPeer("; ".join(mistakes.lines)) from mistakes
    except ConnectError as error:
        raise NoPeer(str(error)) from error
    twin.connected = True
    steady(twin)
    return Plan(twin, settings, recipe, plan.verb)


def disconnect(peer: Plan) -> None:
    """Close what `connect` opened."""
    with suppress(Exception):  # a connection that is broken already need not be closed
        peer.host.connector.disconnect()


def wait_for_model(plan: Plan, peer: Plan, clock: Callable[[], float] = time.monotonic) -> None:
    """Return once the peer has the verified model; wait while it downloads. Raises NoPeer or LostHost."""
    state, began, shown = plan.host.state, clock(), clock()
    here, there = (id(state), plan.name), (id(state), peer.name)
    if peer.recipe.model.name != plan.recipe.model.name:
        raise NoPeer(f"it serves another model, {peer.recipe.model.name}")
    _waits[here] = peer.name
    try:
        while True:
            at_work = _deliveries.get(there)  # before the look: what ended since then is seen by it
            peer.look()
            if has_model(peer):
                return
            job = peer.state.jobs.get("weights")
            running = job is not None and job.state == "running"
            if not at_work and not running:
                real = state.inventory.get_host(peer.name)
                comes = at_work is None and state.is_host_in_limit(real) and real not in state.failed_hosts
                if not comes or clock() - began > BEGIN_SECONDS:
                    raise NoPeer("it does not have the verified model")
            if _waits_for(here[0], peer.name, plan.name):
                raise NoPeer("it waits for this host itself")
            if clock() - shown > HEARTBEAT_SECONDS or shown == began:
                plan.say(f"weights: waiting for {peer.name}, which is still getting them")
                shown = clock()
            time.sleep(POLL_SECONDS)
    finally:
        del _waits[here]


def _waits_for(run: int, one: str, other: str) -> bool:
    """Host `one` waits, perhaps through others, for host `other`."""
    seen = set()
    while (run, one) in _waits and one not in seen:
        seen.add(one)
        one = _waits[run, one]
        if one == other:
            return True
    return False


@contextmanager
def serving(plan: Plan) -> Iterator[PeerSource]:
    """The peer of this site, serving until the block ends. Raises NoPeer, and LostHost of this host."""
    name = str(plan.settings.peer)
    peer, cert_file = connect(plan, name), f"{plan.layout.run}/peer-cert.pem"
    try:
        token = secrets.token_urlsafe(32)
        try:
            wait_for_model(plan, peer)
            peer.ship()
            info, certificate = _start(plan, peer, token)
        except (LostHost, Stop) as error:
            raise NoPeer(str(error)) from error
        written = plan.remote.run(write_file(cert_file, certificate))
        if not written.ok:
            raise NoPeer(f"its certificate cannot be written to {cert_file}: {written.stderr.strip()}")
        plan.say(f"weights: {name} serves its copy at {info['url']}")
        source = {"kind": "peer", "name": f"peer {name}", "url": info["url"], "cert_file": cert_file}
        yield PeerSource(source, token)
    finally:
        _end(plan, peer)
        disconnect(peer)


def stop_serving(plan: Plan) -> None:
    """End what an earlier controller had the peer serve to this host; it would end by itself, later."""
    with suppress(NoPeer):
        peer = connect(plan, str(plan.settings.peer))
        _end(plan, peer)
        disconnect(peer)


def _names(plan: Plan, peer: Plan) -> tuple[str, str, str]:
    """The peer's job for this host, its folder, and the folder of its certificate and token."""
    client = "".join(char if char.isalnum() or char in "._-" else "_" for char in plan.name)
    name = f"serve-weights-{client}"
    return name, f"{peer.layout.jobs}/{name}", f"{peer.layout.run}/peer-{client}"


# sudo takes SSH_CONNECTION away, but the processes above it still have it.
ADDRESS = r"""
p=$$
while [ -n "$p" ] && [ "$p" -gt 1 ]; do
    a=$(tr '\0' '\n' 2>/dev/null </proc/$p/environ | sed -n 's/^SSH_CONNECTION=[^ ]* [^ ]* \([^ ]*\) .*/\1/p')
    [ -z "$a" ] || break
    p=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$p/status 2>/dev/null)
done
[ -n "$a" ] || a=$(hostname -I 2>/dev/null | cut -d' ' -f1)
echo "$a"
"""


def _address(peer: Plan) -> str:
    """The peer's own address on the network over which it is administered."""
    found = peer.remote.run(ADDRESS).stdout.strip()
    if not found:
        raise NoPeer("its address cannot be found out: set peer_address")
    return found


def _start(plan: Plan, peer: Plan, token: str) -> tuple[dict[str, Any], str]:
    """Start the peer's job and wait until it serves: what it says of itself, and its certificate."""
    name, folder, files = _names(plan, peer)
    request = {
        "dir": peer.model_dir,
        "manifest": manifest_file(peer),
        "stamp": stamp_file(peer),
        "address": plan.settings.peer_address or _address(peer),
        "port": plan.settings.peer_port or 0,
        "token_file": f"{files}/token",
        "cert_file": f"{files}/cert.pem",
        "info_file": f"{files}/info.json",
        # It may be asked hours from now, when a source that the site prefers fails.
        "idle": LAST_SECONDS,
        "last": LAST_SECONDS,
    }
    # the tools' Python can make a certificate where there is no openssl command
    python = peer.layout.tools if peer.state.has("tools") else peer.layout.env
    argv = (f"{python}/bin/python", f"{peer.lib}/serve_weights.py", "--stdin")
    work = Job(name, folder, digest_of(token), argv, json.dumps(request))
    program, place = f"{peer.lib}/job.sh", quote(files)
    made = peer.remote.run(
        f"sh {quote(program)} cancel {quote(folder)}; umask 077; rm -rf {place}; mkdir -p {place}"
        f" && cat >{place}/token",
        stdin=token,
    )
    if not made.ok:
        raise NoPeer(f"{files} cannot be written: {made.stderr.strip()}")
    answer = peer.remote.run(start_script(work, program), stdin=work.stdin, timeout=90)
    if answer.stdout.strip() != "started":
        raise NoPeer(f"it could not start serving: {answer.stderr.strip() or answer.stdout.strip()}")
    meter, began, shown = Meter(), time.monotonic(), time.monotonic()
    look = (
        f"cd {place} && [ -f info.json ] || exit 0; "
        "for f in info.json cert.pem; do base64 <$f | tr -d '\\n'; echo; done"
    )
    while True:
        now = status(peer.remote, program, folder)
        found = peer.remote.run(look).stdout.split()
        if len(found) == 2:
            info, certificate = (base64.b64decode(text).decode() for text in found)
            return json.loads(info), certificate
        if now.state != "running":
            raise NoPeer("; ".join(log_lines(now.log, 3)) or "it stopped serving without a word")
        clock, progress = time.monotonic(), last_progress(now.log)
        if progress and clock - shown > SHOW_SECONDS:
            line = meter.line(progress, clock)
            plan.say(f"weights: {peer.name} looks at its copy: {in_time(clock - began)}: {line}")
            shown = clock
        time.sleep(0.3 if clock - began < 5 else 2)


def _end(plan: Plan, peer: Plan) -> None:
    """End the peer's job for this host, if there is one, and remove what was made for it on both."""
    _, folder, files = _names(plan, peer)
    cancel = f"[ ! -f {quote(peer.lib)}/job.sh ] || sh {quote(peer.lib)}/job.sh cancel {quote(folder)}"
    with suppress(LostHost):  # it ends by itself, later
        peer.remote.run(f"{cancel}; rm -rf {quote(folder)} {quote(files)}")
    with suppress(LostHost):
        plan.remote.run(f"rm -f {quote(plan.layout.run)}/peer-cert.pem")
