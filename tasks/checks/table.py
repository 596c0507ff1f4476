"""Findings as text: the table of one host and the one line that follows from it."""

from __future__ import annotations

from tasks.findings import Finding, worst_first


def render_host(name: str, findings: list[Finding]) -> str:
    """The table of one host, worst first."""
    rows = [f"{name}:"]
    for finding in worst_first(findings):
        rows.append(f"  {finding.status:8} {finding.id:24} {finding.summary}")
        if finding.fix and finding.status in ("fail", "warn"):
            rows.append(f"           fix: {finding.fix}")
    return "\n".join(rows)


def verdict_line(findings: list[Finding], strict: bool = False) -> str:
    """Ready, ready with warnings, or not ready."""
    fails = sum(finding.status == "fail" for finding in findings)
    warns = sum(finding.status == "warn" for finding in findings)
    if fails or (strict and warns):
        return f"not ready: {fails} failures, {warns} warnings"
    return f"ready with {warns} warnings" if warns else "ready"
