"""Values that take time to read, shared by all browsers that show the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from relax_hpc.base.errors import DeadlineError, RelaxError

_ANSWER_S = 30.0
"""Seconds to wait for the first reading."""
_PATIENCE_S = 2.0
"""Seconds to wait for a newer reading than the last one."""
_COST_FACTOR = 10.0
"""Pause between two readings, as a multiple of the time of a reading: the files of a long run take
at most a tenth of a core."""
Value = TypeVar("Value")


class SharedReading(Generic[Value]):
    """The newest value of a function that runs in a thread, one call at a time; for one event loop.

    No request makes it run more often, and nothing runs while no browser asks.
    """

    def __init__(self, read: Callable[[], Value], pause_s: float) -> None:
        """``pause_s``: shortest time between two calls of ``read``."""
        self._read, self._pause_s = read, pause_s
        self._newest: tuple[Value, float] | None = None
        """The value, and when its reading began."""
        self._error: Exception | None = None
        """Error of the newest reading."""
        self._due_at = 0.0
        self._reading: asyncio.Task[None] | None = None

    async def get(self) -> tuple[Value, float]:
        """The value and its age in seconds. If there is none yet, the error of the reading is
        raised. DeadlineError: the first reading takes too long."""
        if self._reading is None and time.monotonic() >= self._due_at:
            self._reading = asyncio.create_task(self._renew())
        if self._reading is not None:
            limit_s = _ANSWER_S if self._newest is None else _PATIENCE_S
            # The reading continues if a browser hangs up, or the limit is over.
            await asyncio.wait({self._reading}, timeout=limit_s)
        if self._newest is None:
            text = f"the files of the run were not read within {_ANSWER_S:g} s"
            raise self._error or DeadlineError(text)
        value, began = self._newest
        return value, time.monotonic() - began

    async def _renew(self) -> None:
        began = time.monotonic()
        try:
            self._newest = await asyncio.to_thread(self._read), began
        except (RelaxError, OSError) as error:
            # The last value is still shown, with its age.
            self._error = error
        finally:
            ended = time.monotonic()
            self._due_at = ended + max(self._pause_s, _COST_FACTOR * (ended - began))
            self._reading = None
