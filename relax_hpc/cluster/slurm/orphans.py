"""Orphans: parts of a run whose head is gone would hold their nodes, idle, to the time limit; so
they look themselves.

When Slurm ends component 0 of a heterogeneous job because it has lost its nodes, those with nodes
left live on: the first rank of each role looks after its own component. A job that one group has to
itself lives on whatever becomes of the hub's: its supervisor looks.
"""

from __future__ import annotations

import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Job, Slurm, SlurmError
from relax_hpc.cluster.slurm.job_endings import give_back, heed_user
from relax_hpc.cluster.slurm.job_lookup import is_over, own_job
from relax_hpc.cluster.slurm.layout import HUB
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.cluster.supervise.lease import holder_of
from relax_hpc.cluster.supervise.verdict import GONE, Evidence, Fate, verdict
from relax_hpc.config import Config
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.queue.plan import SUPERVISOR

_ASK_S = 10.0
"""Seconds between questions to slurmctld, which serves the whole cluster."""


class _Head:
    """Watch on whether somebody leads, as the lease of ``name`` says."""

    def __init__(self, run: RunDir, name: str, lease_s: float, job: str = "") -> None:
        """``job``: job whose head alone counts; empty: whoever leads."""
        self.run, self.name, self.lease_s, self.job = run, name, lease_s, job
        self.seen: tuple[object, float] = (None, time.monotonic())
        """Last beat, and when that was new, on the monotonic clock."""
        self._ask_at = 0.0

    def silent(self, now: float) -> bool:
        """Whether nobody has led for two leases, and it is time to ask Slurm (again) what became of
        the job."""
        holder = holder_of(self.run, self.name)
        # A successor in another job ends what is left of its predecessor, unless Slurm did not
        # answer.
        counts = not self.job or holder.get("allocation", "").rpartition("-")[0] == self.job
        beat = (holder["incarnation"], holder["beat"]) if holder and counts else None
        if beat is not None and beat != self.seen[0]:
            self.seen = beat, now
        if now - self.seen[1] < 2 * self.lease_s or now < self._ask_at:
            return False
        self._ask_at = now + _ASK_S
        return True


class Orphan:
    """Watch on whether the component of ``incarnation`` of a group has lost its head."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, group: str, incarnation: int
    ) -> None:
        launch = read_launch(run, group, incarnation)
        self.run, self.slurm, self.limits = run, slurm, config.liveness
        self.component = launch.job if launch else ""
        self.leader = launch.allocation.rpartition("-")[0] if launch else ""
        self.head = _Head(run, SUPERVISOR, config.liveness.lease_s, self.leader)

    def possible(self) -> bool:
        """Whether it is a component that can outlive the first one."""
        return bool(self.leader) and self.component != self.leader

    def look(self, now: float) -> bool:
        """Give the component back if nobody has supervised its job for two leases, and Slurm says
        that it is over.

        ``now``: of the monotonic clock. To be called again and again; whether it was done.
        """
        if not self.head.silent(now):
            return False
        try:
            if not _is_over(self.slurm.jobs(self.leader).get(self.leader), self.limits):
                return False
            give_back(self.run, self.slurm, self.component)
        except (SlurmError, OSError):
            return False
        return True


class Bereft:
    """Whether ``job``, which ``group`` has to itself, works for a run whose hub has lost its
    job."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, group: str, job: str) -> None:
        self.run, self.slurm, self.limits, self.job = run, slurm, config.liveness, job
        self.het = config.layout == "het"
        self.moved = self.het and group in config.groups
        """Whether it took the place of a component, which a successor has too; further members of a
        group have none."""
        self.name = SUPERVISOR if self.het else f"{SUPERVISOR}-hub"
        self.head = _Head(run, self.name, config.liveness.lease_s)

    def look(self, now: float) -> str:
        """Reason why the job is to end; empty: it is not.

        With a component in the successor, because the job of the whole run is over, and its
        successor may want these nodes. In the layout `jobs`, because no job of the hub is left that
        runs or could start: its successors are used up. If the user has cancelled the hub's job,
        and it could not say so, the run is asked to stop instead. ``now``: see `Orphan.look`.
        """
        if not self.head.silent(now):
            return ""
        try:
            last, _, life = holder_of(self.run, self.name).get("allocation", "").rpartition("-")
            hub = last if self.het else own_job(self.run, "hub") or last
            restarts = int(life) if hub == last and life.isdecimal() else None
            if not hub or heed_user(self.run, self.slurm, hub, restarts):
                return ""
            if self.moved and self._over(last):
                return "the job of the run is over: this one gives way to its successor"
            if not self.het and self._has_no_job(hub):
                text = f"relax-hpc submit --run_dir {self.run.root} --resume"
                return (
                    "no job of the hub is left, running or queued: this one ends; resume with "
                    f"{text}"
                )
        except (SlurmError, OSError):
            pass
        return ""

    def _has_no_job(self, hub: str) -> bool:
        """Whether Slurm, which knows this job, knows none of the hub that runs, ends or can start.

        ``hub``: the hub's last job, which the ledger does not have if a person called sbatch.
        """
        ids = {hub, *(entry.job for entry in Ledger(self.run).entries() if entry.group == HUB)}
        jobs = self.slurm.jobs(self.job, *sorted(ids))
        if self.job not in jobs:
            return False
        return all(
            is_over(job) and job.state != "COMPLETING"
            for job in jobs.values()
            if job.id != self.job
        )

    def _over(self, last: str) -> bool:
        """Whether the job of the whole run that was led ``last`` is, and no other one runs yet."""
        whole = {
            entry.job for entry in Ledger(self.run).living() if entry.kind in ("run", "successor")
        } | {last}
        jobs = self.slurm.jobs(*sorted(whole))
        return _is_over(jobs.get(last), self.limits) and all(
            job.state != "RUNNING" for job in jobs.values()
        )


def _is_over(job: Job | None, limits: LivenessConfig) -> bool:
    """Whether a job is over, as squeue knows it; None: squeue does not any more."""
    return verdict(Evidence(job=job.state if job else GONE), limits).fate in (
        Fate.DEAD,
        Fate.LEAVES,
    )
