"""The reward that an environment or an agent program gives to its episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_DONE = "env_done"
"""Value of `ended` if the environment or program has ended the episode."""


def environment(sample: RewardInput) -> float:
    """The last reward of the episode's environment or program.

    Without one the reward is 0 if something else has ended the episode: it reached `max_turns` or
    a budget, or its program crashed. The policy is responsible for that.

    ValueError: the environment was done, or the program exited without an error, and gave no
    reward.
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
