"""Reward of a generative reward model: a model behind an address as OpenAI's says how good a response is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError
from relax_hpc.rewards.group_service import GroupService
from relax_hpc.rewards.service import SHOWN, Service

if TYPE_CHECKING:
    from relax_hpc.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

_PLACE = re.compile(r"\{(prompt|answer|response)\}")
_ADDRESS = "/v1/chat/completions"
"""Address of chat completions at a server."""
_GROUP = 8
"""Requests of a prompt group, about: so many times fewer groups are taken on at a time."""


class Judge:
    """Asks about each response by itself, see `reward.judge`."""

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: see `Service`; or what is asked for holds no score."""
        self._settings = asked = settings.judge
        if not (asked.url or asked.endpoints):
            raise ConfigError(
                "reward.judge.url: found nothing, allowed: http://... or https://..., or a group with role genrm that "
                "serves a judge (groups: {genrm: {}})"
            )
        self.service = (
            GroupService(asked, Path(asked.endpoints), _ADDRESS) if asked.endpoints else Service(asked, "reward.judge")
        )
        self.at_once = max(1, asked.in_flight // _GROUP)
        self._turns = asyncio.Semaphore(asked.in_flight)
        try:
            self._score = re.compile(asked.score)
        except re.error as error:
            raise ConfigError(f"reward.judge.score: found {asked.score!r}: {error}") from error
        if not self._score.groups:
            raise ConfigError(f"reward.judge.score: found {asked.score!r}, allowed: an expression with a group, (...)")
        if "{response}" not in asked.question:
            raise ConfigError("reward.judge.question: found no {response} in it, which is to be judged")

    async def __call__(self, sample: RewardInput) -> float:
        """The score that the judge gives. NoAnswer, Away. ValueError: it refuses, or gives none."""
        settings = self._settings
        values = {"prompt": sample.prompt, "answer": sample.answer, "response": sample.response_text}
        question = _PLACE.sub(lambda place: values[place[1]], settings.question)
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        async with self._turns:
            text = _text(await self.service.ask(body))
        found = [match[1] for match in self._score.finditer(text)]
        if not found:
            raise ValueError(f"the judge gives no score: {text[-SHOWN:]!r}")
        return float(found[-1]) * settings.scale


def _text(found: Any) -> str:
    """The judge's words. ValueError: there are none."""
    try:
        text = found["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"the judge answers {str(found)[:SHOWN]!r}, expected choices with a message")
    return text
