"""Topology and benchmarks are drawn as they were read and measured."""

from __future__ import annotations

import copy
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from report_pages import Node, parse, sample

from tasks import report_charts
from tasks.facts.links import parse_matrix
from tasks.report import render_host, write_index, write_report
from tasks.report_bench import COLUMNS, PERCENTILES, bench_of, promotion_charts
from tasks.report_charts import Bar, bars, lines, thinned
from tasks.report_topology import Box, Drawing, drawing_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
PUBLIC = FIXTURES / "public"


def topology(path: Path, *, numa: bool = True) -> dict[str, Any]:
    """A recorded matrix as the evidence holds it (some recordings have the P2P matrices after it)."""
    matrix = parse_matrix(path.read_text("utf-8").split("Legend:")[0])
    assert matrix
    links = {f"GPU {a} to {b}": kind for (a, b), kind in sorted(matrix.between.items()) if a < b}
    nodes = {f"GPU {gpu}": node for gpu, node in sorted(matrix.numa.items())}
    return {"links": links, **({"numa": nodes} if numa else {})}


def drawn(path: Path, *, numa: bool = True) -> Drawing:
    found = drawing_of(topology(path, numa=numa))
    assert found
    return found


def boxes(drawing: Drawing, kind: str) -> list[Box]:
    return [box for box in drawing.boxes if box.kind == kind]


# --- topology --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "gpus", "nvlink", "switches", "sockets"),
    [
        (FIXTURES / "h200x2" / "topo.txt", 2, "all", 0, ["0"]),
        (PUBLIC / "A-rtx-pro-6000" / "topo-2x-phb.txt", 2, "none", 0, ["0"]),
        (PUBLIC / "A-rtx-pro-6000" / "topo-4x-node-sys.txt", 4, "none", 0, ["0", "1"]),
        (PUBLIC / "A-rtx-pro-6000" / "topo-4x-sys-only.txt", 4, "none", 0, ["0", "1", "2", "3"]),
        (PUBLIC / "A-rtx-pro-6000" / "topo-8x-server-pcie-switch.txt", 8, "none", 4, ["0", "1"]),
        (PUBLIC / "B-h20" / "topo-8x-h20-nv18-nic.txt", 8, "all", 0, ["0", "1"]),
        (PUBLIC / "B-h20" / "topo-8x-h20-no-nvlink.txt", 8, "none", 0, ["0", "1"]),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_recorded_matrices_are_drawn_with_their_sockets_switches_and_nvlinks(
    path: Path, gpus: int, nvlink: str, switches: int, sockets: list[str]
) -> None:
    found = drawn(path)
    assert len(boxes(found, "gpu")) == len(found.gpus) == gpus
    assert found.nvlink == nvlink
    assert len([line for line in found.lines if line.kind == "nvlink"]) == (gpus if nvlink == "all" else 0)
    assert [box.text for box in boxes(found, "nvlink")] == (["NV18"] if nvlink == "all" else [])
    assert len(boxes(found, "switch")) == switches
    assert [box.text for box in boxes(found, "socket")] == sockets
    assert len([line for line in found.lines if line.kind == "sys"]) == len(sockets) - 1


@pytest.mark.parametrize("path", sorted(PUBLIC.glob("*/topo-*.txt")), ids=lambda path: path.stem)
@pytest.mark.parametrize("numa", [True, False])
def test_nothing_of_a_drawing_lies_on_another_or_beside_the_paper(path: Path, numa: bool) -> None:
    found = drawn(path, numa=numa)
    for box in found.boxes:
        assert box.x >= 0 and box.y >= 0
        assert box.x + box.width <= found.width and box.y + box.height <= found.height
    for place, one in enumerate(found.boxes):
        for other in found.boxes[place + 1 :]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            apart_y = one.y + one.height <= other.y or other.y + other.height <= one.y
            assert apart_x or apart_y, (one, other)


def test_every_gpu_stands_over_its_own_socket() -> None:
    found = drawn(PUBLIC / "A-rtx-pro-6000" / "topo-8x-server-pcie-switch.txt")
    first, second = boxes(found, "socket")
    for box in boxes(found, "gpu"):
        home = first if int(box.text.split()[1]) < 4 else second
        assert home.x <= box.x and box.x + box.width <= home.x + home.width


def test_without_numa_nodes_sockets_are_told_by_what_crosses_them() -> None:
    found = drawn(PUBLIC / "A-rtx-pro-6000" / "topo-4x-node-sys.txt", numa=False)
    assert [box.text for box in boxes(found, "socket")] == ["", ""]


def test_nvlink_bridges_between_pairs_are_arcs_and_the_rest_is_pcie() -> None:
    kinds = {"GPU 0 to 1": "NV4", "GPU 2 to 3": "NV4"} | {
        f"GPU {a} to {b}": "SYS" for a, b in ((0, 2), (0, 3), (1, 2), (1, 3))
    }
    found = drawing_of({"links": kinds})
    assert found and found.nvlink == "some"
    assert [line.text for line in found.lines if line.kind == "nvlink"] == [
        "GPU 0, GPU 1: NV4",
        "GPU 2, GPU 3: NV4",
    ]
    assert len(boxes(found, "socket")) == 2


def test_gpus_that_share_a_switch_stand_side_by_side_whatever_their_numbers() -> None:
    links = {"GPU 0 to 2": "PIX", "GPU 1 to 3": "PIX"} | {
        f"GPU {a} to {b}": "NODE" for a, b in ((0, 1), (0, 3), (1, 2), (2, 3))
    }
    found = drawing_of({"links": links})
    assert found and found.gpus == [0, 2, 1, 3]
    assert len(boxes(found, "switch")) == 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "x",
        {},
        {"links": None},
        {"links": {"GPU 0 to 0": "X"}},
        {"links": {"a": 1, "GPU 0 to 1": 5}},
    ],
)
def test_what_is_no_topology_is_not_drawn(value: Any) -> None:
    assert drawing_of(value) is None


