"""GSPO, CISPO, dual clip, REINFORCE++ and KL off-policy: closed forms, finite differences, and
verl's formulas.

The formulas of verl are written here from its functions as of commit
b178a3cd56f58b2d502255daba591e92833930a7 (of verl/trainer/ppo/core_algos.py and
verl/utils/torch_functional.py). Each test names the functions; no code of verl is copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import (
    ALGORITHMS,
    Algorithm,
    Cispo,
    DualClip,
    Grpo,
    Gspo,
    M2po,
    ReinforcePP,
    Sapo,
)
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig
from relax_hpc.algorithms.batch import TokenBatch
from tests.algorithms.test_algorithms import NAMES, random_batch
from tests.effort import effort
from tests.helpers.loss_helpers import loss_and_gradient, one_row

OFF = CorrectionConfig(kind="off")
LOSSES: list[Algorithm] = [
    Grpo(correction=OFF),
    DualClip(clip_cap=1.5, correction=OFF),
    Gspo(clip_low=0.2, clip_high=0.2, correction=OFF),
    Cispo(clip_high=0.5, correction=OFF),
    ReinforcePP(correction=OFF),
]


# -- closed forms ----------------------------------------------------------------------------------


def test_gspo_clips_one_ratio_per_response():
    """log-ratios 0.3 and -0.1: s = e^0.1 for both tokens; the mean over the row of -A s has
    gradient -A s / 2 each."""
    old = [-1.0, -2.0]
    inside = Gspo(clip_low=0.2, clip_high=0.2)
    loss, gradient, metrics = loss_and_gradient(inside, one_row(2.0, [-0.7, -2.1], old))
    assert loss == pytest.approx(-2.0 * math.exp(0.1)) and gradient == pytest.approx(
        [-math.exp(0.1)] * 2
    )
    assert metrics["weight"] == 1 and metrics["ratio"] == pytest.approx(2 * math.exp(0.1))
    loss, gradient, metrics = loss_and_gradient(Gspo(), one_row(2.0, [-0.7, -2.1], old))
    assert (
        loss == pytest.approx(-2.0 * 1.0004)
        and gradient == [0.0, 0.0]
        and metrics["clip_fraction"] == 2
    )
    # With a negative advantage only the lower bound clips, so this token is not clipped.
    loss, gradient, _ = loss_and_gradient(Gspo(), one_row(-2.0, [-0.7, -2.1], old))
    assert loss == pytest.approx(2.0 * math.exp(0.1)) and gradient == pytest.approx(
        [math.exp(0.1)] * 2
    )


def test_cispo_keeps_the_gradient_of_every_token():
    """Ratios e, 1 and 1/e: weights are clipped at 1.5 for both signs of the advantage. Each token
    has a gradient."""
    batch = one_row(1.0, [-1.0, -1.0, -2.0], [-2.0, -1.0, -1.0])
    loss, gradient, metrics = loss_and_gradient(Cispo(clip_high=0.5), batch)
    assert gradient == pytest.approx([-1.5, -1.0, -1 / math.e])
    assert loss == pytest.approx(1.5 + 1.0 + 2.0 / math.e) and metrics["clip_fraction"] == 1
    _, gradient, metrics = loss_and_gradient(
        Cispo(clip_low=0.2, clip_high=0.5), one_row(-1.0, [-2.0], [-1.0])
    )
    assert gradient == pytest.approx([0.8]) and metrics["clip_fraction"] == 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "capped"),
    [
        (2.0, -1.0, 2.0, 2.0, 0),
        (3.5, -2.0, 6.0, 0.0, 1),
        (math.exp(15), -1.0, 3.0, 0.0, 1),
        (3.5, 1.0, -1.28, 0.0, 0),
    ],
)
def test_dual_clip_bounds_the_loss_of_a_token(ratio, advantage, loss, slope, capped):
    value, (gradient,), metrics = loss_and_gradient(
        DualClip(), one_row(advantage, [math.log(ratio) - 20], [-20.0])
    )
    assert value == pytest.approx(loss) and gradient == pytest.approx(slope)
    assert metrics["algorithm/dual_clip_fraction"] == capped


def rows_of(rewards: list[list[float]], tokens: list[list[int]]) -> list:
    """Rows as [prompt][episode][row]: a prompt token, then `tokens` trained tokens."""
    return [
        [
            [
                {"reward": reward}
                | dict.fromkeys(
                    ("loss_mask", "token_versions"), np.array([0] + [1] * count, np.uint8)
                )
            ]
            for reward, count in zip(*prompt, strict=True)
        ]
        for prompt in zip(rewards, tokens, strict=True)
    ]


def test_reinforce_pp_normalises_over_the_tokens_of_the_step():
    """Rewards 0, 1, 1, 3 on 1, 2, 1, 4 tokens: mean 15 / 8, unbiased variance (39 - 15^2 / 8) /
    7."""
    advantages = ReinforcePP().token_advantages(rows_of([[0, 1], [1, 3]], [[1, 2], [1, 4]]))
    spread = math.sqrt((39 - 225 / 8) / 7)
    assert [len(row) for row in advantages] == [2, 3, 2, 5] and all(
        row.dtype == np.float32 and row[0] == 0 for row in advantages
    )
    for row, reward in zip(advantages, (0, 1, 1, 3), strict=True):
        assert row[1:] == pytest.approx((reward - 15 / 8) / spread, rel=1e-6)
    assert not any(
        row.any() for row in ReinforcePP().token_advantages(rows_of([[0.1] * 2] * 2, [[3, 5]] * 2))
    )
    assert not any(row.any() for row in ReinforcePP().token_advantages(rows_of([[1, 2]], [[0, 0]])))
    # Minus their prompts' means the rewards of the 4 tokens are -0.5, 0.5, -1, 1, with mean 0.
    (first, *_, last) = ReinforcePP(baseline="prompt").token_advantages(
        rows_of([[0, 1], [1, 3]], [[1, 1], [1, 1]])
    )
    assert (first[1], last[1]) == pytest.approx((-0.5 / math.sqrt(2.5 / 3), 1 / math.sqrt(2.5 / 3)))


def test_reinforce_pp_subtracts_a_kl_penalty_from_each_reward():
    """The penalty of a token reduces the returns of this token and of all earlier tokens."""
    prompts = rows_of([[1.0, 0.0]], [[2, 1]])
    for (row,), rollout, ref in zip(
        prompts[0], ([0, -1.0, -1.0], [0, -2.0]), ([0, -1.5, -1.2], [0, -2.0]), strict=True
    ):
        row |= {
            "rollout_logprobs": np.array(rollout, np.float32),
            "ref_logprobs": np.array(ref, np.float32),
        }
    returns = np.array([1 - 0.1 * (0.5 + 0.2), 1 - 0.1 * 0.2, 0.0])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    algorithm = ReinforcePP(kl_in_reward=0.1)
    assert np.concatenate(
        [row[1:] for row in algorithm.token_advantages(prompts)]
    ) == pytest.approx(expected, rel=1e-5)
    assert algorithm.needs == ("reward", "rollout_logprobs", "ref_logprobs")


# -- finite differences ----------------------------------------------------------------------------


# With a budget of 0 the clip bounds of M2PO are constant, as those of the other algorithms.
@pytest.mark.parametrize(
    "algorithm", [*LOSSES, Sapo(correction=OFF), M2po(budget=0.0)], ids=lambda one: one.name
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_gradients_equal_finite_differences(algorithm, reduction):
    """The stop-gradients of GSPO do not change its gradient if a row has only one advantage. Those
    of CISPO do, so that its weights are set to the constant clip bounds here."""
    batch = random_batch(3, 4, seed=11)
    batch.advantages[:] = batch.advantages[:, :1]
    kl = KlConfig(coefficient=0.2, importance=True)
    tested = dataclasses.replace(algorithm, reduction=reduction, constant_tokens=5, kl=kl)
    if isinstance(tested, Cispo):
        tested = dataclasses.replace(tested, clip_low=0.0, clip_high=0.0)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return tested.loss(batch.replace(logprobs=logprobs))[0]

    assert torch.autograd.gradcheck(loss, (batch.logprobs.requires_grad_(),))


CORRECTIONS = [
    CorrectionConfig(kind=kind, level=level, low=0.9, high=1.05)
    for kind, level in itertools.product(("truncate", "mask", "off"), ("token", "sequence"))
]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize(
    "learner",
    [*(Grpo(correction=each) for each in CORRECTIONS), Gspo(), Cispo(), M2po()],
    ids=lambda learner: f"{learner.name}-{learner.correction.kind}-{learner.correction.level}",
)
def test_an_importance_weighted_kl_has_the_exact_gradient_off_policy(estimator, learner):
    """Exact sums over a categorical distribution that the engine samples, the old policy scores and
    another policy trains. The weight of the policy loss, which the correction truncates or masks,
    does not change the gradient of the divergence."""
    rollout, old, ref = (
        torch.tensor(probabilities, dtype=torch.float64).log()
        for probabilities in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.2, 0.2, 0.6])
    )
    logits = torch.tensor([0.1, 0.9, -0.3], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)

    def gradient(importance: bool) -> torch.Tensor:
        kl = KlConfig(coefficient=1.0, estimator=estimator, importance=importance)
        algorithm = dataclasses.replace(learner, kl=kl)
        assert list(algorithm.findings()) == [] or not importance
        total = torch.zeros((), dtype=torch.float64)
        for token in range(3):
            values = {
                name: distribution[None, None, token]
                for name, distribution in (("logprobs", policy), ("old_logprobs", old))
            }
            values |= {
                "rollout_logprobs": rollout[None, None, token],
                "ref_logprobs": ref[None, None, token],
            }
            zero = torch.zeros(1, 1, dtype=torch.float64)
            batch = TokenBatch(**values, advantages=zero, mask=zero + 1)
            total = total + rollout[token].exp() * algorithm.loss(batch)[0]
        return torch.autograd.grad(total, logits, retain_graph=True)[0]

    assert torch.allclose(gradient(True), exact, atol=1e-12)
    assert (gradient(False) - exact).norm() > 0.3 * exact.norm()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_k1_divergence_is_capped_on_both_sides(sign):
    """With log-ratio +-3 and cap 0.5, the value is the cap, and only the weight has a gradient."""
    kl = KlConfig(coefficient=1.0, estimator="k1", importance=True, cap=0.5)
    batch = one_row(0.0, [-1.0], [-1.0]).replace(
        ref_logprobs=torch.full((1, 1), -1.0 - 3 * sign).double()
    )
    loss, (gradient,), _ = loss_and_gradient(Grpo(kl=kl), batch)
    assert (loss, gradient) == pytest.approx((0.5 * sign, 0.5 * sign))


def test_a_divergence_over_its_cap_has_no_gradient():
    for cap, slope in ((10.0, 0.0), (0.0, 1 - math.exp(15))):
        batch = one_row(0.0, [-20.0], [-20.0]).replace(
            ref_logprobs=torch.full((1, 1), -5.0).double()
        )
        _, (gradient,), metrics = loss_and_gradient(
            Grpo(kl=KlConfig(coefficient=1.0, cap=cap)), batch
        )
        assert gradient == pytest.approx(slope) and metrics["kl/reference"] == pytest.approx(
            math.exp(15) - 16
        )


# -- verl ------------------------------------------------------------------------------------------


def verl_loss(algorithm: Grpo, batch: TokenBatch) -> float:
    """The mean loss of a batch by verl's formulas, token by token."""
    total, weight, rows = 0.0, 0, 0
    for i in range(len(batch.mask)):
        trained = [j for j in range(batch.mask.shape[1]) if batch.mask[i, j]]
        log_ratios = [float(batch.logprobs[i, j] - batch.old_logprobs[i, j]) for j in trained]
        losses = [
            verl_token(
                algorithm,
                log_ratio,
                sum(log_ratios) / len(log_ratios),
                float(batch.advantages[i, j]),
                float(batch.logprobs[i, j]),
            )
            for j, log_ratio in zip(trained, log_ratios, strict=True)
        ]
        # agg_loss: "token-mean" and "seq-mean-token-mean".
        total += (
            sum(losses) / len(losses)
            if losses and algorithm.reduction == "sequence_mean"
            else sum(losses)
        )
        weight, rows = weight + len(losses), rows + bool(losses)
    return total / max(rows if algorithm.reduction == "sequence_mean" else weight, 1)


