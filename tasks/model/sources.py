"""What the fetcher on a host is told about sources, and which secrets it needs; pure.

A hub's token is looked for where the site says and goes to that hub alone: `hub_token_*` to Hugging Face (or
`hub_endpoint`), `modelscope_token_*` to ModelScope. A `*_token_file` and `s3_credentials_file` lie on the
host, mode 0600; a `*_token_env` and `s3_credentials_env` name variables of the controller, whose values
travel in a 0600 file that the fetcher deletes before it asks anyone (`onhost/fetch_weights.py`, `secrets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from tasks.digest import digest_of, digest_of_file
from tasks.findings import Finding, fail, ok, warn
from tasks.model.manifest import NOT_SERVED
from tasks.onhost.verify_weights import read_manifest
from tasks.receipts import Receipt
from tasks.recipe import Recipe, SourceName
from tasks.settings import Settings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
S3_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
PEER_TOKEN = "RACKWRIGHT_PEER_TOKEN"
# Sources whose clients are in the tools environment; the others need none.
WITH_CLIENT = frozenset({"huggingface", "modelscope", "s3"})


def digest(recipe: Recipe, settings: Settings, model_dir: str) -> str:
    """What makes two deliveries the same: the content, not where it comes from.

    Without a manifest the pinned repositories are all that says what the content is.
    """
    model = recipe.model
    known: Any = model.sources.model_dump()
    if model.manifest:
        known = digest_of_file(recipe.beside(model.manifest))
    return digest_of([model.name, model.shards, model.bytes, known, ignored(recipe, settings), model_dir])


def ignored(recipe: Recipe, settings: Settings) -> list[str]:
    """Globs of files that are not wanted. What the recipe's manifest names always is."""
    globs = dict.fromkeys([*NOT_SERVED, *recipe.model.ignore, *settings.ignore])
    named = read_manifest(str(recipe.beside(recipe.model.manifest))) if recipe.model.manifest else {}
    return [glob for glob in globs if not any(fnmatchcase(path, glob) for path in named)]


def verified(receipt: Receipt | None, wanted: str, stat: str | None) -> bool:
    """An earlier run proved this very model, and size and time of every file are as they were then."""
    return bool(
        receipt and receipt.digest == wanted and receipt.detail.get("stat") and receipt.detail["stat"] == stat
    )


def source_of(
    name: SourceName, recipe: Recipe, settings: Settings, mirror: str | None = None
) -> dict[str, Any] | None:
    """One source as the fetcher takes it; None where recipe and site do not have it, and for `peer` and
    `generate`, which the step itself makes. `mirror`: of Hugging Face, the one measured to be the fastest.

    What the site names stays, and so does Hugging Face itself where a token would travel: a measurement must
    not decide who sees it, nor who sees one that happens to lie in the host's environment (`anonymous`).
    """
    sources = recipe.model.sources
    if settings.hub_endpoint or settings.hub_token_file or settings.hub_token_env:
        mirror = None
    found: dict[str, Any] | None = None
    if name == "huggingface" and sources.huggingface:
        found = {
            **sources.huggingface.model_dump(),
            "endpoint": mirror or settings.hub_endpoint,
            "anonymous": True if mirror else None,
            "token_file": settings.hub_token_file,
        }
    elif name == "modelscope" and sources.modelscope:
        found = {
            **sources.modelscope.model_dump(),
            "endpoint": settings.modelscope_endpoint,
            "token_file": settings.modelscope_token_file,
        }
    elif name == "s3" and (bucket := settings.s3_bucket or (sources.s3 and sources.s3.bucket)):
        prefix = settings.s3_prefix
        if prefix is None and sources.s3 and not settings.s3_bucket:
            prefix = sources.s3.prefix
        found = {
            "bucket": bucket,
            "prefix": prefix or "",
            "endpoint": settings.s3_endpoint,
            "region": settings.s3_region,
            "addressing": settings.s3_addressing,
            "profile": settings.s3_profile,
            "credentials_file": settings.s3_credentials_file,
            "ca_bundle": settings.s3_ca_bundle,
            "anonymous": settings.s3_anonymous,
        }
    elif name == "path" and settings.model_path:
        found = {"dir": settings.model_path, "how": settings.model_path_how}
    if found is None:
        return None
    if found.get("endpoint"):
        found["allow_http"] = plain_http_is_safe(name, recipe, settings)
    return {"kind": name, **{key: value for key, value in found.items() if value is not None}}


def need_clients(recipe: Recipe, settings: Settings) -> bool:
    """Some source of this site is spoken to with a client of the tools environment."""
    return any(name in WITH_CLIENT and source_of(name, recipe, settings) for name in settings.sources)


def plain_http_is_safe(name: SourceName, recipe: Recipe, settings: Settings) -> bool:
    """A mirror without TLS can neither change anything (the recipe's manifest has every hash) nor read a
    token. S3 signs its requests: the secret key itself never travels.
    """
    token = {
        "huggingface": settings.hub_token_file or settings.hub_token_env,
        "modelscope": settings.modelscope_token_file or settings.modelscope_token_env,
    }.get(name)
    return recipe.model.manifest is not None and not token


