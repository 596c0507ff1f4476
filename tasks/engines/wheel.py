"""Route `wheel`: a stock engine from wheels, every one of them in the recipe's lock with its hash."""

from __future__ import annotations

from tasks.digest import digest_of, digest_of_file
from tasks.engines.properties import verified
from tasks.env import install_locked, pinned_wheels
from tasks.plan import Plan
from tasks.recipe import WheelRoute
from tasks.steps import Done


class WheelEngine:
    """The engine of the recipe's lock in `<root>/env`."""

    name = "engine"

    def __init__(self, plan: Plan, pins: WheelRoute) -> None:
        self.plan = plan
        self.pins = pins

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"engine: {self.pins.package} {self.pins.version} from wheels"

    def digest(self) -> str:
        """The lock's content, the stubs, and the environment it goes into."""
        lock = digest_of_file(self.plan.recipe.beside(self.pins.lock))
        environment = self.plan.receipt("environment")
        return digest_of(
            [
                self.pins.package,
                self.pins.version,
                lock,
                [shim.model_dump() for shim in self.pins.shims],
                [wheel.sha256 for wheel in self.pins.wheels],
                [self.pins.same_version, self.pins.extensions, self.pins.ops, self.pins.files],
                environment.digest if environment else None,
                environment.at if environment else None,
            ]
        )

    def unchanged(self) -> str | None:
        """The receipt matches, the program is there, and no install was cut off."""
        receipt = self.plan.receipt(self.name)
        if (
            receipt
            and receipt.digest == self.digest()
            and self.plan.state.has("engine")
            and not self.plan.state.has("broken-env")
        ):
            return f"{self.pins.package} {self.pins.version} is installed, as its lock says"
        return None

    def act(self) -> Done:
        """Download with hashes into the wheelhouse, install from there, verify."""
        plan = self.plan
        pinned_wheels(plan, self.pins.wheels)
        urls = plan.settings.extra_index_urls
        done = install_locked(
            plan,
            "engine",
            self.digest(),
            plan.layout.env,
            "engine.lock",
            {
                "extra_index_urls": self.pins.extra_index_urls if urls is None else urls,
                "shims": [shim.model_dump() for shim in self.pins.shims],
                "expect_import": self.pins.imports,
                "expect_versions": {self.pins.package: self.pins.version},
            },
        )
        checks = verified(plan, self.pins, self.digest())
        return Done(
            detail={
                "route": "wheel",
                "checks": checks,
                "package": self.pins.package,
                "version": self.pins.version,
                **done.detail,
            },
            artifacts=done.artifacts,
        )
