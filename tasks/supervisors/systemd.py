"""LaunchSpec as a systemd unit: a system unit, or a user unit where there is no root."""

from __future__ import annotations

from tasks.launch import LaunchSpec
from tasks.remote import quote
from tasks.supervisors.base import ABSENT, LIMIT_SECONDS, LIMIT_STARTS, ServiceState, template

_PROPERTIES = "LoadState,ActiveState,SubState,MainPID,NRestarts,ActiveEnterTimestampMonotonic"


class Systemd:
    """One unit a mode, in conflict with each other; the journal keeps the log."""

    def __init__(self, *, user: bool = False, home: str = "") -> None:
        self.name = "systemd-user" if user else "systemd"
        self._user = user
        self._folder = f"{home}/.config/systemd/user" if user else "/etc/systemd/system"
        # sudo and ssh commands have no session of their own
        prefix = "XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)} " if user else ""
        self._ctl = f"{prefix}systemctl --user" if user else "systemctl"
        self._journal = f"{prefix}journalctl --user-unit" if user else "journalctl --unit"

    def unit_path(self, name: str) -> str:
        """Where the unit of a service lies."""
        return f"{self._folder}/{name}.service"

    def files(self, spec: LaunchSpec, others: tuple[str, ...]) -> dict[str, str]:
        """The unit of `spec`."""
        env = dict(spec.env)
        if self._user and spec.key_file:
            env["RACKWRIGHT_KEY_FILE"] = spec.key_file  # user managers cannot load credentials everywhere
        if spec.unset:
            env["RACKWRIGHT_UNSET"] = " ".join(spec.unset)
        return {
            self.unit_path(spec.name): template(
                "systemd/engine.service.j2",
                spec=spec,
                env=sorted(env.items()),
                key_file=None if self._user else spec.key_file,
                system=not self._user,
                conflicts=[name for name in others if name != spec.name],
                command=" ".join(systemd_word(word) for word in spec.command),
                env_quote=lambda name, value: systemd_word(f"{name}={value}"),
                inside_home=any(
                    path.startswith(("/home/", "/root/")) for path in (*spec.writable, *spec.readable)
                ),
                limit_seconds=LIMIT_SECONDS,
                limit_starts=LIMIT_STARTS,
            )
        }

    def install(self, spec: LaunchSpec) -> str:
        """Reload units and enable this one at boot."""
        return f"{self._ctl} daemon-reload && {self._ctl} enable --quiet {quote(spec.name + '.service')}"

    def start(self, name: str) -> str:
        """Start the unit; its rivals stop by `Conflicts=`. A crash count of the past is forgotten."""
        unit = quote(f"{name}.service")
        return f"{self._ctl} reset-failed {unit} 2>/dev/null; {self._ctl} start {unit}"

    def stop(self, name: str) -> str:
        """Stop the unit; systemd ends its whole control group."""
        unit = quote(f"{name}.service")
        return f"! {self._ctl} cat {unit} >/dev/null 2>&1 || {self._ctl} stop {unit}"

    def status(self, names: tuple[str, ...]) -> str:
        """Print the units' properties."""
        return (
            "; ".join(
                f"echo unit={name}; {self._ctl} show {quote(name + '.service')}"
                f" --property={_PROPERTIES} 2>/dev/null"
                for name in names
            )
            + "; echo now=$(date +%s); echo up=$(cut -d. -f1 /proc/uptime)"
        )

    def parse_status(self, text: str, names: tuple[str, ...]) -> dict[str, ServiceState]:
        """States from `systemctl show`."""
        blocks: dict[str, dict[str, str]] = {}
        clock: dict[str, int] = {}
        current: dict[str, str] = {}
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key == "unit":
                current = blocks.setdefault(value, {})
            elif key in ("now", "up"):
                clock[key] = int(value) if value.isdigit() else 0
            else:
                current[key] = value
        return {name: _state(blocks.get(name, {}), clock) for name in names}

    def logs(self, spec_name: str, log: str, lines: int, follow: bool) -> str:
        """The journal of the unit, without its own prefix."""
        return f"{self._journal} {quote(spec_name + '.service')} --no-pager --output=cat --lines={lines}" + (
            " --follow" if follow else ""
        )

    def remove(self, names: tuple[str, ...]) -> str:
        """Stop and disable the units and delete their files."""
        lines = []
        for name in names:
            unit, path = quote(f"{name}.service"), quote(self.unit_path(name))
            lines.append(f"if [ -f {path} ]; then {self._ctl} disable --quiet --now {unit}; rm -f {path}; fi")
        return "; ".join(lines) + f"; {self._ctl} daemon-reload"


def systemd_word(word: str) -> str:
    """One word of a unit's command line or environment, quoted (systemd.service(5), "COMMAND LINES")."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _state(block: dict[str, str], clock: dict[str, int]) -> ServiceState:
    if block.get("LoadState") != "loaded":
        return ABSENT
    active = block.get("ActiveState", "unknown")
    pid = int(block.get("MainPID") or 0) or None
    entered = int(block.get("ActiveEnterTimestampMonotonic") or 0) // 1_000_000
    since = clock["now"] - (clock["up"] - entered) if entered and {"now", "up"} <= clock.keys() else None
    sub = block.get("SubState", "")
    return ServiceState(
        installed=True,
        state=sub if active == "activating" else active,
        running=active in ("active", "activating") and pid is not None,
        pid=pid,
        restarts=int(block.get("NRestarts") or 0),
        since=since if active == "active" else None,
        identity=f"{pid}@{block.get('ActiveEnterTimestampMonotonic')}" if pid else None,
    )
