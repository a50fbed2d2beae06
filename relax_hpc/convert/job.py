"""A conversion as a Slurm job, through submitit: it goes on where it was when the job is preempted
or out of time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.rundir import private_folder
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError

_LOOK_S, _ASK_S = 1.0, 10.0
"""Seconds between looks for the result, and between questions to slurmctld."""
_LATE_S = 60.0
"""Seconds for the result of an ended job to show on a shared file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of the Slurm job; empty and 0: the cluster's default."""

    partition: str = ""
    account: str = ""
    time: int = 120
    """Time limit, minutes; a job that needs more is requeued and goes on."""
    mem: int = 0
    """Memory, GB."""
    cpus: int = 2
    wait: bool = False
    """Whether to wait until the job has ended."""


class ConversionJob:
    """Function that submitit pickles and runs."""

    def __init__(self, request: dict[str, Any]) -> None:
        """``request``: the fields of `convert.Request`."""
        self.request = request

    def __call__(self) -> dict[str, Any]:
        """{"exit_code", "report"} or {"exit_code", "error"}: an error is one line here too."""
        from relax_hpc.convert.conversion import Request, convert

        try:
            return {"exit_code": EXIT_DONE, "report": convert(Request(**self.request), print)}
        except RelaxError as error:
            print(error)
            return {"exit_code": error.exit_code, "error": str(error)}

    def checkpoint(self) -> Any:
        """Submission of the same again: what is finished is on disk, so it goes on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(request: Any, options: JobOptions, cluster: str = "slurm") -> dict[str, Any]:
    """Hand `request`, a `convert.Request`, to Slurm: {"job", "log"}, and what the job returned if
    it is waited for.

    The job's files lie beside the target, in a folder for this user alone. `cluster` "local" runs
    it as a process. ConfigError: submitit or Slurm is missing, or refuses the options. RelaxError:
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
    # submitit has no errors of its own here: sbatch's answer comes as FailedJobError, a missing
    # srun as RuntimeError.
    except Exception as error:
        raise ConfigError(f"--slurm: {error}") from error
    about = {"job": job.job_id, "log": str(job.paths.stdout)}
    if not options.wait:
        return about
    if cluster == "slurm":
        _await_result(job, Slurm())
    return about | _result(job)


def _parameters(options: JobOptions, cluster: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "relax-convert",
        "timeout_min": options.time,
        "cpus_per_task": options.cpus,
    }
    if options.mem:
        found["mem_gb"] = options.mem
    if cluster == "slurm":
        # A GPU is never needed.
        named = {"slurm_partition": options.partition, "slurm_account": options.account}
        found |= {name: value for name, value in named.items() if value}
    return found


def _await_result(job: Any, slurm: Slurm) -> None:
    """Wait until a Slurm job has left a result, or submitit knows that it has ended.

    submitit 1.5.4 learns of ended jobs from sacct alone. Where Slurm has no accounting, it would
    wait without end for a job that was killed. RelaxError: squeue does not know the job, and there
    is still no result `_LATE_S` seconds later.
    """
    asked_at, last_seen_at = time.monotonic(), time.monotonic()
    while not job.done():
        if time.monotonic() - asked_at >= _ASK_S:
            asked_at = time.monotonic()
            if _may_be_known(job.job_id, slurm):
                last_seen_at = time.monotonic()
            elif asked_at - last_seen_at >= _LATE_S:
                raise _lost_job_error(job)
        time.sleep(_LOOK_S)


def _may_be_known(job_id: str, slurm: Slurm) -> bool:
    """Whether squeue knows a job. True as well if it does not answer: the job may still run."""
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
        f"job {job.job_id} was lost, see {job.paths.stderr}; run the same again, it goes on"
    )
