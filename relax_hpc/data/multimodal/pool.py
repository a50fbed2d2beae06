"""Pool of worker processes that decode media. If a decoder hangs, crashes or needs too much memory,
only its worker ends, and the medium is bad."""

from __future__ import annotations

import dataclasses
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source, name_of
from relax_hpc.net.workers.pool import WorkerPool
from relax_hpc.net.workers.process import Message


@dataclass(frozen=True, slots=True)
class Loaded:
    """A medium that a worker has decoded."""

    header: Header
    media_id: str
    """Id of the medium in a store, see `relax_hpc.base.content_id`."""
    blob: memoryview = field(repr=False)
    """The bytes of `Medium.to_bytes`."""

    @property
    def medium(self) -> Medium:
        return Medium.from_bytes(self.blob)


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """Request to a worker."""

    kind: Kind
    source: Source
    content: bool
    """Whether the medium is requested, not only its header."""
    options: MediumOptions = NO_OPTIONS


class MediaPool:
    """Pool of up to ``count`` workers for the media of one model; for one event loop."""

    def __init__(self, rules: Rules, limits: Limits | None = None, count: int = 1) -> None:
        self._pool = WorkerPool(MediaWork(rules, limits or Limits()), count)

    async def load(self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS) -> Loaded:
        """A medium. UnusableMedium: it cannot be used."""
        loaded = await self._run(MediaRequest(kind, source, True, options))
        assert isinstance(loaded, Loaded)
        return loaded

    async def header(
        self, kind: Kind, source: Source, options: MediumOptions = NO_OPTIONS
    ) -> Header:
        """Header of a medium. UnusableMedium: it cannot be used."""
        header = await self._run(MediaRequest(kind, source, False, options))
        assert isinstance(header, Header)
        return header

    async def close(self) -> None:
        """End all workers."""
        await self._pool.close()

    async def _run(self, request: MediaRequest) -> Header | Loaded:
        """Result of a request. UnusableMedium: the medium cannot be used."""
        result = await self._pool.run(request)
        if isinstance(result, UnusableMedium):
            raise UnusableMedium(result.reason, f"{name_of(request.source)}: {result.detail}")
        return result


class MediaWork:
    """Requests to the workers that decode the media of one model, and their results."""

    name = "media"
    module = "relax_hpc.data.multimodal.worker"
    watches_limit = False

    def __init__(self, rules: Rules, limits: Limits) -> None:
        self.rules, self.limits, self.limit_s = rules, limits, limits.time_s

    @property
    def setup(self) -> Message:
        return {"rules": dataclasses.asdict(self.rules), "limits": dataclasses.asdict(self.limits)}

    def make_request(self, medium: MediaRequest) -> Message:
        message: Message = {
            "kind": medium.kind,
            "content": medium.content,
            "options": dataclasses.asdict(medium.options),
        }
        if isinstance(medium.source, bytes):
            return message | {"bytes": medium.source.hex()}
        return message | {"path": str(medium.source)}

    def read_answer(self, message: Message) -> Header | Loaded | UnusableMedium:
        if "error" in message:
            reason, detail = message["error"]
            return UnusableMedium(Reason(reason), detail)
        header = Header(Kind(message["kind"]), tuple(message["grid"]), tuple(message["seconds"]))
        if "blob" not in message:
            return header
        return Loaded(header, message["media_id"], _map_memory(Path(message["blob"])))

    def answer_unsendable(self, error: Exception) -> UnusableMedium:
        return UnusableMedium(Reason.URI, str(error))

    def answer_late(self, took_s: float, answer: Any) -> UnusableMedium:
        return UnusableMedium(
            Reason.HUNG, f"timed out after {took_s:.1f} s, allowed file_timeout_s={self.limit_s:g}"
        )

    def answer_death(self, cause: str) -> UnusableMedium:
        return UnusableMedium(Reason.DIED, f"the worker that decoded it {cause}")

    def is_late(self, answer: Any) -> bool:
        return False


def _map_memory(path: Path) -> memoryview:
    """Memory of another process, mapped here. It stays valid after that process has ended."""
    file = os.open(path, os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
