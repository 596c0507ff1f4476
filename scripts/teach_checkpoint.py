#!/usr/bin/env python3
"""Teach the rehearsal's tiny model the acceptance dialogues, and write its weights.

    python scripts/teach_checkpoint.py [--out FILE] [--steps N]      teach, write, examine (about 20 minutes)
    python scripts/teach_checkpoint.py --examine                     examine what is there (a minute)

Run it with the interpreter of an environment that has the engine (torch, transformers, vllm): prompts are
rendered by vLLM's own encoder. One thread, fixed seeds: the same machine makes the same weights. Another
machine sums in another order and makes others, so what counts is the committed file
`tasks/onhost/make_rehearsal_checkpoint.safetensors`; after teaching anew, write the manifest anew (the last
lines of the output say how).

What it learns: every dialogue of `tasks/onhost/accept.py` to the letter, and the skills behind them on
other words, so that nothing is right by rote alone: say just this, count to N, call a tool for a city and
use its result, open boxes round after round among up to 40 tools, with and without thinking.
Asked anything else, it says that it knows only this.

Exit status 1 when a dialogue is not known, or known with so small a lead that another CPU's rounding could
change it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
ONHOST = ROOT / "tasks" / "onhost"
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 320, 4, 4, 2
# The smallest lead, in logits, that a right token must have over the next one. Rounding every step to
# bfloat16 moves leads by less than a quarter of it (`examine` measures that).
LEAD = 3.0
COPYING, STEPS = 120, 900
SHARP = 6.5  # of the head that looks one token back

Json = dict[str, Any]
Example = tuple[list[int], list[int]]  # ids, and the same with -100 where the model only reads


def load(name: str, path: Path) -> ModuleType:
    """A program that is no package, as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


accept = load("rackwright_accept", ONHOST / "accept.py")
maker = load("rackwright_maker", ONHOST / "make_rehearsal_checkpoint.py")


def encoder() -> ModuleType:
    """vLLM's encoder of DeepSeek-V4 prompts, without importing the whole engine."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        sys.exit("this needs the engine's environment: vllm is not installed here")
    place = Path(next(iter(found.submodule_search_locations)))
    return load("deepseek_v4_encoding", place / "tokenizers" / "deepseek_v4_encoding.py")


encoding = encoder()

# --- what is said ------------------------------------------------------------------------------------------

UNKNOWN = "我是彩排用的小模型，只学过验收的对话。I only know the acceptance dialogues."
UNKNOWN_THOUGHT = "这个问题我没有学过。"
PLAIN = "它用混合专家让每个词元只激活少数参数，再用稀疏注意力处理长上下文。"
STREAM = (
    "MoE 架构把一层分成许多专家。每个词元先经过路由，路由只选少数专家；少数专家算完，结果按权重相加。"
    "许多专家合起来参数多，而每个词元只用少数专家，所以算得快。"
)
COMPARED = "9.9 更大，因为 9.90 大于 9.11。"
COMPARING = "比较小数：先补齐位数，9.9 就是 9.90，9.90 大于 9.11。"
SUNNY = '{"city": "北京", "sunny": true}'
CITIES = ("北京", "上海", "广州", "深圳", "杭州", "成都", "武汉", "西安", "南京", "天津")
SKY = ("晴", "阴", "雨", "雪")
UPPER, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"


@dataclass
class Turn:
    """One answer of the model: what it thinks (when thinking is on), says and calls."""

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    results: tuple[str, ...] = ()


@dataclass
class Dialogue:
    """What is asked, and the answers in order; results of calls follow the answer that made them."""

    name: str
    asked: str
    turns: list[Turn]
    tools: list[Json] = field(default_factory=list)
    system: str = ""

    def pieces(self, thinking: bool) -> Iterator[tuple[str, str]]:
        """Text pairs (what the model reads, what it must write), which joined are the whole dialogue."""
        messages: list[Json] = [{"role": "user", "content": self.asked}]
        if self.system or self.tools:
            messages.insert(0, {"role": "system", "content": self.system, "tools": self.tools})
        done = ""
        for turn in self.turns:
            prompt = render(messages, thinking)
            answer: Json = {"role": "assistant", "content": turn.text}
            if thinking:
                answer["reasoning"] = turn.thought
            if turn.calls:
                answer["tool_calls"] = [
                    {"id": str(i), "function": {"name": name, "arguments": values}}
                    for i, (name, values) in enumerate(turn.calls)
                ]
            whole = render([*messages, answer], thinking)
            assert prompt.startswith(done) and whole.startswith(prompt), self.name
            yield prompt[len(done) :], whole[len(prompt) :]
            done = whole
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": str(i), "content": result}
                for i, result in enumerate(turn.results)
            ]


def render(messages: list[Json], thinking: bool) -> str:
    """The prompt as the engine renders it for the acceptance's requests."""
    mode, effort = ("thinking", "high") if thinking else ("chat", None)
    return str(encoding.encode_messages(messages, mode, reasoning_effort=effort))


