"""Losses and advantages against closed forms, an independent implementation, and finite
differences."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import Algorithm, DrGrpo, Grpo, Rloo
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig, rewards_of, spread
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.correction import correction, effective_share
from relax_hpc.algorithms.kl import KL_ESTIMATORS
from relax_hpc.algorithms.losses import MAX_SUFFIX, mean_metrics
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import loss_fields
from relax_hpc.roles.advantages import require_finite
from tests.effort import effort

NAMES = ("logprobs", "entropy", "mask", *loss_fields())

kls = st.builds(
    KlConfig,
    coefficient=st.sampled_from([0.0, 0.3]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    cap=st.sampled_from([0.0, 0.05, 10.0]),
    importance=st.booleans(),
)
corrections = st.builds(
    CorrectionConfig,
    kind=st.sampled_from(["truncate", "mask", "off"]),
    level=st.sampled_from(["token", "sequence"]),
    low=st.sampled_from([0.0, 0.5, 1.0]),
    high=st.sampled_from([1.0, 2.0]),
)
configs = st.builds(
    Grpo,
    clip_low=st.sampled_from([0.0, 0.2, 1.0]),
    clip_high=st.sampled_from([0.0, 0.28]),
    entropy_coefficient=st.sampled_from([0.0, 0.01, -0.02]),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    constant_tokens=st.just(7),
    kl=kls,
    correction=corrections,
)


def policy_loss(
    batch: TokenBatch, algorithm: Algorithm
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return algorithm.loss(batch)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))


def random_batch(rows: int, columns: int, seed: int, garbage: float | None = None) -> TokenBatch:
    """float64 values around typical ones; masked entries hold `garbage` if given."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, columns)) < 0.6).astype(np.float64)
    new = -rng.exponential(1.0, (rows, columns))
    old = new + rng.normal(0, 0.4, new.shape)
    values = {
        "logprobs": new,
        "entropy": rng.exponential(1.0, new.shape),
        "old_logprobs": old,
        "rollout_logprobs": old + rng.normal(0, 0.7, new.shape),
        "ref_logprobs": new + rng.normal(0, 0.5, new.shape),
        "advantages": rng.normal(0, 1, new.shape),
    }
    if garbage is not None:
        values = {name: np.where(mask > 0, value, garbage) for name, value in values.items()}
    return TokenBatch(
        **{name: torch.tensor(value) for name, value in values.items()}, mask=torch.tensor(mask)
    )


def one_token(config: Grpo, ratio: float, advantage: float, **values: float) -> tuple[float, dict]:
    """Loss and metrics of a batch of one token whose old log-probability is -1."""
    given = {
        "logprobs": -1 + math.log(ratio),
        "old_logprobs": -1.0,
        "rollout_logprobs": -1.0,
        "advantages": advantage,
    }
    given |= {"mask": 1.0} | values
    tensors = dict.fromkeys(NAMES)
    tensors |= {name: torch.tensor([[value]], dtype=torch.float64) for name, value in given.items()}
    loss, metrics = policy_loss(TokenBatch(**tensors), config)
    return loss.item(), {name: value.item() for name, value in metrics.items()}


def numpy_loss(batch: TokenBatch, config: Grpo) -> dict[str, float]:
    """The same quantities token by token in plain Python, written from the formulas."""
    out = dict.fromkeys(
        ("loss", "weight", "tokens", "episodes", "loss/policy", "loss/kl", "loss/entropy"), 0.0
    )
    sums = (
        "ratio clip_fraction kl/reference kl/old entropy rollout_kl train_rollout_logprob_abs_diff"
    )
    sums += " correction_weight correction_square correction_cut sampled_entropy zero_advantage"
    maxima = "train_rollout_logprob_max rollout_ratio_max rollout_inverse_ratio_max"
    out |= dict.fromkeys(f"{sums} {maxima}".split(), 0.0)
    rows, columns = batch.mask.shape
    for i in range(rows):
        chosen = [j for j in range(columns) if batch.mask[i, j] == 1]
        product = math.prod(
            math.exp(batch.old_logprobs[i, j] - batch.rollout_logprobs[i, j]) for j in chosen
        )
        out["episodes"] += bool(chosen)
        for j in chosen:
            new, old, rollout = (
                float(t[i, j]) for t in (batch.logprobs, batch.old_logprobs, batch.rollout_logprobs)
            )
            ref, adv, entropy = (
                float(t[i, j]) for t in (batch.ref_logprobs, batch.advantages, batch.entropy)
            )
            share = {"token_mean": 1.0, "sequence_mean": 1 / len(chosen), "constant": 1 / 7}[
                config.reduction
            ]
            ratio = math.exp(new - old)
            inside = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            importance = (
                product if config.correction.level == "sequence" else math.exp(old - rollout)
            )
            weight, cut = numpy_weight(importance, config.correction)
            d = ref - new
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl.estimator]
            cap = config.kl.cap or math.inf
            off_policy = math.exp(new - rollout) if config.kl.importance else 1.0
            out["tokens"] += 1
            out["loss/policy"] += share * weight * -min(adv * ratio, adv * inside)
            out["loss/kl"] += share * config.kl.coefficient * off_policy * min(max(kl, -cap), cap)
            out["loss/entropy"] -= share * config.entropy_coefficient * entropy
            out["ratio"] += ratio
            out["clip_fraction"] += adv * inside < adv * ratio
            out["kl/reference"] += kl
            out["kl/old"] += ratio - 1 - (new - old)
            out["entropy"] += entropy
            out["rollout_kl"] += math.exp(old - rollout) - 1 - (old - rollout)
            out["sampled_entropy"] -= rollout
            out["zero_advantage"] += adv == 0
            out["correction_weight"] += weight
            out["correction_square"] += weight * weight
            out["correction_cut"] += cut
            out["rollout_ratio_max"] = max(out["rollout_ratio_max"], importance)
            out["rollout_inverse_ratio_max"] = max(out["rollout_inverse_ratio_max"], 1 / importance)
            out["train_rollout_logprob_abs_diff"] += abs(old - rollout)
            out["train_rollout_logprob_max"] = max(
                out["train_rollout_logprob_max"], abs(old - rollout)
            )
    out["loss"] = out["loss/policy"] + out["loss/kl"] + out["loss/entropy"]
    out["weight"] = out["tokens"] if config.reduction == "token_mean" else out["episodes"]
    return out


def numpy_weight(ratio: float, config: CorrectionConfig) -> tuple[float, bool]:
    """The weight, and whether it is another than the ratio."""
    if config.kind == "off":
        return 1.0, False
    if config.kind == "truncate":
        return min(ratio, config.high), ratio > config.high
    outside = not config.low <= ratio <= config.high
    return 0.0 if outside else ratio, outside


@settings(max_examples=effort(60, 200), deadline=None)
@given(configs, shapes)
def test_loss_and_metrics_equal_an_independent_implementation(config, shape):
    batch = random_batch(*shape)
    loss, metrics = policy_loss(batch, config)
    found = {"loss": loss.item()} | {name: value.item() for name, value in metrics.items()}
    assert found == pytest.approx(numpy_loss(batch, config), rel=1e-9, abs=1e-12)


