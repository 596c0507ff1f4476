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
