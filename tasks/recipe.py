"""What should be served: the recipe, its schema and how it is loaded.

A recipe is data (TOML under `inventories/recipes/`): a new checkpoint, engine version or GPU
needs no code. Values that come from the world name their source in a comment beside them.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tasks.digest import digest_of
from tasks.mistakes import Mistakes, explain, nearest
from tasks.onhost.startup_log import PHASES
from tasks.paths import RECIPES

Flag = bool | int | float | str | list[str] | dict[str, Any]


def without_password(url: str) -> str:
    """The address itself. Raises ValueError when it carries a password, as a pydantic validator does."""
    user, at, _ = url.split("://", 1)[-1].split("/")[0].partition("@")
    # a registry's mirror may be a bare host; a folder of wheels may have an @ in its name
    if at and ("://" in url or ":" in user):
        raise ValueError("must not carry a password: it would show in process lists and logs")
    return url


def _on_one_line(values: dict[str, Any]) -> dict[str, Any]:
    # a unit's line, and that of a program of supervisord, ends where the value's does
    for name, value in values.items():
        for word in (name, *(value if isinstance(value, list) else [value])):
            if isinstance(word, str) and re.search(r"[\x00-\x1f\x7f]", word):
                raise ValueError(f"{name!r} must be one line without control characters")
    return values


Flags = Annotated[dict[str, Flag], AfterValidator(_on_one_line)]
Env = Annotated[dict[str, str], AfterValidator(_on_one_line)]
Url = Annotated[str, AfterValidator(without_password)]
Port = Annotated[int, Field(ge=1, le=65535)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Route = Literal["wheel", "source", "docker"]
SourceName = Literal["huggingface", "modelscope", "s3", "path", "peer", "generate"]
# A mode on trial runs under this name (launch.py).
TRIAL = "trial"
SAFE_MODE = "eager"
ROUTES: tuple[str, ...] = get_args(Route)


class Part(BaseModel):
    """A strict, frozen part of a recipe: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HubSource(Part):
    """A repository of a hub at one revision (a commit; a branch name is not a pin)."""

    repo: str
    revision: str


class S3Source(Part):
    """A prefix in S3-compatible storage; a site can name its own (`s3_bucket`, `s3_prefix`)."""

    bucket: str
    prefix: str = ""


class GenerateSource(Part):
    """A checkpoint that an onhost program writes, deterministically, instead of a download."""

    program: str
    options: dict[str, Any] = {}


class Sources(Part):
    """Where the weights can come from; a site decides the order."""

    huggingface: HubSource | None = None
    modelscope: HubSource | None = None
    s3: S3Source | None = None
    generate: GenerateSource | None = None


class Model(Part):
    """The checkpoint: its name for clients, its sources and what makes it whole.

    `manifest` is a file beside the recipe (`rackwright manifest` writes it); `ignore` are globs of files that
    are not wanted although the sources have them.
    """

    name: str
    shards: int = Field(gt=0)
    bytes: int = Field(gt=0)
    manifest: str | None = None
    ignore: list[str] = []
    speculative: list[Literal["mtp", "dspark", "ngram"]] = []
    attention_heads: int | None = None
    sources: Sources


class Hardware(Part):
    """What the host must be. Empty fields are not checked."""

    gpu: str | None = None
    count: int = 0
    compute_capability: str | None = Field(None, pattern=r"^\d+\.\d+$")
    memory_gib: float | None = None
    driver: str | None = Field(None, pattern=r"^\d+(\.\d+)*$")
    cuda_toolkit: str | None = Field(None, pattern=r"^\d+\.\d+$")
    cpu_flags: list[str] = []
    libraries: list[Literal["libnuma.so.1"]] = []  # what the probe looks for
    ram_gib: float = 2
    shm_gib: float = 0
    nofile: int = Field(65535, gt=0)


class Shim(Part):
    """A stub distribution that the engine looks up by name (see `reference` in the recipe)."""

    name: str
    version: str


