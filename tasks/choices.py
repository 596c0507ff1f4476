"""One host's settings and recipe, checked together; shared by the guard and the deploys."""

from __future__ import annotations

from typing import Any

from tasks.mistakes import Mistakes, nearest
from tasks.recipe import Recipe, load_recipe
from tasks.settings import Settings, settings_from


def choices_of(host: Any, file: str = "") -> tuple[Settings, Recipe]:
    """What a pyinfra host's data asks for, valid.

    `file` is the inventory's name, for the error. Raises Mistakes with every mistake.
    """

    def where(key: str) -> str:
        place = origin(host, key)
        return f"{file}: {place}" if file else place

    data = host.data.dict()
    lines: list[str] = []
    settings = recipe = None
    try:
        settings = settings_from(data, where)
    except Mistakes as mistakes:
        lines += mistakes.lines
    try:
        if isinstance(data.get("recipe"), str):
            recipe = load_recipe(data["recipe"])
    except Mistakes as mistakes:
        lines += [
            f"{where('recipe')}: {line}" if line.startswith("recipe =") else line for line in mistakes.lines
        ]
    mode, route = data.get("mode"), data.get("route")
    if recipe and isinstance(mode, str) and mode not in recipe.serve.modes:
        lines.append(
            f"{where('mode')}: mode = {mode!r}: {recipe.name} has no such mode; "
            + nearest(mode, recipe.serve.modes)
        )
    if recipe and settings and route is not None and route not in recipe.engine.routes():
        lines.append(
            f"{where('route')}: route = {route!r}: {recipe.name} has no such route; "
            f"allowed: {', '.join(recipe.engine.routes())}"
        )
    if lines or settings is None or recipe is None:
        raise Mistakes(lines)
    return settings, recipe


def origin(host: Any, key: str) -> str:
    """Where a host's setting was given (pyinfra's order of look-up), for the error about it."""
    names = ("set by a deploy", "--data", f"host {host.name}", "group data", "group data of all")
    for name, data in zip(names, host.data.datas, strict=False):
        values = data() if callable(data) else data
        if key and key in values:
            return name
    return f"host {host.name}"
