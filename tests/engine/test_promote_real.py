"""Promotion with the real vLLM: compilation, prefix caching and n-grams earn their place, or do not."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rehearsals import REPOSITORY, Rehearsal

RECIPE = REPOSITORY / "inventories" / "recipes" / "rehearsal-cpu.toml"


def evidence(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPOSITORY / "reports" / "local" / f"{verb}.json").read_text("utf-8"))
    return found


def serving_mode(rehearsal: Rehearsal) -> str:
    port = rehearsal.url.rsplit(":", 1)[1]
    lines = subprocess.run(
        ["pgrep", "-fa", f"vllm serve.*--port {port}"], capture_output=True, text=True
    ).stdout
    return "" if not lines else "eager" if "--enforce-eager" in lines else "optimized"


def complete(url: str) -> str:
    body = {
        "model": "rehearsal",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.fixture
def eager(rehearsal: Rehearsal) -> Iterator[Rehearsal]:
    """Eager serves, before and after."""
    rehearsal.rackwright("rollback", "-y")
    yield rehearsal
    rehearsal.rackwright("rollback", "-y")
    rehearsal.rackwright("site", "-y")


def test_optimized_earns_its_place_and_its_second_start_is_faster_than_its_first(eager: Rehearsal) -> None:
    said = complete(eager.url)
    cold = not (eager.root / "run" / "starts" / "rackwright-rehearsal-optimized.json").exists()
    wrong: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.5):
            try:
                answer = complete(eager.url)
            except (urllib.error.URLError, OSError):
                continue  # nobody serves between two modes
            if answer != said:
                wrong.append(answer)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    try:
        eager.rackwright("promote", "-y")
    finally:
        over.set()
        client.join(60)
    found = evidence("promote")["promotion"]
    assert found["verdict"] == "promoted"
    assert serving_mode(eager) == "optimized"
    assert wrong == []
    for column in ("safe", "candidate"):
        assert all(row["tokens_per_second"] > 0 and not row["failed"] for row in found[column]["bench"])
    assert {check["verdict"] for check in found["candidate"]["acceptance"]["checks"]} <= {"pass", "skipped"}
    first, second = (dict(found["candidate"][start]["phases"]) for start in ("trial", "start"))
    phases = list(first)
    assert phases.index("loading weights") < phases.index("making the KV cache") < phases.index("ready")
    # the compiled graph is kept: the second start of the same mode does not compile it again
    assert not cold or second["compiling"] < first["compiling"]
    assert "optimized" in eager.rackwright("status").output


def recipe_with_method(folder: Path, method: str) -> Path:
    """The rehearsal's recipe with another way of speculative decoding."""
    text = RECIPE.read_text("utf-8").replace("manifests/", f"{RECIPE.parent}/manifests/")
    text = text.replace("locks/", f"{RECIPE.parent}/locks/")
    recipe = folder / "rehearsal-cpu.toml"
    recipe.write_text(text.replace('method = "ngram"', f'method = "{method}"'))
    return recipe


def test_a_method_that_is_known_not_to_fit_is_refused_before_anything_is_stopped(
    eager: Rehearsal, tmp_path: Path
) -> None:
    before = serving_mode(eager)
    recipe = recipe_with_method(tmp_path, "mtp")
    output = eager.rackwright("promote", "-y", "--data", f"recipe={recipe}", rc=1).output
    assert "this checkpoint has no weights for mtp" in output
    assert serving_mode(eager) == before
    assert complete(eager.url)


def test_a_method_that_the_checkpoint_cannot_do_is_recognised_and_eager_is_back(
    eager: Rehearsal, tmp_path: Path
) -> None:
    # the engine's older name of mtp, of which preflight knows nothing
    recipe = recipe_with_method(tmp_path, "deepseek_mtp")
    output = eager.rackwright("promote", "-y", "--data", f"recipe={recipe}", rc=1).output
    found = evidence("promote")["promotion"]
    assert found["verdict"] == "rolled-back"
    assert "the speculative method does not fit the checkpoint" in output
    assert "eager serves again" in output
    assert serving_mode(eager) == "eager"
    assert complete(eager.url)
