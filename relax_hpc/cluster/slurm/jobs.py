"""The head's tasks in both kinds of jobs: standbys, successors, and new jobs for groups that lose
their nodes."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.cluster.slurm.allocation import Allocation
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.detached_groups import DetachedGroups
from relax_hpc.cluster.slurm.job_endings import retire_job, stop_if_user_cancelled
from relax_hpc.cluster.slurm.job_lookup import known_jobs
from relax_hpc.cluster.slurm.lost_jobs import LostJobs
from relax_hpc.cluster.slurm.node_check import check_nodes, exclude_option
from relax_hpc.cluster.slurm.orphans import OrphanedGroupJob
from relax_hpc.cluster.slurm.render import render_group
from relax_hpc.cluster.slurm.silent_groups import SilentGroups
from relax_hpc.cluster.slurm.srun import changed_srun, limit_options
from relax_hpc.cluster.slurm.standby import Standby
from relax_hpc.cluster.slurm.steps import StepLauncher
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.slurm.successors import Successors
from relax_hpc.cluster.supervise.attempts import latest_attempt
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.supervisor import RELEASED, Supervisor
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import base_name, group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_SLURM_S = 10.0
"""Seconds between two checks whether another job has the group."""
_AGAIN_S = 10.0
"""Seconds between two attempts to send the last request to Slurm."""
_LEAVE_S, _INSIST_S = 5.0, 1800.0
"""Seconds for the batch script to end the job by itself, and seconds for which the last request is
repeated."""
_KILL_WAIT_S = 30.0
"""Slurm's default of KillWait, the seconds between SIGTERM and SIGKILL."""
_DEADLINE_MARGIN_S = 30.0
"""Seconds before the time limit at which roles must have ended."""


