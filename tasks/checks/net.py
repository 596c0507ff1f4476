"""The servers that the chosen routes use; what cannot be reached becomes a decision."""

from __future__ import annotations

from tasks.checks.needs import EndpointNeed, Needs
from tasks.facts import HostFacts
from tasks.facts.net import EndpointFacts
from tasks.findings import Finding, fail, ok, skipped, warn

SLOW_S = 3.0


def endpoints(needs: Needs, host: HostFacts) -> list[Finding]:
    """One finding an endpoint: `net.<name>`. Unreachable with another way open is a warning that names it."""
    findings = []
    for need in needs.endpoints:
        id = f"net.{need.name}"
        facts = host.net.endpoints.get(need.url)
        if facts is not None and facts.spared:
            continue
        if facts is None or (
            facts.reachable is None and facts.tool is None and "deadline" not in (facts.why or "")
        ):
            findings.append(skipped(id, f"not tried: {facts.why if facts else 'the probe was not asked to'}"))
            continue
        url = facts.at or need.url
        if not facts.reachable:
            findings.append(_silent(id, need, url, facts, host))
            continue
        took = f" in {facts.seconds:.1f} s" if facts.seconds is not None else ""
        told = f"{url}: {f'status {facts.status}' if facts.status else 'connected'}{took}"
        if (facts.seconds or 0) >= SLOW_S:
            findings.append(
                warn(
                    id,
                    f"{need.purpose}: answers slowly",
                    observed=told,
                    expected=f"below {SLOW_S:.0f} s",
                    fix=need.fix or "Choose a mirror nearer to this host.",
                )
            )
        else:
            findings.append(ok(id, need.purpose, told))
    return findings


def _silent(id: str, need: EndpointNeed, url: str, facts: EndpointFacts, host: HostFacts) -> Finding:
    """No answer: a warning with the way that is open, else a failure with what opens one."""
    proxy = "" if host.net.proxies else "; no proxy variable is set on the host"
    hand = f"; {facts.at_hand[0]} of {facts.at_hand[1]} wheels are at hand" if facts.at_hand else ""
    finding = warn if need.alternative else fail
    return finding(
        id,
        f"{need.purpose}: cannot be reached from this host",
        observed=f"{url}: {facts.why or 'no answer'}{hand}{proxy}",
        expected="an answer",
        fix=need.alternative
        or need.fix
        or "Set a mirror for it in the inventory, carry the files over, or open the network.",
    )
