"""The base system that all test hosts share: built once by mmdebstrap, kept outside the repository."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import controller

# fmt: off
PACKAGES = (
    # what a server image has
    "ca-certificates", "curl", "dbus", "dbus-user-session", "iproute2", "libpam-systemd", "openssh-server",
    "polkitd", "procps", "sudo", "systemd", "systemd-sysv", "util-linux",
    # what provisioning an engine needs to find
    "g++", "gcc", "git", "make", "python3", "python3-pip", "python3-venv",
)
# fmt: on

USERS = ("root", "user", "sudoer")

_HOOKS = (
    'for u in user sudoer; do chroot "$1" useradd --create-home --shell /bin/bash $u; done',
    'printf "sudoer ALL=(ALL) NOPASSWD: ALL\\n" > "$1/etc/sudoers.d/sudoer"',
    'chmod 440 "$1/etc/sudoers.d/sudoer"',
    # every host makes its own
    'rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/hostname" "$1/etc/resolv.conf" "$1/etc/machine-id"',
    # background work that would change a host behind a test's back
    'systemctl --root="$1" mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer '
    "e2scrub_all.timer fstrim.timer systemd-timesyncd.service",
)
_NO_DOCS = tuple(f"path-exclude=/usr/share/{part}/*" for part in ("man", "doc", "locale", "info"))


class BaseSystemError(RuntimeError):
    """The base system could not be built; the message ends with mmdebstrap's last lines."""


def cache_dir() -> Path:
    """Folder for the base system and running hosts: $RACKWRIGHT_TEST_CACHE or ~/.cache/rackwright-tests."""
    return Path(
        os.environ.get("RACKWRIGHT_TEST_CACHE") or Path.home() / ".cache" / "rackwright-tests"
    ).absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel lets go of it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def base_system() -> Path:
    """Root folder of the base system, built on first use (under a minute); read-only for everyone."""
    base, distribution, release = _wanted()
    with locked(cache_dir() / "base.lock"):
        if not base.is_dir():
            for leftover in cache_dir().glob("base-*.tmp"):
                shutil.rmtree(leftover)
            _build(base, distribution, release)
    return base


def remove_old_bases() -> list[str]:
    """Remove base systems of other package lists or releases that no host stands on; return their names."""
    in_use = Path("/proc/self/mounts").read_text()
    removed = []
    with locked(cache_dir() / "base.lock"):
        for old in sorted(cache_dir().glob("base-*/")):
            if old != _wanted()[0] and f"lowerdir={old}," not in in_use:
                shutil.rmtree(old)
                removed.append(old.name)
    return removed


def _wanted() -> tuple[Path, str, str]:
    distribution, release = controller.os_release()
    recipe = [distribution, release, platform.machine(), PACKAGES, _HOOKS, _NO_DOCS]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    return cache_dir() / f"base-{release}-{digest}", distribution, release


def _build(base: Path, distribution: str, release: str) -> None:
    unfinished = base.with_name(base.name + ".tmp")
    print(f"building the base system of test hosts in {base} (once)", file=sys.stderr)
    began = time.monotonic()
    argv = ["mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"]
    argv += [f"--include={','.join(PACKAGES)}"]
    argv += [f"--dpkgopt={option}" for option in _NO_DOCS]
    argv += [f"--aptopt={option}" for option in controller.apt_options()]
    argv += [f"--customize-hook={hook}" for hook in _HOOKS]
    argv += [release, str(unfinished), *controller.apt_sources(distribution, release)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1800)
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise BaseSystemError(f"mmdebstrap exited {done.returncode}:\n{tail}")
    unfinished.rename(base)
    print(f"base system built in {time.monotonic() - began:.0f} s", file=sys.stderr)
