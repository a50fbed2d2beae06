"""Batches of the items that are added in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects the items that are added in one turn of the running event loop, and passes them to
    ``send`` in the next turn.

    >>> batches: list[list[int]] = []
    >>> async def main() -> None:
    ...     batcher = Batcher(batches.append, 2)
    ...     for number in range(3):
    ...         batcher.add(number)
    ...     await asyncio.sleep(0)
    >>> asyncio.run(main())
    >>> batches
    [[0, 1], [2]]
    """

    def __init__(self, send: Callable[[list[T]], None], max_items: int) -> None:
        """``max_items``: most items of one batch."""
        self._send, self._max_items = send, max_items
        self._items: list[T] = []

    def add(self, item: T) -> None:
        """Send ``item`` together with the other items of this turn."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(item)

    def _flush(self) -> None:
        items, self._items = self._items, []
        for start in range(0, len(items), self._max_items):
            self._send(items[start : start + self._max_items])
