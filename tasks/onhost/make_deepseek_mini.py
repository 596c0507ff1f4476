#!/usr/bin/env python3
"""Write a small checkpoint of the real DeepSeek-V4 architecture, to try a host before 150 GB are downloaded.

Full width, few layers, few experts: the names, shapes and dtypes are those of DeepSeek-V4-Flash (fp4 experts
in I8, fp8 linears with e8m0 scales for blocks of 128, BF16 norms and compressors, F32 hyper-connections, hash
and biased routers, one MTP layer), so loading, verifying, finalising and every kernel run as with the real
weights. What it says means nothing: the numbers are noise, of a size that keeps activations near 1.

    make_deepseek_mini.py OUT_DIR         writes what is missing or differs (6 GB)
    make_deepseek_mini.py --list          every tensor: file, name, dtype, shape; writes nothing
    make_deepseek_mini.py --stdin         the same as OUT_DIR, parameters as JSON: {"out": "/path"}

The bytes are the same on every machine and Python: noise comes from SHA-256 in counter mode, numbers from
integer arithmetic and powers of two (no libm, no NumPy). Standard library only, Python >= 3.8.

One JSON document on stdout: {"changed", "dir", "bytes", "tensors", "files": [{"file", "bytes"}]}; on failure
{"error": {"id", "what", "file", "fix"}} and exit status 1.

Sources: vLLM 0.26.0, models/deepseek_v4: nvidia/{model,mtp}.py (`load_weights` and the weights mapper: which
name is loaded into what), attention.py and compressor.py (shapes); config.json of DeepSeek-V4-Flash.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import time
from hashlib import sha256
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

try:
    from . import make_rehearsal_checkpoint as rehearsal
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import make_rehearsal_checkpoint as rehearsal  # type: ignore[import-not-found,no-redef]

MAX_POSITIONS = 1048576
BLOCK = 128  # fp8 weights: one scale for 128 x 128
GROUP = 32  # fp4 weights: one scale for 32 numbers of a row
WINDOW = 128
CHUNK = 8 << 20

# An odd length, so that rows, whose lengths are powers of two, never begin at the same place of the noise.
NOISE_BYTES = (8 << 20) + 3

# Hidden channel 0 carries one number through every layer: nothing that is added to the residual touches it.
# With it lm_head has a bias for each token: some are said often (so that drafts are accepted), most never.
CONSTANT = 32.0
NEVER = -8.0
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
# merged letter by letter, so that prompts are not all single bytes
WORDS = (
    " the", " and", " for", " you", " tool", " call", " parameter", " name", " string", " function",
    " thinking", " weather", " location", " type", " object", " hello", " world", "tool", "name", "invoke",
    "parameter", "hello", "weather", "ing", "er", "ion",
)  # fmt: skip
TOKENS = 512  # the first so many ids have a row of their own; the real vocabulary is longer
E8M0_ONE = 127  # the exponent byte of 2**0
E4M3_MAX_EXACT = 4  # popcount of a byte, less 4


def vocabulary() -> Tuple[Dict[str, int], List[Tuple[str, str]]]:
    """Token -> id without the markers, and the merges in rank order."""
    alphabet = rehearsal.byte_alphabet()
    tokens = [rehearsal.BOS, rehearsal.EOS, rehearsal.PAD, *alphabet]
    merges: List[Tuple[str, str]] = []
    seen = set(tokens)
    for word in WORDS:
        spelt = [alphabet[byte] for byte in word.encode()]
        left = spelt[0]
        for right in spelt[1:]:
            if left + right not in seen:
                seen.add(left + right)
                tokens.append(left + right)
                merges.append((left, right))
            left += right
    return {token: number for number, token in enumerate(tokens)}, merges


def speakable(vocab: Dict[str, int]) -> List[bool]:
    """Which ids the model says of its own accord: printable ASCII other than a lone space, nothing else.

    Its replies are then readable, never end by themselves (every reply has the length that was asked for),
    hold no half characters that would stall a stream, open no tool call or reasoning by accident, and
    JSON under a grammar closes instead of going on in white space for ever.
    """
    alphabet = rehearsal.byte_alphabet()
    letters = {alphabet[byte] for byte in range(0x20, 0x7F)}
    mask = [False] * TOKENS
    for token, number in vocab.items():
        mask[number] = number > 2 and token != alphabet[0x20] and letters.issuperset(token)
    return mask


def tokenizer_json() -> Dict[str, Any]:
    """`tokenizer.json`: bytes and a few words."""
    byte_level = rehearsal.byte_level_step(True)
    return rehearsal.bpe_json(*vocabulary(), byte_level, byte_level, ignore_merges=False)


def bfloat16(value: float) -> bytes:
    """Little-endian bfloat16, rounded to nearest even. Finite values only."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


