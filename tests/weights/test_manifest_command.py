"""`rackwright manifest RECIPE`: the hubs' own clients against local hubs, files, folders and the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.recipe import load_recipe
from tests.weights.conftest import Site
from tests.weights.making import digests_of
from tests.weights.servers import COMMIT, REPO, TOKEN, Hub, running

SHARD = "model-00002-of-00004.safetensors"
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def recipe(site: Site, tmp_path: Path) -> Path:
    """The rehearsal's recipe for the tiny model of the hubs, without a manifest."""
    text = Path(load_recipe("rehearsal-cpu").file).read_text()
    lock = load_recipe("rehearsal-cpu").file.parent / "locks"
    total = sum(p.stat().st_size for p in site.origin.rglob("*") if p.is_file())
    for old, new in (
        ('manifest = "manifests/rehearsal-cpu.sha256"\n', ""),
        ("shards = 3", "shards = 4"),
        (f"bytes = {load_recipe('rehearsal-cpu').model.bytes:_}", f"bytes = {total}"),
        ('[model.sources.generate]\nprogram = "make_rehearsal_checkpoint.py"\n', "[model.sources]\n"
         f'huggingface = {{ repo = "{REPO}", revision = "{COMMIT}" }}\n'
         f'modelscope = {{ repo = "{REPO}", revision = "v1" }}\n'),
        ('lock = "locks/', f'lock = "{lock}/'),
    ):  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return path


@pytest.fixture
def command(site: Site, recipe: Path, hub: Hub, scope: Hub) -> Command:
    """Run the command for the recipe and both hubs."""

    def run(*words: str, rc: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", "from tasks.cli import main; main()", "manifest", str(recipe), *words,
             "--data", f"hub_endpoint={hub.url}", "--data", f"modelscope_endpoint={scope.url}"],
            capture_output=True, text=True, cwd=site.root, env={**site.environment(), **environment},
        )  # fmt: skip
        assert done.returncode == rc, done.stdout + done.stderr
        return done

    return run


def test_hubs_that_agree_are_kept_beside_the_recipe_as_sha256sum_reads_it(
    command: Command, recipe: Path, site: Site
) -> None:
    done = command("--write")
    assert "agree on 11 files" in done.stdout
    assert 'manifest = "manifests/tiny.sha256"' in done.stdout
    written = recipe.parent / "manifests" / "tiny.sha256"
    assert written.read_text() == site.manifest.read_text()
    checked = subprocess.run(["sha256sum", "--check", "--quiet", written], cwd=site.origin, check=False)
    assert checked.returncode == 0


def test_an_answer_of_thousands_of_files_is_read_to_its_end(
    command: Command, hub: Hub, scope: Hub, site: Site
) -> None:
    """Longer than a pipe holds, while its progress is still being read."""
    for server in (hub, scope):
        server.files |= {f"more/{number:05d}.safetensors": b"x" * 500 for number in range(2000)}
    done = command("huggingface", "modelscope", "-o", "-")
    assert len(done.stdout.splitlines()) == 2011


def test_addresses_of_the_terminals_environment_are_not_asked(
    command: Command, recipe: Path, hub: Hub, content: dict[str, bytes]
) -> None:
    with running(content, "huggingface") as elsewhere:
        command("huggingface", HF_ENDPOINT=elsewhere.url, HF_HUB_OFFLINE="1")
    assert not elsewhere.seen_tokens and hub.seen_tokens


def test_small_files_without_a_published_hash_are_fetched_and_held_against_their_git_id(
    command: Command, hub: Hub, site: Site
) -> None:
    done = command("huggingface", "-o", "-")
    assert done.stdout == site.manifest.read_text()
    assert SHARD not in hub.sent
    assert set(hub.sent) >= {"config.json", "tokenizer.json", "encoding/encoding_dsv4.py"}


def test_a_hash_that_nobody_publishes_and_that_is_not_fetched_is_named_and_nothing_is_written(
    command: Command, recipe: Path
) -> None:
    done = command("huggingface", "--hash-below", "0", "--write", rc=1)
    assert "config.json: nobody publishes its SHA-256" in done.stdout
    assert not (recipe.parent / "manifests").exists()