def verl_token(
    algorithm: Grpo, log_ratio: float, mean_log_ratio: float, advantage: float, logprob: float
) -> float:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = math.exp(
        min(max(mean_log_ratio if isinstance(algorithm, Gspo) else log_ratio, -20), 20)
    )
    clip = min(max(ratio, low), high)
    if isinstance(algorithm, Cispo):  # compute_policy_loss_cispo
        return -clip * advantage * logprob
    loss = max(
        -advantage * ratio, -advantage * clip
    )  # compute_policy_loss_gspo; compute_policy_loss_vanilla
    if isinstance(algorithm, DualClip) and advantage < 0:  # its clip_ratio_c
        return min(loss, -advantage * algorithm.clip_cap)
    return loss


@settings(max_examples=effort(20, 60), deadline=None)
@given(
    st.sampled_from(LOSSES),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 2**31),
)
def test_losses_equal_verls_formulas(algorithm, reduction, rows, columns, seed):
    """compute_policy_loss_vanilla (clip_ratio_c is infinite except for dual clip), _gspo and _cispo
    with agg_loss. verl limits the log-ratio of GSPO to 10, not 20, and has only sequence means."""
    algorithm, batch = (
        dataclasses.replace(algorithm, reduction=reduction),
        random_batch(rows, columns, seed),
    )
    loss, metrics = algorithm.loss(batch)
    mean_loss = loss.item() / max(metrics["weight"].item(), 1.0)
    assert mean_loss == pytest.approx(verl_loss(algorithm, batch), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_losses_do_not_depend_on_the_micro_batch_of_a_row(name, reduction):
    """Loss and metrics of a batch are the sums over its rows, or over its pairs of rows."""
    algorithm = ALGORITHMS[name](reduction=reduction, constant_tokens=9)
    batch = random_batch(5, 6, seed=4)
    values = {name: value for name in NAMES if (value := getattr(batch, name)) is not None}
    size = max(algorithm.sequences, 1)
    rows = [
        TokenBatch(**{name: value[i : i + size] for name, value in values.items()})
        for i in range(0, 5, size)
    ]
    loss, metrics = algorithm.loss(batch)
    row_results = [algorithm.loss(row) for row in rows]
    assert sum(result for result, _ in row_results).item() == pytest.approx(loss.item())
    for metric, value in metrics.items():
        combine = max if metric.endswith("_max") else sum
        assert combine(result[metric].item() for _, result in row_results) == pytest.approx(
            value.item(), abs=1e-12
        )


def verl_whitened(returns: list[np.ndarray]) -> list[np.ndarray]:
    """masked_whiten: mean and unbiased variance over the mask, 1 / sqrt(var + 1e-8)."""
    count = sum(map(len, returns))
    mean = sum(float(row_returns.sum()) for row_returns in returns) / count
    var = sum(float(((row_returns - mean) ** 2).sum()) for row_returns in returns) / (count - 1)
    return [(row_returns - mean) / math.sqrt(var + 1e-8) for row_returns in returns]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 5)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_reinforce_pp_equals_verls_formulas(groups):
    """compute_reinforce_plus_plus_outcome_advantage with gamma 1 and the reward on the last token,
    and compute_reinforce_plus_plus_baseline_outcome_advantage."""
    rewards = [[reward for reward, _ in prompt] for prompt in groups]
    tokens = [[count for _, count in prompt] for prompt in groups]
    if len(set(itertools.chain.from_iterable(rewards))) == 1:
        return
    for baseline in ("none", "prompt"):
        means = [sum(prompt) / 3 if baseline == "prompt" else 0.0 for prompt in rewards]
        returns = []
        for prompt, counts, mean in zip(rewards, tokens, means, strict=True):
            for reward, count in zip(prompt, counts, strict=True):
                returns.append(np.full(count, reward - mean, float))
        advantages = ReinforcePP(baseline=baseline).token_advantages(rows_of(rewards, tokens))
        for row, expected in zip(advantages, verl_whitened(returns), strict=True):
            assert row[1:] == pytest.approx(expected, rel=1e-5, abs=1e-5)
