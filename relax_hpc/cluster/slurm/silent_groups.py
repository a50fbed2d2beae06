"""Groups in jobs of their own that fall silent with their supervisor: the node is gone, and Slurm
misses it late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.job_lookup import own_job
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import Evidence, Fate, ended_in_order, verdict
from relax_hpc.config import Config
from relax_hpc.config.groups import roles_of
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.plan import SUPERVISOR

_AGAIN_S = 10.0
"""Seconds between looks at Slurm: the supervisor has more to do than to wait for it."""


class Silence:
    """Gives a group to another job when a member of it and the supervisor in its job have given no
    sign for a lease.

    ``submit`` is told the group and a node to avoid, and returns the job. Where it can have none,
    Slurm itself brings the old one back when it has missed the node (SlurmdTimeout, and then the
    expiry of the job's credentials).
    """

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, submit: Callable[[str, str], str]
    ) -> None:
        self.run, self.config, self.slurm, self.submit = run, config, slurm, submit
        self.lease_s = config.liveness.lease_s
        self._seen: dict[str, tuple[str, float]] = {}
        """Last beat of each group's supervisor, and since when it stands still."""
        self._suspects: dict[str, int] = {}
        self._judged: dict[str, int] = {}
        """Incarnations of groups that have been seen to; once, as it may not be known whether
        another job was made."""
        self.without_job: dict[str, int] = {}
        """Silent groups, and their incarnations, whose job squeue does not know."""
        self._left: set[str] = set()
        """Jobs whose groups are elsewhere, to be ended."""
        self._looked, self._asked = -self.lease_s, -_AGAIN_S

    def suspect(self, name: str, incarnation: int) -> None:
        """A member of ``incarnation`` of a group has given no sign for a lease."""
        if self._judged.get(name) != incarnation:
            self._suspects[name] = incarnation

    def tick(self, supervisor: Supervisor, names: Iterable[str], now: float | None = None) -> None:
        """Look at the supervisors of ``names``; to be called once a beat. ``now``: seconds of any
        clock."""
        now = time.monotonic() if now is None else now
        for name in names:
            self._look(name, now)
        self._looked = now
        if now - self._asked < _AGAIN_S:
            return
        self._suspects = self._still_silent(self._suspects)
        self.without_job = self._still_silent(self.without_job)
        for name in [name for name in self._suspects if self._stands_still(name, now)][:1]:
            self._asked = now
            supervisor.each_wait()
            with contextlib.suppress(SlurmError, OSError):
                self._replace(supervisor, name, now - self._seen[name][1])
        for job in list(self._left)[:1]:
            self._asked = now
            supervisor.each_wait()
            with contextlib.suppress(SlurmError):
                self.slurm.cancel(job)
                self._left.discard(job)

    def _look(self, name: str, now: float) -> None:
        try:
            beat = (self.run.rendezvous(f"{SUPERVISOR}-{name}") / "lease").read_text(
                errors="replace"
            )
        except OSError:
            return
        # Who was asleep itself, or could not read, has not seen anybody stand still.
        awake = now - self._looked < self.lease_s / 2
        if not awake or self._seen.get(name, ("", now))[0] != beat:
            self._seen[name] = (beat, now)

    def _still_silent(self, groups: Mapping[str, int]) -> dict[str, int]:
        return {name: number for name, number in groups.items() if not self._is_over(name, number)}

    def _is_over(self, name: str, incarnation: int) -> bool:
        marks = [
            read_mark(self.run, name, incarnation, role) for role in roles_of(self.config, name)
        ]
        return latest_incarnation(self.run, name) > incarnation or ended_in_order(marks)

    def _stands_still(self, name: str, now: float) -> bool:
        return name in self._seen and now - self._seen[name][1] > self.lease_s

    def _replace(self, supervisor: Supervisor, name: str, still_s: float) -> None:
        if supervisor.disk.hinders():
            # Its supervisor stands still, and may wait to start it again, because of that; nor
            # could another.
            return
        job = own_job(self.run, name)
        found = self.slurm.jobs(job).get(job) if job else None
        self._judged[name] = self._suspects.pop(name)
        if found is None:
            # Cancelled by a person, or killed: see `LostJobs`.
            self.without_job[name] = self._judged[name]
            return
        evidence = Evidence(job=found.state, job_used_s=found.used_s, supervisor_still_s=still_s)
        said = verdict(evidence, self.config.liveness)
        if said.fate is not Fate.DEAD:
            # Slurm has missed it by now, and may have brought it back already.
            return
        supervisor.failures.judge(name, f"job {job} {said.reason}")
        batch_node = self.slurm.hostnames(found.node_list)[0]
        if new := self.submit(name, batch_node):
            supervisor.terminal.say(
                f"{name}: no sign of its supervisor on {batch_node} either: goes on in job {new}"
            )
            if name in supervisor.roll.elsewhere:
                supervisor.roll.elsewhere[name] = new
            self._left.add(job)
