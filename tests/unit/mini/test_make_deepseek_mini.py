"""The small DeepSeek-V4 checkpoint: names, types and shapes of the real one; the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from tasks.onhost import make_deepseek_mini as maker

PROGRAM = Path(maker.__file__)
TINY = maker.Dims(
    hidden=256, layers=3, heads=2, head_dim=128, rope_dim=64, q_lora=128, o_lora=128, o_groups=1, experts=8,
    top=6, moe=128, hash_layers=1, hc=4, index_heads=2, index_dim=128, index_top=64, vocab=1024,
    compress=(0, 4, 128, 0),
)  # fmt: skip
DIGEST = "bff27bb5fe65137abd0f5a1f9e87c1e9a4e156c7bdf2adfc3706d7a9655724dc"
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


@pytest.fixture(scope="module")
def noise() -> maker.Noise:
    return maker.Noise()


@pytest.fixture(scope="module")
def folder(noise: maker.Noise, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mini")
    assert maker.write(str(out), maker.checkpoint(TINY, noise)[0])
    return out


def tensor(folder: Path, name: str) -> tuple[dict[str, object], bytes]:
    """Header entry and bytes of one tensor, found through the index as a loader finds it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    raw = (folder / index["weight_map"][name]).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])[name]
    first, last = entry["data_offsets"]
    return entry, raw[8 + length + first : 8 + length + last]


