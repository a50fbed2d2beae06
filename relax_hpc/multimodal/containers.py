"""Length that a file has by its own container. Decoders take of a shorter one what it holds, and say nothing."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_OPEN = 0x7FFFF000
"""Length from which on a chunk has none: what writes into a pipe cannot know it."""
_MOST_BOXES = 10_000
_MOST_TAIL = 65_307
"""Bytes of a page of Ogg at most."""


def declared_bytes(file: BinaryIO, size: int) -> int:
    """Bytes that a file of ``size`` should have by its own container, 0 where it does not say."""
    file.seek(0)
    head = file.read(12)
    if head[:4] in (b"RIFF", b"FORM"):
        return _chunk(head, "<I" if head[:4] == b"RIFF" else ">I")
    if head[4:8] == b"ftyp":
        return _boxes(file, size)
    if head[:4] == _EBML:
        return _matroska(file)
    if head[:4] == b"OggS":
        return _ogg(file, size)
    return 0


def _chunk(head: bytes, form: str) -> int:
    """End of the one chunk that a RIFF or AIFF file is, less its own header, with which not all writers reckon."""
    (length,) = struct.unpack(form, head[4:8])
    return length if length < _OPEN else 0


def _boxes(file: BinaryIO, size: int) -> int:
    """End of the last box of an MP4; one with only a part of its index or its frames ends beyond the file."""
    at = 0
    for _ in range(_MOST_BOXES):
        file.seek(at)
        head = file.read(16)
        if len(head) < 8 or not head[4:8].isalnum():
            break
        (length,) = struct.unpack(">I", head[:4])
        if length == 1 and len(head) == 16:
            (length,) = struct.unpack(">Q", head[8:])
        if length < 8:
            # To the end of the file, or no box at all.
            break
        at += length
    return at


def _matroska(file: BinaryIO) -> int:
    """End of the segment, which is all but the header."""
    file.seek(4)
    header = _ebml_length(file)
    file.seek(header or 0, io.SEEK_CUR)
    if file.read(4) != _SEGMENT:
        return 0
    length = _ebml_length(file)
    return 0 if length is None else file.tell() + length


def _ebml_length(file: BinaryIO) -> int | None:
    """The number at the file's place whose first byte says how many bytes it has; None: it is left open."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    count = 8 - first[0].bit_length()
    rest = file.read(count)
    value = int.from_bytes(bytes([first[0] & (0x7F >> count)]) + rest, "big")
    return None if value == (1 << 7 * (count + 1)) - 1 else value


def _ogg(file: BinaryIO, size: int) -> int:
    """More than ``size`` where the last page is not marked as the last of its stream, or not whole."""
    file.seek(max(0, size - 2 * _MOST_TAIL))
    tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27:
        return size + 1
    segments = page[27 : 27 + page[26]]
    whole = len(page) >= 27 + page[26] + sum(segments)
    return size if whole and page[5] & 4 else size + 1
