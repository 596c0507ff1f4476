"""Uninstall: what the receipts name, and nothing else."""

from __future__ import annotations

from tasks.onhost.fetch_weights import REJECTED, WORK
from tasks.plan import SERVICE_USER, Plan
from tasks.remote import quote
from tasks.service import WRAPPER
from tasks.steps import Done, StepFailed

OWN_FOLDERS = (
    "env",
    "conda",
    "tools",
    "src",
    "wheels",
    "cache",
    "jobs",
    "receipts",
    "logs",
    "run",
    "tmp",
    "lib",
)


def remove_half(model_dir: str) -> str:
    """The sh that removes half and rejected files beside a model, unless another run is at work on it.

    On storage that several hosts share, the run may be another host's.
    """
    parent, _, name = model_dir.rpartition("/")
    work, rejected = f"{parent}/{WORK}", f"{parent}/{REJECTED}"
    half, lock = quote(f"{work}/{name}"), quote(f"{work}/{name}.lock")
    return (
        f"if [ ! -e {lock} ] || flock --nonblock {lock} true 2>/dev/null; then"
        f" rm -rf {half} {lock} {quote(f'{rejected}/{name}')};"
        f" rmdir {quote(work)} {quote(rejected)} 2>/dev/null; fi; :"
    )


def remove_model(model_dir: str) -> str:
    """The sh that removes a model, whose folders are closed, and what lies beside it."""
    path = quote(model_dir)
    return f"[ ! -d {path} ] || chmod -R u+w {path}; rm -rf {path} && {{ {remove_half(model_dir)}; }}"


class Uninstall:
    """The host as it was: no service, no unit, no user, no folder of ours. Foreign files stay."""

    name = "uninstall"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def label(self) -> str:
        """What the person sees."""
        return f"uninstall: {self.plan.layout.root}"

    def digest(self) -> str:
        """It has no receipt."""
        return ""

    def unchanged(self) -> str | None:
        """No receipt, no program of ours, no service."""
        state = self.plan.state
        installed = any(service.installed for service in self.plan.services.values())
        if not state.receipts and not state.ours and not installed:
            return "nothing of rackwright is here"
        return None

    def act(self) -> Done:
        """Stop, then remove: services and units, jobs, weights of ours, folders, the service user."""
        plan, layout = self.plan, self.plan.layout
        if plan.state.foreign_root:
            raise StepFailed(
                f"{layout.root} is not rackwright's (no .rackwright file in it)\nFix: correct root"
            )
        run, abandon = quote(layout.run), quote(f"{layout.run}/promotion")
        # a promotion and its guard would bring the safe mode back; what is told here is that nobody wants it
        self._sh(
            # runs of other controllers see it, and end
            f"[ ! -d {run} ] || : >{run}/uninstalling; [ ! -d {abandon} ] || : >{abandon}/abandoned;"
            f" {self._cancel(f'{layout.jobs}/promote/')}",
            "end a promotion, if one runs",
            120,
        )
        self._sh(plan.supervisor.remove(plan.service_names), "stop and remove the service", 400)
        self._sh(self._cancel(f"{layout.jobs}/*/"), "end running jobs", 120)
        self._sh(self._tidy_shm(), "remove the engine's shared memory", 60)
        weights = plan.receipt("weights")
        kept = []
        for path in weights.paths if weights else (plan.model_dir,):
            if path.startswith(layout.root + "/"):
                self._sh(remove_model(path), f"remove the weights: {path}", 600)
            else:
                kept += [path] if weights else []
                self._sh(remove_half(path), "remove half-downloaded weights", 600)
        folders = " ".join(quote(f"{layout.root}/{name}") for name in OWN_FOLDERS)
        model_root, jobs, tmp = quote(layout.model_root), quote(layout.jobs), quote(layout.tmp)
        self._sh(
            # whoever watches a job finds all of its state, with the word that it was cancelled, or none
            f"if [ -d {jobs} ]; then mkdir -p {tmp} && mv {jobs} {tmp}/; fi;"
            f" rm -rf {folders} && rmdir {model_root} 2>/dev/null; rm -f {quote(layout.root)}/.rackwright"
            f"; rmdir {quote(layout.root)} 2>/dev/null; :",
            f"remove the folders below {layout.root}",
            900,
        )
        if plan.state.has("made-user"):
            self._sh(f"userdel {SERVICE_USER} 2>/dev/null; :", "remove the service user", 60)
        for path in kept:
            plan.say(f"kept: {path} (outside root; remove it by hand if nobody else uses it)")
        return Done(receipt=False)

    def _tidy_shm(self) -> str:
        """The sh that removes the shared memory that engines left; its user is the receipt's."""
        service = self.plan.receipt("service")
        user = str(service.detail.get("user") or "") if service else ""
        if not user:
            return ":"
        return f"! u=$(id -u {quote(user)} 2>/dev/null) || sh -c {quote(WRAPPER)} sh --tidy-shm $u"

    def _cancel(self, folders: str) -> str:
        """The sh that ends the jobs in some folders (a pattern of sh)."""
        lib = quote(self.plan.layout.lib)
        pattern = "/".join(part if part == "*" else quote(part) for part in folders.split("/"))
        return (
            f'for d in {pattern}; do [ -d "$d" ] && for p in {lib}/*/job.sh; do'
            ' [ -f "$p" ] && sh "$p" cancel "$d" uninstall && break; done; done; :'
        )

    def _sh(self, script: str, what: str, timeout: float) -> None:
        self.plan.say(f"uninstall: {what}")
        done = self.plan.remote.run(script, timeout=timeout)
        if not done.ok:
            why = done.stderr.strip() or done.stdout.strip()
            raise StepFailed(f"cannot {what}: {why}\nFix: rackwright uninstall INVENTORY -y")
