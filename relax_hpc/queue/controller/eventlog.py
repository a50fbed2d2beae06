"""The file events.jsonl, a projection of the journal. Every controller writes it again, because a
crash may lose its end.

It has two lines for each row, so old lines are moved to compressed parts next to it: all but the
newest two parts, see `relax_hpc.base.log_rotation`. `event_lines` reads all of them. The ends of
the parts depend only on the lines. So every controller creates the same parts, an older controller
that ends late writes nothing else into them, and existing parts are kept.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.disk_waits import AppendFile, is_temporary, retry_write
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.foreign_files import LINE_BYTES, ForeignFileError, open_in_run
from relax_hpc.base.log_rotation import read_rotated_file, rotated_files, rotation_number

PART_BYTES = 16 << 20
"""Size of a part: it consists of the first lines that have at least so many bytes."""
_MOST_PART_BYTES = 4 * PART_BYTES
"""Upper bound of the unpacked bytes of a part: its last line may be long."""
_MOST_FILE_BYTES = 4 << 30
"""Upper bound of the bytes of the file itself: it grows while parts cannot be written."""
_CHUNK_BYTES = 4 << 20
_LEVEL = 3
_RETRY_S = 60.0
"""Seconds between tries to write a part after a failure."""
_TRAILER = struct.Struct("<II")
"""The end of a gzip file: checksum and bytes of its content, RFC 1952."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A beginning of the log: ``parts`` complete parts, then ``size`` bytes with checksum
    ``crc``."""

    size: int
    crc: int
    parts: int = 0
    chain: int = 0
    """Checksum of the checksums of the complete parts."""


class EventLog:
    """One controller's events.jsonl. It is published by rename, so that late lines of an older
    controller go to a file that is not read."""

    def __init__(self, path: Path, incarnation: int) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{incarnation}")
        self._next = path.with_name(f".{path.name}.{incarnation}.next")
        retry_write(self._temporary, lambda: self._temporary.unlink(missing_ok=True))
        self._lines = AppendFile(self._temporary)
        self._lines.write_all()
        self._published = False
        self._packing: threading.Thread | None = None
        self._retry_at = 0.0
        self._reset(0, 0)

    def _reset(self, removed: int, chain: int) -> None:
        """Begin with an empty file after ``removed`` compressed parts."""
        self._removed, self._chain = removed, chain
        """Number of parts that are no longer in the file, and the checksum of their checksums."""
        self._ends: list[tuple[int, int]] = []
        """Offsets of the ends of the complete parts in the file, and their checksums."""
        self._size = self._crc = 0
        """Bytes and checksum of the content after the last complete part."""

    # -- the beginning -----------------------------------------------------------------------------

    def begin_with(self, extent: Extent) -> bool:
        """Copy the beginning ``extent`` of the present events.jsonl; False, with an empty log: it
        does not match."""
        try:
            for piece in _pieces(lines_after(self.path, self._keep_parts(extent.parts))):
                if (self.extent.parts, self.extent.size) >= (extent.parts, extent.size):
                    break
                self.write(piece)
            self._truncate(extent)
        except (OSError, EOFError, zlib.error):
            pass
        if self.extent == extent:
            return True
        self._lines.write_all()
        retry_write(self._temporary, lambda: os.truncate(self.fileno(), 0))
        self._reset(0, 0)
        return False

    def _keep_parts(self, count: int) -> int:
        """Keep the first compressed parts, at most ``count``, without a change; their number."""
        chain = kept = 0
        for path in rotated_files(self.path)[:count]:
            if rotation_number(path) != kept + 1:
                break
            kept, chain = kept + 1, chain_checksum(chain, read_trailer(path)[0])
        self._reset(kept, chain)
        return kept

    def _truncate(self, extent: Extent) -> None:
        """Remove all content after ``extent``. The replay adds it again."""
        self._lines.write_all()
        self._ends = self._ends[: max(0, extent.parts - self._removed)]
        start = self._last_start()
        self._crc = 0
        for chunk in _read(self.fileno(), start, start + extent.size):
            self._crc = zlib.crc32(chunk, self._crc)
        self._size = extent.size
        os.truncate(self.fileno(), start + extent.size)

    # -- the end -----------------------------------------------------------------------------------

    def write(self, text: bytes) -> None:
        """Write whole lines."""
        self._lines.write(text)
        end = text.find(b"\n", max(0, PART_BYTES - 1 - self._size)) + 1
        while end > 0:
            offset = self._last_start() + self._size + end
            self._ends.append((offset, zlib.crc32(text[:end], self._crc)))
            self._size, self._crc, text = 0, 0, text[end:]
            end = text.find(b"\n", PART_BYTES - 1) + 1
        self._size, self._crc = self._size + len(text), zlib.crc32(text, self._crc)
        if not self._published:
            # During the replay of a whole journal no line may be dropped, and most parts already
            # exist.
            self._lines.write_all()
            while len(self._ends) > 1:
                retry_write(self._part, self._pack)
                retry_write(self.path, self._cut)

    def _last_start(self) -> int:
        """Offset at which the incomplete part begins."""
        return self._ends[-1][0] if self._ends else 0

    def publish(self) -> None:
        """Replace the events.jsonl of the former controller."""
        self._lines.write_all()
        retry_write(self.path, lambda: self._temporary.replace(self.path))
        self._published = True
        retry_write(self.path, self._remove_later_parts)

    def flush(self) -> None:
        self._lines.flush()
        if not self._lines.is_written:
            return
        if self._packing and not self._packing.is_alive():
            self._packing = None
            if self._is_packed():
                self._try_cut()
        if len(self._ends) > 1 and not self._packing and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_S
            self._packing = threading.Thread(target=self._try_pack, name="events", daemon=True)
            self._packing.start()

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _part(self) -> Path:
        """Path of the first part of the file, when it is compressed."""
        return self.path.with_name(f"{self.path.name}.{self._removed + 1:06d}.gz")

    def _is_packed(self) -> bool:
        """Whether the first part of the file exists compressed."""
        end, crc = self._ends[0]
        with contextlib.suppress(OSError, struct.error):
            return read_trailer(self._part) == (crc, end % (1 << 32))
        return False

    def _try_pack(self) -> None:
        with contextlib.suppress(OSError):
            self._pack()

    def _try_cut(self) -> None:
        """Remove the first part from the file. If the disk fails, the file only grows longer."""
        try:
            self._cut()
        except OSError as error:
            if not is_temporary(error):
                raise

    def _remove_later_parts(self) -> None:
        """Delete later parts of an older controller. This one writes their lines again."""
        for path in rotated_files(self.path):
            if rotation_number(path) > self._removed:
                path.unlink(missing_ok=True)

    def _pack(self) -> None:
        """Compress the first part, unless that is done. A thread may do this while the main thread
        appends."""
        if self._is_packed():
            return
        temporary = self.path.with_name(f".{self._part.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file, gzip.GzipFile("", "wb", _LEVEL, file, 0) as packed:
                for chunk in _read(self.fileno(), 0, self._ends[0][0]):
                    packed.write(chunk)
            temporary.replace(self._part)
        finally:
            temporary.unlink(missing_ok=True)

    def _cut(self) -> None:
        """Replace the file by one that begins after the first part. OSError: a write failed, and
        nothing changes."""
        (cut, crc), end = self._ends[0], self._last_start() + self._size
        self._next.unlink(missing_ok=True)
        lines = AppendFile(self._next)
        try:
            for chunk in _read(self.fileno(), cut, end):
                lines.write(chunk)
                # Before the file is published, a full disk is waited for. After that, the copy is
                # abandoned, so that the controller does not stop.
                lines.flush() if self._published else lines.write_all()
            if lines.dropped or not lines.is_written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._next))
            self._next.replace(self.path if self._published else self._temporary)
        except OSError:
            lines.close()
            with contextlib.suppress(OSError):
                self._next.unlink(missing_ok=True)
            raise
        lines.path = self.path if self._published else self._temporary
        self._lines.close()
        self._lines, self._removed = lines, self._removed + 1
        self._chain = chain_checksum(self._chain, crc)
        self._ends = [(offset - cut, part_crc) for offset, part_crc in self._ends[1:]]
        self._retry_at = 0.0

    # -- state -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._lines.fileno()

    @property
    def extent(self) -> Extent:
        """Extent of everything that was written."""
        chain = self._chain
        for _, crc in self._ends:
            chain = chain_checksum(chain, crc)
        return Extent(self._size, self._crc, self._removed + len(self._ends), chain)

    def check(self) -> None:
        """RelaxError: an older controller, which was suspended before it published its file, has
        replaced this one."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self.fileno())):
                return
        except FileNotFoundError:
            pass
        raise RelaxError(
            f"{self.path}: replaced or removed; a new controller writes it again from the journal"
        )

    def close(self) -> None:
        if self._packing:
            self._packing.join()
        self._lines.close()


