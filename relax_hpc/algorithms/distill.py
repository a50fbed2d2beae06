"""On-policy distillation: the policy's own responses, and a teacher who says of each token how
likely it was, or which tokens would have been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Distill(Grpo):
    """On-policy distillation: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, with no data but
    the student's own.

    By the drawn tokens alone (`teacher_top_k` 0) a token's advantage is log(teacher / rollout), the
    negative of k1: its policy gradient is, in expectation and but for what a token does to later
    ones, that of -KL(policy || teacher). By the teacher's k likeliest tokens the divergence itself,
    of these and of all others as one, is a term of the loss at every token, as GKD has it: no
    gradient by what was drawn.

    `reward_weight` times GRPO's advantage is added; its loss is GRPO's, clipped.
    """

    name: str = "distill"
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Divergence that becomes small. `reverse`: KL(policy || teacher), the policy keeps to what the
    teacher finds likely; `forward`: KL(teacher || policy), it covers all of that; `jsd`: the
    generalised Jensen-Shannon divergence, between the two. All but `reverse` need
    `teacher_top_k`."""
    beta: float = bounded(0.5, 0.0, 1.0)
    """Weight of the teacher in the mixture of `jsd`: near 0 it is the forward divergence times
    beta, near 1 the reverse one times 1 - beta."""
    teacher_top_k: int = bounded(0, 0, 1024)
    """Tokens, the teacher's likeliest, that it gives for each of a row, with their
    log-probabilities: 8 bytes each. 0: it scores the drawn tokens alone."""
    reward_weight: float = bounded(0.0, 0.0)
    """Weight of the rewards' advantage beside the teacher's. 0: rewards are metrics alone."""
    teacher_cap: float = bounded(10.0, 0.0)
    """Largest advantage of a token by the teacher, nats, of either sign. 0: none, and one token may
    be the step."""

    @property
    def uses_old(self) -> bool:
        """Whether there are advantages: of a divergence, no ratio is taken."""
        return not self.teacher_top_k or self.reward_weight > 0

    @property
    def has_advantages(self) -> bool:
        """See `Algorithm`: a divergence is learned from without any."""
        return self.uses_old

    @property
    def fewest_samples(self) -> int:
        """Episodes that a prompt must have: only the rewards' advantage compares them."""
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
            yield from self._of_rewards()
        if self.divergence != "reverse" and not self.teacher_top_k:
            yield (
                f"divergence: found {self.divergence} with teacher_top_k 0, allowed: reverse, or a "
                "teacher_top_k such "
                "as 16; what was drawn says nothing of what the teacher would have drawn"
            )
        if self.divergence == "jsd" and self.beta in (0.0, 1.0):
            yield (
                f"beta: found {self.beta:g} with divergence jsd, allowed: between; its ends are "
                "forward and reverse"
            )

    def _of_rewards(self) -> Iterator[str]:
        """Settings that change rewards, which are not learned from."""
        reason = "rewards are not learned from"
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
        rows = list(chain.from_iterable(chain.from_iterable(prompts)))
        if self.reward_weight:
            by_reward = [
                self.reward_weight * values for values in super().token_advantages(prompts)
            ]
        else:
            by_reward = [np.zeros(len(row["loss_mask"]), np.float32) for row in rows]
        if self.teacher_top_k:
            return by_reward
        return [values + self._by_teacher(row) for values, row in zip(by_reward, rows, strict=True)]

    def _by_teacher(self, row: Row) -> np.ndarray:
        found = (row["teacher_logprobs"] - row["rollout_logprobs"]).astype(np.float32)
        if self.teacher_cap:
            found = found.clip(-self.teacher_cap, self.teacher_cap)
        return np.where(row["loss_mask"] > 0, found, np.float32(0.0))

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        """See `Algorithm`. ValueError: there are no likeliest tokens, and they are asked for."""
        found = super().token_losses(batch)
        if batch.teacher_logprobs is not None:
            found.metrics["teacher_kl"] = (batch.logprobs - batch.teacher_logprobs).detach()
        if not self.teacher_top_k:
            return found
        if batch.likeliest is None or batch.teacher_top_logprobs is None:
            raise ValueError(
                "algorithm.teacher_top_k is set but the batch has no likeliest tokens of a teacher"
            )
        divergence, rest = self._divergence(batch.teacher_top_logprobs, batch.likeliest)
        found.metrics |= {"teacher_divergence": divergence.detach(), "teacher_rest": rest}
        return replace(found, divergence=divergence)

    def _divergence(self, teacher: Tensor, policy: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence of each token by log-probabilities [b, s, k], and what the teacher gives to
        other tokens."""
        from relax_hpc.algorithms.divergence import jensen_shannon, kl, with_rest

        teacher, policy = with_rest(teacher), with_rest(policy)
        if self.divergence == "jsd":
            found = jensen_shannon(teacher, policy, self.beta)
        else:
            found = kl(policy, teacher) if self.divergence == "reverse" else kl(teacher, policy)
        return found, teacher[..., -1].exp()
