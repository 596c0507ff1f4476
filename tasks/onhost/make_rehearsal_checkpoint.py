#!/usr/bin/env python3
"""Write the rehearsal's checkpoint: tiny, random, and in every outward respect like a real one.

Qwen2-shaped (a model that vLLM serves on any CPU), with DeepSeek-V4's special tokens, so that the
`deepseek_v4` tokenizer, reasoning and tool-call parsers of vLLM work on it for real. Three safetensors
shards with an index, a byte-level BPE tokenizer, and the configs: about 1 MB.

The bytes are the same on every machine and Python: weights come from SHA-256 in counter mode through
integer arithmetic only (no libm, no NumPy), JSON is written with fixed order and separators.

    make_rehearsal_checkpoint.py OUT_DIR         writes what is missing or differs
    make_rehearsal_checkpoint.py --stdin         the same, parameters as JSON: {"out": "/path"}

One JSON document on stdout: {"changed", "dir", "digest", "bytes", "files": [{"file", "sha256", "bytes"}]};
on failure {"error": {"id", "what", "file", "fix"}} and exit status 1. Standard library only, Python >= 3.8.

Sources: safetensors format (huggingface/safetensors, README "Format"); byte alphabet of byte-level BPE
(openai/gpt-2, encoder.py `bytes_to_unicode`); special tokens (vllm/tokenizers/deepseek_v4_encoding.py);
head_dim 32 is the smallest that vLLM's CPU attention takes (with 16 the first request kills the engine).
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import struct
import sys
from typing import Any, Dict, List, Tuple

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 128, 2, 4, 2, 32, 256
VOCAB = 512
MAX_POSITIONS = 8192
SHARDS = 3

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# every marker that the DeepSeek-V4 encoder can put into a prompt; each must be one token
MARKERS = (
    "<think>",
    "</think>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
# merged letter by letter, so that prompts are not all single bytes
WORDS = (
    " the", " and", " for", " you", " tool", " call", " parameter", " name", " string", " function",
    " thinking", " weather", " location", " type", " object", " hello", " world", "tool", "name", "invoke",
    "parameter", "hello", "weather", "ing", "er", "ion",
)  # fmt: skip

# sum of four random bytes, centred: standard deviation 147.8 steps of a power of two each
WEIGHT_STEP = 2.0**-11  # about 0.07
EMBEDDING_STEP = 2.0**-9  # about 0.29
LM_HEAD_STEP = 2.0**-8  # about 0.58: clear winners among the logits
# hidden channel 0 holds the same number at every position, so that column 0 of lm_head works as a bias
CONSTANT = 0.25
NEVER = -128.0  # far below every other logit, yet finite: a grammar can still force such a token

Tensor = Tuple[Tuple[int, ...], bytes]


def byte_alphabet() -> List[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    spare = 0x100
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(spare)
            spare += 1
    return [alphabet[byte] for byte in range(256)]


def vocabulary() -> Tuple[Dict[str, int], List[Tuple[str, str]]]:
    """Token -> id without the markers, and the merges in rank order."""
    alphabet = byte_alphabet()
    tokens = [BOS, EOS, PAD, *alphabet]
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
    alphabet = byte_alphabet()
    letters = {alphabet[byte] for byte in range(0x20, 0x7F)}
    mask = [False] * VOCAB
    for token, number in vocab.items():
        mask[number] = number > 2 and token != alphabet[0x20] and letters.issuperset(token)
    return mask


def tokenizer_json() -> Dict[str, Any]:
    """`tokenizer.json` as the `tokenizers` library reads it."""
    vocab, merges = vocabulary()
    added = [(vocab[token], token, True) for token in (BOS, EOS, PAD)]
    added += [(len(vocab) + place, token, False) for place, token in enumerate(MARKERS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for number, token, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def bfloat16(value: float) -> bytes:
    """Little-endian bfloat16, rounded to nearest even. Finite values only."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def random_tensor(name: str, shape: Tuple[int, ...], step: float) -> Tensor:
    """Bell-shaped numbers that depend on the tensor's name alone."""
    count = 1
    for size in shape:
        count *= size
    table = [bfloat16((total - 510) * step) for total in range(4 * 255 + 1)]
    seed = hashlib.sha256(("rackwright rehearsal " + name).encode()).digest()
    blocks = range((4 * count + 31) // 32)
    noise = b"".join(hashlib.sha256(seed + struct.pack("<I", block)).digest() for block in blocks)
    quarters = (noise[0::4], noise[1::4], noise[2::4], noise[3::4])
    data = b"".join([table[a + b + c + d] for a, b, c, d in zip(*quarters)][:count])
    return shape, data


def ones(size: int) -> Tensor:
    """The weight of a norm that changes nothing."""
    return (size,), bfloat16(1.0) * size


def rows_of(tensor: Tensor) -> List[bytes]:
    """The rows of a matrix."""
    (count, width), data = tensor
    return [data[2 * width * row : 2 * width * (row + 1)] for row in range(count)]


def embeddings() -> Tensor:
    """Random rows that all carry the same number in channel 0."""
    tensor = random_tensor("model.embed_tokens.weight", (VOCAB, HIDDEN), EMBEDDING_STEP)
    return tensor[0], b"".join(bfloat16(CONSTANT) + row[2:] for row in rows_of(tensor))


def into_residual(name: str, width: int) -> Tensor:
    """A projection back into the residual stream that leaves channel 0 as it is."""
    tensor = random_tensor(name, (HIDDEN, width), WEIGHT_STEP)
    return tensor[0], bytes(2 * width) + tensor[1][2 * width :]


def lm_head() -> Tensor:
    """Random rows for what may be said; the rest far below, by the constant of channel 0 alone."""
    tensor = random_tensor("lm_head.weight", (VOCAB, HIDDEN), LM_HEAD_STEP)
    never = bfloat16(NEVER) + bytes(2 * (HIDDEN - 1))
    may_say = speakable(vocabulary()[0])
    rows = rows_of(tensor)
    return tensor[0], b"".join(bytes(2) + row[2:] if may_say[at] else never for at, row in enumerate(rows))


def tensors() -> Dict[str, Tensor]:
    """Every weight of the model by its name, in the order of a forward pass."""
    kv_size = KV_HEADS * HEAD_DIM
    found = {"model.embed_tokens.weight": embeddings()}

    def add(name: str, *shape: int) -> None:
        found[name] = random_tensor(name, shape, WEIGHT_STEP)

    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        found[prefix + "input_layernorm.weight"] = ones(HIDDEN)
        for part, size in (("q", HEADS * HEAD_DIM), ("k", kv_size), ("v", kv_size)):
            add(prefix + "self_attn." + part + "_proj.weight", size, HIDDEN)
            add(prefix + "self_attn." + part + "_proj.bias", size)
        out, down = prefix + "self_attn.o_proj.weight", prefix + "mlp.down_proj.weight"
        found[out] = into_residual(out, HEADS * HEAD_DIM)
        found[prefix + "post_attention_layernorm.weight"] = ones(HIDDEN)
        add(prefix + "mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        add(prefix + "mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        found[down] = into_residual(down, INTERMEDIATE)
    found["model.norm.weight"] = ones(HIDDEN)
    found["lm_head.weight"] = lm_head()
    return found


def safetensors(part: Dict[str, Tensor]) -> bytes:
    """One shard: 8 bytes of header length, the header padded to 8 bytes, the data."""
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in part.items():
        end = offset + len(data)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in part.values())


def shards() -> Tuple[Dict[str, bytes], Dict[str, Any]]:
    """File name -> bytes for the shards, and the index; tensors are dealt out in turn."""
    every = tensors()
    files: Dict[str, bytes] = {}
    weight_map: Dict[str, str] = {}
    for shard in range(SHARDS):
        file = "model-%05d-of-%05d.safetensors" % (shard + 1, SHARDS)
        names = list(every)[shard::SHARDS]
        files[file] = safetensors({name: every[name] for name in names})
        weight_map.update((name, file) for name in names)
    total = sum(len(data) for _, data in every.values())
    return files, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def config() -> Dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen2",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def checkpoint_files() -> Dict[str, bytes]:
    """File name -> content of the whole checkpoint, the index last."""
    files, index = shards()
    documents = {
        "config.json": config(),
        "generation_config.json": {
            "bos_token_id": 0,
            "do_sample": True,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "temperature": 1.0,
            "top_p": 1.0,
        },
        "tokenizer_config.json": {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": BOS,
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "model_max_length": MAX_POSITIONS,
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "tokenizer.json": tokenizer_json(),
        "model.safetensors.index.json": index,
    }
    for file, document in documents.items():
        files[file] = (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()
    return files


def manifest(files: Dict[str, bytes]) -> str:
    """One line a file as `sha256sum` prints it, sorted by name; its SHA-256 is the checkpoint's digest."""
    return "".join("%s  %s\n" % (hashlib.sha256(files[file]).hexdigest(), file) for file in sorted(files))


def same(path: str, content: bytes) -> bool:
    """The file at `path` is a plain file with just this content."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(content) + 1) == content
    except (FileNotFoundError, IsADirectoryError):
        return False


def write(out: str, files: Dict[str, bytes]) -> bool:
    """Write what is missing or differs, each file whole or not at all. True when something was written."""
    os.makedirs(out, exist_ok=True)
    changed = False
    for number, (file, content) in enumerate(files.items(), 1):
        path = os.path.join(out, file)
        if not same(path, content):
            partial = path + ".partial"
            try:
                with open(partial, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(partial, path)
            except OSError:
                if os.path.isfile(partial):
                    os.unlink(partial)
                raise
            changed = True
        progress = {"phase": "checkpoint", "done": number, "total": len(files), "unit": "files", "note": file}
        print("#progress " + json.dumps(progress), file=sys.stderr, flush=True)
    return changed


def explain(error: OSError, out: str) -> Dict[str, Any]:
    """The error document for a write that failed."""
    known = {
        errno.ENOSPC: ("disk_full", "free at least 2 MB and some inodes there, or choose another folder"),
        errno.EDQUOT: ("disk_full", "raise this user's quota, or choose another folder"),
        errno.EACCES: ("permission", "run as a user that may write there, or choose another folder"),
        errno.EPERM: ("permission", "run as a user that may write there, or choose another folder"),
        errno.EROFS: ("permission", "mount it writable, or choose another folder"),
        errno.ENOTDIR: ("not_a_directory", "remove the file that is in the way, or choose another folder"),
        errno.EEXIST: ("not_a_directory", "remove the file that is in the way, or choose another folder"),
        errno.EISDIR: ("not_a_file", "remove the folder that is in the way"),
    }
    identifier, fix = known.get(error.errno or 0, ("os_error", "look at the message and at the folder"))
    what = "cannot write the rehearsal checkpoint: %s" % (error.strerror or error)
    return {"error": {"id": identifier, "what": what, "file": error.filename or out, "fix": fix}}


def parameters(arguments: List[str]) -> str:
    """The folder to write to, from the command line or from stdin. Wrong usage exits with status 2."""
    parser = argparse.ArgumentParser(
        description="Write the rehearsal's tiny checkpoint (about 1 MB, the same bytes on every machine)."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("out", nargs="?", metavar="OUT_DIR", help="folder to write to; made when missing")
    where.add_argument("--stdin", action="store_true", help='read {"out": "/path"} as JSON from stdin')
    given = parser.parse_args(arguments)
    if not given.stdin:
        return str(given.out)
    try:
        document = json.load(sys.stdin)
    except ValueError as error:
        parser.error("stdin is not JSON: %s" % error)
    if not isinstance(document, dict) or set(document) != {"out"} or not isinstance(document["out"], str):
        parser.error('stdin must be {"out": "/path"} and nothing else')
    return str(document["out"])


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    out = parameters(arguments)
    files = checkpoint_files()
    try:
        changed = write(out, files)
    except OSError as error:
        print(json.dumps(explain(error, out)))
        return 1
    rows = [
        {"file": file, "sha256": hashlib.sha256(files[file]).hexdigest(), "bytes": len(files[file])}
        for file in sorted(files)
    ]
    result = {
        "changed": changed,
        "dir": os.path.abspath(out),
        "digest": hashlib.sha256(manifest(files).encode()).hexdigest(),
        "bytes": sum(len(content) for content in files.values()),
        "files": rows,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
