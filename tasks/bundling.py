"""The offline bundle: one folder with everything that a host needs, made where there is a network.

    wheels/          the engine's lock, the tools' lock, uv, wheels that the recipe names by hash
    source/          the source as a tar of a clone, deps/ its build-time dependencies likewise
    built/           finished builds of this commit from the wheelhouse
    miniforge/       the pinned installer
    images/          the engine's image (`docker save`)
    manifest.json    every file with its size, SHA-256 and part; written last

Making it again goes on where it was: what is there and right is not fetched again. Beside it FOLDER.work
keeps the clones that the archives were made from; it can go when the bundle is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import __version__
from tasks.digest import digest_of_file
from tasks.endpoints import PYTORCH_INDEX
from tasks.engines.wheelhouse import entries_here, sums_of
from tasks.jobs import in_units
from tasks.mistakes import Mistakes
from tasks.offline import MANIFEST
from tasks.onhost.wheel_lock import Pin, batches, parse_lock, wheel_identity
from tasks.paths import MINIFORGE, ONHOST, ROOT, TOOLS_LOCK, UV_LOCK
from tasks.recipe import ROUTES, DockerRoute, Recipe, SourceRoute, WheelRoute, load_recipe
from tasks.redact import redact
from tasks.writable import no_folder

# wheels of the locks run on this glibc and newer ones
GLIBC_MINOR = 31
# minor versions of CPython 3 whose wheels the tools' lock can name: it was made for the oldest
PYTHONS = range(10, 16)
_URL = re.compile(r"\w+://\S")
LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


class Failed(Exception):
    """The bundle cannot be made; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Piece:
    """Something that belongs into a bundle. `bytes` None: known only when it is there."""

    path: str
    part: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Options:
    """How a bundle is made."""

    out: Path
    route: str
    pythons: tuple[str, ...]
    index_url: str | None
    extra_index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    mirrors: tuple[tuple[str, str], ...]
    wheelhouse: Path
    docker: str
    without: tuple[str, ...] = ()


def platform_options(machine: str = "x86_64") -> list[str]:
    """pip options that accept wheels for the oldest glibc that the locks support, and older ones."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 4, -1)]
    tags += [f"{legacy}_{machine}" for legacy in LEGACY] + [f"linux_{machine}"]
    return [word for tag in tags for word in ("--platform", tag)]


def locks_of(recipe: Recipe, route: str, wheelhouse: Path) -> list[tuple[str, str]]:
    """(part, text of a lock) for every lock that the route installs from."""
    pins = recipe.route(route)
    found = [("tools", TOOLS_LOCK.read_text("utf-8"))]
    if isinstance(pins, WheelRoute):
        found.append(("engine", recipe.beside(pins.lock).read_text("utf-8")))
    if isinstance(pins, SourceRoute):
        found.append(("engine", UV_LOCK.read_text("utf-8")))
        if pins.lock:
            found.append(("engine", recipe.beside(pins.lock).read_text("utf-8")))
        for entry in entries_here(wheelhouse):
            if entry.key.get("commit") == pins.commit:
                found.append(("engine", (Path(entry.place) / "engine.lock").read_text("utf-8")))
    return found


def fixed_pieces(recipe: Recipe, route: str, wheelhouse: Path) -> list[Piece]:
    """What is known before anything is fetched, for `--dry`."""
    pins = recipe.route(route)
    pieces: dict[str, Piece] = {}
    for part, text in locks_of(recipe, route, wheelhouse):
        for pin in parse_lock(text):
            path = f"wheels/{pin.file or f'{pin.name}-{pin.version}-*.whl'}"
            digest = pin.hashes[0] if len(pin.hashes) == 1 else None
            pieces.setdefault(path, Piece(path, part, pin.size or None, digest))
    if not isinstance(pins, DockerRoute):
        forge = miniforge()
        path = f"miniforge/{forge['file']}"
        pieces[path] = Piece(path, "miniforge", int(forge["bytes"]), str(forge["sha256"]))
    if not isinstance(pins, DockerRoute):
        for wheel in pins.wheels:
            path = f"wheels/{wheel.file}"
            pieces[path] = Piece(path, "engine", wheel.bytes, wheel.sha256)
    if isinstance(pins, SourceRoute):
        pieces["source"] = Piece(f"source/{pins.package}.tar", "source")
        pieces["deps"] = Piece("source/deps/*.tar", "source")
        for entry in entries_here(wheelhouse):
            if entry.key.get("commit") == pins.commit:
                path = f"built/{entry.id}/{entry.wheel}"
                pieces[path] = Piece(path, "built", entry.bytes, entry.sha256)
    if isinstance(pins, DockerRoute):
        path = f"images/{image_file(pins.image)}"
        pieces[path] = Piece(path, "images", pins.image_bytes)
    return list(pieces.values())


def miniforge() -> dict[str, Any]:
    """The pinned installer."""
    return tomllib.loads(MINIFORGE.read_text("utf-8"))


def wheel_of(pin: Pin, sums: dict[str, str]) -> str | None:
    """The file, of those with these sums, that is the pin's wheel and has a wheel's name."""
    return next(
        (name for name, digest in sums.items() if digest in pin.hashes and wheel_identity(name)), None
    )


def image_file(image: str) -> str:
    """File name of an image's archive."""
    return re.sub(r"[^\w.-]+", "_", image) + ".tar"


