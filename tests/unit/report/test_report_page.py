"""The page says what the evidence says, whatever the evidence is."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_pages import SAMPLES, Node, leaves, parse, sample

from tasks import report_view
from tasks.onhost import accept
from tasks.paths import TEMPLATES
from tasks.report import duration, folder_name, render_host, render_index, write_index, write_report

FOLDER = TEMPLATES / "report"


def page(name: str) -> tuple[dict[str, Any], Node]:
    evidence = sample(name)
    return evidence, parse(render_host(evidence))


# --- its numbers are the evidence's ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_every_step_shows_its_own_seconds(name: str) -> None:
    evidence, tree = page(name)
    rows = tree.one("ol", cls="steps").children if evidence["steps"] else []
    rows = [row for row in rows if isinstance(row, Node)]
    assert len(rows) == len(evidence["steps"])
    for row, step in zip(rows, evidence["steps"], strict=True):
        shown = row.all("data", cls="seconds")
        assert [json.loads(node.attrs["value"] or "") for node in shown] == (
            [] if step["seconds"] is None else [step["seconds"]]
        )
        assert [node.text() for node in shown] == [
            duration(json.loads(n.attrs["value"] or "")) for n in shown
        ]


def test_bars_follow_one_another_and_are_as_long_as_their_share() -> None:
    evidence, tree = page("rehearsal-pass")
    total = sum(step["seconds"] for step in evidence["steps"])
    at = 0.0
    for row, step in zip(tree.one("ol", cls="steps").all("li"), evidence["steps"], strict=True):
        fill = row.all("rect", cls="fill")
        if not step["seconds"]:
            assert fill == []
            continue
        left, width = (float((fill[0].attrs[key] or "").rstrip("%")) for key in ("x", "width"))
        assert left == pytest.approx(100 * at / total, abs=0.01)
        assert width == pytest.approx(max(100 * step["seconds"] / total, 0.6), abs=0.01)
        at += step["seconds"]


def test_every_check_shows_its_verdict_seconds_and_evidence() -> None:
    evidence, tree = page("rehearsal-pass")
    rows = tree.one("ol", cls="checks").all("li")
    assert len(rows) == 16
    for row, check in zip(rows, evidence["acceptance"]["checks"], strict=True):
        shown = [json.loads(node.attrs["value"] or "") for node in row.all("data", cls="seconds")]
        assert shown == ([] if check["verdict"] == "skipped" else [check["seconds"]])
        word = {"pass": "passed", "fail": "failed", "skipped": "skipped"}[check["verdict"]]
        assert row.one(cls="word").text() == word
        assert (check["reason"] or check["summary"]) in row.text()
        figures = {
            n.text(): json.loads(n.attrs["value"] or "") for n in row.all("data") if "class" not in n.attrs
        }
        assert sorted(figures.values()) == sorted(check["figures"].values())
        if check["evidence"] is None:
            assert row.all("pre") == []
        elif not any(len(item) > 600 for _, item in leaves(check["evidence"]) if isinstance(item, str)):
            request, response = (pre.text() for pre in row.all("pre"))
            assert json.loads(request) == check["evidence"]["request"]
            if "characters] …" not in response:
                assert json.loads(response) == check["evidence"]["response"]


def test_acceptance_evidence_is_folded_and_one_click_away() -> None:
    _, tree = page("rehearsal-pass")
    folds = tree.one("ol", cls="checks").all("details")
    assert len(folds) == 11
    assert all("open" not in fold.attrs and fold.all("summary") and fold.all("pre") for fold in folds)


def test_counts_on_the_first_screen_are_those_of_the_checks() -> None:
    evidence, tree = page("rehearsal-pass")
    verdicts = [check["verdict"] for check in evidence["acceptance"]["checks"]]
    said = tree.one("p", cls="proof").words()
    assert said.startswith(f"{verdicts.count('pass')} of {len(verdicts)} checks passed, ")
    assert f", {verdicts.count('skipped')} skipped · profile smoke · 2026-11-30 04:23:47 UTC" in said
    chinese = tree.one("p", cls="proof").words("zh")
    assert chinese.startswith("16 项检查中 12 项通过，4 项跳过")


@pytest.mark.parametrize("name", SAMPLES)
def test_findings_are_counted_by_group_and_all_shown(name: str) -> None:
    evidence, tree = page(name)
    groups = tree.all("details", cls="group")
    shown = [code.text() for group in groups for code in group.all("code", cls="id")]
    assert sorted(shown) == sorted(finding["id"] for finding in evidence["findings"])
    for group in groups:
        ids = [code.text() for code in group.all("code", cls="id")]
        prefix = ids[0].split(".")[0]
        mine = [f["status"] for f in evidence["findings"] if f["id"].split(".")[0] == prefix]
        tallies = [tally.words() for tally in group.all(cls="tally")]
        words = {"fail": "failed", "warn": "warning", "skipped": "skipped", "ok": "ok"}
        assert tallies == [f"{mine.count(s)} {words[s]}" for s in words if s in mine]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_pin_is_there_with_its_whole_hash(name: str) -> None:
    evidence, tree = page(name)
    rows = [row for table in tree.all("table", cls="pins") for row in table.one("tbody").all("tr")]
    shown = [(row.one("th").text(), row.one("code").text()) for row in rows]
    assert shown == [(pin["name"], pin["sha256"]) for pin in evidence["pins"]]


@pytest.mark.parametrize("name", SAMPLES)
def test_numbers_among_the_facts_are_exact(name: str) -> None:
    evidence, tree = page(name)
    wanted = [item for _, item in leaves(evidence["facts"]) if isinstance(item, int | float)]
    shown = [json.loads(node.attrs["value"] or "") for node in tree.one("section", id="facts").all("data")]
    assert shown == wanted


def test_bytes_are_also_said_in_gibibytes() -> None:
    facts = {"memory": {"total": 25276510208}, "disk": {"free_bytes": 875785, "inodes": 25276510208}}
    shown = [node.text() for node in parse(render_host({"facts": facts})).all("data")]
    assert shown == ["23.5 GiB (25,276,510,208 B)", "875785", "25276510208"]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_run_shows_its_time_and_commands(name: str) -> None:
    evidence, tree = page(name)
    hero = tree.one("section", id="verdict")
    assert json.loads(hero.one("data", cls="seconds").attrs["value"] or "") == evidence["seconds"]
    assert f"{evidence['commands']} remote commands" in hero.text()
    assert any(time.attrs["datetime"] == evidence["started"] for time in hero.all("time"))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.0002, "1 ms"),
        (0.006, "6 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (146.2, "2 min 26 s"),
        (3599.6, "1 h 00 min"),
        (7384, "2 h 03 min"),
        (-2, "-2 s"),
    ],
)
def test_durations_are_short_and_never_say_sixty_seconds(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# --- the order of things ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdict", "chinese"),
    [
        ("rehearsal-pass", "Passed", "通过"),
        ("refused", "Refused", "已拒绝"),
        ("engine-failed", "Failed", "失败"),
    ],
)
def test_the_first_screen_has_verdict_reason_endpoint_command_and_mode(
    name: str, verdict: str, chinese: str
) -> None:
    evidence, tree = page(name)
    hero = tree.one("section", id="verdict")
    assert hero.one("h1").words() == verdict
    assert hero.one("h1").words("zh") == chinese
    for key in ("host", "why", "endpoint", "curl", "mode", "supervisor"):
        if evidence[key]:
            assert evidence[key] in hero.text(), key
    sections = [node.attrs.get("id") for node in tree.one("main").all("section") if node.attrs.get("id")]
    order = ["verdict", "attention", "timeline", "preflight", "acceptance", "facts", "pins"]
    assert sections == [id for id in order if id in sections]


def test_nothing_proven_is_said_aloud() -> None:
    _, tree = page("engine-failed")
    assert "Nothing: acceptance has not run." in tree.one("section", id="verdict").text()


def test_an_unchanged_acceptance_still_says_what_its_receipt_proved_and_when() -> None:
    evidence = sample("rehearsal-pass")
    result = evidence.pop("acceptance")
    step = next(step for step in evidence["steps"] if step["name"] == "acceptance")
    step.update(status="unchanged", detail={"profile": "smoke", "result": result})
    tree = parse(render_host(evidence))
    assert "12 of 16 checks passed" in tree.one("p", cls="proof").text()
    assert "2026-11-30 04:23:47 UTC" in tree.one("p", cls="proof").text()
    step["status"] = "skipped"
    assert "acceptance has not run" in parse(render_host(evidence)).one("section", id="verdict").text()


def test_a_run_that_changed_nothing_says_so() -> None:
    steps = [{"name": name, "status": "unchanged", "seconds": 0} for name in ("engine", "weights")]
    lead = parse(render_host({"steps": steps})).one("section", id="timeline").one("p", cls="lead")
    assert lead.text() == "2 steps, nothing had to change"
    steps[0]["status"] = "done"
    lead = parse(render_host({"steps": steps})).one("section", id="timeline").one("p", cls="lead")
    assert lead.text() == "0 s in 2 steps"


def test_what_needs_attention_has_failures_before_warnings_each_with_its_cure() -> None:
    evidence, tree = page("refused")
    notes = tree.one("section", id="attention").all("article")
    tones = [(note.attrs["class"] or "").split()[-1] for note in notes]
    assert tones == ["bad"] * 3 + ["care"] * 2
    for finding in evidence["findings"]:
        if finding["status"] in ("fail", "warn"):
            note = next(n for n in notes if finding["id"] in n.text())
            for key in ("summary", "observed", "expected", "fix"):
                assert finding[key] in note.text(), key


def test_groups_of_findings_come_worst_first_and_only_bad_ones_are_open() -> None:
    _, tree = page("refused")
    groups = tree.all("details", cls="group")
    worst = [(group.all(cls="tally")[0].attrs["class"] or "").split()[-1] for group in groups]
    assert worst == ["bad", "bad", "bad", "care", "quiet", "quiet"]
    assert ["open" in group.attrs for group in groups] == [True, True, True, True, False, False]


def test_a_failed_step_shows_its_reason_its_cure_and_the_end_of_its_log() -> None:
    evidence, tree = page("engine-failed")
    note = tree.one("section", id="attention").all("article")[0]
    step = evidence["steps"][2]
    what, fix = step["why"].split("\nFix: ")
    assert note.one("h3").words().endswith(what)
    assert note.one("div", cls="fix").one("dd").text() == fix
    assert note.one("pre").text() == "\n".join(step["log"][-12:])


def test_a_failed_check_needs_attention() -> None:
    evidence = sample("rehearsal-pass")
    check = evidence["acceptance"]["checks"][4]
    check.update(verdict="fail", reason="reasoning was lost", summary="reasoning was lost")
    tree = parse(render_host(evidence))
    first = tree.one("section", id="attention").all("article")[0]
    assert check["about"] in first.text() and "reasoning was lost" in first.text()
    assert "11 of 16 checks passed, 1 failed, 4 skipped" in tree.one("p", cls="proof").words()


def test_only_a_running_report_reloads_itself() -> None:
    evidence = sample("engine-failed")
    assert 'http-equiv="refresh"' not in render_host(evidence)
    assert parse(render_host(evidence)).all(cls="live") == []
    evidence["verdict"] = "running"
    html = render_host(evidence)
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in html
    assert "State at 2026-11-30 04:20:23 UTC." in parse(html).one("p", cls="live").text()


def test_a_running_step_shows_what_the_run_took_beside_the_others() -> None:
    evidence = {
        "verdict": "running",
        "seconds": 30.0,
        "steps": [
            {"name": "engine", "status": "done", "seconds": 12.5},
            {"name": "weights", "status": "running"},
        ],
    }
    shown = parse(render_host(evidence)).one("ol", cls="steps").all("data")
    assert [node.text() for node in shown] == ["12.5 s", "17.5 s"]


# --- hostile and damaged evidence ---------------------------------------------------------------------------

HOSTILE = (
    "\"'><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)><svg onload=alert(3)>"
    "</pre></style></details><a href='javascript:alert(4)'>{{ 7*7 }}{% raw %}&lt;"
)


def with_hostile_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_hostile_texts(item) for key, item in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [with_hostile_texts(item) for item in value]
    return HOSTILE + value if isinstance(value, str) else value


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_texts_stay_texts(name: str) -> None:
    evidence = with_hostile_texts(sample(name))
    html = render_host(evidence)
    tree = parse(html)
    assert len(tree.all("script")) == 1 and len(tree.all("style")) == 1
    assert tree.all("img") == []
    for node in tree.walk():
        assert not [key for key in node.attrs if key.startswith("on") or key in ("src", "style", "srcset")]
        assert not (node.attrs.get("href") or "#").startswith(("javascript", "data:text"))
    assert HOSTILE in tree.one("p", cls="host").text()
    assert HOSTILE in tree.one("head").one("title").text()
    assert "49" not in tree.one("p", cls="host").text()


def test_hostile_texts_in_the_index_stay_texts() -> None:
    html = render_index([with_hostile_texts(sample(name)) for name in SAMPLES])
    tree = parse(html)
    assert len(tree.all("script")) == 1 and tree.all("img") == []
    assert all(
        re.fullmatch(r"#verdict|[A-Za-z0-9._-]+/[a-z0-9-]+\.html", a.attrs["href"] or "")
        for a in tree.all("a")
    )


def test_only_whole_web_addresses_become_links() -> None:
    findings = [
        {"id": "a.1", "status": "fail", "summary": "s", "reference": reference}
        for reference in ("https://docs.example/x?a=1&b=2", "javascript:alert(1)", "see https://docs.example")
    ]
    tree = parse(render_host({"findings": findings}))
    links = [a.attrs["href"] for a in tree.one("section", id="attention").all("a", rel="noreferrer noopener")]
    assert links == ["https://docs.example/x?a=1&b=2"]


def small(name: str) -> dict[str, Any]:
    """A sample with one or two of everything."""
    evidence = sample(name)
    if evidence["acceptance"]:
        evidence["acceptance"]["checks"] = evidence["acceptance"]["checks"][1:3]
    for key in ("pins", "findings", "steps"):
        evidence[key] = evidence[key][:3]
    return evidence


@pytest.mark.slow
def test_any_field_may_be_missing_or_of_the_wrong_kind() -> None:
    whole = {
        **small("refused"),
        **{key: small("rehearsal-pass")[key] for key in ("steps", "acceptance", "pins")},
    }
    gone = object()
    wrong = (gone, None, "text", -1.5, True, ["x", None, 3], {"k": [None, {"x": 1}]})
    tried = 0
    for path, _ in leaves(whole):
        for value in wrong:
            evidence = copy.deepcopy(whole)
            place: Any = evidence
            for step in path[:-1]:
                place = place[step]
            if value is gone:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            html = render_host(evidence)
            assert html.count("<h1 ") == 1 and html.rstrip().endswith("</html>"), (path, value)
            tried += 1
    assert tried > 500


@pytest.mark.parametrize(
    "evidence", [{}, {"verdict": None}, {"verdict": "odd"}, {"host": {"a": 1}}, None, [], 7]
)
def test_next_to_nothing_still_makes_a_page(evidence: Any) -> None:
    tree = parse(render_host(evidence))
    assert tree.one("h1").words() in ("No verdict", "odd")


@pytest.mark.slow
def test_a_page_stays_small_whatever_the_evidence_and_says_what_it_left_out() -> None:
    long = "x" * 200_000
    many = range(5_000)
    evidence = {
        "host": long,
        "why": long,
        "curl": long,
        "steps": [
            {
                "name": f"s{n}",
                "status": "failed",
                "seconds": 1,
                "why": long[:9000],
                "log": [long[:9000]] * 100,
            }
            for n in range(20)
        ],
        "findings": [{"id": f"g{n % 50}.{n}", "status": "warn", "summary": f"finding {n}"} for n in many],
        "acceptance": {
            "checks": [{"id": f"c{n}", "verdict": "pass", "evidence": {"request": "y" * 900}} for n in many]
        },
        "pins": [{"name": f"p{n}", "sha256": "0" * 64} for n in many],
        "facts": {"g": {f"k{n}": n for n in many}, "deep": _deep(300)},
    }
    html = render_host(evidence)
    assert len(html.encode()) < 3_000_000
    tree = parse(html)
    more = [node.words() for node in tree.all(cls="more")]
    assert f"{5_000 - report_view.ROWS} more in the JSON file" in more
    assert f"{5_000 - report_view.PIN_ROWS} more in the JSON file" in more
    assert "5000 of 5000 checks passed" in tree.one("p", cls="proof").words()


def _deep(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = {"next": value}
    return value


# --- a page that needs nothing else -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_loads_nothing(name: str) -> None:
    html = render_host(sample(name))
    tree = parse(html)
    assert next(node.attrs["href"] or "" for node in tree.all("link")).startswith("data:image/svg+xml,")
    assert len(tree.all("link")) == 1
    assert not [node for node in tree.walk() if "src" in node.attrs]
    assert not re.search(r"@import|url\(|@font-face", tree.one("style").text())
    assert not re.search(
        r"fetch|XMLHttp|import\(|WebSocket|sendBeacon|eval|innerHTML", tree.one("script").text()
    )


def test_the_policy_allows_exactly_the_style_and_script_of_the_page() -> None:
    html = render_host(sample("refused"))
    tree = parse(html)
    policy = tree.one("meta", **{"http-equiv": "Content-Security-Policy"}).attrs["content"] or ""
    for tag in ("style", "script"):
        digest = hashlib.sha256(tree.one(tag).text().encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy


@pytest.mark.parametrize("name", SAMPLES)
def test_ids_are_unique_and_every_inner_link_has_a_target(name: str) -> None:
    tree = parse(render_host(sample(name)))
    ids = [node.attrs["id"] for node in tree.walk() if "id" in node.attrs]
    assert len(ids) == len(set(ids))
    targets = [
        node.attrs["href"] or "" for node in tree.walk() if (node.attrs.get("href") or "").startswith("#")
    ]
    assert targets and {target[1:] for target in targets} <= set(ids)


@pytest.mark.parametrize("name", SAMPLES)
def test_status_is_never_told_by_colour_alone(name: str) -> None:
    tree = parse(render_host(sample(name)))
    signs = tree.all(cls="sign") + tree.all("a", cls="chip") + tree.all(cls="tally")
    signs = [sign for sign in signs if sign.attrs.get("href") != "#acceptance"]  # "+22" is no status
    for sign in signs:
        words = sign.text() if "sign" in (sign.attrs["class"] or "") else sign.text().split(maxsplit=1)[-1]
        assert words.strip(), "a sign without a word"
        assert sign.one("svg").attrs["aria-hidden"] == "true"


# --- languages and colours ----------------------------------------------------------------------------------


def texts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((FOLDER / "texts.json").read_text("utf-8"))
    return found


def test_every_text_has_both_languages_with_the_same_values() -> None:
    for key, (english, chinese) in texts().items():
        assert english and chinese, key
        for form in english.split("|"):
            assert set(re.findall(r"{(\w+)}", chinese)) == set(re.findall(r"{(\w+)}", english)), key
            assert form.strip(), key


def test_every_check_of_acceptance_has_a_chinese_name() -> None:
    chinese = json.loads((FOLDER / "checks.zh.json").read_text("utf-8"))
    assert list(chinese) == [one.id for one in accept.CHECKS]
    assert all(re.search(r"[\u4e00-\u9fff]", text) for text in chinese.values())


def test_checks_are_named_in_the_chosen_language_and_unknown_ones_as_they_are() -> None:
    checks = [
        {"id": "json.schema", "about": "A JSON schema is honoured.", "verdict": "pass"},
        {"id": "of.tomorrow", "about": "Something new.", "verdict": "pass"},
    ]
    rows = parse(render_host({"acceptance": {"checks": checks}})).one("ol", cls="checks").all(cls="what")
    assert [row.words() for row in rows] == ["A JSON schema is honoured.", "Something new."]
    assert [row.words("zh") for row in rows] == ["遵守给定的 JSON 格式。", "Something new."]


def test_templates_say_only_known_texts_and_no_text_is_unused() -> None:
    sources = "".join(path.read_text("utf-8") for path in FOLDER.glob("*.j2"))
    said = set(re.findall(r'\bt\("([a-z0-9_.]+)"[,)]', sources))
    families = set(re.findall(r'\bt\("([a-z]+\.)" ~', sources)) | {
        f"{kind}." for kind in re.findall(r'(?:word|sign)\("([a-z]+)",', sources)
    }
    known = set(texts())
    assert said <= known
    unused = {key for key in known - said if not key.startswith(tuple(families))}
    assert unused == set()


def test_no_english_word_of_the_page_itself_is_left_in_the_chinese_one() -> None:
    tree = parse(
        render_host({"verdict": "fail", "host": "h", "steps": [{"name": "engine", "status": "failed"}]})
    )
    main = tree.one("main").words("zh")
    assert re.findall(r"[A-Za-z]{3,}", main) == ["engine"]  # the id of the failed step


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    channels = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_texts_have_enough_contrast_in_every_scheme() -> None:
    """WCAG 2.2, 1.4.3: at least 4.5 to 1."""
    style = (FOLDER / "style.css").read_text("utf-8")
    light, dark, paper = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", block))
        for block in re.findall(r":root {([^}]+)}", style)
    )
    for scheme in (light, {**light, **dark}, {**light, **paper}):
        for ground in ("paper", "panel", "good-wash", "bad-wash", "care-wash", "busy-wash"):
            for ink in ("ink", "muted", "link"):
                assert _contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
        for tone in ("good", "bad", "care", "busy"):
            for ground in ("paper", "panel", f"{tone}-wash"):
                assert _contrast(scheme[tone], scheme[ground]) >= 4.5, (tone, ground)


# --- files --------------------------------------------------------------------------------------------------


def test_a_report_is_a_json_file_named_after_the_verb_and_a_page(tmp_path: Path) -> None:
    evidence = sample("rehearsal-pass")
    write_report(tmp_path / "reports" / "local", evidence)
    folder = tmp_path / "reports" / "local"
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "site.json"]
    assert json.loads((folder / "site.json").read_text("utf-8")) == evidence
    page = (folder / "index.html").read_text("utf-8")
    assert page == render_host(evidence)
    assert parse(page).one("footer").one("a").attrs["href"] == "site.json"


@pytest.mark.parametrize("verb", ["../../etc/x", "/abs", "", None, 7, "A b", "x" * 300, ".."])
def test_a_strange_verb_stays_in_its_folder(tmp_path: Path, verb: Any) -> None:
    write_report(tmp_path / "a" / "b", {"verb": verb})
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in written} == {tmp_path / "a" / "b"}
    assert sorted(path.suffix for path in written) == [".html", ".json"]


def test_a_write_that_breaks_leaves_the_old_report_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path, {"verb": "site", "verdict": "running"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tmp_path, {"verb": "site", "verdict": "pass"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_json_cannot_hold_is_written_as_text(tmp_path: Path) -> None:
    odd = {
        "verb": "site",
        "facts": {"g": {"path": Path("/opt"), "set": {1}, "nan": float("nan"), "b": b"\xff"}},
    }
    write_report(tmp_path, odd)
    found = json.loads((tmp_path / "site.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert found["facts"]["g"] == {"path": "/opt", "set": [1], "nan": None, "b": "\ufffd"}


def test_secrets_reach_neither_the_page_nor_the_json(tmp_path: Path) -> None:
    evidence = sample("engine-failed")
    evidence["steps"][2]["log"].append("export HF_TOKEN=hf_" + "aB3" * 12)
    evidence["why"] = "engine: the key hunter2-of-the-host was refused by 10.1.2.3"
    write_report(tmp_path, evidence, secrets=["hunter2-of-the-host"])
    for path in tmp_path.iterdir():
        text = path.read_text("utf-8")
        assert "aB3aB3" not in text and "hunter2" not in text and "10.1.2.3" not in text, path
        assert "[redacted]" in text and "private-ip" in text


# --- the index ----------------------------------------------------------------------------------------------


def test_the_index_has_the_worst_host_first_and_links_to_each() -> None:
    tree = parse(render_index([sample(name) for name in SAMPLES]))
    rows = [row for row in tree.all("tr") if row.all("td")]
    assert [row.one("th").words() for row in rows] == [
        "h20-lab-03",
        "workstation-7",
        "@local",
        "workstation",
    ]
    assert [row.one("a").attrs["href"] for row in rows] == [
        "h20-lab-03/index.html",
        "workstation-7/index.html",
        "local/index.html",
        "workstation/index.html",
    ]
    assert tree.one("h1").words() == "4 hosts"
    assert "12 of 16 checks passed, 4 skipped" in rows[2].words()
    assert json.loads(rows[2].one("data").attrs["value"] or "") == sample("rehearsal-pass")["seconds"]


def test_an_index_of_one_and_of_none_reads_well() -> None:
    assert parse(render_index([sample("refused")])).one("h1").words() == "1 host"
    assert parse(render_index([])).one("h1").words() == "No host has a report yet."


def test_the_index_on_disk_takes_the_newest_report_of_each_folder(tmp_path: Path) -> None:
    old = sample("rehearsal-pass")
    write_report(
        tmp_path / "gpu box",
        {**old, "verb": "preflight", "verdict": "fail", "started": "2026-11-29T00:00:00Z"},
    )
    write_report(tmp_path / "gpu box", old)
    write_report(tmp_path / "other", sample("refused"))
    (tmp_path / "other" / "broken.json").write_text("{", "utf-8")
    (tmp_path / "other" / "foreign.json").write_text("[1]", "utf-8")
    (tmp_path / "empty").mkdir()
    write_index(tmp_path)
    tree = parse((tmp_path / "index.html").read_text("utf-8"))
    rows = [row for row in tree.all("tr") if row.all("td")]
    assert [row.one("a").attrs["href"] for row in rows] == ["other/index.html", "gpu%20box/index.html"]
    assert [row.one(cls="word").text() for row in rows] == ["Refused", "Passed"]


def of_gpu1(verb: str, day: int, **more: Any) -> dict[str, Any]:
    """A report of one verb on one host."""
    about = {"mode": "eager", "recipe": {"name": "a"}, "engine": {"label": "vllm 0.32.0", "route": "wheel"}}
    when = {"started": f"2026-11-{day:02}T00:00:00Z", "verdict": "pass"}
    return {"schema": 1, "verb": verb, "host": "gpu1", **when, **about, **more}


PROOF = {"profile": "standard", "checks": [{"id": "chat.exact", "verdict": "pass"}] * 3}


@pytest.mark.parametrize(
    ("later", "stands"),
    [
        ([of_gpu1("preflight", 20)], True),
        ([of_gpu1("preflight", 20, recipe={"name": "b"})], False),
        ([of_gpu1("preflight", 20, mode="optimized")], False),
        ([of_gpu1("preflight", 20, engine={"label": "vllm 0.33.0", "route": "wheel"})], False),
        ([of_gpu1("uninstall", 19), of_gpu1("preflight", 20)], False),
        ([of_gpu1("uninstall", 19)], False),
    ],
)
def test_the_index_shows_the_acceptance_of_what_is_there_now(
    tmp_path: Path, later: list[dict[str, Any]], stands: bool
) -> None:
    for report in (of_gpu1("site", 1, acceptance=PROOF), *later):
        write_report(tmp_path / "gpu1", report)
    write_index(tmp_path)
    text = parse((tmp_path / "index.html").read_text("utf-8")).one("tbody").words()
    assert ("3 of 3 checks passed" in text) is stands, text


@pytest.mark.parametrize(
    ("host", "folder"),
    [
        ("@local", "local"),
        ("h20-01.lab", "h20-01.lab"),
        ("../../x", "x"),
        ("a:22/b", "a-22-b"),
        ("主机", "host"),
        ("", "host"),
    ],
)
def test_a_host_has_a_harmless_folder(host: str, folder: str) -> None:
    assert folder_name(host) == folder
