"""State of a run as one word, and its exit code, for `status` and `list`.

The first condition of this table that is true decides:

| condition | state | exit code |
|---|---|---|
| it has trained and saved its last step | finished | 0 |
| it was asked to stop, or failed, and a process works or a job holds nodes | stopping | 0 |
| it failed | failed | the code of its failure |
| it was asked to stop | stopped | 130 |
| its hub answers, or its processes write beats | running | 0 |
| it is being prepared, or a job of it holds nodes | starting | 0 |
| a job of it is queued: its own, a group's, or a successor | queued | 0 |
| a job of it is completing: it may be queued again | stopping | 0 |
| it has jobs, there are no beats, and squeue does not answer | unknown | 75 |
| otherwise: it has no process and no job | ended | 75 |

`unreadable` (78) is a run whose files this user cannot read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_PROGRESS,
    EXIT_RETRY,
)
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import SlurmJob
from relax_hpc.cluster.slurm.job_lookup import is_over, is_queued
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import (
    all_ended,
    has_live_process,
    last_beat_s,
    members_of,
)
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.life_signs import read_activity
from relax_hpc.queue.client import BEAT_FILE_S

FINAL_STATES = ("finished", "failed", "stopped", "ended")
"""States of a run that does not continue. After `ended` (Ctrl-C, power loss) there is no record of
the reason."""
UNREADABLE = "unreadable"
_EXIT_CODES = {
    "stopped": EXIT_INTERRUPTED,
    "ended": EXIT_RETRY,
    "unknown": EXIT_RETRY,
    UNREADABLE: EXIT_CONFIG,
}
_WORST_FIRST = (EXIT_NO_PROGRESS, EXIT_CONFIG, EXIT_RETRY, EXIT_INTERRUPTED, EXIT_DONE)
_MIN_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSigns:
    """Facts about a run from its files, from Slurm's queue, and from its hub."""

    finished: bool = False
    stop: Mapping[str, Any] = field(default_factory=dict)
    """{code, reason} of a requested stop, see `requests.read_stop_request`; empty without one."""
    hub_answers: bool = False
    beats: bool = False
    """Whether a process of the run has written a beat recently, or runs on this machine."""
    disk_full: bool = False
    """Whether processes cannot write beats because the disk is full."""
    prepares: bool = False
    submitted: bool = False
    """Whether the run has ever had a Slurm job."""
    squeue_answers: bool = False
    sees_all_jobs: bool = True
    """Whether squeue shows all jobs of the run: sites may hide those of other users (Slurm's
    PrivateData)."""
    holds_nodes: bool = False
    """Whether a job of the run runs."""
    jobs_end: bool = False
    """Whether a job of the run is completing."""
    queued: bool = False
    """Whether a job of the run waits in the queue, and can start."""

    @property
    def is_working(self) -> bool:
        """Whether a process of the run works."""
        # Slurm leaves no process of an ended job, even if the last beat is recent.
        without_job = (
            self.submitted and self.squeue_answers and self.sees_all_jobs and not self.holds_nodes
        )
        beats = self.beats and not without_job
        return self.hub_answers or beats or (self.holds_nodes and self.disk_full)


def decide_state(signs: RunSigns) -> str:
    """State of a run by the table above."""
    if signs.finished:
        return "finished"
    if signs.stop:
        if signs.is_working or signs.holds_nodes or signs.jobs_end:
            return "stopping"
        return "failed" if signs.stop["code"] else "stopped"
    if signs.is_working:
        return "running"
    if signs.prepares or signs.holds_nodes:
        return "starting"
    if signs.queued:
        return "queued"
    if signs.jobs_end:
        return "stopping"
    if signs.submitted and not signs.squeue_answers:
        return "unknown"
    return "ended"


def exit_code(state: str, stop: Mapping[str, Any]) -> int:
    """Exit code of `relax-hpc run` for this state; 0 for a run that is finished or continues.

    >>> exit_code("failed", {"code": 93}), exit_code("stopped", {"code": 0}), exit_code("ended", {})
    (93, 130, 75)
    """
    return int(stop["code"]) if state == "failed" else _EXIT_CODES.get(state, EXIT_DONE)


def worst_exit_code(codes: Iterable[int]) -> int:
    """The most serious exit code of several runs; 0 without runs.

    >>> worst_exit_code([0, 130, 75]), worst_exit_code([])
    (75, 0)
    """
    distinct = set(codes)
    for code in _WORST_FIRST:
        if code in distinct:
            return code
    return max(distinct, default=EXIT_DONE)


def read_signs(
    run: RunDir, config: Config, jobs: Collection[SlurmJob] | None, hub_answers: bool = False
) -> RunSigns:
    """Collect the facts about a run.

    ``jobs``: its jobs in squeue; None if squeue was not queried or did not answer.
    """
    kinds = {entry.job: entry.kind for entry in Ledger(run).entries()}
    own_jobs = [job for job in jobs or () if not _is_unused_spare(job, kinds)]
    living = [name for name in members_of(run, config) if not all_ended(run, config, name)]
    limit_s = config.liveness.lease_s + BEAT_FILE_S
    return RunSigns(
        finished=run.finished.exists(),
        stop=read_stop_request(run),
        hub_answers=hub_answers,
        beats=any(
            last_beat_s(run, name) < limit_s or has_live_process(run, name) for name in living
        ),
        disk_full=is_disk_full(run),
        prepares=bool(read_activity(run.preparing)),
        submitted=bool(kinds),
        squeue_answers=jobs is not None,
        sees_all_jobs=os.getuid() in (0, run.root.stat().st_uid),
        holds_nodes=any(not is_queued(job) and not is_over(job) for job in own_jobs),
        jobs_end=any(job.state == "COMPLETING" for job in own_jobs),
        queued=any(is_queued(job) for job in own_jobs),
    )


def _is_unused_spare(job: SlurmJob, kinds: Mapping[str, str]) -> bool:
    """Whether ``job`` is a held spare, which starts only when the supervisor releases it."""
    return kinds.get(job.id) == "spare" and job.state == "PENDING"


def is_disk_full(run: RunDir) -> bool:
    """Whether the disk of a run is full, as far as this is visible without writing to it."""
    disk = os.statvfs(run.root)
    # Some filesystems report no size.
    return bool(disk.f_blocks) and disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES
