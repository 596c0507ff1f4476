"""LaunchSpec as a systemd unit: a system unit, or a user unit where there is no root."""

from __future__ import annotations

from tasks.launch import LaunchSpec
from tasks.onhost import service_state
from tasks.remote import quote
from tasks.supervisors.base import LIMIT_STARTS, ServiceState, start_seconds, template

_PROPERTIES = "LoadState,ActiveState,SubState,MainPID,NRestarts,ActiveEnterTimestampMonotonic,UnitFileState"
# RestartSteps= came with systemd 254; older ones complain about it.
STEPS_SINCE = 254
# LoadCredential= came with systemd 247; older ones (Ubuntu 20.04, RHEL 8) start the service without it.
CREDENTIALS_SINCE = 247


class Systemd:
    """One unit a mode, in conflict with each other; the journal keeps the log."""

    def __init__(self, *, user: bool = False, home: str = "", version: int = 0) -> None:
        self.name = "systemd-user" if user else "systemd"
        self._user = user
        self._version = version
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
        env = {**dict(spec.env), **spec.wrapper_env}
        credential = copy = None
        if spec.key_file and self._user:
            env["RACKWRIGHT_KEY_FILE"] = spec.key_file  # user managers cannot load credentials everywhere
        elif spec.key_file and self._version >= CREDENTIALS_SINCE:
            credential = spec.key_file
        elif spec.key_file:
            env["RACKWRIGHT_KEY_FILE"] = copy = f"{spec.key_file}.{spec.name}"
        rivals = sorted(name for name in others if name != spec.name)
        return {
            self.unit_path(spec.name): template(
                "systemd/engine.service.j2",
                spec=spec,
                environment=[systemd_assignment(f"{name}={value}") for name, value in sorted(env.items())],
                credential=credential,
                key_copy=copy,
                system=not self._user,
                conflicts=rivals,
                # Without an order the rival would still be stopping while this one starts; one direction
                # of each pair is enough, and both would be a cycle.
                after=[name for name in rivals if name < spec.name],
                steps=self._version >= STEPS_SINCE,
                command=" ".join(systemd_word(word) for word in spec.command),
                after_stop=" ".join(systemd_word(word) for word in spec.after_stop),
                inside_home=any(
                    path.startswith(("/home/", "/root/")) for path in (*spec.writable, *spec.readable)
                ),
                limit_seconds=LIMIT_STARTS * start_seconds(spec),
                limit_starts=LIMIT_STARTS,
            )
        }

    def helpers(self) -> dict[str, str]:
        """None."""
        return {}

    def reload(self) -> str:
        """Read units anew."""
        return f"{self._ctl} daemon-reload"

    def at_boot(self, name: str, others: tuple[str, ...]) -> str:
        """Enable one unit, then disable the others: killed in between, something still starts at boot."""
        lines = [f"{self._ctl} enable --quiet {quote(name + '.service')}"]
        for other in others:
            if other != name:
                path, unit = quote(self.unit_path(other)), quote(f"{other}.service")
                lines.append(f"{{ [ ! -e {path} ] || {self._ctl} disable --quiet {unit}; }}")
        return " && ".join(lines)

    def start(self, name: str) -> str:
        """Start the unit; its rivals stop by `Conflicts=`. A crash count of the past is forgotten."""
        unit = quote(f"{name}.service")
        return f"{self._ctl} reset-failed {unit} 2>/dev/null; {self._ctl} start {unit}"

    def stop(self, name: str) -> str:
        """Stop the unit; systemd ends its whole control group.

        An engine that had to be killed then makes its unit a failed one; it was stopped all the same.
        """
        unit, ctl = quote(f"{name}.service"), self._ctl
        return (
            f"! {ctl} cat {unit} >/dev/null 2>&1 || {{ ! {ctl} is-active --quiet {unit}; up=$?;"
            f" {ctl} stop {unit} && {{ [ $up = 0 ] || {ctl} reset-failed {unit} 2>/dev/null || :; }}; }}"
        )

    def status(self, names: tuple[str, ...]) -> str:
        """Print the units' properties, and systemd's version."""
        return (
            "; ".join(
                f"echo unit={name}; {self._ctl} show {quote(name + '.service')}"
                f" --property={_PROPERTIES} 2>/dev/null"
                for name in names
            )
            + "; echo now=$(date +%s); echo up=$(cut -d. -f1 /proc/uptime)"
            + "; echo version=$(systemctl --version | sed -n '1s/[^ ]* \\([0-9]*\\).*/\\1/p')"
        )

    def parse_status(self, text: str, names: tuple[str, ...]) -> dict[str, ServiceState]:
        """States from `systemctl show`."""
        found = service_state.parse_systemd(text, names)
        return {name: ServiceState(**fields) for name, fields in found.items()}

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


def version_in(status: str) -> int:
    """systemd's version, as `Systemd.status` printed it; 0 when it did not."""
    for line in status.splitlines():
        key, _, value = line.partition("=")
        if key == "version" and value.isdigit():
            return int(value)
    return 0


def systemd_word(word: str) -> str:
    """One word of a unit's command line, quoted (systemd.service(5), "COMMAND LINES")."""
    return systemd_assignment(word).replace("$", "$$")


def systemd_assignment(text: str) -> str:
    """One assignment of a unit's environment: as a word, but $ means itself there (systemd.exec(5))."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
