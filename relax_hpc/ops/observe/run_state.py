"""State of a run as one word, and the exit code by which scripts tell it: the one place for
`status` and `list`.

The first line of this table that is true of a run decides:

| condition | state | exit code |
|---|---|---|
| it has trained and saved its last step | finished | 0 |
| it was asked to stop, or failed, and something of it still works or holds nodes | stopping | 0 |
| it failed | failed | the code of its failure |
| it was asked to stop | stopped | 130 |
| its hub answers, or its processes beat | running | 0 |
| it is being prepared, or a job of it holds nodes | starting | 0 |
| a job of it is queued: its own, a group's, or a successor | queued | 0 |
| a job of it is completing: it may be queued again | stopping | 0 |
| it has jobs, nothing beats, and squeue does not answer | unknown | 75 |
| else: nothing of it is left, and nothing will continue it | ended | 75 |

`unreadable` (78) is a run whose files this user may not or cannot read.
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

OVER = ("finished", "failed", "stopped", "ended")
"""States of a run that nothing will continue; `ended` has left no word, as after a Ctrl-C or a
power loss."""
UNREADABLE = "unreadable"
_EXIT_CODES = {
    "stopped": EXIT_INTERRUPTED,
    "ended": EXIT_RETRY,
    "unknown": EXIT_RETRY,
    UNREADABLE: EXIT_CONFIG,
}
_GRAVEST_FIRST = (EXIT_NO_PROGRESS, EXIT_CONFIG, EXIT_RETRY, EXIT_INTERRUPTED, EXIT_DONE)
_LITTLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSigns:
    """Signs of a run in its files, in Slurm's queue, and from its hub."""

    finished: bool = False
    stop: Mapping[str, Any] = field(default_factory=dict)
    """{code, reason} of a stop that was asked for, see `requests.asked_to_stop`; empty: none was.
    """
    hub_answers: bool = False
    beats: bool = False
    """Whether a process of the run has beaten lately, or certainly runs on this machine."""
    disk_full: bool = False
    """Whether no process can write a beat."""
    prepares: bool = False
    submitted: bool = False
    """Whether the run has ever had a Slurm job."""
    squeue_answers: bool = False
    sees_all_jobs: bool = True
    """Whether squeue would show the run's jobs: sites may hide those of other users (PrivateData).
    """
    holds_nodes: bool = False
    """Whether a job of the run runs."""
    jobs_end: bool = False
    """Whether a job of the run is completing."""
    queued: bool = False
    """Whether a job of the run waits in the queue, and can start."""

    @property
    def works(self) -> bool:
        """Whether some process of the run is at work."""
        # Slurm leaves no process of an ended job behind, however young the last beat is.
        without_job = (
            self.submitted and self.squeue_answers and self.sees_all_jobs and not self.holds_nodes
        )
        beats = self.beats and not without_job
        return self.hub_answers or beats or (self.holds_nodes and self.disk_full)


def state_of(signs: RunSigns) -> str:
    """State of a run, by the table above."""
    if signs.finished:
        return "finished"
    if signs.stop:
        if signs.works or signs.holds_nodes or signs.jobs_end:
            return "stopping"
        return "failed" if signs.stop["code"] else "stopped"
    if signs.works:
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
    """Exit code that `relax-hpc run` would have ended with; 0 for a run that is finished or
    continues.

    >>> exit_code("failed", {"code": 93}), exit_code("stopped", {"code": 0}), exit_code("ended", {})
    (93, 130, 75)
    """
    return int(stop["code"]) if state == "failed" else _EXIT_CODES.get(state, EXIT_DONE)


def gravest(codes: Iterable[int]) -> int:
    """Gravest exit code of several runs; 0 of none.

    >>> gravest([0, 130, 75]), gravest([])
    (75, 0)
    """
    found = set(codes)
    return next((code for code in _GRAVEST_FIRST if code in found), max(found, default=EXIT_DONE))


def signs_of(
    run: RunDir, config: Config, jobs: Collection[SlurmJob] | None, hub_answers: bool = False
) -> RunSigns:
    """Signs of a run. ``jobs``: its jobs that squeue knows; None: squeue was not asked, or
    did not answer."""
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
        disk_full=is_full(run),
        prepares=bool(read_activity(run.preparing)),
        submitted=bool(kinds),
        squeue_answers=jobs is not None,
        sees_all_jobs=os.getuid() in (0, run.root.stat().st_uid),
        holds_nodes=any(not is_queued(job) and not is_over(job) for job in own_jobs),
        jobs_end=any(job.state == "COMPLETING" for job in own_jobs),
        queued=any(is_queued(job) for job in own_jobs),
    )


def _is_unused_spare(job: SlurmJob, kinds: Mapping[str, str]) -> bool:
    """Whether ``job`` is a held spare: it starts only if a head releases it."""
    return kinds.get(job.id) == "spare" and job.state == "PENDING"


def is_full(run: RunDir) -> bool:
    """Whether the disk of a run has no room, as far as can be seen without writing to it."""
    room = os.statvfs(run.root)
    # Some file systems do not say how large they are.
    return bool(room.f_blocks) and room.f_bavail * room.f_frsize < _LITTLE_BYTES
