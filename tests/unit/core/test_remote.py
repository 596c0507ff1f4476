"""Connections are fast and their death is noticed; scripts and files arrive whole."""

from __future__ import annotations

import base64
import io
import socket
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

from tasks.remote import CHANNEL_SECONDS, KEEPALIVE_SECONDS, quote, steady, tar_base64, write_file


class Transport:
    """What paramiko's transport has that matters here, with a real TCP socket."""

    def __init__(self, sock: object) -> None:
        self.sock = sock
        self.channel_timeout = 3600.0
        self.keepalive = 0

    def set_keepalive(self, seconds: int) -> None:
        self.keepalive = seconds


def host_with(transport: Transport) -> SimpleNamespace:
    client = SimpleNamespace(get_transport=lambda: transport)
    return SimpleNamespace(connector=SimpleNamespace(client=client))


def test_an_ssh_connection_gets_nodelay_keepalive_and_a_bound_on_channels() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        transport = Transport(sock)
        steady(host_with(transport))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert transport.keepalive == KEEPALIVE_SECONDS
    assert transport.channel_timeout == CHANNEL_SECONDS


def test_a_hop_that_is_no_socket_and_a_local_host_are_left_alone() -> None:
    transport = Transport(sock=object())
    steady(host_with(transport))
    assert transport.keepalive == KEEPALIVE_SECONDS
    steady(SimpleNamespace(connector=SimpleNamespace()))


def test_a_small_file_arrives_whole_with_its_mode_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "it's a folder" / "file"
    content = "quotes ' \" $HOME `id` \\ % 你好\n"
    subprocess.run(["sh", "-c", write_file(str(path), content, "600")], check=True)
    assert path.read_text("utf-8") == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_quoted_words_reach_a_program_unchanged() -> None:
    for word in ("", "a b", "it's", "$(id)", "a\nb", "你好"):
        done = subprocess.run(
            ["sh", "-c", f"printf %s {quote(word)}"], capture_output=True, text=True, check=True
        )
        assert done.stdout == word


def test_the_same_files_make_the_same_archive_with_their_modes() -> None:
    files = {"b.sh": (b"x", 0o755), "a.py": (b"yy", 0o644)}
    first, again = tar_base64(files), tar_base64(dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(first))) as tar:
        assert [(item.name, item.mode, item.size) for item in tar] == [("a.py", 0o644, 2), ("b.sh", 0o755, 1)]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(again))) as tar:
        assert [item.name for item in tar] == ["a.py", "b.sh"]
