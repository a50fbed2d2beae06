"""GPU-hours (or node-hours, or process-hours) of a run: held, used, waited, lost to faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from relax_hpc.base.metrics.accounting import Interval, work_seconds
from relax_hpc.base.metrics.read_spans import union_length
from relax_hpc.base.metrics.timeline import WorkerTimeline, find_repeated_training
from relax_hpc.cluster.supervise.incarnations import PastIncarnation, Restart, held_intervals

_HOUR_S = 3600.0


def spent_hours(
    unit: str,
    incarnations: Sequence[PastIncarnation],
    restarts: Sequence[Restart],
    window: Interval,
) -> dict[str, Any]:
    """Hours of ``window`` by their use, in hours of a ``unit``. All but `asked` add up to `asked`.

    asked             time in which groups held their units, from the start of the first process to
                      the end of the last; a pause between incarnations on the same nodes counts
    lost_restarting   after a fault: from the last useful work to the next useful work
    lost_again        training of steps that had to be trained once more
    used, waiting     other work and waits; each worker counts for an equal share of its group
    rest              starting, and time without spans

    Groups without spans, such as a hub that only runs the controller, are not counted.
    """
    gaps: dict[str, list[Interval]] = defaultdict(list)
    for restart in restarts:
        if restart.fault:
            gaps[restart.after.group].append(restart.gap)
    totals = dict.fromkeys(("asked", "used", "waiting", "lost_restarting", "lost_again"), 0.0)
    for incarnation, interval in held_intervals(incarnations):
        start, end = max(interval[0], window[0]), max(window[0], min(interval[1], window[1]))
        group_gaps = gaps[incarnation.group]
        totals["asked"] += incarnation.units * max(0.0, end - start)
        totals["lost_restarting"] += incarnation.units * union_length(group_gaps, start, end)
        for worker in incarnation.workers:
            seconds = worker.seconds(start, end, group_gaps)
            share = incarnation.units / len(incarnation.workers)
            waited = sum(spent for label, spent in seconds.items() if label.what == "wait")
            totals["used"] += share * work_seconds(seconds)
            totals["waiting"] += share * waited
    totals["lost_again"] = _repeated_training(incarnations, gaps, window)
    totals["used"] -= totals["lost_again"]
    spent = sum(seconds for name, seconds in totals.items() if name != "asked")
    totals["rest"] = totals["asked"] - spent
    return {"unit": unit, **{name: seconds / _HOUR_S for name, seconds in totals.items()}}


def _repeated_training(
    incarnations: Sequence[PastIncarnation], gaps: dict[str, list[Interval]], window: Interval
) -> float:
    """Unit-seconds of training whose steps had to be trained once more."""
    shares = dict[tuple[str, int], float]()
    workers = list[WorkerTimeline]()
    for incarnation in incarnations:
        key = incarnation.group, incarnation.incarnation
        shares[key] = incarnation.units / len(incarnation.workers)
        workers += incarnation.workers
    total = 0.0
    for worker, span in find_repeated_training(workers):
        spent = union_length([(span.start, span.end)], *window)
        start, end = max(span.start, window[0]), min(span.end, window[1])
        restarting = union_length(gaps[worker.group], start, end)
        total += shares[worker.group, worker.incarnation] * (spent - restarting)
    return total
