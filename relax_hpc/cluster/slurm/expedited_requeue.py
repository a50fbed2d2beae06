"""Expedited requeue of Slurm 25.11 (`sbatch --requeue=expedite`), for the jobs of layout `jobs`.

If a node fails, slurmctld starts such a job again immediately, as the first of the queue. After
`scontrol requeue` the job is also eligible immediately, and does not wait for its credentials to
expire (120 s by default). The cluster must set SlurmctldParameters=enable_expedited_requeue.

slurmctld 25.11 also requeues such a job if its batch script fails, and holds it then unless an
Epilog failed (`batch_requeue_fini` in src/slurmctld/job_mgr.c). A held job never starts, and the
jobs that wait for its end never start either. The requeue of a job is therefore allowed only while
its supervisor runs: the batch script forbids it first, and the supervisor forbids it again before
it fails.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.layout import group_component
from relax_hpc.cluster.slurm.parsing import parse_release
from relax_hpc.config import Config

OPTION, EXPEDITE = "requeue", "expedite"
"""Option of sbatch, and its value."""
SINCE = (25, 11)
"""First release of Slurm with it."""
_PARAMETER = "enable_expedited_requeue"


def is_enabled(config: dict[str, str]) -> bool:
    """Whether a cluster with this configuration of Slurm accepts expedited requeues. An older
    slurmctld does not know the parameter and ignores it, so ``config`` alone does not decide."""
    release = parse_release(config.get("SLURM_VERSION", ""))
    return release >= SINCE and _PARAMETER in config.get("SlurmctldParameters", "").split(",")


def states_requeue(config: Config) -> bool:
    """Whether the user states how jobs are requeued, for all groups or for one."""
    site, groups = config.site, config.groups.values()
    options = [site.options, site.cpu_options, site.gpu_options]
    options += [group.resources.options for group in groups]
    return any(OPTION in changes for changes in options)


def with_expedited_requeue(config: Config, slurm: Slurm) -> Config:
    """``config`` with expedited requeues if the cluster accepts them, the layout has jobs that are
    requeued, and the user states nothing else. Unchanged if Slurm does not answer."""
    if config.layout != "jobs" or states_requeue(config):
        return config
    with contextlib.suppress(SlurmError):
        if is_enabled(slurm.config()):
            options = {**config.site.options, OPTION: EXPEDITE}
            return replace(config, site=replace(config.site, options=options))
    return config


def allow_requeue(config: Config, group: str, slurm: Slurm) -> None:
    """Let slurmctld requeue the job of ``group`` around this process, if its requeue is an
    expedited one."""
    if _is_expedited(config, group):
        _set_requeue(slurm, allowed=True)


def forbid_requeue(config: Config, group: str, slurm: Slurm) -> None:
    """Prevent a requeue of the job of ``group`` around this process, which is about to fail, if its
    requeue would be an expedited one. No effect if it is being requeued already."""
    if _is_expedited(config, group):
        _set_requeue(slurm, allowed=False)


def _is_expedited(config: Config, group: str) -> bool:
    return group_component(config, group).options.get(OPTION) == EXPEDITE


def _set_requeue(slurm: Slurm, allowed: bool) -> None:
    job = os.environ.get("SLURM_JOB_ID", "")
    # If slurmctld does not answer, the job is held after a failure, and `status` shows it.
    with contextlib.suppress(SlurmError):
        if job and slurm.describe(job).get("JobState") == "RUNNING":
            slurm.set_requeue(job, allowed)
