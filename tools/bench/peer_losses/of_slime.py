"""slime: the functions of its ppo_utils, without the compilation that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from cases import Answer, Case, Comparison, our_advantages, our_loss, with_gradient
from torch import Tensor

from relax_hpc.algorithms import Cispo, DualClip, Grpo, Gspo, ReinforcePP, ReinforcePPBaseline
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig

MODULE = "slime.utils.ppo_utils"
PARTS = {"correction": CorrectionConfig(kind="off"), "clip_low": 0.2, "clip_high": 0.28}
SINGLE = 1e-6


def comparisons() -> Iterator[Comparison]:
    """Of losses, divergences and returns that both have; means over tokens and whitening are other
    code of its."""
    clipped = {"eps_clip": 0.2, "eps_clip_high": 0.28}
    yield Comparison("grpo", "loss", our_loss(Grpo(**PARTS)), their_loss(**clipped))
    yield Comparison(
        "dual_clip", "loss", our_loss(DualClip(**PARTS)), their_loss(**clipped, eps_clip_c=3.0)
    )
    yield Comparison("cispo", "loss", our_loss(Cispo(**PARTS)), their_cispo)
    gspo = Gspo(**PARTS, reduction="token_mean")
    yield Comparison("gspo", "loss, mean over tokens", our_loss(gspo), their_gspo)
    kl = KlConfig(coefficient=0.1, cap=0.0)
    with_kl = Grpo(**PARTS, kl=kl)
    yield Comparison(
        "grpo",
        "loss with KL k3",
        our_loss(with_kl),
        their_loss(**clipped, kl="k3"),
        SINGLE,
        "float32",
    )
    ours = our_advantages(ReinforcePP(kl_in_reward=0.1))
    yield Comparison(
        "reinforce_pp", "advantages, KL in the reward", ours, their_returns, SINGLE, "float32"
    )
    ours = our_advantages(ReinforcePPBaseline())
    yield Comparison("reinforce_pp_baseline", "advantages", ours, their_baseline, SINGLE, "float32")


def mean_over_tokens(function: Callable[[Tensor], Tensor], case: Case) -> Tensor:
    return with_gradient(
        lambda logprobs: (function(logprobs) * case.mask).sum() / case.mask.sum(), case.logprobs
    )


def their_loss(kl: str = "", **settings: float) -> Answer:
    def answer(case: Case) -> Tensor:
        from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss

        def losses(logprobs: Tensor) -> Tensor:
            advantages = case.advantages.expand_as(logprobs)
            found = compute_policy_loss(case.old - logprobs, advantages, **settings)[0]
            return found + 0.1 * compute_approx_kl(logprobs, case.ref, kl) if kl else found

        return mean_over_tokens(losses, case)

    return answer


def their_cispo(case: Case) -> Tensor:
    from slime.utils.ppo_utils import compute_cispo_loss

    advantages = case.advantages.expand_as(case.mask)
    return mean_over_tokens(
        lambda logprobs: compute_cispo_loss(case.old - logprobs, logprobs, advantages, 0.2, 0.28)[
            0
        ],
        case,
    )


def their_gspo(case: Case) -> Tensor:
    from slime.utils.ppo_utils import compute_gspo_kl, compute_policy_loss

    def losses(logprobs: Tensor) -> Tensor:
        found = compute_gspo_kl(list(logprobs), list(case.old), list(logprobs), list(case.mask))
        advantages = case.advantages.expand_as(logprobs).reshape(-1)
        return compute_policy_loss(found, advantages, 0.2, 0.28)[0].reshape(logprobs.shape)

    return mean_over_tokens(losses, case)


def their_returns(case: Case) -> Tensor:
    from slime.utils.ppo_utils import get_reinforce_plus_plus_returns

    lengths = [case.mask.shape[1]] * len(case.mask)
    kl = list((case.old - case.ref) * case.mask)
    found = get_reinforce_plus_plus_returns(
        case.rewards, kl, list(case.mask), lengths, lengths, 0.1, 1.0
    )
    return whitened(torch.stack(found), case.mask)


def their_baseline(case: Case) -> Tensor:
    from slime.utils.ppo_utils import get_reinforce_plus_plus_baseline_advantages

    by_prompt = case.rewards.reshape(-1, (case.index == 0).sum())
    centred = (by_prompt - by_prompt.mean(1, keepdim=True)).reshape(-1)
    found = get_reinforce_plus_plus_baseline_advantages(
        centred, list(case.ref), list(case.mask), 0.0
    )
    return whitened(torch.stack(found), case.mask)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """With mean 0 and unbiased variance 1 over tokens with mask 1, as by either side; 0
    elsewhere."""
    kept = values[mask > 0]
    return (values - kept.mean()) / (kept.var() + 1e-8).sqrt() * mask
