"""Verdicts on roles and groups: alive, done, waiting or dead.

The supervisor uses no other rule. Only a group whose separate job has left the queue for good is
replaced without a verdict (`cluster.slurm.lost_jobs`).

The strongest evidence decides. From strong to weak:

1. The exit mark that a role writes. `done` is final, however long the role is silent. The exit
   codes 78 and 93 mean that a restart cannot help, and end the run. So does a programming error in
   a plug-in before any progress.
2. Slurm ends the allocation: a process that ends then leaves with it, and is restarted elsewhere.
   Slurm sends its signal to the tasks before the supervisor.
3. Any other end of a process, by its exit mark or its exit code: the role is dead.
4. The state of a group's separate job. If the job is queued, the group waits, even if it is silent.
   If the job is gone, the group is dead, even if it sends heartbeats: on Slurm 22.05 a killed task
   ran for a minute after its job had been requeued.
5. Silence of the supervisor in that job. If the job has run during the whole silence, Slurm has not
   noticed the loss of the node yet, and the group is dead.
6. Heartbeats that the hub has received. A role sends them from its start, also while it loads,
   waits for other groups, or waits for a full disk. Silence for the length of a lease means death.
   A role hangs if it works on one task for liveness.hang_s, or loads one part for longer than its
   size explains (`Liveness`). A group under another supervisor is dead if all of its members are
   silent, and suspect if one is.

Weaker evidence is not collected if stronger evidence decides. Heartbeats count only if two
consecutive answers of the hub agree, because a hub that was stopped itself must first read the
heartbeats that arrived meanwhile (`Liveness`). A group that has not started yet has not failed:
see `relax_hpc.queue.presence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS
from relax_hpc.config.schema import LivenessConfig

_HOPELESS = (EXIT_CONFIG, EXIT_NO_PROGRESS)
QUEUED = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "SUSPENDED",
    "STOPPED",
)
"""States of a job that waits for its nodes."""
_RUNNING = "RUNNING"
GONE = ""
"""Value for a job that Slurm does not know any more: it forgets jobs MinJobAge after their end."""


class Fate(Enum):
    """Fate of a role, or of its group."""

    LIVES = "lives"
    DONE = "done"
    WAITS = "waits"
    """The group's job is pending in Slurm."""
    LEAVES = "leaves"
    """The group ends with its allocation or job, and another job restarts it."""
    SUSPECT = "suspect"
    """A member is silent, and the supervisor of the group may be dead too."""
    DEAD = "dead"
    HOPELESS = "hopeless"
    """Dead, and a restart would fail again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fate. ``reason`` explains why it is dead; ``code`` is the exit code of the run if it is
    hopeless."""

    fate: Fate
    reason: str = ""
    code: int = 0