def table(rows: Iterable[tuple[str, int, int | None]]) -> str:
    """(part, files, bytes) as a table with a total."""
    lines = [
        (part, str(files), "?" if size is None else in_units(size, "bytes")) for part, files, size in rows
    ]
    width = max((len(part) for part, _, _ in lines), default=4)
    return "\n".join(
        f"  {part.ljust(width)}  {files.rjust(5)}  {size.rjust(9)}" for part, files, size in lines
    )


class Bundler:
    """Fetches what belongs into a bundle, part by part."""

    def __init__(self, recipe: Recipe, options: Options, say: Callable[[str], None]) -> None:
        self.recipe, self.options, self.say = recipe, options, say
        self.out = options.out
        self.parts: dict[str, str] = {}
        self.saved: dict[str, object] | None = None

    def make(self) -> dict[str, Any]:
        """Everything, then the manifest. Raises Failed."""
        pins = self.recipe.route(self.options.route)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / MANIFEST).unlink(missing_ok=True)  # until it is whole again it is no bundle
        for part, text in locks_of(self.recipe, self.options.route, self.options.wheelhouse):
            if part in self.options.without:
                continue
            pythons = self.options.pythons if part == "tools" else (_python_of(pins),)
            for python in dict.fromkeys(pythons):
                self.wheels(part, parse_lock(text), python, pins)
        if isinstance(pins, WheelRoute | SourceRoute):
            self.files("engine", "wheels", [wheel.model_dump() for wheel in pins.wheels])
        if isinstance(pins, SourceRoute):
            if "source" not in self.options.without:
                self.source(pins)
            if "built" not in self.options.without:
                self.built(pins)
        if isinstance(pins, DockerRoute):
            self.image(pins)
        elif "miniforge" not in self.options.without:
            self.files("miniforge", "miniforge", [miniforge()])
        return self.manifest()

    def wheels(self, part: str, pins: list[Pin], python: str, route: object) -> None:
        """The wheels of one lock for one Python, through pip, each with its hash."""
        folder = self.out / "wheels"
        folder.mkdir(exist_ok=True)
        chosen = [pin for pin in pins if marker_holds(pin.marker, python)]
        have = self._known(folder)
        missing = [pin for pin in chosen if wheel_of(pin, have) is None]
        at_hand = self._at_hand()
        near = [pin for pin in missing if (pin.name, pin.version) in at_hand]
        for group in batches(near):
            # what lies in a folder needs no index, and a wrong file there is no reason to stop
            self._pip(group, python, ["--no-index"], folder)
        have = self._known(folder)
        missing = [pin for pin in missing if wheel_of(pin, have) is None]
        done = len(chosen) - len(missing)
        for group in batches(missing):
            self.say(f"wheels for {part}, Python {python}: {done} of {len(chosen)}: {group[0].name}")
            self._group(group, python, route, folder)
            done += len(group)
        have = self._known(folder)
        for pin in chosen:
            file = wheel_of(pin, have)
            if file is None:
                raise Failed(f"pip brought no right wheel for {pin.label}\nFix: run again")
            self.parts.setdefault(f"wheels/{file}", part)

    def _known(self, folder: Path) -> dict[str, str]:
        """SHA-256 of every file of a folder, by name; hashes are kept beside, by path, size and time."""
        cache_file = self.out / ".sums.json"
        try:
            cache = json.loads(cache_file.read_text("utf-8"))
        except (OSError, ValueError):
            cache = {}
        found, fresh = {}, {}
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.endswith(".part"):
                stat = path.stat()
                key = f"{path.relative_to(self.out)} {stat.st_size} {stat.st_mtime_ns}"
                fresh[key] = cache.get(key) or digest_of_file(path)
                found[path.name] = fresh[key]
        cache_file.write_text(json.dumps({**cache, **fresh}), "utf-8")
        return found

    def _at_hand(self) -> set[tuple[str, str]]:
        """Name and version of every wheel in the find-links folders."""
        folders = [Path(place) for place in self.options.find_links if Path(place).is_dir()]
        found = {wheel_identity(path.name) for folder in folders for path in folder.iterdir()}
        return {one for one in found if one}

    def _group(self, group: list[Pin], python: str, route: object, folder: Path) -> None:
        """One group from the index; what it does not have, one by one, from the extra ones. Raises Failed."""
        index = ["--index-url", self.options.index_url] if self.options.index_url else []
        why = self._pip(group, python, index, folder)
        if why is None:
            return
        if len(group) > 1:
            for pin in group:
                self._group([pin], python, route, folder)
            return
        for url in (*self.options.extra_index_urls, *_indexes_of(route)):
            again = self._pip(
                group, python, ["--index-url", url, "--retries", "1", "--timeout", "15"], folder
            )
            if again is None:
                return
            why = f"{why}; {again}"
        raise Failed(f"pip cannot download {group[0].label}: {why}\nFix: make the index reachable")

    def _pip(self, group: list[Pin], python: str, index: list[str], folder: Path) -> str | None:
        """One pip call; None when it brought everything, else its last words."""
        incoming = self.out / ".incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        wanted = incoming / "wanted.txt"
        lines = [f"{pin.label} " + " ".join(f"--hash=sha256:{one}" for one in pin.hashes) for pin in group]
        wanted.write_text("\n".join(lines) + "\n", "utf-8")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        argv += ["--only-binary", ":all:", "--require-hashes", "--dest", str(incoming)]
        argv += ["--python-version", python, "--implementation", "cp", *platform_options()]
        argv += ["--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
        argv += ["--requirement", str(wanted), "--disable-pip-version-check", "--progress-bar", "off", *index]
        for place in self.options.find_links:
            argv += ["--find-links", place]
        env = {**os.environ, "PIP_CONSTRAINT": os.devnull}
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        for path in incoming.glob("*.whl"):
            if wheel_identity(path.name):
                path.replace(folder / path.name)
        shutil.rmtree(incoming)
        if done.returncode == 0:
            return None
        last = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return " | ".join(last[-3:])

    def files(self, part: str, folder: str, wanted: list[dict[str, Any]]) -> None:
        """Files by hash, from their addresses."""
        if not wanted:
            return
        request = {
            "files": [{key: one.get(key) for key in ("file", "sha256", "bytes", "urls")} for one in wanted],
            "dest": str(self.out / folder),
            "near": [place for place in self.options.find_links if place.startswith("/")],
            "mirrors": [list(pair) for pair in self.options.mirrors],
        }
        self._onhost("fetch_files.py", request)
        for one in wanted:
            self.parts[f"{folder}/{one['file']}"] = part

    def source(self, pins: SourceRoute) -> None:
        """The source and its dependencies, each as a tar of a clone."""
        work = self.out.with_name(self.out.name + ".work")
        answer = self._onhost(
            "fetch_source.py",
            {
                "repo": pins.repo,
                "commit": pins.commit,
                "ref": pins.tag,
                "dest": str(work / pins.package),
                "deps": str(work / "deps"),
                "mirrors": [list(pair) for pair in self.options.mirrors],
                "target": pins.env.get("VLLM_TARGET_DEVICE", "cuda"),
                "skip": pins.skip_dependencies,
                "pins": pins.dependencies,
            },
        )
        (self.out / "source" / "deps").mkdir(parents=True, exist_ok=True)
        targets = {f"source/{pins.package}.tar": work / pins.package}
        for one in answer["dependencies"]:
            folder = Path(one["path"])
            targets[f"source/deps/{folder.name}.tar"] = folder
        for path, folder in targets.items():
            self.say(f"packing {path}")
            tar_of(folder, self.out / path)
            self.parts[path] = "source"

    def built(self, pins: SourceRoute) -> None:
        """Builds of this commit that the wheelhouse has, each as its provenance says. Raises Failed."""
        for entry in entries_here(self.options.wheelhouse):
            if entry.key.get("commit") != pins.commit:
                continue
            dest = self.out / "built" / entry.id
            dest.mkdir(parents=True, exist_ok=True)
            for name, digest in sums_of(entry).items():
                shutil.copyfile(Path(entry.place) / name, dest / name)
                if digest_of_file(dest / name) != digest:
                    (dest / name).unlink()
                    raise Failed(
                        f"{entry.place}/{name} is not what was built: its provenance says SHA-256 {digest}\n"
                        f"Fix: copy that folder anew from where it was built, or remove it"
                    )
                self.parts[f"built/{entry.id}/{name}"] = "built"

    def image(self, pins: DockerRoute) -> None:
        """The image, as docker saves it."""
        name = f"{pins.image.split('@')[0].rpartition(':')[0]}@{pins.digest}" if pins.digest else pins.image
        path = self.out / "images" / image_file(pins.image)
        path.parent.mkdir(exist_ok=True)
        self.parts[f"images/{path.name}"] = "images"
        docker = self.options.docker
        seen = self._seen(pins.image)
        if seen is None or _other_than(pins, *seen):
            self.say(f"pulling {name}")
            pulled = subprocess.run([docker, "pull", name], stdin=subprocess.DEVNULL, stdout=sys.stderr)
            if pulled.returncode:
                raise Failed(f"{name} cannot be pulled\nFix: {pins.replacement or 'see the lines above'}")
            if pins.digest:
                subprocess.run([docker, "tag", name, pins.image], check=True)
            seen = self._seen(pins.image)
        wrong = f"{pins.image} is not here" if seen is None else _other_than(pins, *seen)
        if seen is None or wrong:
            raise Failed(f"{wrong}\nFix: find out who changed it; pull it by digest")
        identity, digests = seen
        if not (pins.digest or pins.image_id):
            self.say(f"the recipe pins no digest; {pins.image} is {', '.join(digests) or identity}")
        self.saved = {"image": pins.image, "id": identity, "digests": digests}
        if path.is_file() and identity in ids_in(path):
            return
        self.say(f"saving {pins.image}")
        part = path.with_name(path.name + ".part")
        saved = subprocess.run(
            [docker, "save", "--output", str(part), pins.image], capture_output=True, text=True
        )
        if saved.returncode:
            raise Failed(f"docker save: {saved.stderr.strip()}\nFix: free space in {self.out}")
        part.replace(path)

    def _seen(self, image: str) -> tuple[str, list[str]] | None:
        """Id and registry digests (REPOSITORY@DIGEST) of an image that docker has."""
        argv = [self.options.docker, "image", "inspect", "--format", "{{json .}}", image]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            return None
        data = json.loads(done.stdout)
        return str(data["Id"]), [str(one) for one in data.get("RepoDigests") or []]

    def _onhost(self, program: str, request: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(ONHOST / program), "--stdin"],
            input=json.dumps(request), capture_output=True, text=True,
        )  # fmt: skip
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise Failed(f"{program}: {done.stderr.strip()[-400:]}") from None
        if "error" in answer:
            raise Failed(f"{answer['error']['what']}\nFix: {answer['error']['fix']}")
        return answer

    def manifest(self) -> dict[str, Any]:
        """Hash every file, drop what does not belong, write the manifest last."""
        files = []
        for folder in sorted({path.rsplit("/", 1)[0] for path in self.parts}):
            sums = self._known(self.out / folder)
            for path, part in sorted(self.parts.items()):
                if path.rsplit("/", 1)[0] == folder:
                    size = (self.out / path).stat().st_size
                    files.append({"path": path, "bytes": size, "sha256": sums[Path(path).name], "part": part})
        manifest = {
            "schema": 1,
            "tool": f"rackwright {__version__}",
            "recipe": self.recipe.name,
            "recipe_digest": self.recipe.digest,
            "route": self.options.route,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": files,
            **({"image": self.saved} if self.saved else {}),
        }
        fresh = self.out / (MANIFEST + ".part")
        fresh.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        fresh.replace(self.out / MANIFEST)
        return manifest


