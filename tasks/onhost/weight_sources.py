"""Where weights come from: one small class a source, all answering `list()` and `fetch()`.

Used by fetch_weights.py, which decides; nothing here decides what is wanted, retried or trusted. The hubs'
and S3's own clients do the talking (huggingface_hub, modelscope_hub, boto3: the tools environment's lock);
`path` and `peer` need the standard library alone.

Every source writes into a `Part`, a file beside the model that holds a prefix of the wanted file, so a
download that was cut off by anything goes on where it stopped, even at another source. huggingface_hub
itself starts such a file anew since its pull request #4228 (unique temporary names): hence its `http_get`
with an own file here. Xet is switched off for the same reason: only plain HTTP can go on in the middle.
"""

from __future__ import annotations

import base64
import errno
import importlib
import json
import os
import re
import ssl
import stat
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Callable, NamedTuple

try:
    from . import verify_weights as vw
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import verify_weights as vw  # type: ignore[import-not-found,no-redef]

BLOCK = 1024 * 1024  # bytes copied at a time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*DISK_FULL, errno.EROFS)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEPT = ".kept"  # ending of a part's second name while a client works on it
RESTARTS = 3  # answers with a whole body to a request for the rest before the part is given up for it
TIMEOUT = 60  # seconds without a byte before a connection counts as dead


class Remote(NamedTuple):
    """A file as its source describes it; hashes that the source does not publish are None."""

    path: str
    size: int | None
    sha256: str | None = None
    git_sha1: str | None = None
    version: str | None = None  # changes when the content does; means something to its own source alone


class Stopped(BaseException):
    """The run was told to stop; not an Exception, so that no client retries it."""


class Transient(Exception):
    """May work later. `after`: seconds that the server asked to wait."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class NotThere(Exception):
    """This source does not have this file, and asking again will not change it."""


class Refused(Exception):
    """This source says no to everything; `fix` says what to do."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


class BadBody(Exception):
    """The client itself found the content wrong, and removed it."""


class Meter:
    """Counts what one source delivers, and when it last did."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.bytes = 0
        self.last = time.monotonic()
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        """`n` bytes arrived."""
        with self._lock:
            self.bytes += n
            self.last = time.monotonic()
        self._progress(n)

    def lost(self, n: int) -> None:
        """`n` bytes on the disk turned out to be useless; they did travel, so `bytes` stays."""
        self._progress(-n)


def foreign(path: str) -> bool:
    """This name leads to bytes that have another name, too: it may go, they must stay as they are."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1


class Part:
    """A file being fetched. Looks like a binary file to the clients; ends the run's threads when told to."""

    def __init__(self, path: str, meter: Meter, stop: threading.Event) -> None:
        self.path = path
        self.may_restart = True  # a client may throw away what is there
        self._meter = meter
        self._stop = stop
        self._file: BinaryIO | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        try:
            return os.path.getsize(self.path)
        except FileNotFoundError:
            return 0

    def __enter__(self) -> Part:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def file(self) -> BinaryIO:
        """The open file."""
        if self._file is None:
            raise ValueError("the part is not open")
        return self._file

    def check(self) -> None:
        """Stopped, if the run was told to stop."""
        if self._stop.is_set():
            raise Stopped

    def write(self, data: bytes) -> int:
        """Append; a short write (a disk that fills up) is completed or raises."""
        self.check()
        view = memoryview(data)
        while view:
            n = self.file.write(view)
            self._meter.add(n)
            view = view[n:]
        return len(data)

    def tell(self) -> int:
        """The end of the file: every write appends."""
        return self.size

    def seek(self, offset: int, whence: int = 0) -> int:
        """Only to say where the next truncate() cuts."""
        return self.file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Cut, by default where seek() went; what is cut off counts as lost."""
        before = self.size
        if not self.may_restart and before > (self.file.tell() if size is None else size):
            raise Transient("the rest of the file was asked for, and something else was sent")
        after = self.file.truncate(size)
        if before > after:
            self._meter.lost(before - after)
        return after

    def clear(self) -> None:
        """Start anew. The name goes: what it leads to may be somebody else's file, so nothing is cut."""
        size = self.size
        if os.path.lexists(self.path):
            os.unlink(self.path)
            self._meter.lost(size)

    def keep(self) -> None:
        """Hold what is there by a second name: a client may remove it at an answer that is not the file."""
        with suppress(OSError):  # nothing is there yet, or the file system knows no such names
            self.forget()
            os.link(self.path, self.path + KEPT)

    def forget(self) -> None:
        """Hold it no longer."""
        with suppress(FileNotFoundError):
            os.unlink(self.path + KEPT)

    def give_back(self, before: int, shown: int) -> None:
        """Back to the `before` bytes that were there, if fewer are now and the client did not overwrite them.

        `shown`: what the client's reports came to since then; it is set right.
        """
        with suppress(FileNotFoundError):
            if os.path.getsize(self.path + KEPT) == before > self.size:
                os.replace(self.path + KEPT, self.path)
        self.forget()
        self._meter.lost(before + shown - self.size)

    def flush(self) -> None:
        """Nothing is buffered."""

    def copied(self, n: int, before: int) -> None:
        """A client wrote the file itself: count `n` of its bytes, the first `before` were there already."""
        self.check()
        if n < 0:
            self._meter.lost(-n)
        elif n > before:
            self._meter.add(n - before)


