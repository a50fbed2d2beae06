"""Results of the evaluation of a set: the mean reward, and pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from relax_hpc.config.schema import EvalConfig
from relax_hpc.data.generation import Episode, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rewards.tolerance import reaches
from relax_hpc.rollout.engines.engine import EngineFault

Evaluated = tuple[Prompt, Generation | Episode | EngineFault, Score | RewardError]
"""A prompt, a response or an error, and its reward or the error of the reward."""


class EvaluationResults:
    """Results of one set. A response without a reward is left out, whatever the reason; it does not
    count as 0."""

    def __init__(self, settings: EvalConfig) -> None:
        self._settings = settings
        self._rewards: list[float] = []
        self._passed: dict[int, list[float]] = {k: [] for k in settings.pass_at}
        self.failed: Counter[str] = Counter()
        """Responses without a reward, by reason."""

    def add(self, scores: Sequence[Score | RewardError]) -> None:
        """Add the scores of all responses to one prompt."""
        rewards = [score.total for score in scores if isinstance(score, Score)]
        self.failed.update(score.reason for score in scores if isinstance(score, RewardError))
        self._rewards += rewards
        right = sum(reaches(reward, self._settings.pass_reward) for reward in rewards)
        for k, passed in self._passed.items():
            if len(rewards) >= k:
                passed.append(pass_at(k, len(rewards), right))

    def values(self, name: str) -> Iterator[tuple[str, float]]:
        """Metrics of the set ``name``; a metric without a reward is left out."""
        values = {self._settings.metric: self._rewards}
        values |= {f"pass@{k}": passed for k, passed in self._passed.items()}
        for metric, numbers in values.items():
            if numbers:
                yield f"eval/{name}/{metric}", math.fsum(numbers) / len(numbers)


Tally = EvaluationResults  # Name in release 0.1.


def pass_at(k: int, count: int, right: int) -> float:
    """Probability that ``k`` responses, drawn from ``count`` of which ``right`` are right, include
    a right one.

    The unbiased estimator 1 - C(count - right, k) / C(count, k) of M. Chen et al., arXiv
    2107.03374, section 2.1.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 2), pass_at(4, 4, 1)
    (0.25, 0.8333333333333334, 1.0)
    """
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)
