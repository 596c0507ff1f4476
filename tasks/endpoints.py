"""Which servers the steps of a run use, for exactly the chosen route and sources, and what replaces each.

Asked twice: before the host is read, for what to try (each with a cheap test on the host that spares it when
its step is done), and after it, for what an answer or a silence means there.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tasks.checks import EndpointNeed, Needs
from tasks.checks.build import fitting_python
from tasks.checks.words import names
from tasks.facts import Unless
from tasks.model.sources import need_clients, source_of
from tasks.onhost.shared import mirrored
from tasks.onhost.wheel_lock import canonical, parse_lock
from tasks.paths import MINIFORGE, ROOT, TOOLS_LOCK
from tasks.proxy import served
from tasks.recipe import DockerRoute, SourceRoute, WheelRoute
from tasks.remote import quote

if TYPE_CHECKING:
    from tasks.plan import Plan

PYTORCH_INDEX = "https://download.pytorch.org/whl/"
MIRROR = "https://pypi.tuna.tsinghua.edu.cn/simple"
HUBS = {"huggingface": "https://huggingface.co", "modelscope": "https://modelscope.cn"}


EVERYTHING = frozenset({"environment", "tools", "engine", "weights"})
# What a verb brings to a host; the others bring everything, or what is there already.
BRINGS = {
    "environment": {"environment", "tools"},
    "engine": {"environment", "engine"},
    "build": {"environment", "engine"},
    "weights": {"environment", "tools", "weights"},
    "serve": set[str](),
    "promote": set[str](),
}


def brings(plan: Plan, part: str) -> bool:
    """Whether the verb of this run has a step that brings `part`."""
    return part in BRINGS.get(plan.verb, EVERYTHING)


def endpoints_of(plan: Plan) -> tuple[EndpointNeed, ...]:
    """The servers of one host's run, without those that several steps share counted twice."""
    found: dict[str, EndpointNeed] = {}
    needs = [
        *(_environment(plan) if brings(plan, "environment") else []),
        *_packages(plan),
        *(_engine(plan) if brings(plan, "engine") else []),
        *(_weights(plan) if brings(plan, "weights") else []),
    ]
    for need in needs:
        seen = found.get(need.url)
        if seen is None:
            found[need.url] = need
        else:
            both = (*seen.unless, *(case for case in need.unless if case not in seen.unless))
            purpose = seen.purpose if need.purpose == seen.purpose else f"{seen.purpose}, {need.purpose}"
            found[need.url] = replace(seen, purpose=purpose, unless=both)
    if plan.settings.proxy_script:
        found = {url: _proxied(need, plan.settings.proxy_script) for url, need in found.items()}
    if plan.settings.mirrors == "auto":
        instead = "mirrors = 'auto': servers that answer are chosen before anything is fetched."
        return tuple(replace(need, alternative=need.alternative or instead) for need in found.values())
    return tuple(found.values())


def _proxied(need: EndpointNeed, script: str) -> EndpointNeed:
    """A server that is asked through the proxy of a script: trying it without would say nothing."""
    if not served(need.url):
        return need
    there = f"[ -r {quote(script)} ]"
    cases = need.unless or (Unless(),)
    return replace(need, unless=tuple(replace(case, done=f"{case.done} || {there}") for case in cases))


def _bundle_fix(plan: Plan) -> str:
    return f"carry everything over: rackwright bundle {plan.recipe.name}, then bundle = 'FOLDER'"


def _answers(plan: Plan, url: str) -> bool:
    facts = plan.facts.net.endpoints.get(url)
    return facts is not None and facts.reachable is True


def _any_of(plan: Plan, needs: list[EndpointNeed]) -> list[EndpointNeed]:
    """Needs of which one is enough: where another one answers, or a way is open anyhow, that is named."""
    found = []
    for need in needs:
        other = next((one for one in needs if one.url != need.url and _answers(plan, one.url)), None)
        instead = f"{other.url} answers, and is used instead." if other else need.alternative
        found.append(replace(need, alternative=instead))
    return found


