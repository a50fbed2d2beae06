"""Sources of media: files and bytes. Their first bytes and their length are checked when they are
opened.

Formats that are not in `_FORMATS` are left to the decoders, which have allow-lists
(`image.FORMATS`, `streams.CONTAINERS`). A format in `_REFUSED` never reaches a decoder.
"""

from __future__ import annotations

import errno
import io
import mimetypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from relax_hpc.base.foreign_files import open_regular
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.containers import declared_bytes
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Kind

Source = Path | bytes
"""A file or its content."""

_IMAGE, _AUDIO = frozenset({Kind.IMAGE}), frozenset({Kind.AUDIO})
_VIDEO = frozenset({Kind.VIDEO, Kind.AUDIO})
"""A video file may be read as a sound, and may contain nothing else."""
_CLIP = _IMAGE | _VIDEO
"""An animated picture may be read as an image, its first frame, or as a video without sound."""
_FORMATS = (
    (0, b"\xff\xd8\xff", "JPEG", _IMAGE),
    (0, b"\x89PNG", "PNG", _IMAGE),
    (0, b"GIF8", "GIF", _CLIP),
    (0, b"BM", "BMP", _IMAGE),
    (0, b"II*\0", "TIFF", _IMAGE),
    (0, b"MM\0*", "TIFF", _IMAGE),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000", _IMAGE),
    (8, b"WEBP", "WebP", _IMAGE),
    (8, b"avif", "AVIF", _IMAGE),
    (8, b"avis", "AVIF", _IMAGE),
    (8, b"mif1", "HEIF", _IMAGE),
    (8, b"WAVE", "WAV", _AUDIO),
    (0, b"fLaC", "FLAC", _AUDIO),
    (0, b"ID3", "MP3", _AUDIO),
    (0, b"\xff\xfb", "MP3", _AUDIO),
    (0, b"\xff\xf1", "ADTS AAC", _AUDIO),
    (0, b"\xff\xf9", "ADTS AAC", _AUDIO),
    (0, b"\x0b\x77", "AC-3", _AUDIO),
    (0, b"#!AMR", "AMR", _AUDIO),
    (0, b"caff", "CAF", _AUDIO),
    (0, b".snd", "AU", _AUDIO),
    (0, b"riff\x2e\x91\xcf\x11", "W64", _AUDIO),
    (8, b"AIF", "AIFF", _AUDIO),
    (8, b"AVI ", "AVI", _VIDEO),
    (4, b"ftyp", "MP4", _VIDEO),
    (4, b"moov", "QuickTime", _VIDEO),
    (4, b"wide", "QuickTime", _VIDEO),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM", _VIDEO),
    (0, b"OggS", "Ogg", _VIDEO),
    (0, b"FLV", "FLV", _VIDEO),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF (WMV, WMA)", _VIDEO),
    (0, b"\0\0\x01\xba", "an MPEG program stream", _VIDEO),
)
"""Offset, bytes at that offset, format, kinds of media that a file of the format may be read as."""
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_REFUSED = (
    (0, b"<", "a page of HTML or XML", Reason.MISLABELLED),
    (0, b"{", "JSON", Reason.MISLABELLED),
    (0, b"PK\3\4", "a zip archive", Reason.MISLABELLED),
    (0, b"%PDF", "PDF", Reason.MISLABELLED),
    (
        0,
        b"version https://git-lfs",
        "a pointer of Git LFS, whose file was not fetched",
        Reason.MISLABELLED,
    ),
    # Pillow starts Ghostscript for these two formats. FFmpeg opens other files for the next two.
    (0, b"%!PS", "PostScript, which is a program", Reason.UNSUPPORTED),
    (0, b"\xc5\xd0\xd3\xc6", "EPS, which is a program", Reason.UNSUPPORTED),
    (0, b"#EXTM3U", "a playlist, which names other files", Reason.UNSUPPORTED),
    (0, b"ffconcat", "a list of other files", Reason.UNSUPPORTED),
)
"""Offset, bytes at that offset, format, reason under which every kind of medium is refused."""
_TRANSPORT_PACKETS = ((0, 188), (4, 192))
"""Offset of the sync byte in a packet of an MPEG transport stream, and length of a packet."""
_HEAD_BYTES = 200
_NO_FILE = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    )
)
"""Errors that show that a path cannot be read as a regular file (`ForeignFileError` has one of
them). Other errors may be temporary."""