def ids_in(archive: Path) -> set[str]:
    """The ids under which Docker may know the images of a `docker save` archive; none when it is damaged.

    That is the digest of the image's configuration, or with containerd's store the one that the archive's
    index names.
    """
    try:
        with tarfile.open(archive) as tar:
            found = set()
            for name in {"manifest.json", "index.json"} & set(tar.getnames()):
                content = tar.extractfile(name)
                data: Any = json.load(content) if content else []
                if name == "index.json":
                    found |= {str(one["digest"]) for one in data["manifests"]}
                else:
                    configs = [Path(str(one["Config"])).name.removesuffix(".json") for one in data]
                    found |= {f"sha256:{config}" for config in configs}
            return found
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError):
        return set()


def tar_of(folder: Path, path: Path) -> None:
    """A tar of a clone, byte for byte the same for the same clone; `.git/index` and marks stay out."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name.endswith(("/.git/index", "/.git/rackwright-whole", "/.git/FETCH_HEAD")):
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as tar:
        tar.add(folder, arcname=folder.name, filter=plain)
    part.replace(path)


def marker_holds(marker: str, python: str) -> bool:
    """Whether a lock's marker holds for CPython of this version on Linux x86_64."""
    if not marker:
        return True
    from pip._vendor.packaging.markers import Marker

    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    return bool(Marker(marker).evaluate(environment))


