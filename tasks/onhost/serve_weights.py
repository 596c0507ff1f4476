#!/usr/bin/env python3
"""Serve a verified model folder to other hosts, read-only, for as long as they copy it.

Standard library only, Python 3.8 or newer (and the `openssl` command, or the `cryptography` package of the
tools environment, to make a certificate). The other side is the `peer` source of fetch_weights.py.

  * Only files that are the manifest's are served: each is compared with it first (the stamp makes that fast).
  * TLS with a certificate made for this one run, which the other host pins: nobody else can answer.
  * A token from a 0600 file, made for this one run, in constant time; without it there is only 403.
  * Bound to the one address that was given. GET and HEAD of named files, nothing else; no listing of folders.
  * Ends by itself: `idle` seconds after the last request, or after `last` seconds in any case.

Parameters are JSON on stdin:
  dir, manifest, stamp   as verify_weights.py takes them
  address, port          where to listen (port 0: any free one)
  token_file             the token, at least 32 characters, mode 0600; deleted once it is read
  cert_file              where to write the certificate (public: bring it to the other host)
  info_file              where to write what the first line on stdout says, too; there while it serves
  idle, last             seconds (900, 86400)
The first line on stdout is JSON: {"url": "https://10.0.0.1:40123", "files": 55, "bytes": 166900000000}.
Exit status: 0 ended in time, 1 the folder is not what the manifest says, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

try:
    from . import verify_weights as vw
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import verify_weights as vw  # type: ignore[import-not-found,no-redef]

BLOCK = 1024 * 1024  # bytes sent at a time
KEYS = (
    *("dir", "manifest", "stamp", "address", "port", "token_file", "cert_file", "info_file"),
    *("idle", "last"),
)
TOKEN_LENGTH = 32  # characters at least


def read_token(path: str) -> str:
    """The token, whose file is deleted; Usage if others can read it or it is too short to be one."""
    status = os.stat(path)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise vw.Usage(f"{path} can be read by other users: chmod 600 {path}")
    with open(path, encoding="utf-8") as f:
        token = f.read().strip()
    os.unlink(path)
    if len(token) < TOKEN_LENGTH:
        raise vw.Usage(f"{path}: the token must have {TOKEN_LENGTH} characters or more")
    return token


def make_certificate(folder: str) -> tuple[str, str]:
    """A self-signed certificate and its key, in a folder that only this user can read: two paths."""
    cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
    openssl = shutil.which("openssl")
    if openssl is not None:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        name = ["-days", "7", "-subj", "/CN=rackwright-peer"]
        command = [openssl, "req", "-x509", *curve, "-keyout", key, "-out", cert, *name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode == 0:
            return cert, key
    try:
        _certificate_in_python(cert, key)
    except ImportError as e:
        why = "a certificate needs the openssl command or the tools environment's Python"
        raise vw.Usage(f"{why}: {e}") from e
    return cert, key


def _certificate_in_python(cert: str, key: str) -> None:
    import datetime
    import importlib

    x509: Any = importlib.import_module("cryptography.x509")
    hashes: Any = importlib.import_module("cryptography.hazmat.primitives.hashes")
    ec: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
    serialization: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rackwright-peer")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    made = builder.sign(secret, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    private = secret.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, content in ((cert, made.public_bytes(encoding)), (key, private)):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(content)


class Server(ThreadingHTTPServer):
    """Serves a fixed table of files."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], files: dict[str, vw.Entry], digests: dict[str, str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.files = files
        self.listing = json.dumps(
            {"files": {p: {"size": e.size, "sha256": digests[p]} for p, e in sorted(files.items())}}
        ).encode()
        self.token = b""
        self.context: ssl.SSLContext | None = None
        self.last_request = time.monotonic()
        self.busy = 0
        self.lock = threading.Lock()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread: a slow TLS handshake must not hold up the others."""
        request.settimeout(60)
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event worth a traceback."""
        print(f"{client_address[0]}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD of `/files` (the table) and `/file/<path>` (with Range)."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "rackwright"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer, and count as busy meanwhile."""
        with self.server.lock:
            self.server.busy += 1
        try:
            self._answer()
        finally:
            with self.server.lock:
                self.server.busy -= 1
                self.server.last_request = time.monotonic()

    do_HEAD = do_GET

    def _answer(self) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            self._plain(403, b"")
            return
        if self.path == "/files":
            self._plain(200, self.server.listing)
            return
        path = urllib.parse.unquote(self.path[len("/file/") :]) if self.path.startswith("/file/") else ""
        entry = self.server.files.get(path)
        if entry is None:
            self._plain(404, b"")
            return
        self._file(entry)

    def _plain(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, entry: vw.Entry) -> None:
        with open(entry.full, "rb", buffering=0) as f:
            now = os.fstat(f.fileno())
            if (now.st_size, now.st_mtime_ns, now.st_ino) != (entry.size, entry.mtime_ns, entry.inode):
                self._plain(410, b"")  # not what was verified any more
                return
            asked = re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
            offset = int(asked.group(1)) if asked else 0
            if offset > entry.size or (asked and offset == entry.size):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{entry.size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(entry.size - offset))
            if asked:
                self.send_header("Content-Range", f"bytes {offset}-{entry.size - 1}/{entry.size}")
            self.end_headers()
            if self.command != "GET":
                return
            f.seek(offset)
            left = entry.size - offset
            while left > 0:
                block = f.read(min(BLOCK, left))
                if not block:
                    self.close_connection = True
                    return
                self.wfile.write(block)
                left -= len(block)

    def log_message(self, format: str, *args: Any) -> None:
        """One line a request on stderr; a request holds no secret but in its headers."""
        print(f"{self.client_address[0]} {format % args}", file=sys.stderr, flush=True)


def verified(params: dict[str, Any]) -> tuple[dict[str, vw.Entry], dict[str, str]]:
    """The files to serve and their digests; ValueError if one of them is not the manifest's."""
    wanted = vw.read_manifest(params["manifest"])
    known = {k: params.get(k) for k in ("dir", "manifest", "stamp")}
    result = vw.verify(vw.params_from({**known, "follow_links": True}), "json")
    bad = [p for p in result["problems"] if p["file"] in wanted]
    if bad:
        raise ValueError("; ".join(f"{p['file']}: {p['what']}" for p in bad[:5]))
    files = vw.scan(params["dir"], follow_links=True, published=wanted).files
    return {path: files[path] for path in wanted}, wanted


def serve(params: dict[str, Any]) -> int:
    """Verify, listen, print the first line, serve until idle."""
    token = read_token(params["token_file"])
    files, digests = verified(params)
    private = tempfile.mkdtemp(prefix="rackwright-peer-")
    try:
        cert, key = make_certificate(private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key)
        with open(cert, encoding="ascii") as f:
            vw.write_atomically(params["cert_file"], f.read())
    finally:
        shutil.rmtree(private)
    server = Server((params["address"], params.get("port", 0)), files, digests)
    server.token, server.context = token.encode(), context
    host, port = server.server_address[:2]
    total = sum(e.size for e in files.values())
    shown = f"[{host!s}]" if ":" in str(host) else str(host)
    info = json.dumps({"url": f"https://{shown}:{port}", "files": len(files), "bytes": total})
    if params.get("info_file"):
        vw.write_atomically(params["info_file"], info + "\n")
    print(info, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began, stop = time.monotonic(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(0.5):
        now = time.monotonic()
        if not server.busy and now - server.last_request > params.get("idle", 900):
            break
        if now - began > params.get("last", 86400):
            break
    server.shutdown()
    server.server_close()
    for path in (params["cert_file"], params.get("info_file")):
        if path and os.path.exists(path):
            os.unlink(path)
    return 0


def checked(document: Any) -> dict[str, Any]:
    """The parameters; Usage names what is missing, unknown or of the wrong kind."""
    if not isinstance(document, dict):
        raise vw.Usage("the parameters must be one JSON object")
    params = {k: v for k, v in document.items() if v is not None}
    unknown = sorted(set(params) - set(KEYS))
    if unknown:
        raise vw.Usage(f"unknown parameter {', '.join(unknown)}; known: {', '.join(KEYS)}")
    for key in ("dir", "manifest", "address", "token_file", "cert_file"):
        if not isinstance(params.get(key), str) or not params[key]:
            raise vw.Usage(f"{key} is missing")
    if params["address"] in ("0.0.0.0", "::", "*"):
        raise vw.Usage("address must be one address of this host, not all of them")
    for key in ("port", "idle", "last"):
        if type(params.get(key, 0)) is not int or params.get(key, 0) < 0:
            raise vw.Usage(f"{key} must be a whole number")
    return params


def main(argv: list[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(
        prog="serve_weights.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stdin", action="store_true", required=True, help="the parameters are JSON on stdin"
    )
    parser.parse_args(argv)
    try:
        return serve(checked(json.load(sys.stdin)))
    except (vw.Usage, json.JSONDecodeError) as e:
        print(f"serve_weights.py: {e}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as e:
        print(f"serve_weights.py: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
