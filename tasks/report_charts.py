"""Charts as SVG for a page that runs no script: drawn by pygal, stripped to shapes, coloured by the page.

pygal (https://www.pygal.org) computes scales, ticks and shapes. Its own styles, scripts, ids and comments
are taken out: the page's policy forbids them, and its style sheet knows light, dark and paper. What pygal
keeps for its script, the value of every shape, becomes the shape's `<title>`: browsers show it on hovering.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

WIDTH, HEIGHT = 460, 240
FONT = 13
# Points of one line: the page stays small, and the highest of each stretch is kept.
MOST_POINTS = 120

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Bar:
    """One bar: its height, and the lowest and highest value that was measured, where there are several."""

    value: float
    low: float | None = None
    high: float | None = None


class NoLibrary(Exception):
    """pygal is not installed: the environment is older than the lock."""


def bars(labels: list[str], series: dict[str, list[Bar | None]], unit: str) -> str:
    """Groups of bars, one group a label, one colour a series. None leaves a gap. Raises NoLibrary."""
    chart = _chart("Bar", x_label_rotation=0 if sum(map(len, labels)) <= 44 else 30)
    chart.x_labels = labels
    chart.range = _range(
        [end for row in series.values() for bar in row if bar for end in (bar.value, bar.high)]
    )
    for name, row in series.items():
        chart.add(name, [_bar(bar) for bar in row])
    return _svg(chart, list(series), unit)


def lines(series: dict[str, list[Point]]) -> str:
    """Lines over time in seconds. A point without a value breaks its line. Raises NoLibrary."""
    end = max((x for points in series.values() for x, _ in points), default=0.0)
    per, word = (60, "min") if end > 180 else (1, "s")
    chart = _chart("XY", show_dots=False, allow_interruptions=True)
    chart.range = _range([y for points in series.values() for _, y in points])
    chart.x_value_formatter = lambda value: f"{value / per:g} {word}"
    chart.x_labels = [step * per for step in _ticks(end / per)]
    for name, points in series.items():
        chart.add(name, thinned(points))
    return _svg(chart, [], "")


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about so many points: of each stretch the highest, and every gap."""
    size = -(-len(points) // most) if points else 1
    kept: list[Point] = []
    stretch: list[Point] = []
    for point in points:
        if point[1] is not None:
            stretch.append(point)
        if stretch and (len(stretch) == size or point[1] is None):
            kept.append(max(stretch, key=lambda item: item[1] or 0.0))
            stretch = []
        if point[1] is None:
            kept.append(point)
    return [*kept, max(stretch, key=lambda item: item[1] or 0.0)] if stretch else kept


def _range(values: list[float | None]) -> tuple[float, float]:
    """From 0 to a little above the highest value, so that nothing touches the upper edge."""
    return 0.0, 1.06 * max((value for value in values if value is not None), default=0.0) or 1.0


def _ticks(end: float) -> list[float]:
    """Four to eight round steps from 0 to `end`."""
    step = next(
        (base * 10**power for power in range(-1, 9) for base in (1, 2, 5) if end <= 8 * base * 10**power), end
    )
    return [round(number * step, 3) for number in range(int(end / step) + 1)] if step else [0]


def _bar(bar: Bar | None) -> Any:
    if bar is None:
        return None
    if bar.low is None or bar.high is None or bar.low == bar.high:
        return bar.value
    return {"value": bar.value, "ci": {"low": bar.low, "high": bar.high}}


def _chart(kind: str, **options: Any) -> Any:
    # imported late: only a page with charts pays for it
    try:
        import pygal
        from pygal.style import Style
    except ImportError as error:
        raise NoLibrary(str(error)) from None
    return getattr(pygal, kind)(
        width=WIDTH,
        height=HEIGHT,
        margin=6,
        spacing=6,
        css=[],
        js=[],
        style=Style(label_font_size=FONT, major_label_font_size=FONT),
        show_legend=False,
        include_x_axis=True,
        zero=0,
        min_scale=3,
        max_scale=6,
        formatter=lambda value: json.dumps(value),
        **options,
    )


def _svg(chart: Any, names: list[str], unit: str) -> str:
    """The chart as inline SVG: shapes and texts only. Shapes of the series in `names` get their values."""
    root = ElementTree.fromstring(chart.render(disable_xml_declaration=True, is_unicode=True))
    for element in root.iter():
        element.tag = str(element.tag).partition("}")[2] or element.tag
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("defs", "style", "script") or "tooltip-overlay" in child.get("class", ""):
                parent.remove(child)
    for number, name in enumerate(names):
        for group in root.iter("g"):
            if f"serie-{number}" in group.get("class", "").split():
                _name_shapes(group, name, unit)
    for element in root.iter():
        for name in ("style", "id"):
            element.attrib.pop(name, None)
        for child in list(element):
            if child.tag == "desc" or (child.tag == "title" and element.tag in ("g", "svg")):
                element.remove(child)
        for name in ("x", "y", "width", "height", "cx", "cy"):
            if name in element.attrib:
                element.set(name, f"{float(element.get(name, '0')):.1f}")
    root.attrib = {"class": "chart", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"}
    return ElementTree.tostring(root, encoding="unicode")


def _name_shapes(series: ElementTree.Element, name: str, unit: str) -> None:
    """The value beside a shape becomes what the shape is called."""
    for group in series.iter("g"):
        told = {child.get("class"): child.text or "" for child in group if child.tag == "desc"}
        shape = next((child for child in group if child.tag in ("rect", "circle")), None)
        if shape is not None and "value" in told:
            title = ElementTree.SubElement(shape, "title")
            title.text = f"{name} · {told.get('x_label', '')}: {told['value']} {unit}".rstrip()
