"""Combinations of engine, GPU, checkpoint and flags that cannot work. The rules are data: `pairings.toml`."""

from __future__ import annotations

import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tasks.checks.gpu import capability_of, chosen
from tasks.checks.needs import Needs
from tasks.checks.words import names
from tasks.facts import HostFacts
from tasks.facts.text import version_key
from tasks.findings import Finding, Status, fail, ok, warn

DATA = Path(__file__).with_name("pairings.toml")
# Methods that need weights of their own in the checkpoint (the others work with any).
OF_CHECKPOINT = ("mtp", "dspark")

# Besides tensor parallel, what multiplies the GPUs of one engine.
_WORLD = ("pipeline", "data")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Rule:
    """One combination that does not work. Conditions that are None are not asked."""

    name: str
    summary: str
    fix: str
    reference: str
    status: Status = "fail"
    engine: str | None = None
    flashinfer: str | None = None
    capability: str | None = None
    speculative: str | None = None
    tokens: str | None = None
    parallel: str | None = None
    gpu: bool | None = None
    flag: Mapping[str, Any] = field(default_factory=dict)
    without_flag: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One reason against a combination."""

    status: Status
    summary: str
    fix: str
    reference: str


@cache
def rules() -> tuple[Rule, ...]:
    """The rules of `pairings.toml`. Raises TypeError when a rule has a key that there is not."""
    data = tomllib.loads(DATA.read_text("utf-8"))
    return tuple(
        Rule(**{**rule, "without_flag": tuple(rule.get("without_flag", ()))}) for rule in data["rule"]
    )


def in_range(version: str | int | None, spec: str) -> bool:
    """Whether a version is in a range such as `>=0.27,<0.28`; unknown versions are in none."""
    have = version_key(str(version)) if version is not None else ()
    if not have:
        return False
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(\d[\w.]*)\s*", part)
        if not match:
            raise ValueError(f"not a version range: {part!r}")
        want = version_key(match.group(2))
        width = max(len(have), len(want))
        padded = (0,) * width
        if not _COMPARE[match.group(1)]((have + padded)[:width], (want + padded)[:width]):
            return False
    return True


def flag_value(flags: Mapping[str, Any], name: str) -> Any:
    """The value of a flag, also inside a JSON one: `speculative-config.method`, `attention_config.x`.

    Dashes and underscores are the same to the engine; a JSON flag may be a table or its text. None when it
    is not set.
    """
    wanted = name.replace("_", "-")
    for key, value in flags.items():
        own = key.replace("_", "-")
        if own == wanted:
            return value
        if wanted.startswith(own + ".") and (table := _table(value)) is not None:
            return flag_value(table, wanted.removeprefix(own + "."))
    return None


def _table(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else None


def flag_count(flags: Mapping[str, Any], name: str) -> int | None:
    """The number that a flag is set to, as a number or its text; None when it is not."""
    value = flag_value(flags, name)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    return int(value) if str(value).isdigit() else None


def applies(rule: Rule, needs: Needs, capability: str | None) -> bool:
    """Whether all conditions of a rule hold."""
    if rule.engine and not in_range(needs.engine_version, rule.engine):
        return False
    if rule.flashinfer and not in_range(needs.flashinfer, rule.flashinfer):
        return False
    if rule.capability and not (capability or "").startswith(rule.capability):
        return False
    if rule.speculative and needs.speculative_method != rule.speculative:
        return False
    if rule.tokens and not in_range(needs.speculative_tokens, rule.tokens):
        return False
    if rule.parallel and not in_range(needs.tensor_parallel, rule.parallel):
        return False
    if rule.gpu is not None and needs.want_gpu != rule.gpu:
        return False
    if any(not _equal(flag_value(needs.flags, name), value) for name, value in rule.flag.items()):
        return False
    return not any(flag_value(needs.flags, name) is not None for name in rule.without_flag)


def _equal(have: Any, want: Any) -> bool:
    if isinstance(want, bool):
        return have is want or str(have).lower() == str(want).lower()
    return bool(have == want)


def structural(needs: Needs) -> list[Verdict]:
    """What follows from the numbers and the checkpoint rather than from a known fault."""
    found = []
    method, able = needs.speculative_method, needs.model_speculative
    if method in OF_CHECKPOINT and method not in able:
        can = names(able) or "none"
        found.append(
            Verdict(
                "fail",
                f"this checkpoint has no weights for {method} (it can do: {can})",
                f"Set the method to {able[0]}." if able else "Serve without speculation.",
                "vllm-project/recipes: the preview has mtp, 0731 and DSpark have dspark (config.json)",
            )
        )
    parallel, heads = needs.tensor_parallel, needs.attention_heads
    if parallel and heads and heads % parallel:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n <= parallel]
        found.append(
            Verdict(
                "fail",
                f"tensor parallel {parallel} does not divide the model's {heads} attention heads",
                f"Set tensor-parallel-size to {fitting[-1]}.",
                "vLLM: total number of attention heads must be divisible by tensor parallel size",
            )
        )
    count = needs.gpu.count if needs.gpu else 0
    sizes = {
        "tensor": parallel,
        **{kind: flag_count(needs.flags, f"{kind}-parallel-size") for kind in _WORLD},
    }
    told = " x ".join(f"{kind} parallel {size}" for kind, size in sizes.items() if size)
    world = math.prod(size for size in sizes.values() if size)
    if told and count and world > count:
        found.append(
            Verdict(
                "fail",
                f"{told} needs more GPUs than the recipe names ({count})",
                f"Choose sizes whose product is {count}, or set the recipe's count to {world}.",
                "vLLM: world size is larger than the available GPUs",
            )
        )
    elif told and count and count % world:
        found.append(
            Verdict(
                "fail",
                f"{told} does not divide the {count} GPUs that the recipe names",
                f"Choose sizes whose product is {count}, or set the recipe's count to {world}.",
                "vLLM: one engine uses tensor x pipeline x data parallel GPUs",
            )
        )
    elif told and count > world and not needs.disaggregated:
        found.append(
            Verdict(
                "warn",
                f"{told} leaves {count - world} of the recipe's {count} GPUs unused",
                f"Choose sizes whose product is {count}, or set the recipe's count to {world}.",
                "vLLM: one engine uses tensor x pipeline x data parallel GPUs",
            )
        )
    if needs.disaggregated and count and count % 2:
        found.append(
            Verdict(
                "fail",
                f"prefill and decode need an even split, and there are {count} GPUs",
                f"Use {count - 1} GPUs.",
                "vLLM issue #50765: unequal tensor parallel sizes fail in the NIXL handshake",
            )
        )
    return found


def verdicts(needs: Needs, capability: str | None) -> list[Verdict]:
    """Every reason against one mode on GPUs of this compute capability."""
    return structural(needs) + [
        Verdict(rule.status, rule.summary, rule.fix, rule.reference)
        for rule in rules()
        if applies(rule, needs, capability)
    ]


def known_issues(needs: Needs, host: HostFacts) -> list[Finding]:
    """What the recipe itself tells about its combination; said only where there is something."""
    if not needs.known_issues:
        return []
    return [ok("recipe.known_issues", "known of this recipe", "; ".join(needs.known_issues))]


def pairing(needs: Needs, host: HostFacts) -> Finding:
    """Nothing in recipe, engine and GPU is known not to go together.

    The recipe's other modes are looked at too, before anything is downloaded for them: they only warn, but
    for the one that is to be promoted.
    """
    capability = needs.gpu.compute_capability if needs.gpu else None
    if capability is None and needs.want_gpu:
        capability = next((value for gpu in chosen(needs, host.gpu) if (value := capability_of(gpu))), None)
    found = verdicts(needs, capability)
    for mode, other in needs.other_modes.items():
        found += [
            replace(
                verdict,
                status=verdict.status if mode == needs.promoting else "warn",
                summary=f"mode {mode}: {verdict.summary}",
            )
            for verdict in verdicts(other, capability)
            if verdict not in found
        ]
    blocking = [verdict for verdict in found if verdict.status == "fail"]
    worst = blocking or found
    if not worst:
        told = [
            f"engine {needs.engine_version}" if needs.engine_version else "",
            needs.speculative_method or "",
        ]
        return ok("recipe.pairing", "no known bad combination", names(word for word in told if word) or None)
    finding = fail if blocking else warn
    return finding(
        "recipe.pairing",
        "; ".join(verdict.summary for verdict in worst),
        observed=", ".join(
            word
            for word in (
                f"engine {needs.engine_version}" if needs.engine_version else "",
                f"compute capability {capability}" if capability else "",
                f"speculation {needs.speculative_method}" if needs.speculative_method else "",
                f"tensor parallel {needs.tensor_parallel}" if needs.tensor_parallel else "",
            )
            if word
        )
        or None,
        expected="a combination that works",
        fix=" ".join(dict.fromkeys(verdict.fix for verdict in worst)),
        reference="; ".join(dict.fromkeys(verdict.reference for verdict in worst)),
    )
