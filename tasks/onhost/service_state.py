"""What a supervisor says about the engine's services, as plain values; read on hosts and on the controller.

Both kinds give for each name: installed, state (the supervisor's own word), running, pid (the engine's),
restarts, since (Unix seconds), identity (tells one start from another), at_boot (starts after a reboot).
"""

from __future__ import annotations

import json
from typing import Any

# Words for "it does not run and nobody will start it by itself".
SETTLED = ("absent", "inactive", "failed", "STOPPED", "EXITED", "FATAL", "UNKNOWN")
# The supervisor has stopped trying.
GAVE_UP = ("failed", "FATAL")
ABSENT: dict[str, Any] = {
    "installed": False,
    "state": "absent",
    "running": False,
    "pid": None,
    "restarts": None,
    "since": None,
    "identity": None,
    "at_boot": False,
}


def parse(kind: str, text: str, names: Any) -> dict[str, dict[str, Any]]:
    """States by name, from the output of a supervisor's status script; unknown services are ABSENT."""
    return parse_supervisord(text, names) if kind == "supervisord" else parse_systemd(text, names)


def parse_systemd(text: str, names: Any) -> dict[str, dict[str, Any]]:
    """States from `systemctl show`, with the clock lines `now=` and `up=` behind it."""
    blocks: dict[str, dict[str, str]] = {}
    clock: dict[str, int] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "unit":
            current = blocks.setdefault(value, {})
        elif key in ("now", "up"):
            clock[key] = _number(value)
        else:
            current[key] = value
    return {name: _unit(blocks.get(name, {}), clock) for name in names}


def _unit(block: dict[str, str], clock: dict[str, int]) -> dict[str, Any]:
    if block.get("LoadState") != "loaded":
        return dict(ABSENT)
    active, sub = block.get("ActiveState", "unknown"), block.get("SubState", "")
    pid = _number(block.get("MainPID", "")) or None
    entered = _number(block.get("ActiveEnterTimestampMonotonic", "")) // 1_000_000
    known = entered and "now" in clock and "up" in clock
    return {
        "installed": True,
        "state": sub if active == "activating" else active,
        "running": active in ("active", "activating") and pid is not None,
        "pid": pid,
        "restarts": _number(block.get("NRestarts", "")),
        "since": clock["now"] - (clock["up"] - entered) if known and active == "active" else None,
        "identity": "%d@%s" % (pid, block.get("ActiveEnterTimestampMonotonic")) if pid else None,
        "at_boot": block.get("UnitFileState", "").startswith("enabled"),
    }


def parse_supervisord(text: str, names: Any) -> dict[str, dict[str, Any]]:
    """States from `sv.py status`; damage is absence."""
    try:
        programs = {str(item["name"]): item for item in json.loads(text.strip() or "[]")}
    except (ValueError, TypeError, KeyError):
        programs = {}
    return {name: _program(programs[name]) if name in programs else dict(ABSENT) for name in names}


def _program(item: dict[str, Any]) -> dict[str, Any]:
    state = str(item.get("state", "UNKNOWN"))
    pid, restarts, since = item.get("pid"), item.get("restarts"), item.get("start")
    running = state in ("STARTING", "RUNNING")
    return {
        "installed": True,
        "state": state,
        "running": running,
        "pid": pid if isinstance(pid, int) and pid else None,
        "restarts": restarts if isinstance(restarts, int) else None,
        "since": since if running and isinstance(since, int) and since else None,
        "identity": "%s@%s" % (pid, since) if running and pid else None,
        "at_boot": bool(item.get("boot")),
    }


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0
