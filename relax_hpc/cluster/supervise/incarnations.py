"""Incarnations of a run's groups, read from its files: their workers, their resources, their time,
and how they ended."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.metrics.read_spans import Process, Stage, read_processes
from relax_hpc.base.metrics.timeline import WorkerTimeline, workers_of_process
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.launch_records import last_beat_s, read_launch, read_mark
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import base_name, group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation, read_card
from relax_hpc.queue.client import BEAT_FILE_S

_GOOD_ENDS = ("done", "stopped")


@dataclass(frozen=True, slots=True)
class PastIncarnation:
    """The workers of one incarnation of a group."""

    group: str
    incarnation: int
    workers: Sequence[WorkerTimeline]
    units: float
    """Number of GPUs, nodes or processes: see `unit_of`."""
    held_as: tuple
    """Token of its nodes. If consecutive incarnations of a group have the same token, the group
    kept its nodes in between."""
    attempt: int
    stages: Sequence[Stage]
    """Stages of the starts of its processes and engines."""
    detected_at: float
    launched_at: float
    """See `Launch`."""
    status: str
    """State at the end: `done`, `stopped`, `failed`, or empty if no mark was written."""
    reason: str

    @property
    def began(self) -> float:
        return min(worker.began for worker in self.workers)

    @property
    def ended(self) -> float:
        return max(worker.ended for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Restart:
    """An incarnation and the one that followed it."""

    before: PastIncarnation
    after: PastIncarnation
    gap: Interval
    """Interval from the last useful work of `before` to the first useful work of `after`, or to
    the end of `after` if it did none."""

    @property
    def fault(self) -> bool:
        """Whether a fault was the cause. False: the user asked for it, or its job ended."""
        return self.before.status not in _GOOD_ENDS and self.before.attempt == self.after.attempt


def unit_of(config: Config) -> str:
    """Unit in which the cost of a run is counted: GPU if rollout and training have GPUs, node on
    Slurm, else process."""
    main_groups = [g for g in config.groups.values() if {"rollout", "actor"} & set(g.roles)]
    if all(group.resources.gpus_per_node for group in main_groups):
        return "GPU"
    return "process" if config.layout == "local" else "node"


def read_incarnations(
    run: RunDir, config: Config, now: float | None = None
) -> list[PastIncarnation]:
    """All incarnations that wrote spans, ordered by group and number. Living ones last until
    ``now``."""
    now = time.time() if now is None else now
    processes = read_processes(run.root)
    incarnations = []
    for (group, incarnation), members in groupby(
        processes, key=lambda process: (process.group, process.incarnation)
    ):
        later = [p.began for p in processes if p.group == group and p.incarnation > incarnation]
        living = _lives(run, config, group, incarnation)
        until = now if living else min(later, default=math.inf)
        incarnations.append(_read_incarnation(run, config, list(members), until, living))
    return incarnations


def restarts(incarnations: Sequence[PastIncarnation]) -> list[Restart]:
    """Restarts of each group, oldest first."""
    pairs = [
        (before, after) for before, after in pairwise(incarnations) if before.group == after.group
    ]
    return [Restart(before, after, _gap(before, after)) for before, after in pairs]


def held_intervals(
    incarnations: Sequence[PastIncarnation],
) -> list[tuple[PastIncarnation, Interval]]:
    """Interval for which each incarnation held its nodes. It lasts until the next incarnation of
    the group begins, if that one has the same nodes."""
    intervals = []
    for number, incarnation in enumerate(incarnations):
        ended = incarnation.ended
        if number + 1 < len(incarnations):
            after = incarnations[number + 1]
            if (after.group, after.held_as) == (incarnation.group, incarnation.held_as):
                ended = after.began
        intervals.append((incarnation, (incarnation.began, ended)))
    return intervals


def _read_incarnation(
    run: RunDir, config: Config, processes: list[Process], until: float, living: bool
) -> PastIncarnation:
    """Incarnation from the spans of its ``processes``. A process without a mark ended at
    ``until`` if the incarnation is ``living``, else at its last span."""
    group, incarnation = processes[0].group, processes[0].incarnation
    roles = list(dict.fromkeys(process.role for process in processes))
    marks = {role: read_mark(run, group, incarnation, role) for role in roles}
    workers = []
    for process in processes:
        ended = until if living else process.last
        if marks[process.role]:
            ended = run.exit_mark(group, incarnation, process.role).stat().st_mtime
        workers += workers_of_process(process, min(ended, until))
    worst = max(
        (mark for mark in marks.values() if mark), key=lambda mark: mark["code"], default={}
    )
    launch = read_launch(run, group, incarnation)
    return PastIncarnation(
        group=group,
        incarnation=incarnation,
        workers=workers,
        units=_units(run, config, group, incarnation, len(workers)),
        held_as=(launch.attempt, launch.job, launch.allocation) if launch else (),
        attempt=launch.attempt if launch else 0,
        stages=list(chain.from_iterable(process.stages for process in processes)),
        detected_at=launch.detected_at if launch else 0.0,
        launched_at=launch.launched_at if launch else 0.0,
        status=worst.get("status", ""),
        reason=worst.get("reason", ""),
    )


def _lives(run: RunDir, config: Config, group: str, incarnation: int) -> bool:
    """Whether an incarnation is the newest and sends heartbeats."""
    if run.finished.exists() or incarnation != latest_incarnation(run, group):
        return False
    return last_beat_s(run, group) < config.liveness.lease_s + BEAT_FILE_S


def _units(run: RunDir, config: Config, group: str, incarnation: int, workers: int) -> float:
    """Units of an incarnation, from the nodes in its card, or else from the present
    configuration."""
    unit = unit_of(config)
    if unit == "process":
        return workers
    nodes = _nodes(run, group, incarnation)
    if not base_name(group, config.groups):
        return nodes if unit == "node" else 0
    resources = group_settings(load_resolved(run.root, group), group).resources
    nodes = nodes or resources.nodes
    return nodes * (resources.gpus_per_node if unit == "GPU" else 1)


def _nodes(run: RunDir, group: str, incarnation: int) -> int:
    card = read_card(run, group, incarnation)
    return len({rank.get("node", "") for rank in card.ranks} - {""}) if card else 0


def _gap(before: PastIncarnation, after: PastIncarnation) -> Interval:
    intervals_before = (worker.useful_interval() for worker in before.workers)
    intervals_after = (worker.useful_interval() for worker in after.workers)
    ends = [interval[1] for interval in intervals_before if interval]
    starts = [interval[0] for interval in intervals_after if interval]
    start = max(ends, default=before.began)
    return start, max(start, min(starts, default=after.ended))
