"""A conversion as a Slurm job, by submitit. After preemption or a time limit the job continues."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.rundir import private_folder
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError

_POLL_S, _QUERY_S = 1.0, 10.0
"""Seconds between checks for the result, and between queries of slurmctld."""
_RESULT_TIMEOUT_S = 60.0
"""Seconds until the result of an ended job must be visible on a shared filesystem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of the Slurm job; empty and 0: the cluster's default."""

    partition: str = ""
    account: str = ""
    time: int = 120
    """Time limit in minutes. A job that needs more is requeued and continues."""
    mem: int = 0
    """Memory in GB."""
    cpus: int = 2
    wait: bool = False
    """Whether to wait until the job has ended."""


class ConversionJob:
    """Function that submitit pickles and runs."""

    def __init__(self, request: dict[str, Any]) -> None:
        """``request``: the fields of a `ConversionRequest`."""
        self.request = request

    def __call__(self) -> dict[str, Any]:
        """{"exit_code", "report"}, or {"exit_code", "error"} with an error of one line."""
        from relax_hpc.convert.conversion import ConversionRequest, convert

        try:
            report = convert(ConversionRequest(**self.request), print)
            return {"exit_code": EXIT_DONE, "report": report}
        except RelaxError as error:
            print(error)
            return {"exit_code": error.exit_code, "error": str(error)}

    def checkpoint(self) -> Any:
        """Submit the same job again: it continues, because finished files are on disk."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(request: Any, options: JobOptions, cluster: str = "slurm") -> dict[str, Any]:
    """Submit a `ConversionRequest`. Returns {"job", "log"}, with `wait` also the job's result.

    The job's files are in a private folder next to the target. `cluster` "local" starts a process
    instead of a job. ConfigError: submitit or Slurm is missing, or rejects the options. RelaxError:
    the job was lost.
    """
    try:
        import submitit
    except ImportError as error:
        raise ConfigError(
            "--slurm: submitit is not installed; pip install 'relax_hpc[slurm]'"
        ) from error
    target = Path(request.target).absolute()
    folder = private_folder(target.with_name(f".{target.name}.jobs"))
    absolute = {"source": Path(request.source).absolute(), "target": target}
    if request.model is not None:
        absolute["model"] = Path(request.model).absolute()
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**_parameters(options, cluster))
        job = executor.submit(ConversionJob(asdict(request) | absolute))
    # submitit has no base class of errors: it raises FailedJobError for an answer of sbatch, and
    # RuntimeError if srun is missing.
    except Exception as error:
        raise ConfigError(f"--slurm: {error}") from error
    submitted = {"job": job.job_id, "log": str(job.paths.stdout)}
    if not options.wait:
        return submitted
    if cluster == "slurm":
        _await_result(job, Slurm())
    return submitted | _result(job)


def _parameters(options: JobOptions, cluster: str) -> dict[str, Any]:
    """Parameters of submitit's executor. A conversion needs no GPU."""
    parameters: dict[str, Any] = {
        "name": "relax-convert",
        "timeout_min": options.time,
        "cpus_per_task": options.cpus,
    }
    if options.mem:
        parameters["mem_gb"] = options.mem
    if cluster == "slurm" and options.partition:
        parameters["slurm_partition"] = options.partition
    if cluster == "slurm" and options.account:
        parameters["slurm_account"] = options.account
    return parameters


def _await_result(job: Any, slurm: Slurm) -> None:
    """Wait until a Slurm job has left a result, or submitit reports its end.

    submitit 1.5.4 learns only from sacct that a job has ended. Without accounting it would wait
    for ever for a job that was killed. RelaxError: squeue does not list the job, and there is no
    result `_RESULT_TIMEOUT_S` seconds later.
    """
    queried_at, last_seen_at = time.monotonic(), time.monotonic()
    while not job.done():
        if time.monotonic() - queried_at >= _QUERY_S:
            queried_at = time.monotonic()
            if _may_be_known(job.job_id, slurm):
                last_seen_at = time.monotonic()
            elif queried_at - last_seen_at >= _RESULT_TIMEOUT_S:
                raise _lost_job_error(job)
        time.sleep(_POLL_S)


def _may_be_known(job_id: str, slurm: Slurm) -> bool:
    """Whether squeue lists a job. Also true if squeue does not answer: the job may still run."""
    try:
        return job_id in slurm.jobs(job_id)
    except SlurmError:
        return True


def _result(job: Any) -> dict[str, Any]:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return job.result()
    except (FailedJobError, UncompletedJobError) as error:
        raise _lost_job_error(job) from error


def _lost_job_error(job: Any) -> RelaxError:
    return RelaxError(
        f"job {job.job_id} was lost, see {job.paths.stderr}; run the same command again, it "
        "continues"
    )
