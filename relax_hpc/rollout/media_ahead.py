"""Media of prompts that will be generated soon, decoded and stored while no prompt waits for media.
They are ready when they are needed, so that no engine slot stays empty."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.options import MediumOptions
from relax_hpc.data.multimodal.pool import Loaded, MediaPool
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source

Key = tuple[Kind, Source, MediumOptions]


class MediaAhead:
    """A pool of workers that decodes requested media, and expected media while none are requested.
    For one event loop."""

    def __init__(
        self, rules: Rules, settings: MultimodalConfig, store: Callable[[Loaded], object]
    ) -> None:
        """``store`` stores an expected medium where it will be read; it is called in a thread."""
        self._store = store
        self._workers = settings.mm_processor_pool_size
        self.max_bytes = settings.ahead_mb * 1_000_000
        """Most bytes of expected media that are kept ready; 0: none."""
        self._pool = MediaPool(rules, Limits.from_config(settings), self._workers)
        self._previously_expected: frozenset[Key] = frozenset()
        """Media of the previous `expect`, some of which may be requested at any moment."""
        self._pending: list[Key] = []
        """Expected media whose decoding has not started, in the order of their prompts."""
        self._started: dict[Key, asyncio.Task[Loaded]] = {}
        self._requested = 0
        """Calls of `load` that are running."""
        self._working: set[asyncio.Task[Loaded]] = set()
        """Tasks that decode expected media."""

    async def load(self, medium: PromptMedium) -> Loaded:
        """A decoded medium. UnusableMedium: it cannot be used."""
        key = medium.kind, medium.source, medium.options
        self._requested += 1
        try:
            started = self._started.pop(key, None)
            if started:
                return await started
            return await self._pool.load(*key)
        finally:
            self._requested -= 1
            self._start_pending()

    def expect(self, media: Iterable[PromptMedium]) -> None:
        """Start to decode ``media``, which will be requested in this order. Discard media that
        neither this call nor the previous one expects."""
        if not self.max_bytes:
            return
        keys = dict.fromkeys((medium.kind, medium.source, medium.options) for medium in media)
        kept = self._previously_expected.union(keys)
        self._started = {key: task for key, task in self._started.items() if key in kept}
        self._pending = [key for key in keys if key not in self._started]
        self._previously_expected = frozenset(keys)
        self._start_pending()

    async def close(self) -> None:
        """Discard all expected media, and end the workers."""
        self._pending, tasks = [], [*self._working, *self._started.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    @property
    def bytes(self) -> int:
        """Bytes of the media that are ready."""
        total = 0
        for task in self._started.values():
            if task.done() and not task.cancelled() and not task.exception():
                total += task.result().blob.nbytes
        return total

    def _start_pending(self) -> None:
        """Start to decode expected media on all workers, unless a medium is requested."""
        while self._pending and not self._requested and len(self._working) < self._workers:
            if self.bytes >= self.max_bytes:
                return
            key = self._pending.pop(0)
            task = asyncio.create_task(self._load_and_store(*key))
            self._started[key] = task
            task.add_done_callback(self._remove_task)
            self._working.add(task)

    async def _load_and_store(self, kind: Kind, source: Source, options: MediumOptions) -> Loaded:
        loaded = await self._pool.load(kind, source, options)
        # OSError: the medium is too large, or the disk is full. The caller of `load` stores it
        # again, and gets the error.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._store, loaded)
        return loaded

    def _remove_task(self, task: asyncio.Task[Loaded]) -> None:
        self._working.discard(task)
        self._start_pending()
