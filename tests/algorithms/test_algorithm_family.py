"""GSPO, CISPO, dual clip, REINFORCE++ and KL off-policy: closed forms, finite differences, and
verl's formulas.

The formulas of verl are written here from its functions as of commit
b178a3cd56f58b2d502255daba591e92833930a7 (of verl/trainer/ppo/core_algos.py and
verl/utils/torch_functional.py), which each test names, and are none of its code.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

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
    algorithm_class,
)
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import fields_by
from relax_hpc.config import dump, load
from relax_hpc.config.load import gather, load_resolved
from relax_hpc.config.options import options
from relax_hpc.ops.checks.files import notes
from relax_hpc.ops.checks.settings import check
from relax_hpc.queue.plan import Plan
from tests.algorithms.test_algorithms import NAMES, random_batch
from tests.effort import effort

OFF = CorrectionConfig(kind="off")
LOSSES: list[Algorithm] = [
    Grpo(correction=OFF),
    DualClip(clip_cap=1.5, correction=OFF),
    Gspo(clip_low=0.2, clip_high=0.2, correction=OFF),
    Cispo(clip_high=0.5, correction=OFF),
    ReinforcePP(correction=OFF),
]
OWN = "tests.helpers.own_algorithm:Opo"


def one_row(advantage: float, logprobs: list[float], old: list[float]) -> TokenBatch:
    """A row of trained tokens, float64, on-policy but for the ratio."""
    new, before = (torch.tensor([values], dtype=torch.float64) for values in (logprobs, old))
    return TokenBatch(
        logprobs=new.requires_grad_(),
        old_logprobs=before,
        rollout_logprobs=before,
        advantages=torch.full_like(before, advantage),
        mask=torch.ones_like(before),
    )


def loss_and_gradient(
    algorithm: Algorithm, batch: TokenBatch
) -> tuple[float, list[float], dict[str, float]]:
    loss, metrics = algorithm.loss(batch)
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return (
        loss.item(),
        gradient[0].tolist(),
        {name: value.item() for name, value in metrics.items()},
    )


# -- closed forms ----------------------------------------------------------------------------------


def test_gspo_has_one_ratio_and_one_clip_for_a_response():
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
    # Pushed down, it is clipped below only, so not here.
    loss, gradient, _ = loss_and_gradient(Gspo(), one_row(-2.0, [-0.7, -2.1], old))
    assert loss == pytest.approx(2.0 * math.exp(0.1)) and gradient == pytest.approx(
        [math.exp(0.1)] * 2
    )


def test_cispo_keeps_the_gradient_of_every_token():
    """Ratios e, 1 and 1/e: weights are cut at 1.5, whichever sign the advantage has; none is
    without a gradient."""
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
def test_dual_clip_ends_what_a_token_may_cost(ratio, advantage, loss, slope, capped):
    found, (gradient,), metrics = loss_and_gradient(
        DualClip(), one_row(advantage, [math.log(ratio) - 20], [-20.0])
    )
    assert found == pytest.approx(loss) and gradient == pytest.approx(slope)
    assert metrics["algorithm/dual_clip_fraction"] == capped


def rows_of(rewards: list[list[float]], tokens: list[list[int]]) -> list:
    """[prompt][episode][row], a prompt token before as many trained ones as said."""
    return [
        [
            [
                {"reward": reward}
                | dict.fromkeys(
                    ("loss_mask", "token_versions"), np.array([0] + [1] * count, np.uint8)
                )
            ]
            for reward, count in zip(*line, strict=True)
        ]
        for line in zip(rewards, tokens, strict=True)
    ]


def test_reinforce_pp_normalises_over_the_tokens_of_the_step():
    """Rewards 0, 1, 1, 3 on 1, 2, 1, 4 tokens: mean 15 / 8, unbiased variance (39 - 15^2 / 8) /
    7."""
    made = ReinforcePP().token_advantages(rows_of([[0, 1], [1, 3]], [[1, 2], [1, 4]]))
    spread = math.sqrt((39 - 225 / 8) / 7)
    assert [len(row) for row in made] == [2, 3, 2, 5] and all(
        row.dtype == np.float32 and row[0] == 0 for row in made
    )
    for row, reward in zip(made, (0, 1, 1, 3), strict=True):
        assert row[1:] == pytest.approx((reward - 15 / 8) / spread, rel=1e-6)
    assert not any(
        row.any() for row in ReinforcePP().token_advantages(rows_of([[0.1] * 2] * 2, [[3, 5]] * 2))
    )
    assert not any(row.any() for row in ReinforcePP().token_advantages(rows_of([[1, 2]], [[0, 0]])))
    # Against their prompts' means the rewards are -0.5, 0.5, -1, 1: on a token each a mean of 0.
    (one, *_, last) = ReinforcePP(baseline="prompt").token_advantages(
        rows_of([[0, 1], [1, 3]], [[1, 1], [1, 1]])
    )
    assert (one[1], last[1]) == pytest.approx((-0.5 / math.sqrt(2.5 / 3), 1 / math.sqrt(2.5 / 3)))


def test_reinforce_pp_takes_a_kl_penalty_off_the_reward_of_each_token():
    """The penalty of a token counts for it and for all before it."""
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


# With no budget the edges of M2PO do not move either.
@pytest.mark.parametrize(
    "algorithm", [*LOSSES, Sapo(correction=OFF), M2po(budget=0.0)], ids=lambda one: one.name
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_gradients_equal_finite_differences(algorithm, reduction):
    """GSPO's stop-gradients leave the gradient of its value where a row has one advantage. Those of
    CISPO leave another one: there the weights are held at the edges, which do not move."""
    batch = random_batch(3, 4, seed=11)
    batch.advantages[:] = batch.advantages[:, :1]
    kl = KlConfig(coefficient=0.2, importance=True)
    held = dataclasses.replace(algorithm, reduction=reduction, constant_tokens=5, kl=kl)
    if isinstance(held, Cispo):
        held = dataclasses.replace(held, clip_low=0.0, clip_high=0.0)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return held.loss(batch.replace(logprobs=logprobs))[0]

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
def test_a_kl_weighed_by_importance_has_the_gradient_of_the_divergence_off_policy(
    estimator, learner
):
    """Exact sums over a categorical that is drawn by an engine, scored by an old policy, and
    trained by another. The weight of the policy's loss, which the correction may cut or mask, has
    no part in it."""
    rollout, old, ref = (
        torch.tensor(p, dtype=torch.float64).log()
        for p in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.2, 0.2, 0.6])
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
                name: one[None, None, token]
                for name, one in (("logprobs", policy), ("old_logprobs", old))
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
def test_a_divergence_by_k1_is_capped_on_both_sides(sign):
    """Log-ratio +-3 with a cap of 0.5: its value is the cap, and its gradient that of the weight
    alone."""
    kl = KlConfig(coefficient=1.0, estimator="k1", importance=True, cap=0.5)
    batch = one_row(0.0, [-1.0], [-1.0]).replace(
        ref_logprobs=torch.full((1, 1), -1.0 - 3 * sign).double()
    )
    loss, (gradient,), _ = loss_and_gradient(Grpo(kl=kl), batch)
    assert (loss, gradient) == pytest.approx((0.5 * sign, 0.5 * sign))


def test_a_divergence_that_is_far_off_has_no_gradient():
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


def verl_loss(algorithm: Grpo, x: TokenBatch) -> float:
    """The mean loss of a batch by verl's formulas, token by token."""
    total, weight, rows = 0.0, 0, 0
    for i in range(len(x.mask)):
        chosen = [j for j in range(x.mask.shape[1]) if x.mask[i, j]]
        logs = [float(x.logprobs[i, j] - x.old_logprobs[i, j]) for j in chosen]
        losses = [
            verl_token(
                algorithm,
                log,
                sum(logs) / len(logs),
                float(x.advantages[i, j]),
                float(x.logprobs[i, j]),
            )
            for j, log in zip(chosen, logs, strict=True)
        ]
        # agg_loss: "token-mean" and "seq-mean-token-mean".
        total += (
            sum(losses) / len(losses)
            if losses and algorithm.reduction == "sequence_mean"
            else sum(losses)
        )
        weight, rows = weight + len(losses), rows + bool(losses)
    return total / max(rows if algorithm.reduction == "sequence_mean" else weight, 1)


