"""Media of prompts that will be drawn soon, decoded and stored while nobody waits for others: they
are there when they are wanted, and no place of an engine stays empty for them."""

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
    """Media by a pool of workers, some of them ahead; for one event loop."""

    def __init__(
        self, rules: Rules, settings: MultimodalConfig, store: Callable[[Loaded], object]
    ) -> None:
        """``store``: where a medium will be looked for, before anybody has asked for it; called in
        a thread."""
        self._store = store
        self._workers, self.most_bytes = (
            settings.mm_processor_pool_size,
            settings.ahead_mb * 1_000_000,
        )
        self._pool = MediaPool(rules, Limits.from_config(settings), self._workers)
        self._former: frozenset[Key] = frozenset()
        """Media that were expected the last time: some of them may be about to be loaded."""
        self._expected: list[Key] = []
        """Media that are not begun yet, in the order in which they will be wanted."""
        self._begun: dict[Key, asyncio.Task[Loaded]] = {}
        self._wanted = 0
        """Media that somebody waits for."""
        self._working: set[asyncio.Task[Loaded]] = set()
        """Tasks of the workers that are at something ahead."""

    async def load(self, medium: PromptMedium) -> Loaded:
        """A medium. BadMedium: it cannot be used."""
        key = medium.kind, medium.source, medium.options
        self._wanted += 1
        try:
            if begun := self._begun.pop(key, None):
                return await begun
            return await self._pool.load(*key)
        finally:
            self._wanted -= 1
            self._go_on()

    def expect(self, media: Iterable[PromptMedium]) -> None:
        """Begin with these, which will be wanted in this order; what was expected neither now nor
        the last time is given up."""
        if not self.most_bytes:
            return
        keys = dict.fromkeys((medium.kind, medium.source, medium.options) for medium in media)
        self._begun = {
            key: task for key, task in self._begun.items() if key in self._former.union(keys)
        }
        self._expected = [key for key in keys if key not in self._begun]
        self._former = frozenset(keys)
        self._go_on()

    async def close(self) -> None:
        """Give up all that is ahead, and end the workers."""
        self._expected, begun = [], [*self._working, *self._begun.values()]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await self._pool.close()

    @property
    def bytes(self) -> int:
        """Bytes of the media that are ready."""
        ready = (
            task
            for task in self._begun.values()
            if task.done() and not task.cancelled() and not task.exception()
        )
        return sum(task.result().blob.nbytes for task in ready)

    def _go_on(self) -> None:
        """Have as many workers as there are for what is expected, once nobody waits."""
        while self._expected and not self._wanted and len(self._working) < self._workers:
            if self.bytes >= self.most_bytes:
                return
            key = self._expected.pop(0)
            self._begun[key] = asyncio.create_task(self._made(*key))
            self._begun[key].add_done_callback(self._left)
            self._working.add(self._begun[key])

    async def _made(self, kind: Kind, source: Source, options: MediumOptions) -> Loaded:
        found = await self._pool.load(kind, source, options)
        # Too large, or a full disk: whoever wants it stores it again, and is told.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._store, found)
        return found

    def _left(self, task: asyncio.Task[Loaded]) -> None:
        self._working.discard(task)
        self._go_on()
