"""The page in a real Chromium: it renders, says nothing on the console, asks for nothing, fits a phone.

Each page is served on the loopback by a server that writes down every request, so that "no network" is
counted and not believed. The first tests show that the instruments would notice.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from report_pages import SAMPLES, parse, sample

from tasks.report import render_host, render_index

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
FLAGS = [
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--hide-scrollbars",
    ),
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
]
CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] (.*)")
HOSTILE = "\"'><script>document.title='owned'</script><img src=/stolen onerror=\"document.title='owned'\">"


@dataclass
class Site:
    """Pages by path, and what was asked for."""

    url: str
    pages: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            body = found.pages.get(self.path.split("?")[0])
            data = (body or "").encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """The list above is the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Site(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


def browse(url: str, profile: Path, *more: str) -> tuple[str, list[str]]:
    """The page's DOM after its script ran, and what it said on the console."""
    assert CHROMIUM
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--lang=en-US", *more, url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, CONSOLE.findall(done.stderr)


def visit(site: Site, html: str, profile: Path, *more: str) -> tuple[str, list[str], list[str]]:
    """DOM, console and requests of one page."""
    site.pages["/page.html"] = html
    dom, console = browse(f"{site.url}/page.html", profile, "--dump-dom", *more)
    return dom, console, site.asked


def test_the_instruments_notice_a_request_and_a_word_on_the_console(site: Site, tmp_path: Path) -> None:
    bad = "<!doctype html><title>x</title><img src=/pixel><script>console.error('oh'); boom()</script>"
    _, console, asked = visit(site, bad, tmp_path / "p")
    assert "/pixel" in asked
    assert any("oh" in line for line in console) and any("boom" in line for line in console)


def test_the_policy_stops_a_script_and_a_picture_that_got_into_the_page(site: Site, tmp_path: Path) -> None:
    html = render_host(sample("refused")).replace(
        "<main>", "<main><img src=/stolen><script>document.title='owned'</script>"
    )
    dom, console, asked = visit(site, html, tmp_path / "p")
    assert asked == ["/page.html"]
    assert "<title>owned" not in dom
    assert len([line for line in console if "Content Security Policy" in line]) >= 2


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_renders_in_silence_and_asks_for_nothing(site: Site, tmp_path: Path, name: str) -> None:
    evidence = sample(name)
    dom, console, asked = visit(site, render_host(evidence), tmp_path / "p")
    assert console == []
    assert asked == ["/page.html"]
    tree = parse(re.sub(r"<!--.*?-->", "", dom))
    assert tree.one("html").attrs["lang"] == "en"
    assert "hidden" not in tree.one("button").attrs, "the script did not run"
    shown = {float(node.attrs["value"] or "nan") for node in tree.all("data", cls="seconds")}
    assert {step["seconds"] for step in evidence["steps"] if step["seconds"] is not None} <= shown


def test_in_the_browser_the_charts_say_the_figures_of_the_json(site: Site, tmp_path: Path) -> None:
    evidence = sample("gpu-bench")
    dom, console, asked = visit(site, render_host(evidence), tmp_path / "p")
    assert console == [] and asked == ["/page.html"]
    tree = parse(re.sub(r"<!--.*?-->", "", dom))
    cases = evidence["bench"]["cases"]
    shown = {json.loads(node.attrs["value"] or "") for node in tree.one("section", id="bench").all("data")}
    assert {value for case in cases for value in case["median"].values()} <= shown
    said = [title.words() for chart in tree.all("svg", cls="chart") for title in chart.all("title")]
    for case in cases:
        for stem in ("ttft", "tpot", "itl", "e2el"):
            for share in ("p50", "p95", "p99"):
                assert f"{share} · {case['name']}: {case['median'][f'{stem}_{share}_ms']} ms" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_and_topology_take_their_colours_from_the_page(
    site: Site, tmp_path: Path, scheme: str
) -> None:
    """Without its styles a shape is black: each must have a colour, and one that stands out."""
    html = render_host(sample("gpu-bench"))
    if scheme == "dark":
        html = html.replace("@media (prefers-color-scheme: dark)", "@media (min-width: 1px)")
        html = re.sub(r"style-src '[^']*'", "style-src 'unsafe-inline'", html)
    script = """
      const paper = win.getComputedStyle(doc.body).backgroundColor;
      const seen = (what, key) => [...doc.querySelectorAll(what)].filter(e => e.getClientRects().length)
        .map(e => win.getComputedStyle(e)[key]);
      const fills = seen('.chart .rect', 'fill'), lines = seen('.chart .series .line', 'stroke');
      const boxes = seen('.drawing .gpu rect', 'stroke');
      const good = [...fills, ...lines, ...boxes].filter(c =>
        c !== 'rgb(0, 0, 0)' && c !== 'none' && c !== paper);
      return [fills.length, lines.length > 20, boxes.length,
        good.length === fills.length + lines.length + boxes.length].join(' ');
    """
    assert measured(site, html, tmp_path / "p", 1280, script) == "54 true 4 true"


def test_the_index_renders_in_silence_and_asks_for_nothing(site: Site, tmp_path: Path) -> None:
    _, console, asked = visit(site, render_index([sample(name) for name in SAMPLES]), tmp_path / "p")
    assert console == [] and asked == ["/page.html"]


def test_hostile_evidence_runs_nothing_and_loads_nothing(site: Site, tmp_path: Path) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()} | {HOSTILE: HOSTILE}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return HOSTILE + value if isinstance(value, str) else value

    dom, console, asked = visit(site, render_host(poison(sample("engine-failed"))), tmp_path / "p")
    assert console == [] and asked == ["/page.html"]
    assert "<title>owned" not in dom


