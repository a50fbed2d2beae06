"""Verdicts on who is dead. All that is known of a group becomes one verdict here, and nowhere else.

Which evidence wins, the strongest first:

1. What a role says of its own end, its exit mark: done is done however long nobody hears of it, and
  what says that
   trying again cannot help (78, 93) has the run given up. So has a programming error in a plug-in
   before any progress.
2. Slurm's word that the allocation around it ends: whatever ends then makes way. Slurm tells the
  tasks before the head.
3. Any other end of a process, by its mark or by its exit code: dead, at once.
4. Slurm's word on the job that a group has to itself. Queued: it waits, however silent it is. Gone:
  so is the group,
   even if something of it still beats, as a killed task was seen to for a minute after its job was
   requeued.
5. Silence of the supervisor in that job: if Slurm says that the job has run all the while, it has
  not missed the node
   yet, and the group is dead.
6. Beats, as the hub has them. A role beats from the moment that it is there, also while it loads,
  or waits for others
   or for room on a disk; so silence for a lease is death, and one piece of work that takes
   liveness.hang_s is a hang,
   as is one part of loading that takes longer than what is loaded accounts for (`Liveness`).
   Where somebody else looks after a group, it is dead when all of its members are silent, and
   suspect when one is.

Weaker evidence is not even looked for where stronger decides. Beats, which come by way of the hub,
have to say the same in two answers in a row: a hub that was stopped itself has beats to read first
(`Liveness`). That a group is not there yet is nobody's failure: see
`relax_hpc.queue.presence`.
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
"""State of a job that Slurm does not know any more."""


class Fate(Enum):
    """Fate of a role, or of its group."""

    LIVES = "lives"
    DONE = "done"
    WAITS = "waits"
    """Queued by Slurm."""
    LEAVES = "leaves"
    """Leaving with its allocation, or its job: it is brought back from outside."""
    SUSPECT = "suspect"
    """Silent in a part; whoever looks after it may be as dead."""
    DEAD = "dead"
    HOPELESS = "hopeless"
    """Dead, and would be again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` in words where it is dead, and the exit ``code`` of the run where it is
    hopeless."""

    fate: Fate
    reason: str = ""
    code: int = 0


LIVES = Verdict(Fate.LIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence on a role, or on a group that somebody else looks after; None: nothing is known."""

    mark: Mapping[str, Any] | None = None
    """Exit mark of the role."""
    exit: Callable[[], str] | None = None
    """Description of the end of a process that left no mark; None: it runs."""
    has_progress: Callable[[], bool] = lambda: True
    """Whether the run has trained a step, or this role has worked in it. It is called only if the
    role ended by a programming error."""
    ends: Callable[[], bool] = lambda: False
    """Whether Slurm ends the allocation around it; asked only if something has ended."""
    job: str | None = None
    """State of the group's own job, or GONE."""
    job_used_s: float = 0.0
    """Seconds for which that job has run."""
    beats: Sequence[Mapping[str, Any]] | None = None
    """Newest beat of each member that beats."""
    others: bool = False
    """Whether somebody else looks after it."""
    known_s: float = 0.0
    """Seconds for which it has been looked after."""
    patience_s: float = 0.0
    """Seconds until its first beat, at most."""
    load_s: float = math.inf
    """Seconds at one part of what it loads, at most."""
    unanswered_s: float | None = None
    """Seconds for which the hub has owed an answer."""
    supervisor_still_s: float | None = None
    """Seconds without a sign of its supervisor."""


def verdict(evidence: Evidence, limits: LivenessConfig) -> Verdict:
    """Verdict by the strongest evidence that says anything."""
    for judge in (_by_end, _by_job, _by_answers, _by_beats):
        if found := judge(evidence, limits):
            return found
    return LIVES


def ended_in_order(marks: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a group whose roles have left ``marks``, one each, needs nobody: it is not silent,
    but over."""
    return all(mark.get("status") in ("done", "stopped") for mark in marks)


def _by_end(found: Evidence, _: LivenessConfig) -> Verdict | None:
    mark = found.mark or {}
    if not mark and found.exit is None:
        return None
    if mark.get("status") == "done":
        return Verdict(Fate.DONE)
    reason = mark.get("reason") or (found.exit() if found.exit else "")
    if mark.get("code") in _HOPELESS:
        return Verdict(Fate.HOPELESS, reason, mark["code"])
    if mark.get("is_programming_error") is True and not found.has_progress():
        return Verdict(Fate.HOPELESS, reason, EXIT_CONFIG)
    return Verdict(Fate.LEAVES if found.ends() else Fate.DEAD, reason)


def _by_job(found: Evidence, limits: LivenessConfig) -> Verdict | None:
    if found.job is None:
        return None
    if found.job == GONE:
        return Verdict(Fate.DEAD, "its job is gone")
    if found.job in QUEUED:
        return Verdict(Fate.WAITS)
    still_s = found.supervisor_still_s
    if found.job != _RUNNING or still_s is None:
        return None if found.job == _RUNNING else Verdict(Fate.LEAVES)
    # One that has run for less has just been brought back.
    dead = still_s > limits.lease_s and found.job_used_s >= still_s
    return Verdict(Fate.DEAD, f"has given no sign for {limits.lease_s:.0f} s") if dead else LIVES


def _by_answers(found: Evidence, _: LivenessConfig) -> Verdict | None:
    if found.unanswered_s is None:
        return None
    dead = found.unanswered_s >= found.patience_s
    return Verdict(Fate.DEAD, f"has not answered for {found.patience_s:.0f} s") if dead else LIVES


def _by_beats(found: Evidence, limits: LivenessConfig) -> Verdict | None:
    if found.beats is None:
        return None
    ages = [beat["age_s"] for beat in found.beats]
    silent = f"has given no sign for {limits.lease_s:.0f} s"
    if not ages:
        late = found.known_s > found.patience_s
        return (
            Verdict(Fate.DEAD, f"has not begun to beat within {found.patience_s:.0f} s")
            if late
            else None
        )
    if (min if found.others else max)(ages) > limits.lease_s:
        return Verdict(Fate.DEAD, silent)
    if max(ages) > limits.lease_s:
        return Verdict(Fate.SUSPECT, silent)
    if not found.others and max(beat["busy_s"] for beat in found.beats) > limits.hang_s:
        return Verdict(Fate.DEAD, f"has been at one piece of work for over {limits.hang_s:.0f} s")
    if not found.others and max(beat.get("loading_s", 0.0) for beat in found.beats) > found.load_s:
        return Verdict(
            Fate.DEAD, f"has been loading without getting on for over {found.load_s:.0f} s"
        )
    return None
