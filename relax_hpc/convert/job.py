"""A conversion as a Slurm job, through submitit: it goes on where it was when the job is preempted or out of time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.rundir import private_folder


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
    """Hand `request`, a `convert.Request`, to Slurm: {"job", "log"}, and what the job returned if it is waited for.

    The job's files lie beside the target, in a folder for this user alone. `cluster` "local" runs it as a process.
    ConfigError: submitit or Slurm is missing, or refuses the options. RelaxError: the job was lost.
    """
    try:
        import submitit
    except ImportError as error:
        raise ConfigError("--slurm: submitit is not installed; pip install 'relax_hpc[slurm]'") from error
    target = Path(request.target).absolute()
    folder = private_folder(target.with_name(f".{target.name}.jobs"))
    absolute = {"source": Path(request.source).absolute(), "target": target}
    if request.model is not None:
        absolute["model"] = Path(request.model).absolute()
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**_parameters(options, cluster))
        job = executor.submit(ConversionJob(asdict(request) | absolute))
    # submitit has no errors of its own here: sbatch's answer comes as FailedJobError, a missing srun as RuntimeError.
    except Exception as error:
        raise ConfigError(f"--slurm: {error}") from error
    about = {"job": job.job_id, "log": str(job.paths.stdout)}
    return about | _result(job) if options.wait else about


def _parameters(options: JobOptions, cluster: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": "relax-convert", "timeout_min": options.time, "cpus_per_task": options.cpus}
    if options.mem:
        found["mem_gb"] = options.mem
    if cluster == "slurm":
        # A GPU is never needed.
        named = {"slurm_partition": options.partition, "slurm_account": options.account}
        found |= {name: value for name, value in named.items() if value}
    return found


def _result(job: Any) -> dict[str, Any]:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return job.result()
    except (FailedJobError, UncompletedJobError) as error:
        raise RelaxError(
            f"job {job.job_id} was lost, see {job.paths.stderr}; run the same again, it goes on"
        ) from error
