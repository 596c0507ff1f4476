"""Evidence of a run -> one JSON document and one page that needs nothing else.

The page is a single file: no network, no fonts, readable on a phone and on paper, in English and
Chinese. It is written after every step, so everything here takes what there is: any field of the
evidence may be missing, null or of the wrong kind, and a longer one is cut on the page (never in
the JSON). The shape of the evidence is documented in `docs/report.md`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from tasks.paths import TEMPLATES
from tasks.redact import redact
from tasks.report_values import dict_of, text_of
from tasks.report_view import (
    CHIPS,
    More,
    Row,
    folder_name,
    host_of,
    json_name,
    later,
    other_of,
    page_name,
    row_of,
)

__all__ = ["duration", "folder_name", "redact", "render_host", "render_index", "write_index", "write_report"]

_VERDICTS = ("fail", "refused", "running", "warn", "pass")
# What `site` does not find out itself and its page shows all the same.
_SHOWN_BY_SITE = ("bench", "promotion")
# What a status looks like: its colour and its sign, never the colour alone.
_TONES = {
    **dict.fromkeys(("pass", "ok", "done"), "good"),
    **dict.fromkeys(("fail", "failed", "refused"), "bad"),
    "warn": "care",
    "running": "busy",
    "unchanged": "same",
}


def write_report(
    folder: Path, evidence: Mapping[str, Any], secrets: Iterable[str] = (), *, page: bool = True
) -> None:
    """Write `<folder>/<verb>.json` and (`page`) what people read, each atomically; makes the folder.

    The page of `site` is `index.html`; another verb's does not replace it: it is `<verb>.html`. When a
    benchmark or a promotion is over, the page of `site` is written anew, with it.

    `secrets` are values that must not appear (an API key, a password), besides what `redact` finds.
    Raises OSError when the folder cannot be written; never because of what the evidence holds.
    """
    clean = dict_of(redact(evidence, secrets))
    folder.mkdir(parents=True, exist_ok=True)
    name = json_name(clean)
    _replace(folder / name, json.dumps(clean, indent=1, ensure_ascii=False) + "\n")
    if not page:
        return
    beside = _beside(folder, name)
    _replace(folder / page_name(name), _host_page(_whole(clean, beside), beside))
    site = beside.get("site.json")
    if site and clean.get("verdict") != "running" and any(clean.get(key) for key in _SHOWN_BY_SITE):
        beside = _beside(folder, "site.json")
        _replace(folder / page_name("site.json"), _host_page(_whole(site, beside), beside))


def _beside(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Reports of other runs on this host, by file, the newest first."""
    found = {path.name: report for path in folder.glob("*.json") if (report := _read(path))}
    found.pop(name, None)
    newest_first = sorted(found.items(), key=lambda pair: text_of(pair[1].get("started")), reverse=True)
    return {file: report for file, report in newest_first if file == json_name(report)}


