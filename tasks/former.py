"""Services of the past, which still start this root's engine: modes, instances and supervisors of before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.remote import quote
from tasks.supervisors import Supervisord, Systemd
from tasks.supervisors.systemd import systemd_word

if TYPE_CHECKING:
    from tasks.plan import Plan

SYSTEM_UNITS = "/etc/systemd/system"


def meant(plan: Plan) -> tuple[str, ...]:
    """The units of the modes that the recipe has now."""
    if not isinstance(plan.supervisor, Systemd):
        return ()
    return tuple(plan.supervisor.unit_path(name) for name in plan.service_names)


def remove_units(plan: Plan, keep: tuple[str, ...] = ()) -> str:
    """The sh that stops and removes every unit but `keep` that starts an engine of this root.

    It is ours if it runs the root's wrapper, whatever its name: a start that failed left no receipt of its
    unit. Where the receipt names a unit is looked as well: it may be another home's.
    """
    service, home = plan.receipt("service"), plan.facts.system.home
    named = [path for path in service.paths if path.endswith(".service")] if service else []
    folders = [SYSTEM_UNITS, *([f"{home}/.config/systemd/user"] if home else [])]
    folders += [path.rpartition("/")[0] for path in named]
    units = " ".join(f"{quote(folder)}/*.service" for folder in dict.fromkeys(folders))
    kept = "".join(f' [ "$f" != {quote(path)} ] || continue;' for path in keep)
    wrapper = quote(systemd_word(f"{plan.layout.run}/start-engine.sh"))
    booted = "[ ! -d /run/systemd/system ]"
    return (
        "export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)};"
        f' for f in {units}; do grep -qsF -e {wrapper} "$f" || continue;{kept} n=${{f##*/}};'
        f' case $f in {SYSTEM_UNITS}/*) ctl=systemctl ;; *) ctl="systemctl --user" ;; esac;'
        f' {{ {{ {booted} || $ctl disable --quiet --now "$n"; }}'
        ' && rm -f "$f" "${f%/*}"/*.wants/"$n"'
        f" && {{ {booted} || $ctl daemon-reload; }}; }}"
        ' || { echo "$f is still there" >&2; exit 1; }; done'
    )


def end_supervisord(plan: Plan) -> str:
    """The sh that ends a supervisord of before, and removes what would start it again."""
    if plan.supervisor.name == "supervisord":
        return ":"
    run = quote(plan.layout.run)
    names = "sv.py up.sh boot supervisord.conf programs/*.conf"
    files = " ".join(f"{run}/{name}" for name in names.split())
    return f"{{ {Supervisord(plan.layout, plan.settings.instance).remove(())}; }} && rm -f {files}"