def _python_of(pins: WheelRoute | SourceRoute | DockerRoute) -> str:
    return "3.11" if isinstance(pins, DockerRoute) else pins.python


def _other_than(pins: DockerRoute, identity: str, digests: list[str]) -> str | None:
    """Why an image is not the one of the pins; None when it is, and when nothing is pinned."""
    if pins.image_id and identity != pins.image_id:
        return f"{pins.image} has id {identity}, the recipe pins {pins.image_id}"
    if pins.digest and not any(one.endswith(f"@{pins.digest}") for one in digests):
        return f"{pins.image} has digest {', '.join(digests) or 'none'}, the recipe pins {pins.digest}"
    return None


def _indexes_of(route: object) -> list[str]:
    if isinstance(route, WheelRoute):
        return route.extra_index_urls
    if isinstance(route, SourceRoute) and route.torch_backend:
        return [PYTORCH_INDEX + route.torch_backend]
    return []


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="rackwright bundle",
        description="Write everything that a host needs into one folder, for `--data bundle=FOLDER`.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a .toml of your own")
    parser.add_argument("--route", choices=ROUTES, help="engine route (default: the recipe's)")
    parser.add_argument("--output", type=Path, help="folder (default: bundles/RECIPE-ROUTE)")
    parser.add_argument("--dry", action="store_true", help="list files and bytes, fetch nothing")
    parser.add_argument(
        "--python", action="append", default=[], metavar="3.N",
        help="Python of the hosts' tools environment (default: the engine's and 3.10 to 3.13)",
    )  # fmt: skip
    parser.add_argument(
        "--without", action="append", default=[], choices=("tools", "miniforge", "source", "built"),
        help="leave a part out, where the hosts have it or do not need it",
    )  # fmt: skip
    parser.add_argument("--index-url", help="package index")
    parser.add_argument("--extra-index-url", action="append", default=[], help="one more index")
    parser.add_argument("--find-links", action="append", default=[], help="a folder or page with wheels")
    parser.add_argument(
        "--mirror", action="append", default=[], metavar="PREFIX=REPLACEMENT", help="addresses to try first"
    )
    parser.add_argument("--wheelhouse", type=Path, help="folder of finished builds (default: wheelhouse)")
    parser.add_argument("--docker", default="docker", help="the docker program")
    given = parser.parse_args(argv)
    if wrong := impossible(given):
        parser.error("; ".join(wrong))
    given.wheelhouse = given.wheelhouse or ROOT / "wheelhouse"
    return given


