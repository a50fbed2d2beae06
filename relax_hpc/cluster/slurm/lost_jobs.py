"""Jobs of single groups that have ended before their groups were done, and that Slurm does not
queue again.

Slurm queues a job again that has lost a node or makes way for another, and a head does so at the
time limit. None of that happens when the batch script is killed (kill -9, the kernel's OOM killer)
or fails: the job is over then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from relax_hpc.base.errors import EXIT_NO_PROGRESS
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.submissions import Entry, Ledger
from relax_hpc.cluster.supervise.launch_records import all_done, newest_launches, read_mark
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import ended_in_order
from relax_hpc.config import Config
from relax_hpc.config.groups import roles_of
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S = 10.0
"""Seconds between questions to slurmctld, which serves the whole cluster, and until a new job shows
in its queue."""
_INTENDED = ("COMPLETED", "CANCELLED")
"""States of jobs that ended because their work was done, or because a person wished it."""
_LOST = (
    "BOOT_FAIL",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)


class LostJobs:
    """Submits another job for a group whose last one is over. ``submit``: from the group to its new
    job; empty if none can be had."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, submit: Callable[[str], str]
    ) -> None:
        self.run, self.config, self.slurm, self.submit = run, config, slurm, submit
        self.ledger = Ledger(run)
        self._settled: set[str] = set()
        """Jobs whose end was looked into."""
        self._asked_at = -_ASK_S

    def tick(self, supervisor: Supervisor, names: Iterable[str]) -> None:
        """Look at the jobs of groups that are not there. To be called once a beat."""
        now, missing = time.monotonic(), list(names)
        if not missing or now - self._asked_at < _ASK_S or supervisor.disk.hinders():
            return
        self._asked_at = now
        supervisor.each_wait()
        entries = {name: entry for name in missing if (entry := self._entry(name))}
        with contextlib.suppress(SlurmError, OSError):
            in_squeue = self.slurm.jobs(*(entry.job for entry in entries.values()))
            for name, entry in entries.items():
                if entry.job not in in_squeue:
                    self._replace(supervisor, name, entry)

    def _entry(self, name: str) -> Entry | None:
        """The job that a group has, unless it was looked into, or is too young to show in the
        queue."""
        entry = self.ledger.last(name)
        if entry is None or entry.job in self._settled or time.time() - entry.time < _ASK_S:
            return None
        return None if all_done(self.run, self.config, name) else entry

    def _replace(self, supervisor: Supervisor, name: str, entry: Entry) -> None:
        end = self._end_of(name, entry.job)
        if not end:
            return
        self._settled.add(entry.job)
        if end in _INTENDED:
            return
        reason = f"job {entry.job} is over ({end})"
        supervisor.terminal.say(f"{name}: {reason}")
        refuse_vain_jobs(supervisor, self.ledger, name)
        supervisor.failures.judge(name, reason)
        try:
            job = self.submit(name)
        except SlurmError as error:
            supervisor.terminal.say(f"{name}: no job yet: {error}")
            if error.transient:
                # Slurm was busy and made no job. After a deadline it may have made one: no second
                # try.
                self._settled.discard(entry.job)
            return
        if job:
            supervisor.terminal.say(f"{name}: continues in job {job}")
        else:
            text = (
                f"no job can be had from here; submit one: relax-hpc resubmit {self.run.root} "
                f"--group {name}"
            )
            supervisor.terminal.say(f"{name}: {text}")

    def _end_of(self, name: str, job: str) -> str:
        """State in which a job has ended; empty: it has not."""
        state = self.slurm.describe(job).get("JobState", "")
        if state:
            return state if state in (*_LOST, *_INTENDED) else ""
        # slurmctld has forgotten it, MinJobAge after its end. A job that was cancelled leaves marks
        # of a good end.
        incarnation = latest_incarnation(self.run, name)
        marks = [
            read_mark(self.run, name, incarnation, role) for role in roles_of(self.config, name)
        ]
        return "CANCELLED" if incarnation and ended_in_order(marks) else "no longer known to Slurm"


def refuse_vain_jobs(supervisor: Supervisor, ledger: Ledger, name: str) -> None:
    """Give up on a group whose jobs end before they can start it."""
    last = next((launch.job for _, launch in newest_launches(supervisor.run, name)), "")
    limit = supervisor.config.liveness.max_restarts
    jobs = [entry.job for entry in ledger.living() if entry.kind == "group" and entry.group == name]
    vain = jobs[jobs.index(last) + 1 :] if last in jobs else jobs
    if len(vain) > limit:
        text = f"{len(vain)} jobs ended before the group began (the last: {vain[-1]})"
        supervisor.failures.give_up(
            name, f"{text}, allowed liveness.max_restarts={limit}", EXIT_NO_PROGRESS
        )
