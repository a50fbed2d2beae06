"""An event loop whose clock runs ahead to whatever it waits for: hours of deadlines in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """Instead of waiting for ``timeout``, be there."""
        if timeout is None:
            return super().select(None)
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run_on_a_clock(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns, which waits for time alone and for no socket or thread."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
