"""Environments for processes of environments."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax_hpc.environments.base import Beginning, Environment, Observation, Response, Step

SAID = "ok"


class Thrice(Environment):
    """Answers twice, and is done; of the first prompt it waits while there is a file `slow` in the
    working directory."""

    def reset(self, beginning: Beginning) -> tuple[()]:
        self.waits = beginning.prompt == "100?"
        return ()

    async def step(self, response: Response) -> Step:
        while self.waits and Path("slow").exists():
            await asyncio.sleep(0.02)
        return Step(
            (Observation(SAID),),
            response.turn == 2,
            {"turns": response.turn + 1},
            float(response.turn),
        )