# -- environment ---------------------------------------------------------------------------------


def _environment(plan: Plan) -> list[EndpointNeed]:
    """A conda's channel, or the release of Miniforge where nothing on the host fits."""
    settings, pins = plan.settings, plan.recipe.route(plan.route)
    if settings.bundle or settings.env_kind == "venv" or settings.python or isinstance(pins, DockerRoute):
        return []
    made = f"[ -f {quote(plan.layout.env + '/.rackwright-env')} ]"
    python = f"rw_fits {quote(pins.python)}"
    found = fitting_python(Needs(root="", python=pins.python), plan.facts)
    there = found is not None and found.venv is not False
    forge = tomllib.loads(MINIFORGE.read_text("utf-8"))
    only_conda = settings.env_kind == "conda"
    channel = EndpointNeed(
        "conda",
        "conda:",
        "the environment's packages",
        alternative=f"A venv of Python {pins.python} is made instead." if there and not only_conda else None,
        fix="Set a mirror in ~/.condarc on the host, or env_kind = 'venv' with a Python of its own.",
        unless=(Unless(f'{made} || [ -z "$(rw_conda | grep ^conda=)" ]'),),
    )
    # the environment step looks for these in the same order
    spared = f'{made} || [ -n "$(rw_conda | grep ^conda=)" ]' + ("" if only_conda else f" || {python}")
    return [
        channel,
        *_files(
            plan,
            "miniforge",
            f"a Python {pins.python}, which this host does not have",
            {str(forge["file"]): [str(url) for url in forge["urls"]]},
            spared,
            near=f"install Python {pins.python} on the host, or put {forge['file']} into find_links",
        ),
    ]


# -- packages ------------------------------------------------------------------------------------


def _packages(plan: Plan) -> list[EndpointNeed]:
    """The package index, for tools and engine, and the indexes of what the first one does not have."""
    settings, pins = plan.settings, plan.recipe.route(plan.route)
    if settings.bundle:
        return []
    index = settings.index_url
    of_engine = brings(plan, "engine") and not isinstance(pins, DockerRoute)
    unless = [Unless(_tools_done(plan), _wheels_of(TOOLS_LOCK.read_text("utf-8")))]
    if not brings(plan, "tools"):
        unless = []
    if of_engine:
        unless.append(Unless(_engine_done(plan), _engine_wheels(plan)))
    need = EndpointNeed(
        "index",
        _page(index, "pip") if index else "pip:pip",
        "Python packages",
        alternative=_other_folders(plan),
        fix=f"Set index_url to a mirror that this host reaches (such as {MIRROR}), or {_bundle_fix(plan)}.",
        unless=tuple(unless),
    )
    if not of_engine:
        return [need] if unless else []
    return [need, *_extra_indexes(plan)]


def _extra_indexes(plan: Plan) -> list[EndpointNeed]:
    """torch's index where the source route asks for it, and the recipe's or the site's others."""
    settings, pins = plan.settings, plan.recipe.route(plan.route)
    needs = []
    if isinstance(pins, WheelRoute):
        urls = pins.extra_index_urls if settings.extra_index_urls is None else settings.extra_index_urls
        own = tuple(wheel for wheel in _engine_wheels(plan) if "+" in wheel)
        unless = Unless(_engine_done(plan), own)
    else:
        urls, unless = settings.extra_index_urls or [], Unless(_engine_done(plan))
    if isinstance(pins, SourceRoute) and not _built_here(plan):
        base = settings.torch_index_url or (
            PYTORCH_INDEX + pins.torch_backend if pins.torch_backend else None
        )
        if base:
            needs.append(_extra(plan, "torch_index", base, "torch for this CUDA", Unless(_engine_done(plan))))
    for number, url in enumerate(urls, 1):
        name = "extra_index" if number == 1 else f"extra_index.{number}"
        needs.append(_extra(plan, name, url, "packages that the index does not have", unless))
    return needs


