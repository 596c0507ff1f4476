#!/usr/bin/env python3
"""Bring up a test host by hand: `python tests/hosts/host.py up systemd`, Ctrl-C throws it away."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from machines import CommandFailed, Machine, MachineError, base_system, missing_requirements, sweep
from machines.base import BaseSystemError, remove_old_bases


def main() -> int:
    """Exit 0 when done, 1 when a host or the base fails, 2 on wrong usage or where hosts cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a host, print how to reach it, stop it on Ctrl-C")
    up.add_argument("kind", choices=["systemd", "container"])
    up.add_argument("--name", default="gpu1", help="host name (default: gpu1)")
    up.add_argument("--offline", action="store_true", help="give it a network of its own without a way out")
    verbs.add_parser("base", help="build the base system if it is not there, print its folder")
    verbs.add_parser(
        "clean", help="remove hosts that a killed run left behind and base systems of older package lists"
    )
    args = parser.parse_args()
    missing = missing_requirements()
    if missing:
        parser.error(f"test hosts cannot run here: {'; '.join(missing)}")
    try:
        if args.verb == "clean":
            for removed in sweep() + remove_old_bases():
                print(f"removed {removed}")
        elif args.verb == "base":
            print(base_system())
        else:
            _serve(Machine(args.kind, args.name, offline=args.offline))
    except (BaseSystemError, CommandFailed, MachineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _serve(machine: Machine) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        machine.start()
        print(
            f"ssh -i {machine.ssh_key} -p {machine.ssh_port} -o UserKnownHostsFile={machine.known_hosts} "
            f"root@{machine.host}\npassword: {machine.password}\n"
            f"inventory: {(machine.name, machine.inventory_data())!r}",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        print("throwing the host away", file=sys.stderr)
    finally:
        machine.stop()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
