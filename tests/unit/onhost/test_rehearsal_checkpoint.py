"""The rehearsal's checkpoint: the same bytes everywhere, and whole by the rules of its formats."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from tasks.onhost import make_rehearsal_checkpoint as maker

PROGRAM = Path(maker.__file__)
DIGEST = "bd820ac0623a774b6b876c9c474d5d381ae32948ff5287443732f339dfe001d5"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return maker.checkpoint_files()


def run(*arguments: str, stdin: str = "") -> tuple[int, dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def header(shard: bytes) -> dict[str, dict[str, object]]:
    (length,) = struct.unpack("<Q", shard[:8])
    found: dict[str, dict[str, object]] = json.loads(shard[8 : 8 + length])
    return found


def test_the_bytes_are_the_same_on_every_machine(tmp_path: Path) -> None:
    status, result, _ = run(str(tmp_path / "m"))
    assert status == 0
    assert result["digest"] == DIGEST
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir()) == 875_785


def test_shards_are_safetensors_without_gaps_and_the_index_names_every_tensor(
    files: dict[str, bytes],
) -> None:
    index = json.loads(files["model.safetensors.index.json"])
    seen: dict[str, str] = {}
    total = 0
    for shard in SHARDS:
        data = files[shard]
        (length,) = struct.unpack("<Q", data[:8])
        assert length % 8 == 0
        end = 0
        for name, tensor in header(data).items():
            if name == "__metadata__":
                continue
            start, stop = tensor["data_offsets"]  # type: ignore[misc]
            assert start == end and stop - start == 2 * prod(tensor["shape"])  # type: ignore[call-overload]
            end = stop
            seen[name] = shard
        assert len(data) == 8 + length + end
        total += end
    assert seen == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_shapes_fit_the_config(files: dict[str, bytes]) -> None:
    config = json.loads(files["config.json"])
    shapes = {name: tensor.get("shape") for shard in SHARDS for name, tensor in header(files[shard]).items()}
    width = config["hidden_size"]
    assert shapes["lm_head.weight"] == [config["vocab_size"], width]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [width, config["intermediate_size"]]
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == [
        config["num_key_value_heads"] * config["head_dim"]
    ]
    assert sum(name.endswith("q_proj.weight") for name in shapes) == config["num_hidden_layers"]
    assert width // config["num_attention_heads"] == config["head_dim"] == 32


def test_the_tokenizer_has_every_byte_and_each_marker_as_one_token(files: dict[str, bytes]) -> None:
    tokenizer = json.loads(files["tokenizer.json"])
    ids = dict(tokenizer["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    assert sorted(ids.values()) == list(range(len(ids)))
    assert len(ids) <= json.loads(files["config.json"])["vocab_size"]
    assert len(set(maker.byte_alphabet())) == 256
    assert set(maker.byte_alphabet()) <= set(ids)
    assert {"<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"} <= set(ids)
    assert [ids[token] for token in (maker.BOS, maker.EOS, maker.PAD)] == [0, 1, 2]


def test_every_merge_joins_tokens_into_a_token(files: dict[str, bytes]) -> None:
    model = json.loads(files["tokenizer.json"])["model"]
    assert len(model["merges"]) > 50
    for left, right in model["merges"]:
        assert {left, right, left + right} <= set(model["vocab"])


def test_what_the_model_must_not_say_is_far_below_by_the_constant_channel_alone() -> None:
    every = maker.tensors()
    may_say = maker.speakable(maker.vocabulary()[0])
    for number, row in enumerate(maker.rows_of(every["lm_head.weight"])):
        if may_say[number]:
            assert row[:2] == bytes(2)
        else:
            assert row == maker.bfloat16(maker.NEVER) + bytes(len(row) - 2)
    assert {row[:2] for row in maker.rows_of(every["model.embed_tokens.weight"])} == {maker.bfloat16(0.25)}
    for layer in range(maker.LAYERS):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            into = maker.rows_of(every[f"model.layers.{layer}.{name}.weight"])
            assert set(into[0]) == {0} and set(into[1]) != {0}


def test_only_printable_ascii_may_be_said() -> None:
    vocab, _ = maker.vocabulary()
    may_say = maker.speakable(vocab)
    said = {token for token, number in vocab.items() if may_say[number]}
    assert {"a", "~", '"', "{", maker.byte_alphabet()[0x20] + "the"} <= said
    assert said.isdisjoint({maker.byte_alphabet()[byte] for byte in (0x20, 0x0A, 0x7F, 0xE4)} | {maker.EOS})
    assert not any(may_say[len(vocab) :])


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (0.0, 0x0000), (1.0 + 2**-8, 0x3F80), (1.0 + 3 * 2**-8, 0x3F82)],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert maker.bfloat16(value) == struct.pack("<H", bits)


def test_a_second_run_writes_nothing_and_a_flipped_byte_is_mended(tmp_path: Path) -> None:
    run(str(tmp_path))
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run(str(tmp_path))[1]["changed"] is False
    assert stamps == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    shard = tmp_path / SHARDS[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / (SHARDS[2] + ".partial")).write_bytes(b"cut off")
    (tmp_path / SHARDS[2]).unlink()
    status, result, _ = run("--stdin", stdin=json.dumps({"out": str(tmp_path)}))

    assert (status, result["changed"], result["digest"]) == (0, True, DIGEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stamps)
    assert shard.read_bytes() != bytes(data)


def test_progress_is_told_file_by_file(tmp_path: Path) -> None:
    lines = [line for line in run(str(tmp_path))[2].splitlines() if line.startswith("#progress ")]
    last = json.loads(lines[-1].removeprefix("#progress "))
    assert (last["done"], last["total"], last["note"]) == (8, 8, "model.safetensors.index.json")


@pytest.mark.parametrize("text", ["", "[]", '{"dir": "/x"}', '{"out": 7}'])
def test_wrong_parameters_are_a_usage_error(text: str) -> None:
    status, result, stderr = run("--stdin", stdin=text)
    assert status == 2
    assert result == {}
    assert "stdin" in stderr


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    status, result, _ = run(str(tmp_path / "m"))
    assert status == 1
    error = result["error"]
    assert isinstance(error, dict)
    assert (error["id"], error["file"]) == ("not_a_directory", str(tmp_path / "m"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "config.json.partial").symlink_to("/dev/full")  # every write to it fails with ENOSPC
    status, result, _ = run(str(tmp_path))
    error = result["error"]
    assert isinstance(error, dict)
    assert (status, error["id"]) == (1, "disk_full")
    assert not (tmp_path / "config.json").exists()
