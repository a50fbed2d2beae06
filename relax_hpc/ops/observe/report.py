"""Report of what became of the time, the tokens and the nodes of a run, live or ended: from its
files alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.accounting import Interval, Label, even_split, sum_by_label
from relax_hpc.base.metrics.read import is_step, load_metrics
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
from relax_hpc.ops.observe.gpu_hours import hours
from relax_hpc.ops.observe.status import failures_of

ENOUGH_STEPS = 5
"""Steps below which medians say little."""
_CLEARLY = 1.1
"""Factor by which one side of a step has to be busier than the other to be the bottleneck."""
_DROPPED = "queue/dropped_"


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a run that is looked at: steps `first` to `last`, if any were trained, in the time
    `window`."""

    first: int | None
    last: int | None
    window: Interval
    ends: dict[int, float]
    """Time at which each step before `first` to `last` was trained, of the wall clock."""


def report(
    run: RunDir, first: int | None = None, last: int | None = None, now: float | None = None
) -> dict[str, Any]:
    """Everything that `relax-hpc report` says; JSON values, seconds and shares. What cannot be said
    is None.

    ``first``, ``last``: of these steps alone. ``now``: until when a live run is accounted.
    ConfigError: no run is there, or it has not trained these steps.
    """
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    config = load_resolved(run.root)
    incarnations = read_incarnations(run, config, now)
    workers = [worker for incarnation in incarnations for worker in incarnation.workers]
    part = _part(workers, first, last)
    followed, found = restarts(incarnations), measure_pace(workers, part.ends)
    waits = _waits(workers, part.window)
    return {
        "run_dir": str(run.root),
        "finished": run.finished.exists(),
        "max_staleness": config.max_staleness,
        "first_step": part.first,
        "last_step": part.last,
        "wall_s": _wall_s(workers, part.window),
        "roles": _roles(workers, part.window),
        "waits": waits,
        "pace": _pace(found),
        "bottleneck": _bottleneck(found, waits),
        "split": _split(config, incarnations, part, found),
        "goodput": _goodput(run, config, part, _wall_s(workers, part.window)),
        "hours": hours(unit_of(config), incarnations, followed, part.window),
        "restarts": [_restart(one, workers) for one in followed if _meets(one.gap, part.window)],
        "failures": failures_of(run),
        "notes": _notes(workers, found),
    }


def _part(workers: Sequence[WorkerTimeline], first: int | None, last: int | None) -> _Part:
    ends = step_ends(workers)
    for option, step in (("--first-step", first), ("--last-step", last)):
        if step is not None and step not in ends:
            known = (
                f"a step from {min(ends)} to {max(ends)}"
                if ends
                else "nothing: no step was trained yet, leave it out"
            )
            raise ConfigError(f"{option}: found {step}, allowed: {known}")
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
    kept = {step: ends[step] for step in ends if steps and steps[0] - 1 <= step <= steps[-1]}
    return _Part(steps[0] if steps else None, steps[-1] if steps else None, (low, high), kept)


def _wall_s(workers: Sequence[WorkerTimeline], window: Interval) -> float:
    """Seconds in which some process lived: a run may lie still between two jobs."""
    return union_length(((worker.began, worker.ended) for worker in workers), *window)


def _roles(workers: Sequence[WorkerTimeline], window: Interval) -> dict[str, Any]:
    """Seconds and shares by kind, which add up to the lives of a role's workers."""
    found: dict[str, Any] = {}
    for role, seconds in _by_role(workers, window).items():
        kinds: dict[str, float] = defaultdict(float)
        for label, spent in seconds.items():
            kinds[label.what] += spent
        total = sum(kinds.values())
        most = sorted(kinds.items(), key=lambda item: -item[1])
        shares = {what: spent / total for what, spent in most}
        found[role] = {"worker_s": total, "seconds": dict(most), "share": shares}
    return found


def _waits(workers: Sequence[WorkerTimeline], window: Interval) -> list[dict[str, Any]]:
    """Waits of each role, longest first; `share` is of all its time."""
    found = []
    for role, seconds in _by_role(workers, window).items():
        total = sum(seconds.values())
        waits = sorted(
            ((s, label) for label, s in seconds.items() if label.what == "wait"), reverse=True
        )
        about = (
            {"peer": label.peer, "reason": label.reason, "seconds": s, "share": s / total}
            for s, label in waits
        )
        found += [{"role": role, **one} for one in about]
    return found


def _by_role(
    workers: Sequence[WorkerTimeline], window: Interval
) -> dict[str, Mapping[Label, float]]:
    """Seconds of each role by label, in the order of the data flow."""
    found = {
        role: sum_by_label(w.seconds(*window) for w in workers if w.role == role) for role in ROLES
    }
    return {role: seconds for role, seconds in found.items() if sum(seconds.values())}


def _pace(found: Pace | None) -> dict[str, Any] | None:
    if found is None:
        return None
    about = {
        "steps": found.steps,
        "step_s": found.step_s,
        "rollout_s": found.rollout_s,
        "actor_s": found.actor_s,
    }
    return {**about, "overlap": found.overlap}


