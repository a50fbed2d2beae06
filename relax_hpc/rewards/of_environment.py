"""Reward that an environment gives its episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput


def environment(sample: RewardInput) -> float:
    """The last reward of the episode's environment.

    ValueError: it gave none. An episode that was cut short of one has 0.
    """
    if (found := sample.environment.get("reward")) is not None:
        return float(found)
    if sample.finish_reason == "length":
        return 0.0
    raise ValueError("the episode has no reward of an environment; name another reward, or have `step` give one")
