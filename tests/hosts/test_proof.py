"""Benchmark and support archive over SSH, on a host without systemd, with the stand-in engine."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator

import pytest
from machines import Machine
from sites import Site

ROOT = "/opt/rackwright"
BENCH = """
[bench]
runs = 2
cases = [{ input = 32, output = 4, concurrency = 2, prompts = 6 }]
[[bench.expected]]
case = "32/4 x2"
metric = "output_tokens_per_second"
value = 1000.0
source = "made up for this test"
"""


@pytest.fixture(scope="module")
def served(hosts_can_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Site]]:
    """A host that serves, with a recipe that says what to measure."""
    host = Machine("container", "gpu1")
    try:
        host.start()
        site = Site(tmp_path_factory.mktemp("proof"), [host])
        site.prepare(host)
        recipe = site.folder / "standin.toml"
        recipe.write_text(recipe.read_text() + BENCH)
        site.run("site", "-y")
        yield host, site
    finally:
        host.stop()


def test_a_dry_run_measures_nothing(served: tuple[Machine, Site]) -> None:
    _, site = served
    assert "bench: 1 case, 2 runs each" in site.run("bench", "--dry")
    assert not list((site.folder / "reports").rglob("bench*"))


def test_bench_measures_with_the_key_and_leaves_figures(served: tuple[Machine, Site]) -> None:
    host, site = served
    output = site.run("bench")
    bench = site.report(host.name, "bench")["bench"]
    assert (bench["verdict"], bench["client"]) == ("pass", "rackwright")
    assert bench["why_client"].startswith("the engine's command has no benchmark")
    row = bench["cases"][0]
    assert (row["counted"], row["median"]["requests"]) == (2, 6)
    assert bench["expected"][0]["ratio"] == pytest.approx(
        row["median"]["output_tokens_per_second"] / 1000, abs=0.001
    )
    assert "tokens/s" in output and "expected 1000 (made up for this test)" in output
    files = sorted((site.folder / "reports" / host.name).glob("bench-*.json"))
    assert json.loads(files[-1].read_text("utf-8"))["started"] == bench["started"]
    page = (site.folder / "reports" / host.name / "index.html").read_text("utf-8")
    assert f'<data value="{row["median"]["output_tokens_per_second"]}">' in page, "the page of site shows it"
    assert 'class="chart"' in page


def test_the_gate_passes_on_the_host_and_reads_the_engines_log(served: tuple[Machine, Site]) -> None:
    host, site = served
    site.run("accept", "--data", "profile=standard")
    accepted = site.report(host.name, "accept")["acceptance"]
    checks = {check["id"]: check["verdict"] for check in accepted["checks"]}
    assert (accepted["verdict"], accepted["profile"]) == ("pass", "standard")
    assert {id for id, verdict in checks.items() if verdict == "skipped"} <= {
        "spec.decode",
        "engine.kv_transfers",
    }
    assert checks["engine.compile"] == checks["guard.identity"] == checks["auth.key"] == "pass"


def test_kernels_compiled_while_requests_wait_fail_the_gate(served: tuple[Machine, Site]) -> None:
    host, site = served
    site.faults(host, "compiles_late")
    try:
        output = site.run("accept", "--data", "profile=standard", rc=1)
    finally:
        site.faults(host)
    assert "engine.compile" in output and "compiled while requests waited" in output


def test_figures_that_do_not_count_fail_the_verb_and_say_why(served: tuple[Machine, Site]) -> None:
    host, site = served
    site.faults(host, "fails_every=5")
    try:
        output = site.run("bench", rc=1)
    finally:
        site.faults(host)
    assert "requests failed: status 503: The engine is overloaded." in output
    report = site.report(host.name, "bench")
    assert (report["verdict"], report["bench"]["verdict"]) == ("fail", "fail")


def test_bench_of_a_stopped_engine_says_how_to_start_it(served: tuple[Machine, Site]) -> None:
    _, site = served
    site.run("stop", "-y")
    try:
        assert f"rackwright start {site.inventory}" in site.run("bench", rc=1)
    finally:
        site.run("start", "-y")


def test_the_archive_tells_of_the_host_and_gives_no_key_away(served: tuple[Machine, Site]) -> None:
    host, site = served
    key = host.run(f"cat {ROOT}/run/api-key").stdout.strip()
    host.run(f"echo 'key {key}' >>{ROOT}/jobs/bench/log")
    page = (site.folder / "reports" / host.name / "index.html").read_bytes()
    site.run("support", "--dry")
    assert not list((site.folder / "reports").rglob("support-*"))
    site.run("support")
    (archive,) = (site.folder / "reports" / host.name).glob("support-*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {member.name.split("/", 1)[1]: tar.extractfile(member) for member in tar.getmembers()}
        texts = {name: file.read().decode() for name, file in files.items() if file}
    assert {"receipts/engine.json", "report/bench.json", "host.json", "packages.txt"} <= set(texts)
    assert any(name.startswith("logs/") and "startup complete" in text for name, text in texts.items())
    assert "key [redacted]" in texts["jobs/bench.log"]
    assert not any(key in text for text in texts.values())
    assert (site.folder / "reports" / host.name / "index.html").read_bytes() == page