def _whole(data: dict[str, Any], beside: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The report of `site` with the last benchmark and promotion of its recipe, which other verbs make."""
    if json_name(data) != "site.json":
        return data
    whole = dict(data)
    for report in beside.values():
        if dict_of(report.get("recipe")).get("name") == dict_of(data.get("recipe")).get("name"):
            for key in _SHOWN_BY_SITE:
                whole[key] = whole.get(key) or report.get(key)
    return whole


def write_index(folder: Path) -> None:
    """Write `<folder>/index.html` over the newest report of every host below it.

    A report that cannot be read is left out. Raises OSError when the folder cannot be written.
    """
    rows = []
    for host in sorted(path for path in folder.iterdir() if path.is_dir()):
        documents = [found for path in host.glob("*.json") if (found := _read(path)) is not None]
        if documents:
            documents.sort(key=lambda found: text_of(found.get("started")), reverse=True)
            rows.append(row_of(dict_of(redact(_with_proof(documents))), host.name))
    _replace(folder / "index.html", _index_page(rows))


def _with_proof(newest_first: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest run, with the acceptance that still stands where it had none itself.

    One of another recipe, mode or engine does not, and none from before an uninstallation.
    """
    newest = newest_first[0]
    gone = next((at for at, found in enumerate(newest_first) if found.get("verb") == "uninstall"), None)
    proofs = (
        found["acceptance"]
        for found in newest_first[:gone]
        if dict_of(found.get("acceptance")) and _of_the_same(found, newest)
    )
    return {**newest, "acceptance": newest.get("acceptance") or next(proofs, None)}


def _of_the_same(found: dict[str, Any], newest: dict[str, Any]) -> bool:
    """A report is about the recipe, mode and engine of the newest, as far as that names them."""
    told = [
        [dict_of(report.get("recipe")).get("name"), report.get("mode"), report.get("engine")]
        for report in (found, newest)
    ]
    return all(now in (None, then) for then, now in zip(*told, strict=True))


def render_host(evidence: Mapping[str, Any]) -> str:
    """The page of one host, redacted, as HTML."""
    return _host_page(dict_of(redact(evidence)))


def render_index(evidences: Iterable[Mapping[str, Any]]) -> str:
    """The page over many hosts, worst first, as HTML; each row leads to `<folder_name(host)>/index.html`."""
    documents = [dict_of(redact(evidence)) for evidence in evidences]
    return _index_page([row_of(found, folder_name(text_of(found.get("host")))) for found in documents])


def duration(seconds: float) -> str:
    """Seconds for a reader: `6 ms`, `12.3 s`, `2 min 26 s`, `1 h 02 min`."""
    if seconds <= 0:
        return f"{seconds:g} s"
    if seconds < 0.9995:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _host_page(data: dict[str, Any], beside: Mapping[str, dict[str, Any]] | None = None) -> str:
    view = host_of(data, [other_of(report) for report in (beside or {}).values()])
    return _page("host.html.j2", view.verdict, page=view, live=view.verdict == "running")


def _index_page(rows: list[Row]) -> str:
    order = {verdict: place for place, verdict in enumerate(_VERDICTS)}
    rows = sorted(rows, key=lambda row: (order.get(row.verdict, len(order)), row.host))
    counts = [(verdict, sum(row.verdict == verdict for row in rows)) for verdict in _VERDICTS]
    tally = [pair for pair in counts if pair[1]]
    return _page("index.html.j2", rows[0].verdict if rows else "", rows=rows, tally=tally)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # a benchmark's own file has a verdict too, and no page
    return found if isinstance(found, dict) and "verdict" in found and found.get("verb") else None


def _replace(path: Path, text: str) -> None:
    """A whole file or the old one: written beside its place, then moved over it."""
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, "utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@cache
def _texts() -> dict[str, tuple[str, str]]:
    found: dict[str, list[str]] = json.loads((TEMPLATES / "report" / "texts.json").read_text("utf-8"))
    return {key: (english, chinese) for key, (english, chinese) in found.items()}


def _say(key: str, **values: object) -> Markup:
    """A fixed text in both languages; the switch shows one of them. `one|many` is chosen by `n`."""
    if not values:
        return _fixed(key)
    english, chinese = _texts()[key]
    english = english.split("|")[0 if values.get("n") == 1 else -1]
    return _both(english.format(**values), chinese.format(**values))


@cache
def _fixed(key: str) -> Markup:
    return _both(*_texts()[key])


def _both(english: str, chinese: str) -> Markup:
    return Markup(
        f'<span class="en" lang="en">{escape(english)}</span>'
        f'<span class="zh" lang="zh-Hans">{escape(chinese)}</span>'
    )


def _word(kind: str, name: str) -> Markup:
    """A known name in both languages, an unknown one as it is."""
    return _say(f"{kind}.{name}") if f"{kind}.{name}" in _texts() else escape(name)


@cache
def _checks() -> dict[str, str]:
    found: dict[str, str] = json.loads((TEMPLATES / "report" / "checks.zh.json").read_text("utf-8"))
    return found


def _check(id: str, about: str) -> Markup:
    """What a check of acceptance proves: in its own words, and in Chinese where we know it."""
    return _both(about or id, _checks().get(id) or about or id)


def _moment(value: str) -> Markup:
    """A time in UTC, readable and machine-readable; what is not a time as it is."""
    iso = later(value, 0)
    if not iso:
        return escape(value)
    return Markup('<time datetime="{}">{} UTC</time>').format(value, iso[:19].replace("T", " "))


def _amount(value: float, key: str = "") -> Markup:
    """A number: exact for machines, and bytes also in GiB for people. Memory is always in bytes."""
    shown = json.dumps(value)
    if (key.endswith("bytes") or key == "memory") and isinstance(value, int):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
            if abs(value) >= size:
                shown = f"{value / size:.1f} {unit} ({value:,} B)"
                break
    return Markup('<data value="{}">{}</data>').format(json.dumps(value), shown)


def _figure(value: float) -> str:
    """A measured figure for a reader: three significant digits, all of a whole number."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 or value == int(value) else f"{value:.0f}"


def _seconds(value: float | None) -> Markup:
    if value is None:
        return Markup("")
    return Markup('<data class="seconds" value="{}">{}</data>').format(json.dumps(value), duration(value))


def _link(text: str) -> Markup:
    """A text, as a link when all of it is a web address (nothing else may become one), hashes as code."""
    if re.fullmatch(r"(?:sha256:)?[0-9a-f]{32,}", text):
        return Markup('<code class="hash">{}</code>').format(text)
    if re.fullmatch(r"https?://[^\s\"'<>]+", text):
        return Markup('<a href="{0}" rel="noreferrer noopener">{0}</a>').format(text)
    return escape(text)


def _slug(text: str) -> str:
    """A text as a fragment id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100]


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> jinja2.Environment:
    folder = TEMPLATES / "report"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    style = (folder / "style.css").read_text("utf-8")
    script = (folder / "page.js").read_text("utf-8")
    environment.globals.update(
        t=_say,
        word=_word,
        proves=_check,
        moment=_moment,
        amount=_amount,
        seconds=_seconds,
        link=_link,
        argv=lambda words: shlex.join(text_of(word) for word in words if not isinstance(word, More)),
        duration=duration,
        tone=lambda status: _TONES.get(status, "quiet"),
        is_more=lambda value: isinstance(value, More),
        CHIPS=CHIPS,
        # Markup: both are our own files, and their hashes are all that the page allows to run
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    environment.filters["slug"] = _slug
    environment.filters["figure"] = _figure
    # Markup: what report_charts has drawn; every text in it was escaped when it was written
    environment.filters["drawing"] = Markup
    return environment


def _page(template: str, verdict: str, **values: Any) -> str:
    return _environment().get_template(template).render(verdict=verdict, **values)
