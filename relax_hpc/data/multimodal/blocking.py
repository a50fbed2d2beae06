"""A pool of one media worker with blocking calls, for code that is not in an event loop, such as
the readers of rows and demonstrations."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions
from relax_hpc.data.multimodal.pool import Loaded, MediaPool
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source

T = TypeVar("T")


class BlockingMediaPool:
    """Pool of one worker, which starts with the first medium and ends with this object. Threads may
    share it."""

    def __init__(self, rules: Rules, limits: Limits) -> None:
        self._pool, self._loop = MediaPool(rules, limits), asyncio.new_event_loop()
        # The kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG). So one
        # thread that lives as long as this object starts all workers.
        threading.Thread(target=_run_loop, args=(self._loop,), name="media", daemon=True).start()
        weakref.finalize(self, _end_pool, self._pool, self._loop).atexit = False

    def header(self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS) -> Header:
        """Header of a medium. UnusableMedium: it cannot be used."""
        return self._await_result(self._pool.header(kind, source, options))

    def load(self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS) -> Loaded:
        """A medium. UnusableMedium: it cannot be used."""
        return self._await_result(self._pool.load(kind, source, options))

    def close(self) -> None:
        """End the worker; the next medium starts another."""
        self._await_result(self._pool.close())

    def _await_result(self, work: Coroutine[Any, Any, T]) -> T:
        # Without a timeout: the pool has one for each file.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end_pool(pool: MediaPool, loop: asyncio.AbstractEventLoop) -> None:
    async def close() -> None:
        await pool.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)
