"""Time from the end of a group to the next trained step, split by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.metrics.read_spans import union_length
from relax_hpc.base.metrics.start_stages import (
    COMPILATION,
    IMPORTS,
    OTHER,
    PROCESS,
    WEIGHTS,
    sort_stage,
)
from relax_hpc.base.metrics.timeline import WorkerTimeline
from relax_hpc.cluster.supervise.incarnations import PastIncarnation, Restart

DETECTION, WAITS, STEP = "detection", "waits", "step"
PARTS = {
    DETECTION: "until the supervisor took the group for dead",
    PROCESS: "until the new processes ran, and their ranks and the engine's processes had met",
    IMPORTS: "importing libraries, in the role and in the engine",
    WEIGHTS: "loading weights and checkpoints, fetching the newest version",
    COMPILATION: "tuning and compiling kernels, capturing CUDA graphs",
    WAITS: "waiting for other groups, before any work",
    OTHER: "all else before the first work, such as reading prompts",
    STEP: "from the first work of the new processes to the end of the step that follows",
}
"""Parts of a recovery, in their order in time."""
_PRIORITY = (DETECTION, COMPILATION, WEIGHTS, IMPORTS, PROCESS, OTHER, WAITS)
"""If several processes start at the same time, a second belongs to the first of these parts."""
_WEIGHT_SPANS = ("weights", "engine_update")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery of a group after its end."""

    total_s: float
    """Seconds from the end of the group to the end of the next trained step."""
    seconds: Mapping[str, float]
    """Part, see `PARTS`, -> seconds. Their sum is ``total_s``."""


def measure_recovery(
    restart: Restart, workers: Sequence[WorkerTimeline], ended_at: float | None = None
) -> Recovery | None:
    """The recovery of ``restart``. None: the new incarnation did no work, or no step followed.

    ``workers``: all workers of the run. ``ended_at``: the time of the end, if it is known better
    than from the records of the run, which are up to a second old.
    """
    before, after = restart.before, restart.after
    ended = before.ended if ended_at is None else ended_at
    works_at = _first_work(after)
    step_end = None if works_at is None else _next_step_end(workers, works_at)
    if works_at is None or step_end is None:
        return None
    covered, covered_s = list[Interval](), 0.0
    seconds = dict.fromkeys(PARTS, 0.0)
    intervals = _intervals(after, ended)
    for part in _PRIORITY:
        covered += intervals.get(part, [])
        total_s = union_length(covered, ended, works_at)
        seconds[part] = total_s - covered_s
        covered_s = total_s
    seconds[OTHER] += max(0.0, works_at - ended - covered_s)
    seconds[STEP] = step_end - max(works_at, ended)
    return Recovery(step_end - ended, seconds)


def _first_work(incarnation: PastIncarnation) -> float | None:
    intervals = [worker.useful_interval() for worker in incarnation.workers]
    return min((interval[0] for interval in intervals if interval), default=None)


def _intervals(after: PastIncarnation, ended: float) -> dict[str, list[Interval]]:
    """Intervals of each part except `STEP`. They may overlap."""
    began = min(worker.began for worker in after.workers)
    detected = after.detected_at or after.launched_at or ended
    intervals: dict[str, list[Interval]] = {
        DETECTION: [(ended, detected)],
        PROCESS: [(detected, began)],
    }
    for stage in after.stages:
        intervals.setdefault(sort_stage(stage.name), []).append((stage.start, stage.end))
    for worker in after.workers:
        for part, whats in ((WAITS, ("wait",)), (WEIGHTS, _WEIGHT_SPANS)):
            spans = worker.table.of_kinds(whats)
            pairs = zip(spans.start.tolist(), spans.end.tolist(), strict=True)
            intervals.setdefault(part, []).extend(pairs)
    return intervals


def _next_step_end(workers: Sequence[WorkerTimeline], since: float) -> float | None:
    """End of the step in which the actor first trained after ``since``. None: it trained none."""
    actors = [worker for worker in workers if worker.role == "actor"]
    trained = list[tuple[float, int, int, float]]()
    for worker in actors:
        spans = worker.table.of_kinds(["train"]).with_step()
        for span in spans.select(spans.start >= since):
            if span.step is not None:
                trained.append((span.start, worker.incarnation, span.step, span.end))
    if not trained:
        return None
    _, incarnation, step, _ = min(trained)
    return max(end for _, number, other, end in trained if (number, other) == (incarnation, step))
