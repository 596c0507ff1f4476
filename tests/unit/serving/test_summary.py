"""The command that a run ends with: it works when pasted, and no process has the key among its words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.redact import redact
from tasks.summary import curl_line

CURL = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >"$0.argv"
case " $* " in *" @- "*) cat >"$0.stdin" ;; esac
"""


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize("keyed", [True, False])
def test_the_line_asks_for_a_token_and_the_key_is_in_no_argv(tmp_path: Path, shell: str, keyed: bool) -> None:
    key, curl = tmp_path / "key", tmp_path / "curl"
    key.write_text("s3cret-Of-Ours\n")
    curl.write_text(CURL)
    curl.chmod(0o755)
    spec = SimpleNamespace(
        key_file=str(key) if keyed else None, base_url="http://127.0.0.1:8000", model_name="m"
    )
    plan: Any = SimpleNamespace(spec=lambda: spec)
    line = curl_line(plan)
    assert redact(line) == line, "it works when pasted from a report too"
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([shell, "-c", line], check=True, env={"PATH": path}, stdin=subprocess.DEVNULL)
    words = (tmp_path / "curl.argv").read_text().splitlines()
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "m"
    assert "s3cret-Of-Ours" not in (tmp_path / "curl.argv").read_text()
    sent = (tmp_path / "curl.stdin").read_text() if keyed else ""
    assert sent == ("Authorization: Bearer s3cret-Of-Ours" if keyed else "")