def test_the_second_source_adds_the_hashes_that_the_first_lacks(
    command: Command, hub: Hub, site: Site
) -> None:
    done = command("huggingface", "modelscope", "--hash-below", "0", "-o", "-")
    assert done.stdout == site.manifest.read_text()
    assert dict(hub.sent) == {}


def test_two_sources_that_disagree_are_shown_file_by_file_and_nothing_is_written(
    command: Command, recipe: Path, scope: Hub, site: Site
) -> None:
    scope.lies[SHARD] = {"Sha256": "a" * 64}
    scope.lies["config.json"] = {"Size": 7}
    scope.files["more.py"] = b"x = 1\n"
    scope.unlisted.add("generation_config.json")
    done = command("--write", rc=1)
    digests = digests_of(site.origin)
    assert "differ in 4 files" in done.stdout
    assert f"{SHARD}: {digests[SHARD]} in huggingface" in done.stdout and "a" * 64 in done.stdout
    assert "  config.json: " in done.stdout and "7 in modelscope" in done.stdout
    assert "more.py: only in modelscope" in done.stdout
    assert "generation_config.json: only in huggingface" in done.stdout
    assert "nothing was written" in done.stderr
    assert not (recipe.parent / "manifests").exists()


def test_a_manifest_that_the_recipe_has_is_compared_with_what_the_hubs_say_now(
    command: Command, recipe: Path, hub: Hub, scope: Hub
) -> None:
    command("--write")
    recipe.write_text(
        recipe.read_text().replace("[model]\n", '[model]\nmanifest = "manifests/tiny.sha256"\n')
    )
    assert "the recipe's manifests/tiny.sha256" in command().stdout
    for server in (hub, scope):
        server.files["config.json"] = b'{"architectures": ["Other"]}\n'
    done = command(rc=1)
    assert "differ in 1 file" in done.stdout and "config.json" in done.stdout
    command("--write")
    command()


def test_a_verified_copy_makes_one_too_and_a_bad_copy_does_not(
    command: Command, site: Site, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.origin, copy)
    (copy / "README.md").write_text("# not served\n")
    done = command(str(copy), "-o", "-")
    assert done.stdout == site.manifest.read_text()
    assert "README.md" in command(str(copy), "--all", "-o", "-").stdout
    os.truncate(copy / SHARD, 1_000_000)
    bad = command(str(copy), "--write", rc=1)
    assert "not whole" in bad.stdout and SHARD in bad.stdout


def test_a_copy_of_a_host_is_compared_with_what_a_hub_publishes(
    command: Command, site: Site, tmp_path: Path
) -> None:
    host = tmp_path / "host.sha256"
    digests = digests_of(site.origin)
    host.write_text("".join(f"{d if p != SHARD else 'b' * 64}  {p}\n" for p, d in sorted(digests.items())))
    done = command("modelscope", str(host), rc=1)
    assert "differ in 1 file" in done.stdout and SHARD in done.stdout and "b" * 64 in done.stdout


def test_a_hub_that_does_not_answer_is_said_so_with_its_cure_and_ends_with_1(
    command: Command, recipe: Path, hub: Hub
) -> None:
    hub.token = TOKEN
    done = command("--write", rc=1)
    assert "401" in done.stdout and "token" in done.stdout
    assert not (recipe.parent / "manifests").exists()
    command("--write", HF_TOKEN=TOKEN)
    assert TOKEN not in done.stdout + done.stderr


def test_numbers_of_the_recipe_that_do_not_fit_are_said(command: Command, recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("shards = 4", "shards = 46"))
    assert "the recipe says shards = 46, 4 are listed" in command().stdout


def test_the_rehearsals_manifest_is_what_its_program_writes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tasks.cli import main; main()", "manifest", "rehearsal-cpu"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree on 8 files" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ftp"], "no source"),
        (["--data", "hub_endpont=x"], "did you mean 'hub_endpoint'?"),
        (["--data", "nothing"], "KEY=VALUE"),
        (["s3"], "does not pin s3"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_right(
    words: list[str], message: str, command: Command
) -> None:
    assert message in command(*words, rc=2).stderr


def test_help_tells_both_forms(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tasks.cli import main; main()", "manifest", "--help"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert "RECIPE" in done.stdout and "INVENTORY" in done.stdout and "exit codes" in done.stdout
