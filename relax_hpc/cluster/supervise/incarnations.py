"""Incarnations of a run's groups as its files tell: who worked, on how much, until when, and how it
ended."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.metrics.read_spans import Process, read_processes
from relax_hpc.base.metrics.timeline import WorkerTimeline, workers_of_process
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.launch_records import last_beat_s, read_launch, read_mark
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import base_name, group_of
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
    """GPUs, nodes or processes that it has: see `unit_of`."""
    held_as: tuple
    """Token of its nodes: incarnations of a group in a row with the same one have the same nodes,
    also in between."""
    attempt: int
    status: str
    """State of its end: `done`, `stopped`, `failed`, or empty: it left no mark."""
    reason: str

    @property
    def began(self) -> float:
        return min(worker.began for worker in self.workers)

    @property
    def ended(self) -> float:
        return max(worker.ended for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Restart:
    """An incarnation that another one followed."""

    before: PastIncarnation
    after: PastIncarnation
    gap: Interval
    """Interval from the last useful work of `before` to the first of `after`, or to its end without
    any."""

    @property
    def fault(self) -> bool:
        """Whether a fault was the cause; False: the user wanted it, or it made way."""
        return self.before.status not in _GOOD_ENDS and self.before.attempt == self.after.attempt


def unit_of(config: Config) -> str:
    """Unit in which a run is counted: GPU if rollout and training have some, node on Slurm, else
    process."""
    sides = [g for g in config.groups.values() if {"rollout", "actor"} & set(g.roles)]
    if all(group.resources.gpus_per_node for group in sides):
        return "GPU"
    return "process" if config.layout == "local" else "node"


def read_incarnations(
    run: RunDir, config: Config, now: float | None = None
) -> list[PastIncarnation]:
    """All that wrote spans, by group and incarnation; those that live are taken to last until
    ``now``."""
    now = time.time() if now is None else now
    processes = read_processes(run.root)
    found = []
    for (group, incarnation), members in groupby(
        processes, key=lambda process: (process.group, process.incarnation)
    ):
        later = [p.began for p in processes if p.group == group and p.incarnation > incarnation]
        living = _lives(run, config, group, incarnation)
        until = now if living else min(later, default=math.inf)
        found.append(_incarnation(run, config, list(members), until, living))
    return found


def restarts(incarnations: Sequence[PastIncarnation]) -> list[Restart]:
    """Restarts of each group, oldest first."""
    pairs = [
        (before, after) for before, after in pairwise(incarnations) if before.group == after.group
    ]
    return [Restart(before, after, _gap(before, after)) for before, after in pairs]


def held(incarnations: Sequence[PastIncarnation]) -> list[tuple[PastIncarnation, Interval]]:
    """Interval for which each incarnation held its nodes: also until the next one that runs on the
    same."""
    spans = []
    for number, one in enumerate(incarnations):
        after = incarnations[number + 1] if number + 1 < len(incarnations) else None
        stays = after is not None and (after.group, after.held_as) == (one.group, one.held_as)
        spans.append((one, (one.began, after.began if stays and after else one.ended)))
    return spans


def _incarnation(
    run: RunDir, config: Config, processes: list[Process], until: float, living: bool
) -> PastIncarnation:
    group, incarnation = processes[0].group, processes[0].incarnation
    roles = list(dict.fromkeys(process.role for process in processes))
    marks = {role: read_mark(run, group, incarnation, role) for role in roles}
    workers = []
    for process in processes:
        mark = run.exit_mark(group, incarnation, process.role)
        ended = mark.stat().st_mtime if marks[process.role] else until if living else process.last
        workers += workers_of_process(process, min(ended, until))
    worst = max(
        (mark for mark in marks.values() if mark), key=lambda mark: mark["code"], default={}
    )
    launch = read_launch(run, group, incarnation)
    held_as = (launch.attempt, launch.job, launch.allocation) if launch else ()
    about = (launch.attempt if launch else 0, worst.get("status", ""), worst.get("reason", ""))
    return PastIncarnation(
        group,
        incarnation,
        workers,
        _units(run, config, group, incarnation, len(workers)),
        held_as,
        *about,
    )


def _lives(run: RunDir, config: Config, group: str, incarnation: int) -> bool:
    """Whether an incarnation is the newest and beats."""
    if run.finished.exists() or incarnation != latest_incarnation(run, group):
        return False
    return last_beat_s(run, group) < config.liveness.lease_s + BEAT_FILE_S


def _units(run: RunDir, config: Config, group: str, incarnation: int, workers: int) -> float:
    """Units of an incarnation by the nodes that its card names, else by the configuration of
    now."""
    unit = unit_of(config)
    if unit == "process":
        return workers
    nodes = _nodes(run, group, incarnation)
    if not base_name(group, config.groups):
        return nodes if unit == "node" else 0
    resources = group_of(load_resolved(run.root, group), group).resources
    nodes = nodes or resources.nodes
    return nodes * (resources.gpus_per_node if unit == "GPU" else 1)


def _nodes(run: RunDir, group: str, incarnation: int) -> int:
    card = read_card(run, group, incarnation)
    return len({rank.get("node", "") for rank in card.ranks} - {""}) if card else 0


def _gap(before: PastIncarnation, after: PastIncarnation) -> Interval:
    ends = [found[1] for worker in before.workers if (found := worker.useful_interval())]
    starts = [found[0] for worker in after.workers if (found := worker.useful_interval())]
    start = max(ends, default=before.began)
    return start, max(start, min(starts, default=after.ended))
