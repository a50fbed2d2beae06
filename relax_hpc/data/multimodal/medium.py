"""A medium as it is stored, once a prompt group: decoded, resized, as pixels or samples, with a
header."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason

Grid = tuple[int, int, int]
"""Patches (time, height, width) before merging; of a sound (1, 1, frames of its mel
spectrogram)."""


class Kind(StrEnum):
    """Kind of a medium, as the spans of rows name it."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Header:
    """Medium without its content, as it is known before it is decoded: enough to count its tokens
    and to place them."""

    kind: Kind
    grid: Grid
    seconds: tuple[float, ...] = ()
    """Time of each temporal patch of a video."""


_DTYPES = {"U8": np.dtype("<u1"), "F32": np.dtype("<f4"), "I16": np.dtype("<i2")}
_FORMS = {
    Kind.IMAGE: (("U8",), 3),
    Kind.VIDEO: (("U8",), 4),
    # I16: sounds that earlier releases stored, in a run that is resumed.
    Kind.AUDIO: (("F32", "I16"), 1),
}
"""Kind -> names of the types that its numbers may have, number of dimensions."""
_LENGTH = struct.Struct("<Q")
_MOST_HEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Medium:
    """One image, video or sound."""

    kind: Kind
    data: np.ndarray
    """Image: uint8 [height, width, 3]. Video: uint8 [frames, height, width, 3]. Sound: float32
    [samples], one channel at the rate of the model's family, full scale 1; int16 [samples], full
    scale 32768, of earlier releases."""
    grid: Grid
    seconds: tuple[float, ...] = ()
    """Time of each temporal patch of a video."""

    @property
    def header(self) -> Header:
        """The medium without its content."""
        return Header(self.kind, self.grid, self.seconds)

    # Not by safetensors 0.8.0: its `deserialize` takes `bytes` alone and copies each tensor, and a
    # video has many megabytes. These functions keep the memory that they are given.

    def to_bytes(self) -> bytes:
        """A safetensors file, always the same of the same medium: its hash is the medium's name in
        the queue."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes, memoryview]:
        """The two parts of `to_bytes`, the second over the medium's own memory: a video has many
        megabytes."""
        about = json.dumps({"kind": self.kind, "grid": self.grid, "seconds": self.seconds})
        dtypes, _ = _FORMS[self.kind]
        dtype = next((name for name in dtypes if _DTYPES[name] == self.data.dtype), dtypes[0])
        data = np.ascontiguousarray(self.data, _DTYPES[dtype])
        tensor = {"dtype": dtype, "shape": data.shape, "data_offsets": (0, data.nbytes)}
        # One key of metadata: the order of several is left open by the format's own library.
        head = json.dumps(
            {"__metadata__": {"medium": about}, "data": tensor}, separators=(",", ":")
        ).encode()
        head += b" " * (-len(head) % 8)
        return _LENGTH.pack(len(head)) + head, memoryview(data).cast("B")

    @classmethod
    def from_bytes(cls, blob: bytes | memoryview) -> Medium:
        """The medium that `to_bytes` has written as ``blob``, over its memory. BadMedium: it is
        none."""
        view = memoryview(blob)
        try:
            (length,) = _LENGTH.unpack(view[: _LENGTH.size])
            if length > _MOST_HEAD:
                raise ValueError(f"a head of {length} bytes")
            body = _LENGTH.size + length
            head = json.loads(bytes(view[_LENGTH.size : body]))
            about, tensor = json.loads(head["__metadata__"]["medium"]), head["data"]
            data = np.frombuffer(view[body:], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            return cls._checked(about, tensor["dtype"], data)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise BadMedium(
                Reason.BLOB, f"{view.nbytes} bytes that are no medium: {error}"
            ) from error

    @classmethod
    def _checked(cls, about: dict[str, Any], dtype: str, data: np.ndarray) -> Medium:
        kind, grid = Kind(about["kind"]), tuple(map(int, about["grid"]))
        dtypes, dimensions = _FORMS[kind]
        if dtype not in dtypes or data.ndim != dimensions or len(grid) != 3 or math.prod(grid) < 1:
            raise ValueError(f"{kind} of {dtype} {data.shape}, grid {grid}")
        return cls(kind, data, grid, tuple(map(float, about["seconds"])))
