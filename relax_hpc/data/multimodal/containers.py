"""Length of a file as declared in its container. If a file is shorter, decoders read its remains
without an error.

MPEG streams, ADTS, AC-3 and AMR do not declare a length.
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_OPEN = 0x7FFFF000
"""Smallest value that means an unknown length. Programs that write into a pipe cannot know it."""
_MAX_BOXES = 10_000
_MAX_TAIL = 65_307
"""Maximum size of a page of Ogg."""
_HEADER_BYTES = 4096
"""Size of the part of an ASF, FLV or MP3 file that contains its length."""
_ASF = b"\x30\x26\xb2\x75"
_ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
_MP3_FRAME = 1441
"""Maximum size of a frame of MP3. Some taggers count one frame less."""


def declared_bytes(file: BinaryIO, size: int) -> int:
    """Size in bytes that the container of a file of ``size`` bytes declares; 0: none."""
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
        return int(_number_after(file, _ASF_PROPERTIES, 24, "<Q"))
    if head[:3] == b"FLV":
        return int(_number_after(file, b"\0\x08filesize\0", 0, ">d"))
    if head[:4] == b"GIF8":
        return _gif(file, size)
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0):
        return _mp3(file, head)
    return 0


def _chunk(head: bytes, form: str) -> int:
    """Length of the single chunk of a RIFF or AIFF file. The 8 bytes of its header are not added,
    because some writers include them."""
    (length,) = struct.unpack(form, head[4:8])
    return length if length < _OPEN else 0


def _long_riff(file: BinaryIO, head: bytes) -> int:
    """Length from the 64-bit field of W64 and RF64. In RF64 it excludes the 8 bytes of the
    header."""
    file.seek(16 if head[:4] == b"riff" else 20)
    field = file.read(8)
    if len(field) < 8 or (head[:4] == b"RF64" and head[8:12] != b"WAVE"):
        return 0
    (length,) = struct.unpack("<Q", field)
    return length if head[:4] == b"riff" else length + 8


def _number_after(file: BinaryIO, mark: bytes, offset: int, form: str) -> float:
    """The number that stands ``offset`` bytes after ``mark`` in the header; 0 if none does."""
    file.seek(0)
    header = file.read(_HEADER_BYTES)
    position = header.find(mark) + len(mark) + offset
    field = header[position : position + 8]
    if mark not in header or len(field) < 8:
        return 0
    (number,) = struct.unpack(form, field)
    return number if 0 < number < 1 << 62 else 0


def _gif(file: BinaryIO, size: int) -> int:
    """More than ``size`` if the last KiB has no end of a picture (0) and of the file (;)."""
    file.seek(max(0, size - 1024))
    return size if b"\0;" in file.read() else size + 1


def _mp3(file: BinaryIO, head: bytes) -> int:
    """Length from the Xing header in the first frame, which LAME and others write; else 0."""
    start = 0
    if head[:3] == b"ID3":
        # Length of the ID3 tag without its header of 10 bytes: 4 bytes with 7 bits each.
        file.seek(6)
        start = 10
        for shift, value in zip((21, 14, 7, 0), file.read(4), strict=False):
            start += (value & 0x7F) << shift
    file.seek(start)
    frame = file.read(200)
    position = max(frame.find(b"Xing"), frame.find(b"Info"))
    if position < 0 or len(frame) < position + 16:
        return 0
    flags, *numbers = struct.unpack(">3I", frame[position + 4 : position + 16])
    has_count, has_bytes = flags & 1, flags & 2
    if not has_bytes:
        return 0
    return start + numbers[1 if has_count else 0] - _MP3_FRAME


def _boxes(file: BinaryIO, size: int) -> int:
    """End of the last box of an MP4. If the file ends within a box, this is beyond the file."""
    position = 0
    for _ in range(_MAX_BOXES):
        if position >= size:
            # A damaged length may be 2**56, to which no file system can seek.
            break
        file.seek(position)
        head = file.read(16)
        if len(head) < 8 or not head[4:8].isalnum():
            break
        (length,) = struct.unpack(">I", head[:4])
        if length == 1 and len(head) == 16:
            (length,) = struct.unpack(">Q", head[8:])
        if length < 8:
            # 0: a box up to the end of the file. Other values: not a box.
            break
        position += length
    return position


def _matroska(file: BinaryIO, size: int) -> int:
    """End of the segment, which is the whole file after the header."""
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
    """The EBML number at the file's position; its first byte gives its length. None: the number
    means an unknown size."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    count = 8 - first[0].bit_length()
    following = file.read(count)
    value = int.from_bytes(bytes([first[0] & (0x7F >> count)]) + following, "big")
    return None if value == (1 << 7 * (count + 1)) - 1 else value


def _ogg(file: BinaryIO, size: int) -> int:
    """More than ``size`` if the last page is not marked as the last one of its stream, or is
    incomplete."""
    file.seek(max(0, size - 2 * _MAX_TAIL))
    tail = file.read()
    page = tail[tail.rfind(b"OggS") :]
    if len(page) < 27:
        return size + 1
    segments = page[27 : 27 + page[26]]
    is_whole = len(page) >= 27 + page[26] + sum(segments)
    return size if is_whole and page[5] & 4 else size + 1
