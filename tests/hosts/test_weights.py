"""Weights on both kinds of host, from hubs and storage on the loopback, with the clients of real hosts.

The tools environment is installed once for each kind; a test begins on a host that has never seen a model.
What depends on the kind of host (detached jobs, reboots, users, units) runs on both, the rest on one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from machines import Kind, Machine, free_port
from sites import Site
from weight_rigs import ROOT, Checkpoint, Rig, forget, kept, rehearsal, tiny, wait_for, write_recipe

from tasks.digest import digest_of
from tasks.mirrors import candidates
from tasks.receipts import Receipt
from tests.weights.servers import TOKEN, Fault, Hub, running

# bytes of the second shard: more than the 1 MiB that huggingface_hub writes at a time
HELD_AFTER = 2_500_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    return {"rehearsal": rehearsal(folder), "tiny": tiny(folder)}


@pytest.fixture(scope="module")
def prepared(
    hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory, models: dict[str, Checkpoint]
) -> Iterator[Callable[[Kind], Machine]]:
    """`prepared("systemd")`: a host of that kind with its environment and tools, made once."""
    made: dict[Kind, Machine] = {}

    def get(kind: Kind) -> Machine:
        if kind not in made:
            host = Machine(kind, "gpu1")
            stack.callback(host.stop)
            host.start()
            folder = tmp_path_factory.mktemp("tools")
            with running(models["tiny"].files, "huggingface") as hub:  # preflight asks for it
                site = Site(folder, [host], sources=["huggingface"], hub_endpoint=hub.url)
                write_recipe(site, models["tiny"])
                site.prepare(host)
                site.run("environment", "-y", timeout=900)
            made[kind] = host
        return made[kind]

    with ExitStack() as stack:
        yield get


@pytest.fixture(params=["systemd", "container"])
def ready(request: pytest.FixtureRequest, prepared: Callable[[Kind], Machine]) -> Machine:
    """A host of each kind in turn: jobs, users and read-only folders are not the same there."""
    return prepared(request.param)


# where the kind of host makes no difference
on_one_kind = pytest.mark.parametrize("ready", ["container"], indirect=True)


@pytest.fixture
def rig(ready: Machine, tmp_path: Path, models: dict[str, Checkpoint]) -> Iterator[Rig]:
    """A site for the rehearsal's checkpoint."""
    forget(ready)
    yield Rig(ready, tmp_path, models["rehearsal"])
    forget(ready)


@pytest.fixture
def held(ready: Machine, tmp_path: Path, models: dict[str, Checkpoint]) -> Iterator[tuple[Rig, Hub]]:
    """A site for the larger model, one file after the other, from a hub that holds back the second shard."""
    forget(ready)
    with running(models["tiny"].files, "huggingface") as hub:
        rig = Rig(ready, tmp_path, models["tiny"], hub_endpoint=hub.url, download_workers=1)
        hub.hold[rig.model.shard(2)] = HELD_AFTER
        yield rig, hub
        hub.hold.clear()
        forget(ready)


def midway(rig: Rig, hub: Hub) -> subprocess.Popen[str]:
    """A run that has the first shard and is in the middle of the second."""
    run = rig.site.start("weights", "-y")
    wait_for(lambda: hub.sent[rig.model.shard(2)] > HELD_AFTER)
    wait_for(lambda: rig.model.shard(1) in rig.on_host())
    return run


def reads(run: subprocess.Popen[str], words: str) -> str:
    """What a run prints until it prints these words."""
    assert run.stdout is not None
    text = ""
    for line in run.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"it never said {words!r}:\n{text}")


def ends(run: subprocess.Popen[str], rc: int) -> str:
    output, _ = run.communicate(timeout=180)
    assert run.returncode == rc, output
    return output


def nothing_verified_twice(rig: Rig, hub: Hub, had: dict[str, str]) -> None:
    """The model is whole, and what had been verified before has travelled once."""
    assert rig.is_whole()
    for path in had:
        assert hub.sent[path] == len(rig.model.files[path]), path
    half = rig.model.shard(2)
    assert sum(hub.sent.values()) <= rig.model.bytes + hub.sent[half]
    offsets = [asked for name, asked in hub.requests if name == half and asked]
    assert offsets, "the half shard went on where it was"


