"""On-policy distillation: the policy's own responses, and a teacher who says of each token how likely it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.algorithms.base import Prompt, Row
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.settings import bounded

if TYPE_CHECKING:
    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses


@dataclass(kw_only=True)
class Distill(Grpo):
    """On-policy distillation by the reverse KL: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, with no data but the
    student's own.

    A token's advantage is log(teacher / rollout), the negative of k1: its policy gradient is, in expectation and but
    for what a token does to later ones, that of -KL(policy || teacher). `reward_weight` times GRPO's advantage is
    added. The loss is GRPO's, clipped.
    """

    name: str = "distill"
    reward_weight: float = bounded(0.0, 0.0)
    """Weight of the rewards' advantage beside the teacher's. 0: rewards are metrics alone."""
    teacher_cap: float = bounded(10.0, 0.0)
    """Largest advantage of a token by the teacher, nats, of either sign. 0: none, and one token may be the step."""

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().needs, "rollout_logprobs", "teacher_logprobs")))

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        if self.shuffle_rewards and not self.reward_weight:
            yield "shuffle_rewards: found true with reward_weight 0, allowed: false; rewards are not learned from"

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        by_reward = super().token_advantages(prompts)
        rows = [row for prompt in prompts for episode in prompt for row in episode]
        return [self.reward_weight * known + self._by_teacher(row) for known, row in zip(by_reward, rows, strict=True)]

    def _by_teacher(self, row: Row) -> np.ndarray:
        found = (row["teacher_logprobs"] - row["rollout_logprobs"]).astype(np.float32)
        if self.teacher_cap:
            found = found.clip(-self.teacher_cap, self.teacher_cap)
        return np.where(row["loss_mask"] > 0, found, np.float32(0.0))

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        found = super().token_losses(batch)
        if batch.teacher_logprobs is None:
            return found
        return replace(found, metrics={"teacher_kl": (batch.logprobs - batch.teacher_logprobs).detach()})