def secret(source: dict[str, Any], default_env: str) -> str | None:
    """The token of a source, from `token_file` (0600) or the environment variable `token_env`; never argv.

    Refused if the file can be read by others or holds nothing.
    """
    path = source.get("token_file")
    if path is None:
        return os.environ.get(source.get("token_env") or default_env) or None
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise Refused(f"{path} can be read by other users", f"chmod 600 {path}")
        with open(path, encoding="utf-8") as f:
            token = f.read().strip()
    except OSError as e:
        raise Refused(f"{path}: {e.strerror}", "write the token into this file, mode 0600") from e
    if not token:
        raise Refused(f"{path} is empty", "write the token into it")
    return token


def hub_token(spec: dict[str, Any], default_env: str) -> str | None:
    """The token that a hub may see: none at an address that only a measurement chose (`anonymous`), and none
    that would travel over plain HTTP to another machine.
    """
    if spec.get("anonymous") or in_the_clear(spec.get("endpoint") or ""):
        return None
    return secret(spec, default_env)


def in_the_clear(url: str) -> bool:
    """Others can read what is sent to this address."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in LOOPBACK


def checked_url(url: str, allow_http: bool, what: str) -> str:
    """An endpoint that is https, or http to this machine, or http that was allowed; else ValueError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{what}: {url!r} is not an http(s) address")
    if parts.username or parts.password:
        raise ValueError(f"{what}: credentials do not belong into an address")
    if in_the_clear(url) and not allow_http:
        raise ValueError(
            f"{what}: {url} is not https (allow_http permits it, where hashes come from a manifest)"
        )
    return url.rstrip("/")


