"""Orphans: components and jobs of a run whose head is gone. They would hold their nodes idle until
the time limit, so they end themselves.

When component 0 of a heterogeneous job loses its nodes, Slurm 22.05 ends it, and other components
with living nodes continue. The first rank of each role therefore watches its own component. The
separate job of a group continues too when the job of the hub ends; there the group's supervisor
watches.
"""

from __future__ import annotations

import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob
from relax_hpc.cluster.slurm.job_endings import retire_job, stop_if_user_cancelled
from relax_hpc.cluster.slurm.job_lookup import is_over, separate_job
from relax_hpc.cluster.slurm.layout import HUB
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.cluster.supervise.lease import lease_holder
from relax_hpc.cluster.supervise.verdict import GONE, Evidence, Fate, verdict
from relax_hpc.config import Config
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.queue.plan import SUPERVISOR

_ASK_S = 10.0
"""Seconds between two requests to slurmctld, which serves the whole cluster."""


class _LeaseWatch:
    """Watch on the lease of ``name``: whether a head leads the run."""

    def __init__(self, run: RunDir, name: str, lease_s: float, job: str = "") -> None:
        """``job``: only a head in this job counts; empty: any head."""
        self.run, self.name, self.lease_s, self.job = run, name, lease_s, job
        self.last_beat: tuple[object, float] = (None, time.monotonic())
        """Last heartbeat, and the time at which it was new, monotonic seconds."""
        self._ask_at = 0.0

    def is_silent(self, now: float) -> bool:
        """Whether no head has led for two leases, and it is time to ask Slurm about the job."""
        holder = lease_holder(self.run, self.name)
        # A successor in another job cancels remaining components of its predecessor. It cannot do
        # so if Slurm does not answer, so a head in another job does not count here.
        counts = not self.job or holder.get("allocation", "").rpartition("-")[0] == self.job
        beat = (holder["incarnation"], holder["beat"]) if holder and counts else None
        if beat is not None and beat != self.last_beat[0]:
            self.last_beat = beat, now
        # A standby or a successor takes over after one lease, and needs some time to do so.
        if now - self.last_beat[1] < 2 * self.lease_s or now < self._ask_at:
            return False
        self._ask_at = now + _ASK_S
        return True


class OrphanedComponent:
    """Watch on whether the component of ``incarnation`` of a group has lost its head."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, group: str, incarnation: int
    ) -> None:
        launch = read_launch(run, group, incarnation)
        self.run, self.slurm, self.limits = run, slurm, config.liveness
        self.component = launch.job if launch else ""
        self.leader = launch.allocation.rpartition("-")[0] if launch else ""
        self.head = _LeaseWatch(run, SUPERVISOR, config.liveness.lease_s, self.leader)

    def can_be_orphaned(self) -> bool:
        """Whether this is a component that can outlive component 0."""
        return bool(self.leader) and self.component != self.leader

    def check(self, now: float) -> bool:
        """Cancel the component if no head has supervised its job for two leases, and Slurm reports
        that component 0 has ended.

        ``now``: monotonic seconds. To be called repeatedly. Returns whether it was cancelled.
        """
        if not self.head.is_silent(now):
            return False
        try:
            if not _is_over(self.slurm.jobs(self.leader).get(self.leader), self.limits):
                return False
            retire_job(self.run, self.slurm, self.component)
        except (SlurmError, OSError):
            return False
        return True


class OrphanedGroupJob:
    """Watch on whether the hub of the run has lost its job. ``job`` is the separate job of
    ``group``."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, group: str, job: str) -> None:
        self.run, self.slurm, self.limits, self.job = run, slurm, config.liveness, job
        self.het = config.layout == "het"
        self.replaces_component = self.het and group in config.groups
        """Whether the job replaces a component. A successor has this component too. Further
        members of a group have no component."""
        self.name = SUPERVISOR if self.het else f"{SUPERVISOR}-hub"
        self.head = _LeaseWatch(run, self.name, config.liveness.lease_s)

    def ending_reason(self, now: float) -> str:
        """Reason why the job must end; empty if it continues. ``now``: monotonic seconds.

        A job that replaces a component ends if the job of the whole run has ended, because the
        successor may need its nodes. In layout `jobs` a job ends if no job of the hub runs or can
        start. If the user has cancelled the job of the hub, and the hub could not report it, this
        method requests a stop of the run instead.
        """
        if not self.head.is_silent(now):
            return ""
        try:
            allocation = lease_holder(self.run, self.name).get("allocation", "")
            last, _, last_restarts = allocation.rpartition("-")
            hub = last if self.het else separate_job(self.run, "hub") or last
            is_same_job = hub == last and last_restarts.isdecimal()
            restarts = int(last_restarts) if is_same_job else None
            if not hub or stop_if_user_cancelled(self.run, self.slurm, hub, restarts):
                return ""
            if self.replaces_component and self._run_job_is_over(last):
                return "the job of the run has ended: this job ends for its successor"
            if not self.het and self._has_no_job(hub):
                command = f"relax-hpc submit --run_dir {self.run.root} --resume"
                return (
                    f"no job of the hub is running or queued: this job ends; resume with {command}"
                )
        except (SlurmError, OSError):
            pass
        return ""

    def _has_no_job(self, hub: str) -> bool:
        """Whether Slurm knows this job, but no job of the hub that runs, ends or can start.

        ``hub``: the last job of the hub. If a user called sbatch, it is not in the ledger.
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

    def _run_job_is_over(self, last: str) -> bool:
        """Whether ``last``, the last job of the whole run with a head, has ended, and no successor
        runs yet."""
        submissions = Ledger(self.run).current_submissions()
        run_jobs = {entry.job for entry in submissions if entry.kind in ("run", "successor")}
        jobs = self.slurm.jobs(*sorted(run_jobs | {last}))
        return _is_over(jobs.get(last), self.limits) and all(
            job.state != "RUNNING" for job in jobs.values()
        )


def _is_over(job: SlurmJob | None, limits: LivenessConfig) -> bool:
    """Whether a job has ended. None: squeue does not know it any more."""
    return verdict(Evidence(job=job.state if job else GONE), limits).fate in (
        Fate.DEAD,
        Fate.LEAVES,
    )
