"""Jobs of a run that Slurm still knows, and the job of each group."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.path_errors import check_may_change
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.cluster.slurm.commands import Slurm, SlurmJob
from relax_hpc.cluster.slurm.layout import components, job_name
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.verdict import QUEUED
from relax_hpc.config import Config, load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.plan import SUPERVISOR

# A job is COMPLETING while Slurm kills its last processes. With a dead node it stays so until Slurm
# marks the node down.
ENDED = (
    "COMPLETING",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
)
"""States of jobs that do no more work."""
# Slurm 22.05 keeps a job in the queue whose dependency can never be satisfied, unless the site sets
# kill_invalid_depend.
_NEVER_STARTS = "DependencyNeverSatisfied"
"""Reason of a queued job whose dependency has ended in another way than required."""
_NEWEST = 200
"""Number of newest ledger entries that are read. Older jobs have ended long ago."""


def is_over(job: SlurmJob) -> bool:
    """Whether a job has ended, or can never start."""
    return job.state in ENDED or (job.state == "PENDING" and job.reason == _NEVER_STARTS)


def is_queued(job: SlurmJob) -> bool:
    """Whether a job waits for its nodes, at first or after a requeue."""
    return job.state in QUEUED and not is_over(job)


def known_jobs(
    run: RunDir, config: Config, slurm: Slurm, with_components: bool = False
) -> dict[str, SlurmJob]:
    """All jobs of a run that squeue knows, by id, from one call. They include components of a
    heterogeneous job in which a group has started.

    ``with_components``: include all components.
    """
    return slurm.jobs(*submitted_jobs(run, config), components=with_components)


def submitted_jobs(run: RunDir, config: Config) -> list[str]:
    """Ids of the newest jobs of a run, and of the jobs in which its groups were last started."""
    ids = {entry.job: None for entry in Ledger(run).entries()[-_NEWEST:]}
    for name in members_of(run, config):
        launch = read_launch(run, name, latest_incarnation(run, name))
        if launch and launch.job:
            ids[launch.job] = None
    return list(ids)


def separate_job(run: RunDir, group: str) -> str:
    """The separate job of ``group``; empty if the group is in the job of the whole run."""
    entry = Ledger(run).separate_job(group)
    return entry.job if entry else ""


def current_job(run: RunDir, group: str, in_squeue: Collection[str] | None = None) -> str:
    """The job, or component, that was submitted for a group or in which it was last started; empty
    if there is none.

    ``in_squeue``: ids of all jobs of the run that squeue knows. If the job of the whole run is not
    among them, its successor counts. None: squeue was not asked.
    """
    launch = read_launch(run, group, latest_incarnation(run, group))
    started = launch.job if launch and group != "hub" else ""
    job = run_job(run, in_squeue)
    if in_squeue is not None and started not in in_squeue and job in in_squeue:
        started = ""
    return separate_job(run, group) or started or job


def queued_component(run: RunDir, config: Config, group: str, jobs: Mapping[str, SlurmJob]) -> str:
    """Component of the run's heterogeneous job in which ``group`` will start. Empty if the group
    has started, if it has a separate job, or if squeue does not know the component."""
    started = read_launch(run, group, latest_incarnation(run, group))
    if config.layout != "het" or started or separate_job(run, group):
        return ""
    leader = run_job(run)
    names = [
        job_name(config, component) for component in components(config) if group in component.groups
    ]
    ids = (job.id for job in jobs.values() if job.het_leader == leader and job.name in names)
    return next(ids, "")


def run_job(run: RunDir, in_squeue: Collection[str] | None = None) -> str:
    """The job of the whole run: the one in which the hub was last started, or its successor if that
    job has ended.

    ``in_squeue``: see `current_job`.
    """
    submissions = Ledger(run).current_submissions()
    jobs = [entry.job for entry in submissions if entry.kind in ("run", "successor")]
    launch = read_launch(run, "hub", latest_incarnation(run, "hub"))
    if launch and launch.job in jobs:
        has_ended = any(run.rendezvous(SUPERVISOR).glob(f"outcome-{launch.job}-*"))
        has_ended = has_ended or (in_squeue is not None and launch.job not in in_squeue)
        later_jobs = jobs[jobs.index(launch.job) + 1 :]
        return later_jobs[0] if has_ended and later_jobs else launch.job
    if jobs:
        return jobs[0]
    return launch.job if launch else ""


def check_no_live_jobs(run: RunDir, config: Config, slurm: Slurm) -> None:
    """ConfigError if jobs of a run are queued or hold nodes, because a second submission would
    conflict with them."""
    jobs = [job.id for job in known_jobs(run, config, slurm).values() if job.state not in ENDED]
    if jobs:
        raise ConfigError(
            f"{run.root}: has jobs in the queue ({', '.join(jobs)}); look with: relax-hpc status "
            f"{run.root}, or end them first: relax-hpc stop {run.root}"
        )


def load_unfinished_run(root: RunDir) -> Config:
    """The configuration of a run that has not ended. ConfigError if there is no run, or if it is
    finished or stopped."""
    if not root.config.exists():
        raise ConfigError(
            f"{root.root}: no run here (config.yaml is missing); name a run directory"
        )
    if root.finished.exists():
        raise ConfigError(
            f"{root.root}: the run is finished; to continue it, resume with more --steps"
        )
    request = read_stop_request(root)
    if request:
        raise ConfigError(
            f"{root.root}: the run has stopped ({request['reason']}); resume with: "
            f"{resume_command(root)}"
        )
    check_may_change(root.root)
    check_owner(root.root, "this command")
    return load_resolved(root.root)


def resume_command(run: RunDir) -> str:
    """Command with which a user resumes a run."""
    verb = "submit" if run.submit.is_dir() else "run"
    return f"relax-hpc {verb} --run_dir {run.root} --resume"