def plain(error: BaseException) -> str:
    """An error in one line, with no query strings (signed addresses) in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    text = re.sub(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]+", r"\1 ***", text)
    text = re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_***", text)
    name = type(error).__name__
    return (text if name in text else f"{name}: {text}")[:400]


def classify(error: Exception, source: str) -> Exception:
    """What a client's exception means: Transient, NotThere, Refused, BadBody, or itself if the disk's."""
    if isinstance(error, (Transient, NotThere, Refused, BadBody)):
        return error
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        fix = "check the address, this host's clock and its CA certificates (ca_bundle, cert_file)"
        return Refused(f"{source}: {plain(error)}", fix)
    response = getattr(error, "response", None)
    headers: Any = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    if isinstance(error, urllib.error.HTTPError):
        status = error.code
    code = ""
    if isinstance(response, dict):  # botocore
        code = str(response.get("Error", {}).get("Code", ""))
        meta = response.get("ResponseMetadata", {})
        status, headers = meta.get("HTTPStatusCode"), meta.get("HTTPHeaders", {})
    why = f"{source}: {plain(error)}"
    if code in ("PathStyleDomainForbidden", "SecondLevelDomainForbidden"):
        return Refused(
            why, 'set s3_addressing = "virtual" (addressing of this source): it rejects path style'
        )
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        ways = "s3_credentials_file, s3_credentials_env, s3_profile, the instance's identity, or s3_anonymous"
        return Refused(why, f"give credentials: {ways}")
    if type(error).__name__ == "GatedRepoError":
        return Refused(why, "accept the licence on the model's page, then give that account's token")
    if status in (401, 403):
        fix = "check the token or credentials (*_token_file, *_token_env, s3_*), and its rights"
        return Refused(why, fix)
    after = getattr(error, "retry_after", None)
    if after is None:
        named = {str(k).lower(): v for k, v in dict(headers).items()}
        raw = str(named.get("retry-after", ""))
        after = float(raw) if re.fullmatch(r"\d+(\.\d+)?", raw) else None
    if status in (404, 410) or code == "NoSuchBucket":
        return NotThere(why)
    if status is not None and 400 <= status < 500 and status not in (408, 412, 416, 425, 429):
        return Refused(why, "check the repository, the revision and the endpoint of this source")
    return Transient(why, float(after) if after is not None else None)


def client_module(name: str) -> Any:
    """A client's module; Refused if the tools environment does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Refused(
            f"{name} cannot be imported: {e}", "run this with the tools environment's Python"
        ) from e


class Source:
    """A source; `state` is what became of it in this run."""

    def __init__(self, spec: dict[str, Any], home: str) -> None:
        self.spec = spec
        self.kind: str = spec["kind"]
        self.home = home  # where a client may keep its own files
        self.name: str = spec.get("name") or self.label()
        self.revision: str | None = spec.get("revision")

    @property
    def takes_room(self) -> bool:
        """Its files come as copies onto this disk."""
        return True

    def label(self) -> str:
        """A name for people."""
        at = f"@{self.spec['revision'][:12]}" if self.spec.get("revision") else ""
        where = urllib.parse.urlsplit(self.spec.get("endpoint") or "").hostname
        return f"{self.kind} {self.spec.get('repo', '')}{at}" + (f" at {where}" if where else "")

    def list(self) -> dict[str, Remote]:
        """Every file that it has. Raises what classify() makes of an error."""
        try:
            files = self._list()
        except Exception as e:
            raise classify(e, self.name) from e
        if not files:
            raise NotThere(f"{self.name}: it lists no file")
        for path in files:
            if vw.safe_path(path) != path:
                raise Refused(f"{self.name}: it lists {path!r}", "no safe name; do not use this source")
        return files

    def fetch(self, remote: Remote, part: Part) -> None:
        """Complete a part. Raises what classify() makes of an error."""
        try:
            part.check()
            if foreign(part.path) or (remote.size is not None and part.size > remote.size):
                part.clear()
            self._fetch(remote, part)
        except Exception as e:
            raise classify(e, self.name) from e
        if remote.size is not None and part.size < remote.size:
            raise Transient(f"{self.name}: {remote.path} ended at {part.size} of {remote.size} bytes")
        if remote.size is not None and part.size > remote.size:
            part.clear()
            raise BadBody(
                f"{self.name}: {remote.path} is longer than the {remote.size} bytes it was listed with"
            )

    def expect(self, remote: Remote, offset: int, length: str | int | None) -> None:
        """Transient if an answer cannot be the file from `offset` on, by its Content-Length (a proxy's page).

        To be asked before anything that is there is thrown away for it.
        """
        if remote.size is not None and length is not None and offset + int(length) != remote.size:
            what = (
                f"{remote.path} of {remote.size} bytes was asked for from byte {offset}, {length} were sent"
            )
            raise Transient(f"{self.name}: {what}")

    def _list(self) -> dict[str, Remote]:
        raise NotImplementedError

    def _fetch(self, remote: Remote, part: Part) -> None:
        raise NotImplementedError


