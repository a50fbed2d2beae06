"""Parts of both kinds of jobs besides their groups: standbys, successors, other jobs for what loses
its nodes."""

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
from relax_hpc.cluster.slurm.detached_groups import Moved
from relax_hpc.cluster.slurm.job_endings import give_back, heed_user
from relax_hpc.cluster.slurm.job_lookup import known_jobs
from relax_hpc.cluster.slurm.lost_jobs import LostJobs
from relax_hpc.cluster.slurm.node_check import check_nodes, exclude_option
from relax_hpc.cluster.slurm.orphans import Bereft
from relax_hpc.cluster.slurm.render import render_group
from relax_hpc.cluster.slurm.silent_groups import Silence
from relax_hpc.cluster.slurm.srun import limits
from relax_hpc.cluster.slurm.standby import Standby
from relax_hpc.cluster.slurm.steps import StepLauncher
from relax_hpc.cluster.slurm.submissions import Entry, Ledger
from relax_hpc.cluster.slurm.successors import Successors
from relax_hpc.cluster.supervise.attempts import latest_attempt
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.cluster.supervise.requests import asked_to_stop
from relax_hpc.cluster.supervise.supervisor import RELEASED, Supervisor
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import base_name, group_of
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_SLURM_S = 10.0
"""Seconds between looks at who has the group."""
_AGAIN_S = 10.0
"""Seconds between tries to ask Slurm for a last wish."""
_LEAVE_S, _INSIST_S = 5.0, 1800.0
_KILL_WAIT_S = 30.0
"""Seconds between TERM and KILL by Slurm's default."""
_DEADLINE_MARGIN_S = 30.0


class _Job:
    """The allocation around this head."""

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
        self.silence = Silence(run, config, slurm, self.submit_group)
        self.lost_jobs = LostJobs(run, config, slurm, self.submit_group)
        self.successors = Successors(run, config, slurm, self.attempt)

    def interrupted(self) -> None:
        """A signal has come. Of the hub's job, which all others need, scancel means that the run is
        to stop."""
        if "hub" in self.allocation.places:
            heed_user(self.run, self.slurm, self.allocation.job, self.allocation.restarts)

    def second(self, group: str = "", safe: Callable[[], bool] = lambda: True) -> Standby:
        """A standby. The site's setup runs in the batch script alone, and a standby that leads
        starts roles as well."""
        return Standby(
            self.run, self.slurm, self.allocation, self.node, group, safe, limits(self.config)
        )

    def waiting(self) -> None:
        """Called before whatever may take long."""

    def watch(self, _supervisor: Supervisor) -> bool:
        """Called again and again; whether the job is to end although the run goes on."""
        return False

    def check(self, supervisor: Supervisor) -> None:
        """Look at the nodes of all groups, unless something runs there already."""
        roll = supervisor.roll
        steps = [name for name in roll.names if name not in {"hub", *roll.elsewhere, *roll.unfit}]
        fresh = [name for name in steps if not self._has_begun(name)]
        if fresh and self.config.layout != "local":
            launcher = supervisor.launcher(fresh[0])
            assert isinstance(launcher, StepLauncher)
            # If Slurm does not answer, the nodes are taken as they are.
            with contextlib.suppress(SlurmError):
                roll.unfit |= check_nodes(launcher, fresh)

    def submit_group(self, name: str, avoid: str = "") -> str:
        """A job of its own for a group: a held spare, or a new one, not on node ``avoid``; empty if
        none can be had."""
        # In `jobs` the only held job is what the command `resubmit` is about to use.
        for spare in self.ledger.spares(name) if self.config.layout == "het" else ():
            try:
                self.slurm.release(spare.job)
            except SlurmError as error:
                if error.later:
                    raise
                continue
            self.ledger.add(Entry(job=spare.job, kind="group", group=name))
            return spare.job
        if not self.config.site.sbatch_on_nodes:
            return ""
        former = self.ledger.newest(name)
        try:
            return submit_group(
                self.run, self.slurm, self.ledger, name, former.options if former else (), avoid
            )
        except SlurmError as error:
            if error.later:
                raise
            print(f"{name}: no job can be had: {error}", file=sys.stderr, flush=True)
            return ""

    def withdraw(self) -> None:
        """Cancel what is queued for this run: nothing of it is to begin any more."""
        # What cannot be cancelled finds the run over, and ends.
        with contextlib.suppress(SlurmError):
            for job in known_jobs(self.run, self.config, self.slurm).values():
                # This job may be one of the successors itself.
                if job.state == "PENDING" and job.id != self.allocation.job:
                    self.slurm.cancel(job.id)

    def end_without_batch(self) -> None:
        """End the job if this head is not the batch script's, which ends with the outcome if it
        still lives."""
        if self.node != self.allocation.batch_node:
            time.sleep(_LEAVE_S)
            # This process dies with the job.
            insist(lambda: give_back(self.run, self.slurm, self.allocation.job))

    def _has_begun(self, name: str) -> bool:
        launch = read_launch(self.run, name, latest_incarnation(self.run, name))
        return launch is not None and launch.allocation == self.allocation.name

    def deadline(self) -> float | None:
        """Time at which the roles must be done, of the wall clock; None if Slurm sets no limit or
        does not say."""
        with contextlib.suppress(SlurmError):
            job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
            if job and job.time_left_s is not None:
                return time.time() + job.time_left_s - _DEADLINE_MARGIN_S
        return None


