"""Files and bytes of which media are made, opened once their first bytes and their length are as they should be."""

from __future__ import annotations

import io
import mimetypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.containers import declared_bytes
from relax_hpc.multimodal.limits import Limits
from relax_hpc.multimodal.medium import Kind

Source = Path | bytes
"""A file or its content."""

_IMAGE, _VIDEO, _AUDIO = frozenset({Kind.IMAGE}), frozenset({Kind.VIDEO, Kind.AUDIO}), frozenset({Kind.AUDIO})
_HEADS = (
    (0, b"\xff\xd8\xff", "JPEG", _IMAGE),
    (0, b"\x89PNG", "PNG", _IMAGE),
    (0, b"GIF8", "GIF", _IMAGE),
    (0, b"BM", "BMP", _IMAGE),
    (0, b"II*\0", "TIFF", _IMAGE),
    (0, b"MM\0*", "TIFF", _IMAGE),
    (8, b"WEBP", "WebP", _IMAGE),
    (8, b"avif", "AVIF", _IMAGE),
    (8, b"heic", "HEIC", _IMAGE),
    (8, b"WAVE", "WAV", _AUDIO),
    (0, b"fLaC", "FLAC", _AUDIO),
    (0, b"ID3", "MP3", _AUDIO),
    (8, b"AIFF", "AIFF", _AUDIO),
    (8, b"M4A ", "M4A", _AUDIO),
    (8, b"AVI ", "AVI", _VIDEO),
    (4, b"ftyp", "MP4", _VIDEO),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM", _VIDEO),
    (0, b"OggS", "Ogg", _VIDEO),
    (0, b"FLV", "FLV", _VIDEO),
    (0, b"<", "a page of HTML or XML", frozenset()),
    (0, b"{", "JSON", frozenset()),
    (0, b"PK\3\4", "a zip archive", frozenset()),
    (0, b"%PDF", "PDF", frozenset()),
    (0, b"version https://git-lfs", "a pointer of Git LFS, whose file was not fetched", frozenset()),
)
"""Offset, bytes there, what they say the content is, and the kinds of media that may be taken of it."""
_OF_FFMPEG = {"M4A", "AVI", "MP4", "Matroska or WebM", "FLV"}
_HEAD_BYTES = 64


@contextmanager
def opened(source: Source, kind: Kind, limits: Limits) -> Iterator[BinaryIO]:
    """``source`` to be read as a medium of ``kind``. BadMedium: it is none, or not whole."""
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            _check_size(size, limits)
            _check_kind(source, file.read(_HEAD_BYTES), kind)
            _check_length(file, size)
            file.seek(0)
            yield file
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise BadMedium(Reason.MISSING, str(error.strerror)) from error


@contextmanager
def path_of(file: BinaryIO) -> Iterator[str]:
    """Path by which a decoder opens ``file``: decord crashes on damaged content that it is handed in memory."""
    if not isinstance(file, io.BytesIO):
        yield f"/proc/self/fd/{file.fileno()}"
        return
    with os.fdopen(os.memfd_create("medium"), "wb") as copy:
        copy.write(file.getbuffer())
        copy.flush()
        yield f"/proc/self/fd/{copy.fileno()}"


def is_container(file: BinaryIO) -> bool:
    """Whether ``file`` is of a form that FFmpeg opens, and libsndfile does not."""
    file.seek(0)
    return _found(file.read(_HEAD_BYTES))[0] in _OF_FFMPEG


def name_of(source: Source) -> str:
    """Name of ``source`` in messages."""
    return f"{len(source)} bytes" if isinstance(source, bytes) else str(source)


def _check_size(size: int, limits: Limits) -> None:
    if not size:
        raise BadMedium(Reason.EMPTY, "no bytes")
    if size > limits.bytes:
        raise BadMedium(Reason.LARGE, f"{size} bytes, allowed {limits.bytes}")


def _check_kind(source: Source, head: bytes, kind: Kind) -> None:
    what, kinds = _found(head)
    if kind not in kinds:
        raise BadMedium(Reason.MISLABELLED, f"{kind} expected, found {what}")
    if not what or isinstance(source, bytes):
        return
    named = (mimetypes.guess_type(source.name)[0] or "").partition("/")[0]
    if named in set(Kind) and named not in kinds:
        raise BadMedium(Reason.EXTENSION, f"named as {named}, found {what}")


def _found(head: bytes) -> tuple[str, frozenset[Kind]]:
    """Form of a content that begins with ``head``, and the kinds of media that may be taken of it."""
    known = ((what, kinds) for at, magic, what, kinds in _HEADS if head[at : at + len(magic)] == magic)
    return next(known, ("", frozenset(Kind)))


def _check_length(file: BinaryIO, size: int) -> None:
    declared = declared_bytes(file, size)
    if declared > size:
        raise BadMedium(Reason.TRUNCATED, f"{size} bytes of {declared}")
