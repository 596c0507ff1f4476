#!/usr/bin/env python3
"""Write the rehearsal's checkpoint: tiny, and taught the dialogues that the acceptance asks.

Qwen2-shaped (a model that vLLM serves on any CPU), with DeepSeek-V4's special tokens, so that the
`deepseek_v4` tokenizer, reasoning and tool-call parsers of vLLM work on it for real. Three safetensors
shards with an index, a tokenizer, and the configs: under 2 MB.

The weights come from `make_rehearsal_checkpoint.safetensors` beside this program, which
`scripts/teach_checkpoint.py` made; its metadata holds the words of the tokenizer. Nothing is computed
here, and JSON is written with fixed order and separators, so the bytes are the same on every machine.

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

HEAD_DIM = 32
ROPE_THETA = 1e4
MAX_POSITIONS = 8192
SHARDS = 3
WEIGHTS = os.path.splitext(os.path.abspath(__file__))[0] + ".safetensors"

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
# What every tool's schema repeats, one token each: a preamble of 40 tools is then 600 tokens, not 1900.
PHRASES = (
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}}, "required": ["',
    '"]}}\n{"name": "',
)
# How text falls into words: a Han character, a digit, a run of Latin letters, of anything else, of space.
# A word that the vocabulary does not know is spelt byte by byte.
SPLIT = r"[一-龥]|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9一-龥]+|\s+"

Tensor = Tuple[Tuple[int, ...], bytes]


class Damaged(Exception):
    """The file of weights beside this program cannot be used."""


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


def vocabulary(words: List[str]) -> Dict[str, int]:
    """Token -> id without the markers: the specials, the bytes, the words."""
    alphabet = byte_alphabet()
    spelt = ["".join(alphabet[byte] for byte in word.encode()) for word in (*PHRASES, *words)]
    return {token: number for number, token in enumerate([BOS, EOS, PAD, *alphabet, *spelt])}


def split_pattern() -> str:
    """The expression that takes a text apart, phrases first."""
    special = "\\^$.|?*+()[]{}"
    escaped = ["".join("\\" + c if c in special else c for c in phrase) for phrase in PHRASES]
    return "|".join([*escaped, SPLIT])


def tokenizer_json(words: List[str]) -> Dict[str, Any]:
    """`tokenizer.json`; with `ignore_merges` whole words win."""
    words_first = {
        "type": "Split",
        "pattern": {"Regex": split_pattern()},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = byte_level_step(False)
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [words_first, byte_level]}
    return bpe_json(vocabulary(words), [], pre_tokenizer, byte_level, ignore_merges=True)


def byte_level_step(use_regex: bool) -> Dict[str, Any]:
    """Bytes as printable characters; `use_regex` also takes the text apart as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def bpe_json(
    vocab: Dict[str, int],
    merges: List[Tuple[str, str]],
    pre_tokenizer: Dict[str, Any],
    decoder: Dict[str, Any],
    ignore_merges: bool,
) -> Dict[str, Any]:
    """A byte-level BPE tokenizer with DeepSeek-V4's markers, as the `tokenizers` library reads it."""
    added = [(vocab[token], token, True) for token in (BOS, EOS, PAD)]
    added += [(len(vocab) + place, token, False) for place, token in enumerate(MARKERS)]
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
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def read_weights(path: str) -> Tuple[Dict[str, Tensor], List[str]]:
    """The tensors in the file's order, and the tokenizer's words. Raises OSError or Damaged."""
    with open(path, "rb") as stream:
        content = stream.read()
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        words = json.loads(header.pop("__metadata__")["words"])
        data = content[8 + size :]
        found = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = (tuple(entry["shape"]), data[start:end])
            if entry["dtype"] != "BF16" or len(found[name][1]) != end - start:
                raise ValueError(name)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged("it is cut or no file of taught weights (%s)" % error) from None
    return found, words


def safetensors(part: Dict[str, Tensor], metadata: Dict[str, str]) -> bytes:
    """One file: 8 bytes of header length, the header padded to 8 bytes, the data."""
    header: Dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (shape, data) in part.items():
        end = offset + len(data)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in part.values())


def shards(every: Dict[str, Tensor]) -> Tuple[Dict[str, bytes], Dict[str, Any]]:
    """File name -> bytes for the shards, and the index; tensors are dealt out in turn."""
    files: Dict[str, bytes] = {}
    weight_map: Dict[str, str] = {}
    for shard in range(SHARDS):
        file = "model-%05d-of-%05d.safetensors" % (shard + 1, SHARDS)
        names = list(every)[shard::SHARDS]
        files[file] = safetensors({name: every[name] for name in names}, {"format": "pt"})
        weight_map.update((name, file) for name in names)
    total = sum(len(data) for _, data in every.values())
    return files, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def config(every: Dict[str, Tensor]) -> Dict[str, Any]:
    """`config.json`, with the sizes that the tensors have."""
    vocab, hidden = every["model.embed_tokens.weight"][0]
    layer = "model.layers.0."
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": every[layer + "mlp.up_proj.weight"][0][0],
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "qwen2",
        "num_attention_heads": every[layer + "self_attn.q_proj.weight"][0][0] // HEAD_DIM,
        "num_hidden_layers": sum(name.endswith(".input_layernorm.weight") for name in every),
        "num_key_value_heads": every[layer + "self_attn.k_proj.weight"][0][0] // HEAD_DIM,
        "rms_norm_eps": 1e-06,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": "lm_head.weight" not in every,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


def checkpoint_files(every: Dict[str, Tensor], words: List[str]) -> Dict[str, bytes]:
    """File name -> content of the whole checkpoint, the index last."""
    files, index = shards(every)
    documents = {
        "config.json": config(every),
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
        "tokenizer.json": tokenizer_json(words),
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
        description="Write the rehearsal's tiny checkpoint (under 2 MB, the same bytes on every machine)."
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
    try:
        files = checkpoint_files(*read_weights(WEIGHTS))
    except (Damaged, OSError) as damage:
        fix = "bring the programs there again: remove the folder of this one, then run the same verb"
        what = "the taught weights cannot be read: %s" % damage
        print(json.dumps({"error": {"id": "weights", "what": what, "file": WEIGHTS, "fix": fix}}))
        return 1
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