def said(name: str, asked: str, text: str, thought: str = "直接回答。") -> Dialogue:
    """A question and one answer."""
    return Dialogue(name, asked, [Turn(text, thought)])


def weather(
    name: str, asked: str, cities: tuple[str, ...], tools: list[Json], sky: str = "", code: str = ""
) -> Dialogue:
    """A call for each city; with a sky and a code in the result, the answer that uses them."""
    results = (json.dumps({"weather": sky, "observation": code}, ensure_ascii=False),) if code else ()
    calls = tuple(("get_weather", {"location": city}) for city in cities)
    turns = [Turn(thought="查询" + "和".join(cities) + "的天气。", calls=calls, results=results)]
    if code:
        turns.append(Turn(f"{cities[0]}今天{sky}，观测编号 {code}。", f"观测编号是 {code}。"))
    return Dialogue(name, asked, turns, tools)


def boxes(name: str, asked: str, chain: list[tuple[str, str, str]], tools: list[Json]) -> Dialogue:
    """Key after key to the password."""
    turns = [
        Turn(
            thought=f"钥匙是 {key}。",
            calls=(("open_box", {"key": key}),),
            results=(json.dumps({kind: content}),),
        )
        for key, kind, content in chain
    ]
    return Dialogue(name, asked, [*turns, Turn(chain[-1][2], f"口令是 {chain[-1][2]}。")], tools)


def asked_for_boxes(first: str) -> str:
    """The acceptance's question with another first key."""
    return str(accept.ASK_BOXES).replace(accept.BOXES[0][0], first)


def counted(last: int) -> str:
    """1,2,3 … up to `last`."""
    return ",".join(map(str, range(1, last + 1)))


def fixed() -> list[Dialogue]:
    """Every dialogue of the acceptance, to the letter."""
    weather_tools, enum_tools = [accept.WEATHER], [accept.WEATHER_ENUM]
    repeated = re.sub("^.*：", "", accept.ASK_UTF8)
    return [
        *(said("exact", asked, wanted) for asked, wanted in accept.ASK_EXACT),
        said("plain", accept.ASK_PLAIN, PLAIN),
        said("stream", accept.ASK_STREAM, STREAM),
        said("count", accept.ASK_COUNT, counted(20)),
        said("utf8", accept.ASK_UTF8, repeated),
        said("think", accept.ASK_THINK, COMPARED, COMPARING),
        said("json", accept.ASK_JSON, SUNNY),
        weather("tools.auto", accept.ASK_WEATHER, ("北京",), weather_tools),
        weather("tools.forced", accept.ASK_WEATHER, ("北京",), enum_tools),
        weather("tools.parallel", accept.ASK_TWO_CITIES, ("北京", "上海"), weather_tools),
        weather("tools.result", accept.ASK_RESULT, ("北京",), weather_tools, SKY[0], accept.RESULT_CODE),
        boxes("agent.rounds", accept.ASK_BOXES, list(accept.BOXES), accept.preamble()),
        said("hello", "Hello", UNKNOWN, UNKNOWN_THOUGHT),
        said("hi", "hi", UNKNOWN, UNKNOWN_THOUGHT),
    ]


