"""Counts of episodes by length, as metrics that are summed over reports and steps.

A quantile of a step could not be combined with that of another step. Counts can: a report about any
steps computes quantiles from their sums. The bounds are the token budget of a response divided by
powers of two, so that all lines of a run have the same tags.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LENGTHS = "lengths/"
"""Prefix of the tags. Their values are summed."""
_HALVINGS = 9
_OVER, _TOKENS = "over", "tokens"


def bounds_of(budget: int) -> list[int]:
    """Upper bounds of the bins for a budget of tokens, ascending.

    >>> bounds_of(6), bounds_of(4096)[:3]
    ([1, 2, 3, 6], [8, 16, 32])
    """
    return sorted({math.ceil(budget / 2**halving) for halving in range(_HALVINGS + 1)})


def count_lengths(kind: str, lengths: Iterable[int], budget: int) -> dict[str, float]:
    """Metrics of episodes with these ``lengths``, in sampled tokens; empty without an episode.

    >>> counts = count_lengths("trained", [1, 2, 6, 9], 6)
    >>> [counts[f"lengths/trained_{bin}"] for bin in (1, 2, 3, 6, "over", "tokens")]
    [1.0, 1.0, 0.0, 1.0, 1.0, 18.0]
    """
    bounds, counts, total = bounds_of(budget), Counter[str](), 0
    for length in lengths:
        bound = next((str(bound) for bound in bounds if length <= bound), _OVER)
        counts[bound] += 1
        total += length
    if not counts:
        return {}
    values = {name: float(counts[name]) for name in (*map(str, bounds), _OVER)}
    values[_TOKENS] = float(total)
    return {f"{LENGTHS}{kind}_{name}": value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """Numbers of episodes by their length."""

    counts: Mapping[int, float]
    """Upper bound of a bin, in tokens -> episodes in it, ascending."""
    over: float
    """Episodes that are longer than the highest bound."""
    tokens: float

    @classmethod
    def from_metrics(cls, kind: str, rows: Iterable[Mapping[str, float]]) -> LengthCounts:
        """The counts of all ``rows`` of metrics together."""
        prefix, totals = f"{LENGTHS}{kind}_", defaultdict[str, float](float)
        rows = list(rows)
        # A long run has millions of values, and few tags.
        tags = [tag for tag in set().union(*rows) if tag.startswith(prefix)]
        for row in rows:
            for tag in tags:
                value = row.get(tag, math.nan)
                if math.isfinite(value):
                    totals[tag.removeprefix(prefix)] += value
        bins = sorted(int(name) for name in totals if name.isdigit())
        counts = {bound: totals[str(bound)] for bound in bins}
        return cls(counts, totals[_OVER], totals[_TOKENS])

    @property
    def episodes(self) -> float:
        """Number of episodes."""
        return sum(self.counts.values()) + self.over

    @property
    def mean(self) -> float:
        """Mean length in tokens."""
        return self.tokens / self.episodes

    def quantile(self, share: float) -> float:
        """Length that ``share`` of the episodes do not exceed, interpolated within a bin.

        Of episodes above the highest bound only that bound is known.
        """
        target, below, lower = share * self.episodes, 0.0, 0
        for bound, count in self.counts.items():
            if count and below + count >= target:
                return lower + (bound - lower) * (target - below) / count
            below += count
            lower = bound
        return float(lower)
