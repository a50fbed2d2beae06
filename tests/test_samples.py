"""Rows of prompt groups: which tokens are trained on, and which groups are wanted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.data.prompts import Prompt
from relax_hpc.engines.engine import Generation
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import RewardInput
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.samples import group_rows
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.versions import Version

PROMPT = Prompt("p", (5, 6, 7), "2?", "2", {})


class Words:
    """A tokenizer of which only the text of a response matters."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def rows_of(numbers: list[list[int]], rewards: list[float] | None = None, **how: object) -> list[Row] | Failure:
    """Of a group whose tokens were drawn by versions of these numbers."""
    answers = [
        Generation([9] * len(each), [-0.5] * len(each), np.array([Version(1, n).encode() for n in each]), "length")
        for each in numbers
    ]
    values = iter(rewards or [1.0] * len(numbers))

    def reward(_: RewardInput) -> float:
        return next(values)

    return group_rows(PROMPT, 4, answers, Words(), reward, **how)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6).map(sorted), min_size=1, max_size=4))
def test_older_tokens_may_be_left_out_of_the_loss(numbers: list[list[int]]) -> None:
    whole, newest = rows_of(numbers), rows_of(numbers, newest_only=True)
    for row, masked, drawn_by in zip(whole, newest, numbers, strict=True):
        assert row["loss_mask"].tolist() == [0] * 3 + [1] * len(drawn_by)
        assert masked["loss_mask"].tolist() == [0] * 3 + [int(number == drawn_by[-1]) for number in drawn_by]
        assert masked["loss_mask"].dtype == np.uint8


def test_groups_of_equal_rewards_may_be_left_out() -> None:
    differ = get_filter("rewards_differ")
    assert isinstance(rows_of([[1], [1]], [0.0, 0.5], keeps=differ), list)
    found = rows_of([[1], [1]], [0.5, 0.5], keeps=differ)
    assert found == Failure("filtered", "rewards [0.5] (prompt p)", (0.5, 0.5))
    assert get_filter("")([1.0, 1.0])


def test_an_unknown_filter_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"filter: found 'reward_differ', .* did you mean 'rewards_differ'\?"):
        get_filter("reward_differ")
