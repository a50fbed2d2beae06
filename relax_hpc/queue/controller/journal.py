"""The controller's append-only journal: one file for each incarnation, with checksums. A successor
seals the files before its own.

A record is on disk before its effect is visible, so it survives a power loss. If the journal is not
durable, a record is only passed to the operating system, and survives the death of any process.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import FencedError
from relax_hpc.base.rundir import sync_directory

FORMAT = 3
"""Format of the records. A journal of another format is refused."""
_SIZES = struct.Struct("<II")
_CHECK = struct.Struct("<I")
_HEAD = _SIZES.size + _CHECK.size
_NAME = re.compile(r"inc-(\d{6})\.journal")
_READ_BYTES = 1 << 20


class JournalError(ValueError):
    """A journal that is damaged before its end. The message names the file and the offset."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position between two records: a number of bytes in an incarnation's file, after all files
    that this file seals."""

    incarnation: int
    offset: int


def _frame(body: bytes) -> bytes:
    """``body`` with its length and checksum before it, and a checksum over those two, so that a
    wrong length is not taken for an incomplete record."""
    sizes = _SIZES.pack(len(body), zlib.crc32(body))
    return sizes + _CHECK.pack(zlib.crc32(sizes)) + body


def _read(path: Path, start: int, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of ``path`` from ``start`` on, with the offset after each.

    Without a ``limit``, an incomplete record at the end is ignored. After a power loss, zeros may
    be there instead of the last records. JournalError: a record before the end is damaged.
    """
    end = path.stat().st_size if limit is None else limit
    at = start
    with path.open("rb", buffering=_READ_BYTES) as file:
        file.seek(start)
        body = _next_body(file, path, at, end, may_be_torn=limit is None)
        while body:
            at += _HEAD + len(body)
            yield at, msgpack.unpackb(body, strict_map_key=False)
            body = _next_body(file, path, at, end, may_be_torn=limit is None)
    if limit is not None and at != limit:
        raise JournalError(f"{path}: ends at offset {at}, sealed at {limit}")


def _next_body(file: BinaryIO, path: Path, at: int, end: int, may_be_torn: bool) -> bytes:
    """The record at offset ``at``, up to ``end``; empty: there is no record, or an incomplete
    one."""
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
    """The journal of a new incarnation. `replay` yields the records of earlier ones.

    The first record of a file seals the files before it at the lengths that were read. What an
    older controller writes after that is never read.
    """

    def __init__(self, folder: Path, incarnation: int, durable: bool = True) -> None:
        self.folder, self.incarnation, self.durable = folder, incarnation, durable
        self.path = folder / f"inc-{incarnation:06d}.journal"
        self.torn_bytes: dict[str, int] = {}
        """Files that end with an incomplete record, as after a crash, and the bytes of that.
        `replay` finds them."""
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
        """All records of earlier incarnations in order, or those ``after`` a position that `covers`
        accepts. Then it seals their files.

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
                self._find_torn_tail(path, lengths[incarnation], incarnation in self._sealed)
        names = {str(incarnation): length for incarnation, length in lengths.items()}
        self.append({"op": "seal", "lengths": names, "format": FORMAT})
        retry_write(self.path, self.commit)

    def covers(self, position: Position) -> bool:
        """Whether `replay` yields the records after ``position``."""
        path = self._earlier.get(position.incarnation)
        if path is None:
            return False
        return position.offset <= self._sealed.get(position.incarnation, path.stat().st_size)

    @property
    def position(self) -> Position:
        """Position after the last committed record."""
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
        """Valid bytes of each earlier file that a later file has sealed.

        The newest seal counts. Bytes that an older controller wrote later are not read at all.
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
            for older in self._earlier:
                if older < incarnation:
                    sealed.setdefault(older, first["lengths"].get(str(older), 0))
        return sealed

    def _find_torn_tail(self, path: Path, end: int, sealed: bool) -> None:
        """Record an incomplete end of the newest file. Sync the file, because its controller may
        have died before it did."""
        with path.open("rb") as file:
            if self.durable:
                os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            if not sealed and size > end:
                self.torn_bytes[path.name] = size - end

    def _files(self) -> dict[int, str]:
        files = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match:
                    files[int(match[1])] = match[0]
        return files

    def find_successor(self) -> int:
        """Incarnation of a successor, or 0. Call it after ``commit`` and before replies are sent. A
        successor creates its file before it reads this one. So if there is no successor after a
        commit, a later one will replay the committed records."""
        newest = max(self._files(), default=0)
        return newest if newest > self.incarnation else 0

    def check_newest(self) -> None:
        """FencedError: there is a successor."""
        successor = self.find_successor()
        if successor:
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
        """Write all buffered records, to disk if durable; whether there were any.

        OSError: none of them counts, and the next call writes all of them again. That is necessary
        because Linux marks pages as clean after a failed fsync: a later fsync would succeed
        although they are not on disk.
        """
        if not self._pending:
            return False
        data = b"".join(self._pending)
        written = 0
        while written < len(data):
            remaining = data[written:] if written else data
            written += os.pwrite(self._file.fileno(), remaining, self._written + written)
        if self.durable:
            os.fdatasync(self._file.fileno())
        self._pending.clear()
        self._written += len(data)
        return True

    def close(self) -> None:
        """Close the file in any case. OSError: as of `commit`."""
        try:
            self.commit()
        finally:
            self._file.close()
