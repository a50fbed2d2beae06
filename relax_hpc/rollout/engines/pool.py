"""The engines of a rank. Engines may join and leave during the run.

The engines of the configuration join at the start. The number of an engine is unique in the whole
group; the queue knows the engine by this number as a reader of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from relax_hpc.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineId:
    """The numbers of an engine."""

    number: int
    """Number among the engines of the group."""
    local_number: int
    """Number among the engines of its node, which determines its GPUs."""


def assigned_engines(replicas: int, rank: int, ranks: int, local_rank: int = 0) -> list[EngineId]:
    """The engines that a configuration assigns to ``rank``, out of the group's ``replicas``.

    ConfigError: ``replicas`` is not a multiple of the number of ``ranks``.

    >>> assigned_engines(4, rank=1, ranks=2)
    [EngineId(number=2, local_number=0), EngineId(number=3, local_number=1)]
    """
    if replicas % ranks:
        raise ConfigError(
            f"rollout.replicas: found {replicas} for {ranks} ranks of the group, allowed: "
            f"multiples of {ranks}; change it, rollout.processes, or resources.nodes of the group"
        )
    count = replicas // ranks
    return [EngineId(rank * count + k, local_rank * count + k) for k in range(count)]


class PoolMember(Protocol):
    """Runs one engine of a pool."""

    async def serve(self) -> None:
        """Return when the run is finished, or when the engine has left and has handed over its
        unfinished work."""

    def start_leaving(self) -> None:
        """Take no more work."""


M = TypeVar("M", bound=PoolMember)


class EnginePool(Generic[M]):
    """Runs a member for each engine. The first failure of a member ends all of them."""

    def __init__(self, make_member: Callable[[EngineId], M]) -> None:
        self._make_member = make_member
        self.members: dict[int, M] = {}
        """Members that serve, by the number of their engine."""
        self._tasks: asyncio.TaskGroup | None = None

    async def serve(self, engines: list[EngineId]) -> None:
        """Start ``engines``; return when all engines that have joined have ended."""
        async with asyncio.TaskGroup() as self._tasks:
            for engine in engines:
                self.join(engine)

    def join(self, engine: EngineId) -> M:
        """Start an engine. ValueError: an engine with this number is serving."""
        self._check_free(engine.number)
        member = self._make_member(engine)
        self.add(engine.number, member)
        return member

    def add(self, number: int, member: M) -> None:
        """Run a ``member`` that exists. ValueError: an engine with this number is serving."""
        self._check_free(number)
        assert self._tasks, "engines join while the pool serves"
        self.members[number] = member
        self._tasks.create_task(self._run(number, member.serve()))

    def _check_free(self, number: int) -> None:
        if number in self.members:
            raise ValueError(f"engine {number} is already serving")

    def remove(self, number: int) -> None:
        """Let an engine leave. Other engines continue its unfinished work."""
        self.members[number].start_leaving()

    async def _run(self, number: int, serving: Coroutine[None, None, None]) -> None:
        try:
            await serving
        finally:
            del self.members[number]
