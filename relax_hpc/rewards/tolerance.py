"""Comparison of rewards up to rounding. Rewards are sums of floats, so that equal ones may differ
by rounding."""

from __future__ import annotations

from collections.abc import Sequence

RELATIVE = 1e-7
"""Differences up to this share of a reward count as rounding: training stores rewards in float32,
whose relative step is 1.2e-7."""
ABSOLUTE = 1e-9
"""Differences up to this size count as rounding for any reward: a sum whose terms cancel has an
error of about 1e-16."""


def differ(rewards: Sequence[float]) -> bool:
    """Whether at least two of ``rewards`` differ by more than rounding.

    >>> differ([0.1 + 0.2, 0.3]), differ([0.0, 0.001])
    (False, True)
    """
    if len(rewards) < 2:
        return False
    lowest, highest = min(rewards), max(rewards)
    return highest - lowest > _rounding(max(abs(lowest), abs(highest)))


def reaches(reward: float, threshold: float) -> bool:
    """Whether ``reward`` is at least ``threshold``, up to rounding.

    >>> reaches(0.7 + 0.2 + 0.1, 1.0), reaches(0.999, 1.0)
    (True, False)
    """
    return reward >= threshold - _rounding(abs(threshold))


def _rounding(size: float) -> float:
    return max(ABSOLUTE, RELATIVE * size)