def test_a_chinese_browser_gets_the_chinese_page(site: Site, tmp_path: Path) -> None:
    dom, _, _ = visit(
        site, render_host(sample("refused")), tmp_path / "p", "--accept-lang=zh-CN", "--lang=zh-CN"
    )
    assert parse(dom).one("html").attrs["lang"] == "zh-Hans"


def measured(site: Site, html: str, profile: Path, width: int, script: str) -> str:
    """What a script says of the page in a frame of this width. (A headless window has a least width.)"""
    site.pages["/page.html"] = html
    site.pages["/frame.html"] = (
        f"<!doctype html><title>-</title><style>iframe {{border: 0; width: {width}px; height: 900px}}</style>"
        "<iframe id=f src=/page.html></iframe><script>"
        "f.onload = () => { const doc = f.contentDocument, win = f.contentWindow;"
        f"document.title = (() => {{ {script} }})() }}</script>"
    )
    dom, _ = browse(f"{site.url}/frame.html", profile, "--dump-dom", "--virtual-time-budget=3000")
    return parse(dom).one("title").text()


@pytest.mark.parametrize("name", [*SAMPLES, "index"])
def test_nothing_sticks_out_at_the_side_of_a_phone_a_tablet_or_a_desktop(
    site: Site, tmp_path: Path, name: str
) -> None:
    html = render_index([sample(n) for n in SAMPLES]) if name == "index" else render_host(sample(name))
    script = """
      doc.querySelectorAll('details').forEach(d => d.open = true);
      return [320, 360, 768, 1280].map(width => {
        f.style.width = width + 'px';
        const wide = [...doc.querySelectorAll('main *, header *, footer *')].filter(e =>
          !e.closest('.contents, .unseen, .sprite, pre, legend, thead') && e.getClientRects().length &&
          e.getBoundingClientRect().right > width + 1);
        return doc.documentElement.scrollWidth + wide.map(e => ' ' + e.tagName + '.' + e.className).join('');
      }).join(' ');
    """
    assert measured(site, html, tmp_path / "p", 1280, script) == "320 360 768 1280"


