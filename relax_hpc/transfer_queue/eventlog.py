"""The file events.jsonl, a projection of the journal. Every controller makes it anew: a crash may cost its end."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.disk import Lines
from relax_hpc.errors import RelaxError

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """A file's first bytes: how many, and their checksum."""

    size: int
    crc: int


class EventLog:
    """One controller's events.jsonl. It appears by rename, so that the late lines of an older controller go to a file
    that nobody reads."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{epoch}")
        self._temporary.unlink(missing_ok=True)
        self._lines = Lines(self._temporary)
        self._lines.settle()
        self._size = self._crc = 0

    def begin_with(self, extent: Extent) -> bool:
        """Copy the beginning of what is there under the name now; False, and nothing, if it is not as ``extent``."""
        size = crc = 0
        try:
            with self.path.open("rb") as former:
                while chunk := former.read(min(_CHUNK_BYTES, extent.size - size)):
                    size, crc = size + len(chunk), zlib.crc32(chunk, crc)
                    self._lines.write(chunk)
                    self._lines.settle()
        except FileNotFoundError:
            pass
        if Extent(size, crc) == extent:
            self._size, self._crc = size, crc
            return True
        os.truncate(self.fileno(), 0)
        return False

    def write(self, text: bytes) -> None:
        self._lines.write(text)
        self._size, self._crc = self._size + len(text), zlib.crc32(text, self._crc)

    def publish(self) -> None:
        """Put it in place of the former file."""
        self._lines.settle()
        self._temporary.replace(self.path)

    def flush(self) -> None:
        self._lines.flush()

    def fileno(self) -> int:
        return self._lines.fileno()

    @property
    def extent(self) -> Extent:
        """All that was written."""
        return Extent(self._size, self._crc)

    def check(self) -> None:
        """RelaxError if an older controller, stopped and continued before it published, has put its file over this."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self.fileno())):
                return
        except FileNotFoundError:
            pass
        raise RelaxError(f"{self.path}: replaced or removed; a new controller writes it again from the journal")

    def close(self) -> None:
        self._lines.close()
