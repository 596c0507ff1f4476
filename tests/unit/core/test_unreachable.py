"""A host that cannot be reached says why, and the command that comes next."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paramiko import AuthenticationException, PasswordRequiredException
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra.api.exceptions import ConnectError, PyinfraError

from tasks import failed
from tasks.failed import failed_lines, host_failed
from tasks.unreachable import ssh_line, unreachable

DATA = {"ssh_hostname": "10.0.0.5", "ssh_port": 2222, "ssh_user": "root", "ssh_key": "~/.ssh/rented"}


def caused(message: str, cause: BaseException) -> ConnectError:
    """As pyinfra raises it: while it handles the cause."""
    error = ConnectError(message)
    error.__context__ = cause
    return error


def refused() -> NoValidConnectionsError:
    return NoValidConnectionsError(
        {("10.0.0.5", 2222): ConnectionRefusedError(errno.ECONNREFUSED, "refused")}
    )


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (caused("Could not connect ([Errno None] …)", refused()), "connection refused: nothing listens at"),
        (caused("Could not connect (timed out)", TimeoutError("timed out")), "timeout: no answer from"),
        (caused("x", OSError(errno.EHOSTUNREACH, "no")), "no route to 10.0.0.5"),
        (caused("Could not resolve hostname", socket.gaierror(-2, "x")), "the name 10.0.0.5 is not known"),
        (caused("Authentication error", AuthenticationException("x")), "refuses user root: wrong key"),
        (PyinfraError("No such private key file: ~/.ssh/rented"), "the key file ~/.ssh/rented is not there"),
        (PyinfraError("Invalid private key file: x"), "cannot be used: Invalid private key"),
        (
            caused("EOF error ()", PasswordRequiredException("x")),
            "has a passphrase, and nobody could be asked",
        ),
        (ConnectError("SSH error (No authentication methods available)"), "no key and no password to try"),
        (caused("SSH error (Error reading SSH protocol banner)", EOFError()), "not as an SSH server would"),
        (ConnectError("SSH error (odd)"), "SSH error (odd)"),
    ],
)
def test_reasons_are_told_apart_and_the_next_command_is_the_inventory_s(error: Exception, what: str) -> None:
    why = unreachable("gpu1", DATA, error)
    assert what in why.what
    assert "ssh -p 2222 -i ~/.ssh/rented root@10.0.0.5" in why.fix or "ssh-add ~/.ssh/rented" in why.fix


def test_a_changed_host_key_is_told_with_the_line_that_forgets_the_old_one() -> None:
    why = unreachable("gpu1", DATA, ConnectError("SSH host key error (Host key for x does not match.)"))
    assert "its host key is not the one that is known" in why.what
    assert "ssh-keygen -R '[10.0.0.5]:2222'" in why.fix


def test_the_name_is_the_address_where_no_other_is_given() -> None:
    assert ssh_line("gpu1", {}) == "ssh gpu1"


def test_a_run_over_several_hosts_ends_with_those_that_failed() -> None:
    assert failed_lines(["b", "a"], 3, {"a": "a: no key"}) == [
        "2 of 3 hosts failed:", "  a: no key", "  b: the reason is above",
    ]  # fmt: skip
    assert failed_lines(["a"], 1, {}) == []


def test_a_run_on_hosts_that_cannot_be_reached_names_each_and_ends_with_1(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, and not listening: refuses
        taken.bind(("127.0.0.1", 0))
        own = {"recipe": "rehearsal-cpu", "ssh_hostname": "127.0.0.1", "ssh_port": taken.getsockname()[1]}
        hosts = [("one", own), ("two", {**own, "ssh_key": "/nonexistent/key"})]
        (tmp_path / "mine.py").write_text(f"hosts = {hosts!r}\n")
        done = subprocess.run(
            [sys.executable, "-c", "from tasks.cli import main; main()", "status", "mine.py"],
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert "2 of 2 hosts failed" in done.stderr
    assert "one: cannot be reached: connection refused" in done.stderr
    assert "two: cannot be reached: the key file /nonexistent/key is not there" in done.stderr
    assert "Traceback" not in done.stderr
    assert "No hosts remaining" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py"]


def test_a_banner_reaches_the_terminal_without_its_escapes() -> None:
    banner = "SSH error (Incompatible version (\x1b]0;mine\x07\x1b[2J\x1b[32mREADY\x1b[0m instead of 2.0))"
    why = unreachable("gpu1", DATA, ConnectError(banner))
    assert why.what == "SSH error (Incompatible version (READY instead of 2.0))"


def test_the_reasons_at_the_end_of_a_run_carry_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(failed, "_why", told)
    host_failed("one", "\x1b[2Jtimeout\rof one\nFix: wait")
    assert failed_lines(["one"], 2, told)[1] == "  one: timeout"
