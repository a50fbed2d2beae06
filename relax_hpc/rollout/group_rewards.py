"""Rewards of prompt groups, and queue rows of the groups that are trained on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc.base.metrics.writer import COMPONENT_COUNT, COMPONENT_SUM
from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.base.routes import RouteShape
from relax_hpc.config.schema import Config
from relax_hpc.data.generation import Episode, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardError, RewardInput, Score
from relax_hpc.rewards.placement import Rewards, make_rewards
from relax_hpc.rewards.run_settings import reward_settings
from relax_hpc.rollout.engines.engine import EngineFault
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.rows import (
    bad_routes,
    failure_of_answers,
    group_rows,
    last_response,
    reward_input,
)
from relax_hpc.tasks import eval_reward, train_reward

_DECODE_INLINE_TOKENS = 4096
"""Up to this number of tokens, responses are decoded in the event loop. It takes some milliseconds,
and a thread would cost more."""
_MAX_COMPONENTS = 64
"""Names of reward components that one process reports; further ones appear only in samples."""
_MAX_DETAILS = 4096
"""Rows whose reward components are kept until the row is put. Those of rows that are never put are
discarded when there are more."""
_INVALID_IN_TAG = re.compile(r"[^A-Za-z0-9_.-]")


def patient_settings(config: Config) -> RewardSettings:
    """Reward settings of a run. Unless `away_s` is set, rewards wait for their servers as long as
    for any group, because the servers' job may be pending."""
    settings = reward_settings(config)
    judge = settings.judge
    return replace(settings, judge=replace(judge, away_s=judge.away_s or longest_wait_s(config)))


class GroupRewards:
    """Computes rewards in the event loop of one rollout process, and makes rows of prompt
    groups."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        report: Callable[[int, Mapping[str, float]], None],
        keeps: Callable[[int], bool] = lambda ticket: False,
        routes: RouteShape | None = None,
        waits: Callable[[int], None] = lambda change: None,
    ) -> None:
        """``report(step, values)`` gets sums, which are added up. ``keeps(ticket)``: whether
        samples of the ticket are kept for people. ``routes``: shape of the routes that rows must
        have. ``waits(change)`` gets the change of the number of groups that wait for servers."""
        self.config, self.tokenizer, self._report, self._keeps = config, tokenizer, report, keeps
        self._routes = routes
        rollout, reward = config.rollout, train_reward(config)
        options = (
            rollout.reward_workers,
            rollout.reward_timeout_s,
            patient_settings(config),
            waits,
        )
        self.rewards: Rewards = make_rewards(reward, *options)
        evaluation_reward = eval_reward(config)
        self.eval_rewards = self.rewards
        if evaluation_reward != reward:
            self.eval_rewards = make_rewards(evaluation_reward, *options)
        self._filter = get_filter(rollout.filter)
        self._component_names: set[str] = set()
        self._details: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """Return when rewards can be computed. ConfigError: there is no reward of that name."""
        used = {self.rewards}
        if self.config.eval.every:
            used.add(self.eval_rewards)
        for rewards in used:
            await rewards.start()

    async def close(self) -> None:
        """End the processes that compute rewards."""
        for rewards in {self.rewards, self.eval_rewards}:
            await rewards.close()

    async def rows(
        self, prompt: Prompt, ticket: int, answers: Sequence[Generation | Episode | EngineFault]
    ) -> list[Row] | Failure:
        """Rows of a prompt group with their rewards, or the reason why it has none."""
        failure = failure_of_answers(answers)
        if failure:
            return failure
        responses = [answer for answer in answers if not isinstance(answer, EngineFault)]
        scores = await self.rewards.score(await self._inputs([prompt] * len(responses), responses))
        if isinstance(scores, RewardError):
            detail = f"{scores.reason}: {scores.detail} (prompt {prompt.prompt_id})"
            return Failure(scores.reason, detail, origin=scores.origin)
        self._report_components(ticket // self.config.prompts_per_step, scores)
        algorithm, rewards = self.config.algorithm, [score.total for score in scores]
        masks = algorithm.mask_older_tokens, algorithm.mask_truncated
        rows = group_rows(prompt, ticket, responses, rewards, self._filter, *masks)
        if isinstance(rows, Failure):
            return rows
        failure = bad_routes(self._routes, rows) if self._routes else None
        if failure:
            return failure
        if self._keeps(ticket):
            self._keep_details(prompt, rows, scores)
        return rows

    def _keep_details(self, prompt: Prompt, rows: Sequence[Row], scores: Sequence[Score]) -> None:
        for row in rows:
            components = scores[row["episode"]].components
            self._details[row["row_id"]] = {"answer": prompt.answer, "components": components}
        while len(self._details) > _MAX_DETAILS:
            del self._details[next(iter(self._details))]

    def take_details(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """Answers and reward components of ``rows`` by row id, for people. They are removed."""
        names = [row["row_id"] for row in rows]
        return {name: self._details.pop(name) for name in names if name in self._details}

    async def evaluate(
        self, prompts: Sequence[Prompt], answers: Sequence[Generation | Episode | EngineFault]
    ) -> list[Score | RewardError]:
        """The evaluation reward of each response, or the reason why it has none."""
        responses = []
        response_prompts = []
        for prompt, answer in zip(prompts, answers, strict=True):
            if not isinstance(answer, EngineFault):
                response_prompts.append(prompt)
                responses.append(answer)
        inputs = await self._inputs(response_prompts, responses)
        scoring = [self.eval_rewards.score([sample]) for sample in inputs]
        scored = iter(await asyncio.gather(*scoring))
        values: list[Score | RewardError] = []
        for answer in answers:
            if isinstance(answer, EngineFault):
                values.append(RewardError(answer.reason, str(answer), answer.origin))
            else:
                scores = next(scored)
                values.append(scores if isinstance(scores, RewardError) else scores[0])
        return values

    async def _inputs(
        self, prompts: Sequence[Prompt], responses: Sequence[Generation | Episode]
    ) -> list[RewardInput]:
        def decode() -> list[RewardInput]:
            pairs = zip(prompts, responses, strict=True)
            return [reward_input(prompt, response, self.tokenizer) for prompt, response in pairs]

        tokens = sum(len(last_response(response).token_ids) for response in responses)
        return decode() if tokens <= _DECODE_INLINE_TOKENS else await asyncio.to_thread(decode)

    def _report_components(self, step: int, scores: Sequence[Score]) -> None:
        """Report the sums of the components of ``scores``."""
        values: dict[str, float] = {}
        for score in scores:
            for component, value in score.components.items():
                name = _INVALID_IN_TAG.sub("_", component)
                has_capacity = len(self._component_names) < _MAX_COMPONENTS
                if name in self._component_names or has_capacity:
                    self._component_names.add(name)
                    values[COMPONENT_SUM + name] = values.get(COMPONENT_SUM + name, 0) + value
                    values[COMPONENT_COUNT + name] = values.get(COMPONENT_COUNT + name, 0) + 1
        if values:
            self._report(step, values)
