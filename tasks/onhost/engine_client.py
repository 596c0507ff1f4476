"""Requests to an OpenAI-compatible engine, timed; shared by the warm-up and the short benchmark.

Standard library, Python >= 3.8. No proxy of the environment is used: the engine is on this host.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any, Callable, NamedTuple
from urllib.parse import urlsplit

# One token each in the tokenizers of large models; a small one takes several, so lengths are calibrated.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country"
    " problem hand part place case week company system program question work government number night point"
).split()
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "enum": ["Beijing"]}},
            "required": ["location"],
        },
    },
}


class Answer(NamedTuple):
    """One request: seconds from sending to the first token and to the end, tokens that came, and why not."""

    ok: bool
    first: float
    total: float
    tokens: int
    why: str


class Client:
    """One engine under test. Threads may share it: every request has a connection of its own."""

    def __init__(self, base_url: str, model: str, key_file: str | None) -> None:
        parts = urlsplit(base_url)
        self.host, self.port, self.model = parts.hostname or "127.0.0.1", parts.port or 80, model
        self.headers = {"Content-Type": "application/json"}
        if key_file:
            with open(key_file, encoding="utf-8") as file:
                self.headers["Authorization"] = "Bearer " + file.read().strip()

    def ask(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, str]:
        """Status and text of a whole answer. Raises OSError or http.client.HTTPException."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self.headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def stream(self, body: Any, timeout: float) -> Answer:
        """A streamed chat completion, `timeout` seconds at most. Never raises for what the engine does."""
        began = time.monotonic()
        first, tokens, done = 0.0, 0, False
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self.headers)
            answer = connection.getresponse()
            if answer.status != 200:
                why = "HTTP %d: %s" % (answer.status, answer.read(300).decode("utf-8", "replace"))
                return Answer(False, 0, time.monotonic() - began, 0, why)
            for raw in answer:
                if time.monotonic() - began > timeout:
                    return Answer(
                        False, first, time.monotonic() - began, tokens, "no end within %d s" % timeout
                    )
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    done = True
                    break
                event = json.loads(data)
                if "error" in event:
                    return Answer(False, first, time.monotonic() - began, tokens, str(event["error"])[:300])
                if event.get("choices") and not first and _says(event["choices"][0].get("delta") or {}):
                    first = time.monotonic() - began
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            return Answer(
                False, first, time.monotonic() - began, tokens, "%s: %s" % (type(error).__name__, error)
            )
        finally:
            connection.close()
        total = time.monotonic() - began
        if not done or tokens < 1:
            return Answer(
                False, first, total, tokens, "the stream ended early" if not done else "no token came"
            )
        return Answer(True, first or total, total, tokens, "")

    def per_word(self) -> float:
        """Tokens that one word takes, asked of the engine; 1.0 where it does not say."""
        try:
            status, text = self.ask("POST", "/tokenize", {"model": self.model, "prompt": words(0, 200)}, 30)
            return max(1.0, json.loads(text)["count"] / 200) if status == 200 else 1.0
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return 1.0

    def context(self) -> int | None:
        """The context length in tokens, where the engine says it."""
        try:
            _, text = self.ask("GET", "/v1/models", None, 30)
            return int(json.loads(text)["data"][0]["max_model_len"])
        except (OSError, ValueError, KeyError, TypeError, IndexError, http.client.HTTPException):
            return None


def send_all(
    client: Client, bodies: list[Any], concurrency: int, timeout: float, check: Callable[[], None]
) -> list[Answer]:
    """Send requests, so many at a time. `check` is called meanwhile; what it raises ends the waiting."""
    answers: dict[int, Answer] = {}
    faults: list[Exception] = []
    left, turn, over = iter(enumerate(bodies)), threading.Lock(), threading.Event()

    def work() -> None:
        while not over.is_set():
            with turn:
                place, body = next(left, (-1, None))
            if place < 0:
                return
            try:
                answers[place] = client.stream(body, timeout)
            except Exception as error:
                faults.append(error)
                return

    # daemons: a program that ends does not wait for a request that hangs
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(bodies)))]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            check()
            time.sleep(0.02)
    finally:
        over.set()
    if faults:
        raise faults[0]
    return [answers[place] for place in range(len(bodies))]


def _says(delta: dict[str, Any]) -> bool:
    return bool(
        delta.get("content")
        or delta.get("reasoning")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )


def words(seed: int, count: int) -> str:
    """So many words, other ones first for every seed, so that no prefix cache knows them."""
    picked = [WORDS[(seed * 7 + i * (1 + seed % 5)) % len(WORDS)] for i in range(count)]
    return "%d %s" % (seed, " ".join(picked))


def body_of(form: str, prompt: str, tokens: int) -> dict[str, Any]:
    """A request of one form. The switch for thinking is sent in both spellings (vllm issue 41241)."""
    thinking = form == "reasoning"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": thinking},
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    if form == "tool":
        body.update(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    return body
