"""On-policy distillation: the policy samples responses, and a teacher scores each token or names
the tokens that it finds most likely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row, rows_of
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Distill(Grpo):
    """On-policy distillation: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, where all data are
    samples of the student.

    With `teacher_top_k` 0 only the sampled tokens are used. The advantage of a token is log(teacher
    / rollout), the negative of k1. In expectation, and without the effect of a token on later
    tokens, its policy gradient is the gradient of -KL(policy || teacher).

    With `teacher_top_k` k the divergence itself, over the teacher's k most likely tokens and all
    other tokens as one event, is a term of the loss at every token, as in GKD. It has no policy
    gradient.

    `reward_weight` times GRPO's advantage is added. The loss of advantages is GRPO's clipped loss.
    """

    name: str = "distill"
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Divergence that training minimizes. `reverse`: KL(policy || teacher); the policy uses only
    tokens that the teacher finds likely. `forward`: KL(teacher || policy); the policy covers all
    tokens that the teacher finds likely. `jsd`: the generalized Jensen-Shannon divergence, between
    the two. `forward` and `jsd` need `teacher_top_k`."""
    beta: float = bounded(0.5, 0.0, 1.0)
    """Weight of the teacher in the mixture of `jsd`. Near 0 the divergence is the forward
    divergence times beta; near 1 it is the reverse divergence times 1 - beta."""
    teacher_top_k: int = bounded(0, 0, 1024)  # type: ignore[misc]  # a setting here
    """Number of the teacher's most likely tokens, with log-probabilities, that it gives for each
    token of a row; each takes 8 bytes. With 0 the teacher scores only the sampled tokens."""
    reward_weight: float = bounded(0.0, 0.0)
    """Weight of the advantage from rewards, which is added to the teacher's. With 0 rewards are
    only metrics."""
    teacher_cap: float = bounded(10.0, 0.0)
    """Largest absolute advantage of a token from the teacher, in nats. With 0 there is no limit,
    and one token can dominate a step."""

    @property
    def uses_old(self) -> bool:  # type: ignore[override]  # the settings decide it
        """Whether there are advantages: the divergence uses no ratio."""
        return not self.teacher_top_k or self.reward_weight > 0

    @property
    def has_advantages(self) -> bool:
        """See `Algorithm`. The divergence needs no advantages."""
        return self.uses_old

    @property
    def fewest_samples(self) -> int:  # type: ignore[override]  # the settings decide it
        """Smallest number of episodes of a prompt: only the advantage from rewards compares
        them."""
        return 2 if self.reward_weight else 1

    @property
    def needs(self) -> tuple[str, ...]:
        scored = () if self.teacher_top_k else ("rollout_logprobs", "teacher_logprobs")
        return tuple(dict.fromkeys((*super().needs, *scored)))

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        top = ("teacher_top_ids", "teacher_top_logprobs") if self.teacher_top_k else ()
        return (*super().loss_needs(stale), *top)

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if not self.reward_weight:
            yield from self._reward_settings()
        if self.divergence != "reverse" and not self.teacher_top_k:
            yield (
                f"divergence: found {self.divergence} with teacher_top_k 0, allowed: reverse, or a "
                "teacher_top_k such as 16; sampled tokens alone give only the reverse divergence"
            )
        if self.divergence == "jsd" and self.beta in (0.0, 1.0):
            yield (
                f"beta: found {self.beta:g} with divergence jsd, allowed: above 0 and below 1; use "
                "divergence forward instead of 0, and reverse instead of 1"
            )

    def _reward_settings(self) -> Iterator[str]:
        """Findings about settings that change rewards although nothing is learned from rewards."""
        reason = "nothing is learned from rewards"
        if self.shuffle_rewards:
            yield f"shuffle_rewards: found true with reward_weight 0, allowed: false; {reason}"
        if self.kl_in_reward:
            yield (
                f"kl_in_reward: found {self.kl_in_reward:g} with reward_weight 0, allowed: 0; "
                f"{reason}"
            )
        if self.overlong.max_tokens:
            yield (
                f"overlong.max_tokens: found {self.overlong.max_tokens} with reward_weight 0, "
                f"allowed: 0; {reason}"
            )

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        rows = rows_of(prompts)
        if self.reward_weight:
            by_reward = [
                self.reward_weight * values for values in super().token_advantages(prompts)
            ]
        else:
            by_reward = [np.zeros(len(row["loss_mask"]), np.float32) for row in rows]
        if self.teacher_top_k:
            return by_reward
        return [
            values + self._teacher_advantages(row)
            for values, row in zip(by_reward, rows, strict=True)
        ]

    def _teacher_advantages(self, row: Row) -> np.ndarray:
        values = (row["teacher_logprobs"] - row["rollout_logprobs"]).astype(np.float32)
        if self.teacher_cap:
            values = values.clip(-self.teacher_cap, self.teacher_cap)
        return np.where(row["loss_mask"] > 0, values, np.float32(0.0))

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        """See `Algorithm`. ValueError: `teacher_top_k` is set, but the batch lacks the tokens."""
        losses = super().token_losses(batch)
        if batch.teacher_logprobs is not None:
            losses.metrics["teacher_kl"] = (batch.logprobs - batch.teacher_logprobs).detach()
        if not self.teacher_top_k:
            return losses
        if batch.likeliest is None or batch.teacher_top_logprobs is None:
            raise ValueError(
                "algorithm.teacher_top_k is set but the batch has no likeliest tokens of a teacher"
            )
        divergence, other_tokens = self._divergence(batch.teacher_top_logprobs, batch.likeliest)
        losses.metrics |= {"teacher_divergence": divergence.detach(), "teacher_rest": other_tokens}
        return replace(losses, divergence=divergence)

    def _divergence(self, teacher: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence of each token, from log-probabilities [b, s, k], and the
        probability that the teacher gives to all other tokens."""
        from relax_hpc.algorithms.divergence import jensen_shannon, kl, with_rest

        teacher, policy = with_rest(teacher), with_rest(policy)
        if self.divergence == "jsd":
            divergence = jensen_shannon(teacher, policy, self.beta)
        elif self.divergence == "reverse":
            divergence = kl(policy, teacher)
        else:
            divergence = kl(teacher, policy)
        return divergence, teacher[..., -1].exp()
