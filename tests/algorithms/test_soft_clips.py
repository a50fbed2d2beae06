"""SAPO's gate and M2PO's budget: closed forms, and formulas written anew, token by token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import Algorithm, Grpo, M2po, Sapo
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig
from relax_hpc.algorithms.batch import TokenBatch
from tests.algorithms.test_algorithms import random_batch
from tests.effort import effort
from tests.helpers.loss_helpers import loss_and_gradient, one_row


def test_the_gate_of_sapo_is_open_where_nothing_has_moved() -> None:
    """At ratio 1 the slope in the log-probability is that of -A r; at 3, with t = 1: 4 p (1 - p) r,
    p = sigmoid(2)."""
    algorithm = Sapo(reduction="token_mean")
    for advantage in (1.0, -2.0):
        loss, gradient, metrics = loss_and_gradient(algorithm, one_row(advantage, [-1.0], [-1.0]))
        assert gradient == pytest.approx([-advantage]) and metrics["clip_fraction"] == 0
        assert loss == pytest.approx(-advantage * 2 / (1.0 if advantage > 0 else 1.05))
    p = 1 / (1 + math.exp(-2.0))
    loss, gradient, metrics = loss_and_gradient(
        algorithm, one_row(1.0, [-1.0 + math.log(3)], [-1.0])
    )
    assert loss == pytest.approx(-4 * p) and gradient == pytest.approx([-4 * p * (1 - p) * 3])
    assert metrics["clip_fraction"] == 1


def test_m2po_cuts_what_is_over_the_budget_and_nothing_else() -> None:
    """Log-ratios 0.1, 0.7 and 1 of raised tokens, one of 2 that a clip cannot hold: of 0.3 a token
    0.9 are left, less 0.01; both large ones are cut at t^2 = 0.445."""
    old = [-3.0] * 4
    log_ratios = [0.1, 0.7, 1.0, -2.0]
    batch = one_row(1.0, [before + one for before, one in zip(old, log_ratios, strict=True)], old)
    edge = math.exp(math.sqrt(0.445))
    loss, gradient, metrics = loss_and_gradient(M2po(budget=0.3), batch)
    assert loss == pytest.approx(-(math.exp(0.1) + 2 * edge + math.exp(-2)))
    assert (
        gradient == pytest.approx([-math.exp(0.1), 0, 0, -math.exp(-2)])
        and metrics["clip_fraction"] == 2
    )
    assert metrics["algorithm/second_moment"] == pytest.approx(0.01 + 0.49 + 1)
    _, gradient, metrics = loss_and_gradient(M2po(budget=0.51), batch)
    assert all(gradient) and metrics["clip_fraction"] == 0, "0.5 a token is within the budget"
    # Without any budget the edges are those of the settings: e^0.1 is inside of 1.5.
    loss, _, metrics = loss_and_gradient(M2po(budget=0.0), batch)
    assert (
        loss == pytest.approx(-(math.exp(0.1) + 2 * 1.5 + math.exp(-2)))
        and metrics["clip_fraction"] == 2
    )


def edges(log_ratios: list[float], budget: float) -> float:
    """t with mean(min(log_ratio^2, t^2)) = budget, by bisection; infinite where the mean is below
    it anyway."""
    squares = [one * one for one in log_ratios]
    if sum(squares) <= budget * len(squares):
        return math.inf
    low, high = 0.0, max(squares)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if sum(min(s, middle) for s in squares) < budget * len(squares)
            else (low, middle)
        )
    return math.sqrt(low)


def by_hand(algorithm: Algorithm, x: TokenBatch) -> float:
    """The summed policy loss, without correction, KL and entropy."""
    total = 0.0
    for i in range(len(x.mask)):
        chosen = [j for j in range(x.mask.shape[1]) if x.mask[i, j]]
        before = x.rollout_logprobs if isinstance(algorithm, M2po) else x.old_logprobs
        pairs = [
            (float(x.logprobs[i, j] - before[i, j]), float(x.advantages[i, j])) for j in chosen
        ]
        if isinstance(algorithm, Sapo):
            total += sum(map(gated, *zip(*pairs, strict=True))) if pairs else 0.0
            continue
        t = edges([log for log, advantage in pairs if log * advantage > 0], algorithm.budget)
        low, high = (
            min(math.exp(-t), 1 - algorithm.clip_low),
            max(math.exp(t), 1 + algorithm.clip_high),
        )
        for log, advantage in pairs:
            total += max(
                -advantage * math.exp(log), -advantage * min(max(math.exp(log), low), high)
            )
    return total


def gated(log_ratio: float, advantage: float) -> float:
    t = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / t / (1 + math.exp(-t * (math.exp(log_ratio) - 1)))


@settings(max_examples=effort(40, 200), deadline=None)
@given(
    st.sampled_from(
        [Sapo(correction=CorrectionConfig(kind="off")), M2po(clip_low=0.0, clip_high=0.0), M2po()]
    ),
    st.sampled_from([0.0, 0.01, 0.04, 0.5]),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 2**31),
)
def test_losses_equal_formulas_by_hand(algorithm, budget, rows, columns, seed) -> None:
    algorithm = dataclasses.replace(algorithm, reduction="token_mean")
    if isinstance(algorithm, M2po):
        algorithm = dataclasses.replace(algorithm, budget=budget)
    batch = random_batch(rows, columns, seed)
    assert algorithm.loss(batch)[0].item() == pytest.approx(
        by_hand(algorithm, batch), rel=1e-6, abs=1e-6
    )


@settings(max_examples=effort(40, 200), deadline=None)
@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=20), st.sampled_from([0.01, 0.04, 0.5]))
def test_m2po_leaves_no_token_that_the_paper_takes_out(log_ratios, budget) -> None:
    """Algorithm 1 of arXiv 2510.01161, literally: the farthest token goes until the mean of the
    others is within the budget. Here those that are cut still count, so the edge is nearer, or the
    same."""
    left = sorted(log_ratios)
    while left and sum(one * one for one in left) > budget * len(left):
        left.pop()
    old = [-4.0] * len(log_ratios)
    batch = one_row(1.0, [before + one for before, one in zip(old, log_ratios, strict=True)], old)
    _, gradient, _ = loss_and_gradient(M2po(budget=budget, clip_low=0.0, clip_high=0.0), batch)
    kept = [one for one, slope in zip(log_ratios, gradient, strict=True) if slope]
    assert len(kept) <= len(left) and all(one <= max(left) for one in kept)


def test_m2po_asks_for_no_other_correction() -> None:
    assert list(M2po().findings()) == [] and "old_logprobs" not in M2po(passes=2).loss_needs(
        stale=True
    )
    wrong = M2po(correction=CorrectionConfig(), kl=KlConfig(importance=True))
    assert [finding.partition(":")[0] for finding in wrong.findings()] == ["correction.kind"]
    (finding,) = Sapo(temperature_down=0.0).findings()
    assert finding.startswith("temperature_down: found 0.0")


def test_a_constant_normaliser_weighs_tokens_the_same_in_long_and_short_episodes() -> None:
    """Rows of 1 and 3 tokens: every token has the slope -A / 8 before the division by the two
    episodes."""
    batch = random_batch(2, 4, seed=3)
    mask = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]], dtype=torch.float64)
    new = batch.logprobs.detach().requires_grad_()
    same = batch.replace(
        logprobs=new, old_logprobs=new.detach(), rollout_logprobs=new.detach(), mask=mask
    )
    loss, metrics = Grpo(reduction="constant", constant_tokens=8).loss(same)
    (slopes,) = torch.autograd.grad(loss, new)
    assert torch.allclose(slopes, -batch.advantages * mask / 8) and metrics["weight"] == 2
    (finding,) = Grpo(reduction="constant").findings()
    assert finding.startswith("constant_tokens: found 0")
