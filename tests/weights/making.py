"""Tiny checkpoints for tests: real safetensors files with a real index, made in milliseconds."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any


def shard_bytes(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file with these tensors: name -> (dtype, shape, data)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(header, b"".join(data for _, _, data in tensors.values()))


def with_header(header: Any, data: bytes) -> bytes:
    """A safetensors file with any header, good or bad."""
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def make_checkpoint(
    folder: Path, shards: int = 3, tensors: int = 4, tensor_bytes: int = 64, seed: int = 4
) -> dict[str, str]:
    """A whole checkpoint of a few kB, in its hub's shape; returns its manifest, {path: sha256}."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        content = {
            f"layers.{number}.w{i}.weight": ("BF16", [tensor_bytes // 2], rng.randbytes(tensor_bytes))
            for i in range(tensors)
        }
        weight_map.update(dict.fromkeys(content, name))
        (folder / name).write_bytes(shard_bytes(content))
    index = {"metadata": {"total_size": shards * tensors * tensor_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text('{"architectures": ["DeepseekV4ForCausalLM"]}\n')
    (folder / "generation_config.json").write_text('{"temperature": 1.0}\n')
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"vocab": {}}}\n')
    (folder / "tokenizer_config.json").write_text("{}\n")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "__init__.py").write_text("")
    (folder / "encoding" / "encoding_dsv4.py").write_text("def encode(messages):\n    return ''\n")
    return digests_of(folder)


def digests_of(folder: Path) -> dict[str, str]:
    """{relative path: sha256} of every file below a folder."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
