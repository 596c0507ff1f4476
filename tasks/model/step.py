"""The weights step: delivered from the first source that works, and proven whole."""

from __future__ import annotations

import json
from typing import Any

from tasks.digest import digest_of, digest_of_file
from tasks.plan import Plan
from tasks.receipts import Artifact
from tasks.recipe import lock_path
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
            digest_of_file(lock_path(self.plan.recipe.name, model.manifest)) if model.manifest else None
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
                (python, onhost(plan, "fetch_weights.py")),
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
        detail: dict[str, Any] = {
            "stat": stat.stdout.split()[0],
            **{
                key: result.get(key)
                for key in ("files", "bytes", "shards", "digest", "source", "fetched_bytes")
            },
        }
        manifest = Artifact(
            f"{model.name} (manifest)", str(result.get("digest")), int(result.get("bytes") or 0)
        )
        return Done(detail=detail, artifacts=(manifest,), paths=(plan.model_dir,))

    def _request(self) -> dict[str, Any]:
        """What the onhost fetcher and verifier read."""
        plan, model, settings = self.plan, self.plan.recipe.model, self.plan.settings
        sources: list[dict[str, Any]] = []
        for name in settings.sources:
            pins = getattr(model.sources, name, None)
            if name == "path":
                sources.append({"kind": "path", "path": settings.model_path})
            elif name == "generate" and pins:
                sources.append({"kind": "path", "path": f"{plan.layout.tmp}/generated-{model.name}"})
            elif pins is not None:
                sources.append({"kind": name, **pins.model_dump()})
        return {
            "dest": plan.model_dir,
            "sources": sources,
            "manifest": onhost(plan, "model.sha256") if model.manifest else None,
            "expect": {"shards": model.shards, "bytes": model.bytes},
            "stamp": f"{plan.layout.run}/weights-{model.name}.stamp",
            "full": settings.reverify == "full",
            "workers": settings.download_workers,
            "token_file": settings.token_file,
            "endpoints": {"huggingface": settings.hub_endpoint, "modelscope": settings.modelscope_endpoint},
            "s3": {"endpoint": settings.s3_endpoint, "addressing": settings.s3_addressing},
        }

    def _generate(self) -> str:
        """Write the checkpoint beside, then deliver it through the code path of real weights."""
        plan, source = self.plan, self.plan.recipe.model.sources.generate
        assert source is not None
        made = f"{plan.layout.tmp}/generated-{plan.recipe.model.name}"
        python = quote(python_of(plan))
        return (
            f"{python} {quote(onhost(plan, source.program))} {quote(made)} </dev/null >&2"
            f" && {python} {quote(onhost(plan, 'fetch_weights.py'))}; rc=$?; rm -rf {quote(made)}; exit $rc"
        )