def _extra(plan: Plan, name: str, url: str, purpose: str, unless: Unless) -> EndpointNeed:
    setting = "torch_index_url" if name == "torch_index" else "extra_index_urls"
    return EndpointNeed(
        name,
        _page(url, "torch"),
        purpose,
        alternative=_other_folders(plan),
        fix=f"Set {setting} to a mirror, put the wheels into a folder and name it in find_links, "
        f"or {_bundle_fix(plan)}.",
        unless=(unless,),
    )


def _other_folders(plan: Plan) -> str | None:
    """Where else the packages may come from; what lies in folders was counted, so only pages and indexes."""
    pages = [place for place in plan.settings.find_links if place.startswith(("http:", "https:"))]
    if pages:
        return f"What {pages[0]} has (find_links) is used instead."
    if "extra-index-url" in plan.facts.net.pip:
        return "What the extra-index-url of this host's pip has is used instead."
    return None


def _page(index: str, package: str) -> str:
    return f"{index.rstrip('/')}/{package}/"


def _wheels_of(lock: str) -> tuple[str, ...]:
    """File names (or patterns) of a lock's wheels; those that only some hosts need are left out."""
    return tuple(
        pin.file or f"{canonical(pin.name).replace('-', '_')}-{pin.version}-*.whl"
        for pin in parse_lock(lock)
        if not pin.marker
    )


def _engine_wheels(plan: Plan) -> tuple[str, ...]:
    pins = plan.recipe.route(plan.route)
    if isinstance(pins, WheelRoute):
        return _wheels_of(plan.recipe.beside(pins.lock).read_text("utf-8"))
    return ()


def _tools_done(plan: Plan) -> str:
    """Installed, or not needed on such a host."""
    done = f"[ -f {quote(plan.layout.receipts + '/tools.json')} ]"
    if not need_clients(plan.recipe, plan.settings) and plan.settings.supervisor != "supervisord":
        linger = '[ -e "/var/lib/systemd/linger/$(id -un)" ]'
        done += f' || {{ [ -d /run/systemd/system ] && {{ [ "$(id -u)" = 0 ] || {linger}; }}; }}'
    return done


def _engine_done(plan: Plan) -> str:
    """This engine's receipt and program are there."""
    pins = plan.recipe.route(plan.route)
    receipt = quote(plan.layout.receipts + "/engine.json")
    if isinstance(pins, DockerRoute):
        return f"grep -qs {quote(pins.digest or pins.image)} {receipt}"
    word = pins.commit if isinstance(pins, SourceRoute) else pins.version
    return f"[ -x {quote(plan.layout.env + '/bin/vllm')} ] && grep -qs {quote(word)} {receipt}"


# -- engine --------------------------------------------------------------------------------------


def _engine(plan: Plan) -> list[EndpointNeed]:
    """The source's host and the pinned wheels', or the image's registry."""
    settings, pins = plan.settings, plan.recipe.route(plan.route)
    if settings.bundle or isinstance(pins, WheelRoute):
        return []
    if isinstance(pins, DockerRoute):
        here = f"docker image inspect {quote(pins.image)} >/dev/null 2>&1"
        registry = pins.image.split("/")[0] if "." in pins.image.split("/")[0] else "registry-1.docker.io"
        fix = f"Set a registry mirror in /etc/docker/daemon.json, or {_bundle_fix(plan)}."
        return [
            EndpointNeed(
                "registry",
                f"https://{registry}/v2/",
                "the engine's image",
                fix=fix,
                unless=(Unless(f"{_engine_done(plan)} || {here}"),),
            )
        ]
    needs = _files(
        plan,
        "files",
        "pinned wheels",
        {wheel.file: wheel.urls for wheel in pins.wheels},
        _engine_done(plan),
        near="put them into a folder of the host and name it in find_links",
    )
    if settings.source_archive or _built_here(plan):
        return needs
    fix = f"Set url_mirrors, upload a tar of a clone (source_archive), or {_bundle_fix(plan)}."
    purpose = "the engine's source and what its build fetches"
    repositories = [
        EndpointNeed(name, url, purpose, fix=fix, unless=(Unless(_engine_done(plan)),))
        for name, url in _with_mirrors(plan, "source", pins.repo)
    ]
    return [*needs, *_any_of(plan, repositories)]