class HuggingFace(Source):
    """huggingface.co or a mirror of it. The revision is resolved to a commit once, and stays it."""

    def __init__(self, spec: dict[str, Any], home: str) -> None:
        super().__init__(spec, home)
        self._restarts: dict[str, int] = {}  # path -> how often more than its rest was sent

    def _setup(self) -> tuple[str | None, str | bool]:
        return self.spec.get("endpoint"), hub_token(self.spec, "HF_TOKEN") or False

    def _list(self) -> dict[str, Remote]:
        hub = client_module("huggingface_hub")
        endpoint, token = self._setup()
        api = hub.HfApi(endpoint=endpoint, token=token)
        repo = self.spec["repo"]
        self.revision = api.model_info(repo, revision=self.spec.get("revision")).sha
        files = {}
        for entry in api.list_repo_tree(repo, recursive=True, revision=self.revision):
            if hasattr(entry, "blob_id"):  # a file; a folder has none
                sha256 = entry.lfs.sha256 if entry.lfs else None
                files[entry.path] = Remote(entry.path, entry.size, sha256, None if sha256 else entry.blob_id)
        return files

    def _fetch(self, remote: Remote, part: Part) -> None:
        hub = client_module("huggingface_hub")
        http_get = client_module("huggingface_hub.file_download").http_get
        # It writes whole chunks only, of 10 MB: what a dropped connection loses of each file.
        client_module("huggingface_hub.constants").DOWNLOAD_CHUNK_SIZE = BLOCK
        endpoint, token = self._setup()
        url = hub.hf_hub_url(self.spec["repo"], remote.path, revision=self.revision, endpoint=endpoint)
        headers = client_module("huggingface_hub.utils").build_hf_headers(token=token)
        headers["Accept-Encoding"] = "identity"  # a compressed body could not go on in the middle
        if remote.size is not None and part.size == remote.size > 0:
            return
        before, restarts = part.size, self._restarts.get(remote.path, 0)
        part.may_restart = restarts >= RESTARTS
        with part:
            try:
                http_get(
                    url,
                    part,
                    resume_size=part.size,
                    headers=headers,
                    expected_size=remote.size,
                    displayed_filename=remote.path,
                )
            except Transient:
                self._restarts[remote.path] = restarts + 1
                raise
            except OSError as e:
                # Its check of the length, which fetch() makes too; others are real.
                if "Consistency check failed" not in str(e):
                    raise
                # A body so short may be the page of a proxy: nothing may go on behind it.
                if before < part.size < before + BLOCK:
                    part.may_restart = True
                    part.truncate(before)


class ModelScope(Source):
    """modelscope.cn or a mirror of it, through modelscope_hub (what `modelscope` downloads with)."""

    def _api(self) -> Any:
        token = hub_token(self.spec, "MODELSCOPE_API_TOKEN") or ""
        # It would begin the file anew itself, where we go on with what was there before.
        client_module("modelscope_hub._download").DOWNLOAD_SIZE_RETRY_TIMES = 1
        return client_module("modelscope_hub").HubApi(endpoint=self.spec.get("endpoint"), token=token)

    def _list(self) -> dict[str, Remote]:
        entries = self._api().list_repo_files(self.spec["repo"], "model", revision=self.spec.get("revision"))
        # The client turns an answer of `Success: false` into an empty list; list() refuses that.
        files = {}
        for entry in entries:
            if entry.type != "tree":
                files[entry.path] = Remote(entry.path, entry.size, entry.sha256 or None)
        return files

    def _fetch(self, remote: Remote, part: Part) -> None:
        target = part.path[: -len(".incomplete")]
        root = target[: -len(remote.path)]
        if os.path.exists(target):
            os.unlink(target)
        before, shown = part.size, 0

        class Count:
            """modelscope_hub's progress interface; its first report is of what was on the disk already."""

            def __init__(self, filename: str, file_size: int) -> None:
                self.there = before

            def update(self, size: int) -> None:
                nonlocal shown
                known = min(self.there, size) if size > 0 else 0
                self.there -= known
                shown += size - known
                part.copied(size, known)

            def end(self) -> None:
                pass

        part.keep()
        try:
            self._api().downloader.download_file(
                self.spec["repo"],
                "model",
                remote.path,
                revision=self.spec.get("revision"),
                cache_dir=Path(self.home),
                local_dir=Path(root),
                file_size=remote.size,
                progress_callbacks=[Count],
            )
            if not os.path.exists(target):
                raise NotThere(f"{self.name}: its client reported success and left no {remote.path}")
            os.replace(target, part.path)
        except Exception as e:
            if type(e).__name__ == "FileIntegrityError":
                part.forget()
                raise BadBody(f"{self.name}: {plain(e)}") from e
            raise
        finally:
            part.give_back(before, shown)