class PinnedWheel(Part):
    """One wheel by hash, with the places that serve it."""

    package: str
    version: str
    file: str
    sha256: Sha256
    bytes: int | None = None
    urls: list[Url]

    @property
    def lock_line(self) -> str:
        """This wheel as an entry of a lock."""
        return (
            f"{self.package}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"
            f"    # {self.file} {self.bytes or 0}\n"
        )


class WheelRoute(Part):
    """A stock engine from wheels, all of them in a lock with hashes.

    `wheels` are those that no index serves; they are installed with the lock's. `extensions`, `ops` and
    `files` (below site-packages) are properties that an engine for this hardware must have.
    """

    package: str
    version: str
    python: str = Field(pattern=r"^3\.\d+$")
    lock: str
    extra_index_urls: list[Url] = []
    shims: list[Shim] = []
    imports: list[str] = []
    wheels: list[PinnedWheel] = []
    same_version: list[tuple[str, str]] = []
    extensions: list[str] = []
    ops: list[str] = []
    files: list[str] = []
    cuda_major: int | None = None
    env_bytes: int = Field(gt=0)
    wheel_bytes: int = Field(gt=0)


class SourceRoute(Part):
    """The engine from source, at one commit, with the wheels it must find installed.

    `tree` is git's id of the commit's tree: it proves an archive without .git. `dependencies` says which
    commit a dependency's tag must be, `skip_dependencies` which ones this build does not read. Every
    expression of `drop_lines` must match exactly one line. `lock` replaces resolving on the host.
    `options_like` is the release whose options stand for this commit's (`options/vllm-VERSION.txt`).
    """

    package: str = "vllm"
    version: str
    repo: Url
    commit: Commit
    tag: str | None = None
    tree: Commit | None = None
    python: str = Field(pattern=r"^3\.\d+$")
    torch_backend: str | None = None
    cuda_major: int
    cuda_toolkit: str
    requirements: str
    build_requirements: str
    drop_lines: list[str] = []
    lock: str | None = None
    skip_dependencies: list[str] = []
    dependencies: dict[str, Commit] = {}
    env: dict[str, str] = {}
    wheels: list[PinnedWheel] = []
    same_version: list[tuple[str, str]] = []
    extensions: list[str] = []
    ops: list[str] = []
    options_like: str | None = None
    bytes_per_job: int = Field(5 * 1024**3, gt=0)
    env_bytes: int = Field(gt=0)


class DockerRoute(Part):
    """The engine as an image, by digest where one is known.

    `digest` is the registry's, `image_id` the image's own (what `docker load` brings). `versions` are those
    of distributions inside, `program` is the engine's command there.
    """

    image: str = Field(pattern=r"^[a-z0-9][\w./:-]*:[\w.-]+$")
    digest: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    image_id: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$")
    versions: dict[str, str] = {}
    program: str = "vllm"
    options_like: str | None = None
    replacement: str | None = None
    cuda_major: int | None = None
    flags: Flags = {}
    env: Env = {}
    image_bytes: int = Field(gt=0)


