"""Ansible in a throw-away environment, for figures beside ours: one host over SSH, with pipelining."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from machines import Machine

VERSION = "2.19.14"
PLAYBOOKS = Path(__file__).resolve().parent / "ansible"
CONFIG = """[defaults]
host_key_checking = True
forks = 50
gathering = explicit
interpreter_python = /usr/bin/python3
[ssh_connection]
pipelining = True
control_path_dir = {folder}/cp
ssh_args = -F none -o ControlMaster=auto -o ControlPersist=60s -o IdentitiesOnly=yes
ssh_extra_args = -o UserKnownHostsFile={known}
"""


class Ansible:
    """ansible-core from the package index, installed below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = [
            folder / "venv" / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            f"ansible-core=={VERSION}",
        ]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def play(self, name: str, machine: Machine, values: Mapping[str, str] = {}) -> None:
        """Run one playbook against a host, on a connection of its own. Raises CalledProcessError."""
        (self.folder / "cp").mkdir(exist_ok=True)
        config, inventory = self.folder / "ansible.cfg", self.folder / "hosts"
        config.write_text(CONFIG.format(folder=self.folder, known=machine.known_hosts))
        inventory.write_text(
            f"{machine.name} ansible_host={machine.host} ansible_port={machine.ssh_port} ansible_user=root "
            f"ansible_ssh_private_key_file={machine.ssh_key}\n"
        )
        argv = [str(self.folder / "venv" / "bin" / "ansible-playbook"), "-i", str(inventory)]
        argv += [word for key, value in values.items() for word in ("-e", f"{key}={value}")]
        env = {**os.environ, "ANSIBLE_CONFIG": str(config), "ANSIBLE_HOME": str(self.folder / "home")}
        try:
            done = subprocess.run(
                [*argv, str(PLAYBOOKS / f"{name}.yml")],
                cwd=self.folder,
                env=env,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
        finally:
            for socket in (self.folder / "cp").iterdir():  # the next run connects anew, as ours does
                subprocess.run(
                    ["ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "x"],
                    capture_output=True,
                )
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
            done.check_returncode()