def impossible(given: argparse.Namespace) -> list[str]:
    """What of the command line cannot work, found before anything is fetched."""
    wrong = []
    for pair in given.mirror:
        prefix, _, replacement = pair.partition("=")
        if not _URL.match(prefix) or not (_URL.match(replacement) or replacement.startswith("/")):
            wrong.append(f"--mirror {pair}: must be PREFIX=REPLACEMENT: a URL, and a URL or an absolute path")
    for python in given.python:
        minor = re.fullmatch(r"3\.([0-9]{1,3})", python)
        if not minor or int(minor[1]) not in PYTHONS:
            wrong.append(f"--python {python}: must be 3.N from 3.{PYTHONS[0]} to 3.{PYTHONS[-1]}")
    for flag, urls in (("--index-url", [given.index_url]), ("--extra-index-url", given.extra_index_url)):
        wrong += [f"{flag} {url}: must be a URL" for url in urls if url is not None and not _URL.match(url)]
    for place in given.find_links:
        if not _URL.match(place) and not Path(place).is_dir():
            wrong.append(f"--find-links {place}: neither a folder nor a URL")
    if given.wheelhouse and not given.wheelhouse.is_dir():
        wrong.append(f"--wheelhouse {given.wheelhouse}: no such folder")
    if given.docker != "docker" and not shutil.which(given.docker):
        wrong.append(f"--docker {given.docker}: no such program")
    if given.output and given.output.absolute() == Path("/"):
        wrong.append(f"--output {given.output}: name a folder in it")
    return [str(redact(line)) for line in wrong]