def event_lines(path: Path) -> Iterator[bytes]:
    """All present lines of a log, with their line ends; of a damaged part, the lines before the
    damage.

    ForeignFileError: a file or a part is not a regular file of the run, or is larger than this
    package writes it.
    """
    yield from split_lines(lines_after(path, 0))


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    partial = b""
    try:
        for chunk in chunks:
            *lines, partial = (partial + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(partial) > LINE_BYTES:
                # No event is this long, and its beginning is not valid JSON.
                partial = partial[:LINE_BYTES]
    except ForeignFileError:
        raise
    except (OSError, EOFError, zlib.error):
        pass
    if partial:
        yield partial


def lines_after(path: Path, removed: int) -> Iterator[bytes]:
    """Bytes after the first ``removed`` parts."""
    try:
        file = open_in_run(path)
    except FileNotFoundError:
        return
    with file:
        # The parts are listed after the file was opened. So the file may still contain the last
        # part, as it does after a crash between writing the part and cutting the file.
        parts = rotated_files(path)
        for part_path in parts:
            if rotation_number(part_path) <= removed and part_path != parts[-1]:
                continue
            content = read_rotated_file(part_path, _MOST_PART_BYTES)
            is_in_file = file.read(len(content)) == content
            if rotation_number(part_path) > removed:
                yield content
            if is_in_file:
                break
            file.seek(0)
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_FILE_BYTES:
            text = f"found {size} bytes, allowed for events: {_MOST_FILE_BYTES}"
            raise ForeignFileError(errno.EFBIG, text, str(path))
        chunk = file.read(_CHUNK_BYTES)
        while chunk:
            yield chunk
            chunk = file.read(_CHUNK_BYTES)


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of ``chunks``, so short that at most one part ends in each of them."""
    size = PART_BYTES // 2 + 1
    for chunk in chunks:
        yield from (chunk[start : start + size] for start in range(0, len(chunk), size))


def _read(file: int, start: int, end: int) -> Iterator[bytes]:
    """Bytes ``start`` to ``end`` of the flushed content. Any thread may call it."""
    while start < end:
        chunk = os.pread(file, min(_CHUNK_BYTES, end - start), start)
        if not chunk:
            raise OSError(f"{end - start} bytes of the events are missing")
        yield chunk
        start += len(chunk)


def read_trailer(path: Path) -> tuple[int, int]:
    """Checksum and size of the content of a compressed part, from its gzip trailer."""
    with path.open("rb") as file:
        file.seek(-_TRAILER.size, os.SEEK_END)
        crc, size = _TRAILER.unpack(file.read(_TRAILER.size))
    return crc, size


def chain_checksum(chain: int, crc: int) -> int:
    return zlib.crc32(crc.to_bytes(4, "little"), chain)