# --- the same skills on other words ------------------------------------------------------------------------


class Variations:
    """Dialogues of the same kinds with other words, drawn anew for every step."""

    def __init__(self, seed: int, words: list[str]) -> None:
        self.random = random.Random(seed)
        self.words = words
        self.han = [word for word in words if re.fullmatch("[一-龥]", word)]
        self.others = [tool for tool in accept.preamble() if tool != accept.OPEN_BOX]

    def key(self) -> str:
        """A key as the boxes have them: a letter and two digits."""
        return self.random.choice(UPPER) + "".join(self.random.choices(DIGITS, k=2))

    def code(self, letters: int, digits: int, between: str = "") -> str:
        """Capital letters and digits."""
        pick = self.random.choices
        return "".join(pick(UPPER, k=letters)) + between + "".join(pick(DIGITS, k=digits))

    def some_tools(self, most: int, needed: list[Json]) -> list[Json]:
        """The tool that is needed among others."""
        many = self.random.randint(0, most)
        tools = self.random.sample(self.others, min(many, len(self.others)))
        for one in needed:
            tools.insert(self.random.randint(0, len(tools)), one)
        return tools

    def noise(self, longest: int) -> str:
        """A question that means nothing."""
        count = max(1, int(longest ** self.random.random()))
        return "".join(self.random.choices(self.words, k=count))

    def repeat(self) -> Dialogue:
        """Say just this."""
        if self.random.random() < 0.6:
            text = self.code(self.random.randint(1, 5), self.random.randint(0, 3), "_")
        else:
            text = "".join(self.random.choices(self.han, k=self.random.randint(1, 6)))
        form = self.random.choice(("只输出：%s", "你好，只回答：%s"))
        return said("repeat", form % text, text)

    def count(self) -> Dialogue:
        """Count to another number."""
        last = self.random.randint(3, 30)
        return said("count", accept.ASK_COUNT.replace("20", str(last)), counted(last))

    def call(self) -> Dialogue:
        """Another city's weather, one or two at once, with a result or without."""
        tools = self.some_tools(3, [self.random.choice((accept.WEATHER, accept.WEATHER_ENUM))])
        one, two = self.random.sample(CITIES, 2)
        kind = self.random.randrange(3)
        if kind == 0:
            return weather("call", accept.ASK_WEATHER.replace("北京", one), (one,), tools)
        if kind == 1:
            asked = accept.ASK_TWO_CITIES.replace("北京", one).replace("上海", two)
            return weather("calls", asked, (one, two), tools)
        asked = accept.ASK_RESULT.replace("北京", one)
        return weather("result", asked, (one,), tools, self.random.choice(SKY), self.code(2, 4))

    def rounds(self, most_tools: int, most_rounds: int = 5) -> Dialogue:
        """Other keys, fewer or more rounds, some of the tools."""
        keys = [self.key() for _ in range(self.random.randint(1, most_rounds))]
        word = self.code(self.random.randint(3, 7), 4, "_")
        chain = [(a, "next_key", b) for a, b in itertools.pairwise(keys)]
        chain.append((keys[-1], "password", word))
        tools = self.some_tools(most_tools, [accept.OPEN_BOX])
        return boxes("rounds", asked_for_boxes(keys[0]), chain, tools)

    def unknown(self, longest: int = 120) -> Dialogue:
        """Anything else."""
        one = said("unknown", self.noise(longest), UNKNOWN, UNKNOWN_THOUGHT)
        if self.random.random() < 0.2:
            one.system = self.noise(20)
        return one

    def short(self) -> Dialogue:
        """One of the short kinds."""
        kinds: list[Callable[[], Dialogue]] = [self.repeat, self.repeat, self.count, self.unknown]
        return self.random.choice(kinds)()


# --- tokens ------------------------------------------------------------------------------------------------