LIVES = Verdict(Fate.LIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence on a role, or on a group under another supervisor. None means unknown."""

    mark: Mapping[str, Any] | None = None
    """Exit mark of the role."""
    exit: Callable[[], str] | None = None
    """Function that describes the end of a process without a mark; None: the process runs."""
    has_progress: Callable[[], bool] = lambda: True
    """Whether the run has trained a step, or this role has worked in it. It is called only if the
    role ended by a programming error."""
    is_allocation_ending: Callable[[], bool] = lambda: False
    """Whether Slurm ends the allocation around it. It is called only if a process has ended."""
    job: str | None = None
    """State of the group's separate job, or GONE."""
    job_used_s: float = 0.0
    """Seconds for which that job has run."""
    beats: Sequence[Mapping[str, Any]] | None = None
    """Newest heartbeat of each member that has sent one."""
    has_other_supervisor: bool = False
    """Whether it is a group under another supervisor."""
    supervised_s: float = 0.0
    """Seconds for which it has been supervised."""
    patience_s: float = 0.0
    """Seconds until its first heartbeat, at most."""
    load_s: float = math.inf
    """Seconds for one part of what it loads, at most."""
    unanswered_s: float | None = None
    """Seconds for which the answer of the hub is overdue."""
    supervisor_silent_s: float | None = None
    """Seconds since the last heartbeat of its supervisor."""


def verdict(evidence: Evidence, limits: LivenessConfig) -> Verdict:
    """Verdict by the strongest evidence that decides."""
    for judge in (_by_end, _by_job, _by_answers, _by_beats):
        judgement = judge(evidence, limits)
        if judgement:
            return judgement
    return LIVES


def ended_normally(marks: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all roles of a group have ended without a failure, by their exit ``marks``. Such a
    group is silent because it has ended."""
    return all(mark.get("status") in ("done", "stopped") for mark in marks)


def _by_end(evidence: Evidence, _: LivenessConfig) -> Verdict | None:
    # Only a mark that the role itself writes means success: srun 22.05 returns 0 when a node of its
    # step fails ("Node failure on node2 ... rc=0").
    mark = evidence.mark or {}
    if not mark and evidence.exit is None:
        return None
    if mark.get("status") == "done":
        return Verdict(Fate.DONE)
    reason = mark.get("reason") or (evidence.exit() if evidence.exit else "")
    if mark.get("code") in _HOPELESS:
        return Verdict(Fate.HOPELESS, reason, mark["code"])
    if mark.get("is_programming_error") is True and not evidence.has_progress():
        return Verdict(Fate.HOPELESS, reason, EXIT_CONFIG)
    return Verdict(Fate.LEAVES if evidence.is_allocation_ending() else Fate.DEAD, reason)


def _by_job(evidence: Evidence, limits: LivenessConfig) -> Verdict | None:
    if evidence.job is None:
        return None
    if evidence.job == GONE:
        return Verdict(Fate.DEAD, "its job is gone")
    if evidence.job in QUEUED:
        return Verdict(Fate.WAITS)
    if evidence.job != _RUNNING:
        return Verdict(Fate.LEAVES)
    silent_s = evidence.supervisor_silent_s
    if silent_s is None:
        return None
    # A job that has run for a shorter time has just been requeued, and its supervisor starts.
    if silent_s > limits.lease_s and evidence.job_used_s >= silent_s:
        return Verdict(Fate.DEAD, f"has sent no heartbeat for {limits.lease_s:.0f} s")
    return LIVES


def _by_answers(evidence: Evidence, _: LivenessConfig) -> Verdict | None:
    if evidence.unanswered_s is None:
        return None
    if evidence.unanswered_s >= evidence.patience_s:
        return Verdict(Fate.DEAD, f"has not answered for {evidence.patience_s:.0f} s")
    return LIVES


def _by_beats(evidence: Evidence, limits: LivenessConfig) -> Verdict | None:
    if evidence.beats is None:
        return None
    if not evidence.beats:
        if evidence.supervised_s <= evidence.patience_s:
            return None
        text = f"has sent no heartbeat within {evidence.patience_s:.0f} s after its start"
        return Verdict(Fate.DEAD, text)
    ages = [beat["age_s"] for beat in evidence.beats]
    silence = f"has sent no heartbeat for {limits.lease_s:.0f} s"
    decisive_age = min(ages) if evidence.has_other_supervisor else max(ages)
    if decisive_age > limits.lease_s:
        return Verdict(Fate.DEAD, silence)
    if max(ages) > limits.lease_s:
        return Verdict(Fate.SUSPECT, silence)
    if evidence.has_other_supervisor:
        return None
    if max(beat["busy_s"] for beat in evidence.beats) > limits.hang_s:
        return Verdict(Fate.DEAD, f"has worked on one task for over {limits.hang_s:.0f} s")
    if max(beat.get("loading_s", 0.0) for beat in evidence.beats) > evidence.load_s:
        return Verdict(Fate.DEAD, f"has loaded one part for over {evidence.load_s:.0f} s")
    return None
