"""Whether a job was cancelled by its user. `scancel` of the job of a whole run stops the run.

The run continues after every other end of a job: the time limit, preemption, loss of nodes, a
requeue, or a cancellation by relax_hpc itself, which a mark in the ledger records. No accounting is
needed: slurmctld knows the reason while a job ends, and for MinJobAge after its end.
"""

from __future__ import annotations

import contextlib

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.requests import request_stop


def retire_job(run: RunDir, slurm: Slurm, job: str) -> None:
    """Cancel a job, or a component, that the run does not need any more."""
    Ledger(run).mark_retired(job)
    slurm.cancel(job)


def was_cancelled_by_user(run: RunDir, slurm: Slurm, job: str, restarts: int | None = None) -> bool:
    """Whether a user has cancelled ``job``, according to Slurm. ``restarts``: number of restarts of
    the job at the time in question."""
    try:
        fields = slurm.describe(job)
    except SlurmError:
        return False
    return is_cancelled(fields, restarts) and not Ledger(run).is_retired(job)


def is_cancelled(fields: dict[str, str], restarts: int | None = None) -> bool:
    """Whether a job with these ``fields`` of `scontrol show job` was cancelled."""
    if fields.get("JobState") != "COMPLETING":
        return fields.get("JobState") == "CANCELLED"
    # While a job ends, its state in Slurm 22.05 is COMPLETING for every cause. All causes except
    # scancel leave a trace: a Reason (TimeLimit, NodeDown), a PreemptTime, another number of
    # Restarts, or an exit code of the batch script.
    same_start = restarts is None or fields.get("Restarts") == str(restarts)
    has_no_reason = fields.get("Reason") == "None" and fields.get("ExitCode", "").startswith("0:")
    # Clusters without preemption do not print PreemptTime.
    return same_start and has_no_reason and fields.get("PreemptTime", "None") == "None"


def stop_if_user_cancelled(
    run: RunDir, slurm: Slurm, job: str, restarts: int | None = None
) -> bool:
    """Request a stop of the whole run if a user has cancelled ``job``, which is the job of the run
    or of its hub. Returns whether that is so."""
    cancelled = was_cancelled_by_user(run, slurm, job, restarts)
    if cancelled:
        # This process stops anyway, even if a full disk prevents the request.
        with contextlib.suppress(OSError):
            request_stop(run, reason=f"job {job} was cancelled")
    return cancelled
