"""Report on the use of time, tokens and nodes of a run, live or ended, from its files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.accounting import Interval, Label, even_split, sum_by_label
from relax_hpc.base.metrics.read import Metrics, is_step, load_metrics
from relax_hpc.base.metrics.read_spans import union_length
from relax_hpc.base.metrics.timeline import Pace, WorkerTimeline, measure_pace, step_ends
from relax_hpc.base.rundir import RunDir, read_map
from relax_hpc.cluster.supervise.incarnations import (
    PastIncarnation,
    Restart,
    read_incarnations,
    restarts,
    unit_of,
)
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.roles import ROLES
from relax_hpc.ops.observe.bottleneck import bottleneck_sentence
from relax_hpc.ops.observe.cost import measure_cost
from relax_hpc.ops.observe.gpu_hours import spent_hours
from relax_hpc.ops.observe.length_comparison import compare_lengths
from relax_hpc.ops.observe.recovery import measure_recovery
from relax_hpc.ops.observe.status import failures_of

ENOUGH_STEPS = 5
"""Number of steps that medians need."""
_BUSIER_FACTOR = 1.1
"""Factor by which one role has to be busier than the other to be called the bottleneck."""
_DROPPED = "queue/dropped_"


@dataclass(frozen=True, slots=True)
class _Section:
    """Steps of a run that the report covers."""

    first: int | None
    """First step; None if no step was trained."""
    last: int | None
    window: Interval
    ends: dict[int, float]
    """End of each step from `first` - 1 to `last`, in seconds of the wall clock."""


def report(
    run: RunDir, first: int | None = None, last: int | None = None, now: float | None = None
) -> dict[str, Any]:
    """The report of `relax-hpc report` as JSON values: seconds and shares. Unknown values are None.

    ``first``, ``last``: steps to cover. ``now``: end of the accounting of a live run.
    ConfigError: there is no run, or it has not trained these steps.
    """
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    config = load_resolved(run.root)
    incarnations = read_incarnations(run, config, now)
    workers = list(chain.from_iterable(incarnation.workers for incarnation in incarnations))
    section = _select_section(workers, first, last)
    window, wall_s = section.window, _wall_s(workers, section.window)
    all_restarts = restarts(incarnations)
    seconds_by_role = _by_role(workers, window)
    pace, waits = measure_pace(workers, section.ends), _waits(seconds_by_role)
    metrics = load_metrics(run.root)
    values = {
        "run_dir": str(run.root),
        "finished": run.finished.exists(),
        "max_staleness": config.max_staleness,
        "first_step": section.first,
        "last_step": section.last,
        "wall_s": wall_s,
        "roles": _roles(seconds_by_role),
        "waits": waits,
        "pace": _pace(pace),
        "bottleneck": _bottleneck(pace, waits),
        "split": _split(config, incarnations, section, pace),
        "goodput": _goodput(run, metrics, config, section, wall_s),
        "lengths": compare_lengths(metrics, section.first, section.last),
        "hours": spent_hours(unit_of(config), incarnations, all_restarts, window),
        "cost": measure_cost(run, config, incarnations, window, _rows_of(metrics, section)),
        "restarts": [
            _restart(restart, workers) for restart in all_restarts if _overlaps(restart.gap, window)
        ],
        "failures": failures_of(run),
        "notes": _notes(workers, pace),
    }
    steady = _by_role(workers, _steady_window(section))
    after_start = {"roles": _roles(steady), "waits": _waits(steady)}
    return {"sentence": bottleneck_sentence(values | after_start, config), **values}


def _select_section(
    workers: Sequence[WorkerTimeline], first: int | None, last: int | None
) -> _Section:
    """The section of the options --first-step and --last-step."""
    ends = step_ends(workers)
    for option, step in (("--first-step", first), ("--last-step", last)):
        if step is not None and step not in ends:
            allowed = "nothing, because no step was trained yet; remove it"
            if ends:
                allowed = f"a step from {min(ends)} to {max(ends)}"
            raise ConfigError(f"{option}: found {step}, allowed: {allowed}")
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--last-step: found {last}, allowed: at least --first-step {first}")
    low = min((worker.began for worker in workers), default=0.0)
    high = max((worker.ended for worker in workers), default=0.0)
    steps = [
        step for step in ends if (first is None or step >= first) and (last is None or step <= last)
    ]
    if first is not None:
        low = ends.get(first - 1, low)
    if last is not None:
        high = ends[last]
    if not steps:
        return _Section(None, None, (low, high), {})
    section_ends = {step: ends[step] for step in ends if steps[0] - 1 <= step <= steps[-1]}
    return _Section(steps[0], steps[-1], (low, high), section_ends)


def _steady_window(section: _Section) -> Interval:
    """The section without its first step, in which all groups wait for others to start. The whole
    section if it has no second step."""
    low, high = section.window
    if section.first is None or section.first == section.last:
        return low, high
    return section.ends[section.first], high


def _wall_s(workers: Sequence[WorkerTimeline], window: Interval) -> float:
    """Seconds in which a process of the run lived. Pauses between jobs do not count."""
    return union_length(((worker.began, worker.ended) for worker in workers), *window)


def _roles(seconds_by_role: Mapping[str, Mapping[Label, float]]) -> dict[str, Any]:
    """Seconds and shares of each role by kind. They add up to the lives of its workers."""
    roles: dict[str, Any] = {}
    for role, seconds in seconds_by_role.items():
        kinds: dict[str, float] = defaultdict(float)
        for label, spent in seconds.items():
            kinds[label.what] += spent
        total = sum(kinds.values())
        ordered = dict(sorted(kinds.items(), key=lambda item: -item[1]))
        shares = {kind: spent / total for kind, spent in ordered.items()}
        roles[role] = {"worker_s": total, "seconds": ordered, "share": shares}
    return roles


def _waits(seconds_by_role: Mapping[str, Mapping[Label, float]]) -> list[dict[str, Any]]:
    """Waits of each role, longest first; `share`: of all time of the role."""
    result = list[dict[str, Any]]()
    for role, seconds in seconds_by_role.items():
        total = sum(seconds.values())
        waits = [(spent, label) for label, spent in seconds.items() if label.what == "wait"]
        for spent, label in sorted(waits, reverse=True):
            result.append(
                {
                    "role": role,
                    "peer": label.peer,
                    "reason": label.reason,
                    "seconds": spent,
                    "share": spent / total,
                }
            )
    return result


def _by_role(
    workers: Sequence[WorkerTimeline], window: Interval
) -> dict[str, Mapping[Label, float]]:
    """Seconds of each role by label, in the order of the data flow."""
    seconds_by_role = dict[str, Mapping[Label, float]]()
    for role in ROLES:
        own_workers = [worker for worker in workers if worker.role == role]
        seconds = sum_by_label(worker.seconds(*window) for worker in own_workers)
        if sum(seconds.values()):
            seconds_by_role[role] = seconds
    return seconds_by_role


def _pace(pace: Pace | None) -> dict[str, Any] | None:
    if pace is None:
        return None
    return {
        "steps": pace.steps,
        "step_s": pace.step_s,
        "rollout_s": pace.rollout_s,
        "actor_s": pace.actor_s,
        "overlap": pace.overlap,
    }


def _bottleneck(pace: Pace | None, waits: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The role that is busy longer in a step: rollout or actor.

    `busy_share`: share of the step in which it is busy. `waiting_share`: share of the other role's
    time in which that waits for it. The role is empty if both are equally busy.
    """
    if pace is None or not (pace.step_s and pace.rollout_s and pace.actor_s):
        return None
    busy = {"rollout": pace.rollout_s, "actor": pace.actor_s}
    role, other = sorted(busy, key=busy.__getitem__, reverse=True)
    busy_share = busy[role] / pace.step_s
    if busy[role] < _BUSIER_FACTOR * busy[other]:
        return {"role": "", "busy_share": busy_share, "waiting_share": 0.0}
    shares = [wait["share"] for wait in waits if (wait["role"], wait["peer"]) == (other, role)]
    return {"role": role, "busy_share": busy_share, "waiting_share": sum(shares)}