@dataclass(frozen=True)
class Wanted:
    """A secret that the site takes from the controller: the setting that says so, and both names."""

    setting: str
    variable: str
    on_host: str
    optional: bool = False


def wanted_secrets(recipe: Recipe, settings: Settings) -> list[Wanted]:
    """The controller's variables that this site's sources need."""
    wanted = []
    used = [name for name in settings.sources if source_of(name, recipe, settings)]
    if "huggingface" in used and settings.hub_token_env:
        wanted.append(Wanted("hub_token_env", settings.hub_token_env, "HF_TOKEN"))
    if "modelscope" in used and settings.modelscope_token_env:
        wanted.append(Wanted("modelscope_token_env", settings.modelscope_token_env, "MODELSCOPE_API_TOKEN"))
    if "s3" in used and settings.s3_credentials_env:
        wanted += [
            Wanted("s3_credentials_env", name, name, optional=name == "AWS_SESSION_TOKEN")
            for name in S3_VARIABLES
        ]
    return wanted


def secrets_of(recipe: Recipe, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Names on the host and values, of those that are set here."""
    found = {
        item.on_host: environ.get(item.variable, "").strip() for item in wanted_secrets(recipe, settings)
    }
    return {name: value for name, value in found.items() if value}


def findings(recipe: Recipe, settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """What can be said about a delivery before it begins, without asking anyone."""
    usable = [name for name in settings.sources if _usable(name, recipe, settings)]
    have = {name for name in recipe.model.sources.model_fields_set if getattr(recipe.model.sources, name)}
    if not usable:
        found = fail(
            "weights.sources",
            "no source of this site has the model",
            observed=", ".join(settings.sources),
            expected=f"{recipe.name} has {', '.join(sorted(have)) or 'none'}; path, peer, s3: a site's own",
            fix="name a source in `sources`, or set model_path, peer or s3_bucket",
        )
        return [found]
    found = ok("weights.sources", "asked in this order", ", ".join(usable))
    return [found, *_secrets(recipe, settings, environ), *_plain(recipe, settings), _pinned(recipe, usable)]


def _usable(name: SourceName, recipe: Recipe, settings: Settings) -> bool:
    if name == "peer":
        return settings.peer is not None
    if name == "generate":
        return recipe.model.sources.generate is not None
    return source_of(name, recipe, settings) is not None


def _secrets(recipe: Recipe, settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    wanted = [item for item in wanted_secrets(recipe, settings) if not item.optional]
    missing = [item for item in wanted if not environ.get(item.variable, "").strip()]
    if missing:
        return [
            fail(
                "weights.secrets",
                "a secret that the site takes from here is not set here",
                observed=", ".join(f"${item.variable} is empty" for item in missing),
                expected=f"as {', '.join(dict.fromkeys(item.setting for item in missing))} says",
                fix=f"export {missing[0].variable}=... in this terminal, or name a file on the host",
            )
        ]
    names = ", ".join(f"${item.variable}" for item in wanted)
    return [ok("weights.secrets", "set on the controller", names)] if wanted else []


def _plain(recipe: Recipe, settings: Settings) -> list[Finding]:
    """Endpoints without TLS that the fetcher will refuse."""
    refused = []
    for name in settings.sources:
        url = str((source_of(name, recipe, settings) or {}).get("endpoint") or "")
        parts = urlsplit(url)
        safe = plain_http_is_safe(name, recipe, settings) or parts.hostname in LOOPBACK
        if parts.scheme == "http" and not safe:
            refused.append(f"{name}: {url}")
    if not refused:
        return []
    return [
        fail(
            "weights.tls",
            "a source without TLS could change the model or read the token",
            observed="; ".join(refused),
            expected="https, or a manifest in the recipe and no token for that source",
            fix=f"use https, or make the manifest first: rackwright manifest {recipe.name} --write",
        )
    ]


def _pinned(recipe: Recipe, usable: list[SourceName]) -> Finding:
    """What says which bytes are the model."""
    model = recipe.model
    if model.manifest:
        return ok("weights.manifest", "the recipe names every file's SHA-256", model.manifest)
    pins = {"huggingface": model.sources.huggingface, "modelscope": model.sources.modelscope}
    moving = [
        f"{name} {pin.repo}@{pin.revision}"
        for name, pin in pins.items()
        if name in usable and pin and not _is_commit(pin.revision)
    ]
    return warn(
        "weights.manifest",
        "the recipe has no manifest: what the first source publishes decides which bytes are the model",
        observed=("a name that can move: " + ", ".join(moving)) if moving else "no manifest",
        expected="a manifest beside the recipe",
        fix=f"rackwright manifest {recipe.name} --write",
    )


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and all(char in "0123456789abcdef" for char in revision)