def test_the_page_says_the_matrix_in_words_too() -> None:
    tree = whole()
    rows = tree.one("table", cls="matrix").one("tbody").all("tr")
    assert [row.words() for row in rows][1] == "GPU 1NODE·SYSSYS"
    name = tree.one("title", id="topology-name").words()
    assert name.startswith("GPU 0 - GPU 1: NODE. GPU 0 - GPU 2: SYS.")
    assert "4 GPUs over PCIe, no NVLink" in tree.one("section", id="topology").words()


# --- charts ----------------------------------------------------------------------------------------------


@cache
def whole() -> Node:
    """The page of the example, drawn once; nobody changes it."""
    return parse(render_host(sample("gpu-bench")))


def figure(tree: Node, name: str) -> Node:
    """The chart with this heading."""
    return next(node for node in tree.all("figure") if node.all("b") and node.all("b")[0].words() == name)


def told(chart: Node) -> dict[tuple[str, str], float]:
    """What the bars of a chart say: series and case, and their value."""
    found = {}
    for title in chart.all("title"):
        match = re.fullmatch(r"(.+?) · (.+): (\S+)(?: \S+)?", title.words())
        assert match, title.words()
        found[match.group(1), match.group(2)] = json.loads(match.group(3))
    return found


def test_percentiles_of_every_case_are_bars_with_exactly_the_figures_of_the_json() -> None:
    evidence, tree = sample("gpu-bench"), whole()
    headings = {
        "ttft": "Time to first token (TTFT)",
        "tpot": "Time per output token (TPOT)",
        "itl": "Inter-token latency (ITL)",
        "e2el": "End-to-end latency (E2EL)",
    }
    for stem, heading in headings.items():
        assert told(figure(tree, heading)) == {
            (share, case["name"]): case["median"][f"{stem}_{share}_ms"]
            for case in evidence["bench"]["cases"]
            for share in PERCENTILES
        }


