"""Reward that an environment or an agent program gives its episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_DONE = "env_done"
"""End of an episode that its environment or program has brought about."""


def environment(sample: RewardInput) -> float:
    """The last reward of the episode's environment or program.

    Without one, an episode that has ended otherwise than by its environment or program has 0: it
    ran into `max_turns` or a budget, or its program crashed. The policy has led there.

    ValueError: the environment was done, or the program has ended well, and gave none.
    """
    reward = sample.environment.get("reward")
    if reward is not None:
        return float(reward)
    if sample.finish_reason == "length" or sample.environment.get("ended", _DONE) != _DONE:
        return 0.0
    error = sample.environment.get("info", {}).get("result_error")
    if error:
        raise ValueError(f"the episode has no reward of an environment: {error}")
    raise ValueError(
        "the episode has no reward of an environment; name another reward, or have `step` give one"
    )
