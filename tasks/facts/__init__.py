"""What the host is: one probe, one round trip, typed facts. Facts never judge (`tasks.checks` does)."""

from __future__ import annotations

from tasks.facts.probe import HostFacts, build_probe, facts_to_json, parse_probe
from tasks.facts.request import Endpoint, ProbeRequest, Unless

__all__ = [
    "Endpoint",
    "HostFacts",
    "ProbeRequest",
    "Unless",
    "build_probe",
    "facts_to_json",
    "parse_probe",
]
