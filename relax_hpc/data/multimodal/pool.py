"""Worker processes that decode media: a file on which a decoder hangs, crashes or takes too much
memory costs its own worker alone, and is bad."""

from __future__ import annotations

import dataclasses
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source, name_of
from relax_hpc.net.workers.pool import WorkerPool
from relax_hpc.net.workers.process import Message


@dataclass(frozen=True, slots=True)
class Loaded:
    """A medium that a worker has made."""

    header: Header
    media_id: str
    """Name under which a store has it, see `relax_hpc.base.content_id`."""
    blob: memoryview = field(repr=False)
    """Bytes that `Medium.to_bytes` gives."""

    @property
    def medium(self) -> Medium:
        return Medium.from_bytes(self.blob)


@dataclass(frozen=True, slots=True)
class Ask:
    """Request to a worker."""

    kind: Kind
    source: Source
    content: bool
    """Whether the medium is wanted, and not its header alone."""
    options: MediumOptions = NO_OPTIONS


class MediaPool:
    """Pool of up to ``count`` workers for the media of one model; for one event loop."""

    def __init__(self, rules: Rules, limits: Limits | None = None, count: int = 1) -> None:
        self._pool = WorkerPool(MediaWork(rules, limits or Limits()), count)

    async def load(self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS) -> Loaded:
        """A medium. BadMedium: it cannot be used."""
        found = await self._of(Ask(kind, source, True, options))
        assert isinstance(found, Loaded)
        return found

    async def header(
        self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS
    ) -> Header:
        """Header of a medium. BadMedium: it cannot be used."""
        found = await self._of(Ask(kind, source, False, options))
        assert isinstance(found, Header)
        return found

    async def close(self) -> None:
        """End all workers."""
        await self._pool.close()

    async def _of(self, ask: Ask) -> Header | Loaded:
        found = await self._pool.run(ask)
        if isinstance(found, BadMedium):
            raise BadMedium(found.reason, f"{name_of(ask.source)}: {found.detail}")
        return found


class MediaWork:
    """The work of decoding the media of one model."""

    name = "media"
    module = "relax_hpc.data.multimodal.worker"
    watches_limit = False

    def __init__(self, rules: Rules, limits: Limits) -> None:
        self.rules, self.limits, self.limit_s = rules, limits, limits.time_s

    @property
    def setup(self) -> Message:
        return {"rules": dataclasses.asdict(self.rules), "limits": dataclasses.asdict(self.limits)}

    def make_request(self, asked: Ask) -> Message:
        where = (
            {"bytes": asked.source.hex()}
            if isinstance(asked.source, bytes)
            else {"path": str(asked.source)}
        )
        options = dataclasses.asdict(asked.options)
        return {"kind": asked.kind, "content": asked.content, "options": options, **where}

    def read_answer(self, message: Message) -> Header | Loaded | BadMedium:
        if "error" in message:
            reason, detail = message["error"]
            return BadMedium(Reason(reason), detail)
        header = Header(Kind(message["kind"]), tuple(message["grid"]), tuple(message["seconds"]))
        return (
            Loaded(header, message["media_id"], _mapped(Path(message["blob"])))
            if "blob" in message
            else header
        )

    def answer_unsendable(self, error: Exception) -> BadMedium:
        return BadMedium(Reason.URI, str(error))

    def answer_late(self, took_s: float, answer: Any) -> BadMedium:
        return BadMedium(
            Reason.HUNG, f"given up after {took_s:.1f} s, allowed file_timeout_s={self.limit_s:g}"
        )

    def answer_death(self, how: str) -> BadMedium:
        return BadMedium(Reason.DIED, f"the worker that decoded it {how}")

    def is_late(self, answer: Any) -> bool:
        return False


def _mapped(path: Path) -> memoryview:
    """Memory of another process, which lives on where that ends."""
    file = os.open(path, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
