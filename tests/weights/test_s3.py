"""The real boto3 against moto's S3 server, with a wire in between that fails."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3", reason="the S3 client is not installed here")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed here")

from tasks.onhost import weight_sources as ws  # noqa: E402
from tests.weights.conftest import Site  # noqa: E402
from tests.weights.servers import Portal, Wire  # noqa: E402

SHARD = "model-00002-of-00004.safetensors"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
CLIENT = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}


@pytest.fixture(scope="module")
def storage() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(storage: str, content: dict[str, bytes]) -> Iterator[str]:
    client = boto3.client("s3", endpoint_url=storage, **CLIENT)
    client.create_bucket(Bucket="weights")
    for path, data in content.items():
        client.put_object(Bucket="weights", Key=f"models/tiny/{path}", Body=data)
    yield storage
    for item in client.list_objects_v2(Bucket="weights").get("Contents", []):
        client.delete_object(Bucket="weights", Key=item["Key"])
    client.delete_bucket(Bucket="weights")


def s3(endpoint: str, **more: Any) -> dict[str, Any]:
    known = {
        "kind": "s3",
        "bucket": "weights",
        "prefix": "models/tiny",
        "endpoint": endpoint,
        "addressing": "path",
    }
    return {**known, **more}


def test_a_model_arrives_whole_and_the_second_run_asks_no_one(bucket: str, site: Site) -> None:
    result = site.fetch(s3(bucket), environment=KEYS)
    assert result["ok"] and site.is_whole()
    again = site.fetch(s3(bucket), environment=KEYS)
    assert (again["kept_files"], again["received_bytes"]) == (11, 0)
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in json.dumps(result)


def test_a_prefix_may_end_with_a_slash_and_its_neighbours_are_not_taken(bucket: str, site: Site) -> None:
    client = boto3.client("s3", endpoint_url=bucket, **CLIENT)
    client.put_object(Bucket="weights", Key="models/tiny-2/config.json", Body=b"{}")
    client.put_object(Bucket="weights", Key="models/tiny/folder/", Body=b"")
    result = site.fetch(s3(bucket, prefix="models/tiny/"), manifest=None, environment=KEYS)
    assert result["ok"] and site.is_whole()


def test_checksums_of_the_storage_prove_a_copy_where_it_keeps_them(
    storage: str, site: Site, content: dict[str, bytes]
) -> None:
    client = boto3.client("s3", endpoint_url=storage, **CLIENT)
    client.create_bucket(Bucket="proved")
    for path, data in content.items():
        checksum = base64.b64encode(hashlib.sha256(data).digest()).decode()
        client.put_object(
            Bucket="proved", Key=path, Body=data, ChecksumAlgorithm="SHA256", ChecksumSHA256=checksum
        )
    result = site.fetch(s3(storage, bucket="proved", prefix=None), manifest=None, environment=KEYS)
    assert result["ok"]
    assert result["unproved_files"] == 0


def test_a_bucket_without_checksums_is_fetched_and_its_files_counted_as_unproved(
    bucket: str, site: Site
) -> None:
    result = site.fetch(s3(bucket), manifest=None, environment=KEYS)
    assert result["ok"]
    assert result["unproved_files"] == 11


def test_a_wrong_object_is_set_aside_three_times_and_named(
    bucket: str, site: Site, content: dict[str, bytes]
) -> None:
    client = boto3.client("s3", endpoint_url=bucket, **CLIENT)
    client.put_object(Bucket="weights", Key=f"models/tiny/{SHARD}", Body=bytes(len(content[SHARD])))
    result = site.fetch(s3(bucket), environment=KEYS)
    assert [p["id"] for p in result["problems"]] == ["file.rejected"]
    assert len(result["rejected"]) == 3
    assert result["problems"][0]["what"].count("s3 weights/models/tiny") == 3


def test_a_bucket_that_is_not_there_is_named(storage: str, site: Site) -> None:
    result = site.fetch(s3(storage, bucket="nowhere"), manifest=None, environment=KEYS)
    assert [p["id"] for p in result["problems"]] == ["source.none"]
    assert "NoSuchBucket" in result["problems"][0]["what"]


def test_no_credentials_name_the_ways_to_give_them(bucket: str, site: Site) -> None:
    no_instance = {"AWS_EC2_METADATA_DISABLED": "true"}
    result = site.fetch(s3(bucket), manifest=None, environment=no_instance)
    assert "credentials_file" in result["problems"][0]["fix"]


def test_credentials_may_come_from_a_file_and_a_profile(bucket: str, site: Site, tmp_path: Path) -> None:
    keys = tmp_path / "credentials"
    keys.write_text("[weights]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
    keys.chmod(0o600)
    source = s3(bucket, credentials_file=str(keys), profile="weights")
    assert site.fetch(source, environment={"AWS_EC2_METADATA_DISABLED": "true"})["ok"]


class Instance(BaseHTTPRequestHandler):
    """The metadata service of a cloud's instance (IMDSv2), which knows the instance's role."""

    asked: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, text: str) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        self.reply("session-token")

    def do_GET(self) -> None:
        role = "/latest/meta-data/iam/security-credentials/"
        found = {"Code": "Success", "AccessKeyId": "testing", "SecretAccessKey": "of-the-role", "Token": "t"}
        found["Expiration"] = "2099-01-01T00:00:00Z"
        self.reply("reader" if self.path == role else json.dumps(found))


def test_the_identity_of_the_instance_is_enough(bucket: str, site: Site) -> None:
    handler = type("Knowing", (Instance,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
    try:
        result = site.fetch(s3(bucket), environment=where)
    finally:
        server.shutdown()
        server.server_close()
    assert result["ok"] and site.is_whole()
    assert any(path.endswith("/reader") for path in handler.asked)  # type: ignore[attr-defined]
    assert "of-the-role" not in json.dumps(result)


def test_a_connection_that_drops_goes_on_where_it_stopped(bucket: str, site: Site) -> None:
    total = sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())
    # the first connection lists and fetches small files; the next ones are cut within shards
    wire = Wire(int(bucket.rpartition(":")[2]), [3_500_000, 2_500_000, 1_700_000])
    result = site.fetch(s3(f"http://127.0.0.1:{wire.port}"), environment=KEYS, concurrency=1, patience=30)
    wire.listener.close()
    assert wire.cuts == []
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []
    assert result["received_bytes"] == total


class Changing(BaseHTTPRequestHandler):
    """Storage whose shard is replaced by another of the same size after its first half was sent."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    asked: list[tuple[str | None, str | None]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def tag(data: bytes) -> str:
        return f'"{hashlib.md5(data).hexdigest()}"'

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            items = "".join(
                f"<Contents><Key>models/tiny/{name}</Key><Size>{len(data)}</Size><ETag>{self.tag(data)}</ETag>"
                "</Contents>"
                for name, data in self.objects.items()
            )
            top = "<Name>weights</Name><IsTruncated>false</IsTruncated>"
            self.answer(200, f"<ListBucketResult>{top}{items}</ListBucketResult>".encode())
            return
        name = self.path.partition("?")[0].removeprefix("/weights/models/tiny/")
        data, asked, known = self.objects[name], self.headers.get("Range"), self.headers.get("If-Match")
        if known not in (None, self.tag(data)):
            self.answer(412, b"")
            return
        offset = int(asked[len("bytes=") : -1]) if asked else 0
        body = data[offset:]
        if name == SHARD:
            self.asked.append((asked, known))
            if len(self.asked) == 1:
                self.answer(200, body[: len(body) // 2], len(body), ETag=self.tag(data))
                self.objects[name] = data[:400] + bytes(b ^ 1 for b in data[400:])
                self.close_connection = True
                return
        where = {"Content_Range": f"bytes {offset}-{len(data) - 1}/{len(data)}"} if asked else {}
        self.answer(206 if asked else 200, body, ETag=self.tag(data), **where)


@pytest.fixture
def changing(content: dict[str, bytes]) -> Iterator[type[Changing]]:
    handler = type("Made", (Changing,), {"objects": dict(content), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    yield handler
    server.shutdown()
    server.server_close()


def test_an_object_that_is_replaced_while_it_is_fetched_is_not_joined_with_its_successor(
    changing: Any, site: Site
) -> None:
    source = s3(changing.url, anonymous=True)
    first = site.fetch(source, manifest=None)
    assert [(p["id"], p["file"]) for p in first["problems"]] == [("file.nowhere", SHARD)]
    assert "replaced since it was listed" in first["problems"][0]["what"]
    # the next run asks anew what is there, and does not go on with the half of the old one
    assert site.fetch(source, manifest=None)["ok"]
    assert (site.dest / SHARD).read_bytes() == changing.objects[SHARD]
    assert all(known for _, known in changing.asked)
    assert changing.asked[-1][0] is None


def test_the_page_of_a_proxy_costs_nothing_of_what_is_there(
    content: dict[str, bytes], tmp_path: Path
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Portal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = s3(f"http://127.0.0.1:{server.server_address[1]}", anonymous=True)
    part = ws.Part(str(tmp_path / "x"), ws.Meter(lambda n: None), threading.Event())
    try:
        for there in (b"", content[SHARD][:1000]):
            Path(part.path).write_bytes(there)
            with pytest.raises(ws.Transient, match="was asked for from byte"):
                ws.make_source(spec, "").fetch(ws.Remote(SHARD, len(content[SHARD])), part)
            assert Path(part.path).read_bytes() == there
    finally:
        server.shutdown()
        server.server_close()


class Refusing(BaseHTTPRequestHandler):
    """A vendor that answers every request with one error."""

    code = ""
    status = 403
    hosts: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.hosts.append(self.headers.get("Host", ""))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("PathStyleDomainForbidden", 403, 'addressing = "virtual"'),
        ("SecondLevelDomainForbidden", 403, 'addressing = "virtual"'),
        ("AccessDenied", 403, "credentials"),
        ("InvalidAccessKeyId", 403, "credentials"),
    ],
)
def test_a_vendors_no_becomes_its_cure(code: str, status: int, words: str, site: Site) -> None:
    handler = type("Saying", (Refusing,), {"code": code, "status": status, "hosts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        result = site.fetch(s3(endpoint), manifest=None, environment=KEYS)
    finally:
        server.shutdown()
        server.server_close()
    assert words in result["problems"][0]["fix"]
    assert code in result["problems"][0]["what"]


@pytest.mark.parametrize(("addressing", "host"), [("virtual", "weights.s3.example"), ("path", "s3.example")])
def test_virtual_addressing_puts_the_bucket_into_the_host_name(
    addressing: str, host: str, site: Site
) -> None:
    """Seen by a proxy, so that no name has to resolve."""
    handler = type("Seeing", (Refusing,), {"code": "AccessDenied", "status": 403, "hosts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = {**KEYS, "HTTP_PROXY": f"http://127.0.0.1:{server.server_address[1]}", "NO_PROXY": ""}
    source = s3("http://s3.example", addressing=addressing, allow_http=True)
    try:
        site.fetch(source, manifest=None, environment=proxy)
    finally:
        server.shutdown()
        server.server_close()
    assert handler.hosts == [host]  # type: ignore[attr-defined]
