"""Evaluation of a version by an engine, and its results: the mean reward, and pass@k."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import EvalConfig
from relax_hpc.data.generation import Episode, GenerateRequest, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rewards.tolerance import reaches
from relax_hpc.rollout.engines.engine import BadAnswer, EngineFault
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.play import EngineRetry, play
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.rows import last_response, requests_for

if TYPE_CHECKING:
    from relax_hpc.rollout.replica import Replica

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


class EvaluationRunner:
    """Evaluates the version that the engine of a replica serves."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.rollout, self.config = replica, replica.rollout, replica.config

    async def run(self, version: Version) -> None:
        """Generate responses to the evaluation sets, and report their results. The weights do not
        change meanwhile."""
        values, settings = dict[str, float](), self.config.eval
        for name, prompts in self.rollout.eval_sets.items():
            results, count = EvaluationResults(settings), min(len(prompts), settings.samples)
            size = self._batch_size()
            for start in range(0, count, size):
                batch = await asyncio.to_thread(
                    prompts.__getitem__, slice(start, min(start + size, count))
                )
                with self.replica.activity("eval", version.number):
                    evaluated = await self.score(batch)
                self._add_results(results, evaluated)
                await asyncio.to_thread(
                    self.rollout.samples.put_evaluated, name, version, evaluated
                )
            values |= results.values(name)
            await self.report_failed_evaluations(name, version, results)
        await asyncio.wrap_future(self.rollout.client.weights.evaluated(version.number, values))

    def _batch_size(self) -> int:
        """Prompts of one batch: as many responses as in a request for training."""
        responses = self.config.rollout.groups_per_request * self.config.samples_per_prompt
        return max(1, responses // self.config.eval.responses)

    def _add_results(self, results: EvaluationResults, evaluated: list[Evaluated]) -> None:
        for _, _, score in evaluated:
            if isinstance(score, RewardError):
                self.rollout.report_failure(score.reason, score.detail, score.origin)
        responses = self.config.eval.responses
        for start in range(0, len(evaluated), responses):
            results.add([score for _, _, score in evaluated[start : start + responses]])

    async def report_failed_evaluations(
        self, name: str, version: Version, results: EvaluationResults
    ) -> None:
        """Report responses of an evaluation without a reward to the queue, which counts them."""
        for reason, count in results.failed.items():
            print(
                log_entry(
                    f"evaluation of {version} on {name}: {count} responses left out, {reason}"
                ),
                flush=True,
            )
            for number in range(count):
                note = self.rollout.client.status.note(
                    "eval_failed", f"{name}/{version.number}/{number}", reason
                )
                await asyncio.wrap_future(note)

    async def score(self, prompts: list[Prompt]) -> list[Evaluated]:
        """All responses to ``prompts``, generated together, with their evaluation rewards."""
        groups = await asyncio.gather(*map(self.generate_evaluated, prompts))
        prompt_of_answer: list[Prompt] = []
        answers: list[Generation | Episode | BadAnswer] = []
        for prompt, group in groups:
            prompt_of_answer += [prompt] * len(group)
            answers += group
        scores = await self.rollout.group_rewards.evaluate(prompt_of_answer, answers)
        return list(zip(prompt_of_answer, answers, scores, strict=True))

    async def generate_evaluated(
        self, prompt: Prompt
    ) -> tuple[Prompt, list[Generation | Episode | BadAnswer]]:
        """A prompt of an evaluation with its media stored, and all responses to it."""
        settings = self.config.eval
        budget = settings.max_new_tokens or self.config.rollout.max_new_tokens
        try:
            prompt = await self.rollout.media.store_prompt_for_evaluation(prompt)
        except UNUSABLE as bad:
            return prompt, [BadAnswer("bad_media", str(bad))] * settings.responses
        requests = requests_for(prompt, 0, settings.responses, self.rollout.eval_sampling, budget)
        return prompt, await asyncio.gather(*(self.answer(prompt, request) for request in requests))

    async def answer(
        self, prompt: Prompt, request: GenerateRequest
    ) -> Generation | Episode | BadAnswer:
        """An episode against the environment, or the last response of another episode. If the
        engine fails, it is asked again, until it has failed too often in a row."""
        if self.rollout.player:
            start = EpisodeStart(prompt, request, self.replica.ask_once)
            episode = await self.rollout.player.play(History(), start)
            self.rollout.report_program(episode)
            return episode
        while True:
            with contextlib.suppress(EngineRetry):
                limit_s = self.config.rollout.episode_timeout_s
                result = await play(self.rollout.task, request, self.replica.ask_once, limit_s)
                return result if isinstance(result, BadAnswer) else last_response(result)