@settings(max_examples=effort(20, 60), deadline=None)
@given(configs, shapes, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_entries_may_hold_anything(config, shape, garbage):
    clean, dirty = random_batch(*shape), random_batch(*shape, garbage=garbage)
    for batch in (clean, dirty):
        batch.logprobs.requires_grad_()
        batch.entropy.requires_grad_()
    results = [policy_loss(batch, config) for batch in (clean, dirty)]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    gradients = [
        torch.autograd.grad(r[0], b.logprobs)[0]
        for r, b in zip(results, (clean, dirty), strict=True)
    ]
    assert torch.equal(*gradients)
    assert not (gradients[1] * (1 - dirty.mask)).any()


@settings(max_examples=effort(20, 60), deadline=None)
@given(configs, shapes, st.integers(0, 4))
def test_parts_of_a_batch_add_up_to_the_whole(config, shape, cut):
    batch = random_batch(*shape)
    loss, whole = policy_loss(batch, config)
    slices = [slice(0, cut), slice(cut, None)]
    values = {name: value for name in NAMES if (value := getattr(batch, name)) is not None}
    parts = [
        policy_loss(TokenBatch(**{name: value[part] for name, value in values.items()}), config)
        for part in slices
        if len(batch.mask[part])
    ]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), abs=1e-12)
    for name, value in whole.items():
        combine = max if name.endswith(MAX_SUFFIX) else sum
        assert combine(part[1][name].item() for part in parts) == pytest.approx(
            value.item(), abs=1e-12
        )


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_equals_finite_differences(reduction, estimator, kind, level):
    config = Grpo(
        kl=KlConfig(coefficient=0.3, estimator=estimator),
        entropy_coefficient=0.05,
        reduction=reduction,
        correction=CorrectionConfig(kind=kind, level=level, high=1.2),
    )
    batch = random_batch(3, 4, seed=7)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(batch.replace(logprobs=logprobs, entropy=entropy), config)[0]

    assert torch.autograd.gradcheck(
        loss, (batch.logprobs.requires_grad_(), batch.entropy.requires_grad_())
    )


@settings(max_examples=effort(20, 60), deadline=None)
@given(configs, shapes)
def test_the_correction_only_weighs_the_gradient(config, shape):
    """Of a token's policy loss, which is linear in the weight; none comes from the weight
    itself."""
    batch, plain = random_batch(*shape), random_batch(*shape)
    weight = correction(
        batch.old_logprobs * batch.mask, batch.rollout_logprobs * batch.mask, config.correction
    ).weight
    settings = dataclasses.replace(config, kl=KlConfig(), entropy_coefficient=0.0)
    gradients = []
    for one, used in ((batch, config.correction), (plain, CorrectionConfig(kind="off"))):
        one.logprobs.requires_grad_()
        one.rollout_logprobs.requires_grad_()
        loss, _ = policy_loss(one, dataclasses.replace(settings, correction=used))
        gradient, none = torch.autograd.grad(
            loss, (one.logprobs, one.rollout_logprobs), allow_unused=True
        )
        assert none is None
        gradients.append(gradient)
    assert torch.allclose(gradients[0], weight * gradients[1], atol=1e-12)