class Engines(Part):
    """The routes by which this recipe's engine can be had."""

    default: Route
    wheel: WheelRoute | None = None
    source: SourceRoute | None = None
    docker: DockerRoute | None = None

    def routes(self) -> list[str]:
        """Names of the routes that this recipe has."""
        return [name for name in ROUTES if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _default_is_there(self) -> Engines:
        if self.default not in self.routes():
            raise ValueError(f"default = {self.default!r} has no [engine.{self.default}] section")
        return self


class Warmup(Part):
    """What is sent after a start, before the service counts as up: every form, length and concurrency."""

    concurrency: list[Annotated[int, Field(ge=1, le=1024)]] = Field([1], min_length=1)
    prompt_tokens: list[Annotated[int, Field(ge=1)]] = Field([32], min_length=1)
    forms: list[Literal["chat", "reasoning", "tool"]] = Field(["chat"], min_length=1)
    max_tokens: int = Field(8, gt=0)
    seconds: int = Field(3600, gt=0)


class Promote(Part):
    """The short benchmark that compares a mode with eager; `margin` is the share that it may be slower."""

    concurrency: list[Annotated[int, Field(ge=1, le=1024)]] = Field([1, 4], min_length=1)
    prompt_tokens: int = Field(256, gt=0)
    output_tokens: int = Field(64, gt=1)
    requests: int = Field(8, gt=0)
    margin: float = Field(0.05, ge=0, lt=1)


class Mode(Part):
    """What one serving mode adds to the common flags; `false` takes a flag away."""

    flags: Flags = {}
    env: Env = {}
    ready_seconds: int | None = Field(None, gt=0)


class Serve(Part):
    """How it is served: what every mode has, and the modes."""

    flags: Flags = {}
    env: Env = {}
    unset: list[str] = []
    ready_seconds: int = Field(1800, gt=0)
    stop_seconds: int = Field(60, gt=0)
    phase_seconds: dict[str, Annotated[int, Field(gt=0)]] = {}
    warmup: Warmup = Warmup.model_validate({})
    promote: Promote = Promote.model_validate({})
    modes: dict[str, Mode]

    @field_validator("modes")
    @classmethod
    def _eager_is_the_way_back(cls, modes: dict[str, Mode]) -> dict[str, Mode]:
        if "eager" not in modes:
            raise ValueError("a mode 'eager' is needed: it is the safe mode that others fall back to")
        if TRIAL in modes:
            raise ValueError(f"a mode cannot be called {TRIAL!r}: a mode on trial runs under that name")
        for name in modes:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"mode {name!r}: only letters, digits and . _ - are allowed")
        return modes

    @field_validator("phase_seconds")
    @classmethod
    def _known_phases(cls, seconds: dict[str, int]) -> dict[str, int]:
        known = [phase.name for phase in PHASES]
        for name in seconds:
            if name not in known:
                raise ValueError(f"no phase {name!r}; {nearest(name, known)}")
        return seconds


class Acceptance(Part):
    """What proof means for this checkpoint."""

    profile: Literal["smoke", "standard", "deep"] = "standard"
    knowledge: bool = True
    skip: dict[str, str] = {}


class BenchCase(Part):
    """One load: prompts of `input` random tokens, `output` tokens each, so many at a time.

    `rate` is in requests a second; without it the next request goes out when one comes back.
    """

    name: str | None = None
    input: int = Field(gt=0)
    output: int = Field(gt=0)
    concurrency: int = Field(gt=0)
    prompts: int | None = Field(None, gt=0)
    warmups: int | None = Field(None, gt=0)
    rate: float | None = Field(None, gt=0)

    @property
    def label(self) -> str:
        """What the case is called, as `onhost/bench.py` calls it."""
        rate = "" if self.rate is None else f" at {self.rate:g}/s"
        return self.name or f"{self.input}/{self.output} x{self.concurrency}{rate}"


# Names of what a benchmark measures (onhost/bench.py).
FIGURES = (
    r"(?:output|total)_tokens_per_second|output_tokens_per_second_per_gpu|requests_per_second"
    r"|joules_per_output_token|gpu_memory_peak_mib|acceptance_rate|cached_prompt_share"
    r"|(?:ttft|tpot|itl|e2el)_(?:mean|p50|p95|p99)_ms"
)


class Expected(Part):
    """A figure that somebody else measured, and where it is written down."""

    case: str
    metric: str = Field(pattern=rf"^(?:{FIGURES})$")
    value: float = Field(gt=0)
    mode: str | None = None
    source: str


class Bench(Part):
    """What `bench` measures. The default cases are those of the H20 tutorial's section 8."""

    runs: int = Field(3, ge=1, le=20)
    seed: int = Field(0, ge=0)
    cases: list[BenchCase] = Field(
        [
            BenchCase.model_validate({"input": tokens, "output": answer, "concurrency": at_once})
            for tokens, answer, at_once in ((128, 64, 1), (128, 64, 8), (4096, 128, 4))
        ],
        min_length=1,
    )
    expected: list[Expected] = []

    @model_validator(mode="after")
    def _names_agree(self) -> Bench:
        labels = [case.label for case in self.cases]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two cases are called {label!r}: give one of them a name")
        for item in self.expected:
            if item.case not in labels:
                raise ValueError(f"expected: no case {item.case!r}; {nearest(item.case, labels)}")
        return self


class KnownIssue(Part):
    """A known fault of this combination, with where it is written down."""

    id: str
    summary: str
    reference: str


