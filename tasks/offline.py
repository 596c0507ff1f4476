"""A host that uses a bundle and nothing else. What a bundle is and how it is made: `tasks/bundling.py`.

The bundle lies on the host (a mounted disk), or on the controller: then what this host's route needs is sent
once, into `<root>/cache/bundle`. Nothing in it is trusted: locks and pins decide when it is used.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tasks.digest import digest_of_file
from tasks.engines.wheelhouse import Entry, list_script, parse_list
from tasks.jobs import in_units
from tasks.plan import Plan, Stop
from tasks.remote import quote, tar_base64
from tasks.shipping import NotShipped, send_file

MANIFEST = "manifest.json"
# smaller files travel together, in one command of about this size
SMALL = 4 << 20
# which parts of a bundle a route uses
PARTS = {
    "wheel": {"tools", "engine", "miniforge"},
    "source": {"tools", "engine", "source", "built", "miniforge"},
    "docker": {"tools", "images"},
}


@dataclass(frozen=True)
class HostBundle:
    """A bundle where the host can read it: `root` is its folder there."""

    root: str
    manifest: dict[str, Any]
    built: tuple[Entry, ...]

    @property
    def wheels(self) -> str:
        """Every wheel: the engine's lock, the tools, uv, pinned ones."""
        return f"{self.root}/wheels"

    def source(self, package: str) -> tuple[str | None, str | None]:
        """The source's archive and the folder of its dependencies' archives, where the bundle has them."""
        path = f"source/{package}.tar"
        if not any(item["path"] == path for item in self.manifest["files"]):
            return None, None
        return f"{self.root}/{path}", f"{self.root}/source/deps"

    def images(self) -> list[dict[str, str]]:
        """Image archives: `path` on the host and the `sha256` that it must have."""
        items = [item for item in self.manifest["files"] if item["part"] == "images"]
        return [{"path": f"{self.root}/{item['path']}", "sha256": str(item["sha256"])} for item in items]


_of_plan: WeakKeyDictionary[Plan, HostBundle] = WeakKeyDictionary()


def bundle_of(plan: Plan) -> HostBundle | None:
    """The site's bundle on this host, None where the site names none.

    Raises Stop when it is nowhere, damaged, or does not arrive whole; LostHost.
    """
    path = plan.settings.bundle
    if path is None:
        return None
    if plan not in _of_plan:
        _of_plan[plan] = _on_host(plan, path) or _sent(plan, Path(path))
    return _of_plan[plan]


