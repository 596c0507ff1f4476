"""`rackwright manifest RECIPE`: what sources publish of a model, compared file by file and kept."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tasks.checks.words import plural
from tasks.jobs import in_time, in_units
from tasks.mistakes import Mistakes
from tasks.model import manifest, sources
from tasks.model.manifest import Difference, Listing
from tasks.onhost import verify_weights
from tasks.paths import ONHOST
from tasks.recipe import Recipe, SourceName, load_recipe
from tasks.redact import clean, redact
from tasks.settings import Settings, settings_from
from tasks.writable import no_file

HUBS: tuple[SourceName, ...] = ("huggingface", "modelscope", "s3")
PATIENCE = 10  # seconds for a hub that may only be busy: a person waits
BEAT = 5.0  # seconds
SHOWN = 40  # differences of one source that are printed
DESCRIPTION = """\
A manifest names the SHA-256 of every file of a model, one a line, sorted; `sha256sum -c` accepts it. With one
beside its recipe the weights are the same bytes whoever serves them, and are proved without a network.

With a RECIPE, the sources are asked what they publish, and compared file by file:
  huggingface, modelscope, s3   as the recipe pins them (without any SOURCE: every one that it pins)
  generate                      written here by the recipe's own program
  FILE                          a manifest, such as reports/HOST/MODEL.sha256
  FOLDER                        a copy on this machine; every file is read
The first one says which files there are; later ones add hashes that it does not publish. Where two
contradict each other, both are shown and nothing is written.

With an INVENTORY (rackwright manifest INVENTORY [pyinfra options]) every host proves its own copy: files that
are as they were when they were hashed are not read again, unless --data reverify=full. The manifest comes to
reports/HOST/MODEL.sha256 and is compared with the recipe's."""
EPILOG = """\
tokens: HF_TOKEN, MODELSCOPE_API_TOKEN and AWS_* of this terminal, or as the settings say.
exit codes: 0 all agree, 1 a source does not answer, they differ or a hash is missing, 2 wrong usage

examples:
  rackwright manifest deepseek-v4-flash-sm120             do the hubs publish the same files?
  rackwright manifest deepseek-v4-flash-sm120 --write     and keep what they say beside the recipe
  rackwright manifest my-recipe huggingface --data hub_endpoint=https://hf-mirror.com -o my.sha256
  rackwright manifest my-recipe /data/models/x --write    from a copy that is known to be good
  rackwright manifest autodl                              what the hosts have"""


@dataclass(frozen=True)
class Answer:
    """What one source says: a name for people and its files, or why it says nothing and what helps."""

    name: str
    listing: Listing
    why: str = ""
    fix: str = ""


