"""The rehearsal's checkpoint: the same bytes everywhere, and whole by the rules of its formats."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from tasks.onhost import make_rehearsal_checkpoint as maker

PROGRAM = Path(maker.__file__)
DIGEST = "615332ef8d730849b3821278e818de64637e9f775cfcdd55b483d0708fd57ba9"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return maker.checkpoint_files(*maker.read_weights(maker.WEIGHTS))


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
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir()) == 1_577_495


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
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], width]
    assert config["tie_word_embeddings"] is True and "lm_head.weight" not in shapes
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [width, config["intermediate_size"]]
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == [
        config["num_key_value_heads"] * config["head_dim"]
    ]
    assert sum(name.endswith("q_proj.weight") for name in shapes) == config["num_hidden_layers"]
    heads = shapes["model.layers.1.self_attn.q_proj.weight"][0] // config["head_dim"]  # type: ignore[index]
    assert (config["num_attention_heads"], config["head_dim"]) == (heads, 32)


def test_the_tokenizer_has_every_byte_and_each_marker_as_one_token(files: dict[str, bytes]) -> None:
    tokenizer = json.loads(files["tokenizer.json"])
    ids = dict(tokenizer["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    assert sorted(ids.values()) == list(range(len(ids)))
    assert len(ids) == json.loads(files["config.json"])["vocab_size"]
    assert len(set(maker.byte_alphabet())) == 256
    assert set(maker.byte_alphabet()) <= set(ids)
    assert {"<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"} <= set(ids)
    assert [ids[token] for token in (maker.BOS, maker.EOS, maker.PAD)] == [0, 1, 2]


def test_words_are_tokens_and_keys_are_spelt_letter_by_letter(files: dict[str, bytes]) -> None:
    vocab = json.loads(files["tokenizer.json"])["model"]["vocab"]
    alphabet = maker.byte_alphabet()

    def token(word: str) -> str:
        return "".join(alphabet[byte] for byte in word.encode())

    assert {token(word) for word in ("weather", "open", "北", "京", *maker.PHRASES)} <= set(vocab)
    assert not any(token(word) in vocab for word in ("PD", "TQ", "LINGXI", "ZHIMA", "龘", "😀"))


def test_the_split_finds_phrases_first_and_loses_nothing() -> None:
    text = (
        '{"name": "a", "description": "list 12", "parameters": {"type": "object", "properties": {"好人\n\n x'
    )
    pieces = re.findall(maker.split_pattern(), text)
    assert "".join(pieces) == text
    assert pieces[5] == maker.PHRASES[0] and maker.PHRASES[1] in pieces
    assert pieces[6:10] == ["list", " ", "1", "2"] and pieces[-4:] == ["好", "人", "\n\n ", "x"]


def test_the_shards_hold_the_taught_weights_to_the_byte(files: dict[str, bytes]) -> None:
    taught, _ = maker.read_weights(maker.WEIGHTS)
    for shard in SHARDS:
        data = files[shard]
        (length,) = struct.unpack("<Q", data[:8])
        for name, tensor in header(data).items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]  # type: ignore[misc]
                assert data[8 + length + start : 8 + length + stop] == taught.pop(name)[1]
    assert taught == {}


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "words", "missing"])
def test_damaged_weights_are_named_and_nothing_is_written(tmp_path: Path, damage: str) -> None:
    program = tmp_path / PROGRAM.name
    program.write_bytes(PROGRAM.read_bytes())
    weights = program.with_suffix(".safetensors")
    whole = Path(maker.WEIGHTS).read_bytes()
    content = {
        "cut": whole[:-1],
        "empty": b"",
        "header": whole[:8] + b"x" + whole[9:],
        "words": whole.replace(b'"words"', b'"wards"'),
    }
    if damage in content:
        weights.write_bytes(content[damage])
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "m")], capture_output=True, text=True, check=False
    )
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert (error["id"], error["file"]) == ("weights", str(weights))
    assert not (tmp_path / "m").exists()


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
