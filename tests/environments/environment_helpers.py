"""Environments in processes of their own, as tests play with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.environments.base import Beginning, EnvironmentFault, Response
from relax_hpc.environments.host import Environments
from tests.environments.hostile_environments import WELL

LIMIT_S = 100.0
HOSTILE = "tests.environments.hostile_environments:Hostile"


def with_host(
    work: Callable[[Environments], Awaitable[Any]], kind: str = HOSTILE, **settings: Any
) -> Any:
    async def main() -> Any:
        host = Environments(kind, EnvironmentConfig(**{"step_timeout_s": LIMIT_S, **settings}))
        try:
            async with asyncio.timeout(LIMIT_S):
                return await work(host)
        finally:
            await host.close()

    return asyncio.run(main())


def beginning(seed: int = 0) -> Beginning:
    return Beginning("4?", "4", {"id": 10**30, "name": "é"}, WELL.observations[0].media, seed)


async def play(host: Environments, *words: str, seed: int = 0) -> list[str]:
    """What the environment said, turn by turn; the fault that ended it last."""
    heard, session = [], await host.open(beginning(seed))
    try:
        for turn, word in enumerate(words):
            heard.append(text_of(await session.step(Response(word, "stop", turn))))
    except EnvironmentFault as fault:
        heard.append(str(fault))
    finally:
        await session.close()
    return heard


def text_of(turn: Any) -> str:
    return turn[1][0].parts[-1]
