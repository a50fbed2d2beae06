"""Jobs of a run that Slurm still knows, and in which of them a group lives."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.path_errors import check_may_change
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.cluster.slurm.commands import Job, Slurm
from relax_hpc.cluster.slurm.layout import components, job_name
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.cluster.supervise.requests import asked_to_stop
from relax_hpc.cluster.supervise.verdict import QUEUED
from relax_hpc.config import Config, load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.plan import SUPERVISOR

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
"""States of jobs that will do nothing more."""
_NEVER_STARTS = "DependencyNeverSatisfied"
"""Reason of a queued job whose dependency has ended otherwise than it waits for."""
_NEWEST = 200
"""Entries of the ledger that are looked at: older ones are of jobs that ended long ago."""


def is_over(job: Job) -> bool:
    """Whether a job does nothing more, or can never start."""
    return job.state in ENDED or (job.state == "PENDING" and job.reason == _NEVER_STARTS)


def is_queued(job: Job) -> bool:
    """Whether a job waits for its nodes, for the first time or again."""
    return job.state in QUEUED and not is_over(job)


def known_jobs(
    run: RunDir, config: Config, slurm: Slurm, with_components: bool = False
) -> dict[str, Job]:
    """All jobs of a run that squeue knows, by id, by one call; components of a het job included.

    ``with_components``: also those in which no group has started yet.
    """
    return slurm.jobs(*submitted_jobs(run, config), components=with_components)


def submitted_jobs(run: RunDir, config: Config) -> list[str]:
    """Ids of the newest jobs of a run, and of those in which its groups were last started."""
    ids = {entry.job: None for entry in Ledger(run).entries()[-_NEWEST:]}
    for name in members_of(run, config):
        launch = read_launch(run, name, latest_incarnation(run, name))
        if launch and launch.job:
            ids[launch.job] = None
    return list(ids)


def own_job(run: RunDir, group: str) -> str:
    """The job last submitted for ``group`` alone; empty if it lives in the job of the whole run."""
    entry = Ledger(run).newest(group)
    return entry.job if entry else ""


def job_of(run: RunDir, group: str, in_squeue: Collection[str] | None = None) -> str:
    """The job, or component, that a group was last submitted for or started in; empty: none.

    ``in_squeue``: ids of all jobs of the run that squeue knows. Where the job of the whole run is
    not among them, it is the successor that counts. None: squeue was not asked.
    """
    launch = read_launch(run, group, latest_incarnation(run, group))
    started = launch.job if launch and group != "hub" else ""
    whole = whole_job(run, in_squeue)
    if in_squeue is not None and started not in in_squeue and whole in in_squeue:
        started = ""
    return own_job(run, group) or started or whole


def queued_component(run: RunDir, config: Config, group: str, jobs: Mapping[str, Job]) -> str:
    """Component of the run's heterogeneous job that ``group`` is going to start in. Empty: it has
    started, it has a job to itself, or squeue does not know the component."""
    started = read_launch(run, group, latest_incarnation(run, group))
    if config.layout != "het" or started or own_job(run, group):
        return ""
    leader = whole_job(run)
    names = [
        job_name(config, component) for component in components(config) if group in component.groups
    ]
    ids = (job.id for job in jobs.values() if job.het_leader == leader and job.name in names)
    return next(ids, "")


def whole_job(run: RunDir, in_squeue: Collection[str] | None = None) -> str:
    """Job that holds the whole run: the one where the hub was last started, or the next one once
    that has ended.

    ``in_squeue``: see `job_of`.
    """
    jobs = [entry.job for entry in Ledger(run).living() if entry.kind in ("run", "successor")]
    launch = read_launch(run, "hub", latest_incarnation(run, "hub"))
    if launch and launch.job in jobs:
        ended = any(run.rendezvous(SUPERVISOR).glob(f"outcome-{launch.job}-*"))
        ended = ended or (in_squeue is not None and launch.job not in in_squeue)
        jobs = jobs[jobs.index(launch.job) :][ended:] or [launch.job]
    return next(iter(jobs), launch.job if launch else "")


def check_gone(run: RunDir, config: Config, slurm: Slurm) -> None:
    """ConfigError if jobs of a run hold nodes or are queued: a second submission would fight
    them."""
    if left := [
        job.id for job in known_jobs(run, config, slurm).values() if job.state not in ENDED
    ]:
        raise ConfigError(
            f"{run.root}: has jobs in the queue ({', '.join(left)}); look with: relax-hpc status "
            f"{run.root}, or end them first: relax-hpc stop {run.root}"
        )


def living_run(root: RunDir) -> Config:
    """The configuration of a run that goes on; ConfigError if there is none, or it has ended."""
    if not root.config.exists():
        raise ConfigError(
            f"{root.root}: no run here (config.yaml is missing); name a run directory"
        )
    if root.finished.exists():
        raise ConfigError(
            f"{root.root}: the run is finished; to go on, resume it with more --steps"
        )
    if asked := asked_to_stop(root):
        raise ConfigError(
            f"{root.root}: the run has stopped ({asked['reason']}); go on with: "
            f"{resume_words(root)}"
        )
    check_may_change(root.root)
    check_owner(root.root, "this command")
    return load_resolved(root.root)


def resume_words(run: RunDir) -> str:
    """Command with which a user goes on with a run."""
    verb = "submit" if run.submit.is_dir() else "run"
    return f"relax-hpc {verb} --run_dir {run.root} --resume"
