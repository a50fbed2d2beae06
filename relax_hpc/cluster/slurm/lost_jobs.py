"""Separate jobs of groups that ended before their groups were done and that Slurm does not requeue.

Slurm requeues a job after the loss of a node and after preemption, and the head requeues it at the
time limit. If the batch script fails or is killed (kill -9, the kernel's OOM killer), the job ends
for good (seen on Slurm 22.05).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from relax_hpc.base.errors import EXIT_NO_PROGRESS
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise.launch_records import all_done, newest_launches, read_mark
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import ended_normally
from relax_hpc.config import Config
from relax_hpc.config.groups import group_roles
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S = 10.0
"""Seconds between two requests to slurmctld, which serves the whole cluster, and seconds until
squeue shows a new job."""
_INTENDED = ("COMPLETED", "CANCELLED")
"""Final states of jobs that finished their work or were cancelled."""
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
"""Final states of jobs that must be replaced."""


class LostJobs:
    """Submits another job for a group whose separate job has ended. ``submit`` takes the group and
    returns the new job, or empty if no job is available."""

    def __init__(
        self, run: RunDir, config: Config, slurm: Slurm, submit: Callable[[str], str]
    ) -> None:
        self.run, self.config, self.slurm, self.submit = run, config, slurm, submit
        self.ledger = Ledger(run)
        self._settled: set[str] = set()
        """Jobs whose end was handled."""
        self._asked_at = -_ASK_S

    def tick(self, supervisor: Supervisor, names: Iterable[str]) -> None:
        """Check the jobs of missing groups. To be called once in each heartbeat interval."""
        now, missing = time.monotonic(), list(names)
        if not missing or now - self._asked_at < _ASK_S or supervisor.disk.is_full():
            return
        self._asked_at = now
        supervisor.before_wait()
        candidates = {name: self._unsettled_job(name) for name in missing}
        submissions = {name: entry for name, entry in candidates.items() if entry}
        with contextlib.suppress(SlurmError, OSError):
            in_squeue = self.slurm.jobs(*(entry.job for entry in submissions.values()))
            for name, entry in submissions.items():
                if entry.job not in in_squeue:
                    self._replace(supervisor, name, entry)

    def _unsettled_job(self, name: str) -> Submission | None:
        """The separate job of a group. None if its end was handled, if the group is done, or if
        the job is so new that squeue may not show it."""
        entry = self.ledger.last_separate_job(name)
        if entry is None or entry.job in self._settled or time.time() - entry.time < _ASK_S:
            return None
        return None if all_done(self.run, self.config, name) else entry

    def _replace(self, supervisor: Supervisor, name: str, entry: Submission) -> None:
        state = self._final_state(name, entry.job)
        if not state:
            return
        self._settled.add(entry.job)
        if state in _INTENDED:
            return
        reason = f"job {entry.job} is over ({state})"
        supervisor.terminal.say(f"{name}: {reason}")
        check_job_limit(supervisor, self.ledger, name)
        supervisor.failures.check_failure(name, reason)
        try:
            job = self.submit(name)
        except SlurmError as error:
            supervisor.terminal.say(f"{name}: no job yet: {error}")
            if error.transient:
                # Slurm was busy and created no job, so that a later attempt is safe. After a
                # deadline the job may exist.
                self._settled.discard(entry.job)
            return
        if job:
            supervisor.terminal.say(f"{name}: continues in job {job}")
        else:
            text = (
                f"no job is available from here; submit one: relax-hpc resubmit {self.run.root} "
                f"--group {name}"
            )
            supervisor.terminal.say(f"{name}: {text}")

    def _final_state(self, name: str, job: str) -> str:
        """Final state of a job; empty if it has not ended."""
        state = self.slurm.describe(job).get("JobState", "")
        if state:
            return state if state in (*_LOST, *_INTENDED) else ""
        # slurmctld forgets a job MinJobAge after its end (300 s by default). If the job was
        # cancelled, its roles have saved and written marks of a normal end.
        incarnation = latest_incarnation(self.run, name)
        marks = [
            read_mark(self.run, name, incarnation, role) for role in group_roles(self.config, name)
        ]
        return "CANCELLED" if incarnation and ended_normally(marks) else "no longer known to Slurm"


def check_job_limit(supervisor: Supervisor, ledger: Ledger, name: str) -> None:
    """End the run if too many jobs of a group ended before they could start the group."""
    last = next((launch.job for _, launch in newest_launches(supervisor.run, name)), "")
    limit = supervisor.config.liveness.max_restarts
    jobs = [
        entry.job
        for entry in ledger.current_submissions()
        if entry.kind == "group" and entry.group == name
    ]
    unused = jobs[jobs.index(last) + 1 :] if last in jobs else jobs
    if len(unused) > limit:
        text = f"{len(unused)} jobs ended before the group began (the last: {unused[-1]})"
        supervisor.failures.end_run(
            name, f"{text}, allowed liveness.max_restarts={limit}", EXIT_NO_PROGRESS
        )
