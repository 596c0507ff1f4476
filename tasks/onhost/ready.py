"""One look at whether an engine is up: ready means that a token came out, not that /health says 200.

    ready.py < request.json      {"base_url", "model", "key_file", "timeout"}

Prints one JSON document: {"ready": bool, "stage": "down|listening|models|token", "why": str,
"seconds": float}. Exit code 0 whether ready or not; the caller decides. Standard library, Python >= 3.8.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def call(url: str, body: Any, key: str | None, timeout: float) -> Any:
    """One request; the parsed JSON answer."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    # A proxy of the environment must not see what goes to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer)


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Ask for the model list, then for one token."""
    base, model, timeout = request["base_url"], request["model"], float(request.get("timeout", 60))
    key = None
    if request.get("key_file"):
        try:
            key = open(request["key_file"]).read().strip()
        except OSError as error:
            return {"ready": False, "stage": "down", "why": "cannot read the key file: %s" % error}
    stage = "down"
    try:
        names = [item.get("id") for item in call(base + "/v1/models", None, key, min(timeout, 10))["data"]]
        stage = "models"
        if model not in names:
            return {"ready": False, "stage": stage, "why": "serves %s, not %s" % (", ".join(map(str, names)), model)}
        body = {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0}
        answer = call(base + "/v1/chat/completions", body, key, timeout)
        if answer["usage"]["completion_tokens"] < 1:
            return {"ready": False, "stage": stage, "why": "the completion has no token"}
        return {"ready": True, "stage": "token", "why": ""}
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode("utf-8", "replace")
        return {"ready": False, "stage": "listening", "why": "HTTP %d: %s" % (error.code, detail)}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return {"ready": False, "stage": stage, "why": "%s: %s" % (type(error).__name__, error)}


if __name__ == "__main__":
    began = time.monotonic()
    result = look(json.load(sys.stdin))
    result["seconds"] = round(time.monotonic() - began, 3)
    print(json.dumps(result))
