"""Successors: queued jobs that continue a run if the job of its hub ends before the run.

Slurm starts a successor by `--dependency=afternotok` after the job before it was killed, failed,
was cancelled, or reached its time limit. Slurm 22.05.8 does not start it while that job is
requeued, nor after exit code 0. So there is never more than one hub.
"""

from __future__ import annotations

import contextlib
import math
import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.job_lookup import is_over, known_jobs
from relax_hpc.cluster.slurm.layout import HUB, mail_types
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.config import Config

_SELDOM_S = 600.0
"""Seconds between two attempts to submit one, if Slurm does not answer or the user's limits do not
allow it."""


class Successors:
    """Successors of the job of the whole run, or in layout `jobs` of the job of the hub."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, attempt: int) -> None:
        self.run, self.config, self.slurm, self.attempt = run, config, slurm, attempt
        self.group = HUB if config.layout == "jobs" else ""
        self.ledger = Ledger(run)
        self._queue_at = 0.0

    def submit(self, after: str) -> Submission:
        """Submit a successor of job ``after``. Returns its entry for the ledger.

        It sends no mail before it starts. Otherwise a successor that is cancelled because the run
        is finished would report CANCELLED.
        """
        script = self.run.submit / f"{self.group or 'run'}.sbatch"
        job = self.slurm.submit(script, f"--dependency=afternotok:{after}")
        if mail_types(self.config):
            # sbatch 22.05.8 adds --mail-type=NONE to the types of the script's #SBATCH line instead
            # of replacing them. `scontrol update` replaces them.
            with contextlib.suppress(SlurmError):
                self.slurm.set_mail_types(job, "NONE")
        return Submission(job, "successor", self.group, after=after, attempt=self.attempt)

    def begin(self, job: str) -> None:
        """Restore the mail types of a successor that starts as ``job``, and cancel successors that
        can never start."""
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
        """Submit the successor of ``job``, the job around this process, once."""
        if self.config.site.sbatch_on_nodes and time.monotonic() >= self._queue_at:
            self._queue_at = time.monotonic() + _SELDOM_S
            with contextlib.suppress(SlurmError, OSError):
                self._submit_next(job)
                self._queue_at = math.inf

    def _submit_next(self, job: str) -> None:
        submitted = self.ledger.successors(self.attempt)
        if any(entry.after == job for entry in submitted) or not self.run.submit.exists():
            return
        if len(submitted) < self.config.slurm.successors:
            self.ledger.add(self.submit(job))


def claim_hub(ledger: Ledger, job: str, attempt: int) -> bool:
    """Record in layout `jobs` that ``job`` has the hub, if it is the successor of the previous job
    of the hub. Returns whether it may lead."""
    former, holder = ledger.predecessor(job), ledger.last_separate_job(HUB)
    if not former or holder is None or holder.job == job:
        return True
    if holder.job != former:
        # A user has submitted the hub again.
        return False
    ledger.add(Submission(job, "group", HUB, attempt=attempt))
    return True