class S3(Source):
    """Any S3-compatible storage; credentials from the environment, a file, a profile or the instance."""

    def label(self) -> str:
        """A name for people."""
        where = urllib.parse.urlsplit(self.spec.get("endpoint") or "").hostname
        name = f"s3 {self.spec['bucket']}/{self.spec.get('prefix', '')}".rstrip("/")
        return name + (f" at {where}" if where else "")

    def _client(self) -> Any:
        boto3, botocore = client_module("boto3"), client_module("botocore")
        if self.spec.get("credentials_file"):
            os.environ["AWS_SHARED_CREDENTIALS_FILE"] = self.spec["credentials_file"]
        config = client_module("botocore.config").Config(
            s3={"addressing_style": self.spec.get("addressing", "auto")},
            signature_version=botocore.UNSIGNED if self.spec.get("anonymous") else None,
            retries={"mode": "standard", "max_attempts": 2},
            connect_timeout=10,
            read_timeout=TIMEOUT,
            max_pool_connections=64,
            # Vendors other than AWS reject the checksums that boto3 adds by itself since 1.36.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = boto3.session.Session(profile_name=self.spec.get("profile"))
        return session.client(
            "s3",
            endpoint_url=self.spec.get("endpoint"),
            region_name=self.spec.get("region") or session.region_name or "us-east-1",
            config=config,
            verify=self.spec.get("ca_bundle") or True,
        )

    @property
    def client(self) -> Any:
        """One client for all threads (botocore's clients are thread-safe; making one is slow)."""
        if not hasattr(self, "_made"):
            self._made = self._client()
        return self._made

    def _key(self, path: str) -> str:
        prefix = self.spec.get("prefix", "").strip("/")
        return f"{prefix}/{path}" if prefix else path

    def _list(self) -> dict[str, Remote]:
        bucket, files = self.spec["bucket"], {}
        start = self._key("")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start)
        for page in pages:
            for item in page.get("Contents", []):
                path = item["Key"][len(start) :]
                if path and not path.endswith("/"):
                    sha256 = self._checksum(item) if "SHA256" in item.get("ChecksumAlgorithm", []) else None
                    files[path] = Remote(path, item["Size"], sha256, version=item.get("ETag"))
        return files

    def _checksum(self, item: dict[str, Any]) -> str | None:
        """The SHA-256 that the storage keeps of a whole object, in hex; a composite of parts is useless."""
        head = self.client.head_object(Bucket=self.spec["bucket"], Key=item["Key"], ChecksumMode="ENABLED")
        raw = head.get("ChecksumSHA256", "")
        if head.get("ChecksumType") == "COMPOSITE" or "-" in raw:
            return None
        decoded = base64.b64decode(raw)
        return decoded.hex() if len(decoded) == 32 else None

    def _fetch(self, remote: Remote, part: Part) -> None:
        if remote.size is not None and part.size == remote.size:
            with part:
                return  # an empty object is an empty file
        offset = part.size
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        if remote.version:
            wanted["IfMatch"] = remote.version
        try:
            answer = self.client.get_object(Bucket=self.spec["bucket"], Key=self._key(remote.path), **wanted)
        except client_module("botocore.exceptions").ClientError as e:
            if e.response["ResponseMetadata"]["HTTPStatusCode"] != 412:
                raise
            raise NotThere(f"{self.name}: {remote.path} was replaced since it was listed") from e
        whole = answer["ResponseMetadata"]["HTTPStatusCode"] != 206
        self.expect(remote, 0 if whole else offset, answer.get("ContentLength"))
        if whole:
            part.clear()
        with part:
            for block in answer["Body"].iter_chunks(BLOCK):
                part.write(block)


