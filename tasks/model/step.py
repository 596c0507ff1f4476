"""The weights step: delivered from the first source that works, and proven whole."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from typing import Any

from tasks.jobs import Outcome, status
from tasks.mirrors import picked
from tasks.model import sources
from tasks.model.peer import NoPeer, delivering, has_model, manifest_file, serving, stamp_file, stop_serving
from tasks.plan import Plan
from tasks.proxy import through_proxy
from tasks.receipts import Artifact
from tasks.recipe import SourceName
from tasks.remote import LostHost, quote
from tasks.steps import Done, StepFailed, job, onhost, python_of

DEADLINE = 72 * 3600


class Weights:
    """`<model_root>/<name>`: every file of the manifest, with its SHA-256."""

    name = "weights"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"weights: {self.plan.recipe.model.name} in {self.plan.model_dir}"

    def digest(self) -> str:
        """The checkpoint; where it comes from does not matter."""
        return sources.digest(self.plan.recipe, self.plan.settings, self.plan.model_dir)

    def unchanged(self) -> str | None:
        """Verified before, and every file's size and time are as they were then."""
        receipt = self.plan.receipt(self.name)
        if receipt and self.plan.settings.reverify != "full" and has_model(self.plan):
            return f"{receipt.detail.get('files')} files, verified {receipt.at}, untouched since"
        return None

    def act(self) -> Done:
        """Fetch what is missing or wrong, then verify everything."""
        plan, model = self.plan, self.plan.recipe.model
        with delivering(plan):
            result = self._deliver().result
        stat = plan.remote.run(
            f"cd {quote(plan.model_dir)} && find -L . -type f -printf '%P %s %T@\\n'"
            " | LC_ALL=C sort | sha256sum"
        )
        if not stat.ok:
            raise StepFailed(f"{plan.model_dir} cannot be listed: {stat.stderr.strip()}")
        verified = result.get("verify") or {}
        used = [item for item in result.get("sources") or [] if item and item.get("state") == "used"]
        for source in used:
            if not source.get("files"):
                continue
            plan.say(f"weights: {source['files']} files came from {source['name']}")
        for wrong in result.get("rejected") or []:
            place = "that was here" if wrong["source"] == "already there" else f"from {wrong['source']}"
            plan.say(f"weights: {wrong['file']} {place} is wrong; kept at {wrong['kept_at']}")
        detail: dict[str, Any] = {
            "stat": stat.stdout.split()[0],
            "digest": result.get("digest"),
            "sources": [str(item["name"]) for item in used],
            **{
                key: result.get(key)
                for key in ("fetched_files", "fetched_bytes", "received_bytes", "kept_files", "notes")
            },
            "rejected": [item["file"] for item in result.get("rejected") or []],
            **{key: verified.get(key) for key in ("files", "bytes", "shards")},
        }
        size = int(verified.get("bytes") or 0)
        manifest = Artifact(f"{model.name}: all files", str(result.get("digest")), size)
        return Done(detail=detail, artifacts=(manifest,), paths=(plan.model_dir,))

    def _deliver(self) -> Outcome:
        """Have the fetcher's job done: begun here, or attached to where it runs already."""
        plan, key = self.plan, self.digest()
        own = [source for name in plan.settings.sources if (source := self._source(name))]
        now = status(plan.remote, onhost(plan, "job.sh"), f"{plan.layout.jobs}/{self.name}", 0)
        if now.state == "running" and now.key == key:
            outcome = self._run(self._request(own, None))
            if "peer" in plan.settings.sources:
                stop_serving(plan)
            return outcome
        if plan.settings.reverify == "full":
            plan.remote.run(f"rm -f {quote(stamp_file(plan))}")
        if self._generates():
            return self._run(self._request([{"kind": "path", "dir": self._made, "how": "copy"}], None), True)
        secrets = sources.secrets_of(plan.recipe, plan.settings, os.environ)
        if "peer" not in plan.settings.sources:
            return self._with_secrets(own, secrets)
        place = sum(bool(self._source(name)) for name in self._before("peer"))
        with ExitStack() as stack:
            why = None
            try:
                peer = stack.enter_context(serving(plan))
            except NoPeer as error:
                why = f"peer {plan.settings.peer}: {error}"
                plan.say(f"weights: not from {why}")
            else:
                own.insert(place, peer.source)
                secrets[sources.PEER_TOKEN] = peer.token
            try:
                return self._with_secrets(own, secrets)
            except StepFailed as failure:
                if why is None:
                    raise
                raise StepFailed(f"{failure}\nNot asked: {why}", failure.log) from failure

    def _source(self, name: SourceName) -> dict[str, Any] | None:
        mirror = picked(self.plan, "hub_endpoint", None)
        return sources.source_of(name, self.plan.recipe, self.plan.settings, mirror)

    def _before(self, name: SourceName) -> list[SourceName]:
        """The sources that the site prefers to this one."""
        names = self.plan.settings.sources
        return names[: names.index(name)]

    def _generates(self) -> bool:
        """The recipe writes its checkpoint itself, and no source that the site prefers has it."""
        names, model = self.plan.settings.sources, self.plan.recipe.model
        if "generate" not in names or model.sources.generate is None:
            return False
        return not any(name == "peer" or self._source(name) for name in self._before("generate"))

    def _with_secrets(self, found: list[dict[str, Any]], secrets: dict[str, str]) -> Outcome:
        """Run the fetcher, with its secrets in a file of its own that it deletes when it has read it."""
        plan = self.plan
        if not secrets:
            return self._run(self._request(found, None))
        path = f"{plan.layout.run}/weights-secrets-{self.digest()[:12]}.json"
        new = quote(path + ".new")
        written = plan.remote.run(
            f"umask 077; rm -f {new}; cat >{new} && mv -f {new} {quote(path)}", stdin=json.dumps(secrets)
        )
        if not written.ok:
            raise StepFailed(f"{path} cannot be written: {written.stderr.strip()}\nFix: free space there")
        try:
            return self._run(self._request(found, path))
        finally:
            with suppress(LostHost):  # the fetcher has deleted it, unless it did not start
                plan.remote.run(f"rm -f {quote(path)}")

    def _run(self, request: dict[str, Any], generate: bool = False) -> Outcome:
        """The job itself."""
        plan = self.plan
        tools = f"{plan.layout.tools}/bin/python"
        argv: tuple[str, ...] = (
            tools if plan.state.has("tools") else python_of(plan),
            onhost(plan, "fetch_weights.py"),
            "--stdin",
        )
        return job(
            plan,
            self.name,
            self.digest(),
            ("sh", "-c", self._generate()) if generate else through_proxy(plan, argv),
            stdin=json.dumps(request),
            env=(("TMPDIR", plan.layout.tmp),),
            deadline=DEADLINE,
            again=plan.settings.reverify == "full",
        )

    def _request(self, found: list[dict[str, Any]], secrets: str | None) -> dict[str, Any]:
        """What `onhost/fetch_weights.py` reads. Tokens and credentials are not in it, only their files."""
        plan, model, settings = self.plan, self.plan.recipe.model, self.plan.settings
        manifest = onhost(plan, "model.sha256") if model.manifest else self._kept_manifest()
        request = {
            "dest": plan.model_dir,
            "sources": found,
            "secrets": secrets,
            "manifest": manifest,
            "write_manifest": manifest_file(plan),
            "ignore": sources.ignored(plan.recipe, settings),
            "stamp": stamp_file(plan),
            "concurrency": settings.download_workers,
            "threads": settings.hash_threads,
            "shards": model.shards,
            "bytes": model.bytes,
        }
        return {key: value for key, value in request.items() if value is not None}

    def _kept_manifest(self) -> str | None:
        """What an earlier delivery of this very model proved: with it, the next one needs no hub."""
        plan, path = self.plan, manifest_file(self.plan)
        receipt = plan.receipt(self.name)
        if receipt and receipt.digest == self.digest() and plan.remote.run(f"[ -f {quote(path)} ]").ok:
            return path
        return None

    @property
    def _made(self) -> str:
        return f"{self.plan.layout.tmp}/generated-{self.plan.recipe.model.name}"

    def _generate(self) -> str:
        """Write the checkpoint beside, then deliver it through the code path of real weights."""
        plan, source = self.plan, self.plan.recipe.model.sources.generate
        assert source is not None
        python, made = quote(python_of(plan)), quote(self._made)
        return (
            f"{python} {quote(onhost(plan, source.program))} {made} </dev/null >&2"
            f" && {python} {quote(onhost(plan, 'fetch_weights.py'))} --stdin"
            f"; rc=$?; rm -rf {made}; exit $rc"
        )
