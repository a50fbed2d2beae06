"""Batches of the requests that come in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects what is added in one turn of the running event loop, and hands it to ``send`` in the
    next.

    >>> batches: list[list[int]] = []
    >>> async def main() -> None:
    ...     batcher = Batcher(batches.append, most=2)
    ...     for number in range(3):
    ...         batcher.add(number)
    ...     await asyncio.sleep(0)
    >>> asyncio.run(main())
    >>> batches
    [[0, 1], [2]]
    """

    def __init__(self, send: Callable[[list[T]], None], most: int) -> None:
        """``most``: items of one batch."""
        self._send, self._most = send, most
        self._waiting: list[T] = []

    def add(self, item: T) -> None:
        """Have ``item`` sent with the others of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(item)

    def _flush(self) -> None:
        items, self._waiting = self._waiting, []
        for start in range(0, len(items), self._most):
            self._send(items[start : start + self._most])