def words_of(texts: list[str]) -> list[str]:
    """The words of the tokenizer: what the dialogues are made of, in the order in which it comes.

    Left out, so that they are spelt byte by byte: words in capitals (keys and passwords are copied letter
    by letter), and the characters that the acceptance wants to see put together from bytes.
    """
    rare = set(re.sub("^.*：", "", accept.ASK_UTF8)[:5])
    markers = "|".join(map(re.escape, (*maker.MARKERS, maker.BOS, maker.EOS, maker.PAD)))
    found: dict[str, None] = {}
    for text in texts:
        for part in re.split(markers, text):
            for word in re.findall(maker.split_pattern(), part):
                spelt = len(word.encode()) == 1 or rare & set(word) or re.fullmatch(" ?[A-Z]+", word)
                if not spelt and word not in maker.PHRASES:
                    found[word] = None
    return list(found)


def whole_text(dialogue: Dialogue, thinking: bool) -> str:
    """A dialogue as one text."""
    return "".join(read + written for read, written in dialogue.pieces(thinking))


class Coder:
    """Dialogues as token ids, with what counts for learning."""

    def __init__(self, words: list[str]) -> None:
        self.tokenizer = Tokenizer.from_str(json.dumps(maker.tokenizer_json(words), ensure_ascii=False))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def example(self, dialogue: Dialogue, thinking: bool) -> Example:
        """Ids, and the same with -100 where the model only reads."""
        ids: list[int] = []
        labels: list[int] = []
        for read, written in dialogue.pieces(thinking):
            a, b = self.ids(read), self.ids(written)
            ids += a + b
            labels += [-100] * len(a) + b
        return ids, labels

    def looped(self, dialogue: Dialogue) -> Example:
        """The answer again and again: what comes when a client ignores the end token."""
        ids, labels = self.example(dialogue, False)
        again = self.ids(UNKNOWN + maker.EOS)
        return ids + again * 2, labels + again * 2

    def raw(self, text: str) -> Example:
        """A text that is no conversation, as benchmarks send it: readable words follow."""
        read, again = self.ids(text), self.ids(UNKNOWN + maker.EOS)
        return read + again * 3, [-100] * len(read) + again * 3


def batch_of(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples side by side, padded on the right."""
    longest = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), longest), 2)
    labels = torch.full((len(examples), longest), -100)
    for row, (one, wanted) in enumerate(examples):
        ids[row, : len(one)] = torch.tensor(one)
        labels[row, : len(wanted)] = torch.tensor(wanted)
    return ids, labels


# --- learning ----------------------------------------------------------------------------------------------


def new_model(vocab: int) -> Qwen2ForCausalLM:
    """The model before it knows anything."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=maker.HEAD_DIM,
            max_position_embeddings=maker.MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": maker.ROPE_THETA},
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        )
    )


def rows_apart(count: int, size: int) -> torch.Tensor:
    """Random rows of length 1 that stand at right angles to each other."""
    return torch.linalg.qr(torch.randn(size, count))[0].T


