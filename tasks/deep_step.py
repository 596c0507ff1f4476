"""The deep probe as a step of a site: what it proves is kept on the host, for the start of the service."""

from __future__ import annotations

from dataclasses import asdict

from tasks.checks.deep import deep_findings, proven_advice
from tasks.deep import STEP, proof_key, run_deep
from tasks.digest import digest_of
from tasks.plan import Plan
from tasks.steps import Done, StepFailed


class Deep:
    """Copies between host and GPUs and a real all_reduce, with the engine's own torch and NCCL."""

    name = STEP

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return "deep: copies and all_reduce over the GPUs"

    def digest(self) -> str:
        """The GPUs and how they are driven, and the engine whose NCCL was used."""
        engine = self.plan.receipt("engine")
        return digest_of([proof_key(self.plan), engine.digest if engine else None])

    def unchanged(self) -> str | None:
        """Proven before, on the same GPUs with the same engine; or there are none to prove."""
        if not self.plan.needs.want_gpu:
            return "the recipe uses no GPU"
        receipt = self.plan.receipt(self.name)
        verdict = (receipt.detail.get("verdict") or {}) if receipt else {}
        if receipt and receipt.digest == self.digest() and verdict.get("works") is True:
            return f"{verdict.get('why')}, proven {receipt.at}"
        return None

    def act(self) -> Done:
        """Run it. Raises StepFailed when the GPUs do not work together, or nothing could be proven."""
        plan = self.plan
        document, why = run_deep(plan)
        if document is None:
            raise StepFailed(f"{why}\nFix: mend that, or leave deep=true out")
        findings = deep_findings(plan.needs, plan.facts, document)
        plan.findings = [*(old for old in plan.findings if old.group != STEP), *findings]
        advice = proven_advice(document)
        plan.record.note(
            deep=document,
            nccl=asdict(advice) if advice else None,
            findings=[finding.to_json() for finding in plan.findings],
        )
        worst = next((finding for finding in findings if finding.status == "fail"), None)
        if worst:
            raise StepFailed(f"{worst.id}: {worst.summary} ({worst.observed})\nFix: {worst.fix}")
        if document["verdict"]["works"] is not True:
            unread = "; ".join(finding.summary for finding in findings if finding.status == "skipped")
            raise StepFailed(f"nothing is proven: {unread}\nFix: mend that, or leave deep=true out")
        for finding in findings:
            if finding.status == "warn":
                plan.say(f"{finding.id}: {finding.summary} ({finding.observed})")
        detail = {
            "of": proof_key(plan),
            "nccl": asdict(advice) if advice else None,
            "verdict": document["verdict"],
            "torch": document["torch"],
        }
        return Done(detail=detail)
