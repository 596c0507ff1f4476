"""The weights step: delivered from the first source that works, and proven whole."""

from __future__ import annotations

import json
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.plan import Plan
from tasks.receipts import Artifact
from tasks.remote import quote
from tasks.steps import Done, StepFailed, job, onhost, python_of


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
        """The checkpoint and its manifest; where it comes from does not matter."""
        model = self.plan.recipe.model
        manifest = (
            digest_of_file(self.plan.recipe.beside(model.manifest)) if model.manifest else None
        )
        return digest_of([model.name, model.shards, model.bytes, manifest, self.plan.model_dir])

    def unchanged(self) -> str | None:
        """Verified before, and every file's size and time are as they were then."""
        receipt = self.plan.receipt(self.name)
        if (
            self.plan.settings.reverify != "full"
            and receipt
            and receipt.digest == self.digest()
            and receipt.detail.get("stat")
            and receipt.detail["stat"] == self.plan.state.model_stat
        ):
            return f"{receipt.detail.get('files')} files, verified {receipt.at}, untouched since"
        return None

    def act(self) -> Done:
        """Fetch what is missing or wrong, then verify everything."""
        plan, model = self.plan, self.plan.recipe.model
        if plan.settings.reverify == "full":
            plan.remote.run(f"rm -f {quote(self._stamp)}")
        if "generate" in plan.settings.sources and model.sources.generate:
            outcome = job(
                plan,
                "weights",
                self.digest(),
                ("sh", "-c", self._generate()),
                stdin=json.dumps(self._request()),
            )
        else:
            python = f"{plan.layout.tools}/bin/python" if plan.state.has("tools") else python_of(plan)
            outcome = job(
                plan,
                "weights",
                self.digest(),
                (python, onhost(plan, "fetch_weights.py"), "--stdin"),
                stdin=json.dumps(self._request()),
                env=(("TMPDIR", plan.layout.tmp), ("HF_HOME", f"{plan.layout.root}/cache/huggingface")),
                deadline=72 * 3600,
            )
        result = outcome.result
        stat = plan.remote.run(
            f"cd {quote(plan.model_dir)} && find . -type f -printf '%P %s %T@\\n' | LC_ALL=C sort | sha256sum"
        )
        if not stat.ok:
            raise StepFailed(f"{plan.model_dir} cannot be listed: {stat.stderr.strip()}")
        verified = result.get("verify") or {}
        served = [str(item.get("name") or item.get("kind")) for item in result.get("sources") or [] if item]
        detail: dict[str, Any] = {
            "stat": stat.stdout.split()[0],
            "digest": result.get("digest"),
            "sources": served,
            "fetched_bytes": result.get("fetched_bytes"),
            **{key: verified.get(key) for key in ("files", "bytes", "shards")},
        }
        size = int(verified.get("bytes") or 0)
        manifest = Artifact(f"{model.name}: all files", str(result.get("digest")), size)
        return Done(detail=detail, artifacts=(manifest,), paths=(plan.model_dir,))

    def _request(self) -> dict[str, Any]:
        """What `onhost/fetch_weights.py` reads. Tokens and credentials are not in it, only their files."""
        plan, model, settings = self.plan, self.plan.recipe.model, self.plan.settings
        request = {
            "dest": plan.model_dir,
            "sources": [source for name in settings.sources if (source := self._source(name))],
            "manifest": onhost(plan, "model.sha256") if model.manifest else None,
            "stamp": self._stamp,
            "concurrency": settings.download_workers,
            "shards": model.shards,
            "bytes": model.bytes,
        }
        return {key: value for key, value in request.items() if value is not None}

    @property
    def _stamp(self) -> str:
        return f"{self.plan.layout.run}/weights-{self.plan.recipe.model.name}.stamp"

    def _source(self, name: str) -> dict[str, Any] | None:
        """One source as the fetcher takes it, or None when the recipe does not have it."""
        model, settings = self.plan.recipe.model, self.plan.settings
        endpoints = {"huggingface": settings.hub_endpoint, "modelscope": settings.modelscope_endpoint}
        if name == "path":
            return {"kind": "path", "dir": settings.model_path, "how": "copy"}
        pins = getattr(model.sources, name, None)
        if pins is None:
            return None
        if name == "generate":
            return {"kind": "path", "dir": self._made, "how": "copy"}
        source = {"kind": name, **pins.model_dump()}
        if name in endpoints:
            source |= {"endpoint": endpoints[name], "token_file": settings.token_file}
        if name == "s3":
            source |= {"endpoint": settings.s3_endpoint, "addressing": settings.s3_addressing}
        return source

    @property
    def _made(self) -> str:
        return f"{self.plan.layout.tmp}/generated-{self.plan.recipe.model.name}"

    def _generate(self) -> str:
        """Write the checkpoint beside, then deliver it through the code path of real weights."""
        plan, source = self.plan, self.plan.recipe.model.sources.generate
        assert source is not None
        made = self._made
        python = quote(python_of(plan))
        return (
            f"{python} {quote(onhost(plan, source.program))} {quote(made)} </dev/null >&2"
            f" && {python} {quote(onhost(plan, 'fetch_weights.py'))} --stdin; rc=$?; rm -rf {quote(made)}; exit $rc"
        )
