#!/usr/bin/env python3
"""A stand-in for `vllm serve`: an OpenAI-shaped server with no model, and faults that tests switch on.

It stands for one engine process as the rest of rackwright sees it: an argv, a port, a log, signals and
the HTTP interface of vLLM 0.32 with the DeepSeek-V4 tokenizer mode, reasoning parser and tool parser
(field names, status codes, event order and metric names were compared with that server). It does *not*
stand for a model: it recognises the acceptance dialogues by rule and answers them the same way each time.

Tests install this one file as `<env>/bin/vllm` (standard library only, Python >= 3.8):

    vllm serve MODEL --host H --port P --served-model-name N [any other flag of vllm]
    vllm --version

Flags that mean something here: --host --port --served-model-name --max-model-len --api-key
--speculative-config --kv-transfer-config --[no-]enable-prefix-caching --block-size, and of its own
--standin-log FILE. Every other flag is accepted, as is its value.
The key comes from VLLM_API_KEY (or --api-key) and guards /v1/* only, as in vLLM.

Faults: STANDIN_FAULTS="name,name=value" and, read again for every request, the JSON file that
STANDIN_FAULT_FILE names: ["name", "name=value"] or {"name": true, "name": value}.

    process      dies_at_start  never_ready  slow_start=S  healthy_but_dies_at_first_request  ignores_sigterm
                 dies_at_request=N
    identity     wrong_model_name  model_swap  wrong_version
    whole reply  ok_with_error_body  hanging  slow=S (a token)  wrong_answer  empty_answer  random_weights
                 trickle=S (a byte)  no_tokenize  no_metrics  server_error  echoes_key
    streaming    no_done  bad_sse  hanging_stream  half_utf8  replacement_chars  split_transport (legal)
                 answers_only_not_streaming  stream_differs  stream_error_event  no_stream_usage
    fields       reasoning_content (legal)  wrong_usage  usage_of_another_prompt  wrong_finish_reason
                 ignores_max_tokens  ignores_stop  ignores_n  no_logprobs  positive_logprobs  ignores_schema
    thinking     lost_reasoning  always_thinks  ignores_thinking_switch  reasoning_after_answer
                 think_in_content
    tools        ignores_tool_choice  no_tool_calls  wrong_tool  wrong_tool_args  tool_args_cut
                 stream_tool_args_cut  one_call_only  ignores_tool_result  leaked_markup_round3
                 lost_reasoning_round3  stuck_round3
    errors       accepts_any_model  bad_json_500  accepts_too_long  dies_on_long  hangup_leaks  no_key_check
    load         fails_every=N (a request in N)  ends_early (ignore_eos is not heeded)  slow_every=N (0.3 s)
    mechanisms   frozen_counters  no_cache_hits  no_drafts  no_acceptance  preempts  compiles_late
                 token_counters_move_idle  forgets_middle  failed_transfers  wrong_context
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator

VERSION = "0.32.0"
SPECIAL = r"<｜[^｜<>]{1,40}｜>|</?think>|</?｜DSML｜[a-z_]+"
TOKEN = re.compile(SPECIAL + r"|[A-Za-z0-9_]{1,8}|\s|.", re.DOTALL)
END = "<｜end▁of▁sentence｜>"
ROUND_OF_LEAK = 3


class HttpError(Exception):
    """Ends a request with an OpenAI-shaped error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status}}


def parse_faults(value: Any) -> dict[str, str]:
    """Faults from "a,b=2", ["a", "b=2"] or {"a": true, "b": 2}."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, dict):
        return {str(k): "" if v is True else str(v) for k, v in value.items() if v is not False}
    found = {}
    for part in value or []:
        name, _, argument = str(part).strip().partition("=")
        found[name] = argument
    return found


def tokens_of(text: str) -> list[str]:
    """The stand-in's tokens: special tokens, short words, single characters. Joined they are the text."""
    return TOKEN.findall(text)


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a string, a list of parts, or None."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content) if content is not None else ""


def thinks(request: dict[str, Any]) -> bool:
    """Whether the prompt opens a reasoning block: template switch, then `thinking`, then effort, else on."""
    switches = request.get("chat_template_kwargs") or {}
    for name in ("thinking", "enable_thinking"):
        if name in switches:
            return bool(switches[name])
    field = request.get("thinking")
    if isinstance(field, dict) and "type" in field:
        return bool(field["type"] != "disabled")
    return bool(request.get("reasoning_effort") != "none")


def render(request: dict[str, Any], thinking: bool) -> str:
    """The prompt in the shape of DeepSeek-V4's encoding (its markers and its tail; not to the letter)."""
    out = ["<｜begin▁of▁sentence｜>"]
    if request.get("tools"):
        out.append("\n\n## Tools\n" + json.dumps(request["tools"], ensure_ascii=False))
    for message in request.get("messages") or []:
        text = text_of(message.get("content"))
        if message.get("role") == "assistant":
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            calls = json.dumps(message.get("tool_calls") or [], ensure_ascii=False)
            think = "<think>" + reasoning + "</think>" if reasoning else "</think>"
            out.append("<｜Assistant｜>" + think + text + calls + END)
        elif message.get("role") == "tool":
            out.append("<｜User｜><tool_result>" + text + "</tool_result>")
        elif message.get("role") == "system":
            out.append(text)
        else:
            out.append("<｜User｜>" + text)
    out.append("<｜Assistant｜>" + ("<think>" if thinking else "</think>"))
    return "".join(out)


