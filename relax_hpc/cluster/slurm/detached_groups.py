"""Detached groups of a heterogeneous run: groups that continued in separate jobs.

The supervisor of the run watches the jobs of these groups. A successor of the run has a component
for every group again, and it cannot start while a detached group holds nodes that it needs.
Therefore the separate jobs end with the job of the run, after their groups have saved.
"""

from __future__ import annotations

import contextlib
import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.lost_jobs import check_job_limit
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_done, all_ended, read_launch
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import GONE, Evidence, Fate, verdict
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S, _SOON_S = 10.0, 2.0
"""Seconds between two checks of the jobs, normally and after the end of a group. slurmctld serves
the whole cluster, so that a run must not ask it often."""
_RESIZED = "it was submitted again with other resources than its component has"
_NO_COMPONENT = "its component was cancelled"


class DetachedGroups:
    """Detached groups of the job around ``allocation``, which has a component for each of them."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, allocation: Allocation) -> None:
        self.run, self.config, self.slurm, self.allocation = run, config, slurm, allocation
        self.ledger = Ledger(run)
        self._checked_at = time.monotonic()

    def fill_table(self, supervisor: Supervisor) -> None:
        """Enter into the table of a new supervisor which groups are detached, and which cannot run
        in their component."""
        for name in supervisor.table.names:
            if all_done(self.run, self.config, name):
                continue
            submission = self.ledger.separate_job(name)
            if submission:
                supervisor.table.detached[name] = submission.job
                continue
            reason = self._unfit_reason(name)
            if reason:
                supervisor.table.unfit[name] = reason

    def _unfit_reason(self, name: str) -> str:
        """Reason why a group cannot run in its component; empty if it can."""
        nodes = self.allocation.group_nodes[name]
        if nodes.het and self.ledger.is_retired(nodes.job):
            return _NO_COMPONENT
        return _RESIZED if nodes.het and self._was_resized(name) else ""

    def _was_resized(self, name: str) -> bool:
        """Whether the resources of a group have changed since the components were submitted."""
        present = group_settings(load_resolved(self.run.root, name), name).resources
        return present != group_settings(self.config, name).resources

    # -- while the job runs ------------------------------------------------------------------------

    def tick(self, supervisor: Supervisor) -> None:
        """Find groups whose job is gone. They get another job, or return to their component. To be
        called once in each heartbeat interval."""
        waited_s = time.monotonic() - self._checked_at
        soon = waited_s >= _SOON_S and any(
            self._has_ended(name) for name in supervisor.table.detached
        )
        if supervisor.table.detached and (soon or waited_s >= _ASK_S):
            self._checked_at = time.monotonic()
            with contextlib.suppress(SlurmError, OSError):
                self._check_jobs(supervisor)

    def _has_ended(self, name: str) -> bool:
        """Whether a group has ended in its present job without being done."""
        launch = read_launch(self.run, name, latest_incarnation(self.run, name))
        submission = self.ledger.last_separate_job(name)
        if launch is None or submission is None or launch.job != submission.job:
            return False
        return all_ended(self.run, self.config, name) and not all_done(self.run, self.config, name)

    def _check_jobs(self, supervisor: Supervisor) -> None:
        """Replace each job that is gone before its group is done, within the limit of restarts."""
        submissions = {}
        for name in supervisor.table.detached:
            submission = self.ledger.last_separate_job(name)
            if submission:
                submissions[name] = submission
        jobs = self.slurm.jobs(*(submission.job for submission in submissions.values()))
        for name, submission in submissions.items():
            job = submission.job
            state = jobs[job].state if job in jobs else GONE
            if all_done(self.run, self.config, name):
                continue
            if self.ledger.is_retired(job):
                has_left = state == GONE or all_ended(self.run, self.config, name)
                if supervisor.table.detached[name] and has_left:
                    self._take_back(supervisor, name)
                continue
            supervisor.table.detached[name] = job
            is_dead = verdict(Evidence(job=state), self.config.liveness).fate is Fate.DEAD
            # squeue may not show a new job for a moment. On a full disk a new job could not be
            # recorded.
            is_old = time.time() - submission.time > _ASK_S
            if is_dead and is_old and not supervisor.disk.is_full():
                check_job_limit(supervisor, self.ledger, name)
                supervisor.starts.replace_detached(name, f"job {job} is gone")

    def _take_back(self, supervisor: Supervisor, name: str) -> None:
        """Return a group to its component. Its separate job has ended because the previous job of
        the run was gone, before this job started."""
        del supervisor.table.detached[name]
        reason = self._unfit_reason(name)
        if reason:
            supervisor.table.unfit[name] = reason
        supervisor.restart_group(name, reason or "its separate job was retired")

    # -- at the end of the job ---------------------------------------------------------------------

    def retire_group(self, name: str) -> bool:
        """Retire the separate job of a group while the hub can still save its work. Returns whether
        the group has such a job."""
        job = self._retirable_job(name)
        # If this cannot be written on a full disk, the job ends when it finds this one gone.
        with contextlib.suppress(OSError):
            if job:
                self.ledger.mark_retired(job)
            return bool(job)
        return False

    def jobs(self) -> list[str]:
        """Separate jobs that end with this job."""
        jobs = [self._retirable_job(name) for name in self.config.groups]
        return [job for job in jobs if job]

    def _retirable_job(self, name: str) -> str:
        """The separate job of a group. Empty if there is none, or if the group could not return to
        a component of the successor.

        Jobs of further members of a group continue, because these members have no component.
        """
        submission = self.ledger.last_separate_job(name) if name in self.config.groups else None
        can_return = self.config.site.sbatch_on_nodes or not self._was_resized(name)
        return submission.job if submission and can_return else ""