def test_without_old_logprobs_the_weight_is_the_policys_own_over_the_engines():
    """True on-policy: the ratio is 1, and its gradient the policy gradient, weighed by exp(new -
    rollout) = e^0.5."""
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    values = dict.fromkeys(NAMES, logprobs.detach())
    values |= {
        "logprobs": logprobs,
        "rollout_logprobs": logprobs.detach() - 0.5,
        "mask": torch.ones(1, 1),
    }
    values |= {"advantages": torch.tensor([[3.0]], dtype=torch.float64)}
    loss, _ = policy_loss(TokenBatch(**values), Grpo())
    assert torch.autograd.grad(loss, logprobs)[0].item() == pytest.approx(-3.0 * math.exp(0.5))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.28, 1.0, -1.28, 0),
        (1.5, 1.0, -1.28, 1),
        (0.5, 1.0, -0.5, 0),
        (0.8, -1.0, 0.8, 0),
        (0.5, -1.0, 0.8, 1),
        (1.5, -1.0, 1.5, 0),
        (1.5, 0.0, 0.0, 0),
    ],
)
def test_clip_edges(ratio, advantage, expected, clipped):
    loss, metrics = one_token(Grpo(clip_low=0.2, clip_high=0.28), ratio, advantage)
    assert loss == pytest.approx(expected)
    assert metrics["clip_fraction"] == clipped
    assert metrics["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("kind", "high", "rollout", "weight", "cut"),
    [
        ("truncate", 2.0, -2.0, 2.0, 1),
        ("truncate", 4.0, -2.0, math.e, 0),
        ("truncate", 2.0, 0.0, 1 / math.e, 0),
        ("mask", 2.0, -2.0, 0.0, 1),
        ("mask", 4.0, -2.0, math.e, 0),
        ("mask", 2.0, 0.0, 0.0, 1),
        ("mask", 2.0, -0.5, math.exp(-0.5), 0),
        ("off", 2.0, -2.0, 1.0, 0),
    ],
)
def test_weight_of_one_token(kind, high, rollout, weight, cut):
    config = Grpo(correction=CorrectionConfig(kind=kind, high=high))
    loss, metrics = one_token(config, 1.0, 1.0, rollout_logprobs=rollout)
    assert loss == pytest.approx(-weight)
    assert metrics["correction_weight"] == pytest.approx(weight)
    assert metrics["correction_cut"] == cut
    assert metrics["rollout_ratio_max"] == pytest.approx(math.exp(-1 - rollout))
    assert metrics["rollout_inverse_ratio_max"] == pytest.approx(math.exp(1 + rollout))
    assert (
        metrics["train_rollout_logprob_abs_diff"]
        == metrics["train_rollout_logprob_max"]
        == abs(-1 - rollout)
    )


def test_a_response_is_masked_as_a_whole_and_still_counts():
    """Ratios e^0.4 and e^0.4: each is inside of [0.5, 2], their product is not; the other response
    is e^0.3 e^-0.3."""
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    difference = torch.tensor([[0.4, 0.4], [0.3, -0.3]], dtype=torch.float64)
    values = dict.fromkeys(NAMES, old)
    values |= {
        "rollout_logprobs": old - difference,
        "advantages": torch.ones(2, 2),
        "mask": torch.ones(2, 2),
    }
    batch, config = (
        TokenBatch(**values),
        Grpo(correction=CorrectionConfig(kind="mask", level="sequence")),
    )
    loss, metrics = policy_loss(batch, config)
    assert loss.item() == pytest.approx(-2.0)
    assert (metrics["weight"], metrics["correction_cut"]) == (4, 2)
    assert metrics["rollout_ratio_max"].item() == pytest.approx(math.exp(0.8))
    by_token, counts = policy_loss(batch, Grpo(correction=CorrectionConfig(kind="mask")))
    assert by_token.item() == pytest.approx(-2 * math.exp(0.4) - math.exp(0.3) - math.exp(-0.3))
    assert counts["correction_cut"] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_ratio_that_is_not_a_number_is_masked(level, value):
    batch = random_batch(2, 3, seed=3)
    batch.mask[:] = 1
    batch.rollout_logprobs[:] = batch.old_logprobs
    batch.rollout_logprobs[0, 1] = value
    batch.logprobs.requires_grad_()
    loss, _ = policy_loss(batch, Grpo(correction=CorrectionConfig(kind="mask", level=level)))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert not (gradient[0] if level == "sequence" else gradient[0, 1]).any() and gradient[1].any()


def test_log_ratios_of_long_responses_are_cut_after_their_sum():
    old = torch.zeros(3, 1000, dtype=torch.float32)
    rollout = old - torch.tensor([[1.0], [-1.0], [0.0]])
    rollout[2, :500] = 30.0
    rollout[2, 500:] = -30.0
    found = correction(old, rollout, CorrectionConfig(level="sequence", high=1e30))
    assert found.ratio[:, 0].tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])
    assert torch.equal(found.weight, found.ratio) and not found.cut.any()


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20))
def test_effective_share(weights):
    """1 for equal weights, k/n if k of n are equal and the others 0, never more than 1 whatever
    they are."""
    n = len(weights)
    share = effective_share(sum(weights) / n, sum(w * w for w in weights) / n)
    assert 0.0 <= share <= 1 + 1e-9
    assert effective_share(1.0, 1.0) == 1.0 and effective_share(0.0, 0.0) == 0.0
    assert effective_share(3 * 2.0 / 4, 3 * 4.0 / 4) == pytest.approx(0.75)