@contextmanager
def open_source(source: Source, kind: Kind, limits: Limits) -> Iterator[BinaryIO]:
    """``source``, open to be read as a medium of ``kind``. UnusableMedium: it has another format,
    or is incomplete."""
    try:
        source_file = io.BytesIO(source) if isinstance(source, bytes) else open_regular(source)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise UnusableMedium(Reason.MISSING, str(error.strerror)) from error
    with source_file as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        _check_size(size, limits)
        _check_kind(source, file.read(_HEAD_BYTES), kind)
        _check_length(file, size)
        file.seek(0)
        yield file


@contextmanager
def path_of(file: BinaryIO) -> Iterator[str]:
    """Path of ``file`` for decoders. Bytes are copied to a memory file, because decord crashes if
    it reads damaged content from memory."""
    if not isinstance(file, io.BytesIO):
        yield f"/proc/self/fd/{file.fileno()}"
        return
    with os.fdopen(os.memfd_create("medium"), "wb") as copy:
        copy.write(file.getbuffer())
        copy.flush()
        yield f"/proc/self/fd/{copy.fileno()}"


def unreadable(path: str, detail: str, allowed: str) -> UnusableMedium:
    """Error for a file that no decoder can open. If its format is known, the file is damaged;
    otherwise its format is unsupported.

    ``allowed``: the formats that can be read.
    """
    with Path(path).open("rb") as file:
        head = file.read(_HEAD_BYTES)
    name, _ = _format_of(head)
    if name:
        return UnusableMedium(Reason.CORRUPTED, f"{name}: {detail}")
    begin = head[:8].hex(" ")
    return UnusableMedium(Reason.UNSUPPORTED, f"begins with {begin}, allowed formats: {allowed}")


def name_of(source: Source) -> str:
    """Name of ``source`` in messages."""
    return f"{len(source)} bytes" if isinstance(source, bytes) else str(source)


def _check_size(size: int, limits: Limits) -> None:
    if not size:
        raise UnusableMedium(Reason.EMPTY, "no bytes")
    if size > limits.bytes:
        raise UnusableMedium(Reason.LARGE, f"{size} bytes, allowed {limits.bytes}")


def _check_kind(source: Source, head: bytes, kind: Kind) -> None:
    for offset, magic, name, reason in _REFUSED:
        if head[offset : offset + len(magic)] == magic:
            raise UnusableMedium(reason, f"{kind} expected, content is {name}")
    if head[4:8] == b"ftyp" and head[8:12] in _HEIC:
        raise UnusableMedium(Reason.UNSUPPORTED, "content is HEIC: convert it to JPEG, PNG or AVIF")
    name, kinds = _format_of(head)
    if kind not in kinds:
        raise UnusableMedium(Reason.MISLABELLED, f"{kind} expected, content is {name}")
    if not name or isinstance(source, bytes):
        return
    kind_of_name = (mimetypes.guess_type(source.name)[0] or "").partition("/")[0]
    if kind_of_name in set(Kind) and kind_of_name not in kinds:
        raise UnusableMedium(Reason.EXTENSION, f"named as {kind_of_name}, content is {name}")


def _format_of(head: bytes) -> tuple[str, frozenset[Kind]]:
    """Format of a content that begins with ``head``, and the kinds of media it may be read as. An
    unknown format gives an empty name and all kinds.
    """
    for offset, magic, name, kinds in _FORMATS:
        if head[offset : offset + len(magic)] == magic:
            return name, kinds
    for offset, length in _TRANSPORT_PACKETS:
        if len(head) > offset + length and head[offset] == head[offset + length] == 0x47:
            return "an MPEG transport stream", _VIDEO
    return "", frozenset(Kind)


def _check_length(file: BinaryIO, size: int) -> None:
    declared = declared_bytes(file, size)
    if declared > size:
        raise UnusableMedium(Reason.TRUNCATED, f"{size} bytes of {declared}")
