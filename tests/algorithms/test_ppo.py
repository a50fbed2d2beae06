"""PPO: generalized advantages against sums written out, the value loss, and what a run with a
critic consists of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import Grpo, Ppo
from relax_hpc.algorithms.ppo import gae
from relax_hpc.algorithms.values import clipped_value_loss, explained_variance
from relax_hpc.config import load
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.plan.plan import plan
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_schema import Row
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.tiny_model import qwen3_config
from tests.requirements import requires
from tests.rollout.test_episodes import groups, whole_and_split

shares = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def written_out(
    rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float
) -> list[float]:
    """The sum of equation 16, each term by itself."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * later - v for r, later, v in zip(rewards, after, values, strict=True)]
    size = len(deltas)
    return [
        sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, size))
        for t in range(size)
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), shares, shares, st.integers(0, 2**31))
def test_advantages_are_the_sum_of_the_paper(lengths, gamma, gae_lambda, seed) -> None:
    draw = np.random.default_rng(seed)
    rewards, values = (
        np.stack([np.pad(draw.normal(size=n), (0, max(lengths) - n)) for n in lengths], axis=1)
        for _ in range(2)
    )
    found = gae(rewards, values, gamma, gae_lambda)
    for column, n in enumerate(lengths):
        expected = written_out(rewards[:n, column], values[:n, column], gamma, gae_lambda)
        assert found[:n, column] == pytest.approx(expected) and not found[n:, column].any()


def row_of(reward: float, mask: list[int], values: list[float], **more: list[float]) -> Row:
    """A row whose trained tokens are those that the policy drew, unless ``more`` has other
    `token_versions`."""
    arrays = {
        name: np.array(value, np.float32) for name, value in {"values": values, **more}.items()
    }
    masks = {"loss_mask": np.array(mask, np.uint8), "token_versions": np.array(mask, np.int32)}
    return {"reward": reward, **masks, **arrays}


def test_tokens_of_others_are_no_steps() -> None:
    """Values 1, 2, 4 of the trained tokens, lambda 0: A = V' - V, and R - V at the end; the
    observation between them, whatever the critic would say of it, counts for nothing, and the
    second row goes on where the first one ends."""
    first = row_of(10.0, [0, 1, 0, 1], [9, 1, 99, 2])
    second = row_of(10.0, [0, 1], [9, 4])
    other = row_of(0.0, [0, 1], [9, 0])
    algorithm = Ppo(gae_lambda=0.0, whiten=False)
    one, two, three = algorithm.given([[[first, second], [other]]])
    assert one["advantages"].tolist() == [0, 1, 0, 2] and two["advantages"].tolist() == [0, 6]
    assert one["returns"].tolist() == [0, 2, 0, 4] and two["returns"].tolist() == [0, 10]
    assert not three["advantages"].any()
    # With lambda 1 all returns are the reward.
    one, two, _ = Ppo(whiten=False).given([[[first, second], [other]]])
    assert one["returns"].tolist() == [0, 10, 0, 10] and one["advantages"].tolist() == [0, 9, 0, 8]


def test_a_token_pays_for_leaving_the_reference() -> None:
    ratio = {"rollout_logprobs": [0, -1, -1], "ref_logprobs": [0, -1.5, -1.25]}
    row = row_of(1.0, [0, 1, 1], [0, 0, 0], **ratio)
    other = row_of(0.0, [0, 1], [0, 0], rollout_logprobs=[0, -1], ref_logprobs=[0, -1])
    algorithm = Ppo(kl_in_reward=0.1, whiten=False)
    (made, _) = algorithm.given([[[row], [other]]])
    assert made["returns"] == pytest.approx([0, 1 - 0.1 * 0.75, 1 - 0.1 * 0.25])
    assert algorithm.needs == ("reward", "rollout_logprobs", "ref_logprobs", "values")


def test_tokens_that_are_drawn_and_not_trained_are_paid_for_by_the_one_before() -> None:
    """Divergences 0.5, 0.25, 0.125 and 1 of the tokens drawn, of which the first and third are
    trained; the fourth is in the second row. What is before the first trained token changes no
    return."""
    ratio = {"rollout_logprobs": [0, -1, -1, -1], "ref_logprobs": [0, -1.5, -1.25, -1.125]}
    first = row_of(1.0, [0, 1, 0, 1], [0] * 4, **ratio, token_versions=[0, 4, 4, 5])
    second = row_of(
        1.0, [0, 0], [0, 0], rollout_logprobs=[0, -1], ref_logprobs=[0, -2], token_versions=[0, 4]
    )
    fields, _ = Ppo(kl_in_reward=0.1, whiten=False).given([[[first, second]]])
    assert fields["returns"] == pytest.approx([0, 1 - 0.1 * 1.875, 0, 1 - 0.1 * 1.125])
    fields, _ = Ppo(kl_in_reward=0.1, whiten=False, gae_lambda=0.0).given([[[first, second]]])
    assert fields["advantages"] == pytest.approx([0, -0.1 * 0.75, 0, 1 - 0.1 * 1.125])
    (_, fields) = Ppo(kl_in_reward=0.1, whiten=False).given([[[second, first]]])
    assert fields["returns"] == pytest.approx([0, 1 - 0.1 * 0.875, 0, 1 - 0.1 * 0.125])


