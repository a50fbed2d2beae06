"""The engines of a rank: entries that may join and leave while the run goes on.

Those of the configuration are there from the beginning. An entry's number is its own in the whole
group: by it the queue knows the engine as a reader of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from relax_hpc.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine that may serve."""

    number: int
    """Number among the engines of the group."""
    place: int
    """Number among the engines of its node, by which it finds its GPUs."""


def entries(replicas: int, rank: int, ranks: int, local_rank: int = 0) -> list[Entry]:
    """The engines that a configuration gives to ``rank``, out of the group's ``replicas``.

    ConfigError: the ranks cannot have equal numbers of them.

    >>> entries(4, rank=1, ranks=2)
    [Entry(number=2, place=0), Entry(number=3, place=1)]
    """
    if replicas % ranks:
        raise ConfigError(
            f"rollout.replicas: found {replicas} for {ranks} ranks of the group, allowed: "
            f"multiples of {ranks}; change it, rollout.processes, or resources.nodes of the group"
        )
    each = replicas // ranks
    return [Entry(rank * each + k, local_rank * each + k) for k in range(each)]


class Member(Protocol):
    """Member of a pool, which serves one entry."""

    async def serve(self) -> None:
        """Return when the run is finished, or once it is asked to leave and has handed on what it
        has."""

    def leave(self) -> None:
        """Have it take no more work."""


M = TypeVar("M", bound=Member)


class Pool(Generic[M]):
    """Serves entries, each by a member of its own; the first failure of one ends all."""

    def __init__(self, make: Callable[[Entry], M]) -> None:
        self._make = make
        self.members: dict[int, M] = {}
        """Members that serve, by number."""
        self._tasks: asyncio.TaskGroup | None = None

    async def serve(self, first: list[Entry]) -> None:
        """Return when all that have joined have ended."""
        async with asyncio.TaskGroup() as self._tasks:
            for entry in first:
                self.join(entry)

    def join(self, entry: Entry) -> M:
        """Have an engine serve from now on. ValueError: there is one of that number."""
        if entry.number in self.members:
            raise ValueError(f"engine {entry.number} serves already")
        assert self._tasks, "join while the pool serves"
        self.members[entry.number] = member = self._make(entry)
        self._tasks.create_task(self._served(entry.number, member.serve()))
        return member

    def leave(self, number: int) -> None:
        """Have an engine end; others go on with what was asked of it."""
        self.members[number].leave()

    async def _served(self, number: int, serving: Coroutine[None, None, None]) -> None:
        try:
            await serving
        finally:
            del self.members[number]