class GroupJob(_Job):
    """An ordinary job of one group. At its end it requeues itself; where it loses a node, another
    job takes the group.

    A hub of two nodes has a standby: Slurm is slower to notice that a node is gone. A job that took
    the place of a component (layout het) ends with the job of the whole run: its successor has a
    component for the group again.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        hub = self.allocation.places.get("hub")
        two = hub is not None and hub.nodes > 1
        self.standby = self.second("hub") if two else None
        self.moved = False
        """Whether another job has the group."""
        self.has_hub = hub is not None
        self.bereft: Bereft | None = None
        if not self.has_hub:
            (group,) = self.allocation.places
            self.bereft = Bereft(self.run, self.config, self.slurm, group, self.allocation.job)
        self._gives_way = False
        self._looked = time.monotonic()

    def launcher(self) -> StepLauncher:
        return MovingLauncher(self)

    def begin(self, supervisor: Supervisor) -> None:
        """Check whether the nodes are fit. The hub's job gets a successor, for the case that its
        script is killed."""
        if self.has_hub:
            self.successors.begin(self.allocation.job)
        self.check(supervisor)

    def tick(self, supervisor: Supervisor) -> None:
        """Notice that another job has the group, which ends this one; the hub's keeps a standby and
        watches others."""
        if self.watch(supervisor):
            return
        if time.monotonic() - self._looked >= _ASK_SLURM_S:
            self._looked = time.monotonic()
            self.moved |= any(
                self.ledger.superseded(self.allocation.job, name) for name in supervisor.roll.names
            )
        if self.moved:
            supervisor.roll.released.update(supervisor.roll.names)
        if self.standby:
            self.standby.tick()
        if self.has_hub:
            other_groups = set(members_of(self.run, self.config)) - set(supervisor.roll.names)
            self.successors.tick(self.allocation.job)
            self.silence.tick(supervisor, other_groups)
            self.lost_jobs.tick(
                supervisor, filter(partial(self._is_missing, supervisor), other_groups)
            )

    def _is_missing(self, supervisor: Supervisor, name: str) -> bool:
        """Whether the other groups wait for a group, or squeue no longer knows its job."""
        lacking = supervisor.liveness.lacking if supervisor.liveness else {}
        return name in self.silence.without_job or base_name(name, self.config.groups) in lacking

    def watch(self, supervisor: Supervisor) -> bool:
        """Let the group save and end if its job is to give way: somebody says so, or nobody is left
        to."""
        reason = self.bereft.look(time.monotonic()) if self.bereft else ""
        if reason:
            supervisor.terminal.say(reason)
            self._gives_way = True
            # On a full disk the successor finds this job gone.
            with contextlib.suppress(OSError):
                self.ledger.give_way(self.allocation.job)
        supervisor.interrupted += (leaves := self.gives_way())
        return leaves

    def gives_way(self) -> bool:
        """Whether it is to end for good although the run goes on."""
        return self._gives_way or self.ledger.gave_way(self.allocation.job)

    def end(self, code: int) -> None:
        """Requeue the job if the group is to go on, else end it if its batch script is gone; the
        run's others too."""
        hopeless = self.has_hub and code not in (EXIT_DONE, EXIT_RETRY)
        if self.run.finished.exists() or asked_to_stop(self.run) or hopeless:
            self.withdraw()
        if code == EXIT_RETRY and not (asked_to_stop(self.run) or self.moved or self.gives_way()):
            insist(lambda: requeue(self.slurm, self.allocation.job))
        else:
            self.end_without_batch()