def instance_of(schema: dict[str, Any]) -> Any:
    """A small value that fits a JSON schema (the parts of it that the acceptance uses)."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        return {name: instance_of(sub) for name, sub in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [instance_of(schema.get("items") or {})] * max(1, int(schema.get("minItems", 1)))
    if kind == "integer":
        return schema.get("minimum", 1)
    return {"number": 1.5, "boolean": True, "null": None}.get(str(kind), "北京")


class Reply:
    """What the "model" says once: reasoning, text and calls, before limits and framing."""

    def __init__(self, text: str = "", reasoning: str = "", calls: Any = None) -> None:
        self.text = text
        self.reasoning = reasoning
        self.calls: list[dict[str, Any]] = calls or []


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """One tool call, as the API returns it."""
    return {
        "id": "call_" + uuid.uuid4().hex[:16],
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def since_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages after the last user message."""
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    return messages[last + 1 :]


CITIES = ("北京", "上海", "广州", "深圳")
DSML_LEAK = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="open_box">'


def garbage(seed: str, length: int) -> str:
    """Text as random weights write it: the same for the same prompt, meaning nothing, bytes cut anywhere."""
    alphabet = "abcxyz019 ,.!\n\ufffd\ufffd天气é%"
    digest = hashlib.sha256(seed.encode()).digest()
    return "".join(alphabet[(digest[i % 32] + i * 7 + i // 32) % len(alphabet)] for i in range(length))


def think_of(request: dict[str, Any], thinking: bool, faults: dict[str, str]) -> Reply:
    """The answer to one request: rules for the acceptance dialogues, an echo for the rest."""
    messages = request["messages"]
    user = next((text_of(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), "")
    tools = [t["function"]["name"] for t in request.get("tools") or []]
    choice = request.get("tool_choice", "auto" if tools else "none")
    schema = ((request.get("response_format") or {}).get("json_schema") or {}).get("schema")
    reply = Reply(reasoning="先看清问题，再给出简短的回答。")

    if "random_weights" in faults:
        reply.text = garbage(render(request, thinking), 400)
        if thinking:
            reply.reasoning, reply.text = reply.text, ""
        if isinstance(choice, dict) or choice == "required":
            name = choice["function"]["name"] if isinstance(choice, dict) else tools[0]
            return Reply(reasoning=reply.reasoning, calls=[call(name)])
        if schema is not None:
            reply.text = json.dumps(instance_of(schema), ensure_ascii=False)
        return reply

    if schema is not None:
        made = {"wrong": 1} if "ignores_schema" in faults else instance_of(schema)
        reply.text = json.dumps(made, ensure_ascii=False)
        return reply

    forced = isinstance(choice, dict) or choice == "required"
    if tools and choice != "none" and not ("ignores_tool_choice" in faults and forced):
        answer = use_tools(messages, user, tools, choice, faults)
        if answer is not None:
            answer.reasoning = reply.reasoning
            return answer

    results = [text_of(m.get("content")) for m in since_user(messages) if m.get("role") == "tool"]
    if results:
        seen = "我不知道。" if "ignores_tool_result" in faults else results[-1]
        reply.text = "根据工具结果：" + seen
        return reply
    reply.text, reply.reasoning = answer_to(user, faults, reply.reasoning)
    return reply


def answer_to(user: str, faults: dict[str, str], reasoning: str) -> tuple[str, str]:
    """Text and reasoning for a question without tools."""
    needle = re.search(r"口令是\s*([A-Z0-9_]{4,})", user)
    if needle:
        place = needle.start() / max(1, len(user))
        forgotten = "forgets_middle" in faults and 0.3 < place < 0.7
        return "没有找到。" if forgotten else needle.group(1), reasoning
    only = re.search(r"只(?:输出|回答)[^：:“”]{0,8}[：:]?\s*“?([^“”，。\s]+)”?", user)
    if only:
        return only.group(1), reasoning
    if "9.11" in user:
        return "9.9 更大，因为 9.90 大于 9.11。", "比较小数：先补齐位数，9.9 就是 9.90，9.90 大于 9.11。"
    if "数到" in user:
        last = int(re.findall(r"数到\s*(\d+)", user)[0])
        return "，".join(str(i) for i in range(1, last + 1)) + "。", reasoning
    if "架构" in user:
        return "它用混合专家和稀疏注意力处理长上下文。", reasoning
    return "好的，已收到：" + user[:40].replace("\n", " ") + "。", reasoning


def use_tools(
    messages: list[dict[str, Any]], user: str, tools: list[str], choice: Any, faults: dict[str, str]
) -> Reply | None:
    """The call that the dialogue asks for, or None when the answer is text."""
    after = since_user(messages)
    results = [text_of(m.get("content")) for m in after if m.get("role") == "tool"]
    made: list[dict[str, Any]] = []
    if "open_box" in tools and "open_box" in user:
        turn = len(results) + 1
        key = re.search(r"第一个钥匙是\s*([A-Za-z0-9]+)", user)
        following = re.search(r'"next_key":\s*"([^"]+)"', results[-1]) if results else key
        if following is None:
            return None
        if turn >= ROUND_OF_LEAK and "stuck_round3" in faults and key is not None:
            following = key
        if turn >= ROUND_OF_LEAK and "leaked_markup_round3" in faults:
            return Reply(text=DSML_LEAK)
        made = [call("open_box", key=following.group(1))]
    elif results:
        return None
    elif isinstance(choice, dict):
        made = [call(choice["function"]["name"], location="北京")]
    elif "get_weather" in tools and ("天气" in user or choice == "required"):
        cities = [city for city in CITIES if city in user] or ["北京"]
        made = [call("get_weather", location=city) for city in cities]
    elif choice == "required":
        made = [call(tools[0])]
    else:
        return None
    if "no_tool_calls" in faults:
        return Reply(text="好的，我会查询。")
    if "one_call_only" in faults:
        made = made[:1]
    for one in made:
        if "wrong_tool" in faults:
            one["function"]["name"] = "get_time"
        if "wrong_tool_args" in faults:
            one["function"]["arguments"] = '{"location": "Paris", "key": "Z9"}'
        if "tool_args_cut" in faults:
            one["function"]["arguments"] = one["function"]["arguments"][:-3]
    return Reply(calls=made)


class Metrics:
    """The counters and gauges of one engine, printed the way the Prometheus client does."""

    COUNTERS = (
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
    )
    NIXL = ("nixl_num_failed_transfers", "nixl_num_failed_notifications", "nixl_num_kv_expired_reqs")
    SPEC = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")

    def __init__(self, model: str, speculative: bool, transfers: bool, caching: bool, block: int) -> None:
        self.lock = threading.Lock()
        self.model = model
        self.caching = caching
        self.block = block
        self.created = time.time()
        names = self.COUNTERS + (self.SPEC if speculative else ()) + (self.NIXL if transfers else ())
        self.counters: dict[str, float] = dict.fromkeys(names, 0.0)
        self.finished = {"stop": 0.0, "length": 0.0, "abort": 0.0}
        self.running = 0
        self.ttft_sum = 0.0
        self.ttft_count = 0.0

    def add(self, name: str, value: float) -> None:
        """Move one counter; a counter that this engine does not export is left out."""
        with self.lock:
            if name in self.counters:
                self.counters[name] += value

    def page(self) -> str:
        """The whole /metrics page."""
        labels = '{engine="0",model_name="%s"}' % self.model
        created = "%r" % self.created
        out: list[str] = []

        def series(name: str, kind: str, rows: list[tuple[str, float]]) -> None:
            out.append("# HELP %s Stand-in.\n# TYPE %s %s" % (name, name, kind))
            out.extend("%s%s %r" % (name, lab, float(value)) for lab, value in rows)

        with self.lock:
            series("process_start_time_seconds", "gauge", [("", round(self.created, 2))])
            series("vllm:num_requests_running", "gauge", [(labels, self.running)])
            series("vllm:num_requests_waiting", "gauge", [(labels, 0)])
            series("vllm:kv_cache_usage_perc", "gauge", [(labels, 0.01 * self.running)])
            info = '{block_size="%d",enable_prefix_caching="%s",engine="0"}' % (self.block, self.caching)
            series("vllm:cache_config_info", "gauge", [(info, 1)])
            for name, value in self.counters.items():
                series("vllm:%s_total" % name, "counter", [(labels, value)])
                out.append("# TYPE vllm:%s_created gauge" % name)
                out.append("vllm:%s_created%s %s" % (name, labels, created))
            for reason, value in self.finished.items():
                lab = '{engine="0",finished_reason="%s",model_name="%s"}' % (reason, self.model)
                out.append("vllm:request_success_total%s %r" % (lab, value))
                out.append("vllm:request_success_created%s %s" % (lab, created))
            name = "vllm:time_to_first_token_seconds"
            bucket = '{engine="0",le="+Inf",model_name="%s"}' % self.model
            out.append("# TYPE %s histogram" % name)
            out.append("%s_bucket%s %r" % (name, bucket, self.ttft_count))
            out.append("%s_count%s %r" % (name, labels, self.ttft_count))
            out.append("%s_sum%s %r" % (name, labels, self.ttft_sum))
        return "\n".join(out) + "\n"


class StandIn:
    """One stand-in engine: options, faults, counters and the server. `start()` runs it in a thread."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None, hard_exit: bool = False) -> None:
        self.env = dict(os.environ if env is None else env)
        self.options = parse_argv(argv)
        self.hard_exit = hard_exit
        self.host = self.options.get("host") or "0.0.0.0"
        self.port = int(self.options.get("port") or 8000)
        self.served = self.options.get("served-model-name") or self.options["model"]
        self.max_model_len = int(self.options.get("max-model-len") or 32768)
        self.block = int(self.options.get("block-size") or 16)
        self.key = self.env.get("VLLM_API_KEY") or self.options.get("api-key") or ""
        speculative = self.options.get("speculative-config")
        self.draft = int(json.loads(speculative).get("num_speculative_tokens", 2)) if speculative else 0
        self.caching = "no-enable-prefix-caching" not in self.options
        self.faults_given: Any = None
        self.metrics = Metrics(
            self.served, bool(self.draft), "kv-transfer-config" in self.options, self.caching, self.block
        )
        self.cached: set[str] = set()
        self.vocabulary: dict[str, int] = {}
        self.words: list[str] = []
        self.lock = threading.Lock()
        self.first_request_seen = False
        self.asked = 0
        self.server: ThreadingHTTPServer | None = None
        self.connections: set[socket.socket] = set()

    # --- faults and log

    def faults(self) -> dict[str, str]:
        """The faults that are on now."""
        found = parse_faults(self.env.get("STANDIN_FAULTS", ""))
        found.update(parse_faults(self.faults_given))
        path = self.env.get("STANDIN_FAULT_FILE")
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found.update(parse_faults(json.loads(file.read() or "[]")))
        return found

    def log(self, message: str, level: str = "INFO", who: str = "APIServer") -> None:
        """One log line on stderr, in vLLM's form."""
        stamp = time.strftime("%m-%d %H:%M:%S")
        text = "(%s pid=%d) %s %s [standin.py:1] %s\n" % (who, os.getpid(), level, stamp, message)
        target = self.options.get("standin-log")
        if target:
            with open(target, "a", encoding="utf-8") as file:
                file.write(text)
        elif self.hard_exit:
            sys.stderr.write(text)
            sys.stderr.flush()

    def die(self, why: str) -> None:
        """Die as a dead engine core does: a traceback in the log, then no process (or no port)."""
        self.log("EngineCore encountered a fatal error.", "ERROR", "EngineCore")
        trace = 'Traceback (most recent call last):\n  File "core.py", line 1\n' + why
        self.log(trace, "ERROR", "EngineCore")
        if self.hard_exit:
            os._exit(1)
        if self.server is not None:
            self.server.socket.close()
            threading.Thread(target=self.server.shutdown, daemon=True).start()
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # --- tokens and cache

    def ids(self, tokens: list[str]) -> list[int]:
        """Token ids; a token gets the next free id when it is first seen."""
        with self.lock:
            for token in tokens:
                if token not in self.vocabulary:
                    self.vocabulary[token] = len(self.words)
                    self.words.append(token)
            return [self.vocabulary[token] for token in tokens]

    def prefill(self, tokens: list[str], faults: dict[str, str]) -> int:
        """Count a prompt through the prefix cache, take the time it would; returns the cached tokens."""
        cached = 0
        digest = hashlib.sha256()
        whole = len(tokens) // self.block
        matching = self.caching
        with self.lock:
            for i in range(whole):
                digest.update("\x00".join(tokens[i * self.block : (i + 1) * self.block]).encode())
                name = digest.hexdigest()
                matching = matching and name in self.cached
                cached += self.block if matching else 0
                self.cached.add(name)
        cached = min(cached, max(0, (len(tokens) - 1) // self.block * self.block))
        if "no_cache_hits" in faults:
            cached = 0
        if "frozen_counters" not in faults:
            self.metrics.add("prefix_cache_queries", len(tokens) if self.caching else 0)
            self.metrics.add("prefix_cache_hits", cached)
            self.metrics.add("prompt_tokens", len(tokens))
            self.metrics.add("num_preemptions", 1 if "preempts" in faults else 0)
            self.metrics.add("nixl_num_failed_transfers", 1 if "failed_transfers" in faults else 0)
        time.sleep(min(0.5, 5e-6 * (len(tokens) - cached)))
        return cached

    def generated(self, count: int, reason: str, faults: dict[str, str]) -> None:
        """Count a finished generation, and what speculation would have done for it."""
        if "frozen_counters" in faults:
            return
        self.metrics.add("generation_tokens", count)
        with self.metrics.lock:
            self.metrics.finished[reason] = self.metrics.finished.get(reason, 0.0) + 1
        if self.draft and "no_drafts" not in faults:
            drafts = max(1, math.ceil(count / (1 + 0.6 * self.draft)))
            self.metrics.add("spec_decode_num_drafts", drafts)
            self.metrics.add("spec_decode_num_draft_tokens", drafts * self.draft)
            accepted = 0 if "no_acceptance" in faults else max(1, int(drafts * self.draft * 0.6))
            self.metrics.add("spec_decode_num_accepted_tokens", accepted)

    # --- life

    def start(self) -> StandIn:
        """Bind exactly host:port (0 picks a free one) and serve in a thread."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        engine = self

        class Server(ThreadingHTTPServer):
            address_family = family
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away is no event here."""

        handler = type("BoundHandler", (Handler,), {"engine": engine})
        self.server = Server((self.host, self.port), handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.005,), daemon=True).start()
        self.log("Started server process [%d]" % os.getpid())
        self.log("Application startup complete.")
        return self

    def stop(self) -> None:
        """Stop serving and free the port."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    @property
    def url(self) -> str:
        """Where it answers."""
        return "http://%s:%d" % (self.host, self.port)


def parse_argv(argv: list[str]) -> dict[str, str]:
    """`serve MODEL --flag value --flag=value --switch` as a dict; flags are not judged."""
    rest = argv[1:] if argv and argv[0] == "serve" else list(argv)
    options: dict[str, str] = {}
    i = 0
    while i < len(rest):
        word = rest[i]
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if not given and i + 1 < len(rest) and not rest[i + 1].startswith("--"):
                value = rest[i + 1]
                i += 1
            options[name.replace("_", "-")] = value
        else:
            options.setdefault("model", word)
        i += 1
    options.setdefault("model", "stand-in")
    return options


class Hangup(Exception):
    """The client went away while it was being answered."""


class Handler(BaseHTTPRequestHandler):
    """One connection. Keeps HTTP/1.1 framing; every body is JSON, SSE or text."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    engine: StandIn

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.engine.connections.add(self.connection)

    def finish(self) -> None:
        self.engine.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Access lines go where the log goes, in uvicorn's form."""
        if self.path != "/health" and self.path != "/metrics":
            self.engine.log("%s:%d - %s" % (*self.client_address[:2], format % args))

    # --- bodies

    def send_body(self, status: int, kind: str, body: bytes) -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        pause = self.engine.faults().get("trickle")
        if pause:
            for i in range(len(body)):
                self.wfile.write(body[i : i + 1])
                self.wfile.flush()
                time.sleep(float(pause))
        else:
            self.wfile.write(body)

    def send_json(self, status: int, value: Any) -> None:
        """A JSON answer."""
        self.send_body(status, "application/json", json.dumps(value, ensure_ascii=False).encode("utf-8"))

    def send_piece(self, data: bytes, split: bool = False) -> None:
        """One piece of a chunked answer; `split` cuts the transport (not the event) after every 5 bytes."""
        pieces = [data[i : i + 5] for i in range(0, len(data), 5)] if split else [data]
        try:
            for piece in pieces:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
        except OSError:
            raise Hangup from None

    def authorised(self, faults: dict[str, str]) -> bool:
        """Whether the request may reach /v1/*."""
        if not self.engine.key or not self.path.startswith("/v1") or "no_key_check" in faults:
            return True
        return self.headers.get("Authorization", "") == "Bearer " + self.engine.key

    # --- routes

    def do_GET(self) -> None:
        engine = self.engine
        faults = engine.faults()
        path = self.path.split("?")[0]
        if not self.authorised(faults):
            self.send_json(401, {"error": "Unauthorized"})
        elif path in ("/health", "/ping"):
            if "token_counters_move_idle" in faults:
                engine.metrics.add("generation_tokens", 1)
                engine.metrics.add("prompt_tokens", 4)
            self.send_body(200, "application/json", b"")
        elif path == "/version":
            self.send_json(200, {"version": "0.1.0" if "wrong_version" in faults else VERSION})
        elif path == "/v1/models":
            name = "some-other-model" if "wrong_model_name" in faults else engine.served
            card = {
                "id": name,
                "object": "model",
                "created": int(engine.metrics.created),
                "owned_by": "vllm",
                "root": engine.options["model"],
                "parent": None,
                "max_model_len": engine.max_model_len // (2 if "wrong_context" in faults else 1),
            }
            self.send_json(200, {"object": "list", "data": [card]})
        elif path == "/metrics" and "no_metrics" not in faults:
            self.send_body(200, "text/plain; version=0.0.4; charset=utf-8", engine.metrics.page().encode())
        else:
            self.send_json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        faults = self.engine.faults()
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        try:
            if not self.authorised(faults):
                self.send_json(401, {"error": "Unauthorized"})
                return
            try:
                request = json.loads(raw.decode("utf-8"))
            except ValueError:
                status = 500 if "bad_json_500" in faults else 400
                raise HttpError(status, "Request body is not valid JSON") from None
            if not isinstance(request, dict):
                raise HttpError(400, "Input should be an object")
            if path == "/tokenize" and "no_tokenize" not in faults:
                self.tokenize(request, faults)
            elif path == "/detokenize" and "no_tokenize" not in faults:
                words = dict(enumerate(self.engine.words))
                self.send_json(200, {"prompt": "".join(words.get(i, "") for i in request.get("tokens", []))})
            elif path == "/v1/chat/completions":
                self.complete(request, faults)
            elif path == "/v1/completions":
                self.complete(as_chat(request), faults, chat=False)
            else:
                self.send_json(404, {"detail": "Not Found"})
        except HttpError as error:
            self.send_json(error.status, error.body)
        except Hangup:
            self.close_connection = True

    def tokenize(self, request: dict[str, Any], faults: dict[str, str]) -> None:
        """/tokenize: of a prompt or of a conversation with its template switches."""
        thinking = "ignores_thinking_switch" in faults or thinks(request)
        text = request["prompt"] if "prompt" in request else render(request, thinking)
        tokens = tokens_of(text)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.engine.max_model_len,
            "tokens": self.engine.ids(tokens),
        }
        answer["token_strs"] = tokens if request.get("return_token_strs") else None
        self.send_json(200, answer)

    def complete(self, request: dict[str, Any], faults: dict[str, str], chat: bool = True) -> None:
        """A completion, from validation to the last byte."""
        engine = self.engine
        if not isinstance(request.get("messages"), list) or not request["messages"]:
            raise HttpError(400, "Field required: messages")
        known = "some-other-model" if "wrong_model_name" in faults else engine.served
        if request.get("model", known) != known and "accepts_any_model" not in faults:
            raise HttpError(404, "The model `%s` does not exist." % request.get("model"), "NotFoundError")
        with engine.lock:
            first, engine.first_request_seen = not engine.first_request_seen, True
        if first and "healthy_but_dies_at_first_request" in faults:
            engine.die("NotImplementedError: Unsupported CPU attention configuration: head_dim=16")
            raise Hangup
        with engine.lock:
            engine.asked += 1
            number = engine.asked
        if "dies_at_request" in faults and number >= int(faults["dies_at_request"]):
            engine.die("RuntimeError: worker died")
            raise Hangup
        if "fails_every" in faults and number % int(faults["fails_every"]) == 0:
            raise HttpError(503, "The engine is overloaded.", "ServiceUnavailableError")
        if "slow_every" in faults and number % int(faults["slow_every"]) == 0:
            time.sleep(0.3)
        if "server_error" in faults:
            raise HttpError(500, "EngineCore encountered an issue.", "InternalServerError")
        thinking = thinks(request) or "always_thinks" in faults
        prompt = request.get("prompt_tokens") or tokens_of(render(request, thinking))
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if len(prompt) + int(limit or 1) > engine.max_model_len:
            if "dies_on_long" in faults:
                engine.die("RuntimeError: the prompt does not fit")
                raise Hangup
            if "accepts_too_long" not in faults:
                limits = (engine.max_model_len, len(prompt), int(limit or 1))
                raise HttpError(
                    400, "The context is %d tokens; the prompt has %d, and %d are asked." % limits
                )
        if "ok_with_error_body" in faults:
            self.send_json(200, {"error": {"message": "upstream unavailable", "type": "InternalServerError"}})
            return
        if "compiles_late" in faults:
            engine.log("Triton kernel JIT compilation during inference: _fwd_kernel", "WARNING", "Worker")
        with engine.metrics.lock:
            engine.metrics.running += 1
        leaked = False
        try:
            if "hanging" in faults:
                self.wait_for_hangup()
            started = time.monotonic()
            cached = engine.prefill(prompt, faults)
            with engine.metrics.lock:
                engine.metrics.ttft_sum += time.monotonic() - started
                engine.metrics.ttft_count += 1
            Completion(self, request, faults, prompt, cached, thinking, chat).send()
        except Hangup:
            leaked = "hangup_leaks" in faults
            with engine.metrics.lock:
                engine.metrics.finished["abort"] += 1
            raise
        finally:
            if not leaked:
                with engine.metrics.lock:
                    engine.metrics.running -= 1

    def wait_for_hangup(self) -> None:
        """Answer nothing until the client goes away (or ten minutes have passed)."""
        self.connection.settimeout(600)
        try:
            self.connection.recv(1)
        except OSError:
            pass
        raise Hangup


def as_chat(request: dict[str, Any]) -> dict[str, Any]:
    """A text completion as the chat request that answers the same."""
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        tokens = tokens_of(prompt)
    else:  # token ids, or texts
        tokens = [str(part) for part in prompt or [""]]
    kept = {k: v for k, v in request.items() if k not in ("prompt", "logprobs", "tools")}
    message = {"role": "user", "content": " ".join(tokens)}
    return {**kept, "messages": [message], "thinking": {"type": "disabled"}, "prompt_tokens": tokens}


class Completion:
    """One answer being written: a reply, its limits, and its framing."""

    def __init__(
        self,
        handler: Handler,
        request: dict[str, Any],
        faults: dict[str, str],
        prompt: list[str],
        cached: int,
        thinking: bool,
        chat: bool,
    ) -> None:
        self.handler = handler
        self.request = request
        self.faults = faults
        self.prompt = prompt
        self.cached = cached
        self.thinking = thinking
        self.chat = chat
        self.streaming = bool(request.get("stream"))
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self.field = "reasoning_content" if "reasoning_content" in faults else "reasoning"
        self.reason = "stop"
        self.reply = self.decide()
        self.reasoning, self.text = self.limit()

    def decide(self) -> Reply:
        """The reply, after the faults that change what is said."""
        faults = self.faults
        reply = think_of(self.request, self.thinking, faults)
        turn = 1 + sum(1 for m in since_user(self.request["messages"]) if m.get("role") == "tool")
        if not self.thinking:
            reply.reasoning = ""
        if "lost_reasoning" in faults or ("lost_reasoning_round3" in faults and turn >= ROUND_OF_LEAK):
            reply.reasoning = ""
        if "think_in_content" in faults:
            reply.text = "<think>" + reply.reasoning + "</think>" + reply.text
        if "wrong_answer" in faults and reply.text:
            reply.text = "对不起，我不明白。"
        if "echoes_key" in faults:
            reply.text = "seen: " + str(self.handler.headers.get("Authorization"))
        if "empty_answer" in faults:
            reply.text = ""
        if self.streaming and "stream_differs" in faults and reply.text:
            reply.text = reply.text[:-1] + "？"
        if self.streaming and "answers_only_not_streaming" in faults:
            reply.text, reply.reasoning, reply.calls = "", "", []
        if self.request.get("ignore_eos") and "ends_early" not in faults:
            reply.text += " 字" * int(self.request.get("max_tokens") or 16)
        return reply

    def limit(self) -> tuple[list[str], list[str]]:
        """Reasoning and text as tokens, cut by stop and max_tokens; sets the finish reason."""
        faults, request = self.faults, self.request
        text = self.reply.text
        stops = request.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            at = text.find(stop)
            if at >= 0 and "ignores_stop" not in faults:
                text = text[:at]
        reasoning, words = tokens_of(self.reply.reasoning), tokens_of(text)
        most = request.get("max_completion_tokens") or request.get("max_tokens")
        if most and "ignores_max_tokens" not in faults:
            room = int(most)
            if len(reasoning) + len(words) > room:
                self.reason = "length"
                reasoning = reasoning[:room]
                words = words[: room - len(reasoning)]
        choice = request.get("tool_choice", "auto")
        if self.reply.calls and not isinstance(choice, dict):
            self.reason = "tool_calls"
        if "wrong_finish_reason" in faults:
            self.reason = "stop" if self.reason == "length" else "length"
        return reasoning, words

    def usage(self) -> dict[str, Any]:
        """Token counts; a call counts as the tokens of its name and arguments, and the end token counts."""
        done = len(self.reasoning) + len(self.text)
        for one in self.reply.calls:
            done += len(tokens_of(one["function"]["name"] + one["function"]["arguments"]))
        done += 1 if self.reason != "length" else 0
        prompt = len(self.prompt)
        if "wrong_usage" in self.faults:
            done *= 30
        if "usage_of_another_prompt" in self.faults:
            prompt += 7
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def logprobs(self) -> dict[str, Any] | None:
        """One entry a text token, when they were asked for."""
        if not self.request.get("logprobs") or "no_logprobs" in self.faults or not self.chat:
            return None
        sign = 1.0 if "positive_logprobs" in self.faults else -1.0
        most = int(self.request.get("top_logprobs") or 0)
        tail = [END] if self.reason == "stop" else []

        def entry(token: str, i: int) -> dict[str, Any]:
            return {"token": token, "logprob": sign * (0.1 + i), "bytes": list(token.encode("utf-8"))}

        others = ["的", "是", "不", "在", "了"]
        rows = []
        for token in self.text + tail:
            top = [entry(t, i) for i, t in enumerate([token, *others])][:most]
            rows.append({**entry(token, 0), "top_logprobs": top})
        return {"content": rows}

    @property
    def model(self) -> str:
        """The name in the answer."""
        return "deepseek-v3-old" if "model_swap" in self.faults else self.handler.engine.served

    def send(self) -> None:
        """Write the answer, streamed or whole."""
        if self.streaming:
            self.stream()
        else:
            for _ in self.paced(self.reasoning + self.text):
                pass
            self.whole()
        usage = self.usage()["completion_tokens"]
        self.handler.engine.generated(usage, "length" if self.reason == "length" else "stop", self.faults)

    def paced(self, tokens: list[str]) -> Iterator[str]:
        """The tokens, at the speed that the faults ask for."""
        pause = float(self.faults.get("slow") or 0)
        for token in tokens:
            if pause:
                time.sleep(pause)
            yield token

    def whole(self) -> None:
        """The answer in one body."""
        text = "".join(self.text)
        count = 1 if "ignores_n" in self.faults else int(self.request.get("n") or 1)
        choices: list[dict[str, Any]] = []
        for index in range(count):
            choice: dict[str, Any] = {"index": index, "finish_reason": self.reason, "stop_reason": None}
            if self.chat:
                only_calls = bool(self.reply.calls) and not text
                choice["message"] = {
                    "role": "assistant",
                    "content": None if only_calls or not text else text,
                    "tool_calls": self.reply.calls,
                    self.field: "".join(self.reasoning) or None,
                }
                choice["logprobs"] = self.logprobs()
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        self.handler.send_json(
            200,
            {
                "id": self.id,
                "object": kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": self.usage(),
            },
        )

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> None:
        """One SSE event."""
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage
        prefix = b"data" if "bad_sse" in self.faults else b"data: "
        text = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
        self.handler.send_piece(prefix + text + b"\n\n", "split_transport" in self.faults)

    def delta(self, index: int, reason: str | None = None, **fields: Any) -> None:
        """One choice's delta."""
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if self.chat:
            choice["delta"] = fields
        else:
            choice["text"] = fields.get("content", "")
        self.event([choice])

    def stream(self) -> None:
        """The answer as server-sent events: role, reasoning, text, calls, finish, usage, [DONE]."""
        handler, faults = self.handler, self.faults
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for index in range(1 if "ignores_n" in faults else int(self.request.get("n") or 1)):
            if self.chat:
                self.delta(index, role="assistant", content="")
            parts = [(self.field, t) for t in self.reasoning], [("content", t) for t in self.text]
            ordered = parts[1] + parts[0] if "reasoning_after_answer" in faults else parts[0] + parts[1]
            for position, (field, token) in enumerate(ordered):
                for _ in self.paced([token]):
                    self.piece(index, field, token)
                if "hanging_stream" in faults and position >= 2:
                    handler.wait_for_hangup()
            if "stream_error_event" in faults:
                handler.send_piece(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
                handler.send_piece(b"data: [DONE]\n\n")
                handler.send_piece(b"")
                return
            for number, one in enumerate(self.reply.calls):
                self.call_deltas(index, number, one)
            self.delta(index, reason=self.reason)
        asked = (self.request.get("stream_options") or {}).get("include_usage")
        if asked and "no_stream_usage" not in faults:
            self.event([], self.usage())
        if "no_done" not in faults:
            handler.send_piece(b"data: [DONE]\n\n")
        handler.send_piece(b"")

    def piece(self, index: int, field: str, token: str) -> None:
        """One token's delta; two faults cut a character of several bytes in two."""
        raw = token.encode("utf-8")
        if len(raw) > 1 and field == "content" and "half_utf8" in self.faults:
            for half in (raw[:1], raw[1:]):
                self.delta(index, **{field: half.decode("utf-8", "surrogateescape")})
        elif len(raw) > 1 and field == "content" and "replacement_chars" in self.faults:
            self.delta(index, **{field: "\ufffd"})
        else:
            self.delta(index, **{field: token})

    def call_deltas(self, index: int, number: int, one: dict[str, Any]) -> None:
        """A tool call in pieces: id and name first, then the arguments bit by bit."""
        arguments = one["function"]["arguments"]
        if "stream_tool_args_cut" in self.faults:
            arguments = arguments[: len(arguments) // 2]
        function = {"name": one["function"]["name"], "arguments": ""}
        head = {"id": one["id"], "type": "function", "index": number, "function": function}
        self.delta(index, tool_calls=[head])
        for i in range(0, len(arguments), 6):
            piece = {"index": number, "function": {"arguments": arguments[i : i + 6]}}
            self.delta(index, tool_calls=[piece])


def main(argv: list[str]) -> int:
    """`vllm` on a test host."""
    if "--version" in argv or "-v" in argv:
        print(VERSION)
        return 0
    if not argv or argv[0] != "serve":
        print("usage: vllm serve MODEL [flags]   (a stand-in for tests)", file=sys.stderr)
        return 2
    engine = StandIn(argv, hard_exit=True)
    faults = engine.faults()
    stopping = threading.Event()

    def terminate(number: int, frame: Any) -> None:
        if "ignores_sigterm" not in engine.faults():
            stopping.set()

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, terminate)
    engine.log("vLLM API server version %s (stand-in)" % VERSION)
    engine.log("non-default args: {'model': '%s', 'port': %d}" % (engine.options["model"], engine.port))
    if "dies_at_start" in faults:
        engine.die("RuntimeError: Engine core initialization failed. See root cause above.")
    if "slow_start" in faults and stopping.wait(float(faults["slow_start"] or 1)):
        return 0
    if "never_ready" in faults:
        while not stopping.wait(5):
            engine.log("Waiting for 1 local, 0 remote core engine proc(s) to start.", "DEBUG")
        return 0
    try:
        engine.start()
    except OSError as error:
        engine.log(
            "[Errno %s] error while attempting to bind on address ('%s', %d): %s"
            % (error.errno, engine.host, engine.port, error.strerror),
            "ERROR",
        )
        return 1
    stopping.wait()
    engine.log("Shutting down")
    engine.stop()
    engine.log("Application shutdown complete.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
