"""What a step says of how far policies are apart."""

from __future__ import annotations

import numpy as np
import pytest

from relax_hpc.algorithms import Grpo
from relax_hpc.algorithms.losses import mean_metrics
from relax_hpc.roles.step_report import StepResult, Tally, policy_values
from tests.requirements import requires
from tests.test_algorithms import random_batch

requires("torch")


def test_drift_and_updates_are_apart() -> None:
    """Old log-probabilities 0.5 nats below those of a step's begin, whose update moves it by 0.25 more."""
    batch, means = random_batch(2, 5, seed=1), []
    for moved in (0.5, 0.75):
        at = batch.replace(logprobs=batch.old_logprobs + moved, advantages=batch.mask.clone())
        _, metrics = Grpo().loss(at)
        means.append(mean_metrics({name: float(value) for name, value in metrics.items()}))
    tally = Tally()
    tally.rewards, tally.lengths = [1.0], [3]
    values = policy_values(StepResult(means[0], means[1], tally, 1e-3, 1.0))
    assert values["kl/drift"] == pytest.approx(np.exp(0.5) - 1.5)
    assert values["kl/old"] == pytest.approx(np.exp(0.75) - 1.75)
    assert values["loss/clip_fraction_drift"] == values["loss/clip_fraction"] == 1.0, "e^0.5 is beyond 1.28"
