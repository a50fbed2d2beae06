"""Summaries of files that only grow, so that a command does not parse a long run again.

A file is divided into blocks: each has the first whole units (lines, gzip members) that take at
least `BLOCK_BYTES`. The summary of a file has the parsed content of its complete blocks, and the
checksum of the bytes that they were parsed from. A reader compares the checksum with the file, and
parses only the blocks that are not summarised, or differ. So it returns the same with a summary and
without one. Nothing else depends on summaries, and anybody may delete them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgpack

from relax_hpc.base.foreign_files import ForeignFileError, open_in_run

BLOCK_BYTES = 1 << 18
FOLDER = "summaries"
"""Folder of a run directory with the summaries."""
_HEAD = struct.Struct("<4sIQIII")
"""Magic, format of the content, bytes of the block and their crc, bytes of the content and their
crc."""
_MAGIC = b"RLXS"
_LEVEL = 1
_MAX_CONTENT_BYTES = 256 << 20
_GZIP_TRAILER = struct.Struct("<II")
"""Checksum and size of the unpacked content, RFC 1952."""
Bytes = bytes | mmap.mmap
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Rules by which blocks of a kind of file are found and parsed."""

    number: int
    """Number of the format of the parsed content. A summary with another number is not used."""
    parse: Callable[[bytes], Any]
    """Content of whole units, as values of msgpack."""
    cut: Callable[[Bytes, int], int]
    """End of the complete block that begins at an offset; 0: it is not complete."""


@dataclass(frozen=True, slots=True)
class _Block:
    size: int
    crc: int
    packed: bytes

    def content(self) -> Any:
        unpacked = zlib.decompressobj()
        body = unpacked.decompress(self.packed, _MAX_CONTENT_BYTES)
        return msgpack.unpackb(body, strict_map_key=False, use_list=True)


def read_with_summary(read: Callable[[bool], Result]) -> Result:
    """Result of ``read(True)``, which uses summaries; of ``read(False)`` if that fails because
    somebody else has written a summary."""
    try:
        return read(True)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return read(False)


def cut_after_line(data: Bytes, start: int) -> int:
    """End of the block of lines that begins at ``start``; 0: it is not complete."""
    if len(data) - start < BLOCK_BYTES:
        return 0
    return data.find(b"\n", start + BLOCK_BYTES - 1) + 1


def summary_of(root: Path, source: Path) -> Path:
    """File with the summary of ``source``, a file below the run directory ``root``."""
    return root / FOLDER / f"{'.'.join(source.relative_to(root).parts)}.blocks"


def read_blocks(source: Path, summary: Path | None, form: BlockFormat) -> Iterator[Any]:
    """Parsed content of ``source``, block by block.

    ``summary``: see `summary_of`; None: parse everything. OSError: the file cannot be read;
    ForeignFileError: it must not be read.
    """
    with open_in_run(source) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            for block in _matching_blocks(data, summary, form):
                try:
                    content = block.content()
                except (ValueError, zlib.error, RecursionError):
                    break
                at += block.size
                yield content
            while at < len(data):
                end = form.cut(data, at) or len(data)
                yield form.parse(data[at:end])
                at = end


def read_packed_file(
    source: Path, summary: Path | None, form: BlockFormat, unpack: Callable[[Path], bytes]
) -> Any:
    """Parsed content of ``source``, a rotated file that is one gzip member and does not change.

    The summary is compared with the checksum and the size at the end of the file, which is
    not unpacked. ``unpack``: the file's content.
    """
    with open_in_run(source) as file:
        trailer = _read_trailer(file)
    for block in _stored_blocks(summary, form):
        with contextlib.suppress(ValueError, zlib.error, RecursionError):
            if (block.crc, block.size) == trailer:
                return block.content()
        break
    return form.parse(unpack(source))


def extend_summary(source: Path, summary: Path, form: BlockFormat) -> None:
    """Add the complete blocks of ``source`` that ``summary`` does not have. OSError: see
    `read_blocks`."""
    with open_in_run(source) as file:
        size = os.fstat(file.fileno()).st_size
        if size < BLOCK_BYTES:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            blocks = list(_matching_blocks(data, summary, form))
            at = sum(block.size for block in blocks)
            stored = sum(_HEAD.size + len(block.packed) for block in blocks)
            if not form.cut(data, at):
                return
            summary.parent.mkdir(exist_ok=True)
            with summary.open("ab") as output:
                output.truncate(stored)
                while end := form.cut(data, at):
                    output.write(_frame(data[at:end], form))
                    at = end


def summarise_packed_file(
    source: Path, summary: Path, form: BlockFormat, unpack: Callable[[Path], bytes]
) -> None:
    """Write the summary of a rotated file, unless it exists. OSError: see `read_packed_file`."""
    with open_in_run(source) as file:
        trailer = _read_trailer(file)
    for block in _stored_blocks(summary, form):
        if (block.crc, block.size) == trailer:
            return
        break
    summary.parent.mkdir(exist_ok=True)
    temporary = summary.with_name(f".{summary.name}.{os.getpid()}")
    try:
        temporary.write_bytes(_frame(unpack(source), form))
        temporary.replace(summary)
    finally:
        temporary.unlink(missing_ok=True)


def _frame(data: bytes, form: BlockFormat) -> bytes:
    body = zlib.compress(msgpack.packb(form.parse(data)), _LEVEL)
    head = _HEAD.pack(_MAGIC, form.number, len(data), zlib.crc32(data), len(body), zlib.crc32(body))
    return head + body


def _matching_blocks(data: Bytes, summary: Path | None, form: BlockFormat) -> Iterator[_Block]:
    """Stored blocks that were made of the first bytes of ``data``."""
    at = 0
    for block in _stored_blocks(summary, form):
        end = at + block.size
        if end > len(data) or zlib.crc32(data[at:end]) != block.crc:
            return
        yield block
        at = end


def _stored_blocks(summary: Path | None, form: BlockFormat) -> Iterator[_Block]:
    """Blocks of a summary up to the first that is incomplete, damaged or of another format."""
    if summary is None:
        return
    try:
        file = open_in_run(summary)
    except (ForeignFileError, OSError):
        return
    with file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, number, size, crc, packed_bytes, packed_crc = _HEAD.unpack(head)
            if (magic, number) != (_MAGIC, form.number) or packed_bytes > _MAX_CONTENT_BYTES:
                return
            packed = file.read(packed_bytes)
            if len(packed) != packed_bytes or zlib.crc32(packed) != packed_crc:
                return
            yield _Block(size, crc, packed)


def _read_trailer(file: BinaryIO) -> Sequence[int]:
    """Checksum and size that the last bytes of a gzip file state; zeros: it is too short."""
    size = file.seek(0, os.SEEK_END)
    if size < _GZIP_TRAILER.size:
        return (0, 0)
    file.seek(size - _GZIP_TRAILER.size)
    return _GZIP_TRAILER.unpack(file.read(_GZIP_TRAILER.size))
