"""What keeps the engine alive: systemd where the target has it, supervisord where it does not.

Each supervisor renders a LaunchSpec and returns scripts; it runs nothing itself. The choice is made
from the target's facts, never from the controller's.
"""

from __future__ import annotations

from tasks.supervisors.base import ServiceState, Supervisor
from tasks.supervisors.supervisord import Supervisord
from tasks.supervisors.systemd import Systemd, version_in

__all__ = ["ServiceState", "Supervisor", "Supervisord", "Systemd", "choose", "version_in"]


def choose(wanted: str, *, systemd: bool, privileged: bool, lingering: bool) -> tuple[str, str]:
    """Which supervisor suits the host, and why: `(name, reason)`.

    `privileged`: root or passwordless sudo. Without it a user unit is sound only when the user
    lingers (`loginctl enable-linger`): otherwise the user's manager, and the engine with it, ends at
    logout, and supervisord is the sound choice.
    """
    if wanted != "auto":
        return wanted, "set by the site"
    if not systemd:
        return "supervisord", "PID 1 is not systemd"
    if privileged:
        return "systemd", "systemd, and the right to install units"
    if lingering:
        return "systemd-user", "systemd without root, and the user lingers"
    return "supervisord", "systemd without root, and the user's manager would end at logout"
