"""Pool of worker processes that compute rewards. If a reward hangs or crashes, only its prompt
group fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.net.workers.pool import WorkerPool
from relax_hpc.net.workers.process import Message
from relax_hpc.rewards import RewardError, RewardInput, Score, Scores


class RewardPool(WorkerPool[Sequence[RewardInput], Scores]):
    """Pool of up to ``count`` workers for one reward; each prompt group has ``limit_s`` seconds."""

    def __init__(
        self, reward: str, count: int, limit_s: float, settings: RewardSettings | None = None
    ) -> None:
        super().__init__(RewardWork(reward, limit_s, settings or RewardSettings()), count)

    async def score(self, samples: Sequence[RewardInput]) -> Scores:
        """See `relax_hpc.rewards.placement.Rewards`."""
        return await self.run(samples)


class RewardWork:
    """Requests to the workers of one reward, and their results."""

    module = "relax_hpc.rewards.worker"
    watches_limit = True

    def __init__(self, reward: str, limit_s: float, settings: RewardSettings) -> None:
        self.reward, self.limit_s, self.settings = reward, limit_s, settings
        self.name = f"reward {reward}"

    @property
    def setup(self) -> Message:
        return {
            "reward": self.reward,
            "limit_s": self.limit_s,
            "settings": dataclasses.asdict(self.settings),
        }

    def make_request(self, samples: Sequence[RewardInput]) -> Message:
        return {"samples": [_fields(sample) for sample in samples]}

    def read_answer(self, message: Message) -> Scores:
        if "error" in message:
            reason, detail, location, traceback = message["error"]
            return RewardError(reason, detail, ErrorOrigin(location, traceback))
        return [Score(total, components) for total, components in message["scores"]]

    def answer_unsendable(self, error: Exception) -> Scores:
        return RewardError(
            "reward_exception", f"the prompt's row cannot be sent to a worker: {error}"
        )

    def answer_late(self, took_s: float, answer: Scores | None) -> Scores:
        took = f"{took_s:.1f} s, rollout.reward_timeout_s is {self.limit_s:g}"
        origin = answer.origin if isinstance(answer, RewardError) else NO_ORIGIN
        return RewardError("reward_timeout", f"stopped after {took}", origin)

    def answer_death(self, cause: str) -> Scores:
        return RewardError("reward_died", f"the process that computed {self.reward} {cause}")

    def is_late(self, answer: Scores) -> bool:
        return isinstance(answer, RewardError) and answer.reason == "reward_timeout"


def _fields(sample: RewardInput) -> list[Any]:
    return [getattr(sample, field.name) for field in dataclasses.fields(RewardInput)]
