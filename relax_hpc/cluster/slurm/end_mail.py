"""Slurm's mail about the end of the job with the hub: it says once what has happened to the run.

Slurm's mails are about jobs. Slurm 22.05 to 25.11 write the name of the job into the subject
(`mail_job_info` in src/slurmctld/agent.c), and send a mail for each job that ends. A job whose run
another job continues therefore sends none, and the last job gets a name with the end of the run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.layout import mail_types
from relax_hpc.cluster.slurm.submissions import Submission
from relax_hpc.config import Config

_MAX_CHARS = 120
"""Characters of the name. Slurm's subject has 128 of it."""
_OTHER_CHARS = re.compile(r"[^\w.:/=+-]+", re.ASCII)


class EndMail:
    """Mail of ``job``, which has the hub and is about to end."""

    def __init__(self, config: Config, slurm: Slurm, job: str) -> None:
        self.config, self.slurm, self.job = config, slurm, job

    def announce(self, end: tuple[str, str] | None, successors: Sequence[Submission]) -> None:
        """Name the job after the end of the run, or let it send no mail.

        Args:
            end: state (finished, stopped, failed) and reason; None: the run goes on in another job,
                or can be resumed.
            successors: jobs that continue the run. One after this job continues it.
        """
        if not mail_types(self.config):
            return
        # Without an answer of Slurm, the mail has the job's usual name.
        with contextlib.suppress(SlurmError):
            # slurmctld reads the name when it sends the mail, after the batch script has ended.
            if end is not None:
                self.slurm.set_name(self.job, end_name(self.config.name, *end))
            elif any(entry.after == self.job for entry in successors):
                self.slurm.set_mail_types(self.job, "NONE")


def end_name(run_name: str, state: str, reason: str) -> str:
    """Name of a job for the subject of a mail.

    >>> end_name("mine", "failed", "rollout: ended 6 times (log: /r)")
    'mine:failed:_rollout:_ended_6_times_log:_/r'
    """
    # Spaces in the name of a job are hard to read in a subject, and in the output of squeue.
    text = f"{run_name}:{state}: {reason}" if reason else f"{run_name}:{state}"
    return _OTHER_CHARS.sub("_", text).strip("_")[:_MAX_CHARS]
