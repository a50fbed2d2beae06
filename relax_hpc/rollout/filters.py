"""Filters of prompt groups: they decide by the rewards which groups are trained on. Groups of other
prompts replace the filtered ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_hpc.base.plugins import load_plugin
from relax_hpc.rewards.tolerance import differ

Filter = Callable[[Sequence[float]], bool]
"""Function of the rewards of a prompt group; it returns whether the group is trained on."""


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ by more than rounding.

    A group of equal rewards has no advantages, and so no gradient. Dynamic sampling, DAPO, arXiv
    2503.14476, section 3.2.

    >>> rewards_differ([0.0, 1.0]), rewards_differ([1.0, 1.0]), rewards_differ([0.1 + 0.2, 0.3])
    (True, False, False)
    """
    return differ(rewards)


FILTERS: dict[str, Filter] = {"rewards_differ": rewards_differ}


def get_filter(name: str) -> Filter:
    """The filter called ``name``; an empty name lets all groups pass. ConfigError: no filter has
    that name."""
    return load_plugin("filter", name, FILTERS) if name else lambda rewards: True