def test_modes_stand_beside_each_other_in_charts_and_table() -> None:
    evidence, tree = sample("gpu-bench"), whole()
    both = [evidence["bench"], *evidence["bench"]["beside"]]
    for heading, name in (
        ("Output tokens per second", "output_tokens_per_second"),
        ("First token, p50, by mode", "ttft_p50_ms"),
        ("Time per token, p50, by mode", "tpot_p50_ms"),
    ):
        assert told(figure(tree, heading)) == {
            (one["mode"], case["name"]): case["median"][name] for one in both for case in one["cases"]
        }
    rows = tree.one("section", id="bench").all("table", cls="figures")[0].one("tbody").all("tr")
    shown = [[json.loads(node.attrs["value"] or "") for node in row.all("data")] for row in rows]
    order = [(case["name"], one) for case in evidence["bench"]["cases"] for one in both]
    assert shown == [
        [next(case for case in one["cases"] if case["name"] == name)["median"][key] for key, _ in COLUMNS]
        for name, one in order
    ]


def test_whiskers_are_there_where_runs_differ() -> None:
    differ = bars(["a"], {"x": [Bar(10, 9, 12)]}, "ms")
    same = bars(["a"], {"x": [Bar(10, 10, 10)]}, "ms")
    assert 'class="ci"' in differ and 'class="ci"' not in same


def test_curves_of_gpus_and_engine_have_their_peaks_from_the_samples() -> None:
    evidence, tree = sample("gpu-bench"), whole()
    samples = [one for case in evidence["bench"]["cases"] for run in case["runs"] for one in run["samples"]]
    for heading, field, factor in (
        ("GPU memory", "memory_mib", 1 / 1024),
        ("GPU power", "power_w", 1),
        ("GPU use", "use_percent", 1),
        ("GPU clock", "clock_mhz", 1),
    ):
        chart = figure(tree, heading)
        peaks = [json.loads(node.attrs["value"] or "") for node in chart.all("data")]
        assert peaks == [
            round(max(row[field] for one in samples for row in one["gpus"] if row["gpu"] == gpu) * factor, 3)
            for gpu in range(4)
        ]
        assert len(chart.one("svg", cls="chart").all("g", cls="series")) >= 4
    assert figure(tree, "KV cache use") and figure(tree, "Requests in the engine")


def test_a_host_without_gpus_has_no_empty_charts() -> None:
    evidence = sample("gpu-bench")
    for case in evidence["bench"]["cases"]:
        for run in case["runs"]:
            for one in run["samples"]:
                one["gpus"] = []
    names = [chart.name for chart in bench_of(evidence["bench"]).charts]  # type: ignore[union-attr]
    assert "ttft" in names and "queue" in names
    assert not {"memory", "power", "use", "clock"} & set(names)


def test_expected_figures_stand_beside_the_measured_ones() -> None:
    evidence = sample("gpu-bench")
    row = whole().one("table", cls="expected").one("tbody").one("tr")
    (wanted,) = evidence["bench"]["expected"]
    assert [json.loads(node.attrs["value"] or "") for node in row.all("data")] == [
        wanted["value"],
        wanted["measured"],
        wanted["ratio"],
    ]
    assert wanted["source"] in row.words()


def test_a_run_that_does_not_count_says_why() -> None:
    evidence = sample("gpu-bench")
    run = evidence["bench"]["cases"][1]["runs"][0]
    run.update(valid=False, why=["3 of 64 requests failed: status 503"])
    evidence["bench"].update(verdict="fail", why="not every run counts")
    section = parse(render_host(evidence)).one("section", id="bench")
    assert "3 of 64 requests failed: status 503" in section.one("ol", cls="cases").words()
    assert "not every run counts" in section.one("p", cls="why").words()


