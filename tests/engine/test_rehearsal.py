"""The whole pipeline on the real vLLM: what a newcomer types, and what they get."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

from rehearsals import REPOSITORY, Rehearsal


def evidence() -> dict:
    return json.loads((REPOSITORY / "reports" / "local" / "site.json").read_text("utf-8"))


def no_changes(output: str) -> bool:
    total = next(line for line in output.splitlines() if "Grand total" in line).split()[2:]
    return total[1] == "-" and total[2] == "-"


def test_make_rehearse_ends_with_the_way_on(rehearsal: Rehearsal) -> None:
    last = rehearsal.first.stdout
    assert f"{rehearsal.url}/v1" in last
    assert "rackwright status rehearsal" in last
    assert "rackwright uninstall rehearsal -y" in last
    page = next(line for line in last.splitlines() if line.strip().startswith("report")).split()[1]
    assert Path(page).is_file()


def test_the_printed_curl_line_gives_a_completion(rehearsal: Rehearsal) -> None:
    line = next(line for line in rehearsal.first.stdout.splitlines() if line.strip().startswith("try it"))
    pasted = ["sh", "-c", line.split("try it", 1)[1].strip()]
    done = subprocess.run(pasted, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] > 0


def test_the_evidence_is_whole(rehearsal: Rehearsal) -> None:
    found = evidence()
    assert found["verdict"] == "pass"
    assert {step["status"] for step in found["steps"]} <= {"done", "unchanged"}
    checks = {check["id"]: check["verdict"] for check in found["acceptance"]["checks"]}
    assert "fail" not in checks.values()
    for id in ("models.name", "chat.plain", "chat.stream", "thinking.prompt", "thinking.on", "thinking.off"):
        assert checks[id] == "pass"
    for id in ("tools.forced", "json.schema", "cache.prefix"):
        assert checks[id] == "pass"
    assert len([pin for pin in found["pins"] if pin["sha256"]]) > 140


def test_the_engine_serves_the_recipe_s_model(rehearsal: Rehearsal) -> None:
    with urllib.request.urlopen(f"{rehearsal.url}/v1/models", timeout=30) as answer:
        (model,) = json.load(answer)["data"]
    assert (model["id"], model["root"]) == ("rehearsal", f"{rehearsal.root}/models/rehearsal")


def test_the_second_run_changes_nothing(rehearsal: Rehearsal) -> None:
    again = rehearsal.run("make", "--no-print-directory", "rehearse")
    assert no_changes(again.output)
    assert evidence()["verdict"] == "pass"


def test_plain_pyinfra_does_the_same(rehearsal: Rehearsal) -> None:
    pyinfra = str(REPOSITORY / ".venv" / "bin" / "pyinfra")
    again = rehearsal.run(pyinfra, "-y", "inventories/rehearsal.py", "deploys/site.py")
    assert no_changes(again.output)
    assert f"{rehearsal.url}/v1" in again.stdout


def test_status_and_logs_tell_of_the_real_engine(rehearsal: Rehearsal) -> None:
    assert "ready: a token came out" in rehearsal.rackwright("status").output
    assert "Application startup complete" in rehearsal.rackwright("logs", "-n", "20000").stdout
