"""Scores of single responses, and texts around their answers, for tests of rewards that read final
answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from relax_hpc.rewards import RewardInput, get_reward
from relax_hpc.rewards.scoring import scores
from tests.effort import effort
from tests.requirements import requires

EXAMPLES = settings(max_examples=effort(60, 5000), deadline=None)
ANYTHING = st.text(max_size=40)


@pytest.fixture(name="no_process_left", scope="module", autouse=True)
def no_process_left_fixture() -> Iterator[None]:
    """End the process of Math-Verify after the last test of a file."""
    yield
    requires("math_verify")
    from relax_hpc.rewards import symbolic

    symbolic.close()


def total(name: str, text: str, answer: str, prompt: str = "?") -> float:
    [score] = scores(get_reward(name), [RewardInput(prompt, answer, text, "stop")])
    return score.total


def safe(text: str) -> str:
    """``text`` without marks that would make another answer of it."""
    for mark in ("boxed", "answer", "#", "think", "reason", "<", "["):
        text = text.replace(mark, "")
    return text