def test_a_promotion_is_drawn_by_concurrency() -> None:
    rows = {"safe": [50.0, 300.5], "candidate": [80.25, 410.0]}
    result = {
        key: {
            "mode": mode,
            "bench": [
                {"concurrency": c, "tokens_per_second": v, "ttft": 0.25}
                for c, v in zip((1, 8), rows[key], strict=True)
            ],
        }
        for key, mode in (("safe", "eager"), ("candidate", "optimized"))
    }
    tree = parse(render_host({"promotion": {"verdict": "promoted", **result}}))
    assert told(figure(tree, "Tokens per second, by concurrency")) == {
        ("eager", "C=1"): 50.0,
        ("eager", "C=8"): 300.5,
        ("optimized", "C=1"): 80.25,
        ("optimized", "C=8"): 410.0,
    }
    table = tree.one("table", cls="modes")
    assert table.one("thead").words() == "eageroptimized"
    assert ["tokens/s at 8", "300.5", "410.0"] in [
        [
            row.one("th").words(),
            *(
                cell.words().split()[-1].removeprefix(mode)
                for cell, mode in zip(row.all("td"), ("eager", "optimized"), strict=True)
            ),
        ]
        for row in table.one("tbody").all("tr")
    ]
    alone = {"safe": result["safe"], "candidate": {"mode": "optimized"}}
    assert promotion_charts(alone) == [], "nothing stands beside it"
    assert promotion_charts({"safe": {"bench": [{"concurrency": "x"}]}, "candidate": 5}) == []


def test_modes_with_long_names_that_begin_alike_are_two_series() -> None:
    def column(number: int) -> dict[str, Any]:
        rows = [{"concurrency": 1, "tokens_per_second": 10 * number, "ttft": 1}]
        return {"mode": f"optimized-with-a-rather-long-name-{number}", "bench": rows}

    charts = promotion_charts({"safe": column(1), "candidate": column(2)})
    assert [chart.name for chart in charts] == ["promoted_tokens", "promoted_ttft"]
    names = [key.name for key in charts[0].keys]
    assert names == ["optimized-with-a-rather-long", "optimized-with-a-rather-long 2"]


def test_a_check_that_failed_is_never_left_out_of_the_first_screen() -> None:
    evidence = sample("gpu-bench")
    last = evidence["acceptance"]["checks"][-1]
    last["verdict"] = "fail"
    chips = parse(render_host(evidence)).one("ul", cls="chips").all("a", cls="chip")
    assert last["id"] in chips[0].words() and "bad" in (chips[0].attrs["class"] or "")


def test_charts_carry_no_style_script_id_or_address_of_their_own() -> None:
    svg = bars(["a", "b"], {"x": [Bar(1), None]}, "ms") + lines({"y": [(0, 1), (5, 2), (9, None)]})
    assert not re.search(r"<(?:style|script|defs|desc)|style=|\bid=|https?:|<!--|on\w+=", svg)


def test_names_in_a_chart_stay_texts() -> None:
    hostile = "</svg><script>x()</script>{0}\x00"
    evidence = {"cases": [{"name": hostile, "median": {"ttft_p50_ms": 5}}], "mode": hostile}
    svg = "".join(chart.svg for chart in bench_of(evidence).charts)  # type: ignore[union-attr]
    assert "<script" not in svg and svg.count("</svg>") == svg.count("<svg")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "5", None, [1], 10**400])
def test_what_cannot_be_drawn_is_left_out(value: Any) -> None:
    doc = {"cases": [{"name": "c", "median": {"ttft_p50_ms": value, "tpot_p50_ms": 4}}]}
    found = bench_of(doc)
    assert found and [chart.name for chart in found.charts] == ["tpot"]


@pytest.mark.parametrize("value", [None, [], {}, {"cases": None}, {"cases": [1, None, {}]}, "x"])
def test_what_is_no_benchmark_makes_no_section(value: Any) -> None:
    assert bench_of(value) is None


def test_long_curves_are_thinned_to_their_peaks_and_keep_their_gaps() -> None:
    points: list[tuple[float, float | None]] = [(float(n), 100.0 if n == 777 else 1.0) for n in range(2000)]
    points[1000] = (1000.0, None)
    kept = thinned(points)
    assert len(kept) <= report_charts.MOST_POINTS + 2
    assert (777.0, 100.0) in kept and (1000.0, None) in kept


