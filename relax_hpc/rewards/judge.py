"""Reward of a generative reward model (LLM judge): a model with an OpenAI-compatible API scores a
response."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.rewards.final_answer import without_thoughts
from relax_hpc.rewards.group_service import GroupService
from relax_hpc.rewards.service import Service

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

_FIELD = re.compile(r"\{(prompt|answer|response)\}")
_CUT_OFF = ("length", "max_tokens", "abort", "content_filter", "error")
"""Values of finish_reason for a judgement that is incomplete."""
_GROUP_REQUESTS = 8
"""Approximate number of requests for a prompt group. It converts the limit of requests into a limit
of concurrent prompt groups."""


class Judge:
    """Sends one question for each response, see `reward.judge`."""

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: see `Service`; or the expression of the score or the question is invalid."""
        self._settings = judge = settings.judge
        if not (judge.url or judge.endpoints):
            raise ConfigError(
                "reward.judge.url: found nothing, allowed: http://... or https://..., or a group "
                "with role genrm that serves a judge (groups: {genrm: {}})"
            )
        self.service = (
            GroupService(judge, Path(judge.endpoints))
            if judge.endpoints
            else Service(judge, "reward.judge")
        )
        self._quote = self.service.quote
        self.at_once = max(1, judge.in_flight // _GROUP_REQUESTS)
        self._in_flight = asyncio.Semaphore(judge.in_flight)
        try:
            self._score = re.compile(judge.score)
        except re.error as error:
            raise ConfigError(f"reward.judge.score: found {judge.score!r}: {error}") from error
        if not self._score.groups:
            raise ConfigError(
                f"reward.judge.score: found {judge.score!r}, allowed: an expression with a group, "
                "(...)"
            )
        if "{response}" not in judge.question:
            raise ConfigError(
                "reward.judge.question: found no {response} in it, which is to be judged"
            )

    async def __call__(self, sample: RewardInput) -> float:
        """The last score in the judge's response, outside of its thoughts. NoAnswer, Away.
        ValueError: the judge refuses, gives no score, or was cut off."""
        settings = self._settings
        values = {
            "prompt": sample.prompt,
            "answer": sample.answer,
            "response": sample.response_text,
        }
        question = _FIELD.sub(lambda field: values[field[1]], settings.question)
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        async with self._in_flight:
            text = self._read_text(await self.service.ask(body))
        verdict = without_thoughts(text)
        scores = [match[1] for match in self._score.finditer(verdict)]
        if not scores:
            raise ValueError(f"the judge gives no score: {self._quote(text, from_end=True)}")
        return float(scores[-1]) * settings.scale

    def _read_text(self, answer: Any) -> str:
        """Text of the judge's response. ValueError: it has no text, or was cut off."""
        try:
            choice = answer["choices"][0]
            text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            text = finish_reason = None
        if not isinstance(text, str):
            raise ValueError(
                f"the judge answers {self._quote(answer)}, expected choices with a message"
            )
        if finish_reason in _CUT_OFF:
            raise ValueError(
                f"the judge was cut off (finish_reason {finish_reason}) after "
                f"{self._quote(text, from_end=True)}; raise reward.judge.max_new_tokens"
            )
        return text
