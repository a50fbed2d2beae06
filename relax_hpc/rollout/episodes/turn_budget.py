"""Token budget of the next turn of an episode."""

from __future__ import annotations

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.generation import FinishReason


def turn_budget(
    limits: EnvironmentConfig, row_budget: int, length: int, other_tokens: int, sampled: int
) -> tuple[int, FinishReason]:
    """Most tokens of a turn that begins ``length`` tokens after the prompt of its row, and the
    limit that applies.

    ``row_budget``: most tokens of a row after its prompt. ``other_tokens``: tokens of the other
    rows of the episode. ``sampled``: sampled tokens of all rows.

    >>> turn_budget(EnvironmentConfig(turn_tokens=8, sampled_tokens=20), 100, 90, 0, 15)
    (5, 'sampled_budget')
    """
    bounds: list[tuple[int, int, FinishReason]] = [
        (row_budget, length, "length"),
        (limits.episode_tokens, other_tokens + length, "episode_budget"),
        (limits.sampled_tokens, sampled, "sampled_budget"),
        (limits.turn_tokens, 0, "turn_budget"),
    ]
    budgets = [(limit - used, reason) for limit, used, reason in bounds if limit]
    return min(budgets, key=lambda budget: budget[0])
