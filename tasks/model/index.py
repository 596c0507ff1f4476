"""What a checkpoint says of itself: its shards (`*.safetensors.index.json`) and how it can draft tokens.

Pure. The index on the host is checked by `onhost/verify_weights.py`, whose parser this uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.onhost.verify_weights import INDEX_SUFFIX, Index, parse_index

__all__ = ["INDEX_SUFFIX", "Index", "Shards", "against_listing", "draft_methods", "parse_index"]


@dataclass(frozen=True)
class Shards:
    """An index held against the files of a listing, before anything is downloaded."""

    named: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Every shard is there, and no other."""
        return not self.missing and not self.extra


def against_listing(index: Index, paths: Iterable[str]) -> Shards:
    """Shards that the index names and the listing lacks, and shards that it does not name.

    Names are taken from the index, never from a `-of-` pattern: checkpoints exist whose shards have none.
    """
    there = {path for path in paths if path.endswith(".safetensors")} | (set(paths) & set(index.shards))
    named = set(index.shards)
    return Shards(len(named), tuple(sorted(named - there)), tuple(sorted(there - named)))


def draft_methods(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The speculative methods that a DeepSeek-V4 checkpoint carries, from its config.json.

    `dspark` where the config has a `dspark_block_size` (the -0731 and -DSpark checkpoints, which carry no
    MTP layer that the engine could use), else `mtp` where it has next-token layers (the preview of July).
    Source: vllm-project/recipes, models/deepseek-ai/DeepSeek-V4-Flash.yaml.
    """
    if config.get("dspark_block_size"):
        return ("dspark",)
    layers = config.get("num_nextn_predict_layers")
    return ("mtp",) if isinstance(layers, int) and layers > 0 else ()
