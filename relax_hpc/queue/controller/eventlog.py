"""The file events.jsonl, a projection of the journal. Every controller makes it anew: a crash may
cost its end.

It has two lines a row, so it is cut: what is before the newest two parts lies compressed beside it,
see `relax_hpc.base.log_rotation`, and `event_lines` reads all of it. Where the parts end follows
from the lines alone. So every controller makes the same ones, an older one that ends late writes
nothing else into them, and what is there is kept.
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
"""Bytes of a part, which is the first lines that make as many."""
_MOST_PART_BYTES = 4 * PART_BYTES
"""Bytes that a part unpacks to, at most: a last line may be long."""
_MOST_FILE_BYTES = 4 << 30
"""Bytes of the file itself, at most: it grows while parts cannot be written."""
_CHUNK_BYTES = 4 << 20
_LEVEL = 3
_AGAIN_S = 60.0
"""Seconds between tries to write a part that could not be written."""
_TRAILER = struct.Struct("<II")
"""The end of a gzip file: checksum and bytes of its content, RFC 1952."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A beginning of the log: ``parts`` whole ones, and then so many bytes with this checksum."""

    size: int
    crc: int
    parts: int = 0
    chain: int = 0
    """Checksum of the checksums of the whole parts."""


class EventLog:
    """One controller's events.jsonl. It appears by rename, so that the late lines of an older
    controller go to a file that nobody reads."""

    def __init__(self, path: Path, incarnation: int) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{incarnation}")
        self._next = path.with_name(f".{path.name}.{incarnation}.next")
        retry_write(self._temporary, lambda: self._temporary.unlink(missing_ok=True))
        self._lines = AppendFile(self._temporary)
        self._lines.write_all()
        self._published = False
        self._packing: threading.Thread | None = None
        self._again_at = 0.0
        self._forget(0, 0)

    def _forget(self, gone: int, chain: int) -> None:
        """Begin with an empty file, beside which ``gone`` parts lie."""
        self._gone, self._chain = gone, chain
        self._ends: list[tuple[int, int]] = []
        """Offsets of the ends of the whole parts in the file, and their checksums."""
        self._size = self._crc = 0
        """Bytes and checksum of what is behind the last whole part."""

    # -- the beginning -----------------------------------------------------------------------------

    def begin_with(self, extent: Extent) -> bool:
        """Copy the beginning of what is there under the name now; False, and nothing, if it is not
        as ``extent``."""
        try:
            for piece in _pieces(_bytes_after(self.path, self._keep_parts(extent.parts))):
                if (self.extent.parts, self.extent.size) >= (extent.parts, extent.size):
                    break
                self.write(piece)
            self._shorten(extent)
        except (OSError, EOFError, zlib.error):
            pass
        if self.extent == extent:
            return True
        self._lines.write_all()
        retry_write(self._temporary, lambda: os.truncate(self.fileno(), 0))
        self._forget(0, 0)
        return False

    def _keep_parts(self, most: int) -> int:
        """Leave the first parts that are there compressed, at most so many, as they are; how
        many."""
        chain = kept = 0
        for part in rotated_files(self.path)[:most]:
            if rotation_number(part) != kept + 1:
                break
            kept, chain = kept + 1, _chained(chain, _content(part)[0])
        self._forget(kept, chain)
        return kept

    def _shorten(self, extent: Extent) -> None:
        """Leave out what is beyond ``extent``: it is told again."""
        self._lines.write_all()
        self._ends = self._ends[: max(0, extent.parts - self._gone)]
        start = self._start()
        self._crc = 0
        for chunk in _read(self.fileno(), start, start + extent.size):
            self._crc = zlib.crc32(chunk, self._crc)
        self._size = extent.size
        os.truncate(self.fileno(), start + extent.size)

    # -- the end -----------------------------------------------------------------------------------

    def write(self, text: bytes) -> None:
        """Write whole lines."""
        self._lines.write(text)
        while (end := text.find(b"\n", max(0, PART_BYTES - 1 - self._size))) >= 0:
            end += 1
            self._ends.append((self._start() + self._size + end, zlib.crc32(text[:end], self._crc)))
            self._size, self._crc, text = 0, 0, text[end:]
        self._size, self._crc = self._size + len(text), zlib.crc32(text, self._crc)
        if not self._published:
            # A whole journal is told, of which nothing may be left out; what it says of long ago is
            # there mostly.
            self._lines.write_all()
            while len(self._ends) > 1:
                retry_write(self._part, self._pack)
                retry_write(self.path, self._cut)

    def _start(self) -> int:
        """Offset at which the part begins that is not whole yet."""
        return self._ends[-1][0] if self._ends else 0

    def publish(self) -> None:
        """Put the file in place of the former one."""
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
            if self._there():
                self._cut_quietly()
        if len(self._ends) > 1 and not self._packing and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + _AGAIN_S
            self._packing = threading.Thread(target=self._pack_quietly, name="events", daemon=True)
            self._packing.start()

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _part(self) -> Path:
        """Path of the first part in the file, compressed."""
        return self.path.with_name(f"{self.path.name}.{self._gone + 1:06d}.gz")

    def _there(self) -> bool:
        """Whether the first part lies beside the file."""
        end, crc = self._ends[0]
        with contextlib.suppress(OSError, struct.error):
            return _content(self._part) == (crc, end % (1 << 32))
        return False

    def _pack_quietly(self) -> None:
        with contextlib.suppress(OSError):
            self._pack()

    def _cut_quietly(self) -> None:
        """Cut the file if the disk allows it; else the old file just goes on growing."""
        try:
            self._cut()
        except OSError as error:
            if not is_temporary(error):
                raise

    def _remove_later_parts(self) -> None:
        """Remove parts of an older controller: what they hold is written anew."""
        for part in rotated_files(self.path):
            if rotation_number(part) > self._gone:
                part.unlink(missing_ok=True)

    def _pack(self) -> None:
        """Write it, unless it is there. The main thread only appends meanwhile."""
        if self._there():
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
        """Go on in a file that begins behind the first part. OSError: the disk does not let it, and
        nothing changes."""
        (cut, crc), end = self._ends[0], self._start() + self._size
        self._next.unlink(missing_ok=True)
        rest = AppendFile(self._next)
        try:
            for chunk in _read(self.fileno(), cut, end):
                rest.write(chunk)
                # At the start it waits for room, as for all else.
                rest.flush() if self._published else rest.write_all()
            if rest.dropped or not rest.is_written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._next))
            self._next.replace(self.path if self._published else self._temporary)
        except OSError:
            rest.close()
            with contextlib.suppress(OSError):
                self._next.unlink(missing_ok=True)
            raise
        rest.path = self.path if self._published else self._temporary
        self._lines.close()
        self._lines, self._gone, self._chain = rest, self._gone + 1, _chained(self._chain, crc)
        self._ends = [(other - cut, its) for other, its in self._ends[1:]]
        self._again_at = 0.0

    # -- what others ask ---------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._lines.fileno()

    @property
    def extent(self) -> Extent:
        """Extent of all that was written."""
        chain = self._chain
        for _, crc in self._ends:
            chain = _chained(chain, crc)
        return Extent(self._size, self._crc, self._gone + len(self._ends), chain)

    def check(self) -> None:
        """RelaxError if an older controller, stopped and continued before it published, has put its
        file over this."""
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
    """All lines of a log now, with their line ends; of a damaged part, those before the damage.

    ForeignFileError: a file or a part is no file of a run, or is larger than this package makes
    them.
    """
    yield from _lines_of(_bytes_after(path, 0))