class _HeadJob:
    """The job around this head."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, allocation: Allocation, node: str
    ) -> None:
        self.run, self.config, self.slurm, self.allocation, self.node = (
            run,
            config,
            slurm,
            allocation,
            node,
        )
        self.ledger = Ledger(run)
        self.attempt = latest_attempt(run)
        self.silent_groups = SilentGroups(run, config, slurm, self.submit_group)
        self.lost_jobs = LostJobs(run, config, slurm, self.submit_group)
        self.successors = Successors(run, config, slurm, self.attempt)

    def on_interrupt(self) -> None:
        """Handle a signal. If the user has cancelled the job of the hub, which all other jobs need,
        the run stops."""
        if "hub" in self.allocation.group_nodes:
            stop_if_user_cancelled(
                self.run, self.slurm, self.allocation.job, self.allocation.restarts
            )

    def make_standby(self, group: str = "", safe: Callable[[], bool] = lambda: True) -> Standby:
        """A standby of this head. It inherits resource limits, because the site's setup runs only
        in the batch script and a standby that leads starts roles too."""
        return Standby(
            self.run,
            self.slurm,
            self.allocation,
            self.node,
            group,
            safe,
            limit_options(self.config),
            partial(changed_srun, config=self.config, group=group or "hub"),
        )

    def before_wait(self) -> None:
        """Called before an operation that may take long."""

    def check_ending(self, _supervisor: Supervisor) -> bool:
        """Called repeatedly. Returns whether the job must end while the run continues."""
        return False

    def check_nodes_of_new_groups(self, supervisor: Supervisor) -> None:
        """Check the nodes of all groups that have not started in this job yet."""
        table = supervisor.table
        excluded = {"hub", *table.detached, *table.unfit}
        steps = [name for name in table.names if name not in excluded]
        new = [name for name in steps if not self._has_started(name)]
        if new and self.config.layout != "local":
            launcher = supervisor.launcher(new[0])
            assert isinstance(launcher, StepLauncher)
            # If Slurm does not answer, the groups start without a check.
            with contextlib.suppress(SlurmError):
                failures = check_nodes(launcher, new)
                for name, failure in failures.items():
                    table.unfit[name] = failure.reason
                    if failure.is_hopeless:
                        table.hopeless.add(name)

    def submit_group(self, name: str, avoid: str = "") -> str:
        """Start a separate job for a group: a held spare job, or a new one that avoids node
        ``avoid``. Returns its id, or empty if no job is available."""
        # In layout `jobs`, the only held job is the one that the command `resubmit` will use.
        for spare in self.ledger.spares(name) if self.config.layout == "het" else ():
            try:
                self.slurm.release(spare.job)
            except SlurmError as error:
                if error.is_temporary:
                    raise
                continue
            self.ledger.add(Submission(job=spare.job, kind="group", group=name))
            return spare.job
        if not self.config.site.sbatch_on_nodes:
            return ""
        former = self.ledger.separate_job(name)
        try:
            return submit_group(
                self.run, self.slurm, self.ledger, name, former.options if former else (), avoid
            )
        except SlurmError as error:
            if error.is_temporary:
                raise
            print(f"{name}: no job is available: {error}", file=sys.stderr, flush=True)
            return ""

    def cancel_queued_jobs(self) -> None:
        """Cancel all queued jobs of this run, so that none of them starts."""
        # A job that cannot be cancelled finds that the run has ended, and ends.
        with contextlib.suppress(SlurmError):
            for job in known_jobs(self.run, self.config, self.slurm).values():
                # This job may be one of the successors itself.
                if job.state == "PENDING" and job.id != self.allocation.job:
                    self.slurm.cancel(job.id)

    def end_without_batch(self) -> None:
        """End the job if this head does not run under the batch script. If the batch script still
        runs, it reads the outcome and ends the job."""
        if self.node != self.allocation.batch_node:
            # A --no-kill job without its batch script stays RUNNING until its time limit (seen on
            # Slurm 22.05), so this head has to cancel it.
            time.sleep(_LEAVE_S)
            # This process dies with the job.
            retry_until_answered(lambda: retire_job(self.run, self.slurm, self.allocation.job))

    def _has_started(self, name: str) -> bool:
        launch = read_launch(self.run, name, latest_incarnation(self.run, name))
        return launch is not None and launch.allocation == self.allocation.name

    def deadline(self) -> float | None:
        """Wall clock time at which the roles must have ended. None if the job has no limit, or if
        Slurm does not answer."""
        with contextlib.suppress(SlurmError):
            job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
            if job and job.time_left_s is not None:
                return time.time() + job.time_left_s - _DEADLINE_MARGIN_S
        return None


class GroupJob(_HeadJob):
    """An ordinary job of one group. At its end it requeues itself. If it loses a node, another job
    takes the group.

    A hub with two nodes has a standby, because Slurm notices the loss of a node later. A job that
    replaces a component (layout het) ends with the job of the whole run, whose successor has a
    component for the group again.
    """

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, allocation: Allocation, node: str
    ) -> None:
        super().__init__(run, config, slurm, allocation, node)
        hub = self.allocation.group_nodes.get("hub")
        has_two_nodes = hub is not None and hub.nodes > 1
        self.standby = self.make_standby("hub") if has_two_nodes else None
        self.has_moved = False
        """Whether another job has the group."""
        self.has_hub = hub is not None
        self.orphan_watch: OrphanedGroupJob | None = None
        if not self.has_hub:
            (group,) = self.allocation.group_nodes
            self.orphan_watch = OrphanedGroupJob(
                self.run, self.config, self.slurm, group, self.allocation.job
            )
        self._is_orphaned = False
        self._checked_at = time.monotonic()

    def launcher(self) -> StepLauncher:
        return MovingLauncher(self)

    def begin(self, supervisor: Supervisor) -> None:
        """Check the nodes. The job of the hub also prepares its successors."""
        # Slurm 22.05 does not requeue a job whose batch script is killed. A successor then
        # continues.
        if self.has_hub:
            self.successors.begin(self.allocation.job)
        self.check_nodes_of_new_groups(supervisor)

    def tick(self, supervisor: Supervisor) -> None:
        """Do one round: release the group if another job has it. The job of the hub also keeps a
        standby and watches the jobs of other groups."""
        if self.check_ending(supervisor):
            return
        if time.monotonic() - self._checked_at >= _ASK_SLURM_S:
            self._checked_at = time.monotonic()
            self.has_moved |= any(
                self.ledger.superseded(self.allocation.job, name) for name in supervisor.table.names
            )
        if self.has_moved:
            supervisor.table.released.update(supervisor.table.names)
        if self.standby:
            self.standby.tick()
        if self.has_hub:
            other_groups = set(members_of(self.run, self.config)) - set(supervisor.table.names)
            self.successors.tick(self.allocation.job)
            self.silent_groups.tick(supervisor, other_groups)
            self.lost_jobs.tick(
                supervisor, filter(partial(self._is_missing, supervisor), other_groups)
            )

    def _is_missing(self, supervisor: Supervisor, name: str) -> bool:
        """Whether squeue no longer knows the job of a group, or other groups wait for the group."""
        awaited = supervisor.liveness.awaited_groups if supervisor.liveness else {}
        has_no_job = name in self.silent_groups.without_job
        return has_no_job or base_name(name, self.config.groups) in awaited

    def check_ending(self, supervisor: Supervisor) -> bool:
        """Make the group save and end if its job was retired, or if the run has no head any
        more."""
        reason = self.orphan_watch.ending_reason(time.monotonic()) if self.orphan_watch else ""
        if reason:
            supervisor.terminal.say(reason)
            self._is_orphaned = True
            # If this cannot be written on a full disk, the successor finds that the job is gone.
            with contextlib.suppress(OSError):
                self.ledger.mark_retired(self.allocation.job)
        is_retired = self.is_retired()
        supervisor.interrupted += is_retired
        return is_retired

    def is_retired(self) -> bool:
        """Whether the job must end for good while the run continues."""
        return self._is_orphaned or self.ledger.is_retired(self.allocation.job)

    def end(self, code: int) -> None:
        """Requeue the job if the group has to continue. Otherwise cancel queued jobs if the run has
        ended, and end this job if its batch script is gone."""
        # Slurm 22.05 never requeues a job because of its time limit, so the job does it itself.
        has_failed = self.has_hub and code not in (EXIT_DONE, EXIT_RETRY)
        if self.run.finished.exists() or read_stop_request(self.run) or has_failed:
            self.cancel_queued_jobs()
        if code == EXIT_RETRY and not (
            read_stop_request(self.run) or self.has_moved or self.is_retired()
        ):
            retry_until_answered(lambda: requeue_if_running(self.slurm, self.allocation.job))
        else:
            self.end_without_batch()


def retry_until_answered(ask: Callable[[], None]) -> None:
    """Repeat the last request of a head to Slurm until Slurm answers, because no other process
    would repeat it."""
    deadline = time.monotonic() + _INSIST_S
    while True:
        try:
            return ask()
        except SlurmError as error:
            if not error.is_temporary or time.monotonic() > deadline:
                raise
            print(f"head: {error}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)


class MovingLauncher(StepLauncher):
    """Launcher of a job whose group moves to another job when nodes are lost. If no other job is
    available, this job is requeued."""

    # The requeue is slower. slurmctld 22.05 must first notice the loss of the node (SlurmdTimeout),
    # and it holds a requeued job until its credentials have expired (120 s by default).

    def __init__(self, job: GroupJob) -> None:
        super().__init__(job.run, job.config, job.slurm, job.allocation, job.deadline)
        self.group_job = job

    def hand_over(self, name: str, reason: str) -> str:
        if reason == RELEASED:
            return ""
        # After a SlurmError the job may exist. A second one must not be submitted.
        with contextlib.suppress(SlurmError):
            job = self.group_job.submit_group(name)
            if job:
                self.group_job.has_moved = True
                return job
        requeue_if_running(self.slurm, self.allocation.job)
        return self.allocation.job


def requeue_if_running(slurm: Slurm, job: str) -> None:
    """Requeue a job if it is running. A job that ends, or that Slurm requeues already, does not
    change."""
    present = slurm.jobs(job).get(job)
    if present and present.state == "RUNNING":
        slurm.requeue(job)


class HetJob(_HeadJob):
    """A heterogeneous job: a standby head, successors, and detached groups in separate jobs."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, allocation: Allocation, node: str
    ) -> None:
        super().__init__(run, config, slurm, allocation, node)
        self.standby = self.make_standby(safe=self.accepts_steps)
        self.detached_groups = DetachedGroups(self.run, self.config, self.slurm, self.allocation)
        self._kill_wait_s = _KILL_WAIT_S
        self._retire_at = math.inf
        """Latest time to cancel the other components, after Slurm has ended component 0 alone,
        monotonic seconds."""

    def launcher(self) -> StepLauncher:
        return ReplaceLauncher(self)

    def begin(self, supervisor: Supervisor) -> None:
        """End remaining jobs of predecessors, find detached groups, check the nodes, and prepare
        the successor."""
        self._end_predecessors()
        self.successors.begin(self.allocation.job)
        with contextlib.suppress(SlurmError, ValueError):
            self._kill_wait_s = float(self.slurm.config()["KillWait"].split()[0])
        self.detached_groups.fill_table(supervisor)
        self.check_nodes_of_new_groups(supervisor)
        self.successors.tick(self.allocation.job)

    def _end_predecessors(self) -> None:
        """Cancel running jobs that this job replaces: components of earlier jobs of the run, and
        retired jobs of groups whose cancellation did not reach Slurm."""
        # When both nodes of the hub are lost, Slurm 22.05 ends component 0. Other components with
        # --no-kill and living nodes continue to run.
        entries = self.ledger.entries()
        former = {entry.job for entry in entries if entry.kind in ("run", "successor")}
        former.discard(self.allocation.job)
        for entry in entries:
            if entry.kind == "group" and self.ledger.is_retired(entry.job):
                former.add(entry.job)
        with contextlib.suppress(SlurmError, OSError):
            for job in self.slurm.own_jobs().values():
                if (job.het_leader or job.id) in former and job.state == "RUNNING":
                    retire_job(self.run, self.slurm, job.id)

    def on_interrupt(self) -> None:
        """Handle a signal, and compute how much time remains."""
        super().on_interrupt()
        # If Slurm ends component 0, it kills this process after KillWait.
        with contextlib.suppress(SlurmError):
            if not self._runs():
                # Half of KillWait remains for Slurm to cancel the other components.
                self._retire_at = time.monotonic() + self._kill_wait_s / 2

    def before_wait(self) -> None:
        """Cancel the other components in time, even if a role still saves, because the successor
        needs their nodes."""
        if time.monotonic() >= self._retire_at:
            self._retire_at = math.inf
            self._retire_jobs([*self._components(), *self.detached_groups.jobs()])

    def accepts_steps(self) -> bool:
        """Whether the job may request a new step. SlurmError if Slurm does not answer."""
        component_jobs = self._components()
        jobs = self.slurm.jobs(self.allocation.job, *component_jobs)
        if all(job in jobs and jobs[job].state == "RUNNING" for job in component_jobs):
            return True
        # slurmctld 22.05.8 crashes on a step request of a heterogeneous job that has lost a
        # component, if it was restarted after the job had started. It crashes at each request. Both
        # times are local times of this node in ISO format, which compare as texts.
        start = self.slurm.describe(self.allocation.job).get("StartTime", "")
        return self.slurm.config().get("BOOT_TIME", "") <= start

    def _runs(self) -> bool:
        job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
        return job is not None and job.state == "RUNNING"

    def _components(self) -> list[str]:
        """Job ids of all components except component 0."""
        # Slurm 22.05 ends them with component 0, except after a loss of its nodes. Then they would
        # hold their nodes idle until their time limit.
        return sorted({nodes.job for nodes in self.allocation.group_nodes.values() if nodes.het})

    def _retire_jobs(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            with contextlib.suppress(SlurmError, OSError):
                retire_job(self.run, self.slurm, job)

    def tick(self, supervisor: Supervisor) -> None:
        """Do one round: keep a standby on the hub's other node, and watch detached groups."""
        self.successors.tick(self.allocation.job)
        self.standby.tick()
        self.silent_groups.tick(
            supervisor, set(members_of(self.run, self.config)) - supervisor.table.supervised.keys()
        )
        self.detached_groups.tick(supervisor)
        # `detached_groups` replaces the jobs of configured groups. Further members of a group have
        # no component, and `lost_jobs` replaces their jobs.
        members = self.silent_groups.without_job.keys() - self.config.groups.keys()
        self.lost_jobs.tick(supervisor, members)

    def end(self, code: int) -> None:
        """Cancel queued jobs if the run has ended, else the jobs whose nodes a successor needs. End
        this job if its batch script is gone."""
        if code != EXIT_RETRY or read_stop_request(self.run):
            self.cancel_queued_jobs()
        else:
            self._retire_jobs(self.detached_groups.jobs())
        if self._retire_at < math.inf:
            self._retire_jobs(self._components())
        self.end_without_batch()


class ReplaceLauncher(StepLauncher):
    """Launcher that cancels a component after it has lost nodes, and moves its group to a separate
    job."""

    def __init__(self, job: HetJob) -> None:
        super().__init__(job.run, job.config, job.slurm, job.allocation, job.deadline)
        self.het_job = job

    def check_accepts_steps(self, name: str) -> None:
        if not self.het_job.accepts_steps():
            text = (
                f"{name}: a component is gone and slurmctld was restarted; a new step of this job "
                "would crash slurmctld"
            )
            raise SlurmError(text, transient=True)

    def has_lost_nodes(self, name: str) -> bool:
        return super().has_lost_nodes(name) or not self.het_job.accepts_steps()

    def hand_over(self, name: str, reason: str) -> str:
        nodes = self.allocation.group_nodes[name]
        # An allocation cannot gain a component again, and component 0 is the job itself.
        if not nodes.het:
            return ""
        job = "" if reason == RELEASED else self.het_job.submit_group(name)
        if job or reason == RELEASED:
            # The other job has the group, even if this component cannot be cancelled now.
            with contextlib.suppress(SlurmError, OSError):
                retire_job(self.run, self.slurm, nodes.job)
        return job


def submit_group(
    run: RunDir,
    slurm: Slurm,
    ledger: Ledger,
    name: str,
    options: Sequence[str] = (),
    avoid: str = "",
    tag: str = "",
) -> str:
    """Submit a separate job for one group of a running run, with further ``options``, that avoids
    node ``avoid``. Returns its id.

    ``tag``: text in the job's comment that only this submission has; empty: a random one.
    """
    script = run.submit / f"{name}.sbatch"
    run.submit.mkdir(exist_ok=True)
    config = load_resolved(run.root, name)
    write_atomic(script, render_group(config, name).encode())
    job = slurm.submit(
        script, *exclude_option(run, _excluded_by_user(config, name), avoid), *options, tag=tag
    )
    ledger.add(Submission(job=job, kind="group", group=name, options=list(options)))
    return job


def _excluded_by_user(config: Config, name: str) -> str:
    return (config.site.options | group_settings(config, name).resources.options).get(
        "exclude"
    ) or ""
