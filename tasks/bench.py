"""The benchmark step: the engine that runs is measured, and the figures come with their protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.checks.gpu import chosen
from tasks.checks.words import plural
from tasks.compare import PROTOCOL, NoBenchmark, newest_first, read_benchmark
from tasks.digest import digest_of
from tasks.facts.gpu import Gpu, GpuFacts
from tasks.launch import LaunchSpec
from tasks.plan import Plan
from tasks.recipe import BenchCase, Expected
from tasks.redact import redact
from tasks.service import refuse_unless_serving
from tasks.steps import Done, StepFailed, job, onhost, python_of

# What people look at first; the record holds all figures.
SHOWN = (
    ("output_tokens_per_second", "tokens/s"),
    ("ttft_p50_ms", "ms to the first token"),
    ("tpot_p50_ms", "ms a token"),
)


class Benchmark:
    """`onhost/bench.py` against the running engine, as a detached job."""

    name = "bench"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def runs(self) -> int:
        """How often every case runs: the site's choice, else the recipe's."""
        return self.plan.settings.bench_runs or self.plan.recipe.bench.runs

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"bench: {plural(len(self.cases()), 'case')}, {plural(self.runs, 'run')} each"

    def cases(self) -> list[dict[str, Any]]:
        """The recipe's cases, then its last one again at each request rate that the site asks for."""
        bench = self.plan.recipe.bench
        rates = [bench.cases[-1].model_copy(update={"rate": rate}) for rate in self.plan.settings.bench_rates]
        return [case_json(case) for case in [*bench.cases, *rates]]

    def digest(self) -> str:
        """The programs, the cases and the engine's flags."""
        return digest_of([self.plan.bundle.digest, self.cases(), self.runs, self.plan.spec().digest])

    def unchanged(self) -> str | None:
        """Whoever asks for a benchmark wants new figures."""
        return None

    def act(self) -> Done:
        """Measure, keep what was found out, and say whether the figures count."""
        plan = self.plan
        plan.look()
        spec = refuse_unless_serving(plan, ask=False)
        runs = len(self.cases()) * self.runs
        # the engine decides how long a run takes; the job's progress reckons from those that are done
        left = "the time left is told after the first of them; " if runs > 1 else ""
        plan.say(f"bench: {plural(runs, 'run')}; {left}Ctrl-C leaves it running")
        outcome = job(
            plan,
            "bench",
            self.digest(),
            (python_of(plan), onhost(plan, "bench.py"), "--stdin"),
            verdict=True,
            anew=True,
            stdin=json.dumps(self._request(spec)),
            env=client_env(plan, spec),
        )
        bench = document(plan, spec, outcome.result)
        bench["beside"] = beside(bench, plan.record.page.parent)
        plan.record.note(bench=bench)
        file = write_file_of(bench, plan.record.page.parent)
        for row in bench["cases"]:
            plan.say("    " + line_of(row, bench["runs"]))
            for note in dict.fromkeys(note for run in row["runs"] for note in run["notes"]):
                plan.say("      " + note)
        for row in bench["expected"]:
            plan.say("    " + expected_line(row))
        plan.say(f"    figures: {file}")
        if bench["verdict"] != "pass":
            raise StepFailed(
                "not every run counts\nFix: see each run's reason in the report; then run the bench again",
                [reason for row in bench["cases"] for reason in reasons_of(row)],
            )
        return Done(detail={"mode": spec.mode, "file": file.name, "cases": summary(bench)})

    def _request(self, spec: LaunchSpec) -> dict[str, Any]:
        """What `onhost/bench.py` reads."""
        plan = self.plan
        flags = plan.recipe.flags(spec.mode, plan.route)
        mode = flags.get("tokenizer-mode")
        used = [gpu.index for gpu in chosen(plan.needs, plan.facts.gpu)]
        return {
            "base_url": spec.base_url,
            "model": spec.model_name,
            "api_key_file": spec.key_file,
            "tokenizer": plan.model_dir,
            "tokenizer_mode": str(mode) if mode else None,
            "trust_remote_code": bool(flags.get("trust-remote-code")),
            "vllm": f"{plan.layout.env}/bin/vllm" if plan.state.has("engine") else None,
            "cases": self.cases(),
            "runs": self.runs,
            "seed": plan.recipe.bench.seed,
            "gpus": (used or None) if plan.recipe.hardware.count else [],
            "log_script": plan.supervisor.logs(spec.name, spec.log, 4000, False),
            "folder": plan.layout.tmp,
        }


def case_json(case: BenchCase) -> dict[str, Any]:
    """A case as `onhost/bench.py` takes it: what is not set is left out."""
    return case.model_dump(exclude_none=True)


def client_env(plan: Plan, spec: LaunchSpec) -> tuple[tuple[str, str], ...]:
    """The client's environment: no network, and caches of its own (the engine's belong to its user)."""
    caches = f"{plan.layout.root}/cache/bench"
    path = dict(spec.env).get("PATH", "")
    env = {
        "HOME": caches,
        "XDG_CACHE_HOME": f"{caches}/xdg",
        "VLLM_CACHE_ROOT": f"{caches}/vllm",
        "TMPDIR": plan.layout.tmp,
        "PATH": path,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost,::1",
    }
    return tuple(sorted(env.items()))


