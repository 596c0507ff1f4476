"""One throw-away host: start it, reach it over SSH, hurt it, stop it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Literal

from . import controller, isolation
from .base import USERS, base_system, cache_dir, locked

Kind = Literal["systemd", "container"]

BOOT_SECONDS = 60.0
REBOOT_SECONDS = 120.0

# what nspawn grants and `docker run` does not
_NOT_IN_DOCKER = (
    "CAP_AUDIT_CONTROL,CAP_DAC_READ_SEARCH,CAP_IPC_OWNER,CAP_LEASE,CAP_LINUX_IMMUTABLE,CAP_NET_BROADCAST,"
    "CAP_SYS_ADMIN,CAP_SYS_BOOT,CAP_SYS_NICE,CAP_SYS_PTRACE,CAP_SYS_RESOURCE,CAP_SYS_TTY_CONFIG"
)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# exit status by which systemd-nspawn --keep-unit asks to be started again: the host said `reboot`
_POWER = 'while :; do sh -c \'echo $$ > "$0/cgroup.procs" && exec "$@"\' "$@"; [ $? = 133 ] || exit; done'

_running: set[Machine] = set()


class MachineError(RuntimeError):
    """A host did not start, answer or stop; the message ends with its last log lines."""


class CommandFailed(RuntimeError):
    """A command on a host exited non-zero: `.returncode`, `.stdout`, `.stderr`."""

    def __init__(self, machine: str, command: str, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{machine}: exit {done.returncode}: {command}\n{done.stdout}{done.stderr}".rstrip())
        self.returncode, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr


def missing_requirements() -> list[str]:
    """What this machine lacks for test hosts, one reason each; [] when they can run."""
    missing = []
    if os.geteuid() != 0:
        missing.append("not root")
    for tool, package in {
        "systemd-nspawn": "systemd-container",
        "mmdebstrap": "mmdebstrap",
        "ssh": "openssh-client",
        "ssh-keygen": "openssh-client",
        "ip": "iproute2",
        "nsenter": "util-linux",
    }.items():
        if shutil.which(tool) is None:
            missing.append(f"no {tool} (Debian package {package})")
    cgroup = isolation.cgroup_root()
    if cgroup is None or not os.access(cgroup, os.W_OK):
        missing.append("no writable cgroup2")
    if "overlay" not in Path("/proc/filesystems").read_text():
        missing.append("no overlayfs")
    if set(str(cache_dir())) & set(":,\\"):
        missing.append(f"overlayfs cannot take the path {cache_dir()}: set RACKWRIGHT_TEST_CACHE")
    return missing


def free_port() -> int:
    """A TCP port free on loopback now, outside the range that outgoing connections use."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def sweep() -> list[str]:
    """Remove hosts whose process died without stopping them (killed run, power cut); return their ids."""
    removed = []
    with locked(cache_dir() / "hosts.lock"):
        for home in sorted((cache_dir() / "hosts").glob("*")):
            mark = _claim(home)
            if mark is not None:
                isolation.release(home)
                mark.close()
                removed.append(home.name)
    return removed


def _claim(home: Path) -> IO[str] | None:
    """Mark a host's folder as this process's; None when a living process has it."""
    mark = (home / "mark").open("w")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark.close()
        return None
    return mark


