"""The servers that the chosen routes use; what cannot be reached becomes a decision."""

from __future__ import annotations

from tasks.checks.needs import Needs
from tasks.facts import HostFacts
from tasks.findings import Finding, fail, ok, skipped, warn

SLOW_S = 3.0


def endpoints(needs: Needs, host: HostFacts) -> list[Finding]:
    """One finding an endpoint: `net.<name>`. Unreachable with another way open is a warning that names it."""
    findings = []
    for need in needs.endpoints:
        id = f"net.{need.name}"
        facts = host.net.endpoints.get(need.url)
        if facts is None or (
            facts.reachable is None and facts.tool is None and "deadline" not in (facts.why or "")
        ):
            findings.append(skipped(id, f"not tried: {facts.why if facts else 'the probe was not asked to'}"))
        elif facts.reachable:
            took = f" in {facts.seconds:.1f} s" if facts.seconds is not None else ""
            status = f"status {facts.status}" if facts.status else "connected"
            if (facts.seconds or 0) >= SLOW_S:
                findings.append(
                    warn(
                        id,
                        f"{need.purpose}: answers slowly",
                        observed=f"{need.url}: {status}{took}",
                        expected=f"below {SLOW_S:.0f} s",
                        fix=need.alternative or "Choose a mirror nearer to this host.",
                    )
                )
            else:
                findings.append(ok(id, need.purpose, f"{need.url}: {status}{took}"))
        else:
            proxy = "" if host.net.proxies else "; no proxy variable is set on the host"
            finding = warn if need.alternative else fail
            findings.append(
                finding(
                    id,
                    f"{need.purpose}: cannot be reached from this host",
                    observed=f"{need.url}: {facts.why or 'no answer'}{proxy}",
                    expected="an answer",
                    fix=need.alternative
                    or "Set a mirror for it in the inventory, carry the files over, or open the network.",
                )
            )
    return findings
