"""Rewards that compare a response with the known answer, character by character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput


def answer_partial(sample: RewardInput) -> float:
    """Share of the positions of the longer text that have the right character; 0 if the response
    was cut off.

    >>> from relax_hpc.rewards import RewardInput
    >>> answer_partial(RewardInput("4312?", "1234", "1243", "stop"))
    0.5
    """
    longer = max(len(sample.response_text), len(sample.answer))
    if sample.finish_reason != "stop" or longer == 0:
        return 0.0
    return sum(x == y for x, y in zip(sample.response_text, sample.answer, strict=False)) / longer


def answer_exact(sample: RewardInput) -> float:
    """Return 1 if the response is exactly the answer and was not cut off; else 0."""
    return float(sample.finish_reason == "stop" and sample.response_text == sample.answer)
