"""GPU-hours (or node-hours, or process-hours) of a run: asked, used, waited, lost to faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from relax_hpc.base.metrics.accounting import Interval, work_seconds
from relax_hpc.base.metrics.read_spans import union_length
from relax_hpc.base.metrics.timeline import find_repeated_training
from relax_hpc.cluster.supervise.incarnations import PastIncarnation, Restart, held_intervals

_HOUR_S = 3600.0


def hours(
    unit: str,
    incarnations: Sequence[PastIncarnation],
    followed: Sequence[Restart],
    window: Interval,
) -> dict[str, Any]:
    """Hours of ``window`` by what they were spent on, in hours of a ``unit``; the parts add up to
    `asked`.

    asked             what groups had, from the start of their first process to the end of their
                      last; a pause between two incarnations counts if it was on the same nodes
    lost_restarting   part of that, after a fault: from the last useful work to the next
    lost_again        training whose steps had to be trained once more
    used, waiting     the other work and waits, of each worker its part of the group
    rest              starting, and what no span tells of

    A group all of whose processes write no spans, as a hub that runs the controller alone, is not
    counted.
    """
    gaps: dict[str, list[Interval]] = defaultdict(list)
    for restart in followed:
        if restart.fault:
            gaps[restart.after.group].append(restart.gap)
    found = dict.fromkeys(("asked", "used", "waiting", "lost_restarting", "lost_again"), 0.0)
    for one, interval in held_intervals(incarnations):
        start, end = max(interval[0], window[0]), max(window[0], min(interval[1], window[1]))
        found["asked"] += one.units * max(0.0, end - start)
        found["lost_restarting"] += one.units * union_length(gaps[one.group], start, end)
        for worker in one.workers:
            seconds, part = (
                worker.seconds(start, end, gaps[one.group]),
                one.units / len(one.workers),
            )
            found["used"] += part * work_seconds(seconds)
            found["waiting"] += part * sum(
                spent for label, spent in seconds.items() if label.what == "wait"
            )
    found["lost_again"] = _again(incarnations, gaps, window)
    found["used"] -= found["lost_again"]
    found["rest"] = found["asked"] - sum(spent for name, spent in found.items() if name != "asked")
    return {"unit": unit, **{name: spent / _HOUR_S for name, spent in found.items()}}


def _again(
    incarnations: Sequence[PastIncarnation], gaps: dict[str, list[Interval]], window: Interval
) -> float:
    """Unit-seconds of training whose steps had to be trained once more."""
    parts = {(one.group, one.incarnation): one.units / len(one.workers) for one in incarnations}
    total = 0.0
    for worker, span in find_repeated_training(
        [worker for one in incarnations for worker in one.workers]
    ):
        spent = union_length([(span.start, span.end)], *window)
        lost = union_length(
            gaps[worker.group], max(span.start, window[0]), min(span.end, window[1])
        )
        total += parts[worker.group, worker.incarnation] * (spent - lost)
    return total
