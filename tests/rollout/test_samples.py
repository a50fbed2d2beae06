"""Rows of prompt groups: which tokens are trained on, and which groups are wanted."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.writer import COMPONENT_COUNT, COMPONENT_SUM
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardInput
from relax_hpc.rewards.placement import InThread
from relax_hpc.rollout import group_rewards
from relax_hpc.rollout.engines.engine import Generation
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.rows import group_rows

PROMPT = Prompt("p", (5, 6, 7), "2?", "2", {})


def rows_of(
    numbers: list[list[int]], rewards: list[float] | None = None, **how: object
) -> list[Row] | Failure:
    """Of a group whose tokens were drawn by versions of these numbers."""
    answers = [
        Generation(
            [9] * len(each),
            [-0.5] * len(each),
            np.array([Version(1, n).encode() for n in each]),
            "length",
        )
        for each in numbers
    ]
    return group_rows(PROMPT, 4, answers, rewards or [1.0] * len(numbers), **how)


@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=6).map(sorted), min_size=1, max_size=4
    )
)
def test_older_tokens_may_be_left_out_of_the_loss(numbers: list[list[int]]) -> None:
    whole, newest = rows_of(numbers), rows_of(numbers, newest_only=True)
    for row, masked, drawn_by in zip(whole, newest, numbers, strict=True):
        assert row["loss_mask"].tolist() == [0] * 3 + [1] * len(drawn_by)
        assert masked["loss_mask"].tolist() == [0] * 3 + [
            int(number == drawn_by[-1]) for number in drawn_by
        ]
        assert masked["loss_mask"].dtype == np.uint8


def test_groups_of_equal_rewards_are_filtered() -> None:
    differ = get_filter("rewards_differ")
    assert isinstance(rows_of([[1], [1]], [0.0, 0.5], keeps=differ), list)
    failure = rows_of([[1], [1]], [0.5, 0.5], keeps=differ)
    assert failure == Failure("filtered", "rewards [0.5] (prompt p)", (0.5, 0.5))
    assert get_filter("")([1.0, 1.0])


def test_a_filter_that_raises_fails_the_group() -> None:
    failure = rows_of(
        [[1], [1]], [0.5, 0.5], keeps=lambda rewards: 1 / (rewards[0] - rewards[1]) > 0
    )
    text = "filter_exception: ZeroDivisionError: float division by zero (prompt p)"
    assert failure == Failure("filter_exception", text)


def test_an_unknown_filter_is_named_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"filter: found 'reward_differ', .* did you mean 'rewards_differ'\?"
    ):
        get_filter("reward_differ")


class NumberTokens:
    """A tokenizer whose text is the list of token ids."""

    eos_ids = (2,)

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def own_reward(samples: list[RewardInput]) -> list[dict[str, float]]:
    """Rewards by the first token. Token 7 has a component that is not finite."""
    first = [int(sample.response_text.split()[0]) for sample in samples]
    return [
        {"total": n / 10, "a name/of it": n, "good": math.nan if n == 7 else 1.0} for n in first
    ]


def test_components_of_rewards_are_counted_and_stored_with_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Components of failed groups count, too. Only samples that people may read keep them."""
    monkeypatch.setattr(group_rewards, "make_rewards", lambda *args: InThread(own_reward, 60.0))
    config, reported = Config(prompts_per_step=2), list[tuple[int, dict[str, float]]]()
    config.rollout.filter = "rewards_differ"
    judging = group_rewards.GroupRewards(
        config, NumberTokens(), lambda *what: reported.append(what), lambda ticket: ticket == 4
    )

    def judged(ticket: int, *firsts: int) -> list[Row] | Failure:
        versions = np.ones(2, np.int32)
        answers = [Generation([first, 2], [-0.5] * 2, versions, "stop") for first in firsts]
        return asyncio.run(judging.rows(PROMPT, ticket, answers))

    rows, other_rows, bad, alike = (
        judged(4, 1, 2),
        judged(5, 3, 4),
        judged(6, 1, 7),
        judged(8, 5, 5),
    )
    assert [row["reward"] for row in (*rows, *other_rows)] == [0.1, 0.2, 0.3, 0.4]
    assert bad.reason == "reward_not_finite" and "good: returned nan" in bad.detail
    assert alike.reason == "filtered"
    sums = [(2, 3, 2), (2, 7, 2), (4, 10, 2)]
    assert reported == [
        (
            step,
            {COMPONENT_SUM + "a_name_of_it": total, COMPONENT_COUNT + "a_name_of_it": count}
            | {COMPONENT_SUM + "good": count, COMPONENT_COUNT + "good": count},
        )
        for step, total, count in sums
    ]
    details = judging.take_details([*rows, *other_rows])
    assert list(details) == [row["row_id"] for row in rows] and judging.take_details(rows) == {}
    assert details[rows[0]["row_id"]] == {
        "answer": "2",
        "components": {"a name/of it": 1.0, "good": 1.0},
    }
