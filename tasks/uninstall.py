"""Uninstall: what the receipts name, and nothing else."""

from __future__ import annotations

from tasks.former import end_supervisord, remove_units
from tasks.onhost.fetch_weights import REJECTED, WORK
from tasks.plan import Plan
from tasks.remote import quote
from tasks.service import WRAPPER
from tasks.startup import PROBE_SECONDS
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
        f" rm -rf {half} {lock} {quote(f'{rejected}/{name}')} || exit 1;"
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
        # first: a bring-up whose service is stopped puts back what served before
        self._sh(self._end_work(), "end running jobs", 300 + self._patience)
        self._sh(
            f"{{ {remove_units(plan)}; }} && {{ {end_supervisord(plan)}; }}"
            f" && {{ {plan.supervisor.remove(plan.service_names)}; }}",
            "stop and remove the service",
            400,
        )
        self._sh(self._tidy_shm(), "remove the engine's shared memory", 60)
        weights = plan.receipt("weights")
        kept = []
        for path in weights.paths if weights else (plan.model_dir,):
            if path.startswith(layout.root + "/"):
                self._sh(remove_model(path), f"remove the weights: {path}", 600)
            else:
                kept += [path] if weights else []
                self._sh(remove_half(path), "remove half-downloaded weights", 600)
        if plan.state.has("made-user"):
            # before the folders: an uninstall that was interrupted still knows whom it made
            for line in self._sh(self._remove_users(), "remove the service user", 60).splitlines():
                plan.say(line)
        self._sh(self._remove_folders(), f"remove the folders below {layout.root}", 900)
        for path in kept:
            plan.say(f"kept: {path} (outside root; remove it by hand if nobody else uses it)")
        return Done(receipt=False)

    @property
    def _patience(self) -> int:
        """Seconds until a promotion's guard sees that it is to end: after a stop, or a look at an engine."""
        return self.plan.recipe.serve.stop_seconds + PROBE_SECONDS + 60

    def _end_work(self) -> str:
        """The sh that ends all jobs, and waits until the guard of a promotion has ended too."""
        layout = self.plan.layout
        run, lib, folder = quote(layout.run), quote(layout.lib), f"{layout.run}/promotion"
        lock = quote(f"{folder}/lock")
        # a promotion may end by itself when it reads that word, and whoever watches it reads this one
        told = (
            f"for d in {quote(layout.jobs)}/*/; do"
            ' [ ! -d "$d" ] || [ -f "$d/rc" ] || echo uninstall >"$d/cancelled"; done'
        )
        # a promotion and its guard would bring the safe mode back; one that just begins forgets that word
        abandon = f"[ ! -d {quote(folder)} ] || : >{quote(folder)}/abandoned"
        cancel = (
            f'for d in {quote(layout.jobs)}/*/; do [ -d "$d" ] && for p in {lib}/*/job.sh; do'
            ' [ -f "$p" ] && sh "$p" cancel "$d" uninstall && break; done; done'
        )
        return (
            # runs of other controllers see it, and end
            f"[ ! -d {run} ] || : >{run}/uninstalling; {told}; {abandon}; {cancel}; {abandon};"
            f" [ ! -e {lock} ] || flock --timeout {self._patience} {lock} true"
            " || { echo a promotion is still bringing the safe mode back >&2; exit 1; }"
        )

    def _remove_users(self) -> str:
        """The sh that removes the users that we made, and says whom something else needs."""
        made = quote(f"{self.plan.layout.run}/made-user")
        return (
            f'for u in $(cat {made}); do ! id -u "$u" >/dev/null 2>&1 || why=$(userdel "$u" 2>&1)'
            ' || echo "kept: the user $u: $why"; done'
        )

    def _remove_folders(self) -> str:
        """The sh that removes our folders, and then the mark that they are ours."""
        layout = self.plan.layout
        folders = " ".join(quote(f"{layout.root}/{name}") for name in OWN_FOLDERS)
        root, jobs, tmp = quote(layout.root), quote(layout.jobs), quote(layout.tmp)
        return (
            # whoever watches a job finds all of its state, with the word that it was cancelled, or none
            f"if [ -d {jobs} ]; then mkdir -p {tmp} && mv {jobs} {tmp}/; fi;"
            f" rm -rf {folders} || exit 1; rmdir {quote(layout.model_root)} 2>/dev/null;"
            f" rm -f {root}/.rackwright || exit 1; rmdir {root} 2>/dev/null; :"
        )

    def _tidy_shm(self) -> str:
        """The sh that removes the shared memory that engines left; its user is the receipt's."""
        service = self.plan.receipt("service")
        user = str(service.detail.get("user") or "") if service else ""
        if not user:
            return ":"
        return f"! u=$(id -u {quote(user)} 2>/dev/null) || sh -c {quote(WRAPPER)} sh --tidy-shm $u"

    def _sh(self, script: str, what: str, timeout: float) -> str:
        plan = self.plan
        plan.say(f"uninstall: {what}")
        done = plan.remote.run(script, timeout=timeout)
        if not done.ok:
            lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.rc}").splitlines()
            why = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} lines more" if lines[3:] else "")
            # what containers or another user wrote is root's to remove
            root = "" if plan.facts.system.uid == 0 else " --sudo"
            raise StepFailed(f"cannot {what}: {why}\nFix: rackwright uninstall INVENTORY -y{root}")
        return done.stdout