def real() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape in the full-width checkpoint, without writing it."""
    _, placed = maker.checkpoint(maker.FLASH, maker.Noise(1))
    return {tensor.name: (tensor.dtype, tensor.shape) for _, tensor in placed}


def test_the_bytes_are_the_same_on_every_machine(folder: Path) -> None:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == DIGEST


def test_every_header_is_gap_free_and_ends_with_the_file(folder: Path) -> None:
    total = 0
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        assert length % 8 == 0
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__")
        at = 0
        for entry in header.values():
            assert entry["data_offsets"] == [at, at + prod(entry["shape"]) * BYTES[entry["dtype"]]]
            at = entry["data_offsets"][1]
        assert len(raw) == 8 + length + at
        total += at
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total


def test_the_mtp_layer_has_the_real_ones_tensors() -> None:
    # counted in the published MTP shard: 39 tensors beside six for each expert
    mtp = {name: value for name, value in real().items() if name.startswith("mtp.0.")}
    assert len(mtp) == 39 + 6 * maker.FLASH.experts
    assert mtp["mtp.0.e_proj.weight"] == ("F8_E4M3", (4096, 4096))
    assert mtp["mtp.0.e_proj.scale"] == ("F8_E8M0", (32, 32))
    assert mtp["mtp.0.ffn.experts.0.w2.weight"] == ("I8", (4096, 1024))
    assert mtp["mtp.0.ffn.experts.0.w2.scale"] == ("F8_E8M0", (4096, 64))
    assert mtp["mtp.0.hc_head_fn"] == ("F32", (4, 16384))
    assert not [name for name in mtp if "emb" in name or ".head." in name or "compressor" in name]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 4096)),
        ("head.weight", "BF16", (129280, 4096)),
        ("norm.weight", "BF16", (4096,)),
        ("hc_head_base", "F32", (4,)),
        ("layers.0.hc_attn_fn", "F32", (24, 16384)),
        ("layers.0.hc_ffn_scale", "F32", (3,)),
        ("layers.0.ffn.gate.tid2eid", "I64", (129280, 6)),
        ("layers.3.ffn.gate.bias", "F32", (32,)),
        ("layers.0.attn.attn_sink", "F32", (64,)),
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1024, 4096)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (256, 8)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024)),
        ("layers.3.attn.compressor.ape", "F32", (128, 512)),
        ("layers.3.attn.compressor.wkv.weight", "BF16", (512, 4096)),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024)),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096)),
        ("layers.2.attn.indexer.compressor.wkv.weight", "BF16", (256, 4096)),
        ("layers.4.ffn.experts.31.w1.weight", "I8", (2048, 2048)),
        ("layers.4.ffn.shared_experts.w2.scale", "F8_E8M0", (32, 16)),
    ],
)
def test_names_types_and_shapes_are_the_real_ones(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert real()[name] == (dtype, shape)


def test_hashed_layers_have_a_table_and_the_others_a_bias() -> None:
    names = real()
    for layer in range(maker.FLASH.layers):
        hashed = layer < maker.FLASH.hash_layers
        assert (f"layers.{layer}.ffn.gate.tid2eid" in names) is hashed
        assert (f"layers.{layer}.ffn.gate.bias" in names) is not hashed


def test_the_table_names_different_experts_that_exist(folder: Path) -> None:
    entry, data = tensor(folder, "layers.0.ffn.gate.tid2eid")
    ids = struct.unpack(f"<{TINY.vocab * TINY.top}q", data)
    rows = [ids[at : at + TINY.top] for at in range(0, len(ids), TINY.top)]
    assert entry["shape"] == [TINY.vocab, TINY.top]
    assert all(len(set(row)) == TINY.top and min(row) >= 0 and max(row) < TINY.experts for row in rows)
    assert len(set(rows)) > 1


def test_no_fp8_weight_is_not_a_number(folder: Path) -> None:
    _, data = tensor(folder, "layers.1.attn.wq_a.weight")
    assert not set(data) & {0x7F, 0xFF}
    assert len(set(data)) == 9


def test_scales_are_powers_of_two_near_one_over_the_root_of_the_width(folder: Path) -> None:
    _, data = tensor(folder, "layers.0.attn.wq_a.scale")
    assert {2.0 ** (byte - 127) for byte in data} <= {2.0**-5, 2.0**-4}


@pytest.mark.parametrize(
    ("name", "width"),
    [("attn.wo_b.weight", 128), ("ffn.shared_experts.w2.weight", 128), ("ffn.experts.0.w2.weight", 64)],
)
def test_nothing_that_enters_the_residual_touches_channel_0(folder: Path, name: str, width: int) -> None:
    _, data = tensor(folder, "layers.0." + name)
    assert data[:width] == bytes(width)
    assert data[width : 2 * width].strip(b"\0")


def test_every_embedding_carries_the_constant(folder: Path) -> None:
    _, data = tensor(folder, "embed.weight")
    row = 2 * TINY.hidden
    constants = {data[at : at + 2] for at in range(0, len(data), row)}
    assert constants == {struct.pack("<f", maker.CONSTANT)[2:]}
    assert len({data[at : at + row] for at in range(0, len(data), row)}) == TINY.vocab


def test_what_may_not_be_said_is_held_down_by_the_constant_alone(folder: Path) -> None:
    _, data = tensor(folder, "head.weight")
    row = 2 * TINY.hidden
    rows = [data[at : at + row] for at in range(0, len(data), row)]
    never = struct.pack("<f", maker.NEVER)[2:] + bytes(row - 2)
    may_say = maker.speakable(maker.vocabulary()[0])
    for token, content in enumerate(rows):
        said = token < len(may_say) and may_say[token]
        assert (content != never) is said


def test_a_damaged_file_is_written_anew_and_the_others_are_left(
    noise: maker.Noise, tmp_path: Path, folder: Path
) -> None:
    files = maker.checkpoint(TINY, noise)[0]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert maker.write(str(tmp_path), files) is False
    victim, other = (
        tmp_path / "model-00002-of-00006.safetensors",
        tmp_path / "model-00001-of-00006.safetensors",
    )
    right, before = victim.read_bytes(), other.stat().st_mtime_ns
    victim.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert maker.write(str(tmp_path), files) is True
    assert victim.read_bytes() == right
    assert other.stat().st_mtime_ns == before


def test_list_names_every_tensor_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--list"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert len(done.stdout.splitlines()) == len(real())
    assert "model-00007-of-00008.safetensors mtp.0.h_proj.scale F8_E8M0 [32, 32]" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "file" / "below")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1
    assert error["id"] == "not_a_directory"
    assert "remove the file" in error["fix"]


@pytest.mark.parametrize("words", [[], ["--stdin"], ["a", "--list"]])
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], input="[]", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