def test_a_benchmark_of_zeros_and_one_of_a_single_value_are_drawn() -> None:
    assert "<svg" in bars(["a"], {"x": [Bar(0.0)]}, "")
    assert "<svg" in lines({"x": [(0.0, 0.0), (1.0, 0.0)]})


def test_without_the_library_the_table_is_there_and_the_page_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pygal", None)
    section = parse(render_host(sample("gpu-bench"))).one("section", id="bench")
    assert section.all("table", cls="figures") and not section.all("figure")
    assert "pygal is not installed" in section.words()


# --- benchmark and site on one page ----------------------------------------------------------------------


def test_the_page_of_site_shows_the_benchmark_that_another_verb_measured(tmp_path: Path) -> None:
    evidence = sample("gpu-bench")
    bench = evidence.pop("bench")
    write_report(tmp_path, evidence)
    assert 'id="bench"' not in (tmp_path / "index.html").read_text("utf-8")
    run = {"schema": 1, "verb": "bench", "recipe": evidence["recipe"], "started": "2026-11-30T06:00:00Z"}
    write_report(tmp_path, {**run, "verdict": "running", "bench": None})
    assert 'id="bench"' not in (tmp_path / "index.html").read_text("utf-8")
    write_report(tmp_path, {**run, "verdict": "pass", "bench": bench})
    tree = parse((tmp_path / "index.html").read_text("utf-8"))
    assert tree.one("section", id="bench").all("figure")
    assert "bench" not in json.loads((tmp_path / "site.json").read_text("utf-8")), "data stay where they are"
    links = {node.attrs["href"] for node in tree.one("p", cls="others").all("a")}
    assert links == {"bench.html"} and (tmp_path / "bench.html").is_file()
    write_report(tmp_path, evidence)
    assert parse((tmp_path / "index.html").read_text("utf-8")).all("section", id="bench"), "it stays there"


def test_a_benchmark_of_another_recipe_is_not_shown_as_this_one(tmp_path: Path) -> None:
    evidence = sample("gpu-bench")
    other = {
        "verb": "bench",
        "verdict": "pass",
        "recipe": {"name": "another"},
        "bench": evidence.pop("bench"),
    }
    write_report(tmp_path, other)
    write_report(tmp_path, evidence)
    assert 'id="bench"' not in (tmp_path / "index.html").read_text("utf-8")


def test_a_benchmarks_own_file_is_no_run_in_the_index(tmp_path: Path) -> None:
    evidence = copy.deepcopy(sample("gpu-bench"))
    write_report(tmp_path / "gpu1", evidence)
    later = {**evidence["bench"], "started": "2027-01-01T00:00:00Z"}
    (tmp_path / "gpu1" / "bench-20270101T000000Z.json").write_text(json.dumps(later))
    write_index(tmp_path)
    tree = parse((tmp_path / "index.html").read_text("utf-8"))
    (link,) = tree.one("table").one("tbody").all("a")
    assert link.attrs["href"] == "gpu1/index.html"


def test_the_index_keeps_what_was_proven_when_a_later_verb_proves_nothing(tmp_path: Path) -> None:
    evidence = sample("gpu-bench")
    write_report(tmp_path / "gpu1", evidence)
    write_report(
        tmp_path / "gpu1",
        {"verb": "stop", "verdict": "pass", "host": "gpu1", "started": "2026-12-01T00:00:00Z"},
    )
    write_index(tmp_path)
    row = parse((tmp_path / "index.html").read_text("utf-8")).one("table").one("tbody").one("tr")
    assert "35 of 38 checks passed" in row.words() and "2026-11-30 04:42:32 UTC" in row.words()
    assert row.one("a").attrs["href"] == "gpu1/stop.html"
    gone = {"verb": "uninstall", "verdict": "pass", "host": "gpu1", "started": "2026-12-02T00:00:00Z"}
    write_report(tmp_path / "gpu1", gone)
    write_index(tmp_path)
    row = parse((tmp_path / "index.html").read_text("utf-8")).one("table").one("tbody").one("tr")
    assert "checks passed" not in row.words()