def main(argv: list[str]) -> int:
    """`rackwright bundle`: 0 done, 1 it could not be made, 2 wrong usage."""
    given = arguments(argv)
    try:
        recipe = load_recipe(given.recipe)
        route = given.route or recipe.engine.default
        pins = recipe.route(route)
    except Mistakes as mistakes:
        print("\n".join(f"rackwright: {line}" for line in mistakes.lines), file=sys.stderr)
        return 2
    except KeyError:
        allowed = ", ".join(recipe.engine.routes())
        print(f"rackwright: {recipe.name} has no route {given.route!r}; allowed: {allowed}", file=sys.stderr)
        return 2
    out = (given.output or Path("bundles") / f"{recipe.name}-{route}").absolute()
    if found := no_folder(out):
        print(f"rackwright: --output {out}: {found[1]}", file=sys.stderr)
        return 2
    if given.dry:
        every = fixed_pieces(recipe, route, given.wheelhouse)
        pieces = [piece for piece in every if piece.part not in given.without]
        for piece in pieces:
            size = "?" if piece.bytes is None else in_units(piece.bytes, "bytes")
            print(f"{size.rjust(9)}  {piece.path}")
        print(_summary((piece.part, piece.bytes) for piece in pieces))
        return 0
    if isinstance(pins, DockerRoute) and not shutil.which(given.docker):
        print(f"rackwright: there is no {given.docker} here\nFix: run this where it is", file=sys.stderr)
        return 1
    usual = (_python_of(pins), "3.10", "3.11", "3.12", "3.13")
    options = Options(
        out=out,
        route=route,
        pythons=tuple(given.python) or usual,
        index_url=given.index_url,
        extra_index_urls=tuple(given.extra_index_url),
        find_links=tuple(given.find_links),
        mirrors=tuple((pair.split("=", 1)[0], pair.split("=", 1)[1]) for pair in given.mirror),
        wheelhouse=given.wheelhouse,
        docker=given.docker,
        without=tuple(given.without),
    )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        manifest = Bundler(recipe, options, say).make()
    except Failed as failure:
        print(f"rackwright: {failure}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"rackwright: {error}\nFix: mend that, or name another --output", file=sys.stderr)
        return 1
    print(_summary((str(item["part"]), int(item["bytes"])) for item in manifest["files"]))
    print(options.out)
    return 0


def _summary(rows: Iterable[tuple[str, int | None]]) -> str:
    """Files and bytes of each part, and of all."""
    parts: dict[str, tuple[int, int | None]] = {}
    for part, size in rows:
        files, total = parts.get(part, (0, 0))
        parts[part] = (files + 1, None if size is None or total is None else total + size)
    sizes = [size for _, size in parts.values()]
    lines = [(part, files, size) for part, (files, size) in parts.items()]
    known = None if None in sizes else sum(size or 0 for size in sizes)
    return table([*lines, ("all", sum(files for files, _ in parts.values()), known)])
