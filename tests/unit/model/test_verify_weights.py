"""The verifier against faults made by hand in tiny checkpoints: each is found and blamed on its file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.onhost import verify_weights as vw
from tests.weights.making import digests_of, make_checkpoint, shard_bytes, with_header

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoint"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def manifest(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model.sha256"
    path.write_text(vw.manifest_text(digests_of(model)))
    return path


def check(model: Path, **parameters: Any) -> dict[str, Any]:
    return vw.verify(vw.params_from({"dir": str(model), **{k: _plain(v) for k, v in parameters.items()}}))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def found(result: dict[str, Any]) -> set[tuple[str, str]]:
    return {(p["id"], p["file"]) for p in result["problems"]}


def test_a_whole_checkpoint_is_whole_with_and_without_a_manifest(model: Path, manifest: Path) -> None:
    for result in (check(model), check(model, manifest=manifest), check(model, headers_only=True)):
        assert result["whole"] is True
        assert result["problems"] == []
        assert (result["shards"], result["files"]) == (3, 10)
    assert check(model)["bytes"] == sum(p.stat().st_size for p in model.rglob("*") if p.is_file())


def test_the_digest_is_the_sha256_of_the_manifest_file(model: Path, manifest: Path) -> None:
    assert check(model)["digest"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert check(model, headers_only=True)["digest"] is None


def test_sha256sum_accepts_a_written_manifest_and_it_is_sorted(model: Path, tmp_path: Path) -> None:
    (model / "a \\ back\nslash").write_text("x")
    (model / "ü.txt").write_text("y")
    out = tmp_path / "out.sha256"
    assert check(model, write_manifest=out)["whole"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", str(out)], cwd=model, check=True)
    assert vw.read_manifest(str(out)) == digests_of(model)
    paths = list(vw.read_manifest(str(out)))
    assert paths == sorted(paths, key=os.fsencode)


def test_no_manifest_is_written_of_a_folder_that_is_not_whole(model: Path, tmp_path: Path) -> None:
    (model / FIRST).unlink()
    assert not check(model, write_manifest=tmp_path / "out.sha256")["whole"]
    assert not (tmp_path / "out.sha256").exists()


# ---- the faults, one by one: name of the test -> what is done -> (id, file) that must be found


def flip_a_byte_of_data(model: Path) -> None:
    content = bytearray((model / SECOND).read_bytes())
    content[-7] ^= 0x10
    (model / SECOND).write_bytes(content)


def swap_two_shards(model: Path) -> None:
    (model / FIRST).rename(model / "x")
    (model / SECOND).rename(model / FIRST)
    (model / "x").rename(model / SECOND)


def change_python_code(model: Path) -> None:
    (model / "encoding" / "encoding_dsv4.py").write_text("import os\n")


def add_python_code(model: Path) -> None:
    (model / "modeling_evil.py").write_text("import os\n")


def add_hidden_file(model: Path) -> None:
    (model / ".DS_Store").write_text("x")


def lose_a_plain_file(model: Path) -> None:
    (model / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (flip_a_byte_of_data, {("hash.differs", SECOND)}),
        (
            swap_two_shards,
            {
                ("hash.differs", FIRST),
                ("hash.differs", SECOND),
                ("shard.tensors", FIRST),
                ("shard.tensors", SECOND),
            },
        ),
        (change_python_code, {("hash.differs", "encoding/encoding_dsv4.py")}),
        (add_python_code, {("file.extra", "modeling_evil.py")}),
        (add_hidden_file, {("file.extra", ".DS_Store")}),
        (lose_a_plain_file, {("file.missing", "generation_config.json")}),
    ],
)
def test_the_manifest_finds(fault: Any, expected: set[tuple[str, str]], model: Path, manifest: Path) -> None:
    fault(model)
    result = check(model, manifest=manifest)
    assert not result["whole"]
    assert found(result) == expected


def test_a_hash_that_differs_is_shown_with_both_values(model: Path, manifest: Path) -> None:
    wanted = digests_of(model)[SECOND]
    flip_a_byte_of_data(model)
    (problem,) = check(model, manifest=manifest)["problems"]
    assert wanted in problem["what"]
    assert digests_of(model)[SECOND] in problem["what"]
    assert "fetch" in problem["fix"]


def header_of(length: int) -> Any:
    def fault(model: Path) -> None:
        content = (model / FIRST).read_bytes()
        (model / FIRST).write_bytes(struct.pack("<Q", length) + content[8:])

    return fault


def cut_to(size: int) -> Any:
    def fault(model: Path) -> None:
        (model / FIRST).write_bytes((model / FIRST).read_bytes()[:size])

    return fault


def append_bytes(model: Path) -> None:
    with (model / FIRST).open("ab") as f:
        f.write(b"\0" * 8)


def write_first(content: bytes) -> Any:
    def fault(model: Path) -> None:
        (model / FIRST).write_bytes(content)

    return fault


def tensor(begin: Any, end: Any, shape: Any = (4,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (header_of(2**63), "9223372036854775808"),
        (header_of(2**64 - 1), "claims"),
        (header_of(100_000_001), "format allows"),
        (header_of(99_999_999), "truncated inside the header"),
        (header_of(2), "not JSON"),
        (cut_to(3), "no header"),
        (cut_to(40), "truncated inside the header"),
        (cut_to(-1), "1 of the tensors' 256 bytes are missing"),
        (append_bytes, "8 bytes follow the last tensor"),
        (write_first(b"<!DOCTYPE html><html>429 Too Many Requests</html>"), "web page"),
        (write_first(with_header([1], b"")), "not a JSON object"),
        (write_first(with_header({"a": tensor(0, 5)}, b"12345")), "does not take"),
        (write_first(with_header({"a": tensor(0, 4), "b": tensor(8, 12)}, b"1" * 12)), "begins at 8"),
        (write_first(with_header({"a": tensor(0, 4), "b": tensor(2, 6)}, b"1" * 6)), "begins at 2"),
        (write_first(with_header({"a": tensor(4, 0)}, b"")), "no usable"),
        (write_first(with_header({"a": tensor(True, 4)}, b"1234")), "no usable"),
        (write_first(with_header({"a": tensor(0, 4, shape=[-4, -1])}, b"1234")), "no usable"),
        (write_first(with_header({"a": tensor(0, 4, shape="four")}, b"1234")), "no usable"),
        (write_first(with_header({"a": {"dtype": "U8"}}, b"")), "no usable"),
        (write_first(with_header({"a": tensor(0, 1, dtype="F4", shape=[3])}, b"1")), "does not take"),
        (write_first(struct.pack("<Q", 200_000) + b"[" * 200_000), "not JSON"),
    ],
)
def test_a_bad_header_is_found_without_hashes(fault: Any, words: str, model: Path) -> None:
    fault(model)
    result = check(model, headers_only=True)
    assert not result["whole"]
    (problem,) = [p for p in result["problems"] if p["file"] == FIRST]
    assert problem["id"] == "shard.header"
    assert words in problem["what"]


def test_a_header_that_claims_two_to_the_63_costs_no_memory(model: Path) -> None:
    header_of(2**63)(model)
    entry = vw.scan(str(model)).files[FIRST]
    assert len(vw.read_head(entry, 8 + 200)) <= 208
    assert vw.read_header(entry).wrong


@pytest.mark.parametrize("dtype", sorted(vw.DTYPE_BITS))
def test_every_dtype_of_the_format_takes_its_bits(dtype: str) -> None:
    size = vw.DTYPE_BITS[dtype]  # 8 elements take as many bytes as one has bits
    raw = shard_bytes({"t": (dtype, [2, 4], b"\0" * size)})
    header = vw.parse_header(raw, len(raw))
    assert header.wrong == ()
    assert header.tensor_bytes == size


def test_an_unknown_dtype_is_a_note_and_its_offsets_are_still_checked(model: Path) -> None:
    good = with_header({"layers.1.w0.weight": tensor(0, 4, dtype="F2_NEW")}, b"1234")
    assert vw.parse_header(good, len(good)).unknown_dtypes == ("F2_NEW",)
    assert vw.parse_header(good, len(good)).wrong == ()
    assert vw.parse_header(good, len(good) - 1).wrong


def test_an_empty_tensor_and_padding_are_allowed() -> None:
    raw = with_header({"a": tensor(0, 0, shape=[0, 7]), "b": tensor(0, 4)}, b"1234")
    assert vw.parse_header(raw, len(raw)).wrong == ()


def test_random_headers_never_raise() -> None:
    rng = random.Random(63)
    good = shard_bytes({f"t{i}": ("BF16", [8], b"\0" * 16) for i in range(4)})
    bad = 0
    for _ in range(2000):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw) - 64)] = rng.randrange(256)
        header = vw.parse_header(bytes(raw), len(raw) - rng.choice([0, 0, 0, 5]))
        bad += bool(header.wrong)
    assert bad > 1000


# ---- index and files


def test_a_shard_that_the_index_names_and_is_missing(model: Path) -> None:
    (model / SECOND).unlink()
    assert found(check(model)) == {("shard.missing", SECOND)}


def test_a_shard_that_no_index_names(model: Path) -> None:
    (model / "model-00004-of-00003.safetensors").write_bytes((model / FIRST).read_bytes())
    assert found(check(model)) == {("shard.extra", "model-00004-of-00003.safetensors")}


def test_an_extra_shard_in_a_subfolder_is_found_too(model: Path) -> None:
    (model / "old").mkdir()
    shutil.copy(model / FIRST, model / "old" / FIRST)
    assert found(check(model)) == {("shard.extra", f"old/{FIRST}")}


def test_an_index_may_name_shards_in_subfolders(model: Path) -> None:
    (model / "mtp").mkdir()
    (model / SECOND).rename(model / "mtp" / "draft.safetensors")
    index = json.loads((model / INDEX).read_text())
    renamed = {t: "mtp/draft.safetensors" if s == SECOND else s for t, s in index["weight_map"].items()}
    (model / INDEX).write_text(json.dumps({**index, "weight_map": renamed}))
    assert check(model)["whole"]
    (model / "mtp" / "draft.safetensors").unlink()
    assert found(check(model)) == {("shard.missing", "mtp/draft.safetensors")}


def test_an_index_in_a_subfolder_speaks_of_that_folder(model: Path) -> None:
    make_checkpoint(model / "draft", shards=2, seed=9)
    assert check(model)["shards"] == 5
    assert check(model)["whole"]
    (model / "draft" / "model-00002-of-00002.safetensors").unlink()
    assert found(check(model)) == {("shard.missing", "draft/model-00002-of-00002.safetensors")}


def test_an_index_that_points_outside_is_refused(model: Path) -> None:
    (model / INDEX).write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert ("index.unreadable", INDEX) in found(check(model))


def test_shards_without_an_index(model: Path) -> None:
    (model / INDEX).unlink()
    assert found(check(model)) == {("index.missing", INDEX)}


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", shards=1)
    (tmp_path / "m" / INDEX).unlink()
    assert check(tmp_path / "m")["whole"]


def test_fifteen_of_thirty_shards_are_called_an_old_index(model: Path) -> None:
    listing = (FIXTURES / "listing-15-of-30-shards.txt").read_text().split()[1::2]
    index = {"weight_map": {f"t{i}": f"model-{i:05d}-of-00030.safetensors" for i in range(1, 31)}}
    for path in model.glob("*.safetensors"):
        path.unlink()
    for i, name in enumerate(n for n in listing if n.endswith(".safetensors")):
        (model / name).write_bytes(shard_bytes({f"t{i}": ("U8", [1], b"1")}))
    (model / INDEX).write_text(json.dumps(index))
    result = check(model)
    ids = [p["id"] for p in result["problems"]]
    assert (ids.count("shard.missing"), ids.count("shard.extra")) == (30, 15)
    assert "names 30 shards and 15 others are here" in result["problems"][-1]["what"]


@pytest.mark.parametrize(
    ("name", "shards", "total"),
    [
        ("index-devstral-head.json", 2, 47144806400),
        ("index-no-metadata-key.json", 7, None),
        ("index-odd-shard-names.json", 12, 6425499648),
        ("index-total-size-wrong.json", 7, 37087995136),
    ],
)
def test_indexes_of_the_field_are_read(name: str, shards: int, total: int | None) -> None:
    index = vw.parse_index(json.loads((FIXTURES / name).read_text()), INDEX)
    assert (len(index.shards), index.total_size) == (shards, total)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "/x"}}',
        "NaN",
    ],
)
def test_an_index_that_is_none_is_named(text: str, model: Path) -> None:
    (model / INDEX).write_text(text)
    ids = {i for i, f in found(check(model)) if f == INDEX}
    assert "index.unreadable" in ids


@pytest.mark.parametrize("total", [None, "768", 768, "unknown", {}, 1e400])
def test_a_total_size_that_is_right_or_unusable_is_no_problem(total: Any, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["metadata"]["total_size"] = total
    (model / INDEX).write_text(json.dumps(index))
    assert check(model)["whole"]


def test_a_wrong_total_size_is_a_problem_and_with_a_manifest_a_note(model: Path, tmp_path: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["metadata"]["total_size"] = "37087995136"
    (model / INDEX).write_text(json.dumps(index))
    assert found(check(model)) == {("index.total", INDEX)}
    manifest = tmp_path / "published.sha256"
    manifest.write_text(vw.manifest_text(digests_of(model)))
    result = check(model, manifest=manifest)
    assert result["whole"]
    assert any("37087995136" in note for note in result["notes"])


def test_swapped_shards_are_found_without_any_manifest(model: Path) -> None:
    swap_two_shards(model)
    assert found(check(model, headers_only=True)) == {("shard.tensors", FIRST), ("shard.tensors", SECOND)}


# ---- other files


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_document_that_does_not_parse_is_named(name: str, model: Path) -> None:
    (model / name).write_text('{"a": ')
    assert found(check(model)) == {("json.unreadable", name)}


def test_an_error_page_in_place_of_a_config_is_called_that(model: Path) -> None:
    (model / "config.json").write_text("<html><body>502 Bad Gateway</body></html>")
    assert "web page" in check(model)["problems"][0]["what"]


def test_missing_config_and_tokenizer(model: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert found(check(model)) == {("config.missing", "config.json"), ("tokenizer.missing", "tokenizer.json")}


@pytest.mark.parametrize(
    ("path", "id"),
    [
        (".cache/huggingface/download/x9F=.abc.incomplete", "leftover.incomplete"),
        (".cache/huggingface/download/encoding/x9F=.abc.incomplete", "leftover.incomplete"),
        (".cache/huggingface/download/config.json.lock", "leftover.lock"),
        (".lock/model_1234.lock", "leftover.lock"),
        ("._____temp/model-00001-of-00003.safetensors", "leftover.temp"),
        ("model-00002-of-00003.safetensors.incomplete", "leftover.incomplete"),
        ("model-00002-of-00003.safetensors.aria2", "leftover.temp"),
        (".model-00002-of-00003.safetensors.Xa3b9Q", "leftover.temp"),
        ("model-00002-of-00003.safetensors_0_167772159", "leftover.temp"),
        ("model-00002-of-00003.safetensors.parallel_tmp", "leftover.temp"),
        (".config.json.0a1b2c3d.new", "leftover.temp"),
    ],
)
def test_leftovers_of_clients_are_found_anywhere(path: str, id: str, model: Path, manifest: Path) -> None:
    (model / path).parent.mkdir(parents=True, exist_ok=True)
    (model / path).write_bytes(b"half")
    for result in (check(model), check(model, manifest=manifest), check(model, headers_only=True)):
        assert found(result) == {(id, path)}


def test_what_the_clients_keep_for_themselves_is_neither_counted_nor_a_problem(
    model: Path, manifest: Path
) -> None:
    before = check(model)
    kept = [
        ".cache/huggingface/.gitignore",
        ".cache/huggingface/download/config.json.metadata",
        ".msc",
        ".mdl",
        ".mv",
    ]
    for path in kept:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        (model / path).write_text("x")
    for result in (check(model), check(model, manifest=manifest)):
        assert result["whole"]
        assert (result["files"], result["digest"]) == (before["files"], before["digest"])


def test_an_lfs_pointer_is_called_by_its_name(model: Path) -> None:
    shutil.copy(FIXTURES / "lfs-pointer-instead-of-shard.safetensors.txt", model / FIRST)
    (problem,) = check(model)["problems"]
    assert (problem["id"], problem["file"]) == ("lfs.pointer", FIRST)
    assert "14343d33a5e7684a168735a2c613834ba6222d34e95f8cb126eda01a8fa608c2, 5.4 GB" in problem["what"]


def test_an_empty_shard_is_found_and_an_empty_init_is_not(model: Path) -> None:
    (model / FIRST).write_bytes(b"")
    assert found(check(model)) == {("file.empty", FIRST)}


def test_hidden_files_are_found_without_a_manifest(model: Path) -> None:
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (model / ".secret").mkdir()
    (model / ".secret" / "x.py").write_text("import os\n")
    assert found(check(model)) == {("file.hidden", ".secret/x.py")}


def test_files_that_the_caller_ignores_are_neither_wanted_nor_counted(model: Path, manifest: Path) -> None:
    (model / "configuration.json").write_text("{}")
    (model / "generation_config.json").unlink()
    assert not check(model, manifest=manifest)["whole"]
    assert check(model, manifest=manifest, ignore=["configuration.json", "generation_config.json"])["whole"]


# ---- links and special files


def test_links_inside_the_folder_are_followed(model: Path, manifest: Path) -> None:
    (model / "blobs").mkdir()
    (model / FIRST).rename(model / "blobs" / "b1")
    (model / FIRST).symlink_to("blobs/b1")
    assert found(check(model, manifest=manifest)) == {("file.extra", "blobs/b1")}


def test_a_link_out_of_the_folder_is_a_problem_unless_announced(
    model: Path, manifest: Path, tmp_path: Path
) -> None:
    shutil.move(model / FIRST, tmp_path / "elsewhere")
    (model / FIRST).symlink_to(tmp_path / "elsewhere")
    assert ("link.outside", FIRST) in found(check(model, manifest=manifest))
    result = check(model, manifest=manifest, follow_links=True)
    assert result["whole"]
    assert result["notes"] == ["links that lead out of the folder and were followed: 1"]


def test_a_neighbour_whose_name_begins_alike_is_outside(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model-2").mkdir()
    (tmp_path / "model-2" / "x").write_text("x")
    (model / "x").symlink_to(tmp_path / "model-2" / "x")
    assert found(check(model)) == {("link.outside", "x")}


def test_broken_links_loops_and_pipes_are_named_and_nothing_hangs(model: Path) -> None:
    (model / "gone.json").symlink_to("nowhere")
    (model / "again").symlink_to(".")
    os.mkfifo(model / "pipe.json")
    assert found(check(model)) == {
        ("link.broken", "gone.json"),
        ("link.loop", "again"),
        ("file.special", "pipe.json"),
    }


def test_a_folder_that_is_itself_a_link_is_fine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(model)
    assert check(tmp_path / "current")["whole"]


# ---- counts


def test_counts_and_bytes_are_compared_with_what_is_expected(model: Path) -> None:
    total = check(model)["bytes"]
    assert check(model, shards=3, files=10, bytes=total)["whole"]
    assert check(model, bytes=int(total * 1.009))["whole"]
    result = check(model, shards=46, files=55, bytes=int(total * 1.02))
    assert [p["id"] for p in result["problems"]] == ["count.bytes", "count.files", "count.shards"]
    assert not check(model, bytes=total + 1, bytes_within=0)["whole"]


# ---- stamps


def test_unchanged_files_are_not_read_again(model: Path, manifest: Path, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    first = check(model, manifest=manifest, stamp=stamp)
    assert (first["hashed_bytes"], first["reused"]) == (first["bytes"], 0)
    second = check(model, manifest=manifest, stamp=stamp)
    assert (second["hashed_bytes"], second["reused"]) == (0, 10)
    assert second["whole"]
    assert second["digest"] == first["digest"]


def test_a_stamp_does_not_hide_a_changed_file(model: Path, manifest: Path, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp.json"
    check(model, manifest=manifest, stamp=stamp)
    flip_a_byte_of_data(model)
    result = check(model, manifest=manifest, stamp=stamp)
    assert found(result) == {("hash.differs", SECOND)}
    assert result["reused"] == 9


def test_full_finds_a_changed_byte_behind_an_unchanged_size_and_time(
    model: Path, manifest: Path, tmp_path: Path
) -> None:
    stamp = tmp_path / "stamp.json"
    check(model, manifest=manifest, stamp=stamp)
    before = (model / SECOND).stat()
    flip_a_byte_of_data(model)
    os.utime(model / SECOND, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert check(model, manifest=manifest, stamp=stamp)["whole"]
    assert found(check(model, manifest=manifest, stamp=stamp, full=True)) == {("hash.differs", SECOND)}
    # and what the full look saw is remembered
    assert found(check(model, manifest=manifest, stamp=stamp)) == {("hash.differs", SECOND)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "root": "/", "files": 3}'])
def test_a_stamp_that_is_damaged_or_of_another_folder_counts_as_none(
    text: str, model: Path, tmp_path: Path
) -> None:
    stamp = tmp_path / "stamp.json"
    stamp.write_text(text)
    assert check(model, stamp=stamp)["reused"] == 0
    assert check(model, stamp=stamp)["reused"] == 10


def test_nothing_is_written_into_the_model_folder(model: Path, manifest: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in [model, *model.rglob("*")]}
    check(model, manifest=manifest)
    check(model, manifest=manifest, stamp=tmp_path / "s.json")
    assert {p: p.stat().st_mtime_ns for p in [model, *model.rglob("*")]} == before
    with pytest.raises(vw.Usage, match="must not lie in the folder"):
        check(model, stamp=model / "stamp.json")


def test_a_file_that_changes_while_it_is_read_is_not_trusted(model: Path) -> None:
    entry = vw.scan(str(model)).files[SECOND]

    def meanwhile(_: int) -> None:
        os.utime(model / SECOND, ns=(1, 1))

    with pytest.raises(OSError, match="changed while"):
        vw.hash_file(entry, meanwhile)


# ---- manifests


@pytest.mark.parametrize(
    "line",
    [
        "zz  a",
        f"{'0' * 64}",
        f"{'0' * 63}  a",
        f"{'0' * 64}  ../a",
        f"{'0' * 64}  /a",
        f"{'0' * 64}  a//b",
        "",
    ],
)
def test_a_bad_manifest_is_wrong_usage(line: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(line + "\n")
    with pytest.raises(vw.Usage, match="manifest"):
        check(model, manifest=tmp_path / "bad")


def test_manifests_of_other_tools_are_read() -> None:
    zero = "0" * 64
    text = f"# model x at revision y\r\n\r\n{zero.upper()} *./a b.json\r\n{zero}  c\n"
    assert vw.parse_manifest(text.replace("0", "a")) == {"a b.json": "a" * 64, "c": "a" * 64}
    with pytest.raises(ValueError, match="listed twice"):
        vw.parse_manifest(f"{zero}  a\n{'1' * 64}  a\n")


# ---- the program


def program(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    path = Path(vw.__file__)
    return subprocess.run(
        [sys.executable, "-I", str(path), *argv], input=stdin, capture_output=True, text=True, timeout=60
    )


def test_exit_codes_tell_the_truth(model: Path, manifest: Path) -> None:
    assert program(str(model), "--manifest", str(manifest)).returncode == 0
    flip_a_byte_of_data(model)
    bad = program(str(model), "--manifest", str(manifest))
    assert bad.returncode == 1
    assert bad.stdout.startswith("NOT WHOLE (1 problem)")
    assert SECOND in bad.stdout
    for argv in (["/nowhere"], [], [str(model), "--manifest", "/nowhere"], [str(model), "--no-such-option"]):
        assert program(*argv).returncode == 2


def test_stdin_takes_json_and_stdout_holds_one_document(model: Path, manifest: Path) -> None:
    done = program("--stdin", stdin=json.dumps({"dir": str(model), "manifest": str(manifest), "threads": 2}))
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["whole"] and result["compared"]
    assert all(line.startswith("#progress {") for line in done.stderr.splitlines())
    last = json.loads(done.stderr.splitlines()[-1].removeprefix("#progress "))
    assert last["done"] == last["total"] == result["bytes"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"dir": "/", "mainfest": "x"}, "unknown parameter mainfest"),
        ({"dir": 3}, "not of the right kind"),
        ({"dir": "/", "threads": True}, "not of the right kind"),
        ({"dir": "/", "threads": 1000}, "threads"),
        ({}, "dir is missing"),
        ([], "one JSON object"),
    ],
)
def test_wrong_parameters_are_named(parameters: Any, words: str) -> None:
    done = program("--stdin", stdin=json.dumps(parameters))
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_names_that_are_not_utf8_do_not_break_the_program(model: Path) -> None:
    with open(os.fsencode(model) + b"/\xff\xfe.bin", "wb") as f:  # noqa: PTH123
        f.write(b"x")
    assert program(str(model)).returncode == 0
    assert json.loads(program(str(model), "--json").stdout)["files"] == 11


def test_the_report_for_a_person_is_short_even_with_many_problems() -> None:
    problem = {"id": "shard.missing", "file": "f", "what": "w", "fix": "x"}
    result = {
        "whole": False, "dir": "/m", "shards": 0, "files": 0, "bytes": 0, "seconds": 0.0, "hashed_bytes": 0,
        "reused": 0, "digest": None, "compared": False, "problems": [problem] * 30, "notes": [],
    }  # fmt: skip
    text = vw.render(result)
    assert "and 20 more" in text
    assert len(text.splitlines()) == 32


@pytest.mark.slow
def test_memory_stays_flat_for_any_size_of_shard(tmp_path: Path) -> None:
    big = tmp_path / "sparse"
    with big.open("wb") as f:
        f.truncate(600_000_000)
    code = (
        "import re, sys; sys.path.insert(0, sys.argv[1]); import verify_weights as v\n"
        "s = v.scan(sys.argv[2]); v.hash_file(s.files['sparse'])\n"
        # not ru_maxrss, which a process inherits from the one that started it
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()).group(1))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(Path(vw.__file__).parent), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 100_000  # kB


def test_progress_prints_at_most_two_lines_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    progress = vw.Progress("hash", 1000, "bytes")
    for _ in range(1000):
        progress.add(1, "x")
    progress.close()
    lines = err.getvalue().splitlines()
    assert len(lines) <= 2
    assert json.loads(lines[-1].removeprefix("#progress "))["done"] == 1000
