"""The real huggingface_hub and modelscope_hub against local hubs that fail in every way the field knows."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import verify_weights
from tasks.onhost.weight_sources import BLOCK
from tests.weights.conftest import SOURCE, Site, hf, ms
from tests.weights.servers import COMMIT, TOKEN, Fault, Hub, running

SHARD = "model-00002-of-00004.safetensors"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoint"
Served = tuple[Hub, dict[str, Any]]


def ids(result: dict[str, Any]) -> list[str]:
    return [p["id"] for p in result["problems"]]


def test_a_model_arrives_whole_and_nothing_else_is_left_anywhere(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert result["digest"] == hashlib.sha256(site.manifest.read_bytes()).hexdigest()
    assert sum(hub.sent.values()) == result["received_bytes"] == hub.total()
    assert [p.name for p in site.models.iterdir()] == ["tiny"]
    assert list(site.home.iterdir()) == []
    assert {p.stat().st_mode & 0o777 for p in site.dest.rglob("*") if p.is_file()} == {0o444}
    assert {p.stat().st_mode & 0o777 for p in (site.dest, site.dest / "encoding")} == {0o555}


def test_the_second_run_asks_no_one_and_hashes_nothing(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    site.fetch(source)
    sent, asked = sum(hub.sent.values()), len(hub.requests)
    result = site.fetch(source)
    assert result["ok"]
    assert (result["kept_files"], result["fetched_files"], result["verify"]["hashed_bytes"]) == (11, 0, 0)
    assert (sum(hub.sent.values()), len(hub.requests)) == (sent, asked)
    assert "asking" not in result["stderr"]


def test_without_a_manifest_the_published_hashes_decide(any_hub: Served, site: Site, tmp_path: Path) -> None:
    _, source = any_hub
    written = tmp_path / "out.sha256"
    result = site.fetch(source, manifest=None, write_manifest=str(written))
    assert result["ok"] and site.is_whole()
    assert result["unproved_files"] == 0
    assert written.read_text() == site.manifest.read_text()


def test_a_connection_that_drops_goes_on_where_it_stopped(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    rng = random.Random(20261130)
    size = len(hub.files[SHARD])
    hub.faults[SHARD] = [Fault("drop", at=rng.randrange(size // 2)) for _ in range(3)]
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    offsets = [int(asked[6:-1] or 0) for name, asked in hub.requests if name == SHARD]
    assert len(offsets) == 4
    assert offsets[-1] > 0 and offsets == sorted(offsets)
    assert hub.sent[SHARD] <= size + 3 * BLOCK  # a chunk that was not yet full is lost


def test_a_body_that_ends_early_with_a_clean_close_goes_on(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.faults[SHARD] = [Fault("short", at=1000)]
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []


def test_a_wrong_body_of_the_right_length_is_set_aside_and_only_that_file_is_fetched_again(
    any_hub: Served, site: Site
) -> None:
    hub, source = any_hub
    hub.faults[SHARD] = [Fault("wrong")]
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    (rejected,) = result["rejected"]
    wrong = bytes(b ^ 0x55 for b in hub.files[SHARD])
    assert rejected["file"] == SHARD
    assert rejected["sha256"] == hashlib.sha256(wrong).hexdigest()
    assert Path(rejected["kept_at"]).read_bytes() == wrong
    assert Path(rejected["kept_at"]).is_relative_to(site.rejected)
    assert hub.sent[SHARD] == 2 * len(wrong)
    assert sum(hub.sent.values()) == hub.total() + len(wrong)


def test_a_small_file_is_held_against_its_git_blob_id(hub: Hub, site: Site) -> None:
    hub.faults["config.json"] = [Fault("wrong")]
    result = site.fetch(hf(hub), manifest=None)
    assert result["ok"] and site.is_whole()
    assert [r["file"] for r in result["rejected"]] == ["config.json"]
    assert "Git blob" in result["rejected"][0]["why"]


def test_the_third_wrong_copy_stops_the_run_and_says_who_served_what(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.faults[SHARD] = [Fault("wrong", times=9)]
    result = site.fetch(source)
    assert not result["ok"]
    (problem,) = result["problems"]
    assert (problem["id"], problem["file"]) == ("file.rejected", SHARD)
    wrong = hashlib.sha256(bytes(b ^ 0x55 for b in hub.files[SHARD])).hexdigest()
    assert problem["what"].count(wrong) == 3
    assert problem["what"].count(result["sources"][0]["name"]) == 3
    assert hub.sent[SHARD] == 3 * len(hub.files[SHARD])
    assert not (site.dest / SHARD).exists()
    # what was right stays, and is not fetched again once the server is
    hub.faults.clear()
    kept = {p.name for p in site.dest.glob("*.safetensors")}
    before = dict(hub.sent)
    assert site.fetch(source)["ok"]
    assert all(hub.sent[name] == before[name] for name in kept)


def test_after_two_wrong_copies_the_third_comes_from_another_source(hub: Hub, scope: Hub, site: Site) -> None:
    hub.faults[SHARD] = [Fault("wrong", times=9)]
    result = site.fetch(hf(hub), ms(scope))
    assert result["ok"] and site.is_whole()
    assert [r["source"].split()[0] for r in result["rejected"]] == ["huggingface", "huggingface"]
    assert [s["files"] for s in result["sources"]] == [10, 1]
    assert dict(scope.sent) == {SHARD: len(scope.files[SHARD])}


def test_a_file_that_is_longer_than_listed_is_not_taken(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.faults[SHARD] = [Fault("longer")]
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()


@pytest.mark.parametrize("shape", ["huggingface", "modelscope"])
@pytest.mark.parametrize(("at", "pages"), [(0, 2), (2_500_000, 1), (2_500_000, 2)])
def test_the_page_of_a_proxy_is_no_part_of_a_file_and_costs_nothing_of_what_is_there(
    at: int, pages: int, shape: str, content: dict[str, bytes], site: Site
) -> None:
    size = len(content[SHARD])
    with running(content, shape) as hub:
        hub.faults[SHARD] = [Fault("drop", at=at), Fault("page", times=pages)]
        result = site.fetch(SOURCE[shape](hub), patience=60)
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []
    # what a chunk that was not yet full had got is lost; the rest of it is not asked for again
    assert hub.sent[SHARD] <= size + BLOCK


def test_a_page_that_comes_every_time_ends_with_the_next_source(hub: Hub, scope: Hub, site: Site) -> None:
    hub.faults[SHARD] = [Fault("page", times=99)]
    result = site.fetch(hf(hub), ms(scope), patience=60)
    assert result["ok"] and site.is_whole()
    assert scope.sent == {SHARD: len(scope.files[SHARD])}


def test_a_hub_that_never_sends_just_the_rest_is_taken_from_the_start(hub: Hub, site: Site) -> None:
    """As a mirror of plain files may be: status 200 and the whole body, whatever was asked for."""
    hub.ranges = False
    hub.faults[SHARD] = [Fault("drop", at=2_500_000)]
    result = site.fetch(hf(hub), patience=60)
    assert result["ok"] and site.is_whole()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_it_names(
    status: int, any_hub: Served, site: Site
) -> None:
    hub, source = any_hub
    hub.faults[SHARD] = [Fault("status", status=status, headers={"Retry-After": "2"})]
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert result["seconds"]["download"] >= 2
    assert hub.sent[SHARD] == len(hub.files[SHARD])


def test_a_listing_that_is_busy_is_asked_again(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.faults[""] = [Fault("status", status=503)]
    assert site.fetch(source, patience=20)["ok"]


def test_a_wrong_token_names_the_cure_and_the_next_source_serves(
    content: dict[str, bytes], scope: Hub, site: Site
) -> None:
    with running(content, "huggingface", token=TOKEN) as closed:
        result = site.fetch(hf(closed), ms(scope))
    assert result["ok"] and site.is_whole()
    first, second = result["sources"]
    assert first["state"] == "failed"
    assert "401" in first["why"]
    assert "token" in first["fix"]
    assert (second["state"], second["files"]) == ("used", 11)
    assert closed.requests == []


@pytest.mark.parametrize("shape", ["huggingface", "modelscope"])
def test_a_refusal_with_no_other_source_is_one_clear_problem(
    shape: str, content: dict[str, bytes], site: Site
) -> None:
    with running(content, shape, token=TOKEN) as closed:
        result = site.fetch(SOURCE[shape](closed), manifest=None)
    assert ids(result) == ["source.none"]
    assert "token" in result["problems"][0]["fix"]


def test_the_token_comes_from_a_private_file_and_goes_to_the_hub_alone(
    content: dict[str, bytes], site: Site, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o644)
    with running(content, "huggingface", token=TOKEN) as closed:
        refused = site.fetch(hf(closed, token_file=str(token)))
        assert not refused["ok"]
        assert "chmod 600" in json.dumps(refused)
        token.chmod(0o600)
        result = site.fetch(hf(closed, token_file=str(token)))
    assert result["ok"] and site.is_whole()
    assert closed.seen_tokens["127.0.0.1"] == {f"Bearer {TOKEN}"}
    assert closed.seen_tokens["localhost"] == {""}  # the redirect to the CDN
    for text in (json.dumps(result), json.dumps(refused), *map(str, site.root.rglob("*"))):
        assert TOKEN not in text
    for path in site.root.rglob("*"):
        assert path == token or not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_secrets_are_read_once_deleted_before_any_source_is_asked_and_each_goes_to_its_hub_alone(
    content: dict[str, bytes], scope: Hub, site: Site, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.json"
    secrets.write_text(json.dumps({"HF_TOKEN": TOKEN, "MODELSCOPE_API_TOKEN": "ms-0123456789"}))
    secrets.chmod(0o600)
    with running(content, "huggingface", token=TOKEN) as closed:
        closed.hidden.add(SHARD)  # so that both hubs are asked
        closed.on_request = lambda: there.append(secrets.exists())
        there: list[bool] = []
        result = site.fetch(hf(closed), ms(scope), secrets=str(secrets))
    assert result["ok"] and site.is_whole()
    assert there and not any(there)
    seen = {**closed.seen_tokens, **scope.seen_tokens}
    assert closed.seen_tokens["127.0.0.1"] == {f"Bearer {TOKEN}"}
    assert not any(TOKEN in given for given in scope.seen_tokens["127.0.0.1"])
    assert all("ms-0123456789" not in given for given in closed.seen_tokens["127.0.0.1"])
    assert seen["localhost"] == {""}
    assert TOKEN not in json.dumps(result)


@pytest.mark.parametrize(
    ("content_", "mode", "words"),
    [
        ('{"HF_TOKEN": "hf_abcdefgh"}', 0o644, "0600"),
        ('{"PATH": "hf_abcdefgh"}', 0o600, "nothing else"),
        ('{"HF_TOKEN": 5}', 0o600, "nothing else"),
        ("hf_abcdefgh", 0o600, "not JSON"),
        (None, 0o600, "No such file"),
    ],
)
def test_secrets_that_are_none_are_refused_without_showing_them(
    content_: str | None, mode: int, words: str, hub: Hub, site: Site, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.json"
    if content_ is not None:
        secrets.write_text(content_)
        secrets.chmod(mode)
    process = site.start(hf(hub), secrets=str(secrets))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert words in err and "hf_abcdefgh" not in err
    assert not secrets.exists()
    assert hub.requests == []


def test_a_model_that_was_sealed_is_mended_by_its_owner(any_hub: Served, site: Site) -> None:
    _, source = any_hub
    site.fetch(source)
    site.dest.chmod(0o755)
    (site.dest / SHARD).unlink()
    site.dest.chmod(0o555)
    assert site.fetch(source)["ok"] and site.is_whole()
    assert site.dest.stat().st_mode & 0o777 == 0o555


def test_ignored_patterns_do_not_take_away_what_the_manifest_names(any_hub: Served, site: Site) -> None:
    result = site.fetch(any_hub[1], ignore=["config.json", "*.md"])
    assert result["ok"] and site.is_whole()


def test_a_token_of_the_environment_does_not_go_where_only_a_measurement_sent_it(
    any_hub: Served, site: Site
) -> None:
    hub, source = any_hub
    tokens = {"HF_TOKEN": TOKEN, "MODELSCOPE_API_TOKEN": TOKEN}
    assert site.fetch({**source, "anonymous": True}, environment=tokens)["ok"]
    assert hub.seen_tokens and not any(TOKEN in given for seen in hub.seen_tokens.values() for given in seen)


def test_addresses_of_the_hosts_environment_are_not_asked(any_hub: Served, site: Site) -> None:
    """With a token of the site, which would travel there, in the clear."""
    hub, source = any_hub
    del source["endpoint"]
    names = {"HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url, "MODELSCOPE_DOMAIN": hub.url}
    # nothing is there: what else the client asks ends at once
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HF_TOKEN": TOKEN, "MODELSCOPE_API_TOKEN": TOKEN}
    result = site.fetch(source, patience=0, environment={**names, **nowhere})
    assert not result["ok"]
    assert hub.seen_tokens == {}


def test_the_token_may_come_from_the_environment(content: dict[str, bytes], site: Site) -> None:
    with running(content, "modelscope", token=TOKEN) as closed:
        assert site.fetch(ms(closed), environment={"MODELSCOPE_API_TOKEN": TOKEN})["ok"]


def test_one_shard_that_is_404_comes_from_the_next_source(hub: Hub, scope: Hub, site: Site) -> None:
    hub.hidden.add(SHARD)
    result = site.fetch(hf(hub), ms(scope))
    assert result["ok"] and site.is_whole()
    assert "404" in result["sources"][0]["cannot"][SHARD]
    assert dict(scope.sent) == {SHARD: len(scope.files[SHARD])}


def test_one_shard_that_is_404_everywhere_leaves_the_rest_fetched(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.hidden.add(SHARD)
    result = site.fetch(source)
    (problem,) = result["problems"]
    assert (problem["id"], problem["file"]) == ("file.nowhere", SHARD)
    assert result["fetched_files"] == 10
    hub.hidden.clear()
    before = sum(hub.sent.values())
    assert site.fetch(source)["ok"]
    assert sum(hub.sent.values()) - before == len(hub.files[SHARD])


def test_a_listing_without_one_shard_does_not_pass_for_the_whole(any_hub: Served, site: Site) -> None:
    """What the ModelScope client is known for: success with a file missing."""
    hub, source = any_hub
    hub.unlisted.add(SHARD)
    with_manifest = site.fetch(source)
    assert ids(with_manifest) == ["file.nowhere"]
    without = site.fetch(source, manifest=None)
    assert not without["ok"]
    assert ("shard.missing", SHARD) in {(p["id"], p["file"]) for p in without["problems"]}


def test_modelscope_saying_no_with_status_200_is_no_empty_model(scope: Hub, site: Site) -> None:
    body = (FIXTURES / "modelscope-repo-files-error.json").read_bytes()
    scope.faults[""] = [Fault("status", status=200, body=body, times=99)]
    result = site.fetch(ms(scope), manifest=None)
    assert ids(result) == ["source.none"]
    assert "lists no file" in result["problems"][0]["what"]


def test_sources_that_publish_different_hashes_are_not_mixed(hub: Hub, scope: Hub, site: Site) -> None:
    hub.hidden.add(SHARD)
    scope.lies[SHARD] = {"Sha256": "a" * 64}
    result = site.fetch(hf(hub), ms(scope))
    assert ids(result) == ["file.nowhere"]
    assert "publishes another hash" in result["problems"][0]["what"]
    assert scope.sent == {}


def test_a_source_that_is_gone_is_left_for_the_next(hub: Hub, site: Site) -> None:
    dead = {**hf(hub), "endpoint": "http://127.0.0.1:9", "name": "dead"}
    result = site.fetch(dead, hf(hub))
    assert result["ok"] and site.is_whole()
    assert result["sources"][0]["state"] == "failed"


def test_a_source_that_dies_midway_is_left_and_its_parts_go_on_elsewhere(
    hub: Hub, scope: Hub, site: Site
) -> None:
    size = len(hub.files[SHARD])
    hub.faults[SHARD] = [Fault("drop", at=size // 2), Fault("status", status=503, times=99)]
    result = site.fetch(hf(hub), ms(scope), patience=1)
    assert result["ok"] and site.is_whole()
    assert scope.requests == [(SHARD, f"bytes={BLOCK}-")]
    assert scope.sent[SHARD] == size - BLOCK


def test_a_moving_branch_is_pinned_to_one_commit(hub: Hub, site: Site) -> None:
    result = site.fetch({**hf(hub), "revision": "main"}, manifest=None)
    assert result["ok"]
    assert result["sources"][0]["revision"] == COMMIT


def test_an_unknown_revision_is_named(hub: Hub, site: Site) -> None:
    result = site.fetch({**hf(hub), "revision": "v0"}, manifest=None)
    assert ids(result) == ["source.none"]
    assert "revision" in result["problems"][0]["fix"]


def test_only_the_manifests_files_are_fetched(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.files["evil.py"] = b"import os\n"
    hub.files["README.md"] = b"# tiny\n"
    assert site.fetch(source)["ok"]
    assert site.is_whole()


def test_unwanted_files_are_left_out_by_pattern(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    hub.files["README.md"] = b"# tiny\n"
    hub.files[".gitattributes"] = b"*.safetensors filter=lfs\n"
    assert site.fetch(source, manifest=None, ignore=["*.md", ".gitattributes"])["ok"]
    assert site.is_whole()


def test_a_listing_that_escapes_the_folder_is_refused(hub: Hub, site: Site) -> None:
    hub.files["../../evil"] = b"x"
    result = site.fetch(hf(hub), manifest=None)
    assert ids(result) == ["source.none"]
    assert not (site.root / "evil").exists()


def test_counts_of_the_recipe_are_checked_at_the_end(hub: Hub, site: Site) -> None:
    result = site.fetch(hf(hub), shards=46)
    assert ids(result) == ["count.shards"]


def test_a_flipped_byte_on_the_disk_is_found_and_that_file_alone_is_fetched(
    any_hub: Served, site: Site
) -> None:
    hub, source = any_hub
    site.fetch(source)
    sent = sum(hub.sent.values())
    target = site.dest / SHARD
    target.chmod(0o644)
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert sum(hub.sent.values()) - sent == len(data)
    assert [r["source"] for r in result["rejected"]] == ["already there"]
    assert Path(result["rejected"][0]["kept_at"]).read_bytes() == bytes(data)


def test_a_shard_that_was_cut_off_on_the_disk_goes_on(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    site.dest.mkdir()
    half = hub.files[SHARD][:150_000]
    (site.dest / SHARD).write_bytes(half)
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []
    assert hub.sent[SHARD] == len(hub.files[SHARD]) - 150_000


def test_half_files_of_other_downloads_go_on_and_their_leftovers_are_set_aside(
    any_hub: Served, site: Site, content: dict[str, bytes]
) -> None:
    hub, source = any_hub
    download = site.dest / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    etag = hashlib.sha256(content[SHARD]).hexdigest()
    (download / f"x9Fq=.{etag}.incomplete").write_bytes(content[SHARD][:70_000])
    (download / "config.json.lock").touch()
    third = "model-00003-of-00004.safetensors"
    (site.dest / f"{third}.incomplete").write_bytes(content[third][:50_000])
    (site.dest / "unknown.incomplete").write_bytes(b"whatever this is")
    result = site.fetch(source)
    assert result["ok"]
    assert hub.sent[SHARD] == len(content[SHARD]) - 70_000
    assert hub.sent[third] == len(content[third]) - 50_000
    assert not (site.dest / ".cache").exists()
    kept = [p.read_bytes() for p in site.rejected.rglob("*") if p.is_file()]
    assert kept == [b"whatever this is"]


def test_a_part_of_another_revision_is_not_spliced(any_hub: Served, site: Site) -> None:
    hub, source = any_hub
    parts = site.work / "tiny" / "parts"
    parts.mkdir(parents=True)
    (parts / f"{SHARD}.incomplete").write_bytes(b"x" * 100_000)
    (parts / f"{SHARD}.incomplete.of").write_text("b" * 64)
    result = site.fetch(source)
    assert result["ok"] and site.is_whole()
    assert result["rejected"] == []
    assert hub.sent[SHARD] == len(hub.files[SHARD])


def test_listings_are_shown_without_a_download(
    any_hub: Served, site: Site, content: dict[str, bytes]
) -> None:
    hub, source = any_hub
    process = site.start(source, mode="list", dest=None, manifest=None, hash_small=10_000)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    files = json.loads(out)["sources"][0]["files"]
    assert {p: f["sha256"] for p, f in files.items()} == {
        p: hashlib.sha256(c).hexdigest() for p, c in content.items()
    }
    assert {p: f["size"] for p, f in files.items()} == {p: len(c) for p, c in content.items()}
    assert not any(name.endswith(".safetensors") for name, _ in hub.requests)
    assert not site.dest.exists()


def test_a_manifest_from_one_hub_proves_the_copy_of_the_other(hub: Hub, scope: Hub, site: Site) -> None:
    assert site.fetch(hf(hub), manifest=None, write_manifest=str(site.root / "hf.sha256"))["ok"]
    other = Site(site.root / "other", site.origin) if (site.root / "other").mkdir() is None else site
    result = other.fetch(ms(scope), manifest=str(site.root / "hf.sha256"))
    assert result["ok"]
    assert verify_weights.main([str(other.dest), "--manifest", str(site.root / "hf.sha256")]) == 0


def test_the_clients_that_are_tested_are_those_that_hosts_get() -> None:
    lock = (Path(__file__).parents[2] / "requirements" / "tools.lock").read_text()
    for name in ("huggingface-hub", "modelscope-hub"):
        assert f"\n{name}=={importlib.metadata.version(name)} " in lock
