"""Curves of a run for charts: a few tags of metrics.jsonl, with a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.base.metrics.read import Metrics, is_step

MAX_POINTS = 400
"""Points of a curve, at most: about one for each pixel column of a chart."""
MAX_CURVES = 6
"""Curves of a chart, at most: more colours cannot be told apart."""
REWARD, STALENESS, EVAL = "reward/mean", "staleness/mean", "eval/"
GENERATING, READY = "queue/generating", "queue/ready"

Row = Mapping[str, Any]
"""A merged row of metrics, see `relax_hpc.base.metrics.read.Metrics`."""


def make_charts(metrics: Metrics) -> list[dict[str, Any]]:
    """Charts of a run, as JSON values: {title, unit, curves, left_out}.

    A curve is {name, steps, mean, low, high}. If it has more than `MAX_POINTS` values, each point
    stands for several steps: their mean, minimum and maximum. Otherwise low and high are missing.
    """
    rows = metrics.rows
    steps = [row for row in rows if is_step(row)]
    tags = sorted(tag for tag in set().union(*rows) if tag.startswith(EVAL))
    held_out = [make_curve(tag.removeprefix(EVAL), _values(rows, tag)) for tag in tags[:MAX_CURVES]]
    charts = [
        _chart("Reward", "mean of a step", [make_curve("reward", _values(steps, REWARD))]),
        _chart("Held-out score", "mean of a set", held_out, tags[MAX_CURVES:]),
        _chart(
            "Time of a step", "seconds", [make_curve("seconds", step_seconds(metrics.lines, steps))]
        ),
        _chart("Staleness", "versions", [make_curve("staleness", _values(steps, STALENESS))]),
    ]
    return [chart for chart in charts if chart["curves"]]


def _chart(
    title: str, unit: str, curves: Sequence[dict[str, Any]], left_out: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "title": title,
        "unit": unit,
        "curves": [curve for curve in curves if curve["steps"]],
        "left_out": [tag.removeprefix(EVAL) for tag in left_out],
    }


def step_seconds(lines: Sequence[Row], steps: Sequence[Row]) -> list[tuple[int, float]]:
    """(step, seconds since the step before it), without steps after a restart of the hub.

    ``lines``: of the file of metrics. The time of a merged row may be that of a later evaluation.
    """
    times = {(line["incarnation"], line["step"]): line["time"] for line in lines if is_step(line)}
    values = []
    for row in steps:
        incarnation, step = row["incarnation"], row["step"]
        ended, began = times.get((incarnation, step)), times.get((incarnation, step - 1))
        if ended is not None and began is not None:
            values.append((step, ended - began))
    return values


def make_curve(name: str, values: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The curve of (step, value) in ascending order. Values that are not finite are left out.

    >>> make_curve("reward", [(0, 0.5), (1, math.nan), (2, 1.0)])
    {'name': 'reward', 'steps': [0, 2], 'mean': [0.5, 1.0]}
    """
    finite = [(step, value) for step, value in values if math.isfinite(value)]
    if len(finite) <= MAX_POINTS:
        return {
            "name": name,
            "steps": [step for step, _ in finite],
            "mean": [_rounded(value) for _, value in finite],
        }
    curve: dict[str, Any] = {"name": name, "steps": [], "mean": [], "low": [], "high": []}
    size = -(-len(finite) // MAX_POINTS)
    for start in range(0, len(finite), size):
        points = finite[start : start + size]
        numbers = [value for _, value in points]
        # The last step of a point, so that the last point is at the newest step.
        curve["steps"].append(points[-1][0])
        curve["mean"].append(_rounded(math.fsum(numbers) / len(numbers)))
        curve["low"].append(_rounded(min(numbers)))
        curve["high"].append(_rounded(max(numbers)))
    return curve


def _values(rows: Sequence[Row], tag: str) -> list[tuple[int, float]]:
    return [(row["step"], row[tag]) for row in rows if tag in row]


def _rounded(value: float) -> float:
    """``value`` with five significant digits, which a chart cannot show."""
    return float(f"{value:.5g}")