class Dims(NamedTuple):
    """The sizes that decide every shape. The defaults are DeepSeek-V4-Flash's, save layers and experts."""

    hidden: int = 4096
    layers: int = 5
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora: int = 1024
    o_lora: int = 1024
    o_groups: int = 8
    experts: int = 32
    top: int = 6
    moe: int = 2048
    hash_layers: int = 3
    hc: int = 4
    index_heads: int = 64
    index_dim: int = 128
    index_top: int = 512
    vocab: int = 129280
    # one for each layer and one for the MTP layer: 0 window only, 4 with indexer, 128 without
    compress: Tuple[int, ...] = (0, 0, 4, 128, 4, 0)


FLASH = Dims()


class Tensor(NamedTuple):
    """One tensor: what the header says of it, and how its bytes are made."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    make: Callable[[int], Iterator[bytes]]

    @property
    def size(self) -> int:
        """Its size in the file."""
        count = SIZES[self.dtype]
        for length in self.shape:
            count *= length
        return count


# ---------------------------------------------------------------- noise and numbers


class Noise:
    """One pool of noise; a tensor reads it in a circle, from a place that its name decides."""

    def __init__(self, length: int = NOISE_BYTES):
        blocks = range((length + 31) // 32)
        seed = sha256(b"rackwright deepseek mini").digest()
        self.raw = b"".join(sha256(seed + struct.pack("<I", block)).digest() for block in blocks)[:length]
        self._views: Dict[Any, bytes] = {}

    @staticmethod
    def place(name: str) -> int:
        """Where a tensor begins to read, before the modulus."""
        return int.from_bytes(sha256(name.encode()).digest()[:8], "little")

    def view(self, key: Any, make: Callable[[bytes], bytes]) -> bytes:
        """The pool in other clothes, made once."""
        if key not in self._views:
            self._views[key] = make(self.raw)
        return self._views[key]

    def circle(self, pool: bytes, start: int, length: int) -> Iterator[bytes]:
        """`length` bytes of a pool from `start` on, around and around."""
        at, view = start % len(pool), memoryview(pool)
        while length:
            part = view[at : at + min(length, len(pool) - at, CHUNK)]
            yield part  # type: ignore[misc]  # a memoryview writes and compares like bytes
            length -= len(part)
            at = (at + len(part)) % len(pool)


def e4m3(value: int) -> int:
    """The fp8 byte of -4..4 (e4m3: bias 7, three bits of mantissa)."""
    code = {0: 0x00, 1: 0x38, 2: 0x40, 3: 0x44, 4: 0x48}[abs(value)]
    return code | (0x80 if value < 0 else 0)


# bell-shaped: the number of ones among eight bits, less 4; standard deviation 1.41
E4M3_BELL = bytes(e4m3(bin(byte).count("1") - E4M3_MAX_EXACT) for byte in range(256))
E4M3_64 = 0x68  # 64.0


def halves(step: float) -> Tuple[bytes, bytes]:
    """Tables from a noise byte to the two bytes of a bfloat16: even numbers around 0, RMS 73.9 steps."""
    codes = [bfloat16((2 * byte - 255) * step / 2) for byte in range(256)]
    return bytes(code[0] for code in codes), bytes(code[1] for code in codes)


def as_bfloat16(raw: bytes, step: float) -> bytes:
    """Noise as bfloat16 numbers, one a byte."""
    low, high = halves(step)
    found = bytearray(2 * len(raw))
    found[0::2], found[1::2] = raw.translate(low), raw.translate(high)
    return bytes(found)


def log2(number: int) -> int:
    """The exponent of a power of two."""
    assert number & (number - 1) == 0 < number
    return number.bit_length() - 1


# ---------------------------------------------------------------- the tensors


class Maker:
    """Makes the tensors of one checkpoint."""

    def __init__(self, dims: Dims, noise: Noise):
        self.dims, self.noise = dims, noise

    def bf16(self, name: str, shape: Tuple[int, ...], step: float) -> Tensor:
        """Noise of RMS 73.9 steps (a power of two)."""

        def make(length: int) -> Iterator[bytes]:
            pool = self.noise.view(("bf16", step), lambda raw: as_bfloat16(raw, step))
            # an even place: two bytes a number, in a pool of an even length
            return self.noise.circle(pool, 2 * (Noise.place(name) % len(self.noise.raw)), length)

        return Tensor(name, "BF16", shape, make)

    def ones(self, name: str, size: int) -> Tensor:
        """The weight of a norm that changes nothing."""
        return Tensor(name, "BF16", (size,), lambda length: iter([bfloat16(1.0) * (length // 2)]))

    def f32(self, name: str, shape: Tuple[int, ...], step: float, middle: float = 0.0) -> Tensor:
        """Small F32 tensors: noise of RMS 73.9 steps around a middle."""

        def make(length: int) -> Iterator[bytes]:
            table = [struct.pack("<f", middle + (2 * byte - 255) * step / 2) for byte in range(256)]
            for part in self.noise.circle(self.noise.raw, Noise.place(name), length // 4):
                yield b"".join([table[byte] for byte in part])

        return Tensor(name, "F32", shape, make)

    def scale(self, name: str, shape: Tuple[int, int], exponent: int, same: bool = False) -> Tensor:
        """Block scales, powers of two: 2**exponent or twice that; with `same` all alike."""
        low = E8M0_ONE + exponent

        def make(length: int) -> Iterator[bytes]:
            if same:
                return iter([bytes([low]) * length])
            table = bytes(low + byte % 2 for byte in range(256))
            pool = self.noise.view(("e8m0", exponent), lambda raw: raw.translate(table))
            return self.noise.circle(pool, Noise.place(name), length)

        return Tensor(name, "F8_E8M0", shape, make)

    def fp8(self, name: str, rows: int, columns: int, first: str = "noise") -> List[Tensor]:
        """An fp8 linear and its block scales; outputs have about the size of inputs.

        `first` is its first row: "noise", "zero" (into the residual), or "constant" (MTP's projections hand
        channel 0 on).
        """
        # 1.41 * 2**k and twice that, around 1 / sqrt(columns)
        exponent = -((log2(columns) + 1) // 2) - 1

        def make(length: int) -> Iterator[bytes]:
            pool = self.noise.view("e4m3", lambda raw: raw.translate(E4M3_BELL))
            head = bytes(columns) if first == "zero" else bytes([E4M3_64]) + bytes(columns - 1)
            if first != "noise":
                yield head
                length -= len(head)
            yield from self.noise.circle(pool, Noise.place(name), length)

        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return [
            Tensor(name + ".weight", "F8_E4M3", (rows, columns), make),
            self.scale(name + ".scale", blocks, exponent, same=first == "constant"),
        ]

    def fp4(self, name: str, rows: int, columns: int, first: str = "noise") -> List[Tensor]:
        """An expert's matrix: two e2m1 numbers a byte (every code is a number; RMS 2.93), e8m0 scales."""

        def make(length: int) -> Iterator[bytes]:
            if first == "zero":
                yield bytes(columns // 2)
                length -= columns // 2
            yield from self.noise.circle(self.noise.raw, Noise.place(name), length)

        return [
            Tensor(name + ".weight", "I8", (rows, columns // 2), make),
            self.scale(name + ".scale", (rows, columns // GROUP), -((log2(columns) + 1) // 2) - 2),
        ]

    def hyper(self, prefix: str, part: str) -> List[Tensor]:
        """A hyper-connection: how the streams are mixed before and after a sublayer, or for the head."""
        dims = self.dims
        rows, scales = (dims.hc, 1) if part == "head" else ((2 + dims.hc) * dims.hc, 3)
        name = prefix + "hc_" + part
        return [
            self.f32(name + "_fn", (rows, dims.hc * dims.hidden), 2.0**-13),
            self.f32(name + "_base", (rows,), 2.0**-10),
            self.f32(name + "_scale", (scales,), 0.0, 0.5),
        ]

    def compressor(self, prefix: str, ratio: int, width: int) -> List[Tensor]:
        """Makes one cache entry of `ratio` positions; at ratio 4 they overlap, so it is twice as wide."""
        dims, wide = self.dims, width * (2 if ratio == 4 else 1)
        return [
            self.f32(prefix + "ape", (ratio, wide), 2.0**-9),
            self.ones(prefix + "norm.weight", width),
            self.bf16(prefix + "wgate.weight", (wide, dims.hidden), 2.0**-12),
            self.bf16(prefix + "wkv.weight", (wide, dims.hidden), 2.0**-12),
        ]

    def attention(self, prefix: str, ratio: int) -> List[Tensor]:
        """Multi-head latent attention with a window, compressed entries and, at ratio 4, an indexer."""
        dims = self.dims
        found = [
            self.f32(prefix + "attn_sink", (dims.heads,), 2.0**-8),
            self.ones(prefix + "q_norm.weight", dims.q_lora),
            self.ones(prefix + "kv_norm.weight", dims.head_dim),
            *self.fp8(prefix + "wq_a", dims.q_lora, dims.hidden),
            *self.fp8(prefix + "wq_b", dims.heads * dims.head_dim, dims.q_lora),
            *self.fp8(prefix + "wkv", dims.head_dim, dims.hidden),
            *self.fp8(
                prefix + "wo_a", dims.o_groups * dims.o_lora, dims.heads * dims.head_dim // dims.o_groups
            ),
            *self.fp8(prefix + "wo_b", dims.hidden, dims.o_groups * dims.o_lora, first="zero"),
        ]
        if ratio:
            found += self.compressor(prefix + "compressor.", ratio, dims.head_dim)
        if ratio == 4:
            found += [
                *self.fp8(prefix + "indexer.wq_b", dims.index_heads * dims.index_dim, dims.q_lora),
                self.bf16(prefix + "indexer.weights_proj.weight", (dims.index_heads, dims.hidden), 2.0**-12),
                *self.compressor(prefix + "indexer.compressor.", ratio, dims.index_dim),
            ]
        return found

    def table(self, name: str) -> Tensor:
        """Hash routing: the experts of each token id, all different."""
        dims = self.dims

        def make(_length: int) -> Iterator[bytes]:
            # an odd stride visits `top` different ones, since the number of experts is a power of two
            assert log2(dims.experts) and dims.top <= dims.experts
            start = Noise.place(name)
            rows = []
            for token in range(dims.vocab):
                at, stride = token * 7 + start, 2 * (token % 5) + 1
                rows.append(
                    struct.pack(
                        "<%dq" % dims.top, *((at + n * stride) % dims.experts for n in range(dims.top))
                    )
                )
            yield b"".join(rows)

        return Tensor(name, "I64", (dims.vocab, dims.top), make)

    def experts(self, prefix: str, hashed: bool) -> List[Tensor]:
        """Router, routed experts and the shared one."""
        dims = self.dims
        found = [self.bf16(prefix + "gate.weight", (dims.experts, dims.hidden), 2.0**-12)]
        if hashed:
            found.append(self.table(prefix + "gate.tid2eid"))
        else:
            found.append(self.f32(prefix + "gate.bias", (dims.experts,), 2.0**-10))
        for expert in range(dims.experts):
            name = prefix + "experts.%d." % expert
            found += self.fp4(name + "w1", dims.moe, dims.hidden)
            found += self.fp4(name + "w2", dims.hidden, dims.moe, first="zero")
            found += self.fp4(name + "w3", dims.moe, dims.hidden)
        found += self.fp8(prefix + "shared_experts.w1", dims.moe, dims.hidden)
        found += self.fp8(prefix + "shared_experts.w2", dims.hidden, dims.moe, first="zero")
        found += self.fp8(prefix + "shared_experts.w3", dims.moe, dims.hidden)
        return found

    def layer(self, prefix: str, ratio: int, hashed: bool) -> List[Tensor]:
        """One decoder layer; MTP's is one too."""
        return [
            self.ones(prefix + "attn_norm.weight", self.dims.hidden),
            self.ones(prefix + "ffn_norm.weight", self.dims.hidden),
            *self.hyper(prefix, "attn"),
            *self.hyper(prefix, "ffn"),
            *self.attention(prefix + "attn.", ratio),
            *self.experts(prefix + "ffn.", hashed),
        ]

    def embedding(self) -> Tensor:
        """Noise of RMS 1.15, and the constant in channel 0."""
        dims = self.dims
        noise = self.bf16("embed.weight", (dims.vocab, dims.hidden), 2.0**-6)

        def make(length: int) -> Iterator[bytes]:
            row, constant, rest = 2 * dims.hidden, bfloat16(CONSTANT), bytearray()
            for part in noise.make(length):
                rest += part
                count = len(rest) // row
                chunk, rest = rest[: count * row], rest[count * row :]
                chunk[0::row], chunk[1::row] = constant[:1] * count, constant[1:] * count
                yield bytes(chunk)

        return Tensor(noise.name, noise.dtype, noise.shape, make)

    def head(self) -> Tensor:
        """Noise and a bias for what may be said; the rest far below, by the constant of channel 0 alone."""
        dims = self.dims
        may_say = speakable(vocabulary()[0])
        never = bfloat16(NEVER) + bytes(2 * (dims.hidden - 1))
        low, high = halves(2.0**-11)

        def make(_length: int) -> Iterator[bytes]:
            for token, said in enumerate(may_say):
                if not said:
                    yield never
                    continue
                start = Noise.place("head.weight %d" % token)
                raw = b"".join(self.noise.circle(self.noise.raw, start, dims.hidden - 1))
                row = bytearray(2 * dims.hidden)
                # RMS 0.036 for what the model thinks; a bias of 0 to 0.5, seldom large, for what it likes
                row[0:2] = bfloat16(bin(start & 0xFF).count("1") ** 3 / 1024)
                row[2::2], row[3::2] = raw.translate(low), raw.translate(high)
                yield bytes(row)
            rows = max(1, CHUNK // len(never))
            left = dims.vocab - len(may_say)
            for count in [rows] * (left // rows) + [left % rows]:
                yield never * count

        return Tensor("head.weight", "BF16", (dims.vocab, dims.hidden), make)

    def shards(self) -> List[List[Tensor]]:
        """Every tensor, by file: embedding, one file a layer, MTP, head."""
        dims = self.dims
        found = [[self.embedding()]]
        for number in range(dims.layers):
            prefix = "layers.%d." % number
            found.append(self.layer(prefix, dims.compress[number], number < dims.hash_layers))
        found.append(
            [
                *self.fp8("mtp.0.e_proj", dims.hidden, dims.hidden, first="constant"),
                *self.fp8("mtp.0.h_proj", dims.hidden, dims.hidden, first="constant"),
                self.ones("mtp.0.enorm.weight", dims.hidden),
                self.ones("mtp.0.hnorm.weight", dims.hidden),
                self.ones("mtp.0.norm.weight", dims.hidden),
                *self.hyper("mtp.0.", "head"),
                *self.layer("mtp.0.", 0, hashed=False),
            ]
        )
        found.append([self.ones("norm.weight", dims.hidden), *self.hyper("", "head"), self.head()])
        return found


# ---------------------------------------------------------------- files


def config(dims: Dims) -> Dict[str, Any]:
    """`config.json`: DeepSeek-V4-Flash's, with fewer layers and experts."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": list(dims.compress),
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": dims.hc,
        "hc_sinkhorn_iters": 20,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "index_head_dim": dims.index_dim,
        "index_n_heads": dims.index_heads,
        "index_topk": dims.index_top,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": dims.moe,
        "n_routed_experts": dims.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": dims.heads,
        "num_experts_per_tok": dims.top,
        "num_hash_layers": dims.hash_layers,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": dims.o_groups,
        "o_lora_rank": dims.o_lora,
        "pad_token_id": 2,
        "q_lora_rank": dims.q_lora,
        "qk_rope_head_dim": dims.rope_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": WINDOW,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": dims.vocab,
    }


def header(tensors: List[Tensor]) -> bytes:
    """The head of a safetensors file: 8 bytes of length, then JSON padded to 8 bytes."""
    document: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class File(NamedTuple):
    """One file of the checkpoint: its name, its size, and its bytes in parts, made as often as asked."""

    name: str
    size: int
    parts: Callable[[], Iterator[bytes]]


def shard_file(name: str, tensors: List[Tensor]) -> File:
    """One shard."""
    head = header(tensors)

    def parts() -> Iterator[bytes]:
        yield head
        for tensor in tensors:
            yield from tensor.make(tensor.size)

    return File(name, len(head) + sum(tensor.size for tensor in tensors), parts)


def document_file(name: str, document: Dict[str, Any]) -> File:
    """One JSON file."""
    text = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    return File(name, len(text), lambda: iter([text]))


def checkpoint(dims: Dims, noise: Noise) -> Tuple[List[File], List[Tuple[str, Tensor]]]:
    """Every file, the index last; and every tensor with its file."""
    shards = Maker(dims, noise).shards()
    names = ["model-%05d-of-%05d.safetensors" % (number, len(shards)) for number in range(1, len(shards) + 1)]
    placed = [(name, tensor) for name, tensors in zip(names, shards) for tensor in tensors]
    tokenizer_config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": rehearsal.BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": rehearsal.EOS,
        "model_max_length": MAX_POSITIONS,
        "pad_token": rehearsal.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {"bos_token_id": 0, "do_sample": True, "eos_token_id": 1, "temperature": 1.0, "top_p": 1.0}
    index = {
        "metadata": {"total_size": sum(tensor.size for _, tensor in placed)},
        "weight_map": {tensor.name: name for name, tensor in sorted(placed, key=lambda pair: pair[1].name)},
    }
    files = [
        document_file("config.json", config(dims)),
        document_file("generation_config.json", generation),
        document_file("tokenizer_config.json", tokenizer_config),
        document_file("tokenizer.json", tokenizer_json()),
        *(shard_file(name, tensors) for name, tensors in zip(names, shards)),
        document_file("model.safetensors.index.json", index),
    ]
    return files, placed


def same(path: str, file: File) -> bool:
    """The file at `path` is a plain file with just these bytes."""
    try:
        if os.path.getsize(path) != file.size:
            return False
        with open(path, "rb") as stream:
            return all(stream.read(len(part)) == part for part in file.parts())
    except (FileNotFoundError, IsADirectoryError):
        return False


class Progress:
    """Progress in bytes on stderr, at most two lines a second."""

    def __init__(self, total: int):
        self.total, self.done, self.shown = total, 0, -1.0

    def add(self, count: int, note: str) -> None:
        """So much more is written or found."""
        self.done += count
        now = time.monotonic()
        if now - self.shown >= 0.5 or self.done >= self.total:
            self.shown = now
            line = {
                "phase": "checkpoint",
                "done": self.done,
                "total": self.total,
                "unit": "bytes",
                "note": note,
            }
            print("#progress " + json.dumps(line), file=sys.stderr, flush=True)


def write(out: str, files: List[File]) -> bool:
    """Write what is missing or differs, each file whole or not at all. True when something was written."""
    os.makedirs(out, exist_ok=True)
    progress = Progress(sum(file.size for file in files))
    changed = False
    for file in files:
        path = os.path.join(out, file.name)
        if same(path, file):
            progress.add(file.size, file.name)
            continue
        partial = path + ".partial"
        try:
            with open(partial, "wb") as stream:
                for part in file.parts():
                    stream.write(part)
                    progress.add(len(part), file.name)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except OSError:
            if os.path.isfile(partial):
                os.unlink(partial)
            raise
        changed = True
    return changed


def explain(error: OSError, out: str, size: int) -> Dict[str, Any]:
    """The error document for a write that failed."""
    document = rehearsal.explain(error, out)
    problem = document["error"]
    problem["what"] = problem["what"].replace("the rehearsal checkpoint", "the checkpoint")
    if problem["id"] == "disk_full":
        problem["fix"] = "free at least %.1f GB there, or choose another folder" % (size / 1e9)
    return document


def arguments(words: List[str]) -> argparse.Namespace:
    """The command line, or stdin. Wrong usage exits with status 2."""
    parser = argparse.ArgumentParser(
        description="Write a small checkpoint of the DeepSeek-V4 architecture with noise for weights (6 GB)."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("out", nargs="?", metavar="OUT_DIR", help="folder to write to; made when missing")
    where.add_argument("--stdin", action="store_true", help='read {"out": "/path"} as JSON from stdin')
    where.add_argument("--list", action="store_true", help="print every tensor, write nothing")
    given = parser.parse_args(words)
    if given.stdin:
        try:
            document = json.load(sys.stdin)
        except ValueError as error:
            parser.error("stdin is not JSON: %s" % error)
        if not isinstance(document, dict) or set(document) != {"out"} or not isinstance(document["out"], str):
            parser.error('stdin must be {"out": "/path"} and nothing else')
        given.out = document["out"]
    return given


def main(words: List[str]) -> int:
    """Entry point; see the module's docstring."""
    given = arguments(words)
    if given.list:
        for name, tensor in checkpoint(FLASH, Noise(1))[1]:
            print("%s %s %s %s" % (name, tensor.name, tensor.dtype, list(tensor.shape)))
        return 0
    files, placed = checkpoint(FLASH, Noise())
    size = sum(file.size for file in files)
    try:
        changed = write(given.out, files)
    except OSError as error:
        print(json.dumps(explain(error, given.out, size)))
        return 1
    result = {
        "changed": changed,
        "dir": os.path.abspath(given.out),
        "bytes": size,
        "tensors": len(placed),
        "files": [{"file": file.name, "bytes": file.size} for file in files],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
