#!/usr/bin/env python3
"""Acceptance: prove that an OpenAI-compatible endpoint serves the model, and not only that it answers.

Runs on the host beside the engine, with any Python >= 3.8 and nothing but the standard library:

    python3 accept.py --base-url http://127.0.0.1:8000 --model deepseek-v4-flash --profile standard --json

Each check sends real requests and judges what came back. It has an id, a time limit and evidence (the
request and the response that decided, cut and without the key). The verdict of a check is pass, fail, or
skipped with the reason; the run passes when nothing failed and something passed. A server that hangs,
trickles or floods cannot hang the run: a watchdog closes the socket when the time is over.

With `--stdin` the parameters are one JSON object: base_url, model, api_key_file, profile, checks,
skip {id: reason}, patience, knowledge, expect. `knowledge: false` says that the checkpoint has random
weights: what needs a model that knows something is then skipped, and the rest is judged by form only.
`expect` says what is known of the server (see EXPECT_KEYS). Exit codes: 0 pass, 1 fail, 2 wrong usage.

Facts about the engine are from its sources: the reasoning field is `reasoning` in vLLM and
`reasoning_content` in SGLang and at api.deepseek.com; upstream vLLM ignores a top-level `thinking`, forks
and DeepSeek honour it (vllm-project/vllm issue 41241), so both switches are always sent and both fields are
read. Counters have `_created` twins that hold a time stamp: only `_total` counts (Prometheus client).
"""

from __future__ import annotations

import argparse
import difflib
import http.client
import importlib
import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterator, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    Json = dict[str, Any]

PROFILES = ("smoke", "standard", "deep")
BUDGET = {"smoke": 240.0, "standard": 2400.0, "deep": 7200.0}  # seconds for a whole run, before patience
EXPECT_KEYS = {
    "max_model_len": "int: context length in tokens",
    "prefix_caching": "bool: whether prefix caching is on; absent: the server is asked",
    "speculative": "bool: whether speculative decoding is on; absent: judged when its counters exist",
    "key_required": "bool: whether /v1 must refuse requests without the key; absent: when a key is given",
    "identity": "object: what the receipt says of the process, with keys of its own",
    "log": "string: the engine's log file, to see kernels compiled after warm-up",
    "log_script": "string: a shell command that prints the log's end, where there is no file (a journal)",
}
IDENTITY_KEYS = {
    "pid": "int: process that must own the port, itself or through a child",
    "root": "string: model path in /v1/models",
    "version": "string: engine version in /version",
    "max_model_len": "int: context length in /v1/models",
    "started_after": "number: epoch seconds; an older process is a leftover",
}
MOST_BYTES = 16 * 1024 * 1024  # of one answer; more is a flood
MOST_CALLS = 128  # in one answer
MOST_PATIENCE = 1000
MOST_NUMBER = {"int": 2**31, "number": 1e12}  # of a context length or a process, of a time
DEEPEST = 100  # levels of lists and objects in a JSON text
MOST_LOOKS = 20  # at a gauge, until it shows a request that runs
RANDOM = "the checkpoint has random weights"


# --- what is said ------------------------------------------------------------------------------------------
# The dialogues are data: a tiny checkpoint can be taught them, and a stand-in can know them.

ASK_EXACT = (("只输出：PD_OK", "PD_OK"), ("你好，只回答：你好", "你好"))
ASK_PLAIN = "用一句话介绍 DeepSeek-V4-Flash 的架构亮点。"
ASK_STREAM = "请简要介绍 DeepSeek-V4-Flash 的 MoE 架构。"
ASK_THINK = "9.9 和 9.11 哪个更大？请解释。"
ASK_COUNT = "从 1 数到 20，用逗号分隔，只写数字。"
ASK_UTF8 = "只输出：龘靐齉爩😀春眠不觉晓"
ASK_WEATHER = "北京今天天气如何？请调用工具查询。"
ASK_TWO_CITIES = "北京和上海今天天气如何？请在同一轮里分别为两个城市调用工具查询。"
ASK_RESULT = "北京今天天气如何？请调用工具查询，并在回答里写出观测编号。"
ASK_JSON = "北京今天晴朗吗？按给定的 JSON 格式回答。"
RESULT_CODE = "TQ5831"
ASK_BOXES = (
    "每个箱子里有下一个箱子的钥匙。请用 open_box 工具依次打开箱子，每轮只调用一次工具；"
    "工具返回口令时，不再调用工具，只输出这个口令。第一个钥匙是 A17。"
)
BOXES = (("A17", "next_key", "B42"), ("B42", "next_key", "C93"), ("C93", "next_key", "D08"),
         ("D08", "next_key", "E65"), ("E65", "password", "LINGXI_2718"))  # fmt: skip
NEEDLE = "宝库的口令是 ZHIMA_4096。"
NEEDLE_ANSWER = "ZHIMA_4096"
NEEDLE_HAY = "第 %d 行：山高水长，日升月落，四季如常。\n"
ASK_NEEDLE = "\n上文里宝库的口令是什么？只写口令。"
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["北京", "上海"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
VERBS = ("list", "read", "write", "search", "delete", "copy", "move", "watch")
NOUNS = ("file", "page", "issue", "commit", "table")


def tool(name: str, about: str, properties: Json) -> Json:
    """One function tool; all its properties are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


WEATHER = tool("get_weather", "查询指定城市的天气", {"location": {"type": "string"}})
# an enum keeps the arguments short when the weights are random
WEATHER_ENUM = tool("get_weather", "查询指定城市的天气", {"location": {"type": "string", "enum": ["北京"]}})
OPEN_BOX = tool("open_box", "用钥匙打开一个箱子，返回下一个钥匙或口令", {"key": {"type": "string"}})


def preamble() -> list[Json]:
    """The tools an agent carries around: 39 that are not needed, and open_box."""
    others = [
        tool(verb + "_" + noun, verb + " one " + noun, {"path": {"type": "string"}})
        for verb in VERBS for noun in NOUNS
    ][:39]  # fmt: skip
    return [*others[:20], OPEN_BOX, *others[20:]]


# markup of DeepSeek's reasoning and tool formats and of the common others; none belongs in an answer
MARKUP = re.compile(
    r"</?think>|｜DSML｜|<｜[^｜]{1,40}｜>|</?tool_calls?>|<function_calls?>|<invoke "
    r"|<\|[a-z_]{2,30}\|>|\[TOOL_CALLS\]"
)
# a kernel compiled while a request waited: vLLM's jit_monitor, TileLang, Triton's autotuner
COMPILED = re.compile(
    r"(JIT compilation|autotun\w+|compile) during inference|TileLang begins to compile|Triton autotuning for"
)


# --- redaction and cutting ---------------------------------------------------------------------------------

SECRETS = re.compile(
    r"(?i)(bearer\s+|api[-_]?key[\"'\s:=]+|token[\"'\s:=]+)[^\s\"',}]{8,}|\b(sk|hf|ms)[-_][A-Za-z0-9_-]{16,}"
)


def loads(text: str) -> Any:
    """What a JSON text holds. Raises ValueError, also where it is nested too deep to be walked through."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise ValueError("it is nested more than %d levels deep" % DEEPEST)


def redact(value: Any, key: str | None) -> Any:
    """`value` without the key, in any string, name or nesting, nor in its JSON or URL spelling."""
    if isinstance(value, dict):
        return {redact(k, key): redact(v, key) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v, key) for v in value]
    if not isinstance(value, str):
        return value
    if key:
        spellings = {key, json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]}
        spellings.add("".join("%%%02X" % byte for byte in key.encode()))
        for spelling in sorted(spellings, key=len, reverse=True):
            value = value.replace(spelling, "[redacted]")
    value = re.sub(r"(?i)\b(https?://)[^/\s@]+@", r"\1[redacted]@", value)
    return SECRETS.sub(lambda m: (m.group(1) or "") + "[redacted]", value)


PIECE = re.compile(r'"(?:content|reasoning|reasoning_content|arguments|text)":\s*("(?:[^"\\]|\\.)*")')


def spelled(stream: str) -> str:
    """What the pieces of a stream say together: a key may be spread over them."""
    said = []
    for piece in PIECE.findall(stream):
        try:
            said.append(json.loads(piece))
        except ValueError:
            said.append(piece)
    return "".join(said)


CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b.?"
    "|[\x00-\x08\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def plain(text: str) -> str:
    """One line for a terminal: no escapes, control or invisible characters, which a server may send."""
    return " ".join(CONTROL.sub("", text).split())