def verl_token(algorithm: Grpo, log: float, mean: float, advantage: float, logprob: float) -> float:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = math.exp(min(max(mean if isinstance(algorithm, Gspo) else log, -20), 20))
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
    """compute_policy_loss_vanilla (clip_ratio_c infinite for all but dual clip), _gspo and _cispo
    with agg_loss. Of GSPO verl cuts the log-ratio at 10, not 20, and takes sequence means alone."""
    algorithm, batch = (
        dataclasses.replace(algorithm, reduction=reduction),
        random_batch(rows, columns, seed),
    )
    loss, metrics = algorithm.loss(batch)
    found = loss.item() / max(metrics["weight"].item(), 1.0)
    assert found == pytest.approx(verl_loss(algorithm, batch), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_it_makes_no_difference_which_rank_or_micro_batch_has_a_row(name, reduction):
    """Loss and metrics of all rows are the sums of those of each, or of each pair."""
    algorithm = ALGORITHMS[name](reduction=reduction, constant_tokens=9)
    batch = random_batch(5, 6, seed=4)
    values = {name: value for name in NAMES if (value := getattr(batch, name)) is not None}
    size = max(algorithm.sequences, 1)
    rows = [
        TokenBatch(**{name: value[i : i + size] for name, value in values.items()})
        for i in range(0, 5, size)
    ]
    loss, metrics = algorithm.loss(batch)
    parts = [algorithm.loss(row) for row in rows]
    assert sum(part for part, _ in parts).item() == pytest.approx(loss.item())
    for metric, value in metrics.items():
        combine = max if metric.endswith("_max") else sum
        assert combine(part[metric].item() for _, part in parts) == pytest.approx(
            value.item(), abs=1e-12
        )


def verl_whitened(returns: list[np.ndarray]) -> list[np.ndarray]:
    """masked_whiten: mean and unbiased variance over the mask, 1 / sqrt(var + 1e-8)."""
    count = sum(map(len, returns))
    mean = sum(float(part.sum()) for part in returns) / count
    var = sum(float(((part - mean) ** 2).sum()) for part in returns) / (count - 1)
    return [(part - mean) / math.sqrt(var + 1e-8) for part in returns]


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
    rewards, tokens = (
        [[r for r, _ in line] for line in groups],
        [[n for _, n in line] for line in groups],
    )
    if len({r for line in rewards for r in line}) == 1:
        return
    for baseline in ("none", "prompt"):
        means = [sum(line) / 3 if baseline == "prompt" else 0.0 for line in rewards]
        returns = [
            np.full(n, r - mean, float)
            for line, counts, mean in zip(rewards, tokens, means, strict=True)
            for r, n in zip(line, counts, strict=True)
        ]
        made = ReinforcePP(baseline=baseline).token_advantages(rows_of(rewards, tokens))
        for row, expected in zip(made, verl_whitened(returns), strict=True):
            assert row[1:] == pytest.approx(expected, rel=1e-5, abs=1e-5)


# -- configuration and plan ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALGORITHMS, OWN])
def test_a_name_chooses_the_class_and_its_settings(tmp_path: Path, name: str):
    config = load([], {"algorithm.name": name, "algorithm.passes": 3})
    assert type(config.algorithm) is algorithm_class(name) and config.algorithm.name == name
    path = tmp_path / "config.yaml"
    dump(config, path)
    assert load([path]) == config and load([path]).algorithm == config.algorithm
    assert list(config.algorithm.findings()) == []


def test_another_name_takes_what_all_algorithms_have_and_refuses_the_rest(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm:\n  passes: 2\n  kl: {coefficient: 0.1}\n  clip_low: 0.2\n")
    layers = gather([path], {"algorithm.name": "gspo"})
    assert [mistake.text for mistake in layers.mistakes] == [
        f"{path}:4: algorithm.clip_low: set for grpo, but command line names gspo; set it there "
        "too, or remove it here"
    ]
    config = load([path], {"algorithm.name": "gspo", "algorithm.clip_low": 1e-3})
    algorithm = config.algorithm
    assert isinstance(algorithm, Gspo) and (algorithm.clip_low, algorithm.clip_high) == (1e-3, 4e-4)
    assert (algorithm.passes, algorithm.kl.coefficient, algorithm.reduction) == (
        2,
        0.1,
        "sequence_mean",
    )
    assert "groups.reference" not in layers.sources and "reference" in config.groups


def test_a_class_of_ones_own_has_settings_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = load([], {"algorithm": {"name": OWN, "scale": 2.0}})
    assert config.algorithm.scale == 2.0 and "actor_fwd" not in config.groups
    with pytest.raises(
        ConfigError, match=r"algorithm\.scal: unknown key, allowed: name, .*; did you mean scale\?"
    ):
        load([], {"algorithm": {"name": OWN, "scal": 2.0}})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {name: 'no.such:Thing', its_own: 3, passes: 2}")
    gone = load_resolved(run)
    assert gone.algorithm.passes == 2 and set(gone.groups) == {"hub", "rollout", "actor"}, (
        "status can be asked"
    )
    says = "algorithm.name: 'no.such:Thing': importing 'no.such' failed: ModuleNotFoundError"
    assert any(finding.startswith(says) for finding in check(gone))
    for wrong, why in (
        ("tests.helpers.own_algorithm:bounded", "found no class derived"),
        ("tests.algorithms.test_algorithm_family:Plain", "@data"),
        (
            "relax_hpc.algorithms:Algorithm",
            "does not override advantages or token_advantages or given; define one",
        ),
        (
            "tests.algorithms.test_algorithm_family:Bare",
            "the setting mine has no default; give it one",
        ),
        (
            "tests.algorithms.test_algorithm_family:Lossless",
            "does not override token_losses or loss; define one",
        ),
    ):
        (finding,) = load([], {"algorithm.name": wrong}).algorithm.findings()
        assert why in finding
    with pytest.raises(ConfigError, match="failed"):
        gone.algorithm.token_advantages([])


class Lossless(Algorithm):
    advantages = Grpo.advantages


@dataclasses.dataclass(kw_only=True)
class Bare(Grpo):
    mine: int


class Plain(Grpo):
    """Has a setting, and is no dataclass."""

    mine: int = 3


def test_a_kl_whose_gradient_is_zero_is_refused():
    config = load([], {"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k1"})
    (finding,) = config.algorithm.findings()
    assert finding.startswith("kl.estimator: found k1 with a coefficient")
    config.algorithm.kl.importance = True
    assert list(config.algorithm.findings()) == []


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ({}, set()),
        ({"algorithm.passes": 2}, {"actor_fwd"}),
        ({"max_staleness": 1}, set()),
        ({"max_staleness": 1, "groups.actor_fwd": {}}, {"actor_fwd"}),
        ({"max_staleness": 4, "algorithm.mini_batches": 2}, set()),
        ({"algorithm.kl.coefficient": 0.1}, {"reference"}),
        (
            {"algorithm": {"name": "reinforce_pp", "kl_in_reward": 0.1, "passes": 2}},
            {"actor_fwd", "reference"},
        ),
        ({"algorithm.name": OWN, "algorithm.passes": 2, "max_staleness": 4}, set()),
        ({"algorithm.passes": 2, "actor.forward": ["actor_fwd"]}, set()),
    ],
    # A set is in another order in each process.
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_the_roles_that_score_are_those_that_the_algorithm_needs(overrides, roles):
    config = load([], overrides)
    assert set(config.groups) == {"hub", "rollout", "actor"} | roles
    tasks = Plan.from_config(config).tasks
    scores = {name for role in roles for name in fields_by(role)}
    assert set(tasks["actor"].needs) == {"token_ids", "reward", "advantages"} | scores
    assert tasks["advantages"].needs == config.algorithm.needs
    assert tasks["advantages"].whole_step == (config.algorithm.name == "reinforce_pp")


@pytest.mark.parametrize(
    ("overrides", "forward"),
    [
        ({}, []),
        ({"algorithm.passes": 1}, []),
        ({"algorithm.passes": 2}, ["actor_fwd"]),
        ({"algorithm.mini_batches": 4, "weights.publish_every": 3}, ["actor_fwd"]),
        ({"algorithm": {"name": "ppo", "passes": 2}}, ["actor_fwd"]),
        ({"algorithm": {"name": "ppo"}}, []),
        ({"algorithm.passes": 2, "actor.forward": ["reference"]}, ["reference", "actor_fwd"]),
        ({"algorithm.passes": 2, "groups.actor_fwd": {}}, []),
        ({"algorithm.passes": 2, "groups.actor_fwd.resources.nodes": 2}, []),
        ({"algorithm.passes": 2, "groups.actor_fwd": None}, []),
        ({"algorithm": {"name": "m2po", "passes": 2}}, []),
        ({"algorithm": {"name": "distill", "passes": 2, "teacher_top_k": 4}}, []),
    ],
)
def test_with_stale_rows_the_clip_is_around_the_newest_policy(overrides, forward, tmp_path):
    """The newest denominator is the policy before the step. With one update that is the trained
    policy itself; with several the actor scores the rows before the first. A group's scores are
    older, so there is such a group only if a layer names it."""
    config = load([], {"max_staleness": 4} | overrides)
    assert config.actor.forward == forward
    is_group_asked = any(
        key.startswith("groups.actor_fwd") and value is not None for key, value in overrides.items()
    )
    assert ("actor_fwd" in config.groups) == is_group_asked
    if config.algorithm.name != "m2po":
        correction = config.algorithm.correction
        assert (correction.kind, correction.level) == ("truncate", "token")
    dump(config, tmp_path / "config.yaml")
    assert load([tmp_path / "config.yaml"]) == config, "a run that is resumed keeps its roles"


@pytest.mark.parametrize(
    ("overrides", "instead"),
    [
        ({"max_staleness": 1, "algorithm.passes": 2}, "actor: {forward: [actor_fwd]}"),
        ({"max_staleness": 1}, "with one update per step the policy itself is the newest"),
        ({"algorithm.passes": 2}, ""),
    ],
)
def test_a_group_whose_scores_are_older_than_the_policy_is_noted(overrides, instead):
    config = load(
        [],
        {"data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits", "groups.actor_fwd": {}}
        | overrides,
    )
    warnings = [
        note
        for note in notes(config)
        if note.startswith("groups.actor_fwd.roles: found actor_fwd with")
    ]
    assert bool(warnings) == bool(instead) and all(instead in note for note in warnings)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"name": "reinforce_pp", "kl_in_reward": 0.1},
            "needs field ref_logprobs, but its role reference is in no group",
        ),
        (
            {"name": "tests.algorithms.test_algorithm_family:Needy"},
            "needs field judgement, which no role produces",
        ),
    ],
)
def test_what_nobody_gives_is_a_finding(tmp_path: Path, overrides: dict[str, object], says: str):
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {"rollout.max_new_tokens": 5}
    (finding,) = check(load([], {"algorithm": overrides, "actor.forward": ["reference"]} | run))
    assert finding.startswith("algorithm.name: found ") and says in finding
    assert check(load([], {"algorithm": {"name": "reinforce_pp", "kl_in_reward": 0.1}} | run)) == []


@dataclasses.dataclass(kw_only=True)
class Needy(Grpo):
    """Looks at what nobody makes, and has a setting of a type that the schema has not."""

    needs = ("reward", "judgement")
    few: tuple[int, int] | None = None


def test_options_say_which_algorithms_have_them():
    found = {option.key: option for option in options() if option.key.startswith("algorithm.")}
    assert found["algorithm.clip_cap"].help.endswith("[at least 1.0] (dual_clip)")
    assert "(" not in found["algorithm.passes"].help and found["algorithm.kl.cap"].default == 10.0
