"""Groups in separate jobs that are silent together with their supervisor, because their node is
lost and Slurm has not noticed it yet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.job_lookup import separate_job
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import Evidence, Fate, ended_normally, verdict
from relax_hpc.config import Config
from relax_hpc.config.groups import group_roles
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.plan import SUPERVISOR

_AGAIN_S = 10.0
"""Seconds between two requests to Slurm, for which the supervisor must wait."""


class SilentGroups:
    """Gives a group to another job if a member of it and the supervisor in its job have sent no
    heartbeat for the length of a lease.

    ``submit`` takes the group and a node to avoid, and returns the new job, or empty if no job is
    available.
    """

    # If no other job is available, Slurm requeues the old job itself. slurmctld 22.05 does so after
    # SlurmdTimeout (300 s by default) and the expiry of the job's credentials (120 s).

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, submit: Callable[[str, str], str]
    ) -> None:
        self.run, self.config, self.slurm, self.submit = run, config, slurm, submit
        self.lease_s = config.liveness.lease_s
        self._last_beats: dict[str, tuple[str, float]] = {}
        """Last heartbeat of each group's supervisor, and the time at which it was new."""
        self._suspects: dict[str, int] = {}
        """Groups with a silent member, and their incarnations."""
        self._handled: dict[str, int] = {}
        """Incarnations of groups that were handled. This happens once, because it may be unknown
        whether another job was submitted."""
        self.without_job: dict[str, int] = {}
        """Silent groups, and their incarnations, whose job squeue does not know."""
        self._abandoned_jobs: set[str] = set()
        """Jobs to be cancelled, because other jobs have their groups."""
        self._checked_at, self._asked_at = -self.lease_s, -_AGAIN_S

    def suspect(self, name: str, incarnation: int) -> None:
        """Record that a member of ``incarnation`` of a group has sent no heartbeat for the length
        of a lease."""
        if self._handled.get(name) != incarnation:
            self._suspects[name] = incarnation

    def tick(self, supervisor: Supervisor, names: Iterable[str], now: float | None = None) -> None:
        """Check the supervisors of ``names``. To be called once in each heartbeat interval.
        ``now``: seconds of any clock."""
        now = time.monotonic() if now is None else now
        for name in names:
            self._read_beat(name, now)
        self._checked_at = now
        if now - self._asked_at < _AGAIN_S:
            return
        self._suspects = self._still_silent(self._suspects)
        self.without_job = self._still_silent(self.without_job)
        # At most one group and one job in a round, because each request to Slurm may take seconds.
        for name in [name for name in self._suspects if self._is_silent(name, now)][:1]:
            self._asked_at = now
            supervisor.before_wait()
            with contextlib.suppress(SlurmError, OSError):
                self._replace(supervisor, name, now - self._last_beats[name][1])
        for job in list(self._abandoned_jobs)[:1]:
            self._asked_at = now
            supervisor.before_wait()
            with contextlib.suppress(SlurmError):
                self.slurm.cancel(job)
                self._abandoned_jobs.discard(job)

    def _read_beat(self, name: str, now: float) -> None:
        try:
            beat = (self.run.rendezvous(f"{SUPERVISOR}-{name}") / "lease").read_text(
                errors="replace"
            )
        except OSError:
            return
        # If this supervisor was stopped itself, it cannot tell how long the other was silent.
        was_running = now - self._checked_at < self.lease_s / 2
        if not was_running or self._last_beats.get(name, ("", now))[0] != beat:
            self._last_beats[name] = (beat, now)

    def _still_silent(self, groups: Mapping[str, int]) -> dict[str, int]:
        return {name: number for name, number in groups.items() if not self._is_over(name, number)}

    def _is_over(self, name: str, incarnation: int) -> bool:
        marks = [
            read_mark(self.run, name, incarnation, role) for role in group_roles(self.config, name)
        ]
        return latest_incarnation(self.run, name) > incarnation or ended_normally(marks)

    def _is_silent(self, name: str, now: float) -> bool:
        return name in self._last_beats and now - self._last_beats[name][1] > self.lease_s

    def _replace(self, supervisor: Supervisor, name: str, silent_s: float) -> None:
        """Submit another job for a silent group whose supervisor was silent for ``silent_s``."""
        if supervisor.disk.is_full():
            # The full disk may be the reason for the silence, and would stop a new job too.
            return
        job = separate_job(self.run, name)
        present = self.slurm.jobs(job).get(job) if job else None
        self._handled[name] = self._suspects.pop(name)
        if present is None:
            # A user has cancelled the job, or it was killed. `LostJobs` handles that.
            self.without_job[name] = self._handled[name]
            return
        evidence = Evidence(
            job=present.state, job_used_s=present.used_s, supervisor_silent_s=silent_s
        )
        judgement = verdict(evidence, self.config.liveness)
        if judgement.fate is not Fate.DEAD:
            # Slurm has noticed the loss, and may have requeued the job already.
            return
        supervisor.failures.check_failure(name, f"job {job} {judgement.reason}")
        # Slurm runs the batch script, and with it the supervisor, on the first node of a job.
        batch_node = self.slurm.hostnames(present.node_list)[0]
        new_job = self.submit(name, batch_node)
        if new_job:
            supervisor.terminal.say(
                f"{name}: its supervisor on {batch_node} is silent too: continues in job {new_job}"
            )
            if name in supervisor.table.detached:
                supervisor.table.detached[name] = new_job
            self._abandoned_jobs.add(job)