def _split(
    config: Config, incarnations: Sequence[PastIncarnation], section: _Section, pace: Pace | None
) -> dict | None:
    """The present split of units, and one in which rollout and actor would be equally busy.

    None if there is nothing to divide: a group with both roles, no step, or a role without a unit.
    """
    if pace is None or section.last is None:
        return None
    start = section.ends.get(section.last - 1, section.window[0])
    window = (start, section.ends[section.last])
    present = [item for item in incarnations if _overlaps((item.began, item.ended), window)]
    newest = {incarnation.group: incarnation for incarnation in present}.values()
    rollout, actor = _units(newest, "rollout"), _units(newest, "actor")
    for incarnation in newest:
        if {"rollout", "actor"} <= {worker.role for worker in incarnation.workers}:
            return None
    if not rollout or not actor or not pace.rollout_s + pace.actor_s:
        return None
    split = even_split(pace.rollout_s, pace.actor_s, rollout, actor)
    return {
        "unit": unit_of(config),
        "present": {"rollout": rollout, "actor": actor},
        "suggested": {"rollout": split[0], "actor": split[1]},
        "suggested_busy_s": {
            "rollout": pace.rollout_s * rollout / split[0],
            "actor": pace.actor_s * actor / split[1],
        },
    }


def _units(incarnations: Iterable[PastIncarnation], role: str) -> int:
    """Units of all incarnations with a worker of ``role``."""
    units = 0.0
    for incarnation in incarnations:
        if any(worker.role == role for worker in incarnation.workers):
            units += incarnation.units
    return round(units)


