"""The extent of events.jsonl that follows from a journal, and its comparison with the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.queue.controller import eventlog
from relax_hpc.queue.controller.eventlog import (
    chain_checksum,
    lines_after,
    read_trailer,
    split_lines,
)


@dataclass(slots=True)
class EventExtent:
    """Bytes of a beginning of events.jsonl, and checksums of its parts, see `eventlog`."""

    total: int = 0
    """Bytes of all lines."""
    parts: int = 0
    chain: int = 0
    """Checksum of the checksums of the complete parts."""
    size: int = 0
    """Bytes after the last complete part."""
    crc: int = 0

    def add(self, text: bytes) -> None:
        """Add whole lines."""
        self.total += len(text)
        end = text.find(b"\n", max(0, eventlog.PART_BYTES - 1 - self.size)) + 1
        while end > 0:
            part_crc = zlib.crc32(text[:end], self.crc)
            self.parts, self.chain = self.parts + 1, chain_checksum(self.chain, part_crc)
            self.size, self.crc, text = 0, 0, text[end:]
            end = text.find(b"\n", eventlog.PART_BYTES - 1) + 1
        self.size, self.crc = self.size + len(text), zlib.crc32(text, self.crc)

    def dump(self) -> Any:
        return self.total, self.parts, self.chain, self.size, self.crc


def lines_after_extent(path: Path, extent: EventExtent) -> Iterator[bytes] | None:
    """Lines of a log after ``extent``; None: the log does not begin with it.

    Of a compressed part only the checksum at its end is compared. OSError: see `event_lines`.
    """
    present = EventExtent()
    for part in eventlog.rotated_files(path)[: extent.parts]:
        if eventlog.rotation_number(part) != present.parts + 1:
            break
        crc, size = read_trailer(part)
        present.total, present.parts = present.total + size, present.parts + 1
        present.chain = chain_checksum(present.chain, crc)
    chunks = lines_after(path, present.parts)
    remainder = b""
    for chunk in chunks:
        missing = extent.total - present.total
        # Complete lines, so that a part ends where it does in the log.
        text = remainder + chunk
        if len(text) >= missing:
            present.add(text[:missing])
            remainder = text[missing:]
            break
        end = text.rfind(b"\n") + 1
        present.add(text[:end])
        remainder = text[end:]
    if present != extent:
        return None
    return split_lines(_with_first(remainder, chunks))


def _with_first(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from chunks
