"""Slopes with intervals, for values that depend on the values before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BATCHES = 20
_T_95 = 2.101
"""Quantile 0.975 of Student's t with `BATCHES` - 2 = 18 degrees of freedom."""
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope of a line through the batch means of a series, with its 95 % interval."""

    mean: float
    slope: float
    low: float
    high: float

    @property
    def bounds(self) -> list[float]:
        return [self.low, self.slope, self.high]


def fit_trend(steps: np.ndarray, values: np.ndarray) -> Trend:
    """Trend of ``values`` over ``steps``, both [samples].

    Neighbouring samples are alike, so the interval comes from the scatter of the means of
    `BATCHES` consecutive batches (method of batch means), not of single samples.
    """
    batches = [batch for batch in np.array_split(np.arange(len(values)), BATCHES) if len(batch)]
    x = np.array([steps[batch].mean() for batch in batches])
    y = np.array([values[batch].mean() for batch in batches])
    mean = float(values.mean())
    if len(batches) < 3 or x.min() == x.max():
        return Trend(mean, 0.0, -math.inf, math.inf)
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    error = math.sqrt(residuals @ residuals / (len(batches) - 2) / (centred @ centred))
    return Trend(mean, slope, slope - _T_95 * error, slope + _T_95 * error)


def largest_fall(scores: Sequence[float], samples: int) -> tuple[float, float]:
    """The largest fall of a score below its best value so far, and the spread of such a difference.

    ``scores``: shares of ``samples`` responses. The spread is two standard errors of a difference
    of two shares; of a share at the edge that of one wrong response.
    """
    best, fall = -math.inf, 0.0
    for score in scores:
        best = max(best, score)
        fall = max(fall, best - score)
    share = min(max(best, 1 / samples), 1 - 1 / samples)
    return fall, _STANDARD_ERRORS * math.sqrt(2 * share * (1 - share) / samples)
