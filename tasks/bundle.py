"""What travels to a host besides the engine: onhost programs, locks, manifests; one folder a version."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tasks.paths import ONHOST, TOOLS_LOCK, UV_LOCK
from tasks.recipe import Recipe
from tasks.remote import Remote, quote, tar_base64

KEPT_VERSIONS = 3


@dataclass(frozen=True)
class Bundle:
    """The files by name, with their modes, and the digest that names their folder."""

    files: dict[str, tuple[bytes, int]]
    digest: str

    def folder(self, lib: str) -> str:
        """Where this version lies on the host."""
        return f"{lib}/{self.digest[:16]}"


def bundle_for(recipe: Recipe) -> Bundle:
    """The onhost programs, the tools lock, and the recipe's lock and manifest."""
    files = {
        path.name: (path.read_bytes(), 0o755 if path.suffix == ".sh" else 0o644)
        for path in sorted(ONHOST.iterdir())
        if path.suffix in (".py", ".sh")
    }
    files["tools.lock"] = (TOOLS_LOCK.read_bytes(), 0o644)
    files["uv.lock"] = (UV_LOCK.read_bytes(), 0o644)
    if recipe.engine.source and recipe.engine.source.lock:
        files["source.lock"] = (recipe.beside(recipe.engine.source.lock).read_bytes(), 0o644)
    if recipe.engine.wheel:
        own = "".join(wheel.lock_line for wheel in recipe.engine.wheel.wheels)
        files["engine.lock"] = (recipe.beside(recipe.engine.wheel.lock).read_bytes() + own.encode(), 0o644)
    generate = recipe.model.sources.generate
    data = (ONHOST / generate.program).with_suffix(".safetensors") if generate else None
    if data and data.is_file():
        files[data.name] = (data.read_bytes(), 0o644)
    if recipe.model.manifest:
        files["model.sha256"] = (recipe.beside(recipe.model.manifest).read_bytes(), 0o644)
    digest = hashlib.sha256()
    for name, (content, mode) in sorted(files.items()):
        digest.update(f"{name}\0{mode}\0{len(content)}\0".encode() + content)
    return Bundle(files, digest.hexdigest())


def ship(remote: Remote, bundle: Bundle, lib: str) -> str | None:
    """Put the bundle on the host in one command; the folder appears whole or not at all.

    Returns why it failed, or None.
    """
    folder, new = quote(bundle.folder(lib)), quote(bundle.folder(lib) + ".new")
    root = quote(lib.rsplit("/", 1)[0])
    script = (
        f"if [ -f {folder}/.whole ]; then cat >/dev/null; exit 0; fi\n"
        f"mkdir -p {root} && : >{root}/.rackwright && rm -rf {new} && mkdir -p {new}"
        f" && base64 -d | tar -xzf - -C {new} && : >{new}/.whole && rm -rf {folder} && mv {new} {folder}"
        f" && mkdir -p {root}/tmp {root}/run {root}/logs {root}/receipts {root}/cache/home\n"
        # a job of the version before may still run; older ones are of no use
        f"rc=$?; ls -1dt {quote(lib)}/*/ | tail -n +{KEPT_VERSIONS + 1} | while IFS= read -r old; do"
        ' rm -rf "$old"; done; exit $rc'
    )
    done = remote.run(script, stdin=tar_base64(bundle.files), timeout=180)
    return None if done.ok else (done.stderr.strip() or f"exit code {done.rc}")
