"""Filters of prompt groups: which are trained on, by their rewards. The others are replaced under their tickets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_hpc.named import named

Filter = Callable[[Sequence[float]], bool]
"""Whether a prompt group is trained on, by the rewards of its samples."""


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ: groups of equal ones have no advantages, and so no gradient. Dynamic sampling, DAPO,
    arXiv 2503.14476, section 3.2.

    >>> rewards_differ([0.0, 1.0]), rewards_differ([1.0, 1.0])
    (True, False)
    """
    return any(reward != rewards[0] for reward in rewards)


FILTERS: dict[str, Filter] = {"rewards_differ": rewards_differ}


def get_filter(name: str) -> Filter:
    """The filter called ``name``; one that lets all pass if it is empty. ConfigError if there is none."""
    return named("filter", name, FILTERS) if name else lambda rewards: True
