"""Videos that tasks make without an encoder: JPEG frames in an AVI file, with 16-bit sound or
without."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_QUALITY = 92


def avi(
    frames: Sequence[Image], fps: int = 10, samples: np.ndarray | None = None, rate: int = 16000
) -> bytes:
    """Bytes of a video of JPEG frames, all of one size, with 16-bit sound where ``samples`` [-1, 1]
    are given.

    The format: AVI RIFF File Reference, Microsoft.
    """
    pictures = [_jpeg(frame) for frame in frames]
    (width, height), count, most = frames[0].size, len(frames), max(map(len, pictures))
    streams = 1 if samples is None else 2
    main = struct.pack(
        "<14I",
        1_000_000 // fps,
        most * fps,
        0,
        0x10,
        count,
        0,
        streams,
        most,
        width,
        height,
        0,
        0,
        0,
        0,
    )
    headers = _chunk(b"avih", main) + _stream(
        struct.pack(
            "<4s4sIHHIIIIIIiI4H",
            b"vids",
            b"MJPG",
            0,
            0,
            0,
            0,
            1,
            fps,
            0,
            count,
            most,
            -1,
            0,
            0,
            0,
            width,
            height,
        ),
        struct.pack(
            "<IiiHH4sIiiII", 40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0
        ),
    )
    pulses: list[bytes] = []
    if samples is not None:
        data = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
        share = -(-len(data) // 2 // count) * 2
        pulses = [data[at : at + share] for at in range(0, len(data), share)]
        length = len(data) // 2
        headers += _stream(
            struct.pack("<8s12x5IiI8x", b"auds", 2, rate * 2, 0, length, rate * 2, -1, 2),
            struct.pack("<HHIIHH", 1, 1, rate, rate * 2, 2, 16),
        )
    body, index, at = list[bytes](), list[bytes](), 4
    for number, jpeg in enumerate(pictures):
        for tag, data in (
            (b"00dc", jpeg),
            *((b"01wb", pulse) for pulse in pulses[number : number + 1]),
        ):
            index.append(tag + struct.pack("<III", 0x10, at, len(data)))
            body.append(_chunk(tag, data))
            at += len(body[-1])
    movie = (
        _list(b"hdrl", headers) + _list(b"movi", b"".join(body)) + _chunk(b"idx1", b"".join(index))
    )
    return _chunk(b"RIFF", b"AVI " + movie)


def _jpeg(frame: Image) -> bytes:
    file = io.BytesIO()
    frame.save(file, "JPEG", quality=_QUALITY, subsampling=0)
    return file.getvalue()


def _chunk(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<I", len(data)) + data + bytes(len(data) & 1)


def _list(tag: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", tag + data)


def _stream(header: bytes, form: bytes) -> bytes:
    return _list(b"strl", _chunk(b"strh", header) + _chunk(b"strf", form))