def _goodput(
    run: RunDir, metrics: Metrics, config: Config, section: _Section, wall_s: float
) -> dict[str, Any] | None:
    """Trained tokens per second, share of generated tokens that was trained, dropped samples.

    None without a step.
    """
    first, last = section.first, section.last
    if first is None or last is None or not wall_s:
        return None
    rows = [row for row in metrics.rows if first <= row["step"] <= last and is_step(row)]
    lines = [line for line in metrics.lines if first <= line["step"] <= last]
    generated = sum(line.get("perf/rollout_tokens", 0.0) for line in lines)
    samples = config.prompts_per_step * config.samples_per_prompt
    learned = sum(row.get("reward/response_tokens", math.nan) * samples for row in rows)
    trained = sum(row.get("perf/trained_tokens", 0.0) for row in rows)
    return {
        "trained_tokens": trained,
        "trained_tokens_per_s": trained / wall_s,
        "generated_tokens": generated,
        "trained_share": learned / generated if generated and math.isfinite(learned) else None,
        "trained_samples": len(rows) * samples,
        "dropped_samples": _dropped(run, metrics.rows, first, last),
    }


def _rows_of(metrics: Metrics, section: _Section) -> list[dict[str, Any]]:
    """Metrics of the steps and evaluations of a section."""
    first, last = section.first, section.last
    if first is None or last is None:
        return []
    # The version after the last step, too.
    return [row for row in metrics.rows if first <= row["step"] <= last + 1]


def _dropped(run: RunDir, rows: Sequence[dict[str, Any]], first: int, last: int) -> dict[str, int]:
    """Dropped rows by reason, after step ``first`` - 1 up to the end of step ``last``.

    If ``last`` is the last step of a finished run, the counts include rows dropped after it.
    """
    steps = [row for row in rows if is_step(row)]
    before = _counts([row for row in steps if row["step"] < first])
    up_to_last = [row for row in steps if row["step"] <= last]
    counts = _counts(up_to_last)
    if up_to_last and up_to_last[-1] is steps[-1] and run.finished.exists():
        counts = read_map(run.finished, dropped=dict).get("dropped", counts)
    dropped = dict[str, int]()
    for reason, count in sorted(counts.items()):
        if type(count) in (int, float) and math.isfinite(count):
            difference = count - before.get(reason, 0)
            if difference > 0:
                dropped[reason] = int(difference)
    return dropped


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Counts of dropped rows in the last of ``rows``, by reason."""
    counts = dict[str, float]()
    for tag, count in (rows[-1] if rows else {}).items():
        if tag.startswith(_DROPPED) and math.isfinite(count):
            counts[tag.removeprefix(_DROPPED)] = count
    return counts


def _restart(restart: Restart, workers: Sequence[WorkerTimeline]) -> dict[str, Any]:
    began = min(worker.began for worker in workers)
    reason = restart.before.reason or ("" if restart.before.status else "left no mark")
    return {
        "group": restart.after.group,
        "incarnation": restart.after.incarnation,
        "at_s": restart.before.ended - began,
        "gap_s": restart.gap[1] - restart.gap[0],
        "fault": restart.fault,
        "why": reason,
        "recovery": _recovery(restart, workers),
    }


def _recovery(restart: Restart, workers: Sequence[WorkerTimeline]) -> dict[str, float] | None:
    """Seconds from a fault to the next trained step, and their parts."""
    recovery = measure_recovery(restart, workers) if restart.fault else None
    return {"total": recovery.total_s, **recovery.seconds} if recovery else None


def _overlaps(interval: Interval, window: Interval) -> bool:
    return interval[0] < window[1] and interval[1] > window[0]


def _notes(workers: Sequence[WorkerTimeline], pace: Pace | None) -> list[str]:
    """Notes on data that the report lacks."""
    if not workers:
        return ["no role has written a span yet; run the report again after the first step"]
    steps = pace.steps if pace else 0
    if steps < ENOUGH_STEPS:
        return [
            f"pace and split are medians of {steps} steps; reliable from {ENOUGH_STEPS} steps on"
        ]
    return []
