"""The manifest of a host's copy: every file hashed or vouched for, compared with the recipe's."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

from tasks.digest import digest_of
from tasks.jobs import Outcome
from tasks.model import manifest, sources
from tasks.model.peer import stamp_file
from tasks.onhost import verify_weights
from tasks.plan import Plan
from tasks.remote import quote
from tasks.steps import Done, StepFailed, job, onhost, python_of

SHOWN = 20


class Manifest:
    """What the host has, as a manifest on the controller; fails where the copy is not the recipe's."""

    name = "manifest"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"manifest: {self.plan.recipe.model.name} in {self.plan.model_dir}"

    def digest(self) -> str:
        """It has no receipt: the copy is looked at each time."""
        return ""

    def unchanged(self) -> str | None:
        """Never: that is the question."""
        return None

    def act(self) -> Done:
        """Verify the copy, bring its manifest here, compare."""
        plan, model = self.plan, self.plan.recipe.model
        if plan.state.model_stat is None:
            raise StepFailed(f"{plan.model_dir} is not there\nFix: rackwright weights INVENTORY")
        on_host = f"{plan.layout.tmp}/{model.name}.sha256"
        request = {
            "dir": plan.model_dir,
            "stamp": stamp_file(plan),
            "full": plan.settings.reverify == "full",
            "write_manifest": on_host,
            "ignore": sources.ignored(plan.recipe, plan.settings),
            "threads": plan.settings.hash_threads or 0,
            "follow_links": True,
            "shards": model.shards,
            "bytes": model.bytes,
        }
        outcome = self._verified(request)
        text = plan.remote.run(f"base64 <{quote(on_host)} && rm -f {quote(on_host)}", timeout=300)
        if not text.ok:
            raise StepFailed(f"{on_host} cannot be read: {text.stderr.strip()}")
        found = verify_weights.parse_manifest(
            base64.b64decode(text.stdout).decode("utf-8", "surrogateescape")
        )
        kept = plan.record.page.parent / f"{model.name}.sha256"
        verify_weights.write_atomically(str(kept), manifest.render(found))
        plan.say(f"{len(found)} files, sha256 of all {manifest.digest(found)}: {kept}")
        self._compare(found)
        detail = {"files": len(found), "digest": manifest.digest(found), "file": str(kept)}
        return Done(detail={**detail, "hashed_bytes": outcome.result.get("hashed_bytes")}, receipt=False)

    def _verified(self, request: dict[str, Any]) -> Outcome:
        """Have the copy verified, as the weights step does: what the recipe's manifest vouches for is whole.

        A copy that is whole in itself and not the recipe's is good, too: `_compare` shows the differences.
        """
        if self.plan.recipe.model.manifest is None:
            return self._job(request)
        try:
            return self._job({**request, "manifest": onhost(self.plan, "model.sha256")})
        except StepFailed as different:
            with suppress(StepFailed):
                return self._job({**request, "full": False})  # everything has just been hashed
            raise different

    def _job(self, request: dict[str, Any]) -> Outcome:
        argv = (python_of(self.plan), onhost(self.plan, "verify_weights.py"), "--stdin")
        return job(
            self.plan, "verify-weights", digest_of(request), argv, stdin=json.dumps(request), again=True,
            deadline=24 * 3600,
        )  # fmt: skip

    def _compare(self, found: dict[str, str]) -> None:
        """Against the recipe's manifest. Raises StepFailed with every file that differs."""
        recipe = self.plan.recipe
        if recipe.model.manifest is None:
            self.plan.say(f"{recipe.name} has no manifest to compare with; rackwright manifest --help")
            return
        wanted = verify_weights.read_manifest(str(recipe.beside(recipe.model.manifest)))
        differences = manifest.compare(manifest.from_digests(wanted), manifest.from_digests(found))
        lines = manifest.explain(differences, "the recipe's manifest", self.plan.name)
        if lines:
            more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
            what = f"{len(lines)} files are not what {recipe.model.manifest} says"
            raise StepFailed(f"{what}\nFix: rackwright weights INVENTORY", [*lines[:SHOWN], *more])
        self.plan.say(f"equal to {recipe.model.manifest}")
