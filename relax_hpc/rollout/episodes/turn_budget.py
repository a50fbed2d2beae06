"""Room that the budgets of an episode of several turns leave to its next turn."""

from __future__ import annotations

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.rollout.engines.engine import FinishReason


def room(
    limits: EnvironmentConfig, row: int, length: int, others: int, sampled: int
) -> tuple[int, FinishReason]:
    """Tokens that a turn may have that begins ``length`` tokens behind the prompt of its row, and
    what limits it.

    ``row``: tokens that a row may have behind its prompt; ``others``: those of the other rows of
    the episode together; ``sampled``: those of all that were sampled.

    >>> room(EnvironmentConfig(turn_tokens=8, sampled_tokens=20), 100, 90, 0, 15)
    (5, 'sampled_budget')
    """
    bounds: list[tuple[int, int, FinishReason]] = [
        (row, length, "length"),
        (limits.episode_tokens, others + length, "episode_budget"),
        (limits.sampled_tokens, sampled, "sampled_budget"),
        (limits.turn_tokens, 0, "turn_budget"),
    ]
    return min(
        ((most - used, limit) for most, used, limit in bounds if most), key=lambda bound: bound[0]
    )
