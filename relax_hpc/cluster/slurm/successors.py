"""Queued job that continues a run if the job of its hub ends before the run does.

Slurm starts it by `--dependency=afternotok`: the job before it was killed, failed, was cancelled,
or reached its time limit. It does not start while that job is queued again, by a command or by
Slurm, nor after exit code 0 (seen on Slurm 22.05.8). So there is never more than one hub.
"""

from __future__ import annotations

import contextlib
import math
import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.job_lookup import is_over, known_jobs
from relax_hpc.cluster.slurm.layout import HUB, mail_types
from relax_hpc.cluster.slurm.submissions import Entry, Ledger
from relax_hpc.config import Config

_SELDOM_S = 600.0
"""Seconds between tries to queue one, for Slurm to answer or the user's limits to allow it."""


class Successors:
    """Successors of a run's jobs: of the whole run's, or in the layout `jobs` of the hub's."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, attempt: int) -> None:
        self.run, self.config, self.slurm, self.attempt = run, config, slurm, attempt
        self.group = HUB if config.layout == "jobs" else ""
        self.ledger = Ledger(run)
        self._queue_at = 0.0

    def submit(self, after: str) -> Entry:
        """Submit a successor of job ``after``; its entry for the ledger.

        It sends no mail before it starts: one that is withdrawn because the run is finished would
        report CANCELLED.
        """
        script = self.run.submit / f"{self.group or 'run'}.sbatch"
        job = self.slurm.submit(script, f"--dependency=afternotok:{after}")
        if mail_types(self.config):
            # sbatch 22.05.8 adds --mail-type=NONE to the types of the script; scontrol replaces
            # them.
            with contextlib.suppress(SlurmError):
                self.slurm.set_mail_types(job, "NONE")
        return Entry(job, "successor", self.group, after=after, attempt=self.attempt)

    def begin(self, job: str) -> None:
        """Restore what a successor that starts, as ``job``, gave up, and cancel those that can
        never start."""
        types = mail_types(self.config)
        kinds = {entry.job: entry.kind for entry in self.ledger.entries()}
        with contextlib.suppress(SlurmError):
            if types and kinds.get(job) == "successor":
                self.slurm.set_mail_types(job, types)
            for other in known_jobs(self.run, self.config, self.slurm).values():
                if (
                    kinds.get(other.id) == "successor"
                    and other.state == "PENDING"
                    and is_over(other)
                ):
                    self.slurm.cancel(other.id)

    def tick(self, job: str) -> None:
        """Queue the successor of ``job``, the one around this process, once."""
        if self.config.site.sbatch_on_nodes and time.monotonic() >= self._queue_at:
            self._queue_at = time.monotonic() + _SELDOM_S
            with contextlib.suppress(SlurmError, OSError):
                self._queue(job)
                self._queue_at = math.inf

    def _queue(self, job: str) -> None:
        past = self.ledger.successors(self.attempt)
        if any(entry.after == job for entry in past) or not self.run.submit.exists():
            return
        if len(past) < self.config.slurm.successors:
            self.ledger.add(self.submit(job))


def take_hub(ledger: Ledger, job: str, attempt: int) -> bool:
    """Note that ``job`` has the hub from now on, if it is the successor of the job that had it;
    whether it may lead. In the layout `jobs`, where the hub has a job to itself."""
    former, holder = ledger.predecessor(job), ledger.last(HUB)
    if not former or holder is None or holder.job == job:
        return True
    if holder.job != former:
        # A person has submitted the hub again.
        return False
    ledger.add(Entry(job, "group", HUB, attempt=attempt))
    return True
