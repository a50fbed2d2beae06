"""A trainer that takes as long as it is told and leaves the weights alone: to measure what is
around training."""

from __future__ import annotations

import time
from collections.abc import Sequence

from relax_hpc.config.schema import Config
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.trainer import Trainer


class SimulatedTrainer(Trainer):
    """`Trainer` whose passes over a training batch take `actor.simulated_step_s`, each episode its
    share."""

    def __init__(self, model: PolicyModel, config: Config) -> None:
        super().__init__(
            model, config.algorithm, config.actor.optimizer, config.rollout.temperature
        )
        episodes = config.prompts_per_step * config.samples_per_prompt / config.actor.parallel.data
        self._episode_s = config.actor.simulated_step_s / episodes

    def accumulate(self, micro_batches: Sequence[Batch], last: bool = False) -> None:
        """Wait for as long as these rows take."""
        time.sleep(self._episode_s * sum(_episodes(batch) for batch in micro_batches))

    def step(self, lr: float) -> dict[str, float]:
        """Change nothing; metrics that tell nothing."""
        return {"grad_norm": 0.0, "skipped": 0.0, "empty": 0.0}


def _episodes(batch: Batch) -> float:
    """Episodes in ``batch``; one that has rows elsewhere counts by its share of the trained
    tokens."""
    return float((batch.mask.sum(1, keepdim=True) / batch.episode_tokens.clamp(min=1.0)).sum())