def test_the_switch_shows_one_language_at_a_time(site: Site, tmp_path: Path) -> None:
    script = """
      const seen = cls => [...doc.querySelectorAll('.' + cls)].filter(e => e.getClientRects().length).length;
      const said = () => (seen('en') > 20) + '/' + (seen('zh') > 20) + '/' + doc.documentElement.lang;
      const before = said();
      doc.querySelector('label[for=zh]').click();
      return before + ' ' + said() + ' ' + win.localStorage.getItem('rackwright-language');
    """
    shown = measured(site, render_host(sample("rehearsal-pass")), tmp_path / "p", 800, script)
    assert shown == "true/false/en false/true/zh-Hans zh"


def test_without_its_script_the_page_still_switches_language_and_unfolds(site: Site, tmp_path: Path) -> None:
    bare = re.sub(r"<script>.*</script>", "", render_host(sample("rehearsal-pass")), flags=re.DOTALL)
    script = """
      const seen = cls => [...doc.querySelectorAll('.' + cls)].filter(e => e.getClientRects().length).length;
      const before = (seen('en') > 20) + '/' + seen('zh');
      doc.querySelector('label[for=zh]').click();
      const fold = doc.querySelector('.checks details');
      fold.querySelector('summary').click();
      const button = doc.getElementById('unfold').getClientRects().length;
      return before + ' ' + seen('en') + '/' + (seen('zh') > 20) + ' ' + fold.open + ' ' + button;
    """
    assert measured(site, bare, tmp_path / "p", 800, script) == "true/0 0/true true 0"


def test_the_button_unfolds_everything_and_folds_it_again(site: Site, tmp_path: Path) -> None:
    script = """
      const all = () => [...doc.querySelectorAll('details')], open = () => all().filter(d => d.open).length;
      const button = doc.getElementById('unfold'), said = [];
      button.click(); said.push(open() === all().length);
      button.click(); said.push(open());
      return said.join(' ');
    """
    assert measured(site, render_host(sample("rehearsal-pass")), tmp_path / "p", 800, script) == "true 0"


def test_a_link_to_a_check_unfolds_its_evidence(site: Site, tmp_path: Path) -> None:
    script = """
      win.location.hash = '#c-chat.plain';
      win.dispatchEvent(new HashChangeEvent('hashchange'));
      const row = doc.getElementById('c-chat.plain');
      return row.querySelector('details').open + ' ' + (row.querySelector('pre').getClientRects().length > 0);
    """
    assert measured(site, render_host(sample("rehearsal-pass")), tmp_path / "p", 800, script) == "true true"


def test_a_running_page_reloads_itself_and_remembers_what_was_unfolded(site: Site, tmp_path: Path) -> None:
    evidence = copy.deepcopy(sample("rehearsal-pass"))
    evidence["verdict"] = "running"
    site.pages["/page.html"] = render_host(evidence)
    site.pages["/frame.html"] = (
        "<!doctype html><title>-</title><iframe id=f src=/page.html></iframe><script>let loads = 0;"
        "f.onload = () => { const fold = f.contentDocument.getElementById('d-c2'); loads += 1;"
        "if (loads === 1) { fold.open = true }"
        "if (loads === 2) { document.title = 'open: ' + fold.open } }</script>"
    )
    dom, console = browse(
        f"{site.url}/frame.html", tmp_path / "p", "--dump-dom", "--virtual-time-budget=8000"
    )
    assert site.asked.count("/page.html") >= 2
    assert parse(dom).one("title").text() == "open: true"
    assert console == []


@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_is_painted_and_not_blank(site: Site, tmp_path: Path, width: int) -> None:
    """A blank picture of this size compresses to less than 5 kB."""
    site.pages["/page.html"] = render_host(sample("rehearsal-pass"))
    shot = tmp_path / "shot.png"
    browse(f"{site.url}/page.html", tmp_path / "p", f"--screenshot={shot}", f"--window-size={width},900")
    data = shot.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == width
    assert len(data) > 20_000