def _bottleneck(measured: Pace | None, waits: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The side of a step that is busy for longer, the share of the step for which it is, and the
    share of the other side's time that it waits for it. An empty role: both are as busy."""
    if measured is None or not (measured.step_s and measured.rollout_s and measured.actor_s):
        return None
    busy = {"rollout": measured.rollout_s, "actor": measured.actor_s}
    role, other = sorted(busy, key=busy.__getitem__, reverse=True)
    busy_share = busy[role] / measured.step_s
    if busy[role] < _CLEARLY * busy[other]:
        return {"role": "", "busy_share": busy_share, "waiting_share": 0.0}
    shares = [wait["share"] for wait in waits if (wait["role"], wait["peer"]) == (other, role)]
    return {"role": role, "busy_share": busy_share, "waiting_share": sum(shares)}


def _split(
    config: Config, incarnations: Sequence[PastIncarnation], part: _Part, found: Pace | None
) -> dict | None:
    """The present split, and the one of as many units with which both sides of a step would take as
    long.

    None where there is nothing to divide: a group with both roles, no step, or no unit of one side.
    """
    if found is None or part.last is None:
        return None
    window = (part.ends.get(part.last - 1, part.window[0]), part.ends[part.last])
    there = [one for one in incarnations if one.began < window[1] and one.ended > window[0]]
    newest = {one.group: one for one in there}.values()
    rollout, actor = (_units(newest, role) for role in ("rollout", "actor"))
    shared = [
        one for one in newest if {"rollout", "actor"} <= {worker.role for worker in one.workers}
    ]
    if shared or not rollout or not actor or not found.rollout_s + found.actor_s:
        return None
    split = even_split(found.rollout_s, found.actor_s, rollout, actor)
    sides = (found.rollout_s * rollout / split[0], found.actor_s * actor / split[1])
    return {
        "unit": unit_of(config),
        "present": {"rollout": rollout, "actor": actor},
        "suggested": {"rollout": split[0], "actor": split[1]},
        "suggested_busy_s": {"rollout": sides[0], "actor": sides[1]},
    }


def _units(incarnations: Any, role: str) -> int:
    return round(
        sum(one.units for one in incarnations if any(worker.role == role for worker in one.workers))
    )


def _goodput(run: RunDir, config: Config, part: _Part, wall_s: float) -> dict[str, Any] | None:
    """Tokens trained a second; of the tokens drawn those trained; samples dropped by reason. None
    without a step."""
    metrics = load_metrics(run.root)
    first, last = part.first, part.last
    if first is None or last is None or not wall_s:
        return None
    rows = [row for row in metrics.rows if first <= row["step"] <= last and is_step(row)]
    drawn = sum(
        line.get("perf/rollout_tokens", 0.0)
        for line in metrics.lines
        if first <= line["step"] <= last
    )
    samples = config.prompts_per_step * config.samples_per_prompt
    learned = sum(row.get("reward/response_tokens", math.nan) * samples for row in rows)
    trained = sum(row.get("perf/trained_tokens", 0.0) for row in rows)
    return {
        "trained_tokens": trained,
        "trained_tokens_per_s": trained / wall_s,
        "generated_tokens": drawn,
        "trained_share": learned / drawn if drawn and math.isfinite(learned) else None,
        "trained_samples": len(rows) * samples,
        "dropped_samples": _dropped(run, metrics.rows, first, last),
    }


def _dropped(run: RunDir, rows: Sequence[dict[str, Any]], first: int, last: int) -> dict[str, int]:
    """Dropped rows by reason, from the end of the step before ``first`` to that of ``last``; all of
    a finished run."""
    counted = [row for row in rows if is_step(row)]
    before = [row for row in counted if row["step"] < first]
    until = [row for row in counted if row["step"] <= last]
    ended = bool(until) and until[-1] is counted[-1] and run.finished.exists()
    then = (read_map(run.finished, dropped=dict) if ended else {}).get("dropped", _counts(until))
    then = {
        reason: count
        for reason, count in then.items()
        if type(count) in (int, float) and math.isfinite(count)
    }
    return {
        reason: int(n)
        for reason, count in sorted(then.items())
        if (n := count - _counts(before).get(reason, 0)) > 0
    }


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    last = rows[-1] if rows else {}
    counts = {
        tag.removeprefix(_DROPPED): count for tag, count in last.items() if tag.startswith(_DROPPED)
    }
    return {reason: count for reason, count in counts.items() if math.isfinite(count)}


def _restart(one: Restart, workers: Sequence[WorkerTimeline]) -> dict[str, Any]:
    begin = min(worker.began for worker in workers)
    said = one.before.reason or ("" if one.before.status else "left no mark")
    at, gap = one.before.ended - begin, one.gap[1] - one.gap[0]
    return {
        "group": one.after.group,
        "incarnation": one.after.incarnation,
        "at_s": at,
        "gap_s": gap,
        "fault": one.fault,
        "why": said,
    }


def _meets(interval: Interval, window: Interval) -> bool:
    return interval[0] < window[1] and interval[1] > window[0]


def _notes(workers: Sequence[WorkerTimeline], found: Pace | None) -> list[str]:
    """Notes on what keeps the report from saying more."""
    if not workers:
        return ["no role has written a span yet; look again once the run has started"]
    steps = found.steps if found else 0
    if steps < ENOUGH_STEPS:
        return [f"pace and split are of {steps} steps, {ENOUGH_STEPS} or more would say more"]
    return []