# ---- from each source


@on_one_kind
@pytest.mark.parametrize("kind", ["huggingface", "modelscope"])
def test_a_hub_delivers_whole_and_the_second_run_asks_no_one(kind: str, rig: Rig) -> None:
    with running(rig.model.files, kind) as hub:
        rig.set(sources=[kind], **{{"huggingface": "hub_endpoint"}.get(kind, "modelscope_endpoint"): hub.url})
        output = rig.weights()
        assert rig.is_whole()
        assert f"{len(rig.model.files)} files came from {kind}" in output
        assert sum(hub.sent.values()) == rig.model.bytes == rig.detail()["received_bytes"]
        asked = len(hub.requests)
        rig.weights()
        assert len(hub.requests) == asked
        steps = rig.site.report(rig.host.name, "weights")["steps"]
        assert {step["status"] for step in steps} == {"unchanged"}


@pytest.fixture(scope="module")
def storage(models: dict[str, Checkpoint]) -> Iterator[str]:
    boto3 = pytest.importorskip("boto3", reason="the S3 client is not installed here")
    moto_server = pytest.importorskip("moto.server", reason="moto is not installed here")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="weights")
    for path, data in models["rehearsal"].files.items():
        client.put_object(Bucket="weights", Key=f"models/x/{path}", Body=data)
    yield endpoint
    server.stop()


