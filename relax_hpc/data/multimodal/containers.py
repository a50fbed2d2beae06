"""Length that a file has by its own container. Decoders read what a shorter file holds, without an
error.

MPEG streams, ADTS, AC-3 and AMR do not say how long they are.
"""

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
_HEADER_BYTES = 4096
"""Bytes in which the header of ASF, FLV or MP3 says how long the file is."""
_ASF = b"\x30\x26\xb2\x75"
_ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_MP3_FRAME = 1441
"""Bytes of a frame of MP3 at most. Some taggers leave out one."""


def declared_bytes(file: BinaryIO, size: int) -> int:
    """Bytes that a file of ``size`` should have by its own container, 0 where it does not say."""
    file.seek(0)
    head = file.read(12)
    if head[:4] in (b"RIFF", b"FORM"):
        return _chunk(head, "<I" if head[:4] == b"RIFF" else ">I")
    if head[:4] in (b"riff", b"RF64"):
        return _long_riff(file, head)
    if head[4:8] == b"ftyp":
        return _boxes(file, size)
    if head[:4] == _EBML:
        return _matroska(file, size)
    if head[:4] == b"OggS":
        return _ogg(file, size)
    if head[:4] == _ASF:
        return _number_behind(file, _ASF_PROPERTIES, 24, "<Q")
    if head[:3] == b"FLV":
        return int(_number_behind(file, b"\0\x08filesize\0", 0, ">d"))
    if head[:4] == b"GIF8":
        return _gif(file, size)
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0):
        return _mp3(file, head)
    return 0


def _chunk(head: bytes, form: str) -> int:
    """End of the one chunk that a RIFF or AIFF file is, less its own header, with which not all
    writers reckon."""
    (length,) = struct.unpack(form, head[4:8])
    return length if length < _OPEN else 0


def _long_riff(file: BinaryIO, head: bytes) -> int:
    """Length by the 64 bits of W64 and RF64; the latter leaves out its own header."""
    file.seek(16 if head[:4] == b"riff" else 20)
    field = file.read(8)
    if len(field) < 8 or (head[:4] == b"RF64" and head[8:12] != b"WAVE"):
        return 0
    (length,) = struct.unpack("<Q", field)
    return length if head[:4] == b"riff" else length + 8


def _number_behind(file: BinaryIO, mark: bytes, offset: int, form: str) -> float:
    """The number that stands ``offset`` bytes after ``mark`` in the header, else 0."""
    file.seek(0)
    header = file.read(_HEADER_BYTES)
    at = header.find(mark) + len(mark) + offset
    field = header[at : at + 8]
    if mark not in header or len(field) < 8:
        return 0
    (number,) = struct.unpack(form, field)
    return number if 0 < number < 1 << 62 else 0


def _gif(file: BinaryIO, size: int) -> int:
    """More than ``size`` if no end of the last picture and of the file is near the end."""
    file.seek(max(0, size - 1024))
    return size if b"\0;" in file.read() else size + 1


def _mp3(file: BinaryIO, head: bytes) -> int:
    """End by the field of bytes in the first frame, which LAME and others write (Xing), else 0."""
    start = 0
    if head[:3] == b"ID3":
        # Four times seven bits: the length of the tag behind its own header of ten bytes.
        file.seek(6)
        start = 10
        for shift, value in zip((21, 14, 7, 0), file.read(4), strict=False):
            start += (value & 0x7F) << shift
    file.seek(start)
    frame = file.read(200)
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at < 0 or len(frame) < at + 16:
        return 0
    flags, *numbers = struct.unpack(">3I", frame[at + 4 : at + 16])
    has_count, has_bytes = flags & 1, flags & 2
    if not has_bytes:
        return 0
    return start + numbers[1 if has_count else 0] - _MP3_FRAME


def _boxes(file: BinaryIO, size: int) -> int:
    """End of the last box of an MP4; one with only a part of its index or its frames ends beyond
    the file."""
    at = 0
    for _ in range(_MOST_BOXES):
        if at >= size:
            # No file system can seek to 2**56.
            break
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


def _matroska(file: BinaryIO, size: int) -> int:
    """End of the segment, which is all but the header."""
    file.seek(4)
    header = _ebml_length(file) or 0
    if header > size:
        return header
    file.seek(header, io.SEEK_CUR)
    if file.read(4) != _SEGMENT:
        return 0
    length = _ebml_length(file)
    return 0 if length is None else file.tell() + length


def _ebml_length(file: BinaryIO) -> int | None:
    """The number at the file's place whose first byte says how many bytes it has; None: it is left
    open."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    count = 8 - first[0].bit_length()
    rest = file.read(count)
    value = int.from_bytes(bytes([first[0] & (0x7F >> count)]) + rest, "big")
    return None if value == (1 << 7 * (count + 1)) - 1 else value


def _ogg(file: BinaryIO, size: int) -> int:
    """More than ``size`` where the last page is not marked as the last of its stream, or not
    whole."""
    file.seek(max(0, size - 2 * _MOST_TAIL))
    tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27:
        return size + 1
    segments = page[27 : 27 + page[26]]
    whole = len(page) >= 27 + page[26] + sum(segments)
    return size if whole and page[5] & 4 else size + 1