def insist(ask: Callable[[], None]) -> None:
    """Ask Slurm for the last that a head wants of it, until it answers: there is nobody to do it
    later."""
    deadline = time.monotonic() + _INSIST_S
    while True:
        try:
            return ask()
        except SlurmError as error:
            if not error.later or time.monotonic() > deadline:
                raise
            print(f"head: {error}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)


class MovingLauncher(StepLauncher):
    """Launcher of a job whose group moves to another job when nodes are lost; if none can be had,
    this one is requeued.

    That is slower: Slurm has to miss the node first, and holds the job until its credentials have
    expired.
    """

    def __init__(self, job: GroupJob) -> None:
        super().__init__(job.run, job.config, job.slurm, job.allocation, job.deadline)
        self.group_job = job

    def hand_over(self, name: str, reason: str) -> str:
        if reason == RELEASED:
            return ""
        # Where it is not known whether a job was made, another one is not asked for.
        with contextlib.suppress(SlurmError):
            if job := self.group_job.submit_group(name):
                self.group_job.moved = True
                return job
        requeue(self.slurm, self.allocation.job)
        return self.allocation.job


def requeue(slurm: Slurm, job: str) -> None:
    """Queue a running job again; one that somebody ends, or that Slurm requeues by itself, is left
    alone."""
    found = slurm.jobs(job).get(job)
    if found and found.state == "RUNNING":
        slurm.requeue(job)


class HetJob(_Job):
    """A heterogeneous job: a standby head, successors, and groups that went on in jobs of their
    own."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.standby = self.second(safe=self.takes_steps)
        self.moved_groups = Moved(self.run, self.config, self.slurm, self.allocation)
        self._kill_wait_s = _KILL_WAIT_S
        self._leave_at = math.inf
        """Time at which the other components are given back at the latest, as Slurm has ended this
        one alone."""

    def launcher(self) -> StepLauncher:
        return ReplaceLauncher(self)

    def begin(self, supervisor: Supervisor) -> None:
        """Look after the successor, what is left of predecessors, and groups that went elsewhere
        before."""
        self._end_predecessors()
        self.successors.begin(self.allocation.job)
        with contextlib.suppress(SlurmError, ValueError):
            self._kill_wait_s = float(self.slurm.config()["KillWait"].split()[0])
        self.moved_groups.find(supervisor)
        self.check(supervisor)
        self.successors.tick(self.allocation.job)

    def _end_predecessors(self) -> None:
        """End predecessors, whose place this job takes: components live on when the two nodes of
        the hub are lost, and Slurm may not have heard that a group's own job was given back."""
        entries = self.ledger.entries()
        former = {entry.job for entry in entries if entry.kind in ("run", "successor")} - {
            self.allocation.job
        }
        former |= {
            entry.job
            for entry in entries
            if entry.kind == "group" and self.ledger.gave_way(entry.job)
        }
        with contextlib.suppress(SlurmError, OSError):
            for job in self.slurm.own_jobs().values():
                if (job.het_leader or job.id) in former and job.state == "RUNNING":
                    give_back(self.run, self.slurm, job.id)

    def interrupted(self) -> None:
        """Find out why, and how long there is: once Slurm ends component 0, it kills the supervisor
        after KillWait."""
        super().interrupted()
        with contextlib.suppress(SlurmError):
            if not self._runs():
                self._leave_at = time.monotonic() + self._kill_wait_s / 2

    def waiting(self) -> None:
        """Give the components back in time: a role may save for too long, and the successor needs
        the nodes."""
        if time.monotonic() >= self._leave_at:
            self._leave_at = math.inf
            self._give_back([*self._components(), *self.moved_groups.jobs()])

    def takes_steps(self) -> bool:
        """False once slurmctld has been restarted and a component is gone: it would die of the next
        step's request.

        So does that of Slurm 22.05.8, each time that it is tried. SlurmError if Slurm does not say.
        """
        places = {place.job for place in self.allocation.places.values() if place.het}
        jobs = self.slurm.jobs(self.allocation.job, *places)
        if all(job in jobs and jobs[job].state == "RUNNING" for job in places):
            return True
        # Both are local times of this node, and sort as texts.
        began = self.slurm.describe(self.allocation.job).get("StartTime", "")
        return self.slurm.config().get("BOOT_TIME", "") <= began

    def _runs(self) -> bool:
        job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
        return job is not None and job.state == "RUNNING"

    def _components(self) -> list[str]:
        """Slurm ends them with component 0, but not if it lost its nodes: then they would idle to
        their time limit."""
        return sorted({place.job for place in self.allocation.places.values() if place.het})

    def _give_back(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            with contextlib.suppress(SlurmError, OSError):
                give_back(self.run, self.slurm, job)

    def tick(self, supervisor: Supervisor) -> None:
        """Keep a standby on the hub's other node, and an eye on groups that run elsewhere."""
        self.successors.tick(self.allocation.job)
        self.standby.tick()
        self.silence.tick(
            supervisor, set(members_of(self.run, self.config)) - supervisor.roll.here.keys()
        )
        self.moved_groups.tick(supervisor)
        # Those of `moved_groups` have a component in the successor; further members of a group have
        # none.
        self.lost_jobs.tick(supervisor, self.silence.without_job.keys() - self.config.groups.keys())

    def end(self, code: int) -> None:
        """Withdraw what was queued for this run unless it is to go on, and give back what a
        successor may need; end the job if its batch script is gone."""
        if code != EXIT_RETRY or asked_to_stop(self.run):
            self.withdraw()
        else:
            self._give_back(self.moved_groups.jobs())
        if self._leave_at < math.inf:
            self._give_back(self._components())
        self.end_without_batch()


class ReplaceLauncher(StepLauncher):
    """Launcher that gives a component back when it has lost nodes, and moves its group to a job of
    its own."""

    def __init__(self, job: HetJob) -> None:
        super().__init__(job.run, job.config, job.slurm, job.allocation, job.deadline)
        self.het_job = job

    def check_takes_steps(self, name: str) -> None:
        if not self.het_job.takes_steps():
            text = (
                f"{name}: a component is gone and slurmctld was restarted, which would die of a "
                "new step of this job"
            )
            raise SlurmError(text, transient=True)

    def lost(self, name: str) -> bool:
        return super().lost(name) or not self.het_job.takes_steps()

    def hand_over(self, name: str, reason: str) -> str:
        place = self.allocation.places[name]
        if not place.het:
            return ""
        job = "" if reason == RELEASED else self.het_job.submit_group(name)
        if job or reason == RELEASED:
            # The group is another's by now, whether the nodes can be given back or not.
            with contextlib.suppress(SlurmError, OSError):
                give_back(self.run, self.slurm, place.job)
        return job


def submit_group(
    run: RunDir,
    slurm: Slurm,
    ledger: Ledger,
    name: str,
    options: Sequence[str] = (),
    avoid: str = "",
) -> str:
    """Submit a job for one group of a run that lives, with further ``options``, not on node
    ``avoid``; the job."""
    script = run.submit / f"{name}.sbatch"
    run.submit.mkdir(exist_ok=True)
    config = load_resolved(run.root, name)
    write_atomic(script, render_group(config, name).encode())
    job = slurm.submit(
        script, *exclude_option(run, _excluded_by_user(config, name), avoid), *options
    )
    ledger.add(Entry(job=job, kind="group", group=name, options=list(options)))
    return job


def _excluded_by_user(config: Config, name: str) -> str:
    return (config.site.options | group_of(config, name).resources.options).get("exclude") or ""
