"""Route `source`: built once from one commit, installed from the wheel that came out, here or elsewhere.

Each phase is a detached job of its own: source, resolve, packages, build, install, verify. A phase that was
done is looked at again and found done; a phase that was cut off goes on where it was.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.endpoints import PYTORCH_INDEX
from tasks.engines.properties import verified
from tasks.engines.wheelhouse import (
    FILES,
    Entry,
    choose,
    entries_here,
    list_script,
    parse_list,
    sums_of,
)
from tasks.env import (
    index_settings,
    install_locked,
    pinned_wheels,
    torch_index,
    torch_indexes,
    url_mirrors,
)
from tasks.jobs import Outcome, in_units
from tasks.launch import CUDA_HOME, SYSTEM_PATH
from tasks.offline import bundle_of
from tasks.paths import ROOT
from tasks.plan import Plan
from tasks.proxy import through_proxy
from tasks.receipts import Artifact
from tasks.recipe import SourceRoute
from tasks.remote import quote, write_file
from tasks.shipping import NotShipped, fetch_file, send_file
from tasks.steps import Done, StepFailed, job, onhost

BUILD_HOURS = 24


class SourceEngine:
    """The engine of one commit in `<root>/env`. With `build`, this host builds it, whoever else has it."""

    name = "engine"

    def __init__(self, plan: Plan, pins: SourceRoute, *, build: bool = False) -> None:
        self.plan = plan
        self.pins = pins
        self.build = build
        self.src = f"{plan.layout.src}/{pins.package}"
        self.deps = f"{plan.layout.src}/{pins.package}-deps"
        self.lock = f"{plan.layout.src}/{pins.package}.lock"
        self.python = f"{plan.layout.env}/bin/python"

    @property
    def label(self) -> str:
        """What the person sees."""
        how = "built here" if self.build else "from source"
        return f"engine: {self.pins.package} {self.pins.version} {how} ({self.pins.commit[:12]})"

    @property
    def settings_of_build(self) -> dict[str, str]:
        """Environment variables that decide what is built."""
        version = {
            "VLLM_VERSION_OVERRIDE": self.pins.version,
            "SETUPTOOLS_SCM_PRETEND_VERSION": self.pins.version,
        }
        return {**version, **self.pins.env}

    @property
    def target(self) -> str:
        """The device that is built for."""
        return self.pins.env.get("VLLM_TARGET_DEVICE", "cuda")

    @property
    def wanted(self) -> dict[str, str]:
        """What a build must be for, as far as it is known before building."""
        system, env = self.plan.facts.system, self.pins.env
        return {
            "commit": self.pins.commit,
            "cuda": self.pins.cuda_toolkit,
            "arch": env.get("TORCH_CUDA_ARCH_LIST") or env.get("VLLM_TARGET_DEVICE") or "none",
            "python": self.pins.python,
            "glibc": system.libc_version or "none",
            "machine": system.machine or "none",
        }

    def digest(self) -> str:
        """The pins, the build's settings, and the environment it goes into."""
        environment = self.plan.receipt("environment")
        lock = digest_of_file(self.plan.recipe.beside(self.pins.lock)) if self.pins.lock else None
        return digest_of(
            [
                self.pins.model_dump(exclude={"env_bytes", "bytes_per_job", "repo", "wheels"}),
                [wheel.sha256 for wheel in self.pins.wheels],
                lock,
                environment.digest if environment else None,
                environment.at if environment else None,
            ]
        )

    def unchanged(self) -> str | None:
        """The receipt matches, the program is there, no install was cut off; to build: it was built here."""
        state, receipt = self.plan.state, self.plan.receipt(self.name)
        if (
            receipt is None
            or receipt.digest != self.digest()
            or not state.has("engine")
            or state.has("broken-env")
        ):
            return None
        built = receipt.detail.get("how") == "built"
        if self.build and not (built and self._kept(str(receipt.detail.get("key_id")))):
            return None
        return f"{self.pins.package} at {self.pins.commit[:12]} is installed, {receipt.detail.get('how')}"

    def act(self) -> Done:
        """Find the wheel or build it; install it with its lock; verify by properties."""
        plan = self.plan
        entry, how = self._find()
        if entry is None:
            entry, how = self._build(), "built"
        pinned_wheels(self.plan, self.pins.wheels)
        done = self._install(entry)
        checks = self._verify(entry)
        if self.build:
            self._keep(entry)
        plan.say(f"engine: {entry.wheel} ({how}), {len(checks)} properties verified")
        return Done(
            detail={
                "route": "source",
                "package": self.pins.package,
                "version": self.pins.version,
                "commit": self.pins.commit,
                "how": how,
                "key": entry.key,
                "key_id": entry.id,
                "wheel": entry.wheel,
                "build_seconds": entry.provenance.get("seconds"),
                "checks": checks,
                **done.detail,
            },
            artifacts=(Artifact(entry.wheel, entry.sha256, entry.bytes), *done.artifacts),
        )

    # -- find ----------------------------------------------------------------------------------

    def _find(self) -> tuple[Entry | None, str]:
        """An entry for this host: its own, the bundle's, the controller's. Raises StepFailed.

        The wheelhouse may hold this engine for other hosts only: that is refused, with the difference.
        """
        plan = self.plan
        answer = plan.remote.run(list_script(plan.layout.wheelhouse))
        entry, _ = choose(parse_list(answer.stdout), self.wanted, self.settings_of_build)
        if entry is not None and (not self.build or entry.provenance.get("lock_sha256")):
            return entry, "built" if not self._came_from_elsewhere(entry) else "wheelhouse"
        if self.build:
            return None, ""
        bundle = bundle_of(plan)
        if bundle:
            entry, _ = choose(bundle.built, self.wanted, self.settings_of_build)
            if entry:
                return self._adopt(entry), "bundle"
        entry, refused = choose(entries_here(self._store), self.wanted, self.settings_of_build)
        if entry:
            return self._bring(entry), "wheelhouse"
        if refused:
            raise StepFailed(
                f"the wheelhouse {self._store} has this engine, for other hosts than this one:\n  "
                + "\n  ".join(refused)
                + f"\nFix: rackwright build INVENTORY --limit {plan.name}"
            )
        return None, ""

    @property
    def _store(self) -> Path:
        return ROOT / self.plan.settings.wheelhouse

    def _came_from_elsewhere(self, entry: Entry) -> bool:
        host = entry.provenance.get("host") or {}
        return bool(host.get("name") != self.plan.facts.system.hostname)

    def _adopt(self, entry: Entry) -> Entry:
        """Copy an entry of the bundle, which may be read-only, to the host's own; whole or not at all."""
        plan = self.plan
        dest = f"{plan.layout.wheelhouse}/{entry.id}"
        done = plan.remote.run(
            f"rm -rf {quote(dest)}.new {quote(dest)} && mkdir -p {quote(plan.layout.wheelhouse)}"
            f" && cp -r {quote(entry.place)} {quote(dest)}.new && mv {quote(dest)}.new {quote(dest)}",
            timeout=900,
        )
        if not done.ok:
            raise StepFailed(f"cannot write {dest}: {done.stderr.strip()}\nFix: free space there")
        return replace(entry, place=dest)

    def _bring(self, entry: Entry) -> Entry:
        """Copy an entry of the controller to the host; its provenance last."""
        plan = self.plan
        dest = f"{plan.layout.wheelhouse}/{entry.id}"
        plan.say(f"engine: {entry.wheel} from the wheelhouse ({in_units(entry.bytes, 'bytes')})")
        try:
            for name, digest in sums_of(entry).items():
                send_file(plan.remote, Path(entry.place) / name, f"{dest}/{name}", digest, plan.say)
        except NotShipped as failure:
            sums = sums_of(entry)
            whole = all(digest_of_file(Path(entry.place) / name) == sums[name] for name in sums)
            anew = f"remove {entry.place} and run: rackwright build INVENTORY --limit HOST"
            raise StepFailed(f"{failure}\nFix: {'run again' if whole else anew}") from failure
        return replace(entry, place=dest)

    # -- build ---------------------------------------------------------------------------------

    def _build(self) -> Entry:
        plan, pins = self.plan, self.pins
        source = self._fetch_source()
        pinned_wheels(self.plan, self.pins.wheels)
        self._environment()
        request = {
            "src": self.src,
            "deps": self.deps,
            "python": self.python,
            "uv": f"{plan.layout.env}/bin/uv",
            "lock": self.lock,
            "wheelhouse": plan.layout.wheelhouse,
            "commit": pins.commit,
            "repo": pins.repo,
            "source": {key: source.get(key) for key in ("tree", "how", "dependencies")},
            "env": self.settings_of_build,
            "cuda_home": pins.env.get("CUDA_HOME", CUDA_HOME) if self.target == "cuda" else None,
            "cuda_toolkit": pins.cuda_toolkit,
            "max_jobs": plan.settings.max_jobs,
            "nvcc_threads": plan.settings.nvcc_threads,
            "bytes_per_job": pins.bytes_per_job,
            "cache": f"{plan.layout.root}/cache",
            "state": f"{plan.layout.src}/{pins.package}-build.json",
        }
        outcome = self._job(
            "engine-build",
            self._program("build_engine.py"),
            request,
            env=tuple(sorted(self._build_environment().items())),
            deadline=BUILD_HOURS * 3600,
        )
        entries = parse_list(plan.remote.run(list_script(plan.layout.wheelhouse)).stdout)
        built = next((entry for entry in entries if entry.id == outcome.result.get("id")), None)
        if built is None:
            raise StepFailed(f"the build left no entry in {plan.layout.wheelhouse}\nFix: run again")
        plan.say(
            f"engine: built in {outcome.result.get('seconds')} s with {outcome.result.get('jobs')} jobs:"
            f" {built.wheel}"
        )
        return built

    def _build_environment(self) -> dict[str, str]:
        """Own HOME and the caches of serving, so that what one compiles the other finds."""
        layout = self.plan.layout
        return {
            **layout.caches(),
            "HOME": f"{layout.root}/cache/home",
            "PATH": f"{layout.env}/bin:{CUDA_HOME}/bin:{SYSTEM_PATH}",
            "LC_ALL": "C.UTF-8",
        }

    def _fetch_source(self) -> dict[str, Any]:
        plan, pins, settings = self.plan, self.pins, self.plan.settings
        bundle = bundle_of(plan)
        archive, archives = settings.source_archive, None
        if bundle:
            archive, archives = bundle.source(pins.package)
        elif archive:
            archive = self._archive_on_host(archive)
        request = {
            "repo": pins.repo,
            "commit": pins.commit,
            "dest": self.src,
            "deps": self.deps,
            "ref": pins.tag,
            "archive": archive,
            "tree": pins.tree,
            "archives": archives,
            "mirrors": url_mirrors(plan),
            "http_version": settings.git_http_version,
            "target": self.target,
            "skip": pins.skip_dependencies,
            "pins": pins.dependencies,
            "offline": bundle is not None,
        }
        argv = through_proxy(plan, self._program("fetch_source.py"))
        return self._job("engine-source", argv, request, deadline=6 * 3600).result

    def _archive_on_host(self, path: str) -> str:
        """`source_archive` lies on the host, or on the controller and is sent."""
        plan = self.plan
        if plan.remote.run(f"[ -f {quote(path)} ]").ok:
            return path
        local = Path(path)
        if not local.is_file():
            raise StepFailed(
                f"source_archive = {path!r}: no such file on {plan.name} or here\nFix: correct the path"
            )
        dest = f"{plan.layout.tmp}/{local.name}"
        try:
            send_file(plan.remote, local, dest, digest_of_file(local), plan.say)
        except NotShipped as failure:
            raise StepFailed(f"{failure}\nFix: run again") from failure
        return dest

    def _environment(self) -> None:
        """uv, then the lock (the recipe's, or resolved from the tree), then every package of it."""
        plan, pins = self.plan, self.pins
        install_locked(plan, "engine-uv", self.digest(), plan.layout.env, "uv.lock", {}, again=True)
        if pins.lock:
            lock = quote(onhost(plan, "source.lock"))
            done = plan.remote.run(f"mkdir -p {quote(plan.layout.src)} && cp {lock} {quote(self.lock)}")
            if not done.ok:
                raise StepFailed(f"cannot write {self.lock}: {done.stderr.strip()}\nFix: free space there")
        else:
            index = index_settings(plan)
            request = {
                "src": self.src,
                "requirements": [pins.build_requirements, pins.requirements],
                "python": self.python,
                "uv": f"{plan.layout.env}/bin/uv",
                "lock": self.lock,
                "drop_lines": pins.drop_lines,
                "pinned": [
                    {
                        "package": w.package,
                        "version": w.version,
                        "sha256": w.sha256,
                        "file": w.file,
                        "bytes": w.bytes,
                    }
                    for w in pins.wheels
                ],
                "pinned_folder": plan.layout.wheels,
                "torch_backend": pins.torch_backend,
                "torch_index": self._torch_index_of_site(),
                "index_url": index["index_url"],
                "extra_index_urls": index["extra_index_urls"],
                "find_links": index["find_links"],
                "offline": index["offline"],
                "cache": f"{plan.layout.root}/cache/uv",
            }
            self._job("engine-resolve", self._program("resolve_env.py"), request, deadline=3600)
        self._install_lock("engine-packages", self.lock, {})

    def _torch_index_of_site(self) -> str | None:
        """An index in place of PyTorch's own, which uv knows by the backend's name."""
        index = torch_index(self.plan, self.pins.torch_backend)
        return None if index is None or index.startswith(PYTORCH_INDEX) else index

    # -- install and verify --------------------------------------------------------------------

    def _install_lock(self, name: str, lock: str, more: dict[str, object]) -> Done:
        plan = self.plan
        torch = torch_indexes(plan, self.pins.torch_backend)
        urls = [*torch, *(plan.settings.extra_index_urls or [])]
        return install_locked(
            plan,
            name,
            self.digest(),
            plan.layout.env,
            lock,
            {"extra_index_urls": urls, **more},
            again=True,
        )

    def _install(self, entry: Entry) -> Done:
        """The lock that the engine was built with, and the engine's wheel as one more line of it."""
        plan = self.plan
        lock = f"{entry.place}/install.lock"
        line = (
            f"{self.pins.package}=={_wheel_version(entry.wheel)} \\\n    --hash=sha256:{entry.sha256}\n"
            f"    # {entry.wheel} {entry.bytes}\n"
        )
        done = plan.remote.run(
            f"{write_file(entry.place + '/line', line)} && cat {quote(entry.place)}/engine.lock"
            f" {quote(entry.place)}/line >{quote(lock)}.new && mv {quote(lock)}.new {quote(lock)}"
            f" && rm {quote(entry.place)}/line"
        )
        if not done.ok:
            raise StepFailed(f"cannot write {lock}: {done.stderr.strip()}\nFix: free space there")
        more: dict[str, object] = {
            "find_links": [entry.place, *index_settings(plan)["find_links"]],
            "expect_versions": {self.pins.package: _wheel_version(entry.wheel)},
        }
        return self._install_lock("engine", lock, more)

    def _verify(self, entry: Entry) -> list[str]:
        """Properties, not the version string. Returns the names of the checks. Raises StepFailed."""
        if entry.key["commit"] != self.pins.commit:
            raise StepFailed(f"{entry.wheel} is of commit {entry.key['commit']}, not {self.pins.commit}")
        versions = {"torch": entry.key["torch"]} if entry.key["torch"] != "none" else {}
        return ["commit", *verified(self.plan, self.pins, self.digest(), versions)]

    # -- keep ----------------------------------------------------------------------------------

    def _kept(self, key_id: str) -> bool:
        return any(entry.id == key_id for entry in entries_here(self._store))

    def _keep(self, entry: Entry) -> None:
        """Copy the entry to the controller, for the other hosts; its provenance last."""
        plan, dest = self.plan, self._store / entry.id
        names = [entry.wheel, *FILES[1:], FILES[0]]
        listed = plan.remote.run(
            f"cd {quote(entry.place)} && for f in {' '.join(quote(name) for name in names)};"
            ' do echo "$(sha256sum "$f" | cut -d" " -f1) $(wc -c <"$f") $f"; done'
        )
        try:
            for line in listed.stdout.splitlines():
                digest, size, name = line.split(" ", 2)
                fetch_file(plan.remote, f"{entry.place}/{name}", dest / name, digest, int(size), plan.say)
        except (NotShipped, OSError, ValueError) as failure:
            raise StepFailed(
                f"the wheel cannot be kept in {self._store}: {failure}\nFix: run again"
            ) from failure
        plan.say(f"engine: kept for other hosts in {dest}")

    def _program(self, name: str) -> tuple[str, ...]:
        return (self.python, onhost(self.plan, name), "--stdin")

    def _job(self, name: str, argv: tuple[str, ...], request: dict[str, Any], **more: Any) -> Outcome:
        """One phase. What was done before is looked at again: it may be gone since."""
        return job(
            self.plan,
            name,
            digest_of([self.digest(), request]),
            argv,
            stdin=json.dumps(request),
            again=True,
            **more,
        )


def _wheel_version(file: str) -> str:
    """The version in a wheel's file name."""
    return file.split("-")[1]
