"""What is read off learning curves, and how sure it is: areas, steps to a level, paired
differences, power.

A curve is a held-out score by version. Nothing here reads files or starts runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy import stats

Curve = Mapping[int, float]
"""Score by version, held-out or of training; at least two."""
CONFIDENCE = 0.95
POWER = 0.8
PILOT = 0.8
"""Confidence that the spread of all seeds there could be is below what seeds are asked for by."""
_MOST_SEEDS = 1000


def area(curve: Curve) -> float:
    """Mean height of a curve over its versions, by the trapezoidal rule: the area under it, as a
    score."""
    versions, found = _points(curve)
    return float(np.trapezoid(found, versions) / (versions[-1] - versions[0]))


def area_between(one: Curve, base: Curve) -> float:
    """Mean height of ``one`` over ``base`` at the versions of ``one``, between which both are taken
    as straight: that one was evaluated at fewer versions makes no difference then."""
    versions, found = _points(one)
    return area(dict(zip(one, found - np.interp(versions, *_points(base)), strict=True)))


def steps_to(curve: Curve, level: float) -> float:
    """First version at which a curve, straight between its points, is at ``level``; infinite: at
    none."""
    versions, found = _points(curve)
    above = np.flatnonzero(found >= level)
    if not len(above):
        return math.inf
    place = above[0]
    if place == 0:
        return float(versions[0])
    before, after = found[place - 1], found[place]
    return float(
        versions[place - 1]
        + (level - before) / (after - before) * (versions[place] - versions[place - 1])
    )


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    versions = np.array(sorted(curve))
    return versions, np.array([curve[int(version)] for version in versions])


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of two ways of training, seed by seed."""

    seeds: int
    mean: float
    spread: float
    """Standard deviation over seeds; nan: of one seed."""
    low: float
    high: float
    """Edges of the interval of Student's t, of confidence `CONFIDENCE`, in which the mean over all
    seeds lies."""

    @property
    def half_width(self) -> float:
        """Half of the interval; nan: of one seed."""
        return self.mean - self.low

    @property
    def lost(self) -> bool:
        """Whether the mean is below 0 with that confidence."""
        return self.high < 0

    def power(self, loss: float) -> float:
        """Share of such comparisons, of as many seeds, that find a true ``loss``, were the spread
        as measured."""
        return power(loss, self.spread, self.seeds)

    def needed(self, loss: float) -> int:
        """Seeds of which `POWER` of all comparisons find a true ``loss``, were the spread as
        measured; 0: not known."""
        return seeds_for(loss, self.spread)

    def surely_needed(self, loss: float) -> int:
        """The same, were the spread the largest that it may be with confidence `PILOT`; 0: not
        known."""
        return seeds_for(loss, upper_spread(self.spread, self.seeds))


def paired(differences: Sequence[float]) -> Paired:
    """Summary of one or more ``differences``."""
    seeds, middle = len(differences), mean(differences)
    if seeds < 2:
        return Paired(seeds, middle, math.nan, math.nan, math.nan)
    spread = stdev(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1)) * spread / math.sqrt(seeds)
    return Paired(seeds, middle, spread, middle - half, middle + half)


def power(loss: float, spread: float, seeds: int) -> float:
    """Probability that the interval of `paired` is below 0 if differences are normal around
    -``loss`` with standard deviation ``spread``; nan: of fewer than two seeds.

    The statistic has the noncentral t distribution with noncentrality -loss sqrt(seeds) / spread:
    J. Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988, section 2.
    """
    if seeds < 2 or math.isnan(spread):
        return math.nan
    if spread == 0:
        return 1.0
    edge = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1))
    return float(stats.nct.sf(edge, seeds - 1, loss * math.sqrt(seeds) / spread))


def seeds_for(loss: float, spread: float) -> int:
    """Fewest seeds with which a true ``loss`` is found in `POWER` of all cases; 0: not known, or
    beyond reason."""
    return next(
        (seeds for seeds in range(2, _MOST_SEEDS) if power(loss, spread, seeds) >= POWER), 0
    )


def upper_spread(spread: float, seeds: int) -> float:
    """Standard deviation that all seeds there could be do not exceed with confidence `PILOT`,
    normal differences given: of few seeds the one measured says little. R. Browne, On the use of a
    pilot sample for sample size determination, Statistics in Medicine 14, 1995."""
    if seeds < 2:
        return math.nan
    return spread * math.sqrt((seeds - 1) / float(stats.chi2.ppf(1 - PILOT, seeds - 1)))


def difference(one: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Of the means of two samples that are not paired, and its 95 % interval by Welch's t."""
    if len(one) < 2 or len(base) < 2:
        return mean(one) - mean(base), math.nan, math.nan
    interval = stats.ttest_ind(one, base, equal_var=False).confidence_interval(CONFIDENCE)
    return mean(one) - mean(base), float(interval.low), float(interval.high)