def test_reference_kl_is_reported_without_entering_the_loss():
    loss, metrics = one_token(Grpo(), 1.0, 0.0, ref_logprobs=-1.5)
    assert loss == 0
    assert metrics["kl/reference"] == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert "kl/reference" not in one_token(Grpo(), 1.0, 0.0)[1]


def test_far_log_ratios_stay_finite_in_float32():
    values = dict.fromkeys(NAMES, torch.full((1, 2), -1.0))
    values |= {
        "logprobs": torch.tensor([[-1.0, -300.0]]),
        "old_logprobs": torch.tensor([[-300.0, -1.0]]),
    }
    values |= {"mask": torch.ones(1, 2)}
    loss, metrics = policy_loss(TokenBatch(**values), Grpo(kl=KlConfig(coefficient=0.1)))
    assert all(torch.isfinite(value) for value in (loss, *metrics.values()))


def test_a_batch_without_chosen_tokens_is_zero_and_differentiable():
    batch = random_batch(2, 3, seed=0).replace(mask=torch.zeros(2, 3))
    batch.logprobs.requires_grad_()
    loss, metrics = policy_loss(
        batch, Grpo(reduction="sequence_mean", kl=KlConfig(coefficient=0.1))
    )
    loss.backward()
    assert not batch.logprobs.grad.any()
    assert all(value == 0 for value in metrics.values())


def test_missing_inputs_and_wrong_shapes_are_named():
    batch = random_batch(2, 3, seed=0)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        policy_loss(batch.replace(ref_logprobs=None), Grpo(kl=KlConfig(coefficient=0.1)))
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss(batch.replace(entropy=None), Grpo(entropy_coefficient=0.1))
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), the mask \(2, 3\)"):
        policy_loss(batch.replace(advantages=torch.zeros(2)), Grpo())


def test_mean_metrics():
    totals = {
        "weight": 2.0,
        "tokens": 8.0,
        "episodes": 2.0,
        "loss/policy": 4.0,
        "ratio": 6.0,
        "x_max": 3.0,
    }
    means = mean_metrics(totals)
    assert (means["loss/policy"], means["ratio"], means["x_max"], means["tokens"]) == (
        2.0,
        0.75,
        3.0,
        8.0,
    )


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_find_the_divergence_of_two_categoricals(name):
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    expected = (q.exp() * (q - p)).sum()
    estimate = (q.exp() * KL_ESTIMATORS[name](p, q)).sum()
    assert estimate.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("name", "right"), [("k1", False), ("k2", True)])
def test_which_estimator_has_the_gradient_of_the_divergence(name, right):
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logits = torch.tensor([0.1, 0.9, -0.3], dtype=torch.float64, requires_grad=True)
    q = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((q.detach().exp() * KL_ESTIMATORS[name](p, q)).sum(), logits)
    assert torch.allclose(found, exact) == right


rewards = (
    st.integers(2, 8)
    .flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-100, 100), min_size=n, max_size=n), min_size=1, max_size=5
        )
    )
    .map(lambda rows: np.array(rows) / 16)
)


BASELINES = {"grpo": Grpo(), "dr_grpo": DrGrpo(), "rloo": Rloo()}