class Folder(Source):
    """A mounted copy or an upload on this host: copied, or linked where the caller prefers it."""

    def label(self) -> str:
        """A name for people."""
        return f"path {self.spec['dir']}"

    @property
    def takes_room(self) -> bool:
        """Links take none."""
        return bool(self.spec.get("how", "copy") == "copy")

    def _list(self) -> dict[str, Remote]:
        if not os.path.isdir(self.spec["dir"]):
            raise NotThere(f"{self.name}: no such folder")
        tree = vw.scan(self.spec["dir"], follow_links=True)
        return {
            path: Remote(path, entry.size, version=str(entry.mtime_ns)) for path, entry in tree.files.items()
        }

    def _fetch(self, remote: Remote, part: Part) -> None:
        source = os.path.realpath(os.path.join(self.spec["dir"], remote.path))
        try:
            self._bring(source, remote, part)
        except FileNotFoundError as e:
            raise NotThere(f"{self.name}: {plain(e)}") from e
        except PermissionError as e:
            raise Refused(f"{self.name}: {plain(e)}", f"let this user read {self.spec['dir']}") from e
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            fix = 'how = "symlink" or "copy": hard links do not cross file systems'
            raise Refused(f"{self.name}: {plain(e)}", fix) from e

    def _bring(self, source: str, remote: Remote, part: Part) -> None:
        """Copy or link one file."""
        how = self.spec.get("how", "copy")
        if how != "copy":
            os.makedirs(os.path.dirname(part.path), exist_ok=True)
            part.clear()
            (os.link if how == "hardlink" else os.symlink)(source, part.path)
            part.copied(part.size, 0)
            return
        with open(source, "rb", buffering=0) as f:
            if str(os.fstat(f.fileno()).st_mtime_ns) != remote.version:
                part.clear()  # written to since it was listed: what is there may be of the file before
            with part:
                f.seek(part.size)
                self._copy(f, part)

    @staticmethod
    def _copy(f: BinaryIO, part: Part) -> None:
        """Append the rest of an open file."""
        while True:
            block = f.read(BLOCK)
            if not block:
                break
            part.write(block)


class Peer(Source):
    """Another host that already has the model and runs serve_weights.py: TLS with a pinned certificate."""

    def label(self) -> str:
        """A name for people."""
        return f"peer {urllib.parse.urlsplit(self.spec['url']).netloc}"

    def _open(self, path: str, offset: int = 0) -> Any:
        try:
            context = ssl.create_default_context(cafile=self.spec["cert_file"])
        except OSError as e:
            fix = "bring the cert_file that serve_weights.py wrote on the other host"
            raise Refused(f"{self.name}: {self.spec['cert_file']}: {plain(e)}", fix) from e
        context.check_hostname = False  # the certificate is this one server's, pinned: no name is needed
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        request = urllib.request.Request(f"{self.spec['url'].rstrip('/')}{path}")
        token = secret(self.spec, "RACKWRIGHT_PEER_TOKEN")
        if token is None:
            raise Refused(
                f"{self.name}: no token", "give token_file, the file that its server was started with"
            )
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        if offset:
            request.add_unredirected_header("Range", f"bytes={offset}-")
        return opener.open(request, timeout=TIMEOUT)

    def _list(self) -> dict[str, Remote]:
        with self._open("/files") as answer:
            files = json.loads(answer.read(vw.JSON_LIMIT))["files"]
        return {path: Remote(path, int(f["size"]), str(f["sha256"])) for path, f in files.items()}

    def _fetch(self, remote: Remote, part: Part) -> None:
        offset = part.size
        if offset and offset == remote.size:
            return
        with self._open("/file/" + urllib.parse.quote(remote.path), offset) as answer:
            whole = answer.status != 206
            self.expect(remote, 0 if whole else offset, answer.headers.get("Content-Length"))
            if whole:
                part.clear()
            with part:
                while True:
                    block = answer.read(BLOCK)
                    if not block:
                        break
                    part.write(block)


