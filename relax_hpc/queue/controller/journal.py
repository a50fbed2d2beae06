"""The controller's append-only journal: a file an incarnation, checksummed records, a successor
seals what was before.

A record is on disk before its effect is seen, so it survives a power loss. Not durable, it is
handed to the operating system instead and survives the death of any process.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgpack

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import FencedError
from relax_hpc.base.rundir import sync_directory

FORMAT = 3
"""Format of the records: a journal of another one is refused."""
_SIZES = struct.Struct("<II")
_CHECK = struct.Struct("<I")
_HEAD = _SIZES.size + _CHECK.size
_NAME = re.compile(r"inc-(\d{6})\.journal")
_READ_BYTES = 1 << 20


class JournalError(ValueError):
    """A journal damaged in its middle; the message names the file and the offset."""


@dataclass(frozen=True, slots=True)
class Position:
    """Place between two records: a number of bytes of an incarnation's file, and all that this file
    seals."""

    incarnation: int
    offset: int


def _frame(body: bytes) -> bytes:
    """Length and checksum of ``body``, a checksum over those two, so that a bad length is not taken
    for a torn tail."""
    sizes = _SIZES.pack(len(body), zlib.crc32(body))
    return sizes + _CHECK.pack(zlib.crc32(sizes)) + body


def _read(path: Path, start: int, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of ``path`` from ``start`` on, with the offset behind each.

    Without a ``limit`` a torn tail ends it; a bad middle raises. After a power loss zeros may stand
    where the last records were to be.
    """
    end = path.stat().st_size if limit is None else limit
    at = start
    with path.open("rb", buffering=_READ_BYTES) as file:
        file.seek(start)
        while body := _next_body(file, path, at, end, may_be_torn=limit is None):
            at += _HEAD + len(body)
            yield at, msgpack.unpackb(body, strict_map_key=False)
    if limit is not None and at != limit:
        raise JournalError(f"{path}: ends at offset {at}, sealed at {limit}")


def _next_body(file: BufferedReader, path: Path, at: int, end: int, may_be_torn: bool) -> bytes:
    """The record at offset ``at`` of what counts up to ``end``; empty if none, or a torn one, is
    there."""
    head = file.read(min(_HEAD, end - at))
    if len(head) < _HEAD:
        return b""
    size, crc = _SIZES.unpack_from(head)
    if zlib.crc32(head[: _SIZES.size]) != _CHECK.unpack_from(head, _SIZES.size)[0]:
        if may_be_torn and not any(head) and not any(file.read()):
            return b""
        raise JournalError(f"{path}: a record's length does not match its checksum at offset {at}")
    body = file.read(min(size, end - at - _HEAD))
    if len(body) < size:
        return b""
    if zlib.crc32(body) != crc:
        if may_be_torn and at + _HEAD + size == end:
            return b""
        raise JournalError(f"{path}: checksum does not match at offset {at}")
    return body


