"""`relax-hpc scale`: change the number of jobs or engines of a rollout group in a running run.

Members after the first one are separate groups, `rollout-2`, `rollout-3`, ... Each has an ordinary
small job, which Slurm can start in any gap of its schedule.

With --without, the processes of the group apply the change without a restart. Other engines take
over the work of a removed engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import ENDED, known_jobs, load_unfinished_run, separate_job
from relax_hpc.cluster.slurm.jobs import submit_group
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_ended, members_of
from relax_hpc.commands.resubmit import (
    ResubmitRequest,
    apply_change,
    await_job_end,
    cancel_if_pending,
    print_job,
    print_progress,
    request_and_wait,
)
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import base_name, group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation


def main(
    root: str, group: str, replicas: int, options: Sequence[str] = (), parsable: bool = False
) -> int:
    """Start or end jobs of ``group`` until it has ``replicas`` jobs. The ids of new jobs go to
    standard output.

    ``options``: --time and --time-min of sbatch. Slurm's backfill starts short jobs earlier.
    """
    # The jobs are submitted like every other job of the run, not with submitit. A submitit job runs
    # a pickled function with submitit's own signal handling and requeue rules, on one node and
    # without the site's setup.
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    _check_request(config, group, replicas)
    if config.layout == "local":
        if options:
            raise ConfigError(
                "--time, --time-min: options of Slurm jobs, but the run has layout local; leave "
                "them out"
            )
        _scale_processes(run, config, group, replicas)
    else:
        _scale_jobs(run, config, group, replicas, options, parsable)
    return EXIT_DONE


def remove_engines(root: str, group: str, numbers: str) -> int:
    """Make all engines of ``group`` serve except those in ``numbers``, such as `3,5`; empty: all of
    them."""
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    if "rollout" not in group_settings(config, group).roles:
        raise ConfigError(
            f"--group: found {group!r}, whose roles have no engines, allowed: a group with rollout"
        )
    base = base_name(group, config.groups)
    before = load_resolved(run.root, base).rollout.without
    in_other_groups = [name for name in before if name.rpartition("/")[0] != group]
    removed = [f"{group}/{number}" for number in _parse_numbers(numbers)]
    without = [*in_other_groups, *removed]
    if without == before:
        print_progress(f"{group}: its engines are already as requested")
        return EXIT_DONE
    apply_change(run, config, ResubmitRequest(base, overrides={"rollout.without": without}))
    print_progress(
        f"{group}: without {', '.join(removed) or 'none'}; status shows which engines have left"
    )
    return EXIT_DONE


def _check_request(config: Config, group: str, replicas: int) -> None:
    if group not in config.groups or group_settings(config, group).roles != ["rollout"]:
        allowed = [name for name, other in config.groups.items() if other.roles == ["rollout"]]
        raise ConfigError(
            f"--group: found {group!r}, allowed: {', '.join(allowed) or 'none here'} (groups "
            "whose only role is rollout; other groups have one job each, see resubmit --nodes)"
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
    surplus = members_to_end(living, replicas)
    for name in members_to_start(living, group, replicas):
        print_job(name, submit_group(run, slurm, Ledger(run), name, options), parsable)
    _end_members(run, config, slurm, {name: jobs[separate_job(run, name)] for name in surplus})
    print_progress(f"{group}: {replicas} jobs ({len(living) + 1} before)")


def _end_members(run: RunDir, config: Config, slurm: Slurm, jobs: dict[str, SlurmJob]) -> None:
    """End several members at the same time. The queue gives their work to other members."""
    running = [name for name, job in jobs.items() if not cancel_if_pending(slurm, name, job)]
    request_and_wait(run, config, "release", *running)
    await_job_end(slurm, *(job.id for job in jobs.values()))


def _scale_processes(run: RunDir, config: Config, group: str, replicas: int) -> None:
    """Scale a run on this machine, whose supervisor starts and ends members itself."""
    names = _members(members_of(run, config), group)
    living = {
        name for name in names if latest_incarnation(run, name) and not all_ended(run, config, name)
    }
    surplus = members_to_end(living, replicas)
    if surplus:
        request_and_wait(run, config, "release", *surplus)
    new_members = members_to_start(living, group, replicas)
    if new_members:
        request_and_wait(run, config, "start", *new_members)
    print_progress(f"{group}: {replicas} groups of processes ({len(living) + 1} before)")


def members_to_start(living: Iterable[str], group: str, replicas: int) -> list[str]:
    """Members of ``group`` to start, so that it has ``replicas`` members.

    >>> members_to_start({"rollout-3"}, "rollout", 4)
    ['rollout-2', 'rollout-4']
    """
    names = [f"{group}-{number}" for number in range(2, replicas + 1)]
    present = set(living)
    return [name for name in names if name not in present]


def members_to_end(living: Iterable[str], replicas: int) -> list[str]:
    """Members to end, highest number first.

    >>> members_to_end({"rollout-2", "rollout-10", "rollout-3"}, 2)
    ['rollout-10', 'rollout-3']
    """
    return sorted((name for name in living if _number(name) > replicas), key=_number, reverse=True)


def _members(names: Iterable[str], group: str) -> set[str]:
    """Members of ``group`` in ``names``, except the first one."""
    return {name for name in names if re.fullmatch(rf"{re.escape(group)}-[1-9]\d*", name)}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _parse_numbers(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.replace(",", " ").split()})
    except ValueError as error:
        raise ConfigError(
            f"--without: found {text!r}, allowed: numbers of engines, such as 3,5, or '' for none"
        ) from error