def advantages(values: np.ndarray, kind: str) -> np.ndarray:
    """By the rewards [prompts, episodes] of rows of two trained tokens."""
    mask = np.array([0, 1, 1], np.uint8)
    prompts = [[[{"reward": reward, "loss_mask": mask}] for reward in line] for line in values]
    made = BASELINES[kind].token_advantages(prompts)
    found = BASELINES[kind].advantages(np.array(values, np.float64), np.full(np.shape(values), 2))
    assert [row.tolist() for row in made] == [
        [0.0, np.float32(one), np.float32(one)] for one in found.flat
    ]
    return found


@given(rewards, st.sampled_from(sorted(BASELINES)))
def test_advantages_have_mean_zero_ignore_shifts_and_keep_order(values, kind):
    found = advantages(values, kind)
    assert found.shape == values.shape
    assert found.mean(axis=1) == pytest.approx(0, abs=1e-9)
    assert advantages(values + 3.5, kind) == pytest.approx(found, abs=1e-9)
    assert (np.sign(found[:, :1] - found) == np.sign(values[:, :1] - values)).all()


@given(rewards)
def test_how_advantages_scale(values):
    assert advantages(values * 8, "grpo") == pytest.approx(advantages(values, "grpo"), abs=1e-3)
    for kind in ("dr_grpo", "rloo"):
        assert advantages(values * 8, kind) == pytest.approx(8 * advantages(values, kind), abs=1e-9)


@pytest.mark.parametrize("kind", sorted(BASELINES))
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e30])
def test_equal_rewards_give_exactly_zero(kind, value):
    assert not advantages(np.full((2, 3), value), kind).any()


def test_advantages_in_closed_form():
    values = np.array([[0.0, 1.0, 1.0, 4.0]])
    std = math.sqrt(((1.5**2) + 2 * 0.5**2 + 2.5**2) / 3)
    assert advantages(values, "dr_grpo")[0] == pytest.approx([-1.5, -0.5, -0.5, 2.5])
    assert advantages(values, "grpo")[0] == pytest.approx(
        np.array([-1.5, -0.5, -0.5, 2.5]) / std, rel=1e-5
    )
    assert advantages(values, "rloo")[0] == pytest.approx([0 - 2, 1 - 5 / 3, 1 - 5 / 3, 4 - 2 / 3])


def test_advantages_refuse_what_they_cannot_use():
    def prompt(*rewards: float) -> list:
        return [[{"reward": reward}] for reward in rewards]

    with pytest.raises(ValueError, match="shape"):
        rewards_of([prompt(0.0)] * 3)
    with pytest.raises(ValueError):
        rewards_of([prompt(0.0, 1.0), prompt(0.0, 1.0, 2.0)])
    with pytest.raises(ValueError, match="finite"):
        rewards_of([prompt(0.0, math.nan)])


def test_an_advantage_is_spread_over_what_is_trained_on():
    found = spread(-0.5, np.array([0, 1, 1, 0], dtype=np.uint8))
    assert found.dtype == np.float32
    assert found.tolist() == [0, -0.5, -0.5, 0]


def test_algorithms_load_neither_torch_nor_the_configuration():
    code = """
import importlib, pkgutil, sys, relax_hpc.algorithms
from tests.effort import effort
for module in pkgutil.iter_modules(relax_hpc.algorithms.__path__, "relax_hpc.algorithms."):
    importlib.import_module(module.name)
print([name for name in sys.modules if name == "torch" or name.startswith("relax_hpc.config")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


def test_advantages_that_are_no_numbers_are_a_mistake_of_the_algorithm() -> None:
    """What would be refused, and made again by every incarnation, ends the run at once."""
    rows = [{"row_id": f"000000003.0{k}.00", "reward": 1.0} for k in range(2)]
    made = [
        {"row_id": row["row_id"], "advantages": np.array([0.0, k and math.nan])}
        for k, row in enumerate(rows)
    ]
    require_finite(rows[:1], made[:1], Algorithm(name="mine"))
    with pytest.raises(
        ConfigError, match=r"mine gives advantages that are not finite, for row 0+3\.01"
    ):
        require_finite(rows, made, Algorithm(name="mine"))