def cut(value: Any, characters: int = 600, items: int = 4) -> Any:
    """`value` small enough to read: long strings and lists end with what is left out."""
    if isinstance(value, dict):
        return {k: cut(v, characters, items) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        shown = [cut(v, characters, items) for v in value[:items]]
        return [*shown, "… %d more" % (len(value) - items)] if len(value) > items else shown
    if isinstance(value, str) and len(value) > characters:
        return value[:characters] + "… %d more characters" % (len(value) - characters)
    return value


# --- metrics -----------------------------------------------------------------------------------------------

SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

# what a number is called by engine and version, best name first; the first that is there is taken
NAMES = {
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "prompted": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "finished": ("vllm:request_success_total", "sglang:num_requests_total"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total",),
    "failed_notifications": ("vllm:nixl_num_failed_notifications_total",),
    "expired_transfers": ("vllm:nixl_num_kv_expired_reqs_total",),
    "started": ("process_start_time_seconds",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}


@dataclass(frozen=True)
class Metrics:
    """One page of /metrics: samples by exact name, each with its labels."""

    samples: dict[str, list[tuple[dict[str, str], float]]]

    def get(self, what: str) -> float | None:
        """The number called `what` in NAMES, summed over engines and labels; None when not exported."""
        for name in NAMES[what]:
            rows = self.samples.get(name)
            if rows:
                return sum(value for _, value in rows)
        return None

    def label(self, name: str, label: str) -> str | None:
        """A label of an info metric, such as enable_prefix_caching of vllm:cache_config_info."""
        for labels, _ in self.samples.get(name, []):
            if label in labels:
                return labels[label]
        return None


def parse_metrics(text: str) -> Metrics:
    """A page in the Prometheus text format. Lines that are not samples are passed over."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else SAMPLE.match(line.strip())
        if found is None:
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        labels = {name: raw.replace('\\"', '"') for name, raw in LABEL.findall(found.group(2) or "")}
        samples.setdefault(found.group(1), []).append((labels, value))
    return Metrics(samples)


def moved(before: Metrics, after: Metrics, what: str) -> float | None:
    """How far a counter moved between two pages; None when one of them does not export it."""
    a, b = before.get(what), after.get(what)
    return None if a is None or b is None else b - a


# --- HTTP --------------------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """One request and what came back, as evidence."""

    method: str
    path: str
    body: Any = None
    status: int | None = None
    text: str = ""
    kind: str = ""
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0

    def evidence(self, key: str | None) -> Json:
        """The exchange as the report shows it: redacted first, cut after, so that no half key is left."""
        request = {"method": self.method, "path": self.path, "body": self.body}
        if key and key in spelled(self.text):
            return {
                "request": cut(redact(request, key)),
                "response": {"status": self.status, "body": "[redacted]"},
            }
        try:
            answer: Any = loads(self.text)
        except ValueError:
            answer = self.text
        response = {"status": self.status, "body": answer, "seconds": round(self.seconds, 3)}
        if self.error:
            response["error"] = self.error
        return {"request": cut(redact(request, key)), "response": cut(redact(response, key))}


class Failed(Exception):
    """The check says no. `exchange` is the evidence, when it is not the last one."""

    def __init__(self, summary: str, exchange: Exchange | None = None) -> None:
        super().__init__(summary)
        self.exchange = exchange


class Skipped(Exception):
    """The check cannot mean anything here, and why."""


class Unanswered(Failed):
    """The server gave no whole answer: refused, closed, or out of time."""


@dataclass
class Event:
    """One server-sent event: when it came (seconds after the request), and its data."""

    at: float
    data: str


def events_of(lines: Iterator[tuple[float, bytes]], problems: list[str]) -> Iterator[Event]:
    """Events from the lines of a stream; what breaks the format is added to `problems`."""
    waiting: list[str] = []
    for at, raw in lines:
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            problems.append("an event is not valid UTF-8: a character was cut in two")
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if waiting:
                yield Event(at, "\n".join(waiting))
            waiting = []
        elif line.startswith("data:"):
            waiting.append(line[5:].lstrip(" "))
        elif not line.startswith((":", "event:", "id:", "retry:")):
            problems.append("a line is no server-sent event: " + line[:80])
    if waiting:
        problems.append("the last event is not ended by an empty line")
        yield Event(0.0, "\n".join(waiting))


class Client:
    """HTTP to one server, where every request has a deadline that a watchdog enforces."""

    def __init__(self, base_url: str, key: str | None) -> None:
        form = "base URL must be http://HOST[:PORT] or https://…, not %r" % base_url
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ValueError("%s (%s)" % (form, error)) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\x00-\x20]", base_url):
            raise ValueError(form)
        if not parts.path.isascii():
            raise ValueError(form + " (its path has characters that must be written as %..)")
        if port == 0:
            raise ValueError(form + " (nothing listens on port 0)")
        self.url = base_url
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        prefix = parts.path.rstrip("/")
        self.prefix = prefix[:-3] if prefix.endswith("/v1") else prefix
        self.key = key
        self.deadline = math.inf
        self.exchanges: list[Exchange] = []

    def send(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, key: str | None = None,
        seconds: float = 60.0, each_line: Callable[[Iterator[tuple[float, bytes]]], None] | None = None,
        name: str | None = None,
    ) -> Exchange:  # fmt: skip
        """One request. Errors of the transport are noted in the exchange, never raised.

        `key` replaces the client's key ("" sends none). With `each_line` the body of a good answer is
        handed over line by line, each with its time, and is kept as text as far as it was read. `name` is
        the request's own, by which engines log it.
        """
        exchange = Exchange(method, path, body if raw is None else raw.decode("utf-8", "replace"))
        self.exchanges.append(exchange)
        started = time.monotonic()
        seconds = max(0.05, min(seconds, self.deadline - started))
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if name:
            headers["X-Request-Id"] = name
        used = self.key if key is None else key
        if used:
            headers["Authorization"] = "Bearer " + used
        maker = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = maker(self.host, self.port, timeout=seconds)
        watchdog: threading.Timer | None = None
        response: http.client.HTTPResponse | None = None

        def close() -> None:
            exchange.timed_out = True
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

        try:
            connection.connect()
            sock = connection.sock
            watchdog = threading.Timer(max(0.01, started + seconds - time.monotonic()), close)
            watchdog.daemon = True
            watchdog.start()
            connection.request(method, self.prefix + path, data, headers)
            response = connection.getresponse()
            exchange.status = response.status
            exchange.kind = response.getheader("Content-Type") or ""
            if each_line is not None and response.status == 200:
                each_line(self.lines(response, exchange, started))
            else:
                self.whole(response, exchange)
        except socket.timeout:
            exchange.timed_out = True
        except (OSError, http.client.HTTPException, ValueError) as error:
            exchange.error = "%s: %s" % (type(error).__name__, error)
        finally:
            if watchdog is not None:
                watchdog.cancel()
            if response is not None:
                response.close()  # with "Connection: close" it is the response that holds the socket
            connection.close()
        exchange.seconds = time.monotonic() - started
        if exchange.timed_out:
            exchange.error = "no whole answer in %.1f s" % seconds
        return exchange

    @staticmethod
    def whole(response: http.client.HTTPResponse, exchange: Exchange) -> None:
        """Read a whole body into the exchange, up to the flood limit."""
        data = b""
        while True:
            piece = response.read(65536)
            data += piece
            if not piece or len(data) > MOST_BYTES:
                break
        exchange.text = data.decode("utf-8", "replace")
        if response.length and len(data) <= MOST_BYTES:
            exchange.error = "the answer was cut: %d bytes are missing" % response.length
        if len(data) > MOST_BYTES:
            exchange.error = "the answer is longer than %d bytes" % MOST_BYTES

    @staticmethod
    def lines(
        response: http.client.HTTPResponse, exchange: Exchange, started: float
    ) -> Iterator[tuple[float, bytes]]:
        """The lines of a body as they come."""
        read = 0
        while read < MOST_BYTES:
            line = response.readline(MOST_BYTES)
            if not line:
                return
            read += len(line)
            exchange.text += line.decode("utf-8", "replace")
            yield time.monotonic() - started, line
        exchange.error = "the stream is longer than %d bytes" % MOST_BYTES

    def json(self, method: str, path: str, body: Any = None, seconds: float = 30.0) -> tuple[Exchange, Any]:
        """A request whose answer should be JSON; the value is None when it is not."""
        exchange = self.send(method, path, body, seconds=seconds)
        try:
            return exchange, loads(exchange.text)
        except ValueError:
            return exchange, None


# --- chat answers ------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One tool call as it was put together."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def parsed(self) -> Any:
        """The arguments as JSON; None when they are not."""
        try:
            return loads(self.arguments)
        except ValueError:
            return None


@dataclass
class Answer:
    """One choice of one chat completion, streamed or not, in one shape."""

    exchange: Exchange
    text: str = ""
    reasoning: str = ""
    reasoning_field: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    usage: Json | None = None
    model: str | None = None
    problems: list[str] = field(default_factory=list)
    first: float | None = None  # seconds to the first text, reasoning or call
    answer_before_reasoning: bool = False
    body: Any = None  # the whole answer when not streamed
    done: bool = False
    events: int = 0
    usage_with_choices: bool = False

    def take(self, delta: Json, at: float | None = None) -> None:
        """Add a message or a delta."""
        thought = ""
        for name in ("reasoning", "reasoning_content"):
            value = delta.get(name)
            if isinstance(value, str) and value and not thought:
                thought, self.reasoning_field = value, name
        said = delta.get("content")
        if thought:
            self.reasoning += thought
            self.answer_before_reasoning = self.answer_before_reasoning or bool(self.text.strip())
        if isinstance(said, str):
            self.text += said
        for i, piece in enumerate(delta.get("tool_calls") or []):
            number = i if piece.get("index") is None else piece["index"]
            if not 0 <= number < MOST_CALLS:
                self.problems.append("a tool call has the index %s" % number)
                continue
            while len(self.calls) <= number:
                self.calls.append(Call())
            function = piece.get("function") or {}
            call = self.calls[number]
            call.id = piece.get("id") or call.id
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""
        if at is not None and self.first is None and (thought or said or delta.get("tool_calls")):
            self.first = at

    def message(self) -> Json:
        """The answer as the next request's history carries it, reasoning included, as agents do."""
        message: Json = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        if self.reasoning:
            message[self.reasoning_field] = self.reasoning
        return message


def error_in(body: Any) -> str | None:
    """The error that a body carries, also when its status says 200."""
    if isinstance(body, dict) and body.get("error"):
        error = body["error"]
        return str(error.get("message") if isinstance(error, dict) else error)
    return None


def read_stream(answer: Answer, lines: Iterator[tuple[float, bytes]]) -> None:
    """Put a stream's chunks together and note every breach of its form."""
    problems = answer.problems
    for event in events_of(lines, problems):
        if event.data == "[DONE]":
            answer.done = True
            continue
        if answer.done:
            problems.append("data came after [DONE]")
        try:
            chunk = loads(event.data)
        except ValueError:
            problems.append("an event is no JSON: " + event.data[:80])
            continue
        answer.events += 1
        wrong = error_in(chunk)
        if wrong is not None:
            problems.append("the stream carries an error: " + wrong)
            continue
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            problems.append("an event has no choices: " + event.data[:80])
            continue
        answer.model = answer.model if chunk.get("model") is None else str(chunk["model"])
        if isinstance(chunk.get("usage"), dict):
            answer.usage = chunk["usage"]
            answer.usage_with_choices = bool(chunk["choices"])
        for choice in chunk["choices"]:
            if choice.get("index", 0) == 0:
                answer.take(choice.get("delta") or {}, event.at)
                if choice.get("finish_reason"):
                    answer.finish.append(str(choice["finish_reason"]))


def read_whole(answer: Answer, text: str) -> None:
    """Read an answer that came in one body."""
    try:
        answer.body = loads(text)
    except ValueError:
        raise Failed("the answer is no JSON", answer.exchange) from None
    wrong = error_in(answer.body)
    if wrong is not None:
        raise Failed("status 200, but the body is an error: " + wrong, answer.exchange)
    choices = answer.body.get("choices") if isinstance(answer.body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0].get("message"), dict):
        raise Failed("the answer has no choices with a message", answer.exchange)
    answer.take(choices[0]["message"])
    if choices[0].get("finish_reason"):
        answer.finish.append(str(choices[0]["finish_reason"]))
    answer.model = None if answer.body.get("model") is None else str(answer.body["model"])
    usage = answer.body.get("usage")
    answer.usage = usage if isinstance(usage, dict) else None


# --- the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """What one run was asked."""

    base_url: str
    model: str
    api_key_file: str | None = None
    profile: str = "standard"
    checks: tuple[str, ...] = ()
    skip: dict[str, str] = field(default_factory=dict)
    knowledge: bool = True
    patience: float = 1.0
    expect: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One entry of the gate. `needs_knowledge` ones are skipped for random weights."""

    id: str
    run: Callable[[Run], str]
    limit: float  # seconds
    since: str
    needs_knowledge: bool

    @property
    def about(self) -> str:
        """What it proves, in one line."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


CHECKS: list[Check] = []


def check(
    name: str, *, limit: float = 60.0, since: str = "standard", knowledge: bool = False
) -> Callable[[Callable[[Run], str]], Callable[[Run], str]]:
    """Register a check; the order of registration is the order of the run."""

    def register(run: Callable[[Run], str]) -> Callable[[Run], str]:
        CHECKS.append(Check(name, run, limit, since, knowledge))
        return run

    return register


class Run:
    """What checks work with: the client, what is known, and what was seen so far."""

    def __init__(self, parameters: Parameters, key: str | None) -> None:
        self.parameters = parameters
        self.client = Client(parameters.base_url, key)
        self.model = parameters.model
        self.knowledge = parameters.knowledge
        self.expect = parameters.expect
        self.figures: Json = {}  # of the check that runs now
        self.answers: list[tuple[str, Answer]] = []
        self.current = ""
        self.first_metrics: Metrics | None = None
        self.log_offset: int | None = None
        self.log_seen: str | None = None
        self.slowest: Json | None = None
        self.card: Json = {}

    def fail(self, summary: str, answer: Answer | Exchange | None = None) -> NoReturn:
        """End the check with no."""
        raise Failed(summary, answer.exchange if isinstance(answer, Answer) else answer)

    # --- requests

    def request(self, content: str | list[Json], thinking: bool = False, **more: Any) -> Json:
        """A chat request with both thinking switches; temperature 0 unless `more` says otherwise."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        body: Json = {
            "model": self.model, "messages": messages, "temperature": 0, "max_tokens": 128,
            "chat_template_kwargs": {"thinking": thinking},
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }  # fmt: skip
        body.update(more)
        return body

    def chat(self, body: Json, seconds: float = 120.0) -> Answer:
        """One chat completion, streamed when `body` says so. A broken answer fails the check."""
        streaming = bool(body.get("stream"))
        answer: list[Answer] = []

        def consume(lines: Iterator[tuple[float, bytes]]) -> None:
            answer.append(Answer(self.client.exchanges[-1]))
            read_stream(answer[0], lines)

        path = "/v1/chat/completions"
        exchange = self.client.send(
            "POST", path, body, seconds=seconds, each_line=consume if streaming else None
        )
        if exchange.status is None or exchange.error:
            raise Unanswered(exchange.error or "no answer", exchange)
        if exchange.status != 200:
            said = error_in_text(exchange.text)
            raise Failed("status %d: %s" % (exchange.status, said), exchange)
        if not streaming:
            answer.append(Answer(exchange))
            read_whole(answer[0], exchange.text)
        one = answer[0]
        self.answers.append((self.current, one))
        if streaming:
            self.well_formed(one)
        return one

    def well_formed(self, answer: Answer) -> None:
        """A stream has the right type, no breach of form, one finish reason, and its end."""
        if "text/event-stream" not in answer.exchange.kind:
            self.fail("the stream's content type is %r" % answer.exchange.kind, answer)
        if answer.problems:
            self.fail(answer.problems[0], answer)
        if not answer.done:
            self.fail("the stream ends without [DONE]", answer)
        if len(answer.finish) != 1:
            self.fail("the stream gives %d finish reasons, not one" % len(answer.finish), answer)

    def metrics(self) -> Metrics:
        """The /metrics page now; without one the check is skipped."""
        exchange = self.client.send("GET", "/metrics", seconds=20)
        if exchange.status == 404:
            raise Skipped("the server has no /metrics")
        if exchange.status != 200:
            raise Unanswered(exchange.error or "/metrics answers %s" % exchange.status, exchange)
        return parse_metrics(exchange.text)

    def metrics_when(self, enough: Callable[[Metrics], bool], seconds: float = 5.0) -> Metrics:
        """The page once `enough` holds, or the last one: engines publish a moment after the answer."""
        end = time.monotonic() + seconds * self.parameters.patience
        while True:
            page = self.metrics()
            if enough(page) or time.monotonic() > end:
                return page
            time.sleep(0.1)

    def tokenized(self, body: Json) -> Json:
        """What /tokenize says of a prompt or a conversation; without one the check is skipped."""
        kept = ("model", "messages", "prompt", "tools", "chat_template_kwargs", "thinking")
        asked = {k: body[k] for k in kept if k in body}
        exchange, value = self.client.json("POST", "/tokenize", {**asked, "return_token_strs": True})
        if exchange.status in (404, 405):
            raise Skipped("the server has no /tokenize")
        if exchange.status != 200 or not isinstance(value, dict) or not isinstance(value.get("count"), int):
            self.fail("/tokenize answers %s: %s" % (exchange.status, exchange.error or exchange.text[:120]))
        return value

    def context(self) -> int:
        """The context length in tokens: what the server says, else what is expected."""
        length = self.card.get("max_model_len") or self.expect.get("max_model_len")
        if not length:
            exchange, value = self.client.json("GET", "/v1/models")
            cards = value.get("data") if isinstance(value, dict) and exchange.status == 200 else None
            for card in cards or []:
                if isinstance(card, dict) and card.get("id") == self.model:
                    self.card = card
            length = self.card.get("max_model_len")
        if not length:
            raise Skipped("the context length is not known (the server does not say it)")
        return int(length)

    def room(self, tokens: int) -> int:
        """`tokens`, or a quarter of the context where that is less."""
        try:
            return min(tokens, self.context() // 4)
        except Skipped:
            return tokens

    def clean(self, answer: Answer) -> None:
        """No markup in the text (random weights may write anything)."""
        leak = MARKUP.search(answer.text)
        if leak and self.knowledge:
            self.fail("markup leaked into the content: " + leak.group(0), answer)


def error_in_text(text: str) -> str:
    """The error message in a body, or its beginning."""
    try:
        return error_in(loads(text)) or text[:200]
    except ValueError:
        return text[:200]


def fits(schema: Json, value: Any) -> str | None:
    """Why a value does not fit a schema (type, properties, required, additionalProperties, enum), or None."""
    kinds: dict[str, Any] = {"object": dict, "string": str, "boolean": bool}
    kind = schema.get("type")
    if kind in kinds and not isinstance(value, kinds[kind]):
        return "%r is no %s" % (value, kind)
    if "enum" in schema and value not in schema["enum"]:
        return "%r is none of %s" % (value, schema["enum"])
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                return "%r is missing" % name
        for name, inner in value.items():
            if name not in known:
                return "%r is not in the schema" % name
            wrong = fits(known[name], inner)
            if wrong:
                return wrong
    return None


# --- the checks, in the order in which they run ------------------------------------------------------------


@check("guard.first_request", limit=180, since="smoke")
def first_request(run: Run) -> str:
    """A real request is answered, not only /health, and the server is alive afterwards."""
    health = run.client.send("GET", "/health", seconds=20)
    if health.status is None:
        raise Unanswered("the server does not answer: %s" % health.error, health)
    try:
        answer = run.chat(run.request(ASK_EXACT[0][0], max_tokens=16), seconds=170)
    except Failed as error:
        status = error.exchange.status if error.exchange else None
        text = "/health says 200, but the first real request failed: %s" % error
        if status is None or status >= 500 or isinstance(error, Unanswered):
            raise Unanswered(text if health.status == 200 else str(error), error.exchange) from None
        raise
    after = run.client.send("GET", "/health", seconds=20)
    if health.status == 200 and after.status != 200:
        state = after.status or after.error
        raise Unanswered("/health was 200 and is %s after one request" % state, after)
    run.figures["first_request_seconds"] = round(answer.exchange.seconds, 3)
    return "the first request was answered in %.2f s" % answer.exchange.seconds


@check("models.name", limit=30, since="smoke")
def models_name(run: Run) -> str:
    """/v1/models names the model, with the context length that is expected."""
    exchange, value = run.client.json("GET", "/v1/models")
    if exchange.status != 200 or not isinstance(value, dict):
        run.fail("/v1/models answers %s" % (exchange.status or exchange.error))
    names = [card.get("id") for card in value.get("data") or [] if isinstance(card, dict)]
    if run.model not in names:
        run.fail("the server serves %s, not %r" % (names, run.model))
    run.card = next(card for card in value["data"] if card.get("id") == run.model)
    wanted, length = run.expect.get("max_model_len"), run.card.get("max_model_len")
    if wanted and length and int(wanted) != int(length):
        run.fail("the context length is %s, not %s" % (length, wanted))
    return "serves %s, context %s" % (run.model, length or "not said")


@check("guard.identity", limit=30, since="smoke")
def identity(run: Run) -> str:
    """The process that answers is the one of the receipt, not a leftover on the same port."""
    wanted = run.expect.get("identity") or {}
    if not wanted:
        raise Skipped("no identity was given to compare with")
    exchange, value = run.client.json("GET", "/v1/models")
    cards = value.get("data") if isinstance(value, dict) else None
    card = next((c for c in cards or [] if isinstance(c, dict) and c.get("id") == run.model), None)
    if card is None:
        run.fail("the server does not serve %r (%s)" % (run.model, exchange.status or exchange.error))
    agreed = []
    for name in ("root", "max_model_len"):
        if name in wanted and card.get(name) != wanted[name]:
            run.fail("%s is %r, the receipt says %r" % (name, card.get(name), wanted[name]))
        agreed += [name] if name in wanted else []
    if "version" in wanted:
        exchange, value = run.client.json("GET", "/version")
        version = value.get("version") if isinstance(value, dict) else None
        if not same_version(str(version), str(wanted["version"])):
            run.fail("the engine's version is %r, the receipt says %r" % (version, wanted["version"]))
        agreed.append("version")
    if "pid" in wanted:
        ready = neighbour()
        sockets = ready.listening(run.client.port, run.client.host) if ready else {}
        owners = ready.holders(set(sockets)) if sockets else {}
        # not only one of ours among them: with SO_REUSEPORT every owner answers some of the requests
        others = [pid for pid in owners if not ready.is_within(pid, int(wanted["pid"]))]
        if others:
            run.fail(
                "port %d belongs to process %s, the receipt says %s"
                % (run.client.port, ", ".join(map(str, others)), wanted["pid"])
            )
        agreed += ["pid"] if owners else []
    if "started_after" in wanted:
        started = run.metrics().get("started")
        if started is not None:
            if started < float(wanted["started_after"]) - 2:
                run.fail(
                    "the process started %.0f s before the one of the receipt"
                    % (wanted["started_after"] - started)
                )
            agreed.append("start time")
    if not agreed:
        raise Skipped("nothing of the identity could be read here: %s" % ", ".join(wanted))
    return "agrees with the receipt: " + ", ".join(agreed)


def same_version(said: str, wanted: str) -> bool:
    """Versions agree; a local part (`+cpu`, `+cu130`) counts only where both have one: /version drops it."""
    if "+" in said and "+" in wanted:
        return said == wanted
    return said.split("+")[0] == wanted.split("+")[0]


def neighbour() -> Any:
    """`ready.py`, which knows whose a port is; None where this file was copied without it."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module("ready")
    except ImportError:
        return None


@check("guard.idle", limit=40, since="smoke")
def idle(run: Run) -> str:
    """Nobody asks, nothing is generated: health probes must not cost tokens."""
    watched = ("generated", "prompted", "finished")
    before = run.metrics_when(lambda page: not page.get("running"), 5.0)
    if before.get("running"):
        raise Skipped("%d requests of somebody are running" % int(before.get("running") or 0))
    time.sleep(0.1)  # the last answer's counters are published
    before = run.metrics()
    if before.get("generated") is None:
        raise Skipped("the server exports no token counters")
    if run.answers and not before.get("generated"):
        raise Skipped("the token counters do not move with answers either")
    window = {"smoke": 1.0, "standard": 3.0, "deep": 10.0}[run.parameters.profile] * run.parameters.patience
    end = time.monotonic() + window
    while time.monotonic() < end:
        run.client.send("GET", "/health", seconds=10)
        time.sleep(window / 5)
    after = run.metrics()
    for what in watched:
        far = moved(before, after, what)
        if far:
            run.fail("the counter of %s moved by %d while only /health was asked" % (what, far))
    return "no token counter moved in %.1f s of health probes" % window


@check("auth.key", limit=30)
def auth_key(run: Run) -> str:
    """Where a key is set, /v1 refuses a request without it and one with a wrong one."""
    required = run.expect.get("key_required", bool(run.client.key))
    if not required:
        raise Skipped("no key is set")
    body = run.request("hi", max_tokens=1)
    for what, key in (("no key", ""), ("a wrong key", "rackwright-wrong-key")):
        for method, path, sent in (("GET", "/v1/models", None), ("POST", "/v1/chat/completions", body)):
            exchange = run.client.send(method, path, sent, key=key, seconds=20)
            if exchange.status not in (401, 403):
                run.fail("%s with %s answers %s, not 401" % (path, what, exchange.status or exchange.error))
    return "refused without the key and with a wrong one"


@check("chat.plain", since="smoke", limit=120)
def chat_plain(run: Run) -> str:
    """A plain question is answered with text, in Chinese, and without reasoning."""
    answer = run.chat(run.request(ASK_PLAIN, max_tokens=256 if run.knowledge else 32))
    if not answer.text.strip():
        run.fail("the answer is empty", answer)
    run.clean(answer)
    if answer.reasoning:
        run.fail("thinking is off, but the answer carries reasoning", answer)
    if run.knowledge and not re.search("[\u4e00-\u9fff]", answer.text):
        run.fail("the answer is not Chinese", answer)
    return "%d characters of text" % len(answer.text)


@check("chat.exact", since="smoke", limit=120, knowledge=True)
def chat_exact(run: Run) -> str:
    """Asked for an exact text at temperature 0, that text comes and the finish reason is stop."""
    for asked, wanted in ASK_EXACT:
        answer = run.chat(run.request(asked, max_tokens=32))
        if answer.text.strip() != wanted:
            run.fail("%r was asked for, %r came" % (wanted, answer.text[:80]), answer)
        if answer.finish != ["stop"]:
            run.fail(
                "the finish reason of a whole answer is %s, not stop" % (answer.finish or "missing"), answer
            )
    return "exact texts, finish reason stop"


@check("chat.stream", since="smoke", limit=120)
def chat_stream(run: Run) -> str:
    """A stream is well-formed server-sent events, carries text, and ends with [DONE]."""
    answer = run.chat(run.request(ASK_STREAM, stream=True, max_tokens=256 if run.knowledge else 32))
    if not answer.text.strip():
        run.fail("the stream carries no text", answer)
    run.clean(answer)
    run.figures.update(ttft_seconds=round(answer.first or 0, 4), events=answer.events)
    return "%d events, first text after %.3f s, [DONE]" % (answer.events, answer.first or 0)


@check("chat.stream_equal", limit=120)
def stream_equal(run: Run) -> str:
    """At temperature 0 the streamed answer is the same text as the whole one."""
    body = run.request(ASK_COUNT, max_tokens=96 if run.knowledge else 32)
    whole = run.chat(body)
    streamed = run.chat({**body, "stream": True})
    if (whole.text, whole.finish) != (streamed.text, streamed.finish):
        again = run.chat(body)
        if again.text != whole.text:
            reason = "two whole answers at temperature 0 differ already"
            if not run.knowledge:
                raise Skipped(reason + ", and " + RANDOM)
            run.fail(reason, again)
        run.fail("streamed: %r, whole: %r" % (streamed.text[-60:], whole.text[-60:]), streamed)
    if not whole.text:
        run.fail("both answers are empty", whole)
    return "%d characters, the same both ways" % len(whole.text)


@check("chat.usage", limit=120)
def chat_usage(run: Run) -> str:
    """Token counts are there, add up, agree with /tokenize, and are the same when streamed."""
    body = run.request(ASK_COUNT, max_tokens=48)
    whole = run.chat(body)
    streamed = run.chat({**body, "stream": True, "stream_options": {"include_usage": True}})
    for answer in (whole, streamed):
        usage = answer.usage
        if usage is None:
            run.fail("the answer has no usage", answer)
        prompt, made, total = (
            number(usage, k) for k in ("prompt_tokens", "completion_tokens", "total_tokens")
        )
        if prompt <= 0 or prompt + made != total:
            run.fail("the usage does not add up: %s" % usage, answer)
        if not 0 < made <= 48:
            run.fail("%d completion tokens where 1 to 48 are possible" % made, answer)
    if streamed.usage_with_choices:
        run.fail("the usage chunk of the stream has choices", streamed)
    same = ["prompt_tokens"] + (["completion_tokens"] if whole.text == streamed.text else [])
    for name in same:
        if number(whole.usage or {}, name) != number(streamed.usage or {}, name):
            run.fail("%s differ: whole %s, streamed %s" % (name, whole.usage, streamed.usage), streamed)
    counted = number(whole.usage or {}, "prompt_tokens")
    try:
        tokens = run.tokenized(body)["count"]
    except Skipped:
        return "%d prompt tokens, sums right; no /tokenize to compare with" % counted
    if tokens != counted:
        run.fail("usage counts %d prompt tokens, /tokenize counts %d" % (counted, tokens), whole)
    return "%d prompt tokens, as /tokenize counts them; sums right, streamed too" % counted


def number(usage: Json, name: str) -> int:
    """A count of a usage; -1 when it is missing or no count."""
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


@check("chat.max_tokens", limit=60)
def max_tokens(run: Run) -> str:
    """max_tokens cuts the answer, and the finish reason says length."""
    for stream in (False, True):
        body = run.request(ASK_COUNT, max_tokens=6, stream=stream)
        if stream:
            body["stream_options"] = {"include_usage": True}
        if not run.knowledge:
            body["ignore_eos"] = True
        answer = run.chat(body)
        if answer.finish != ["length"]:
            run.fail(
                "the finish reason of a cut answer is %s, not length" % (answer.finish or "missing"), answer
            )
        made = (answer.usage or {}).get("completion_tokens")
        if made is not None and made > 6:
            run.fail("%d tokens came, 6 were allowed" % made, answer)
    return "cut at 6 tokens, finish reason length"


@check("chat.stop", limit=90)
def chat_stop(run: Run) -> str:
    """A stop string ends the answer before it, and the finish reason says stop."""
    body = run.request(ASK_COUNT, max_tokens=64)
    base = run.chat(body)
    found = stop_in(base.text)
    if found is None:
        raise Skipped("the answer has no text that could serve as a stop string")
    at, stop = found
    for stream in (False, True):
        answer = run.chat({**body, "stop": [stop], "stream": stream})
        if stop in answer.text:
            run.fail("the answer holds the stop string %r" % stop, answer)
        if answer.finish != ["stop"]:
            run.fail(
                "stopped by a stop string, the finish reason is %s" % (answer.finish or "missing"), answer
            )
        if run.knowledge and answer.text != base.text[:at]:
            run.fail("%r was to come before the stop, %r came" % (base.text[:at], answer.text), answer)
    return "stopped before %r" % stop


def stop_in(text: str) -> tuple[int, str] | None:
    """A stop string for a text: plain characters after its first few, which occur there first."""
    for at in range(4, len(text) - 2):
        stop = text[at : at + 2]
        if "\ufffd" not in stop and stop.isprintable() and stop.strip() == stop and text.find(stop) == at:
            return at, stop
    return None


@check("chat.n", limit=60)
def chat_n(run: Run) -> str:
    """n = 2 gives two choices."""
    answer = run.chat(run.request(ASK_PLAIN, n=2, temperature=0.8, max_tokens=24))
    indexes = sorted(c.get("index", -1) for c in answer.body["choices"])
    if indexes != [0, 1]:
        run.fail("choices %s came, [0, 1] were asked for" % indexes, answer)
    return "two choices"


# the first such request may wait for a compiler: vLLM compiles the ranks' kernel with torch.compile even in
# eager mode (vllm/v1/sample/ops/logprobs.py); on two busy cores that took 63 s
@check("chat.logprobs", limit=240)
def logprobs(run: Run) -> str:
    """Log probabilities: one a token, none above 0, best first, and the tokens are the text."""
    answer = run.chat(run.request(ASK_COUNT, logprobs=True, top_logprobs=2, max_tokens=16))
    rows = (answer.body["choices"][0].get("logprobs") or {}).get("content")
    if not rows:
        run.fail("no log probabilities came", answer)
    made = (answer.usage or {}).get("completion_tokens", len(rows))
    if abs(made - len(rows)) > 1:  # the end token may be counted and not shown
        run.fail("%d log probabilities for %d tokens" % (len(rows), made), answer)
    for row in rows:
        top = [one["logprob"] for one in row.get("top_logprobs") or []]
        values = [row["logprob"], *top]
        if any(not isinstance(v, (int, float)) or math.isnan(v) or v > 1e-6 for v in values):
            run.fail("log probabilities %s of %r" % (values, row.get("token")), answer)
        if not top or top != sorted(top, reverse=True):
            run.fail("the alternatives of %r are not best first: %s" % (row.get("token"), top), answer)
    spelled = b"".join(bytes(row.get("bytes") or row["token"].encode()) for row in rows).decode(
        "utf-8", "ignore"
    )
    if run.knowledge and not spelled.startswith(answer.text.rstrip()):
        run.fail("the tokens spell %r, the text is %r" % (spelled[:60], answer.text[:60]), answer)
    return "%d tokens, all at or below 0, best first" % len(rows)


@check("chat.utf8", limit=60)
def utf8(run: Run) -> str:
    """Characters of several bytes and tokens are never cut in two in a stream."""
    answer = run.chat(run.request(ASK_UTF8, stream=True, max_tokens=64))  # bad bytes in an event fail here
    if not run.knowledge:
        return "every event is valid UTF-8 (random weights may well write half characters themselves)"
    if "\ufffd" in answer.text:
        run.fail("the text holds a replacement character: a character was cut in two", answer)
    if not re.search("[\u4e00-\u9fff]|[\U0001f300-\U0001faff]", answer.text):
        run.fail("the answer holds none of the characters that it was asked for", answer)
    return "%r came whole" % answer.text[:24]


@check("thinking.prompt", limit=30, since="smoke")
def thinking_prompt(run: Run) -> str:
    """The switch reaches the prompt: it ends with <think> when thinking is on, </think> when off."""
    for thinking, tail in ((True, "<think>"), (False, "</think>")):
        value = run.tokenized(run.request(ASK_THINK, thinking))
        strings = value.get("token_strs")
        if not strings:
            tokens = value.get("tokens") or []
            _, text = run.client.json("POST", "/detokenize", {"model": run.model, "tokens": tokens[-12:]})
            strings = [text.get("prompt", "")] if isinstance(text, dict) else []
        # byte-level tokenizers print a line end as Ċ and a space as Ġ
        end = "".join(map(str, strings)).rstrip("\n ĊĠ")[-40:]
        if not end.endswith(tail):
            run.fail(
                "thinking %s: the prompt ends with %r, not %s" % ("on" if thinking else "off", end, tail)
            )
    return "ends with <think> when on, </think> when off"


@check("thinking.on", limit=180, since="smoke")
def thinking_on(run: Run) -> str:
    """Thinking on: reasoning in its own field, then the answer, streamed and not."""
    fields = set()
    for stream in (False, True):
        body = run.request(ASK_THINK, True, stream=stream, max_tokens=run.room(2048))
        if not run.knowledge:
            body.update(max_tokens=24, ignore_eos=True)
        answer = run.chat(body)
        how = "streamed" if stream else "whole"
        if not answer.reasoning.strip():
            run.fail("%s: thinking is on, but no reasoning came" % how, answer)
        fields.add(answer.reasoning_field)
        if run.knowledge:
            run.clean(answer)
            if answer.answer_before_reasoning:
                run.fail("%s: reasoning came after the answer began" % how, answer)
            if "9.9" not in answer.text:
                run.fail("%s: the answer %r does not name 9.9" % (how, answer.text[:60]), answer)
    said = "reasoning in %s, whole and streamed" % ", ".join(sorted(fields))
    return said if run.knowledge else said + "; the answer is not judged: " + RANDOM


@check("thinking.off", limit=120, since="smoke")
def thinking_off(run: Run) -> str:
    """Thinking off: an answer and no reasoning anywhere, streamed and not."""
    for stream in (False, True):
        body = run.request(ASK_THINK, False, stream=stream, max_tokens=256)
        if not run.knowledge:
            body.update(max_tokens=24, ignore_eos=True)
        answer = run.chat(body)
        how = "streamed" if stream else "whole"
        if answer.reasoning:
            run.fail("%s: thinking is off, but reasoning came: %r" % (how, answer.reasoning[:60]), answer)
        if not answer.text.strip():
            run.fail("%s: the answer is empty" % how, answer)
        run.clean(answer)
    return "an answer and no reasoning, whole and streamed"


@check("tools.forced", limit=120, since="smoke")
def tools_forced(run: Run) -> str:
    """tool_choice by name and `required` give a call of the tool, with JSON arguments."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        how = choice if isinstance(choice, str) else "by name"
        body = run.request(ASK_WEATHER, tools=[WEATHER_ENUM], tool_choice=choice, max_tokens=256)
        answer = run.chat(body)
        if not answer.calls:
            run.fail("tool_choice %s gave no call" % how, answer)
        judge_call(run, answer, answer.calls[0], "北京" if run.knowledge else None)
        if not answer.finish or answer.finish[0] not in ("tool_calls", "stop"):
            run.fail("the finish reason of a call is %s" % (answer.finish or "missing"), answer)
    return "get_weather called by name and by `required`"


def judge_call(run: Run, answer: Answer, call: Call, location: str | None) -> None:
    """A call has an id, the name get_weather and JSON arguments; with `location`, that place."""
    if call.name != "get_weather":
        run.fail("%r was called, not get_weather" % call.name, answer)
    arguments = call.parsed()
    if not isinstance(arguments, dict):
        run.fail("the arguments are no JSON object: %r" % call.arguments[:80], answer)
    if not call.id:
        run.fail("the call has no id", answer)
    if location is not None and location not in str(arguments.get("location")):
        run.fail("the location is %r, not %s" % (arguments.get("location"), location), answer)


@check("tools.auto", limit=120, since="smoke", knowledge=True)
def tools_auto(run: Run) -> str:
    """With tool_choice auto the model calls the tool with the right arguments, streamed and not."""
    for stream in (False, True):
        body = run.request(ASK_WEATHER, tools=[WEATHER], tool_choice="auto", max_tokens=256, stream=stream)
        answer = run.chat(body)
        how = "streamed" if stream else "whole"
        run.clean(answer)
        if len(answer.calls) != 1:
            run.fail("%s: %d calls came, not one" % (how, len(answer.calls)), answer)
        judge_call(run, answer, answer.calls[0], "北京")
        if answer.finish != ["tool_calls"]:
            run.fail(
                "%s: the finish reason is %s, not tool_calls" % (how, answer.finish or "missing"), answer
            )
    return "get_weather(北京), whole and streamed"


@check("tools.parallel", limit=120, knowledge=True)
def tools_parallel(run: Run) -> str:
    """Two questions at once give two calls with ids of their own."""
    answer = run.chat(run.request(ASK_TWO_CITIES, tools=[WEATHER], tool_choice="auto", max_tokens=384))
    run.clean(answer)
    if len(answer.calls) != 2:
        run.fail("%d calls came, not two" % len(answer.calls), answer)
    for call, city in zip(sorted(answer.calls, key=lambda c: "上海" in c.arguments), ("北京", "上海")):
        judge_call(run, answer, call, city)
    if answer.calls[0].id == answer.calls[1].id:
        run.fail("both calls have the same id", answer)
    return "two calls, 北京 and 上海"


@check("tools.result", limit=120, knowledge=True)
def tools_result(run: Run) -> str:
    """The result of a tool is used in the answer."""
    messages: list[Json] = [{"role": "user", "content": ASK_RESULT}]
    body = run.request(messages, tools=[WEATHER], max_tokens=256)
    first = run.chat(body)
    if len(first.calls) != 1:
        run.fail("%d calls came, not one" % len(first.calls), first)
    judge_call(run, first, first.calls[0], "北京")
    result = json.dumps({"weather": "晴", "observation": RESULT_CODE}, ensure_ascii=False)
    messages += [first.message(), {"role": "tool", "tool_call_id": first.calls[0].id, "content": result}]
    answer = run.chat(body)
    run.clean(answer)
    if RESULT_CODE not in answer.text:
        run.fail("the answer does not use the result: %r" % answer.text[:80], answer)
    return "the answer names %s" % RESULT_CODE


@check("json.schema", limit=120, since="smoke")
def json_schema(run: Run) -> str:
    """A JSON schema is honoured."""
    schema = {"name": "weather", "schema": CITY_SCHEMA}
    body = run.request(
        ASK_JSON, max_tokens=128, response_format={"type": "json_schema", "json_schema": schema}
    )
    wrong: str | None = None
    for attempt in range(1 if run.knowledge else 3):  # random weights may fill the room with white space
        answer = run.chat({**body, "temperature": attempt and 1, "seed": attempt})
        try:
            wrong = fits(CITY_SCHEMA, loads(answer.text))
        except ValueError:
            wrong = "the answer is no JSON: %r" % answer.text[:80]
        if wrong is None:
            break
    if wrong is not None:
        run.fail(wrong)
    return "the answer fits the schema"


def rounds(run: Run, stream: bool, thinking: bool) -> str:
    """Play the boxes: five calls that depend on each other's results, then the password."""
    messages: list[Json] = [{"role": "user", "content": ASK_BOXES}]
    tools = preamble()
    with_reasoning = 0
    room = run.room(2048 if thinking else 384)
    for turn in range(1, len(BOXES) + 2):
        answer = run.chat(run.request(messages, thinking, tools=tools, stream=stream, max_tokens=room))
        where = "round %d: " % turn
        leak = MARKUP.search(answer.text)
        if leak:
            run.fail(where + "markup leaked into the content: " + leak.group(0), answer)
        if answer.reasoning and not thinking:
            run.fail(where + "thinking is off, but reasoning came", answer)
        with_reasoning += bool(answer.reasoning.strip())
        if thinking and turn == 1 and not with_reasoning:
            run.fail(where + "thinking is on, but no reasoning came", answer)
        if turn > len(BOXES):
            if answer.calls or BOXES[-1][2] not in answer.text:
                run.fail(where + "the password was to come, %r came" % answer.text[:80], answer)
            break
        key, kind, content = BOXES[turn - 1]
        if len(answer.calls) != 1 or answer.calls[0].name != "open_box":
            run.fail(
                where + "one call of open_box was to come, %s came" % [c.name for c in answer.calls], answer
            )
        arguments = answer.calls[0].parsed()
        if not isinstance(arguments, dict) or arguments.get("key") != key:
            run.fail(where + "the key is %r, not %s" % (answer.calls[0].arguments[:60], key), answer)
        result = json.dumps({kind: content})
        messages += [
            answer.message(),
            {"role": "tool", "tool_call_id": answer.calls[0].id, "content": result},
        ]
    if thinking and with_reasoning * 2 < len(BOXES) + 1:
        run.fail(
            "reasoning came in %d of %d rounds only: it is lost on the way" % (with_reasoning, len(BOXES) + 1)
        )
    run.figures["rounds_with_reasoning"] = with_reasoning
    return "five rounds with %d tools, then the password" % len(tools)


@check("agent.rounds", limit=400, knowledge=True)
def agent_plain(run: Run) -> str:
    """Five rounds of tool use as agents do it: whole answers, thinking off."""
    return rounds(run, stream=False, thinking=False)


@check("agent.rounds_stream", limit=400, knowledge=True)
def agent_stream(run: Run) -> str:
    """Five rounds of tool use as agents do it: streamed, thinking off."""
    return rounds(run, stream=True, thinking=False)


@check("agent.rounds_thinking", limit=900, knowledge=True)
def agent_thinking(run: Run) -> str:
    """Five rounds of tool use as agents do it: whole answers, thinking on."""
    return rounds(run, stream=False, thinking=True)


@check("agent.rounds_thinking_stream", limit=900, knowledge=True)
def agent_thinking_stream(run: Run) -> str:
    """Five rounds of tool use as agents do it: streamed, thinking on."""
    return rounds(run, stream=True, thinking=True)


@check("cache.prefix", limit=180, since="smoke")
def cache_prefix(run: Run) -> str:
    """A long prompt that is sent twice is read from the prefix cache: the counters move."""
    before = run.metrics()
    told = run.expect.get("prefix_caching")
    if told is None:
        said = before.label("vllm:cache_config_info", "enable_prefix_caching")
        told = None if said is None else said == "True"
    if told is False:
        raise Skipped("prefix caching is off")
    if before.get("hits") is None:
        if told:
            run.fail("prefix caching is on, but the server exports no counter of its hits")
        raise Skipped("the server exports no counter of prefix cache hits")
    room = min({"smoke": 1536, "standard": 4096, "deep": 16384}[run.parameters.profile], run.context() // 2)
    # a prefix of its own, so that the first run is cold whatever was asked before
    line = "%d-%d：以下内容用于测试相同长前缀的缓存复用。\n" % (os.getpid(), time.time_ns())
    body = run.request(line, max_tokens=8, stream=True, stream_options={"include_usage": True})
    try:
        each = max(1, run.tokenized({"model": run.model, "prompt": line})["count"])
    except Skipped:
        each = len(line)
    body["messages"][0]["content"] = line * max(2, room // each)
    cold = run.chat(body)
    pages = [run.metrics_when(lambda page: bool(moved(before, page, "queries")))]
    warm = run.chat(body)
    pages.append(run.metrics_when(lambda page: bool(moved(pages[0], page, "hits"))))
    hits = moved(pages[0], pages[1], "hits") or 0
    prompt = (warm.usage or {}).get("prompt_tokens") or 0
    run.figures.update(
        prompt_tokens=prompt, hits=hits, ttft_cold_seconds=round(cold.first or cold.exchange.seconds, 4),
        ttft_warm_seconds=round(warm.first or warm.exchange.seconds, 4),
    )  # fmt: skip
    if hits <= 0:
        run.fail(
            "the same prompt of %d tokens twice, and not one token was read from the cache" % prompt, warm
        )
    if prompt and hits < prompt / 2:
        run.fail("only %d of %d prompt tokens were read from the cache" % (hits, prompt), warm)
    return "%d of %d tokens from the cache; first token after %.3f s, then %.3f s" % (
        hits, prompt, run.figures["ttft_cold_seconds"], run.figures["ttft_warm_seconds"],
    )  # fmt: skip


@check("spec.decode", limit=180)
def spec_decode(run: Run) -> str:
    """Speculative decoding drafts tokens, and some of them are accepted."""
    before = run.metrics()
    told = run.expect.get("speculative")
    if told is False:
        raise Skipped("speculative decoding is off")
    if before.get("drafts") is None:
        if told:
            run.fail("speculative decoding should be on, but the server exports no counters of it")
        raise Skipped("the server exports no counters of speculative decoding")
    answer = run.chat(run.request(ASK_COUNT, stream=True, max_tokens=128))
    run.chat(run.request(ASK_STREAM, max_tokens=256))
    after = run.metrics_when(lambda page: bool(moved(before, page, "accepted")))
    drafts, drafted, accepted = (
        moved(before, after, what) or 0 for what in ("drafts", "drafted", "accepted")
    )
    run.figures.update(drafts=drafts, draft_tokens=drafted, accepted_tokens=accepted)
    if drafts <= 0 or drafted <= 0:
        run.fail("not one token was drafted", answer)
    run.figures["acceptance_rate"] = round(accepted / drafted, 4)
    run.figures["mean_accepted_length"] = round(1 + accepted / drafts, 3)
    if accepted <= 0 and run.knowledge:
        run.fail("%d tokens were drafted and none was accepted" % drafted, answer)
    return "%d of %d drafted tokens accepted (%.1f %%)" % (accepted, drafted, 100 * accepted / drafted)


@check("error.unknown_model", limit=30)
def unknown_model(run: Run) -> str:
    """A model that is not served is a 404, with an error body."""
    body = {**run.request("hi", max_tokens=1), "model": "rackwright-no-such-model"}
    exchange, value = run.client.json("POST", "/v1/chat/completions", body)
    if exchange.status != 404:
        run.fail("an unknown model answers %s, not 404" % (exchange.status or exchange.error))
    if error_in(value) is None:
        run.fail("the 404 carries no error message")
    return "404, with a message"


@check("error.bad_json", limit=30)
def bad_json(run: Run) -> str:
    """A body that is no JSON is a 400."""
    exchange = run.client.send("POST", "/v1/chat/completions", raw=b'{"model": ', seconds=20)
    if exchange.status != 400:
        run.fail("broken JSON answers %s, not 400" % (exchange.status or exchange.error))
    return "400"


@check("error.too_long", limit=120)
def too_long(run: Run) -> str:
    """A prompt beyond the context length is a 400, and the server lives."""
    length = run.context()
    words = " ".join(str(i % 997) for i in range(length + 64))  # at least one token a word
    exchange = run.client.send("POST", "/v1/chat/completions", run.request(words, max_tokens=1), seconds=90)
    if exchange.status != 400:
        run.fail("more than %d tokens answer %s, not 400" % (length, exchange.status or exchange.error))
    run.chat(run.request("hi", max_tokens=4))
    return "400 for more than %d tokens, and the next request is answered" % length


@check("error.hangup", limit=60)
def hangup(run: Run) -> str:
    """A client that hangs up in the middle of a stream leaves no request running."""
    before = run.metrics()
    resting = before.get("running")
    if resting is None:
        raise Skipped("the server exports no number of running requests")
    room = min(2000, run.context() // 2)
    body = run.request(ASK_STREAM, stream=True, max_tokens=room, ignore_eos=True)
    seen: list[float] = []

    def leave_early(lines: Iterator[tuple[float, bytes]]) -> None:
        for _, line in lines:
            if line.startswith(b"data:"):
                seen.append(run.metrics().get("running") or 0)
                if (len(seen) >= 2 and max(seen) > resting) or len(seen) == MOST_LOOKS:
                    return

    exchange = run.client.send("POST", "/v1/chat/completions", body, seconds=40, each_line=leave_early)
    if len(seen) < 2:
        run.fail("no stream came: %s" % (exchange.error or exchange.status), exchange)
    if max(seen) <= resting:
        raise Skipped("the number of running requests (%d) does not show the one that ran" % resting)
    left = time.monotonic()
    after = run.metrics_when(lambda page: (page.get("running") or 0) <= resting, 15.0)
    run.figures.update(running_before_leaving=max(seen), seconds_to_rest=round(time.monotonic() - left, 2))
    if (after.get("running") or 0) > resting:
        run.fail("%d requests are running long after the client left" % (after.get("running") or 0), exchange)
    return "%d running before, %d after" % (max(seen), after.get("running") or 0)


@check("long.needle", limit=3600, since="deep", knowledge=True)
def needle(run: Run) -> str:
    """A password early, in the middle and late in a prompt near the context length is found."""
    room = int(run.context() * 0.9) - 256
    lines = [NEEDLE_HAY % i for i in range(200)]
    try:
        each = run.tokenized({"model": run.model, "prompt": "".join(lines)})["count"] / len(lines)
    except Skipped:
        each = max(map(len, lines))
    count = max(10, int(room / (each * 1.05)))
    for name, share in (("early", 0.1), ("middle", 0.5), ("late", 0.9)):
        text = [NEEDLE_HAY % i for i in range(count)]
        text.insert(int(count * share), NEEDLE + "\n")
        answer = run.chat(run.request("".join(text) + ASK_NEEDLE, max_tokens=32), seconds=1100)
        run.figures["seconds_" + name] = round(answer.exchange.seconds, 2)
        run.figures["prompt_tokens"] = (answer.usage or {}).get("prompt_tokens")
        if NEEDLE_ANSWER not in answer.text:
            run.fail("the password %s in the prompt was not found: %r" % (name, answer.text[:60]), answer)
    return "found early, in the middle and late in %s tokens" % run.figures["prompt_tokens"]


@check("content.markup", limit=10, since="smoke", knowledge=True)
def content_markup(run: Run) -> str:
    """No markup of the reasoning or tool format is in any content of this run."""
    if not run.answers:
        raise Skipped("no answer came in this run")
    for name, answer in run.answers:
        leak = MARKUP.search(answer.text)
        if leak:
            run.fail("%s leaked in %s" % (leak.group(0), name), answer)
    return "none in %d answers" % len(run.answers)


@check("guard.model", limit=10, since="smoke")
def guard_model(run: Run) -> str:
    """Every answer of this run is signed with the model that was asked."""
    if not run.answers:
        raise Skipped("no answer came in this run")
    for name, answer in run.answers:
        if answer.model != run.model:
            run.fail("%s was answered by %r, not %r" % (name, answer.model, run.model), answer)
    return "%d answers signed %s" % (len(run.answers), run.model)


@check("engine.preemptions", limit=30)
def preemptions(run: Run) -> str:
    """No request was preempted in this run: the KV cache is large enough for it."""
    if run.first_metrics is None:
        raise Skipped("the server has no /metrics")
    far = moved(run.first_metrics, run.metrics(), "preemptions")
    if far is None:
        raise Skipped("the server exports no counter of preemptions")
    if far > 0:
        run.fail("%d requests were preempted" % far)
    return "none"


@check("engine.kv_transfers", limit=30)
def kv_transfers(run: Run) -> str:
    """No KV transfer between prefill and decode has failed or expired since the engine started."""
    page = run.metrics()
    counts = {
        what: page.get(what) for what in ("failed_transfers", "failed_notifications", "expired_transfers")
    }
    if all(count is None for count in counts.values()):
        raise Skipped("the server transfers no KV cache")
    bad = ["%d %s" % (count, what.replace("_", " ")) for what, count in counts.items() if count]
    if bad:
        run.fail(", ".join(bad))
    return "none failed"


def log_end(script: str) -> str | None:
    """What a shell command prints of the engine's log; None when it cannot."""
    try:
        done = subprocess.run(
            ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[-MOST_BYTES:].decode("utf-8", "replace") if done.returncode == 0 else None


def new_lines(before: str, after: str) -> list[str]:
    """Lines of a log's end that an earlier look at its end did not show."""
    old, now = before.splitlines(), after.splitlines()
    if not old:
        return now
    last = old[-20:]
    for start in range(len(now) - len(last), -1, -1):
        if now[start : start + len(last)] == last:
            return now[start + len(last) :]
    return now


def fresh_log(run: Run) -> str | None:
    """What the engine has logged since `note_log`; None where that cannot be told."""
    path = run.expect.get("log")
    if not path:
        now = log_end(run.expect["log_script"])
        return None if now is None or run.log_seen is None else "\n".join([*new_lines(run.log_seen, now), ""])
    if run.log_offset is None:
        return None
    try:
        with open(path, "rb") as file:
            file.seek(run.log_offset if os.path.getsize(path) >= run.log_offset else 0)
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


@check("engine.compile", limit=30)
def compiled(run: Run) -> str:
    """No kernel was compiled in this run after its first request (the warm-up)."""
    if not run.expect.get("log") and not run.expect.get("log_script"):
        raise Skipped("no log was given")
    if not run.answers:
        raise Skipped("no answer came in this run")
    text = fresh_log(run)
    if text is None:
        raise Skipped("the log cannot be read: %s" % (run.expect.get("log") or run.expect.get("log_script")))
    lines = [line for line in text.splitlines() if COMPILED.search(line)]
    run.figures["compile_warnings"] = len(lines)
    if lines:
        run.fail(
            "%d kernels were compiled while requests waited, such as: %s (they are kept: a second run tells "
            "whether the warm-up only lacked their lengths)" % (len(lines), lines[0][-160:])
        )
    return "none in %d lines of log" % text.count("\n")


# --- running -----------------------------------------------------------------------------------------------


class Teller:
    """What is said on stderr meanwhile: JSON for programs; for people words, at a terminal in one line."""

    def __init__(self) -> None:
        self.people = False
        self.last = ""

    def progress(self, progress: Json) -> None:
        """How far the work is."""
        if not self.people:
            self.write("#progress " + json.dumps(progress, ensure_ascii=False) + "\n")
            return
        over = progress["done"] >= progress["total"]
        words = "%(phase)s: %(done)d of %(total)d %(unit)s done" % progress
        words = words if over else words + ", now " + plain(progress["note"])
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            self.write("\r\x1b[K" + ("" if over else words[: width - 1]))
        elif words != self.last:
            self.write(words + "\n")
        self.last = words

    def line(self, words: str) -> None:
        """A line that stays."""
        self.write(("\r\x1b[K" if self.people and sys.stderr.isatty() else "") + words + "\n")

    @staticmethod
    def write(text: str) -> None:
        """At once."""
        sys.stderr.write(text)
        sys.stderr.flush()


TELL = Teller()


def say(progress: Json) -> None:
    """One step of progress on stderr."""
    TELL.progress(progress)


class Heartbeat:
    """Repeats the last progress line while a check takes long, so that nobody thinks it hangs."""

    def __init__(self, total: int, every: float = 8.0) -> None:
        self.last: Json = {"phase": "accept", "done": 0, "total": total, "unit": "steps", "note": ""}
        self.every = every
        self.over = threading.Event()
        threading.Thread(target=self.beat, daemon=True).start()

    def step(self, done: int, note: str) -> None:
        """The next step begins."""
        self.last = {**self.last, "done": done, "note": note}
        say(self.last)

    def beat(self) -> None:
        """Say it again until it is over."""
        while not self.over.wait(self.every):
            say(self.last)


def entry(one: Check, verdict: str, summary: str, reason: str | None, seconds: float) -> Json:
    """One check's result without evidence."""
    return {
        "id": one.id, "about": one.about, "verdict": verdict, "summary": summary, "reason": reason,
        "seconds": round(seconds, 3),
    }  # fmt: skip


def perform(run: Run, one: Check, limit: float) -> tuple[Json, bool]:
    """Run one check within `limit` seconds; also says whether the server left it without an answer."""
    started = time.monotonic()
    client = run.client
    client.deadline = started + limit
    client.exchanges = []
    run.figures, run.current = {}, one.id
    verdict, summary, reason, decisive, unanswered = "pass", "", None, None, False
    try:
        summary = one.run(run)
    except Skipped as why:
        verdict, summary, reason = "skipped", "skipped: %s" % why, str(why)
    except Failed as why:
        verdict, summary, reason, decisive = "fail", str(why), str(why), why.exchange
        unanswered = isinstance(why, Unanswered)
    except Exception as why:  # an answer in a shape nobody thought of is a failed check, not a crash
        verdict, reason = "fail", "the answer has an unforeseen shape (%s: %s)" % (type(why).__name__, why)
        summary = reason
    result = entry(one, verdict, summary, reason, time.monotonic() - started)
    shown = decisive or (client.exchanges[-1] if client.exchanges else None)
    for exchange in client.exchanges:
        if run.slowest is None or exchange.seconds > run.slowest["seconds"]:
            run.slowest = {"check": one.id, "seconds": round(exchange.seconds, 3)}
    result["figures"] = run.figures
    result["exchanges"] = len(client.exchanges)
    result["evidence"] = shown.evidence(client.key) if shown is not None else None
    return result, unanswered or bool(shown and shown.timed_out)


def chosen(parameters: Parameters) -> list[Check]:
    """The checks of a run: those asked for, else those of the profile."""
    if parameters.checks:
        return [one for one in CHECKS if one.id in parameters.checks]
    level = PROFILES.index(parameters.profile)
    return [one for one in CHECKS if PROFILES.index(one.since) <= level]


def accept(parameters: Parameters, key: str | None) -> Json:
    """The whole run; returns its result, without the key anywhere."""
    run = Run(parameters, key)
    checks = chosen(parameters)
    began, started = time.time(), time.monotonic()
    end = started + BUDGET[parameters.profile] * parameters.patience
    heartbeat = Heartbeat(len(checks))
    results: list[Json] = []
    given_up: str | None = None
    silent = 0
    note_log(run)
    run.first_metrics = quiet_metrics(run)
    for number, one in enumerate(checks):
        heartbeat.step(number, one.id)
        left = end - time.monotonic()
        reason = parameters.skip.get(one.id)
        if reason is None and one.needs_knowledge and not parameters.knowledge:
            reason = RANDOM
        reason = given_up or reason
        if reason is None and left <= 0:
            text = "the run's %.0f s were over before this check" % (end - started)
            results.append(
                {**entry(one, "fail", text, text, 0.0), "figures": {}, "exchanges": 0, "evidence": None}
            )
            continue
        if reason is not None:
            text = "skipped: " + reason
            results.append(
                {**entry(one, "skipped", text, reason, 0.0), "figures": {}, "exchanges": 0, "evidence": None}
            )
            continue
        result, unanswered = perform(run, one, min(one.limit * parameters.patience, left))
        results.append(result)
        silent = silent + 1 if unanswered and result["verdict"] == "fail" else 0
        if silent and (one.id == "guard.first_request" or silent == 2):
            given_up = "the server does not answer (see %s)" % one.id
        if one.id == "guard.first_request":
            note_log(run)  # what the warm-up compiled does not count
    heartbeat.over.set()
    say({**heartbeat.last, "done": len(checks), "note": "done"})
    verdicts = [result["verdict"] for result in results]
    good = "fail" not in verdicts and "pass" in verdicts
    document: Json = redact({
        "verdict": "pass" if good else "fail",
        "profile": parameters.profile,
        "base_url": parameters.base_url,
        "model": parameters.model,
        "knowledge": parameters.knowledge,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.monotonic() - started, 3),
        "slowest_request": run.slowest,
        "counts": {name: verdicts.count(name) for name in ("pass", "fail", "skipped")},
        "checks": results,
    }, key)  # fmt: skip
    return document


def note_log(run: Run) -> None:
    """Remember where the engine's log ends: what comes later was compiled in this run."""
    if run.expect.get("log_script"):
        run.log_seen = log_end(run.expect["log_script"])
    try:
        run.log_offset = os.path.getsize(run.expect["log"])
    except (KeyError, OSError, TypeError):
        run.log_offset = None


def quiet_metrics(run: Run) -> Metrics | None:
    """The metrics page, or None where there is none."""
    try:
        run.client.deadline = time.monotonic() + 5 * min(1.0, run.parameters.patience)
        return run.metrics()
    except (Skipped, Failed):
        return None


# --- command line ------------------------------------------------------------------------------------------


class Usage(Exception):
    """The caller asked for something that does not exist."""


TYPES: dict[str, Any] = {
    "base_url": str, "model": str, "api_key_file": (str, type(None)), "profile": str, "checks": list,
    "skip": dict, "knowledge": bool, "patience": (int, float), "expect": dict,
}  # fmt: skip


def nearest(word: str, known: list[str]) -> str:
    """A hint at the right name."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return "; did you mean %r?" % close[0] if close else "; known: " + ", ".join(known)


KINDS: dict[str, Any] = {
    "int": int, "number": (int, float), "bool": bool, "string": str, "object": dict,
}  # fmt: skip


def is_a(value: Any, kinds: Any) -> bool:
    """Whether a value is of a kind, or of one of several; true and false are no numbers."""
    if isinstance(value, bool):
        return bool in (kinds if isinstance(kinds, tuple) else (kinds,))
    return isinstance(value, kinds)


def unexpected(known: dict[str, str], values: Json) -> list[str]:
    """What is wrong with the keys and values of `expect`, or of its `identity`; null is absent."""
    wrong = []
    for name, value in values.items():
        if name not in known:
            wrong.append("expect: unknown key %r%s" % (name, nearest(name, list(known))))
            continue
        kind = known[name].split(":")[0]
        if value is not None and not is_a(value, KINDS[kind]):
            wrong.append("expect: %s is %r, not %s" % (name, cut(value, 80), known[name]))
        elif kind in MOST_NUMBER and value is not None and not 0 < value < MOST_NUMBER[kind]:
            wrong.append("expect: %s is %r, which cannot be (%s)" % (name, value, known[name]))
    return wrong


def parameters_from(values: Json) -> Parameters:
    """Validated parameters, or Usage naming every mistake."""
    wrong = []
    ids = [one.id for one in CHECKS]
    for name, value in values.items():
        if name not in TYPES:
            wrong.append("unknown parameter %r%s" % (name, nearest(name, list(TYPES))))
        elif not is_a(value, TYPES[name]):
            wrong.append("%s is %r, which has the wrong type" % (name, cut(value, 80)))
    for name in ("base_url", "model"):
        if not values.get(name):
            wrong.append("%s is missing" % name)
    if values.get("profile", "standard") not in PROFILES:
        wrong.append("profile is %r, not one of %s" % (values["profile"], ", ".join(PROFILES)))
    if not wrong:
        for name in [*values.get("checks", []), *values.get("skip", {})]:
            if name not in ids:
                wrong.append("no check is called %r%s" % (name, nearest(str(name), ids)))
        for name, reason in values.get("skip", {}).items():
            if not isinstance(reason, str) or not reason.strip():
                wrong.append("skipping %s needs a reason" % name)
        expect = values.get("expect", {})
        wrong += unexpected(EXPECT_KEYS, expect)
        if isinstance(expect.get("identity"), dict):
            wrong += unexpected(IDENTITY_KEYS, expect["identity"])
        if not 0 < values.get("patience", 1) <= MOST_PATIENCE:
            wrong.append("patience must be above 0, and at most %d" % MOST_PATIENCE)
        try:
            Client(values["base_url"], None)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise Usage("\n".join(wrong))
    expect = given(values.get("expect", {}))
    if "identity" in expect:
        expect["identity"] = given(expect["identity"])
    return Parameters(**{**values, "checks": tuple(values.get("checks", ())), "expect": expect})


def given(values: Json) -> Json:
    """What is not null."""
    return {name: value for name, value in values.items() if value is not None}


def read_key(path: str | None) -> str | None:
    """The key: the first line of its file. It is never an argument, so that no process list shows it."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            key = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Usage("the key file cannot be read: %s" % error) from None
    if not key:
        raise Usage("the key file %s is empty" % path)
    if not all(" " <= character <= "\xff" for character in key):
        raise Usage("the key in %s has characters that no HTTP header may hold" % path)
    return key


EPILOG = """\
profiles:
  smoke      is it the right server, does it answer, think, call tools and stream? under 30 s on a GPU
  standard   the gate before promotion: exact answers, agents' rounds with 40 tools, usage, stop,
             logprobs, errors, hang-ups, prefix cache and speculation by their counters
  deep       standard, and a needle early, in the middle and late in a context near the limit

what --expect may say, as one JSON object; what is absent is asked of the server or skipped:
%s
  identity's keys:
%s

examples:
  accept.py --base-url http://127.0.0.1:8000 --model deepseek-v4-flash
  accept.py --base-url URL --model NAME --api-key-file /run/key --profile smoke --json
  accept.py --base-url URL --model NAME --checks chat.exact,tools.auto
  accept.py --base-url URL --model NAME --skip spec.decode='this engine has no counters for it'
  accept.py --base-url URL --model NAME --expect '{"speculative": true, "log": "/var/log/engine.log"}'

A check passes, fails, or is skipped with its reason; the run passes when nothing failed and something
passed. The JSON has every check's verdict, figures, and the request and response that decided.
exit codes: 0 pass, 1 fail, 2 wrong usage
""" % (
    "\n".join("  %-15s %s" % pair for pair in EXPECT_KEYS.items()),
    "\n".join("    %-13s %s" % pair for pair in IDENTITY_KEYS.items()),
)  # fmt: skip


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="accept.py",
        description="Prove that an endpoint serves the model, and not only that it answers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", metavar="URL", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--model", metavar="NAME", help="served model name")
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the API key")
    parser.add_argument(
        "--profile", choices=PROFILES, default="standard", help="how thorough (default: standard)"
    )
    parser.add_argument("--checks", metavar="ID,ID", default="", help="only these checks")
    parser.add_argument(
        "--skip", metavar="ID=REASON", action="append", default=[], help="skip a check; repeatable"
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="the checkpoint knows nothing: judge form only"
    )
    parser.add_argument(
        "--expect", metavar="JSON", default="{}", help="what is known of the server (see below)"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiplies every time limit (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.add_argument(
        "--stdin", action="store_true", help="read the parameters as JSON from stdin, print JSON"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and what each proves")
    return parser.parse_args(argv)


def values_from(options: argparse.Namespace) -> Json:
    """The parameters of the command line, in the shape of those on stdin."""
    try:
        expect = loads(options.expect)
    except ValueError as error:
        raise Usage("--expect is no JSON: %s" % error) from None
    skip = {}
    for pair in options.skip:
        name, _, reason = pair.partition("=")
        skip[name] = reason
    return {
        "base_url": options.base_url, "model": options.model, "api_key_file": options.api_key_file,
        "profile": options.profile, "checks": [c for c in options.checks.split(",") if c], "skip": skip,
        "knowledge": not options.random_weights, "patience": options.patience, "expect": expect,
    }  # fmt: skip


def table(result: Json) -> str:
    """The result for people."""
    lines = [
        "%-8s %-28s %7.2fs  %s" % (c["verdict"], c["id"], c["seconds"], plain(c["summary"]))
        for c in result["checks"]
    ]
    counts = ", ".join("%d %s" % (n, name) for name, n in result["counts"].items())
    lines.append("%s: %s at %s (%s; %.1f s)" % (
        result["verdict"].upper(), result["model"], result["base_url"], counts, result["seconds"],
    ))  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Parse, run, print; returns the exit code."""
    options = arguments(argv)
    if options.list:
        for one in CHECKS:
            print("%-28s %-9s %s" % (one.id, one.since, one.about))
        return 0
    try:
        if options.stdin:
            try:
                values = loads(sys.stdin.read())
            except ValueError as error:
                raise Usage("stdin is no JSON: %s" % error) from None
            if not isinstance(values, dict):
                raise Usage("stdin must be one JSON object")
        else:
            values = values_from(options)
        parameters = parameters_from(values)
        key = read_key(parameters.api_key_file)
    except Usage as error:
        print("accept.py: %s" % redact(str(error), None), file=sys.stderr)
        return 2
    TELL.people = not options.stdin
    result = accept(parameters, key)
    as_json = options.json or options.stdin
    text = json.dumps(result, ensure_ascii=False, indent=2) if as_json else table(result)
    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")
    sys.stdout.flush()
    return 0 if result["verdict"] == "pass" else 1


def end(program: Callable[[list[str]], int]) -> NoReturn:
    """Run a program to its end: a reader that went away, a full disk and Ctrl-C are no tracebacks.

    Streams that are closed lead nowhere.
    """
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what it stands for in JSON, too
    code: Any = 1
    try:
        try:
            code = program(sys.argv[1:])
        except SystemExit as done:  # argparse
            code = done.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141  # as a program that SIGPIPE ends
    except OSError as error:
        code = 1
        try:
            TELL.line("%s: %s" % (os.path.basename(sys.argv[0]), error))
        except OSError:
            pass
    os._exit(code)  # what could not be written is not tried again


if __name__ == "__main__":
    end(main)