def parser() -> argparse.ArgumentParser:
    """The command line of the first form."""
    p = argparse.ArgumentParser(
        prog="rackwright manifest",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("recipe", metavar="RECIPE", help="a recipe's name or its .toml")
    p.add_argument("sources", nargs="*", metavar="SOURCE", help="what to ask or read, the best known first")
    p.add_argument("--write", action="store_true", help="keep it beside the recipe")
    p.add_argument("-o", "--output", metavar="FILE", help="write it to FILE instead; - is stdout")
    p.add_argument(
        "--all", action="store_true", help="README, licence and pictures too, which no engine reads"
    )
    p.add_argument(
        "--hash-below", type=int, default=64, metavar="MB",
        help="fetch and hash files up to this size whose SHA-256 nobody publishes (default: 64)",
    )  # fmt: skip
    p.add_argument(
        "--data", action="append", default=[], metavar="KEY=VALUE",
        help="a setting as in an inventory: hub_endpoint, modelscope_endpoint, s3_endpoint, s3_bucket, ...",
    )  # fmt: skip
    return p


def main(argv: Sequence[str]) -> int:
    """The command; its exit code."""
    options = parser().parse_args(list(argv))
    target = None
    try:
        recipe = load_recipe(options.recipe)
        settings = settings_from({"recipe": options.recipe, **data_of(options.data)}, lambda key: "--data")
        target = target_of(recipe, options)
        if target and (why := no_file(target)):
            raise Mistakes([why])
        names = options.sources or sources_of_recipe(recipe, settings)
        answers = [answer for name in group(names) for answer in ask(name, recipe, settings, options)]
        return report(recipe, answers, options)
    except Mistakes as mistakes:
        for line in mistakes.lines:
            print(f"rackwright manifest: {line}", file=sys.stderr)
        return 2
    except verify_weights.Usage as usage:
        print(f"rackwright manifest: {usage}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rackwright manifest: {error.filename or target}: {error.strerror}", file=sys.stderr)
        return 1


def target_of(recipe: Recipe, options: Any) -> Path | None:
    """The file that is to be written; None where there is none."""
    if options.output:
        return None if options.output == "-" else Path(options.output)
    return recipe.beside(beside(recipe)) if options.write else None


def beside(recipe: Recipe) -> str:
    """The recipe's manifest, or what it would be called."""
    return recipe.model.manifest or f"manifests/{recipe.name}.sha256"


def data_of(items: Sequence[str]) -> dict[str, Any]:
    """`--data KEY=VALUE` as the other verbs read it. Raises Mistakes."""
    if not items:
        return {}  # what follows patches the whole process
    from pyinfra_cli.util import parse_cli_arg

    wrong = [item for item in items if "=" not in item]
    if wrong:
        raise Mistakes([redact(f"--data {item!r}: must be KEY=VALUE") for item in wrong])
    return {key: parse_cli_arg(value) for key, _, value in (item.partition("=") for item in items)}


def sources_of_recipe(recipe: Recipe, settings: Settings) -> list[str]:
    """What the recipe pins. Raises Mistakes when it pins nothing."""
    found: list[str] = [name for name in HUBS if sources.source_of(name, recipe, settings)]
    if not found and recipe.model.sources.generate:
        found = ["generate"]
    if not found:
        raise Mistakes([f"{recipe.name} pins no source: name a FILE or a FOLDER"])
    return found


def group(names: Sequence[str]) -> list[list[str]]:
    """Neighbouring hubs together: they are asked by one run of the fetcher."""
    groups: list[list[str]] = []
    for name in names:
        if groups and name in HUBS and groups[-1][0] in HUBS:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def ask(names: Sequence[str], recipe: Recipe, settings: Settings, options: Any) -> list[Answer]:
    """The answers of some hubs, of a file, or of a folder. Raises Mistakes or Usage."""
    first = names[0]
    ignore = [] if options.all else [*manifest.NOT_SERVED, *recipe.model.ignore, *settings.ignore]
    if first in HUBS:
        return list_hubs(names, recipe, settings, options.hash_below * 1_000_000, ignore)
    if first == "generate" and recipe.model.sources.generate:
        with tempfile.TemporaryDirectory(prefix="rackwright-") as folder:
            program = ONHOST / recipe.model.sources.generate.program
            made = subprocess.run(
                [sys.executable, program, folder],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            if made.returncode:
                said = made.stderr.strip().splitlines() or [f"it ended with {made.returncode}"]
                return [Answer(first, {}, clean(said[-1]), "look at the program")]
            return [read_folder(Path(folder), first, ignore)]
    if Path(first).is_dir():
        return [read_folder(Path(first), first, ignore)]
    if Path(first).is_file():
        found = manifest.from_digests(verify_weights.read_manifest(first))
        return [Answer(first, manifest.without(found, ignore))]
    known = ", ".join(name for name in get_args(SourceName) if name not in ("path", "peer"))
    raise Mistakes([f"{first!r} is no source ({known}), no file and no folder"])


def list_hubs(
    names: Sequence[str], recipe: Recipe, settings: Settings, hash_small: int, ignore: list[str]
) -> list[Answer]:
    """Ask hubs for what they publish, with the fetcher that hosts run. Raises Mistakes."""
    specs = []
    for name in names:
        spec = sources.source_of(name, recipe, settings)  # type: ignore[arg-type]
        if spec is None:
            raise Mistakes([f"{recipe.name} does not pin {name}"])
        specs.append(spec)
    request = {"mode": "list", "sources": specs, "hash_small": hash_small, "ignore": ignore}
    request["patience"] = PATIENCE
    environ = {**os.environ, **sources.secrets_of(recipe, settings, os.environ)}
    # Its answer goes to a file: a full pipe would stop it while only its progress is read here.
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(
            [sys.executable, ONHOST / "fetch_weights.py", "--stdin"],
            stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert process.stdin and process.stderr
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        with heartbeat(BEAT):
            for line in process.stderr:
                # why a source says nothing is told with the answers
                if not line.startswith(("#progress ", "not from ")):
                    print(clean(line.rstrip()), file=sys.stderr, flush=True)
            code = process.wait()
        answer.seek(0)
        text = answer.read()
    if code == 2 or not text:
        raise Mistakes(["the sources could not be asked (see above)"])
    answers = []
    for found in json.loads(text)["sources"]:
        why, fix = str(found["why"]).removeprefix(f"{found['name']}: "), str(found["fix"])
        if "cannot be imported" in why:
            fix = "pip install 'rackwright[hub]'"
        label = str(found["name"])
        if found["revision"] and "@" not in label:
            label += f"@{found['revision'][:12]}"
        answers.append(Answer(label, manifest.from_fetch(found), why, fix))
    return answers


@contextmanager
def heartbeat(every: float) -> Iterator[None]:
    """Say every so many seconds that the sources are still being asked."""
    over, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not over.wait(every):
            print(f"still asking, {in_time(time.monotonic() - began)}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_folder(folder: Path, name: str, ignore: list[str]) -> Answer:
    """The hashes of a copy on this machine, if it is whole."""
    show = "tty" if sys.stderr.isatty() else "none"
    with tempfile.TemporaryDirectory(prefix="rackwright-") as kept:
        written = Path(kept) / "manifest"
        result = verify_weights.verify(
            verify_weights.Params(
                str(folder), write_manifest=str(written), ignore=tuple(ignore), follow_links=True
            ),
            show,
        )
        if not result["whole"]:
            first, *rest = result["problems"]
            more = f" (and {len(rest)} more)" if rest else ""
            return Answer(name, {}, f"not whole: {first['file']}: {first['what']}{more}", first["fix"])
        digests = verify_weights.read_manifest(str(written))
    sizes = {path: (folder / path).stat().st_size for path in digests} if folder.is_dir() else {}
    return Answer(
        name, {path: manifest.Published(path, sizes.get(path), digest) for path, digest in digests.items()}
    )


def report(recipe: Recipe, answers: Sequence[Answer], options: Any) -> int:
    """Print what was found out, write what was asked for; the exit code."""
    out = sys.stderr if options.output == "-" else sys.stdout
    good = True
    for answer in answers:
        if answer.listing:
            print(f"{answer.name}: {summary(answer.listing)}", file=out)
        else:
            print(f"{answer.name}: {answer.why or 'lists no file'}\n  fix: {answer.fix}", file=out)
            good = False
    spoke = [answer for answer in answers if answer.listing]
    if not spoke:
        return 1
    first, *others = spoke
    for other in others:
        good &= told(first, other, manifest.compare(first.listing, other.listing), out)
    merged, contradictions = manifest.merge([answer.listing for answer in spoke])
    digests, unknown = manifest.to_manifest(merged)
    for path in unknown:
        print(f"{path}: nobody publishes its SHA-256 ({first.listing[path].size} bytes)", file=out)
    for line in against_recipe(recipe, merged):
        print(line, file=out)
    same = True
    if recipe.model.manifest:
        kept = manifest.from_digests(verify_weights.read_manifest(str(recipe.beside(recipe.model.manifest))))
        mine = Answer(f"the recipe's {recipe.model.manifest}", kept)
        same = told(mine, first, manifest.compare(kept, manifest.from_digests(digests)), out)
    if not (options.write or options.output):
        return 0 if good and same and not unknown else 1
    if contradictions or unknown or len(spoke) < len(answers):
        print("nothing was written: see above", file=sys.stderr)
        return 1
    write(recipe, digests, options)
    return 0 if good else 1


def summary(listing: Listing) -> str:
    """How much a source lists, and how much of it by hash."""
    sizes = [entry.size for entry in listing.values()]
    size = "" if None in sizes else f", {in_units(sum(filter(None, sizes)), 'bytes')}"
    hashed = sum(entry.sha256 is not None for entry in listing.values())
    return f"{plural(len(listing), 'file')}{size}, {hashed} with SHA-256"


def told(left: Answer, right: Answer, differences: list[Difference], out: Any) -> bool:
    """Print how two sources differ; True if they do not."""
    real = [difference for difference in differences if difference.kind != "unknown"]
    unknown = len(differences) - len(real)
    note = f" ({unknown} of them by no hash that both publish)" if unknown else ""
    if not real:
        both = len(set(left.listing) & set(right.listing))
        print(f"{left.name} and {right.name} agree on {plural(both, 'file')}{note}", file=out)
        return True
    print(f"{left.name} and {right.name} differ in {plural(len(real), 'file')}:", file=out)
    for line in manifest.explain(real[:SHOWN], left.name, right.name):
        print(f"  {line}", file=out)
    if len(real) > SHOWN:
        print(f"  and {len(real) - SHOWN} more", file=out)
    return False


def against_recipe(recipe: Recipe, listing: Listing) -> list[str]:
    """Where the listing and the recipe's own numbers do not fit, one line each."""
    lines = []
    shards = sum(path.endswith(".safetensors") for path in listing)
    if shards != recipe.model.shards:
        lines.append(f"the recipe says shards = {recipe.model.shards}, {shards} are listed")
    sizes = [entry.size for entry in listing.values()]
    total = sum(filter(None, sizes))
    if None not in sizes and abs(total - recipe.model.bytes) > recipe.model.bytes / 100:
        lines.append(f"the recipe says bytes = {recipe.model.bytes}, {total} are listed")
    return lines


def write(recipe: Recipe, digests: dict[str, str], options: Any) -> None:
    """Write the manifest to where it was asked for, and say how the recipe gets to know it."""
    text = manifest.render(digests)
    path = target_of(recipe, options)
    if path is None:
        sys.stdout.write(text)
        return
    verify_weights.write_atomically(str(path), text)
    print(f"wrote {path}: {plural(len(digests), 'file')}, sha256 of all {manifest.digest(digests)}")
    if not options.output and not recipe.model.manifest:
        print(f'now put this into [model] of {recipe.file}:\n  manifest = "{beside(recipe)}"')
