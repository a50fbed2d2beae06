"""`relax-hpc scale`: more or fewer jobs of a rollout group, while the run goes on.

Members beyond the first are groups of their own, `rollout-2`, `rollout-3`, ..., each in an ordinary
small job that can start in any hole of the cluster. They are submitted like every other job of the
run rather than through submitit, whose jobs are a pickled function under submitit's own signal
handling and requeue rules (at most one node, no prologue of the site): a second code path with
other logs, for nothing that a rollout job needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import ENDED, known_jobs, load_unfinished_run, separate_job
from relax_hpc.cluster.slurm.jobs import submit_group
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_ended, members_of
from relax_hpc.commands.resubmit import announce, requested, see_off, tell, withdrawn
from relax_hpc.config import Config
from relax_hpc.config.groups import group_of
from relax_hpc.net.rendezvous.roster import latest_incarnation


def main(
    root: str, group: str, replicas: int, options: Sequence[str] = (), parsable: bool = False
) -> int:
    """Bring ``group`` to ``replicas`` jobs; new jobs go to standard output.

    ``options`` are --time and --time-min of sbatch: the shorter a job may be, the sooner it finds a
    hole.
    """
    run = RunDir(root)
    config = load_unfinished_run(run)
    _check(config, group, replicas)
    if config.layout == "local":
        if options:
            raise ConfigError(
                "--time, --time-min: of Slurm jobs, but the run's layout is local; leave them out"
            )
        _scale_processes(run, config, group, replicas)
    else:
        _scale_jobs(run, config, group, replicas, options, parsable)
    return EXIT_DONE


def _check(config: Config, group: str, replicas: int) -> None:
    if group not in config.groups or group_of(config, group).roles != ["rollout"]:
        allowed = [name for name, found in config.groups.items() if found.roles == ["rollout"]]
        raise ConfigError(
            f"--group: found {group!r}, allowed: {', '.join(allowed) or 'none here'} (groups "
            "whose only role is rollout; the others have one job each, see resubmit --nodes)"
        )
    if replicas < 1:
        raise ConfigError(
            f"--replicas: found {replicas}, allowed: at least 1; to end the run: relax-hpc stop"
        )


def _scale_jobs(
    run: RunDir, config: Config, group: str, replicas: int, options: Sequence[str], parsable: bool
) -> None:
    slurm = Slurm()
    jobs = {
        job.id: job for job in known_jobs(run, config, slurm).values() if job.state not in ENDED
    }
    names = {entry.group for entry in Ledger(run).entries()} | set(members_of(run, config))
    living = {name for name in _members(names, group) if separate_job(run, name) in jobs}
    surplus = beyond(living, replicas)
    for name in missing(living, group, replicas):
        announce(name, submit_group(run, slurm, Ledger(run), name, options), parsable)
    _drain(run, config, slurm, {name: jobs[separate_job(run, name)] for name in surplus})
    tell(f"{group}: {replicas} jobs ({len(living) + 1} before)")


def _drain(run: RunDir, config: Config, slurm: Slurm, jobs: dict[str, SlurmJob]) -> None:
    """End members together; what they have in flight is given back to the queue, which hands it to
    others."""
    running = [name for name, job in jobs.items() if not withdrawn(slurm, name, job)]
    requested(run, config, "release", *running)
    see_off(slurm, *(job.id for job in jobs.values()))


def _scale_processes(run: RunDir, config: Config, group: str, replicas: int) -> None:
    """The supervisor of a run on this machine starts and ends members itself."""
    names = _members(members_of(run, config), group)
    living = {
        name for name in names if latest_incarnation(run, name) and not all_ended(run, config, name)
    }
    if surplus := beyond(living, replicas):
        requested(run, config, "release", *surplus)
    if new := missing(living, group, replicas):
        requested(run, config, "start", *new)
    tell(f"{group}: {replicas} groups of processes ({len(living) + 1} before)")


def missing(living: Iterable[str], group: str, replicas: int) -> list[str]:
    """Members to start.

    >>> missing({"rollout-3"}, "rollout", 4)
    ['rollout-2', 'rollout-4']
    """
    return [
        name
        for number in range(2, replicas + 1)
        if (name := f"{group}-{number}") not in set(living)
    ]


def beyond(living: Iterable[str], replicas: int) -> list[str]:
    """Members to end, highest number first.

    >>> beyond({"rollout-2", "rollout-10", "rollout-3"}, 2)
    ['rollout-10', 'rollout-3']
    """
    return sorted((name for name in living if _number(name) > replicas), key=_number, reverse=True)


def _members(names: Iterable[str], group: str) -> set[str]:
    """Members of ``group`` among ``names``, the first left out."""
    return {name for name in names if re.fullmatch(rf"{re.escape(group)}-[1-9]\d*", name)}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
