"""Whether a job that ends, or has ended, was cancelled by its user: `scancel` of a whole run means
stop.

After everything else the run goes on: what we cancelled ourselves (a mark says so), time limit,
preemption, loss of nodes, requeue. No accounting is needed: while a job ends, and MinJobAge after
that, slurmctld knows why.
"""

from __future__ import annotations

import contextlib

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.requests import ask_to_stop


def give_back(run: RunDir, slurm: Slurm, job: str) -> None:
    """Cancel a job, or a component, of a run that goes on elsewhere."""
    Ledger(run).give_way(job)
    slurm.cancel(job)


def cancelled_by_user(run: RunDir, slurm: Slurm, job: str, restarts: int | None = None) -> bool:
    """Whether somebody has cancelled ``job``, as far as Slurm says; ``restarts``: of the life that
    is asked about."""
    try:
        words = slurm.describe(job)
    except SlurmError:
        return False
    return is_cancelled(words, restarts) and not Ledger(run).gave_way(job)


def is_cancelled(words: dict[str, str], restarts: int | None = None) -> bool:
    """The same, of what `scontrol show job` says.

    While a job ends, its state is COMPLETING whatever the cause. The causes leave their traces, and
    only scancel leaves none: a Reason (TimeLimit, NodeDown), a PreemptTime, another number of
    Restarts, an exit code of the batch script.
    """
    if words.get("JobState") != "COMPLETING":
        return words.get("JobState") == "CANCELLED"
    same_life = restarts is None or words.get("Restarts") == str(restarts)
    without_a_word = words.get("Reason") == "None" and words.get("ExitCode", "").startswith("0:")
    # Where nothing can be preempted, nothing is said about it.
    return same_life and without_a_word and words.get("PreemptTime", "None") == "None"


def heed_user(run: RunDir, slurm: Slurm, job: str, restarts: int | None = None) -> bool:
    """Have the whole run stop if its user has cancelled ``job``, which was all of it or its hub;
    whether so."""
    if cancelled := cancelled_by_user(run, slurm, job, restarts):
        # A full disk must not end who stops anyway.
        with contextlib.suppress(OSError):
            ask_to_stop(run, reason=f"job {job} was cancelled")
    return cancelled