HUB_KEYS = ("revision", "endpoint", "token_file", "token_env", "anonymous", "allow_http")
S3_KEYS = (
    *("prefix", "endpoint", "region", "addressing", "allow_http", "ca_bundle"),
    *("profile", "credentials_file", "anonymous"),
)
# kind -> (class, keys that must be there, keys that may be)
KINDS: dict[str, tuple[type[Source], tuple[str, ...], tuple[str, ...]]] = {
    "huggingface": (HuggingFace, ("repo",), HUB_KEYS),
    "modelscope": (ModelScope, ("repo",), HUB_KEYS),
    "s3": (S3, ("bucket",), S3_KEYS),
    "path": (Folder, ("dir",), ("how",)),
    "peer": (Peer, ("url", "cert_file"), ("token_file", "token_env")),
}
CHOICES = {"addressing": ("auto", "virtual", "path"), "how": ("copy", "hardlink", "symlink")}


def make_source(spec: Any, home: str) -> Source:
    """A source from its JSON; ValueError names a missing, unknown or unusable key."""
    if not isinstance(spec, dict) or spec.get("kind") not in KINDS:
        raise ValueError(f"a source needs a kind, one of {', '.join(KINDS)}")
    spec = {k: v for k, v in spec.items() if v is not None}
    made, needed, allowed = KINDS[spec["kind"]]
    for key in needed:
        if not spec.get(key):
            raise ValueError(f"source {spec['kind']}: {key} is missing")
    unknown = sorted(set(spec) - {"kind", "name", *needed, *allowed})
    if unknown:
        raise ValueError(f"source {spec['kind']}: unknown key {', '.join(unknown)}")
    for key, value in spec.items():
        if key in ("allow_http", "anonymous"):
            if not isinstance(value, bool):
                raise ValueError(f"source {spec['kind']}: {key} must be true or false")
        elif not isinstance(value, str):
            raise ValueError(f"source {spec['kind']}: {key} must be text")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"source {spec['kind']}: {key} must be one of {', '.join(CHOICES[key])}")
    if "endpoint" in spec:
        # where the caller names a token, it would travel
        plain = spec.get("allow_http", False) and not (spec.get("token_file") or spec.get("token_env"))
        spec["endpoint"] = checked_url(spec["endpoint"], plain, f"source {spec['kind']}")
    if spec["kind"] == "peer" and urllib.parse.urlsplit(spec["url"]).scheme != "https":
        raise ValueError("source peer: url must be https")
    return made(spec, home)


# Where a source is asked is the caller's to say, and is checked; and a download is no offline work.
ELSEWHERE = (
    *("HF_ENDPOINT", "HUGGINGFACE_CO_STAGING", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
)


def quiet_clients(home: str) -> None:
    """Set the clients' environment before their import: no bars, no telemetry, nothing in the user's home,
    and no address that this host's environment names.
    """
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    os.environ.update(
        HF_HOME=os.path.join(home, "huggingface"),
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DOWNLOAD_TIMEOUT="30",
        TQDM_DISABLE="1",
        MODELSCOPE_HOME=os.path.join(home, "modelscope"),
        MODELSCOPE_CACHE=os.path.join(home, "modelscope-cache"),
        MODELSCOPE_DOWNLOAD_FILE_LOCK="false",  # fetch_weights.py holds the lock of the whole model
        MODELSCOPE_DOWNLOAD_PARALLEL_WORKERS="1",  # parts of one file would need its size twice on the disk
        MODELSCOPE_DOWNLOAD_TOTAL_TIMEOUT="604800",  # its hour a file is too short for 3.5 GB at 1 MB/s
        MODELSCOPE_DOWNLOAD_MAX_RETRIES="0",  # fetch_weights.py asks again, and knows what was there before
        MODELSCOPE_DOWNLOAD_INTRA_CLOUD="false",  # asks further addresses where this host is
    )
