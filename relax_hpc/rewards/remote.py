"""Reward of a service that is asked over HTTP: a simulator, a verifier, whatever does not run in a
process of ours."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from relax_hpc.rewards.service import Service

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput


class Remote:
    """Posts prompt groups to `reward.remote.url`, see there; `at_once` at a time."""

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: see `Service`."""
        self.at_once = settings.remote.in_flight
        self.service = Service(settings.remote, "reward.remote")
        self._quote = self.service.quote

    async def __call__(self, samples: list[RewardInput]) -> list[Any]:
        """Ask the service for the scores of a prompt group. NoAnswer. ValueError: it refuses, or
        gives something else."""
        found = await self.service.ask(
            {"samples": [dataclasses.asdict(sample) for sample in samples]}
        )
        if not isinstance(found, dict) or not isinstance(found.get("scores"), list):
            raise ValueError(
                f'the service answers {self._quote(found)}, expected {{"scores": [...]}}'
            )
        return found["scores"]