class Journal:
    """Opens a new incarnation's file and yields what the earlier ones recorded.

    The first record of a file seals its predecessors at the lengths that were read, so that what an
    older controller still writes is never seen.
    """

    def __init__(self, folder: Path, incarnation: int, durable: bool = True) -> None:
        self.folder, self.incarnation, self.durable = folder, incarnation, durable
        self.path = folder / f"inc-{incarnation:06d}.journal"
        self.cut: dict[str, int] = {}
        """Files whose tails `replay` cut off, as a crash may leave them: bytes that are no whole
        record."""
        self.records = 0
        """Records appended so far."""
        self._pending: list[bytes] = []
        self._file = self.path.open("xb", buffering=0)
        self._written = 0
        try:
            if durable:
                sync_directory(folder)
        except OSError:
            self._file.close()
            self.path.unlink()
            raise

    def replay(self, after: Position | None = None) -> Iterator[dict[str, Any]]:
        """All records of earlier incarnations, in order, or those ``after`` a position that
        `covers`; then seals them.

        Call it once, before ``append``.
        """
        lengths = dict(self._sealed)
        for incarnation, path in sorted(self._earlier.items()):
            start = after.offset if after and after.incarnation == incarnation else 0
            if after is None or incarnation >= after.incarnation:
                reached = start
                for end, record in _read(path, start, self._sealed.get(incarnation)):
                    reached = end
                    if record["op"] != "seal":
                        yield record
                lengths.setdefault(incarnation, reached)
                self._look_for_tail(path, lengths[incarnation], incarnation in self._sealed)
        named = {str(incarnation): length for incarnation, length in lengths.items()}
        self.append({"op": "seal", "lengths": named, "format": FORMAT})
        retry_write(self.path, self.commit)

    def covers(self, position: Position) -> bool:
        """Whether ``position`` lies in what `replay` yields."""
        path = self._earlier.get(position.incarnation)
        if path is None:
            return False
        return position.offset <= self._sealed.get(position.incarnation, path.stat().st_size)

    @property
    def position(self) -> Position:
        """Position behind what was committed."""
        return Position(self.incarnation, self._written)

    @cached_property
    def _earlier(self) -> dict[int, Path]:
        return {
            incarnation: self.folder / name
            for incarnation, name in self._files().items()
            if incarnation < self.incarnation
        }

    @cached_property
    def _sealed(self) -> dict[int, int]:
        """Bytes that count of each earlier file, where a later one says it.

        The newest seal binds: what an older controller wrote later, whole or not, is not even
        looked at.
        """
        sealed: dict[int, int] = {}
        for incarnation in sorted(self._earlier, reverse=True):
            _, first = next(
                _read(self._earlier[incarnation], 0, sealed.get(incarnation)), (0, None)
            )
            if first is None:
                continue
            if first.get("format", 1) != FORMAT:
                text = f"format {first.get('format', 1)}, this program reads {FORMAT}"
                raise JournalError(
                    f"{self._earlier[incarnation]}: {text}; finish the run with the program that "
                    "began it"
                )
            for older in [other for other in self._earlier if other < incarnation]:
                sealed.setdefault(older, first["lengths"].get(str(older), 0))
        return sealed

    def _look_for_tail(self, path: Path, end: int, sealed: bool) -> None:
        """Note a torn tail of the newest file, and have on disk what its controller may have left
        unsynced."""
        with path.open("rb") as file:
            if self.durable:
                os.fsync(file.fileno())
            if not sealed and (size := os.fstat(file.fileno()).st_size) > end:
                self.cut[path.name] = size - end

    def _files(self) -> dict[int, str]:
        with os.scandir(self.folder) as entries:
            return {
                int(match[1]): match[0]
                for entry in entries
                if (match := _NAME.fullmatch(entry.name))
            }

    def superseded(self) -> int:
        """Incarnation of a successor, or 0. Ask after ``commit`` and before replying: a successor
        makes its file before it reads this one, so what was written while there was none is in its
        replay."""
        newest = max(self._files(), default=0)
        return newest if newest > self.incarnation else 0

    def check_newest(self) -> None:
        """Raise FencedError once there is a successor."""
        if successor := self.superseded():
            text = (
                f"hub incarnation {self.incarnation} is over: incarnation {successor} has taken "
                "its place"
            )
            raise FencedError(text)

    def append(self, record: dict[str, Any]) -> None:
        """Buffer ``record``; it counts after the next ``commit``."""
        self.records += 1
        self._pending.append(_frame(msgpack.packb(record)))

    def commit(self) -> bool:
        """Write all buffered records at once, to disk if durable; whether there were any.

        OSError: none of them counts, and the next call writes all of them again. A kernel takes
        what it could not sync for written from then on, so nothing less would do.
        """
        if not self._pending:
            return False
        data = b"".join(self._pending)
        done = 0
        while done < len(data):
            done += os.pwrite(
                self._file.fileno(), data[done:] if done else data, self._written + done
            )
        if self.durable:
            os.fdatasync(self._file.fileno())
        self._pending.clear()
        self._written += len(data)
        return True

    def close(self) -> None:
        """Close the file in any case; raises as `commit`."""
        try:
            self.commit()
        finally:
            self._file.close()
