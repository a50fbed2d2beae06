"""Rewards of tasks whose answer is known: the response is compared with it character by
character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput


def answer_partial(sample: RewardInput) -> float:
    """Share of positions that hold the right character, over the longer text; 0 unless the policy
    stopped by itself.

    >>> from relax_hpc.rewards import RewardInput
    >>> answer_partial(RewardInput("4312?", "1234", "1243", "stop"))
    0.5
    """
    longer = max(len(sample.response_text), len(sample.answer))
    if sample.finish_reason != "stop" or longer == 0:
        return 0.0
    return sum(x == y for x, y in zip(sample.response_text, sample.answer, strict=False)) / longer


def answer_exact(sample: RewardInput) -> float:
    """Return 1 for exactly the answer, ended by the policy itself; else 0."""
    return float(sample.finish_reason == "stop" and sample.response_text == sample.answer)