def _lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    try:
        for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(rest) > LINE_BYTES:
                # No event is as long; its beginning is not whole JSON.
                rest = rest[:LINE_BYTES]
    except ForeignFileError:
        raise
    except (OSError, EOFError, zlib.error):
        pass
    if rest:
        yield rest


def _bytes_after(path: Path, gone: int) -> Iterator[bytes]:
    """Bytes behind the first ``gone`` parts."""
    try:
        file = open_in_run(path)
    except FileNotFoundError:
        return
    with file:
        # Listed later than opened: the last may be in the file yet, as it is after a crash between
        # the two.
        for part in (parts := rotated_files(path)):
            if rotation_number(part) <= gone and part != parts[-1]:
                continue
            content = read_rotated_file(part, _MOST_PART_BYTES)
            again = file.read(len(content)) == content
            if rotation_number(part) > gone:
                yield content
            if again:
                break
            file.seek(0)
        if (size := os.fstat(file.fileno()).st_size) > _MOST_FILE_BYTES:
            text = f"found {size} bytes, allowed for events: {_MOST_FILE_BYTES}"
            raise ForeignFileError(errno.EFBIG, text, str(path))
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of ``chunks`` that are short enough for no two parts to end in one."""
    size = PART_BYTES // 2 + 1
    for chunk in chunks:
        yield from (chunk[start : start + size] for start in range(0, len(chunk), size))


def _read(file: int, start: int, end: int) -> Iterator[bytes]:
    """Bytes ``start`` to ``end`` of what was flushed; may be called from any thread."""
    while start < end:
        chunk = os.pread(file, min(_CHUNK_BYTES, end - start), start)
        if not chunk:
            raise OSError(f"{end - start} bytes of the events are missing")
        yield chunk
        start += len(chunk)


def _content(part: Path) -> tuple[int, int]:
    """Checksum and bytes of what a part holds, as it says itself."""
    with part.open("rb") as file:
        file.seek(-_TRAILER.size, os.SEEK_END)
        crc, size = _TRAILER.unpack(file.read(_TRAILER.size))
    return crc, size


def _chained(chain: int, crc: int) -> int:
    return zlib.crc32(crc.to_bytes(4, "little"), chain)