def _built_here(plan: Plan) -> bool:
    """The controller has a build of this commit to send; the engine step says when it does not fit."""
    pins = plan.recipe.route(plan.route)
    if not isinstance(pins, SourceRoute):
        return False
    found = (ROOT / plan.settings.wheelhouse).glob("*/provenance.json")
    return any(pins.commit in path.read_text("utf-8", errors="replace") for path in found)


def _with_mirrors(plan: Plan, name: str, url: str) -> list[tuple[str, str]]:
    """(name, URL) of an address and of its mirrors, which are tried first."""
    near = mirrored(url, [list(pair) for pair in plan.settings.url_mirrors.items()])
    return [
        (name if place == 0 else f"{name}.{place + 1}", found) for place, found in enumerate((*near, url))
    ]


def _files(
    plan: Plan, name: str, purpose: str, files: dict[str, list[str]], done: str, *, near: str
) -> list[EndpointNeed]:
    """Files by hash: one need for each server. What another server that answers has too is no failure."""
    servers: dict[str, str] = {}
    files_of: dict[str, set[str]] = {}
    for file, urls in files.items():
        for url in (found for first in urls for _, found in _with_mirrors(plan, name, first)):
            server = urlsplit(url).netloc
            servers.setdefault(server, url)
            files_of.setdefault(server, set()).add(file)
    good = {server for server, url in servers.items() if _answers(plan, url)}
    needs = []
    for number, (server, url) in enumerate(servers.items(), 1):
        others = sorted(other for other in good - {server} if files_of[other] & files_of[server])
        covered = set().union(*(files_of[other] for other in others))
        needs.append(
            EndpointNeed(
                name if number == 1 else f"{name}.{number}",
                url,
                purpose,
                alternative=f"{names(others)} has them too." if files_of[server] <= covered else None,
                fix=f"Set url_mirrors for {server}, {near}, or {_bundle_fix(plan)}.",
                unless=(Unless(done, tuple(sorted(files_of[server]))),),
            )
        )
    return needs


# -- weights -------------------------------------------------------------------------------------


def _weights(plan: Plan) -> list[EndpointNeed]:
    """The hubs that the site names, in its order: any of them is enough."""
    settings, sources = plan.settings, plan.recipe.model.sources
    if "generate" in settings.sources and sources.generate:
        return []
    other = next((name for name in settings.sources if name in ("path", "peer")), None)
    unless = Unless(f"grep -qsF {quote(plan.model_dir)} {quote(plan.layout.receipts + '/weights.json')}")
    fix = (
        "Set hub_endpoint (such as https://hf-mirror.com), add another source to `sources`, "
        "or copy the weights over and set sources = ['path'] with model_path."
    )
    endpoints = {"huggingface": settings.hub_endpoint, "modelscope": settings.modelscope_endpoint}
    found = []
    for name in settings.sources:
        hub = sources.huggingface if name == "huggingface" else sources.modelscope
        if name in HUBS and hub:
            base = (endpoints[name] or HUBS[name]).rstrip("/")
            api = "/api/models/" if name == "huggingface" else "/api/v1/models/"
            url = base + api + hub.repo
        elif name == "s3" and source_of("s3", plan.recipe, settings):
            url = settings.s3_endpoint or "https://s3.amazonaws.com"
        else:
            continue
        instead = f"The copy named by `{other}` is used instead." if other else None
        found.append(EndpointNeed(name, url, "the weights", instead, fix, unless=(unless,)))
    return _any_of(plan, found)