def read_manifest(text: str, where: str) -> dict[str, Any]:
    """A bundle's manifest. Raises Stop when it is none, or names files outside of the bundle."""
    try:
        manifest: dict[str, Any] = json.loads(text)
        names = [item["path"] for item in manifest["files"]]
        good = all(
            {"path", "bytes", "sha256", "part"} <= set(item) for item in manifest["files"]
        ) and not any(name.startswith("/") or ".." in name.split("/") for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise Stop(f"{where}/{MANIFEST} is not a bundle's manifest\nFix: make the bundle anew")
    return manifest


def _on_host(plan: Plan, path: str) -> HostBundle | None:
    found = plan.remote.run(f"[ -f {quote(path)}/{MANIFEST} ] && base64 <{quote(path)}/{MANIFEST} || :")
    if not found.stdout.strip():
        return None
    manifest = read_manifest(base64.b64decode(found.stdout).decode("utf-8", "replace"), path)
    return HostBundle(path, manifest, _built(plan, path, manifest))


def _built(plan: Plan, root: str, manifest: dict[str, Any]) -> tuple[Entry, ...]:
    """Finished builds of this bundle; an earlier one may have left others."""
    found = parse_list(plan.remote.run(list_script(f"{root}/built")).stdout)
    paths = {str(item["path"]) for item in manifest["files"]}
    return tuple(entry for entry in found if f"built/{entry.id}/{entry.wheel}" in paths)


def _sent(plan: Plan, here: Path) -> HostBundle:
    """Send what this route needs, once: a stamp with the manifest's digest ends a whole transfer."""
    if not (here / MANIFEST).is_file():
        raise Stop(
            f"bundle = {str(here)!r}: no {MANIFEST} there, neither on {plan.name} nor here\n"
            f"Fix: rackwright bundle {plan.recipe.name} --output {here}"
        )
    manifest = read_manifest((here / MANIFEST).read_text("utf-8"), str(here))
    dest = f"{plan.layout.root}/cache/bundle"
    mark = f".whole-{digest_of_file(here / MANIFEST)[:16]}"
    stamp = f"{dest}/{mark}-{plan.route}"
    wanted = [item for item in manifest["files"] if item["part"] in PARTS[plan.route]]
    there = _there(plan, dest, mark)
    if f"{mark}-{plan.route}" not in there or _missing(wanted, there):
        plan.say(
            f"bundle: sending {len(wanted)} files,"
            f" {in_units(sum(int(item['bytes']) for item in wanted), 'bytes')}"
        )
        try:
            _send_all(plan, here, dest, wanted, there)
        except (NotShipped, OSError) as failure:
            raise Stop(
                f"the bundle does not arrive whole: {failure}\nFix: make it anew, then run again"
            ) from failure
        text = (here / MANIFEST).read_bytes()
        done = plan.remote.run(
            f"base64 -d >{quote(dest)}/{MANIFEST} && : >{quote(stamp)}", stdin=base64.b64encode(text).decode()
        )
        if not done.ok:
            raise Stop(f"cannot write {dest}: {done.stderr.strip()}\nFix: free space there")
    return HostBundle(dest, manifest, _built(plan, dest, manifest))


def _there(plan: Plan, dest: str, mark: str) -> dict[str, int]:
    """Sizes of the files of a bundle on the host. Stamps of other bundles than `mark` go."""
    listed = plan.remote.run(
        f"mkdir -p {quote(dest)} && cd {quote(dest)}"
        f" && find . -maxdepth 1 -name '.whole-*' ! -name {quote(mark + '-*')} -exec rm -f {{}} +"
        " && find . -type f -printf '%s %P\\n'",
        timeout=120,
    )
    if not listed.ok:
        raise Stop(f"cannot write {dest}: {listed.stderr.strip()}\nFix: free space there")
    sizes = [line.split(" ", 1) for line in listed.stdout.splitlines()]
    return {path: int(size) for size, path in sizes}


def _missing(wanted: list[dict[str, Any]], there: dict[str, int]) -> list[dict[str, Any]]:
    """What is not there with its size."""
    return [item for item in wanted if there.get(str(item["path"])) != int(item["bytes"])]


def _send_all(plan: Plan, here: Path, dest: str, wanted: list[dict[str, Any]], there: dict[str, int]) -> None:
    """Send what is not there with its size, hash everything, send once more what is another file."""
    _send(plan, here, dest, _missing(wanted, there))
    wrong = _wrong(plan, dest, wanted)
    if wrong:
        _send(plan, here, dest, [item for item in wanted if item["path"] in wrong])
        wrong = _wrong(plan, dest, [item for item in wanted if item["path"] in wrong])
    if wrong:
        plan.remote.run(f"cd {quote(dest)} && rm -f " + " ".join(quote(path) for path in sorted(wrong)))
        raise NotShipped(f"{', '.join(sorted(wrong)[:5])}: not the bytes that the manifest names")


def _send(plan: Plan, here: Path, dest: str, items: list[dict[str, Any]]) -> None:
    """Large files one by one, small ones together. Raises NotShipped, OSError."""
    group: dict[str, tuple[bytes, int]] = {}
    for item in [*sorted(items, key=lambda item: int(item["bytes"])), None]:
        size = sum(len(content) for content, _ in group.values())
        if group and (item is None or size + int(item["bytes"]) > SMALL):
            done = plan.remote.run(
                f"cd {quote(dest)} && base64 -d | tar -xzf -", stdin=tar_base64(group), timeout=300
            )
            if not done.ok:
                raise NotShipped(done.stderr.strip())
            group = {}
        if item is None:
            break
        path = str(item["path"])
        if int(item["bytes"]) > SMALL:
            send_file(plan.remote, here / path, f"{dest}/{path}", str(item["sha256"]), plan.say)
        else:
            group[path] = ((here / path).read_bytes(), 0o644)


def _wrong(plan: Plan, dest: str, items: list[dict[str, Any]]) -> set[str]:
    """Paths whose bytes on the host are not the manifest's. Raises NotShipped when that cannot be told."""
    done = plan.remote.run(
        f"cd {quote(dest)} && sha256sum --check --quiet - 2>&1",
        stdin="".join(f"{item['sha256']}  {item['path']}\n" for item in items),
        timeout=3600,
    )
    lines = [line.rpartition(": FAILED")[0] for line in done.stdout.splitlines()]
    wrong = {line for line in lines if line}
    if not done.ok and not wrong:
        raise NotShipped(f"it cannot be hashed on {plan.name}: {(done.stdout or done.stderr).strip()[-200:]}")
    return wrong
