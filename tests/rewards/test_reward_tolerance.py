"""Rewards are sums of floats: rounding decides neither a filter nor pass@k."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.config.schema import EvalConfig
from relax_hpc.rewards import Score
from relax_hpc.rewards.composed import Weighted
from relax_hpc.rewards.tolerance import reaches
from relax_hpc.rollout.evaluation import EvaluationResults
from relax_hpc.rollout.filters import rewards_differ

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=12)


def weighted_total(weights: list[float], scores: list[float]) -> float:
    rewards = {f"reward {number}": (weight, None) for number, weight in enumerate(weights)}
    return Weighted(rewards)._sum([Score(score) for score in scores])["total"]


@given(WEIGHTS, st.randoms(use_true_random=False))
def test_the_order_of_a_sum_is_no_difference(weights: list[float], random: Random) -> None:
    shuffled = random.sample(weights, len(weights))
    ones = [1.0] * len(weights)
    assert weighted_total(weights, ones) == weighted_total(shuffled, ones)
    assert not rewards_differ([sum(weights), sum(shuffled), math.fsum(weights)])
    assert not rewards_differ([sum(weights) - sum(shuffled), 0.0])


@given(st.floats(-1e6, 1e6), st.floats(1e-5, 10.0))
def test_a_difference_that_training_sees_is_one(reward: float, share: float) -> None:
    assert rewards_differ([reward, reward, reward + share * max(1.0, abs(reward))])


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [
        ([0.1 + 0.2] * 4 + [0.3] * 4, False),
        ([0.0] * 4 + [0.001] * 4, True),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([1.0, 1.0 - 1e-16], False),
        ([1e6, 1e6 + 0.01], False),
        ([0.0, 1e-6], True),
        ([-1.0, 1.0], True),
        ([0.5], False),
        ([], False),
    ],
)
def test_the_filter_of_equal_rewards(rewards: list[float], differ: bool) -> None:
    assert rewards_differ(rewards) == differ


@given(WEIGHTS)
def test_a_perfect_response_passes_whatever_the_weights(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    tally = EvaluationResults(EvalConfig(pass_at=[1]))
    tally.add([Score(weighted_total(shares, [1.0] * len(shares)))])
    assert dict(tally.values("set"))["eval/set/pass@1"] == 1.0
    assert reaches(sum(shares), 1.0) and not reaches(0.9999, 1.0)


def test_a_sum_that_overflows_is_not_finite() -> None:
    assert weighted_total([1e308, 1e308, 1.0], [1.0, 1.0, 1.0]) == math.inf
    assert weighted_total([math.inf, -math.inf], [1.0, 1.0]) == math.inf