@settings(max_examples=20, deadline=None)
@given(groups)
def test_whitened_advantages_leave_returns_as_they_are(group) -> None:
    rows = whole_and_split(*group)[1]
    plain, white = (
        advantages_of(rows, Ppo(whiten=whiten, gae_lambda=0.9), seed=0) for whiten in (False, True)
    )
    mask = np.concatenate([row["loss_mask"] for row in rows]) > 0
    before, after = (
        np.concatenate([one["advantages"] for one in made])[mask] for made in (plain, white)
    )
    assert after == pytest.approx((before - before.mean()) / before.std(ddof=1), rel=1e-4, abs=1e-4)
    assert all(
        np.array_equal(a["returns"], b["returns"]) for a, b in zip(plain, white, strict=True)
    )


# -- the critic's loss -----------------------------------------------------------------------------


def test_a_value_that_moved_too_far_has_no_gradient() -> None:
    """Return 1, value 0 before, clip 0.2: at 0.5 the clipped one is worse and does not move; at 0.1
    both are the same; at -0.5, further from the return, there is no clip."""
    requires("torch")
    import torch

    predicted = torch.tensor([[0.5, 0.1, -0.5, 7.0]], dtype=torch.float64, requires_grad=True)
    zeros, mask = torch.zeros(1, 4).double(), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    returns = torch.tensor([[1.0, 1.0, 1.0, float("nan")]]).double()
    loss, metrics = clipped_value_loss(predicted, zeros, returns, mask, clip=0.2)
    assert loss.item() == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 2)
    (slopes,) = torch.autograd.grad(loss, predicted)
    assert slopes[0].tolist() == pytest.approx([0.0, -0.9, -1.5, 0.0])
    assert (metrics["clip_fraction"], metrics["weight"], metrics["value/error_square"]) == (1, 3, 3)
    free, _ = clipped_value_loss(predicted, zeros, returns, mask, clip=0.0)
    assert free.item() == pytest.approx((0.5**2 + 0.9**2 + 1.5**2) / 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 0.2]), st.integers(0, 2**31))
def test_the_value_loss_equals_a_sum_by_hand_and_its_gradient_finite_differences(
    rows, columns, clip, seed
) -> None:
    """compute_value_loss of verl, which takes means: half the mean of the larger square."""
    requires("torch")
    import torch

    draw = np.random.default_rng(seed)
    predicted, values, returns = (torch.tensor(draw.normal(size=(rows, columns))) for _ in range(3))
    mask = torch.tensor((draw.random((rows, columns)) < 0.7).astype(float))
    expected = 0.0
    for i, j in np.argwhere(mask.numpy()):
        new, old, aim = float(predicted[i, j]), float(values[i, j]), float(returns[i, j])
        held = min(max(new, old - clip), old + clip) if clip else new
        expected += max((new - aim) ** 2, (held - aim) ** 2) / 2
    loss, metrics = clipped_value_loss(predicted, values, returns, mask, clip)
    assert loss.item() == pytest.approx(expected) and metrics["loss/value"] == loss
    predicted.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda new: clipped_value_loss(new, values, returns, mask, clip)[0], (predicted,)
    )


def test_explained_variance_is_one_where_values_are_returns() -> None:
    means = {"value/error_square": 0.0, "value/return": 2.0, "value/return_square": 5.0}
    assert explained_variance(means) == 1.0
    assert explained_variance(means | {"value/error_square": 2.0}) == -1.0, "worse than their mean"
    assert explained_variance(means | {"value/return_square": 4.0}) == 0.0, (
        "there is nothing to explain"
    )


# -- a run with a critic ---------------------------------------------------------------------------


def test_ppo_brings_a_critic_that_scores_and_trains(tmp_path: Path) -> None:
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {"rollout.max_new_tokens": 5, "algorithm.name": "ppo"}
    config = load([], run)
    assert config.groups["critic"].roles == ["critic"] and check(config) == []
    tasks = Plan.from_config(config).tasks
    assert (tasks["critic_values"].needs, tasks["critic_values"].gives) == (
        ("token_ids",),
        ("values",),
    )
    assert tasks["advantages"].needs == ("reward", "values") and tasks["advantages"].gives == (
        "advantages",
        "returns",
    )
    for trainer in ("actor", "critic"):
        assert {"values", "returns", "advantages"} <= set(tasks[trainer].needs) and tasks[
            trainer
        ].gives == ()
    assert Plan.from_config(config).trainers == {"actor": "actor", "critic": "critic"}
    assert [Ppo(critic_warmup_steps=2).trains_policy(step) for step in range(3)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"groups.critic": None},
            "algorithm.name: found ppo, which needs field values, but its role critic is in no group",
        ),
        (
            {"algorithm.name": "grpo", "groups.critic": {"roles": ["critic"]}},
            "groups: found role critic with algorithm",
        ),
        ({"critic.parallel.data": 999}, "critic.parallel.data: found 999, allowed: at most 256"),
        ({"critic.kernels": "fused"}, "critic.kernels: found fused with model.device cpu"),
        ({"critic.megatron": {"nonsense": 1}}, "critic.megatron.nonsense: neither"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_critic_cannot_be_is_refused(tmp_path: Path, settings: dict, says: str) -> None:
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {"rollout.max_new_tokens": 5, "algorithm.name": "ppo"}
    (finding,) = check(load([], run | settings))
    assert finding.startswith(says)


def test_a_critic_has_the_memory_of_an_actor_that_publishes_nothing() -> None:
    config = load([], {"algorithm.name": "ppo", "model.device": "cuda", "critic.parallel.data": 2})
    found = {
        one.role: one
        for place in plan(config, spec_from_config(qwen3_config(config.model.tiny)))
        for one in place.footprints
    }
    assert found["critic"].resident == found["actor"].resident and found["critic"].gpus == 2
    assert "slabs" in found["actor"].pinned and "slabs" not in found["critic"].pinned


def test_grpo_has_no_use_for_values() -> None:
    assert Grpo().needs == ("reward",) and Grpo().trains_policy(0)
