"""verl: the functions of its core_algos, and the weights of its rollout correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from cases import TOKENS, Answer, Case, Comparison, our_advantages, our_loss, with_gradient
from torch import Tensor

from relax_hpc.algorithms import (
    Algorithm,
    Cispo,
    DrGrpo,
    DualClip,
    Grpo,
    Gspo,
    Ppo,
    ReinforcePP,
    ReinforcePPBaseline,
    Rloo,
    Sapo,
)
from relax_hpc.algorithms.base import CorrectionConfig
from relax_hpc.algorithms.correction import correction
from relax_hpc.algorithms.kl import KL_ESTIMATORS
from relax_hpc.algorithms.values import clipped_value_loss

MODULE = "verl.trainer.ppo.core_algos"
OFF = CorrectionConfig(kind="off")
PARTS = {"correction": OFF, "clip_low": 0.2, "clip_high": 0.28}
NO_CAP = 1e30
SINGLE = 1e-6
"""Advantages are stored in float32."""
GAMMA, LAMBDA = 0.99, 0.95
COUNT = "theirs divides by the count + 1e-8"


def comparisons() -> Iterator[Comparison]:
    """Of all advantages, losses, divergences and weights that both have."""
    yield from of_advantages()
    yield from of_losses()
    yield from of_parts()


def of_advantages() -> Iterator[Comparison]:
    for algorithm, name, settings in [
        (Grpo(), "grpo", {"norm_adv_by_std_in_grpo": True}),
        (DrGrpo(), "grpo", {"norm_adv_by_std_in_grpo": False}),
        (Rloo(), "rloo", {}),
        (ReinforcePPBaseline(), "reinforce_plus_plus_baseline", {}),
    ]:
        theirs = their_advantages(name, settings)
        yield Comparison(
            algorithm.name, "advantages", our_advantages(algorithm), theirs, SINGLE, "float32"
        )
    for penalty in (0.0, 0.1):
        ours = our_advantages(ReinforcePP(kl_in_reward=penalty), holes=False)
        what = "advantages, KL in the reward" if penalty else "advantages"
        yield Comparison(
            "reinforce_pp",
            what,
            ours,
            their_returns(penalty),
            SINGLE,
            "float32; theirs end at holes",
        )
    ours = our_advantages(Ppo(gamma=GAMMA, gae_lambda=LAMBDA))
    yield Comparison("ppo", "generalized advantages, whitened", ours, their_gae, SINGLE, "float32")


def of_losses() -> Iterator[Comparison]:
    pairs: list[tuple[str, Algorithm, str, dict[str, Any], str]] = [
        ("mean over tokens", Grpo(**PARTS), "vanilla", {"clip_ratio_c": NO_CAP}, "token-mean"),
        (
            "constant normaliser",
            Grpo(**PARTS, reduction="constant", constant_tokens=TOKENS),
            "vanilla",
            {"clip_ratio_c": NO_CAP},
            "seq-mean-token-sum-norm",
        ),
        ("loss", DualClip(**PARTS), "vanilla", {"clip_ratio_c": 3.0}, "token-mean"),
        ("loss", Cispo(**PARTS), "cispo", {}, "token-mean"),
    ]
    for what, algorithm, name, settings, mean in pairs:
        yield Comparison(
            algorithm.name, what, our_loss(algorithm), their_loss(name, mean, **settings)
        )
    over_responses: list[tuple[str, Algorithm, str, dict[str, Any]]] = [
        (
            "mean over responses",
            Grpo(**PARTS, reduction="sequence_mean"),
            "vanilla",
            {"clip_ratio_c": NO_CAP},
        ),
        ("loss", Gspo(**PARTS), "gspo", {}),
        ("loss", Sapo(correction=OFF), "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ]
    for what, algorithm, name, settings in over_responses:
        theirs = their_loss(name, "seq-mean-token-mean", **settings)
        yield Comparison(algorithm.name, what, our_loss(algorithm), theirs, 1e-7, COUNT)


def of_parts() -> Iterator[Comparison]:
    for name in ("k1", "k2", "k3"):
        yield Comparison("all", f"KL {name}", our_kl(name), their_kl(name))
    for level in ("token", "sequence"):
        ours = our_weights(CorrectionConfig(kind="truncate", level=level, high=2.0))
        yield Comparison("all", f"weights, truncate, {level}", ours, their_weights(level, 2.0))
    ours = our_weights(CorrectionConfig(kind="mask", low=0.5, high=2.0))
    yield Comparison("all", "weights, mask, token", ours, their_weights("token", "0.5_2.0"))
    yield Comparison("ppo", "loss of values", our_value_loss, their_value_loss)


# -- theirs ----------------------------------------------------------------------------------------


def token_rewards(case: Case, mask: Tensor) -> Tensor:
    """Rewards at the last trained token of each row."""
    last = TOKENS - 1 - mask.flip(1).argmax(1)
    return torch.zeros_like(mask).scatter(1, last[:, None], case.rewards[:, None])


def their_advantages(name: str, settings: dict[str, Any]) -> Answer:
    def answer(case: Case) -> Tensor:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        rewards = token_rewards(case, case.mask)
        return get_adv_estimator_fn(name)(rewards, case.mask, index=case.index, **settings)[0]

    return answer


def their_returns(penalty: float) -> Answer:
    def answer(case: Case) -> Tensor:
        from verl.trainer.ppo.core_algos import (
            compute_reinforce_plus_plus_outcome_advantage,
            compute_rewards,
        )

        rewards = compute_rewards(token_rewards(case, case.whole), case.old, case.ref, penalty)
        config = SimpleNamespace(gamma=1.0)
        return compute_reinforce_plus_plus_outcome_advantage(rewards, case.whole, config=config)[0]

    return answer


def their_gae(case: Case) -> Tensor:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    rewards = token_rewards(case, case.mask)
    found, _ = compute_gae_advantage_return(rewards, case.values, case.mask, GAMMA, LAMBDA)
    return found * case.mask


def their_loss(name: str, mean: str, **settings: Any) -> Answer:
    def answer(case: Case) -> Tensor:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import ActorConfig

        edges = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | settings
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **edges)
        function = get_policy_loss_fn(name)
        advantages = case.advantages.expand_as(case.mask)
        return with_gradient(
            lambda logprobs: function(case.old, logprobs, advantages, case.mask, mean, config)[0],
            case.logprobs,
        )

    return answer


def their_kl(name: str) -> Answer:
    def answer(case: Case) -> Tensor:
        from verl.trainer.ppo.core_algos import kl_penalty_forward

        return kl_with_gradient(lambda logprobs: kl_penalty_forward(logprobs, case.ref, name), case)

    return answer


def their_weights(level: str, threshold: float | str) -> Answer:
    def answer(case: Case) -> Tensor:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

        difference = case.old - case.rollout
        return (
            compute_rollout_correction_weights(difference, case.mask, level, threshold)[0]
            * case.mask
        )

    return answer


def their_value_loss(case: Case) -> Tensor:
    from verl.trainer.ppo.core_algos import compute_value_loss

    return with_gradient(
        lambda predicted: compute_value_loss(predicted, case.returns, case.values, case.mask, 0.2)[
            0
        ],
        case.predicted,
    )


# -- ours ------------------------------------------------------------------------------------------


def our_kl(name: str) -> Answer:
    def answer(case: Case) -> Tensor:
        def capped(logprobs: Tensor) -> Tensor:
            found = KL_ESTIMATORS[name](case.ref, logprobs)
            return found.clamp(-10.0, 10.0) if name == "k3" else found

        return kl_with_gradient(capped, case)

    return answer


def kl_with_gradient(function: Callable[[Tensor], Tensor], case: Case) -> Tensor:
    return torch.cat(
        [
            function(case.logprobs).reshape(-1),
            with_gradient(lambda x: function(x).sum(), case.logprobs)[1:],
        ]
    )


def our_weights(settings: CorrectionConfig) -> Answer:
    def answer(case: Case) -> Tensor:
        return (
            correction(case.old * case.mask, case.rollout * case.mask, settings).weight * case.mask
        )

    return answer


def our_value_loss(case: Case) -> Tensor:
    def mean(predicted: Tensor) -> Tensor:
        return (
            clipped_value_loss(predicted, case.values, case.returns, case.mask, 0.2)[0]
            / case.mask.sum()
        )

    return with_gradient(mean, case.predicted)
