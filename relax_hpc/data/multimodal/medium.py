"""Stored form of a medium, one for each prompt group: decoded and resized pixels or samples, with a
header."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium

Grid = tuple[int, int, int]
"""Number of patches (time, height, width) before merging; for a sound (1, 1, frames of its mel
spectrogram)."""


class Kind(StrEnum):
    """Kind of a medium. Its value is `kind` in the spans of rows."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Header:
    """Properties of a medium that are known before it is decoded. They give the number of its
    tokens and their positions."""

    kind: Kind
    grid: Grid
    seconds: tuple[float, ...] = ()
    """Time of each temporal patch of a video."""


_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("<u1"),
    "F32": np.dtype("<f4"),
    "I16": np.dtype("<i2"),
}
_FORMS = {
    Kind.IMAGE: (("U8",), 3),
    Kind.VIDEO: (("U8",), 4),
    # I16: sounds that earlier releases stored, in a run that is resumed.
    Kind.AUDIO: (("F32", "I16"), 1),
}
"""Kind -> allowed names of the data type, number of dimensions."""
_LENGTH = struct.Struct("<Q")
_MAX_HEAD = 1 << 20


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

    # safetensors 0.8.0 is not used: its `deserialize` only takes `bytes` and copies each tensor,
    # and a video has many megabytes. These functions do not copy.

    def to_bytes(self) -> bytes:
        """The medium as a safetensors file. Equal media give equal bytes: the hash of the file is
        the medium's id in the queue."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes, memoryview]:
        """The two parts of `to_bytes`: the header, and the medium's data without a copy."""
        metadata = json.dumps({"kind": self.kind, "grid": self.grid, "seconds": self.seconds})
        dtypes, _ = _FORMS[self.kind]
        dtype = next((name for name in dtypes if _DTYPES[name] == self.data.dtype), dtypes[0])
        data = np.ascontiguousarray(self.data, _DTYPES[dtype])
        tensor = {"dtype": dtype, "shape": data.shape, "data_offsets": (0, data.nbytes)}
        # The metadata has one key, because safetensors does not define the order of several keys.
        head = json.dumps(
            {"__metadata__": {"medium": metadata}, "data": tensor}, separators=(",", ":")
        ).encode()
        head += b" " * (-len(head) % 8)
        return _LENGTH.pack(len(head)) + head, data.data.cast("B")

    @classmethod
    def from_bytes(cls, blob: bytes | memoryview) -> Medium:
        """The medium in ``blob``, which `to_bytes` has made, without a copy. UnusableMedium: it is
        not a medium."""
        view = memoryview(blob)
        try:
            (length,) = _LENGTH.unpack(view[: _LENGTH.size])
            if length > _MAX_HEAD:
                raise ValueError(f"a head of {length} bytes")
            body = _LENGTH.size + length
            head = json.loads(bytes(view[_LENGTH.size : body]))
            metadata, tensor = json.loads(head["__metadata__"]["medium"]), head["data"]
            data = np.frombuffer(view[body:], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            return cls._from_metadata(metadata, tensor["dtype"], data)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise UnusableMedium(
                Reason.BLOB, f"{view.nbytes} bytes that are no medium: {error}"
            ) from error

    @classmethod
    def _from_metadata(cls, metadata: dict[str, Any], dtype: str, data: np.ndarray) -> Medium:
        """ValueError: kind, type, shape and grid do not fit."""
        kind, grid = Kind(metadata["kind"]), tuple(map(int, metadata["grid"]))
        dtypes, dimensions = _FORMS[kind]
        if dtype not in dtypes or data.ndim != dimensions or len(grid) != 3 or math.prod(grid) < 1:
            raise ValueError(f"{kind} of {dtype} {data.shape}, grid {grid}")
        return cls(kind, data, grid, tuple(map(float, metadata["seconds"])))
