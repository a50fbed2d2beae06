"""Gives prompt groups their rewards, and rows to those that are wanted."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc.base.metrics.writer import COMPONENT_COUNT, COMPONENT_SUM
from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.base.routes import RouteShape
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardError, RewardInput, Score
from relax_hpc.rewards.placement import Rewards, make_rewards
from relax_hpc.rewards.run_settings import reward_settings
from relax_hpc.rollout.engines.engine import EngineFault, Episode, Generation
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.samples import bad_routes, group_rows, last_response, refused, reward_input
from relax_hpc.tasks import eval_reward, train_reward

_AT_ONCE_TOKENS = 4096
"""Tokens up to which responses are decoded in the event loop, in some milliseconds: a thread would
cost more than it saves."""
_MOST_COMPONENTS = 64
"""Names of components that one process reports; others are in samples alone."""
_MOST_KEPT = 4096
"""Samples of whose components is known until they are put; those of groups that are not are
forgotten in the end."""
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")


def patient_settings(config: Config) -> RewardSettings:
    """Settings of a run's rewards, whose servers are waited for as any group is where `away_s` says
    nothing else: their job may be in a queue."""
    settings = reward_settings(config)
    judge = settings.judge
    return replace(settings, judge=replace(judge, away_s=judge.away_s or longest_wait_s(config)))


class Judge:
    """Judge of one rollout process: computes rewards in its event loop, and makes rows of prompt
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
        """``report(step, values)`` takes sums, which add up; ``keeps(ticket)``: people may look at
        its samples; ``routes``: those that rows must have; ``waits(change)`` is told how many more
        wait for servers that are away."""
        self.config, self.tokenizer, self._report, self._keeps = config, tokenizer, report, keeps
        self._routes = routes
        shape, reward = config.rollout, train_reward(config)
        about = shape.reward_workers, shape.reward_timeout_s, patient_settings(config), waits
        self.rewards: Rewards = make_rewards(reward, *about)
        evaluations = eval_reward(config)
        self.eval_rewards = (
            self.rewards if evaluations == reward else make_rewards(evaluations, *about)
        )
        self._filter = get_filter(shape.filter)
        self._names: set[str] = set()
        self._about: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """Return when rewards can be had. ConfigError: there is none of that name."""
        for rewards in {self.rewards, *([self.eval_rewards] if self.config.eval.every else [])}:
            await rewards.start()

    async def close(self) -> None:
        """End the processes that compute rewards."""
        for rewards in {self.rewards, self.eval_rewards}:
            await rewards.close()

    async def rows(
        self, prompt: Prompt, ticket: int, answers: Sequence[Generation | Episode | EngineFault]
    ) -> list[Row] | Failure:
        """Rows of a prompt group, rewards included, or the failure that it came to."""
        if failure := refused(answers):
            return failure
        scores = await self.rewards.score(await self._inputs([prompt] * len(answers), answers))
        if isinstance(scores, RewardError):
            detail = f"{scores.reason}: {scores.detail} (prompt {prompt.prompt_id})"
            return Failure(scores.reason, detail, origin=scores.origin)
        self._note(ticket // self.config.prompts_per_step, scores)
        algorithm, rewards = self.config.algorithm, [score.total for score in scores]
        masks = algorithm.mask_older_tokens, algorithm.mask_truncated
        rows = group_rows(prompt, ticket, answers, rewards, self._filter, *masks)
        if (
            self._routes
            and not isinstance(rows, Failure)
            and (failure := bad_routes(self._routes, rows))
        ):
            return failure
        if not isinstance(rows, Failure) and self._keeps(ticket):
            for row in rows:
                components = scores[row["episode"]].components
                self._about[row["row_id"]] = {"answer": prompt.answer, "components": components}
            while len(self._about) > _MOST_KEPT:
                del self._about[next(iter(self._about))]
        return rows

    def about(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """Answers and reward components of ``rows`` by row id, for people; each is given once."""
        names = [row["row_id"] for row in rows]
        return {name: self._about.pop(name) for name in names if name in self._about}

    async def evaluated(
        self, prompts: Sequence[Prompt], answers: Sequence[Generation | Episode | EngineFault]
    ) -> list[Score | RewardError]:
        """The evaluation's reward of each response, or why it has none."""
        good = [
            (prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
            if not isinstance(answer, EngineFault)
        ]
        inputs = await self._inputs([prompt for prompt, _ in good], [answer for _, answer in good])
        found = await asyncio.gather(*(self.eval_rewards.score([one]) for one in inputs))
        given = iter(found)
        values: list[Score | RewardError] = []
        for answer in answers:
            if isinstance(answer, EngineFault):
                values.append(RewardError(answer.reason, str(answer), answer.origin))
            else:
                scores = next(given)
                values.append(scores if isinstance(scores, RewardError) else scores[0])
        return values

    async def _inputs(
        self, prompts: Sequence[Prompt], answers: Sequence[Generation | Episode]
    ) -> list[RewardInput]:
        def made() -> list[RewardInput]:
            pairs = zip(prompts, answers, strict=True)
            return [reward_input(prompt, answer, self.tokenizer) for prompt, answer in pairs]

        tokens = sum(len(last_response(answer).token_ids) for answer in answers)
        return made() if tokens <= _AT_ONCE_TOKENS else await asyncio.to_thread(made)

    def _note(self, step: int, scores: Sequence[Score]) -> None:
        """Report what the components of ``scores`` come to."""
        values: Counter[str] = Counter()
        for name, value in (item for score in scores for item in score.components.items()):
            name = _OTHER.sub("_", name)
            if name in self._names or len(self._names) < _MOST_COMPONENTS:
                self._names.add(name)
                values[COMPONENT_SUM + name] += value
                values[COMPONENT_COUNT + name] += 1
        if values:
            self._report(step, values)