class Recipe(Part):
    """One recipe, valid. `name` is the stem of its `file`."""

    name: str
    file: Path = Field(exclude=True)
    summary: str
    proven: str
    model: Model
    hardware: Hardware
    engine: Engines
    serve: Serve
    acceptance: Acceptance = Acceptance()
    bench: Bench = Bench.model_validate({})
    known_issues: list[KnownIssue] = []

    def route(self, name: str | None = None) -> WheelRoute | SourceRoute | DockerRoute:
        """The pins of one engine route.

        Raises KeyError when the recipe does not have that route.
        """
        found: WheelRoute | SourceRoute | DockerRoute | None = getattr(
            self.engine, name or self.engine.default, None
        )
        if found is None:
            raise KeyError(name)
        return found

    def flags(self, mode: str, route: str) -> dict[str, Flag]:
        """The engine's flags in one mode, in the order: common, route, mode; `false` removes."""
        extra = self.engine.docker.flags if route == "docker" and self.engine.docker else {}
        merged = {**self.serve.flags, **extra, **self.serve.modes[mode].flags}
        return {name: value for name, value in merged.items() if value is not False}

    def env(self, mode: str, route: str) -> dict[str, str]:
        """Environment of the engine in one mode, in the same order as `flags`."""
        extra = self.engine.docker.env if route == "docker" and self.engine.docker else {}
        return {**self.serve.env, **extra, **self.serve.modes[mode].env}

    def faster(self, asked: str | None = None) -> str | None:
        """The mode to promote: the one that is asked for, else the first one that is not the safe one."""
        others = [mode for mode in self.serve.modes if mode != SAFE_MODE]
        if asked and asked != SAFE_MODE:
            return asked
        return "optimized" if "optimized" in others else next(iter(others), None)

    def beside(self, name: str) -> Path:
        """A lock or manifest that the recipe names relative to itself."""
        return self.file.parent / name

    @property
    def digest(self) -> str:
        """Digest of everything the recipe says."""
        return digest_of(self.model_dump())


def flag_argv(flags: dict[str, Flag]) -> list[str]:
    """Flags as the engine's argv: `true` is a bare flag, tables are compact JSON, lists repeat values."""
    argv: list[str] = []
    for name, value in flags.items():
        argv.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, dict):
            argv.append(json.dumps(value, separators=(",", ":")))
        elif isinstance(value, list):
            argv.extend(str(part) for part in value)
        else:
            argv.append(str(value))
    return argv


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe: a name of `inventories/recipes/`, or a path to a `.toml` of one's own.

    Raises Mistakes with the nearest name when there is none.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file() and (name.endswith(".toml") or "/" in name):
        hint = "no such file" if name.endswith(".toml") else "a recipe of your own must end with .toml"
        raise Mistakes([f"recipe = {name!r}: {hint}"])
    if not path.is_file():
        raise Mistakes([f"recipe = {name!r}: no such recipe; {nearest(name, recipe_names())}"])
    return path


def load_recipe(name: str) -> Recipe:
    """Read and validate one recipe.

    Raises Mistakes, naming file, key, value and what is allowed, for all mistakes at once.
    """
    path = recipe_path(name)
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistakes([f"{path.name}: not valid TOML: {error}"]) from error
    try:
        recipe = Recipe.model_validate({"name": path.stem, "file": path, **data})
    except ValidationError as error:
        raise Mistakes(explain(error, path.name, Recipe)) from error
    lines = [f"{path.name}: {line}" for line in _files_named(recipe)]
    if lines:
        raise Mistakes(lines)
    return recipe


def _files_named(recipe: Recipe) -> list[str]:
    """Files that the recipe names and that are not there."""
    named = {"model.manifest": recipe.model.manifest}
    if recipe.engine.wheel:
        named["engine.wheel.lock"] = recipe.engine.wheel.lock
    if recipe.engine.source:
        named["engine.source.lock"] = recipe.engine.source.lock
    return [
        f"{key} = {value!r}: no such file beside the recipe"
        for key, value in named.items()
        if value and not recipe.beside(value).is_file()
    ]