def document(plan: Plan, spec: LaunchSpec, result: dict[str, Any]) -> dict[str, Any]:
    """The benchmark's record: what was measured, and everything that the figures depend on."""
    return {
        "schema": 1,
        **result,
        "host": plan.name,
        "model": spec.model_name,
        "mode": spec.mode,
        "recipe": {"name": plan.recipe.name, "digest": plan.recipe.digest},
        "engine": {"route": plan.route, "label": plan.engine_label, "argv": list(spec.argv)},
        "weights": _digest_of(plan, "weights"),
        "supervisor": plan.supervisor.name,
        "facts": plan.facts_shown(),
        "gpus": gpus_of(plan.facts.gpu, chosen(plan.needs, plan.facts.gpu)),
        "expected": expected_rows(plan.recipe.bench.expected, spec.mode, result.get("cases") or []),
    }


def gpus_of(facts: GpuFacts, used: Sequence[Gpu] | None = None) -> dict[str, Any] | None:
    """What the figures depend on: driver, names, power limits (watts) and links; None without GPUs."""
    used = facts.gpus if used is None else used
    if not used:
        return None
    return {
        "driver": facts.driver,
        "cuda": facts.cuda,
        "names": [gpu.name for gpu in used],
        "power_limits": [gpu.power_limit for gpu in used],
        "links": [f"gen{gpu.link_gen_max} x{gpu.link_width}" for gpu in used],
    }


def beside(bench: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The newest benchmark of every other mode of the same recipe on this host, without its single runs.

    Only one that passes stands beside another, and only its cases with the same protocol.
    """
    cases = {case["name"]: case for case in bench["cases"]}
    found: dict[str, dict[str, Any]] = {}
    for path in newest_first(folder):
        try:
            other = read_benchmark(path)
        except NoBenchmark:
            continue
        mode = str(other.get("mode"))
        same = (other.get("recipe") or {}).get("name") == bench["recipe"]["name"]
        if mode == bench["mode"] or mode in found or not same or other.get("verdict") != "pass":
            continue
        rows = [
            {key: row.get(key) for key in ("name", *PROTOCOL, "counted", "median", "spread")}
            for row in other["cases"]
            if row["name"] in cases and all(row.get(key) == cases[row["name"]].get(key) for key in PROTOCOL)
        ]
        if rows:
            kept = {key: other.get(key) for key in ("mode", "started", "verdict", "engine_version")}
            found[mode] = {**kept, "file": path.name, "cases": rows}
    return [found[mode] for mode in sorted(found)]


def _digest_of(plan: Plan, step: str) -> str | None:
    receipt = plan.receipt(step)
    return str(receipt.detail.get("digest")) if receipt and receipt.detail.get("digest") else None


def expected_rows(expected: list[Expected], mode: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recipe's expected figures of this mode beside the measured ones; `ratio` is measured / expected."""
    rows = []
    for item in expected:
        if item.mode not in (None, mode):
            continue
        found = next((case for case in cases if case.get("name") == item.case), None)
        measured = (found.get("median") or {}).get(item.metric) if found else None
        ratio = round(measured / item.value, 3) if measured is not None else None
        rows.append({**item.model_dump(exclude={"mode"}), "measured": measured, "ratio": ratio})
    return rows


def write_file_of(bench: dict[str, Any], folder: Path) -> Path:
    """`bench-<time>.json` in the host's reports, redacted; never over an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.strptime(bench["started"], "%Y-%m-%dT%H:%M:%SZ"))
    path, number = folder / f"bench-{stamp}.json", 1
    while path.exists():
        number += 1
        path = folder / f"bench-{stamp}-{number}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(redact(bench), ensure_ascii=False, indent=1) + "\n", "utf-8")
    part.replace(path)
    return path


def line_of(row: dict[str, Any], runs: int) -> str:
    """One case for the person at the terminal: medians with their spread."""
    parts = [
        f"{row['median'][name]:.4g} {unit} ({row['spread'][name][0]:.4g} to {row['spread'][name][1]:.4g})"
        for name, unit in SHOWN
        if name in row["median"]
    ]
    note = "" if row["counted"] >= runs else f" [{row['counted']} of {runs} runs count]"
    return f"{row['name']}: {', '.join(parts) or 'no figures'}{note}"


def expected_line(row: dict[str, Any]) -> str:
    """One expected figure beside the measured one."""
    measured = (
        "not measured" if row["measured"] is None else f"{row['measured']:.4g}, {row['ratio']:.2f} times"
    )
    return f"{row['case']}: {row['metric']} {measured}; expected {row['value']:g} ({row['source']})"


def reasons_of(row: dict[str, Any]) -> list[str]:
    """Why runs of a case do not count."""
    return [f"{row['name']}: {why}" for run in row["runs"] if not run["valid"] for why in run["why"]]


def summary(bench: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The medians that people look at, by case: for the receipt."""
    return {
        row["name"]: {name: row["median"][name] for name, _ in SHOWN if name in row["median"]}
        for row in bench["cases"]
    }
