"""Trainer that only waits for a set time and does not change the weights. Benchmarks measure the
rest of a run with it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from relax_hpc.config.schema import Config
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.trainer import Trainer


class SimulatedTrainer(Trainer):
    """`Trainer` whose passes over a training batch take `actor.simulated_step_s` in total. Each
    episode takes an equal share."""

    def __init__(self, model: PolicyModel, config: Config) -> None:
        super().__init__(
            model, config.algorithm, config.actor.optimizer, config.rollout.temperature
        )
        # Each data-parallel rank has its share of the step's episodes.
        episodes = config.prompts_per_step * config.samples_per_prompt / config.actor.parallel.data
        self._episode_s = config.actor.simulated_step_s / episodes

    def accumulate(self, micro_batches: Sequence[Batch], last: bool = False) -> None:
        """Wait for the time of these rows."""
        time.sleep(self._episode_s * sum(_episodes(batch) for batch in micro_batches))

    def warm_up(self, micro_batches: Sequence[Batch]) -> None:
        """Do nothing."""

    def step(self, lr: float) -> dict[str, float]:
        """Do nothing, and return constant metrics."""
        return {"grad_norm": 0.0, "skipped": 0.0, "empty": 0.0}


def _episodes(batch: Batch) -> float:
    """Number of episodes in ``batch``. An episode with rows in other batches counts by its share of
    the trained tokens."""
    return float((batch.mask.sum(1, keepdim=True) / batch.episode_tokens.clamp(min=1.0)).sum())
