"""What the host is: one probe, one round trip, typed facts. Facts never judge (`tasks.checks` does)."""

from __future__ import annotations

from tasks.facts.probe import HostFacts, ProbeRequest, build_probe, facts_to_json, parse_probe

__all__ = ["HostFacts", "ProbeRequest", "build_probe", "facts_to_json", "parse_probe"]