class Machine:
    """A host of one kind, its disk and its way in. `start()` before use, `stop()` for good."""

    def __init__(self, kind: Kind, name: str = "gpu1", *, offline: bool = False) -> None:
        """`name` is the host name; `offline` gives it a network without a way out."""
        self.kind: Kind = kind
        self.name = name
        self.offline = offline
        self.host = "127.0.0.1"
        self.ssh_port = 22 if offline else free_port()
        self.ssh_user = "root"
        self.password = secrets.token_urlsafe(12)
        self._home: Path | None = None
        self._mark: IO[str] | None = None
        self._power: subprocess.Popen[bytes] | None = None
        self._bound: list[Path] = []

    def __repr__(self) -> str:
        return f"<Machine {self.name} {self.kind} {self.host}:{self.ssh_port}>"

    # life

    def start(self) -> Machine:
        """Make the host and wait until it answers over SSH (a second; the very first builds the base)."""
        base = base_system()
        hosts = cache_dir() / "hosts"
        with locked(cache_dir() / "hosts.lock"):
            hosts.mkdir(exist_ok=True)
            self._home = hosts / secrets.token_hex(4)
            self._home.mkdir(mode=0o700)
            self._mark = _claim(self._home)
            _running.add(self)
            if self.offline:
                self.host = isolation.make_network(self._home)
        self._write_disk(isolation.mount_disk(self._home, base))
        self.power_on()
        return self

    def stop(self) -> None:
        """Throw the host away: processes, network and disk. Calling it again does nothing."""
        if self._home is None:
            return
        self.power_off()
        isolation.release(self._home)
        if self._mark:
            self._mark.close()
        _running.discard(self)
        self._home = self._mark = None

    def power_off(self) -> None:
        """Pull the plug: processes and memory (`/run`, `/dev/shm`, mounts) are gone, the disk stays."""
        if self._power is None:
            return
        with contextlib.suppress(MachineError):
            os.kill(self._leader(), signal.SIGKILL)
        try:
            self._power.wait(20)
        except subprocess.TimeoutExpired:
            raise MachineError(f"{self} does not stop\n{self.log_tail()}") from None
        self._power = None

    def power_on(self) -> None:
        """Start a host that was powered off, on the disk it had; wait until it answers over SSH."""
        log = (self.home / "console.log").open("ab")
        with log:
            self._power = subprocess.Popen(
                ["sh", "-c", _POWER, "power", str(isolation.make_cgroup(self.home)), *self._nspawn()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_TMPFS_TMP": "0"},
                start_new_session=True,
                umask=0o022,
            )
        self._await_ssh(time.monotonic() + BOOT_SECONDS)

    def reboot(self) -> None:
        """Restart and wait for SSH. systemd: an orderly reboot. container: killed and started again."""
        if self.kind == "container":
            self.power_off()
            self.power_on()
            return
        before, deadline = self._leader(), time.monotonic() + REBOOT_SECONDS
        self.inside("systemctl", "reboot", check=False)
        while not self._has_new_leader(before):
            if time.monotonic() > deadline:
                raise MachineError(f"{self} did not reboot in {REBOOT_SECONDS:.0f} s\n{self.log_tail()}")
            time.sleep(0.05)
        self._await_ssh(deadline)

    # the way in

    @property
    def home(self) -> Path:
        """Folder of this host here: its key, its console log, its disk under `root`."""
        if self._home is None:
            raise MachineError(f"{self} is not started")
        return self._home

    @property
    def ssh_key(self) -> Path:
        """Private key that opens every account of this host."""
        return self.home / "key"

    @property
    def known_hosts(self) -> Path:
        """known_hosts file with this host's key."""
        return self.home / "known_hosts"

    def inventory_data(self, user: str = "root", *, password: bool = False) -> dict[str, Any]:
        """Host data for pyinfra, `(machine.name, machine.inventory_data())`: plain values, repr is Python."""
        secret = {"ssh_password": self.password} if password else {"ssh_key": str(self.ssh_key)}
        return {
            "ssh_hostname": self.host,
            "ssh_port": self.ssh_port,
            "ssh_user": user,
            **secret,
            "ssh_known_hosts_file": str(self.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "ssh_config_file": os.devnull,
            "ssh_look_for_keys": False,
            "ssh_allow_agent": False,
        }

    def run(
        self,
        command: str,
        *,
        user: str = "root",
        stdin: str = "",
        check: bool = True,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command over a new SSH connection; CommandFailed when `check` and it exits non-zero."""
        argv = ["ssh", *self._ssh_options(), "-p", str(self.ssh_port), f"{user}@{self.host}", command]
        done = subprocess.run(
            argv, input=stdin, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout
        )
        if check and done.returncode:
            raise CommandFailed(self.name, command, done)
        return done

    def put(self, local: Path | str, remote: str, *, user: str = "root", timeout: float = 300) -> None:
        """Copy a local file or folder to `remote` on the host."""
        target = f"{user}@{self.host}:{remote}"
        argv = ["scp", "-rpq", *self._ssh_options(), "-P", str(self.ssh_port), str(local), target]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout)
        if done.returncode:
            raise CommandFailed(self.name, shlex.join(argv), done)

    def write(self, path: str, text: str, *, user: str = "root", mode: str = "644") -> None:
        """Write a file on the host, making its folder."""
        quoted = shlex.quote(path)
        make = f'mkdir -p "$(dirname {quoted})" && cat > {quoted} && chmod {mode} {quoted}'
        self.run(make, user=user, stdin=text)

    # what only someone standing beside the host can do

    def inside(self, *argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the host without SSH, with capabilities that a container does not have."""
        enter = ["nsenter", f"--target={self._leader()}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        done = subprocess.run(
            [*enter, "--", *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
        if check and done.returncode:
            raise CommandFailed(self.name, shlex.join(argv), done)
        return done

    def tmpfs(self, path: str, size: str = "1m", inodes: int = 64) -> None:
        """Mount a tmpfs at `path`, to be filled up: `size` ("1m") and `inodes` at most; gone on reboot."""
        self.inside("mkdir", "-p", path)
        self.inside("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes},mode=755", "small", path)

    def kill_ssh_sessions(self) -> int:
        """Drop every SSH connection at once, as a broken line does (SIGKILL; what they started lives on).

        Returns how many sshd processes were killed. The listener stays: new connections work.
        """
        sshd = {pid: parent for pid, (parent, name) in self._processes().items() if name == "sshd"}
        sessions = [pid for pid, parent in sshd.items() if parent in sshd]
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(sessions)

    def log_tail(self, lines: int = 40) -> str:
        """Last `lines` of the console, then of the journal where there is one; also when the host is down."""
        if self._home is None:
            return ""
        console = self._home / "console.log"
        text = console.read_text(errors="replace").splitlines()[-lines:] if console.exists() else []
        journal = self._home / "root" / "var" / "log" / "journal"
        if journal.is_dir() and shutil.which("journalctl"):
            argv = ["journalctl", f"--directory={journal}", "--no-pager", f"--lines={lines}", "--quiet"]
            text += subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.splitlines()
        return "\n".join(text)

    # how it is made

    def _ssh_options(self) -> list[str]:
        options = {
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(self.known_hosts),
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "LogLevel": "ERROR",
        }
        return [
            "-F",
            "none",
            "-i",
            str(self.ssh_key),
            *(f"-o{name}={value}" for name, value in options.items()),
        ]

    def _nspawn(self) -> list[str]:
        argv = ["systemd-nspawn", "--quiet", f"--directory={self.home / 'root'}"]
        argv += [f"--machine={isolation.full_name(self.home)}", f"--hostname={self.name}"]
        # this machine need not run systemd itself
        argv += ["--register=no", "--keep-unit", "--console=pipe", "--link-journal=no", "--settings=no"]
        argv += [f"--bind-ro={path}" for path in self._bound]
        if self.offline:
            argv += [f"--network-namespace-path={isolation.network_path(self.home)}", "--resolv-conf=off"]
        else:
            argv += ["--resolv-conf=copy-host"]
        if self.kind == "systemd":
            return [*argv, "--boot"]
        serve = "mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e"
        return [*argv, f"--drop-capability={_NOT_IN_DOCKER}", "--as-pid2", "sh", "-c", serve]

    def _write_disk(self, root: Path) -> None:
        """Give the fresh disk its identity, accounts and the package sources of this machine."""
        host_key = root / "etc/ssh/ssh_host_ed25519_key"
        for path, comment in ((self.ssh_key, "test"), (host_key, self.name)):
            isolation.sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))
        address = self.host if self.ssh_port == 22 else f"[{self.host}]:{self.ssh_port}"
        self.known_hosts.write_text(f"{address} {host_key.with_suffix('.pub').read_text()}")
        _place(
            root / "etc/ssh/sshd_config.d/test.conf",
            f"Port {self.ssh_port}\nListenAddress {self.host}\nPermitRootLogin yes\nUseDNS no\n"
            "MaxStartups 200\nMaxSessions 200\n",
        )
        _place(root / "etc/hostname", f"{self.name}\n")
        _place(root / "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        _place(root / "etc/machine-id", f"{secrets.token_hex(16)}\n")
        self._write_accounts(root)
        pip = controller.pip_settings()
        _place(root / "etc/pip.conf", pip.text)
        for file in pip.files:
            _place(root / file.relative_to("/"), file.read_text())
        self._bound = list(pip.folders)
        variables = controller.environment()
        _place(root / "etc/environment", "".join(f"{name}={value}\n" for name, value in variables.items()))
        for folder in (controller.CERTIFICATES, controller.LOCAL_CERTIFICATES):
            if folder.is_dir():
                # not copied over: the links there would lead out of the disk
                shutil.rmtree(root / folder.relative_to("/"), ignore_errors=True)
                shutil.copytree(folder, root / folder.relative_to("/"), ignore_dangling_symlinks=True)

    def _write_accounts(self, root: Path) -> None:
        accounts = {}
        for line in (root / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            accounts[fields[0]] = (int(fields[2]), int(fields[3]), fields[5])
        for user in USERS:
            uid, gid, home = accounts[user]
            folder = root / home.lstrip("/") / ".ssh"
            folder.mkdir(mode=0o700, exist_ok=True)
            keys = folder / "authorized_keys"
            shutil.copyfile(self.ssh_key.with_suffix(".pub"), keys)
            for path in (folder, keys):
                os.chown(path, uid, gid)
        with tempfile.TemporaryFile("w+") as passwords:
            passwords.writelines(f"{user}:{self.password}\n" for user in USERS)
            passwords.seek(0)
            subprocess.run(["chroot", str(root), "chpasswd"], stdin=passwords, check=True, timeout=30)

    def _await_ssh(self, deadline: float) -> None:
        while True:
            if self._power is None or self._power.poll() is not None:
                raise MachineError(f"{self} ended while starting\n{self.log_tail()}")
            if self._greets() and self.run("true", check=False, timeout=30).returncode == 0:
                break
            if time.monotonic() > deadline:
                raise MachineError(f"{self} does not answer over SSH\n{self.log_tail()}")
            time.sleep(0.02)
        if self.kind == "systemd":
            # until then logins of non-root users are refused
            self.inside("systemctl", "is-system-running", "--wait", check=False)
        else:
            # nspawn invents a boot id at each start; a rented container shows the one of the machine below
            while self.inside("umount", _BOOT_ID, check=False).returncode == 0:
                pass

    def _greets(self) -> bool:
        """Whether sshd sends its greeting: cheaper to poll than a login."""
        try:
            with socket.create_connection((self.host, self.ssh_port), timeout=2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _leader(self) -> int:
        """Process id, here, of the host's PID 1."""
        payload = isolation.make_cgroup(self.home) / "payload"
        # systemd moves itself to init.scope
        for procs in (payload / "cgroup.procs", payload / "init.scope" / "cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    if _number_inside(pid) == "1":
                        return int(pid)
        raise MachineError(f"{self} is not running")

    def _has_new_leader(self, before: int) -> bool:
        with contextlib.suppress(MachineError):
            return self._leader() != before
        return False

    def _processes(self) -> dict[int, tuple[int, str]]:
        """Processes of the host: pid here -> (parent's pid here, name)."""
        namespace = Path(f"/proc/{self._leader()}/ns/pid").readlink()
        found = {}
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (proc / "ns/pid").readlink() == namespace:
                    name, _, rest = (proc / "stat").read_text().partition("(")[2].rpartition(")")
                    found[int(proc.name)] = (int(rest.split()[1]), name)
        return found


def _number_inside(pid: str) -> str:
    """A process's id inside the host, "" when it is not in one or has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, *numbers = line.split()
            if name == "NSpid:" and len(numbers) == 2:
                return numbers[1]
    return ""


def _place(path: Path, text: str) -> None:
    """Write a file on a host's disk from outside, readable by all whatever the umask here."""
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
    # a link there would lead out of the disk
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o644)


@atexit.register
def _stop_all() -> None:
    for machine in list(_running):
        machine.stop()
