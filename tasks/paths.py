"""Where the project's own files lie on the controller."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPLOYS = ROOT / "deploys"
INVENTORIES = ROOT / "inventories"
RECIPES = INVENTORIES / "recipes"
TEMPLATES = ROOT / "templates"
ONHOST = ROOT / "tasks" / "onhost"
TOOLS_LOCK = ROOT / "requirements" / "tools.lock"
UV_LOCK = ROOT / "requirements" / "uv.lock"
MINIFORGE = ROOT / "requirements" / "miniforge.toml"


def host_folder(reports: str, host: str) -> Path:
    """Where the reports of one host lie; `reports` is the site's folder, relative to the project's."""
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in host).strip("_.")
    return ROOT / reports / (name or "host")