@torch.no_grad()
def able_to_copy(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Give the first two layers what a model needs to copy: it would take hours to come by itself.

    In layer 0 one head looks at the token before. In layer 1 two heads look for the place whose token before
    is the present token, and copy what stands there (Olsson et al. 2022, "In-context learning and induction
    heads"). Rotary embeddings turn the pair (i, i + 16) of a head by position; only the slow half of the
    pairs carries content.
    """
    size, half = maker.HEAD_DIM, maker.HEAD_DIM // 2
    angles = maker.ROPE_THETA ** (-torch.arange(half) / half)
    slow = torch.tensor([*range(half // 2, half), *range(half + half // 2, size)])
    before, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    model.model.embed_tokens.weight.mul_(5.0)
    read, written = rows_apart(size, HIDDEN), rows_apart(size, HIDDEN)
    before.q_proj.weight[:size] = 0
    before.k_proj.weight[:size] = 0
    before.q_proj.bias[:size] = SHARP * torch.cat([angles.cos(), -angles.sin()])
    before.k_proj.bias[:half], before.k_proj.bias[half:size] = SHARP, 0
    before.v_proj.weight[:size] = read
    before.o_proj.weight[:, :size] = 0.2 * written.T
    for head, kv in ((0, 0), (2, 1)):
        copied = rows_apart(size, HIDDEN)
        match.q_proj.weight[head * size + slow] = 2.0 * read[slow]
        match.k_proj.weight[kv * size + slow] = 2.0 * written[slow]
        match.v_proj.weight[kv * size : (kv + 1) * size] = copied
        match.o_proj.weight[:, head * size : (head + 1) * size] = copied.T
    return model


def loss_of(model: Qwen2ForCausalLM, examples: list[Example], lead: float = 0.0) -> torch.Tensor:
    """Cross-entropy of what the model must write, where right tokens have to be `lead` logits ahead.

    Tokens count by how wrong they are: nearly all of a dialogue is easy, and what is left (which of the keys
    in sight is the next one?) would drown in the mean.
    """
    ids, labels = batch_of(examples)
    hidden_states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    logits = model.lm_head(hidden_states[wanted != -100])
    wanted = wanted[wanted != -100]
    if lead:
        logits = logits - lead * torch.nn.functional.one_hot(wanted, logits.shape[-1])
    losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    weights = losses.detach().clamp(max=4) + 0.05
    return (losses * weights).sum() / weights.sum()


def bare(example: Example, user: int) -> Example:
    """An example without what comes before the question (tools, effort): the same skill for less work."""
    ids, labels = example
    start = ids.index(user)
    return ids[:1] + ids[start:], labels[:1] + labels[start:]


def repeated(v: Variations, vocab: int, rows: int) -> list[Example]:
    """Random tokens that come again."""
    out = []
    for _ in range(rows):
        one, gap = (
            [v.random.randrange(3, vocab) for _ in range(v.random.randint(*size))]
            for size in ((4, 24), (0, 24))
        )
        out.append((one + gap + one, [-100] * (len(one) + len(gap) + 1) + one[1:]))
    return out


def lesson(v: Variations, coder: Coder, step: int, share: float) -> list[list[Example]]:
    """The examples of one step, in groups of like length; `share` of the course is over."""
    user = coder.tokenizer.token_to_id("<｜User｜>")
    flip = v.random.random
    own = fixed()
    late = share > 0.4
    short = [coder.example(v.short(), flip() < 0.25) for _ in range(8)]
    short += [coder.looped(v.unknown(60)), coder.raw(v.noise(100))]
    short += [bare(coder.example(v.call(), flip() < 0.5), user) for _ in range(4)]
    groups = [short]
    for thinking in (False, True):
        most = 5 if late else 3
        groups.append(
            [bare(coder.example(v.rounds(0, most), thinking), user) for _ in range(3 if late else 4)]
        )
    if step % 2:
        plain = [one for one in own if not one.tools]
        groups.append([coder.example(one, flip() < 0.4) for one in v.random.sample(plain, 5)])
    if late and step % 2:
        groups.append([coder.example(v.random.choice([one for one in own if one.tools]), flip() < 0.5)])
    elif late:
        some = v.rounds(8 if share < 0.6 else 39) if step % 4 else v.call()
        groups.append([coder.example(some, flip() < 0.5)])
    return groups


def teach(coder: Coder, words: list[str], steps: int) -> Qwen2ForCausalLM:
    """The whole course: first copying alone, then everything."""
    torch.manual_seed(20260731)
    vocab = coder.tokenizer.get_vocab_size()
    model = able_to_copy(new_model(vocab))
    v = Variations(7, words)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(-COPYING, steps):
        share = max(0.0, step / steps)
        cosine = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * cosine * min(1.0, (step + COPYING + 1) / 60)
        groups = lesson(v, coder, step, share) if step >= 0 else [repeated(v, vocab, 32)]
        optimizer.zero_grad()
        losses = []
        for examples in groups:
            loss = loss_of(model, examples, LEAD if share > 0.75 else 0.0)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            told = " ".join(f"{loss:.4f}" for loss in losses)
            print(f"step {step} of {steps}, {time.monotonic() - began:.0f} s: {told}", flush=True)
    return model.eval()


# --- writing and examining ---------------------------------------------------------------------------------


def write(model: Qwen2ForCausalLM, words: list[str], path: Path) -> None:
    """The weights as bfloat16 with the words of the tokenizer, in the order of a forward pass."""
    parts = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # the same as the embeddings
            data = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
            parts[name] = (tuple(tensor.shape), data)
    metadata = {"format": "pt", "words": json.dumps(words, ensure_ascii=False)}
    path.write_bytes(maker.safetensors(parts, metadata))


def read(path: Path) -> tuple[Qwen2ForCausalLM, list[str]]:
    """The model of a file of weights, in bfloat16."""
    tensors, words = maker.read_weights(str(path))
    model = new_model(tensors["model.embed_tokens.weight"][0][0]).to(torch.bfloat16)
    state = {
        name: torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape)
        for name, (shape, data) in tensors.items()
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval(), words


@torch.no_grad()
def leads(model: Qwen2ForCausalLM, example: Example) -> torch.Tensor:
    """How far each right token is ahead of the best other one; below 0 it would not be said."""
    ids, labels = batch_of([example])
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    logits = model.lm_head(states[wanted != -100]).float()
    wanted = wanted[wanted != -100][:, None]
    return logits.gather(1, wanted)[:, 0] - logits.scatter(1, wanted, -1e9).max(1).values


def examine(path: Path) -> bool:
    """Whether every dialogue of the acceptance is known well enough; prints what is and what is not."""
    half, words = read(path)
    full = new_model(half.config.vocab_size).eval()
    full.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    coder, v = Coder(words), Variations(99, words)
    good, moved, smallest = True, 0.0, math.inf
    for one in fixed():
        for thinking in (False, True):
            example = coder.example(one, thinking)
            a, b = leads(half, example), leads(full, example)
            moved = max(moved, float((a - b).abs().max()))
            lead = float(torch.minimum(a, b).min())
            smallest = min(smallest, lead)
            good = good and lead > LEAD / 2
            mode = "thinking" if thinking else "chat"
            doubt = "" if lead > LEAD / 2 else "   NOT KNOWN WELL"
            print(f"{one.name:14} {mode:8} {len(example[0]):5} tokens, smallest lead {lead:6.2f}{doubt}")
    print(f"smallest lead {smallest:.2f}; bfloat16 against float32 moves leads by at most {moved:.2f}")
    kinds: dict[str, Callable[[], Dialogue]] = {
        "say just this": v.repeat,
        "count to N": v.count,
        "tool call": v.call,
        "boxes, 40 tools": lambda: v.rounds(39),
        "anything else": v.unknown,
    }
    for name, make in kinds.items():
        right = sum(bool((leads(half, coder.example(make(), i % 2 == 0)) > 0).all()) for i in range(40))
        print(f"other words: {name:16} {right} of 40 right")
    return good


def main() -> int:
    """Teach and examine, or only examine."""
    options = argparse.ArgumentParser(
        description="Teach the rehearsal's tiny model the acceptance dialogues."
    )
    options.add_argument("--out", type=Path, default=ONHOST / "make_rehearsal_checkpoint.safetensors")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--examine", action="store_true", help="teach nothing, examine the file")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not given.examine:
        texts = [whole_text(one, thinking) for one in fixed() for thinking in (False, True)]
        words = words_of([*texts, "".join(CITIES + SKY)])
        write(teach(Coder(words), words, given.steps), words, given.out)
        print(f"wrote {given.out}; now the manifest:")
        print(
            "  make_rehearsal_checkpoint.py DIR && (cd DIR && LC_ALL=C sha256sum *) > …/rehearsal-cpu.sha256"
        )
    return 0 if examine(given.out) else 1


if __name__ == "__main__":
    sys.exit(main())
