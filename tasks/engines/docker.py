"""Route `docker`: the official image, pinned, inspected before anything is started from it."""

from __future__ import annotations

import json

from tasks.digest import digest_of
from tasks.jobs import in_units
from tasks.offline import bundle_of
from tasks.plan import Plan
from tasks.receipts import Artifact
from tasks.recipe import DockerRoute
from tasks.remote import quote
from tasks.steps import Done, job, onhost, python_of


class DockerEngine:
    """The image of the recipe in this host's Docker Engine."""

    name = "engine"

    def __init__(self, plan: Plan, pins: DockerRoute) -> None:
        self.plan = plan
        self.pins = pins

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"engine: image {self.pins.image}"

    def digest(self) -> str:
        """The image's pins and what must be inside."""
        pins, hardware = self.pins, self.plan.recipe.hardware
        return digest_of(
            [pins.image, pins.digest, pins.image_id, pins.versions, pins.cuda_major, hardware.count]
        )

    def unchanged(self) -> str | None:
        """The receipt matches, and Docker still has that very image."""
        receipt = self.plan.receipt(self.name)
        if receipt is None or receipt.digest != self.digest() or receipt.detail.get("route") != "docker":
            return None
        ref = str(receipt.detail.get("ref"))
        if not self.plan.remote.run(f"docker image inspect {quote(ref)} >/dev/null 2>&1").ok:
            return None
        return f"{self.pins.image} is here ({ref[:19]})"

    def act(self) -> Done:
        """Pull or load, compare, look inside, see the GPUs from inside."""
        plan, pins = self.plan, self.pins
        receipt, bundle = plan.receipt(self.name), bundle_of(plan)
        recorded = None
        if receipt and receipt.detail.get("image") == pins.image:
            recorded = {"digest": receipt.detail.get("digest"), "id": receipt.detail.get("ref")}
        request = {
            "image": pins.image,
            "digest": pins.digest,
            "image_id": pins.image_id,
            "recorded": None if pins.digest or pins.image_id else recorded,
            "replacement": pins.replacement,
            "archives": bundle.images() if bundle else [],
            "mirrors": plan.settings.registry_mirrors,
            "offline": bundle is not None,
            "bytes": pins.image_bytes,
            "versions": pins.versions,
            "cuda_major": pins.cuda_major,
            "gpus": plan.recipe.hardware.count,
        }
        argv = (python_of(plan), onhost(plan, "docker_image.py"), "--stdin")
        outcome = job(
            plan,
            "engine-image",
            digest_of(request),
            argv,
            stdin=json.dumps(request),
            again=True,
            deadline=12 * 3600,
        )
        found = outcome.result
        if not (pins.digest or pins.image_id):
            seen = found.get("digest") or found["id"]
            plan.say(f"engine: the recipe pins no digest; {pins.image} is {seen}, recorded")
        plan.say(f"engine: {pins.image} ({in_units(int(found['bytes']), 'bytes')}, {found['how']})")
        return Done(
            detail={
                "route": "docker",
                "package": pins.image.rpartition(":")[0],
                "version": pins.image.rpartition(":")[2],
                **{key: found.get(key) for key in ("image", "ref", "digest", "how", "versions", "cuda")},
                **{key: found.get(key) for key in ("gpu", "gpus", "seconds")},
            },
            artifacts=(Artifact(pins.image, str(found["id"]).removeprefix("sha256:"), int(found["bytes"])),),
        )
