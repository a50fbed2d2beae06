"""Reward from an HTTP service, such as a simulator or a verifier, which runs outside of the run's
processes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from relax_hpc.rewards.service import Service

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput


class Remote:
    """Posts prompt groups to `reward.remote.url`, at most `at_once` concurrently."""

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: see `Service`."""
        self.at_once = settings.remote.in_flight
        self.service = Service(settings.remote, "reward.remote")
        self._quote = self.service.quote

    async def __call__(self, samples: list[RewardInput]) -> list[Any]:
        """Request the scores of a prompt group. NoAnswer. ValueError: the service refuses the
        request, or its response has another form."""
        body = {"samples": [dataclasses.asdict(sample) for sample in samples]}
        response = await self.service.ask(body)
        if not isinstance(response, dict) or not isinstance(response.get("scores"), list):
            raise ValueError(
                f'the service answers {self._quote(response)}, expected {{"scores": [...]}}'
            )
        return response["scores"]