def test_s3_delivers_with_keys_of_the_controller_that_stay_nowhere(
    storage: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "controller-secret-key-0123456789"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE000000001")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    rig.set(sources=["s3"], s3_endpoint=storage, s3_addressing="path", s3_credentials_env=True)
    output = rig.weights()
    assert rig.is_whole()
    assert secret not in output
    assert nowhere(rig, secret)


@on_one_kind
def test_s3_delivers_with_a_file_of_credentials_on_the_host(storage: str, rig: Rig) -> None:
    keys = "[rack]\naws_access_key_id = testing\naws_secret_access_key = testing\n"
    rig.host.write("/etc/rackwright/s3", keys, mode="600")
    rig.set(
        sources=["s3"], s3_endpoint=storage, s3_addressing="path",
        s3_credentials_file="/etc/rackwright/s3", s3_profile="rack",
    )  # fmt: skip
    rig.weights()
    assert rig.is_whole()
    assert rig.detail()["received_bytes"] == rig.model.bytes


@on_one_kind
def test_an_upload_is_copied_or_linked_so_that_there_is_one(rig: Rig) -> None:
    for path, content in rig.model.files.items():
        (rig.site.folder / "upload").mkdir(exist_ok=True)
        (rig.site.folder / "upload" / path).write_bytes(content)
    rig.host.run("rm -rf /srv/upload")
    rig.host.put(rig.site.folder / "upload", "/srv/upload")
    rig.set(sources=["path"], model_path="/srv/upload")
    rig.weights()
    assert rig.is_whole()
    forget(rig.host)
    rig.set(model_path_how="symlink")
    rig.weights()
    assert rig.host.run(f"readlink {rig.dest}/config.json").stdout.strip() == "/srv/upload/config.json"
    rig.weights()
    assert rig.site.report(rig.host.name, "weights")["steps"][-1]["status"] == "unchanged"


@on_one_kind
def test_the_hub_that_was_measured_to_be_the_fastest_serves(rig: Rig) -> None:
    with running(rig.model.files, "huggingface") as hub:
        measured = Receipt("mirrors", digest_of(candidates()), 1.0, {"chosen": {"hub_endpoint": hub.url}})
        rig.host.run(measured.write(f"{ROOT}/receipts"))
        rig.set(mirrors="auto")
        try:
            output = rig.weights()
        finally:
            rig.host.run(f"rm {ROOT}/receipts/mirrors.json")
        assert f"{len(rig.model.files)} files came from huggingface" in output
        assert sum(hub.sent.values()) == rig.model.bytes
    assert rig.is_whole()


def test_a_providers_proxy_script_takes_hugging_face_and_not_the_host_itself(rig: Rig) -> None:
    with running(rig.model.files, "huggingface") as hub:
        rig.host.write("/etc/network_turbo", f"export http_proxy={hub.url} https_proxy={hub.url}\necho set\n")
        # without TLS, so that the stand-in can be proxy and hub in one
        rig.set(hub_endpoint="http://huggingface.co", proxy_script="/etc/network_turbo")
        try:
            rig.weights()
        finally:
            rig.host.run("rm /etc/network_turbo")
        assert set(hub.seen_tokens) == {"huggingface.co", "localhost"}
        assert sum(hub.sent.values()) == rig.model.bytes
    assert rig.is_whole()
    assert "proxy: as /etc/network_turbo says" in rig.host.run(f"cat {ROOT}/jobs/weights/log").stdout


@on_one_kind
def test_without_a_manifest_what_the_hub_publishes_proves_it_and_is_kept(rig: Rig) -> None:
    with running(rig.model.files, "huggingface") as hub:
        hub.files["README.md"] = b"# not served\n" * 50
        rig.set(hub_endpoint=hub.url)
        write_recipe(rig.site, rig.model, manifest=False)
        assert "weights.manifest" in rig.site.run("preflight")
        rig.weights()
    assert rig.is_whole()
    kept = rig.host.run(f"cat {ROOT}/run/weights-rehearsal.sha256").stdout
    assert kept.strip() == rig.model.manifest.read_text().strip()
    # the hub is gone: what was proved then is proof enough now
    rig.weights("--data", "reverify=full")


# ---- tokens


def nowhere(rig: Rig, secret: str) -> bool:
    """The secret is in no file of the host or of the reports, and in no command line."""
    places = f"{ROOT} /run /tmp /var/log /root /etc"
    found = rig.host.run(f"grep -rls -e '{secret}' {places} 2>/dev/null || :").stdout.split()
    assert found == []
    assert secret not in rig.host.run("journalctl --no-pager 2>/dev/null || :").stdout
    return all(
        path.is_dir() or secret not in path.read_text("utf-8")
        for path in (rig.site.folder / "reports").rglob("*")
    )


def test_a_token_of_the_controller_reaches_its_hub_and_no_other_place(
    rig: Rig, models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_TOKEN", TOKEN)
    with (
        running(rig.model.files, "huggingface", token=TOKEN) as hub,
        running(rig.model.files, "modelscope") as scope,
    ):
        hub.hidden.add(rig.model.shard(2))
        hub.hold[rig.model.shard(1)] = 0
        rig.set(
            sources=["huggingface", "modelscope"], hub_endpoint=hub.url, hub_token_env="SITE_TOKEN",
            modelscope_endpoint=scope.url, download_workers=1,
        )  # fmt: skip
        run = rig.site.start("weights", "-y")
        wait_for(lambda: hub.sent[rig.model.shard(1)] > 0)
        argv = rig.host.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '").stdout
        files = rig.host.run(f"grep -rls -e '{TOKEN}' {ROOT} || :").stdout
        hub.hold.clear()
        output = ends(run, 0)
    assert TOKEN not in argv and "fetch_weights.py" in argv
    assert files == ""
    assert TOKEN not in output
    assert rig.is_whole()
    # preflight asks whether the hub is there, without a token
    assert hub.seen_tokens["127.0.0.1"] == {f"Bearer {TOKEN}", ""}
    assert hub.seen_tokens["localhost"] == {""}  # the redirect to the CDN
    assert scope.sent[rig.model.shard(2)] > 0
    assert not any(TOKEN in given for given in scope.seen_tokens["127.0.0.1"])
    assert nowhere(rig, TOKEN)


@on_one_kind
def test_a_token_that_is_not_set_here_stops_before_anything_is_changed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SITE_TOKEN", raising=False)
    rig.set(hub_token_env="SITE_TOKEN")
    output = rig.weights(rc=1)
    assert "weights.secrets" in output and "SITE_TOKEN" in output
    assert rig.host.run(f"test -e {rig.dest}", check=False).returncode != 0


@on_one_kind
def test_a_token_file_of_the_host_must_be_private(rig: Rig) -> None:
    rig.host.write("/etc/rackwright/hf", TOKEN + "\n", mode="644")
    with running(rig.model.files, "huggingface", token=TOKEN) as hub:
        rig.set(hub_endpoint=hub.url, hub_token_file="/etc/rackwright/hf")
        assert "chmod 600 /etc/rackwright/hf" in rig.weights(rc=1)
        rig.host.run("chmod 600 /etc/rackwright/hf")
        rig.weights()
    assert rig.is_whole()


# ---- wrong content


@on_one_kind
def test_the_third_wrong_copy_stops_and_the_next_run_fetches_that_file_alone(rig: Rig) -> None:
    shard = rig.model.shard(2)
    with running(rig.model.files, "huggingface") as hub:
        hub.faults[shard] = [Fault("wrong", times=3)]
        rig.set(hub_endpoint=hub.url)
        output = rig.weights(rc=1)
        assert shard in output and "3 wrong copies" in output and "huggingface" in output
        assert shard not in rig.on_host()
        assert len(rig.host.run(f"ls {rig.dest}/../.rackwright-rejected/rehearsal").stdout.split()) == 1
        rig.weights()
        assert rig.is_whole()
        assert hub.sent[shard] == 4 * len(rig.model.files[shard])
        others = sum(size for name, size in hub.sent.items() if name != shard)
    assert others == rig.model.bytes - len(rig.model.files[shard])


@on_one_kind
def test_a_flipped_byte_of_the_same_size_and_time_is_found_by_a_full_look_and_mended(rig: Rig) -> None:
    shard = f"{rig.dest}/{rig.model.shard(3)}"
    with running(rig.model.files, "modelscope") as hub:
        rig.set(sources=["modelscope"], modelscope_endpoint=hub.url)
        rig.weights()
        sent = sum(hub.sent.values())
        rig.host.run(
            f"touch -r {shard} /tmp/time; printf x | dd of={shard} bs=1 seek=4000 conv=notrunc 2>/dev/null"
            f"; touch -r /tmp/time {shard}"
        )
        rig.weights()
        assert rig.on_host() != rig.model.digests  # size and time tell nothing
        output = rig.weights("--data", "reverify=full")
        assert rig.model.shard(3) in output and "is wrong" in output
        assert rig.is_whole()
        assert sum(hub.sent.values()) - sent == len(rig.model.files[rig.model.shard(3)])
        rig.site.run("weights", "-y")
    assert rig.site.report(rig.host.name, "weights")["steps"][-1]["status"] == "unchanged"


@on_one_kind
def test_a_shard_that_the_first_hub_lacks_comes_from_the_next(rig: Rig) -> None:
    shard = rig.model.shard(1)
    with running(rig.model.files, "huggingface") as hub, running(rig.model.files, "modelscope") as scope:
        hub.hidden.add(shard)
        rig.set(sources=["huggingface", "modelscope"], hub_endpoint=hub.url, modelscope_endpoint=scope.url)
        rig.weights()
        assert rig.is_whole()
        assert dict(scope.sent) == {shard: len(rig.model.files[shard])}


@on_one_kind
def test_bytes_rate_and_rest_are_shown_while_a_model_comes(
    ready: Machine, tmp_path: Path, models: dict[str, Checkpoint]
) -> None:
    forget(ready)
    with running(models["tiny"].files, "huggingface") as hub:
        rig = Rig(ready, tmp_path, models["tiny"], hub_endpoint=hub.url)
        hub.total_rate = rig.model.bytes // 30  # an estimate needs ten seconds between two looks
        output = rig.weights()
    forget(ready)
    size = r"[\d.]+ .?B"
    assert re.search(rf"\d+ % · {size} of {size} · {size}/s · \d+ s left", output), output


# ---- interruptions


def test_a_killed_controller_loses_nothing_and_the_next_run_attaches(held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    run = midway(rig, hub)
    run.kill()
    run.communicate()
    again = rig.site.start("weights", "-y")
    reads(again, "attached")
    hub.hold.clear()
    ends(again, 0)
    assert rig.is_whole()
    assert sum(hub.sent.values()) == rig.model.bytes


KILLS = {
    "the program": "pkill -KILL -f [f]etch_weights.py",
    "its whole group": f"kill -KILL -- -$(cat {ROOT}/jobs/weights/pid)",
}


@pytest.mark.parametrize("what", KILLS)
def test_a_killed_job_goes_on_where_it_was(what: str, held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    run = midway(rig, hub)
    had = rig.on_host()
    rig.host.run(KILLS[what])
    output = ends(run, 1)
    assert "weights failed" in output
    hub.hold.clear()
    rig.weights()
    nothing_verified_twice(rig, hub, had)


def test_a_reboot_midway_loses_nothing_that_was_verified(held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    run = midway(rig, hub)
    had = rig.on_host()
    rig.host.reboot()
    output = ends(run, 1)
    assert "connection lost" in output or "does not answer" in output or "run again" in output
    hub.hold.clear()
    rig.weights()
    nothing_verified_twice(rig, hub, had)


@on_one_kind
def test_a_connection_that_drops_at_any_byte_costs_only_what_was_on_it(held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    half = rig.model.shard(2)
    hub.hold.clear()
    hub.faults[half] = [Fault("drop", at=2_345_678)]
    rig.weights()
    assert rig.is_whole()
    assert hub.sent[half] <= len(rig.model.files[half]) + 2_000_000
    assert len([name for name, _ in hub.requests if name == half]) == 2


FILL = {
    "space": f"dd if=/dev/zero of={ROOT}/models/filler bs=1M 2>/dev/null || :",
    "inodes": f"mkdir -p {ROOT}/models/filler; cd {ROOT}/models/filler; seq 999 | xargs touch || :",
}


@on_one_kind
@pytest.mark.parametrize("what", FILL)
def test_a_disk_that_fills_up_midway_is_named_and_the_next_run_goes_on(
    what: str, held: tuple[Rig, Hub]
) -> None:
    rig, hub = held
    # as large as the room that the fetcher keeps free, and some more; memory is taken as it is filled
    rig.host.tmpfs(f"{ROOT}/models", "1200m", 150)
    try:
        run = midway(rig, hub)
        had = rig.on_host()
        rig.host.run(FILL[what])
        hub.hold.clear()
        output = ends(run, 1)
        assert "space (or inodes)" in output
        assert "No space left" in output
        rig.host.run(f"rm -rf {ROOT}/models/filler")
        rig.weights()
        if what == "space":
            nothing_verified_twice(rig, hub, had)
        else:  # what is open can be written to its end; the next file cannot be made
            assert rig.is_whole()
            assert sum(hub.sent.values()) == rig.model.bytes
    finally:
        rig.host.run(f"rm -rf {ROOT}/models/filler")
        rig.host.inside("umount", "--lazy", f"{ROOT}/models")


def test_two_runs_at_once_are_one_download(held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    first = midway(rig, hub)
    second = rig.site.start("weights", "-y")
    reads(second, "attached")
    hub.hold.clear()
    ends(first, 0)
    ends(second, 0)
    assert rig.is_whole()
    assert sum(hub.sent.values()) == rig.model.bytes


@on_one_kind
def test_another_model_for_the_same_host_is_refused_meanwhile(
    held: tuple[Rig, Hub], models: dict[str, Checkpoint]
) -> None:
    rig, hub = held
    run = midway(rig, hub)
    write_recipe(rig.site, models["rehearsal"])
    output = rig.weights(rc=1)
    assert "another weights job is running for other inputs" in output
    hub.hold.clear()
    ends(run, 0)


# ---- before and after


@on_one_kind
def test_preflight_counts_only_what_is_still_missing(held: tuple[Rig, Hub]) -> None:
    rig, _ = held
    three = {rig.model.shard(number) for number in (1, 2, 3)}
    rig.host.tmpfs(f"{ROOT}/models", "14m", 200)
    try:
        rig.host.run(f"head -c 9000000 /dev/zero >{ROOT}/models/filler")
        output = rig.site.run("preflight", rc=1)
        assert "not everything fits" in output
        rig.host.run(f"rm {ROOT}/models/filler")
        rig.site.run("preflight")
        folder = rig.site.folder / "tiny"
        folder.mkdir()
        for path in three:
            (folder / path).write_bytes(rig.model.files[path])
        rig.host.put(folder, f"{ROOT}/models/tiny")
        # 5 MB are free for a model of 12 MB, and 3 MB are missing
        rig.site.run("preflight")
        found = rig.site.report(rig.host.name, "preflight")["findings"]
        space = next(item for item in found if item["id"] == "disk.space")
        assert space["status"] != "fail" and "missing weights" in space["observed"]
    finally:
        rig.host.inside("umount", "--lazy", f"{ROOT}/models")


def test_other_users_can_read_the_model_and_change_nothing(rig: Rig) -> None:
    with running(rig.model.files, "huggingface") as hub:
        rig.set(hub_endpoint=hub.url)
        rig.weights()
    for command in (
        f"echo x >>{rig.dest}/config.json",
        f"touch {rig.dest}/new",
        f"rm -f {rig.dest}/{rig.model.shard(1)}",
        f"mkdir {rig.dest}/__pycache__",
        f"mv {rig.dest} {rig.dest}.old",
    ):
        assert rig.host.run(command, user="user", check=False).returncode != 0, command
    assert rig.host.run(f"cat {rig.dest}/config.json", user="user").stdout
    modes = rig.host.run(f"find {rig.dest} -printf '%m\\n' | sort -u").stdout.split()
    assert modes == ["444", "555"]
    assert rig.is_whole()


def test_uninstall_takes_a_half_download_and_its_wrong_files_along(held: tuple[Rig, Hub]) -> None:
    rig, hub = held
    hub.faults["config.json"] = [Fault("wrong")]
    run = midway(rig, hub)
    run.kill()
    run.communicate()
    listed = rig.host.run(f"ls -A {ROOT}/models").stdout.split()
    assert {".rackwright-download", ".rackwright-rejected", "tiny"} == set(listed)
    with kept(rig.host):
        rig.site.run("uninstall", "-y")
        assert rig.host.run(f"find {ROOT} 2>/dev/null || :").stdout == ""
        assert rig.host.run("pgrep -f [f]etch_weights.py || :").stdout == ""


def test_the_engines_user_reads_the_model_changes_nothing_of_it_and_has_caches_of_its_own(rig: Rig) -> None:
    with running(rig.model.files, "huggingface") as hub, kept(rig.host):
        rig.set(hub_endpoint=hub.url)
        rig.site.run("site", "-y")
        pid = rig.host.run("pgrep -f '[v]llm serve' | head -n 1").stdout.strip()
        user = rig.host.run(f"ps -o user:32= -p {pid}").stdout.strip()
        assert user not in ("root", "")
        as_engine = f"setpriv --reuid {user} --regid $(id -g {user}) --clear-groups sh -c"
        for command in (
            f"touch {rig.dest}/x",
            f"echo >>{rig.dest}/config.json",
            f"mkdir {rig.dest}/__pycache__",
        ):
            assert rig.host.run(f"{as_engine} '{command}'", check=False).returncode != 0, command
        rig.host.run(f"{as_engine} 'cat {rig.dest}/*.safetensors >/dev/null'")
        # only someone beside a container may read another user's environment
        environ = rig.host.inside("cat", f"/proc/{pid}/environ").stdout.replace("\0", "\n")
        caches = [
            line.split("=", 1)[1] for line in environ.splitlines() if "/cache/" in line.partition("=")[2]
        ]
        assert len(caches) >= 8
        assert not any(path.startswith(rig.dest) for path in caches)
        rig.host.run(f"{as_engine} 'mkdir -p {caches[0]} && touch {caches[0]}/x'")
        if rig.host.kind == "systemd":  # there even root could not, inside the engine's own view of the disk
            inside = ["nsenter", f"--target={pid}", "--mount", "touch"]
            assert "Read-only" in rig.host.inside(*inside, f"{rig.dest}/x", check=False).stderr
        assert rig.is_whole()
        rig.site.run("uninstall", "-y")


@on_one_kind
def test_the_manifest_of_a_host_is_brought_here_and_shows_what_differs_from_the_recipe(rig: Rig) -> None:
    shard = f"{rig.dest}/{rig.model.shard(2)}"
    with running(rig.model.files, "huggingface") as hub:
        rig.set(hub_endpoint=hub.url)
        assert "rackwright weights" in rig.site.run("manifest", rc=1)  # nothing is there yet
        rig.weights()
        output = rig.site.run("manifest")
        brought = rig.site.folder / "reports" / "gpu1" / "rehearsal.sha256"
        assert brought.read_text() == rig.model.manifest.read_text()
        assert f"equal to {rig.model.manifest}" in output
        rig.host.run(f"printf x | dd of={shard} bs=1 seek=5000 conv=notrunc 2>/dev/null")
        output = rig.site.run("manifest", rc=1)
        assert (
            f"{rig.model.shard(2)}: {rig.model.digests[rig.model.shard(2)]} in the recipe's manifest"
            in output
        )
        assert output.count("in the recipe's manifest, ") == 1
        rig.weights()
        rig.site.run("manifest", "--data", "reverify=full")
    assert rig.is_whole()


# ---- from host to host


@pytest.fixture(scope="module")
def second(hosts_can_run: None) -> Iterator[Machine]:
    """Another host, that needs no tools: its only source is a peer."""
    host = Machine("systemd", "gpu2")
    try:
        yield host.start()
    finally:
        host.stop()


@pytest.fixture
def pair(
    ready: Machine, second: Machine, tmp_path: Path, models: dict[str, Checkpoint]
) -> Iterator[tuple[Rig, Machine, Hub]]:
    """A host of either kind that a hub serves, and a second one with it as its peer."""
    forget(ready)
    forget(second)
    with running(models["tiny"].files, "huggingface") as hub:
        rig = Rig(ready, tmp_path, models["tiny"], hub_endpoint=hub.url)
        two = {**second.inventory_data(), "sources": ["peer"], "peer": "gpu1", "port": free_port()}
        rig.site.hosts([("gpu1", ready.inventory_data()), ("gpu2", two)])
        yield rig, second, hub
    forget(ready)
    forget(second)


def second_rig(rig: Rig, host: Machine) -> Rig:
    """The same site, seen from its second host."""
    other = object.__new__(Rig)
    other.host, other.model, other.site, other.dest = host, rig.model, rig.site, rig.dest
    return other


def nothing_serves(host: Machine) -> bool:
    left = host.run(f"ls -d {ROOT}/run/peer-* {ROOT}/jobs/serve-weights-* 2>/dev/null || :").stdout
    return left == "" and host.run("pgrep -f [s]erve_weights.py || :").stdout == ""


def test_the_second_host_gets_the_model_from_the_first_and_no_server_stays(
    pair: tuple[Rig, Machine, Hub],
) -> None:
    rig, second, hub = pair
    rig.weights("--limit", "gpu1")
    sent = sum(hub.sent.values())
    output = rig.weights("--limit", "gpu2")
    other = second_rig(rig, second)
    assert other.is_whole()
    assert "gpu1 serves its copy at https://127.0.0.1:" in output
    assert sum(hub.sent.values()) == sent == rig.model.bytes
    assert other.detail()["received_bytes"] == rig.model.bytes
    assert nothing_serves(rig.host)
    assert second.run(f"ls {ROOT}/run").stdout.count("peer") == 0
    rig.weights("--limit", "gpu2")
    assert rig.site.report("gpu2", "weights")["steps"][-1]["status"] == "unchanged"


@on_one_kind
def test_in_one_run_the_second_waits_for_the_first_and_the_hub_serves_once(
    pair: tuple[Rig, Machine, Hub],
) -> None:
    rig, second, hub = pair
    hub.hold[rig.model.shard(2)] = HELD_AFTER
    run = rig.site.start("weights", "-y")
    reads(run, "waiting for gpu1")
    hub.hold.clear()
    ends(run, 0)
    assert rig.is_whole() and second_rig(rig, second).is_whole()
    assert sum(hub.sent.values()) == rig.model.bytes
    assert nothing_serves(rig.host)


@on_one_kind
def test_a_copy_from_a_peer_goes_on_in_the_middle(pair: tuple[Rig, Machine, Hub]) -> None:
    rig, second, _ = pair
    rig.weights("--limit", "gpu1")
    shard, parts = rig.model.shard(2), f"{ROOT}/models/.rackwright-download/tiny/parts"
    half = rig.site.folder / "half"
    half.write_bytes(rig.model.files[shard][:2_000_000])
    second.run(f"mkdir -p {parts}; touch {ROOT}/.rackwright")
    second.put(half, f"{parts}/{shard}.incomplete")
    second.write(f"{parts}/{shard}.incomplete.of", rig.model.digests[shard])
    rig.weights("--limit", "gpu2")
    other = second_rig(rig, second)
    assert other.is_whole()
    assert other.detail()["received_bytes"] == rig.model.bytes - 2_000_000


def test_a_controller_that_dies_midway_leaves_the_copy_going_and_the_next_run_attaches(
    pair: tuple[Rig, Machine, Hub],
) -> None:
    rig, second, _ = pair
    rig.weights("--limit", "gpu1")
    # the fetcher is held the moment it begins
    second.run(
        "setsid -f sh -c 'while ! pkill -STOP -f [f]etch_weights.py; do sleep 0.02; done; touch /tmp/held'"
        " >/dev/null 2>&1 </dev/null; rm -f /tmp/held"
    )
    run = rig.site.start("weights", "-y", "--limit", "gpu2")
    wait_for(lambda: second.run("test -e /tmp/held", check=False).returncode == 0)
    run.kill()
    run.communicate()
    again = rig.site.start("weights", "-y", "--limit", "gpu2")
    reads(again, "attached")
    second.run("pkill -CONT -f [f]etch_weights.py")
    ends(again, 0)
    assert second_rig(rig, second).is_whole()
    assert nothing_serves(rig.host)


@on_one_kind
@pytest.mark.parametrize("what", ["never had it", "changed since", "no such host"])
def test_a_peer_that_cannot_serve_is_said_so_and_the_next_source_serves(
    what: str, pair: tuple[Rig, Machine, Hub]
) -> None:
    rig, second, hub = pair
    peer = "gpu7" if what == "no such host" else "gpu1"
    words = "no such host in this inventory" if what == "no such host" else "does not have the verified model"
    if what == "changed since":
        rig.weights("--limit", "gpu1")
        rig.host.run(f"printf x >>{rig.dest}/config.json")
    two = {**second.inventory_data(), "sources": ["peer"], "peer": peer, "port": free_port()}
    rig.site.hosts([("gpu1", rig.host.inventory_data()), ("gpu2", two)])
    alone = rig.weights("--limit", "gpu2", rc=1)
    assert words in alone
    assert "Not asked: peer" in alone
    two["sources"] = ["peer", "huggingface"]
    rig.site.hosts([("gpu1", rig.host.inventory_data()), ("gpu2", two)])
    assert words in rig.weights("--limit", "gpu2")
    assert second_rig(rig, second).is_whole()
    assert sum(hub.sent.values()) in (rig.model.bytes, 2 * rig.model.bytes)
