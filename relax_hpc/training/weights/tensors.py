"""Tensors of a version of the weights: whole ones by Hugging Face name, and the parts of them a
rank holds."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.base.weight_files import TYPE_BYTES

if TYPE_CHECKING:
    import torch

ITEM_BYTES = TYPE_BYTES
"""Bytes of the types of safetensors that weights can have."""
_ALIGNED = 8
_LENGTH_BYTES = 8
_STRIP = 32
"""Rows that are turned around at a time, of bfloat16 a line of the cache: five times as fast as all
at once."""


def torch_type(dtype: str) -> torch.dtype:
    """Type of torch for a type of safetensors that weights are published in."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }[dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor; `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """Place of a tensor inside of one that holds several, blocks of rows."""

    tensor: TensorInfo
    holder: str
    """Name of the one that holds it."""
    block: int
    first: int
    """First of its rows in the block."""
    transposed: bool
    """Whether the blocks are [columns, rows]."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows `start` to `stop` along `axis` of tensor `name`, at `offset` of a record, in C order."""

    name: str
    axis: int
    start: int
    stop: int
    offset: int

    def shape(self, whole: TensorInfo) -> tuple[int, ...]:
        """Shape of this part."""
        return (*whole.shape[: self.axis], self.stop - self.start, *whole.shape[self.axis + 1 :])

    def bytes(self, whole: TensorInfo) -> int:
        return math.prod(self.shape(whole)) * ITEM_BYTES[whole.dtype]


def coverage_error(tensors: Mapping[str, TensorInfo], parts: list[TensorPart]) -> str:
    """Problem of ``parts`` as a partition of ``tensors``; empty: each element lies in exactly
    one."""
    found: dict[str, list[TensorPart]] = {name: [] for name in tensors}
    for part in parts:
        if part.name not in found:
            return f"a part of {part.name}, which is no tensor of this version"
        found[part.name].append(part)
    for name, mine in found.items():
        shape, at = tensors[name].shape, 0
        axes = {part.axis for part in mine}
        if len(axes) != 1 or not 0 <= min(axes) < len(shape):
            return (
                f"tensor {name} is split along axes {sorted(axes)}, allowed one of its {len(shape)}"
            )
        for part in sorted(mine, key=lambda part: part.start):
            if part.start != at or part.stop < part.start:
                return (
                    f"tensor {name} lacks rows, or has them twice, at {min(at, part.start)} of "
                    f"axis {part.axis}"
                )
            at = part.stop
        if at != shape[mine[0].axis]:
            return f"tensor {name} lacks rows from {at} on of axis {mine[0].axis}"
    return ""


def header_text(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None
) -> str:
    """The header of a safetensors file of (name, type, shape) in that order, as the safetensors
    library writes it.

    The format: https://github.com/huggingface/safetensors#format. safetensors 0.8.0 itself
    (`save_file`, `serialize_file`) takes all tensors of a file at once, 5 GB of a converted one.
    Its order of tensors is its own, and it cannot compute a checksum while it writes. So files that
    are written tensor after tensor, or by several processes, begin with this header.
    """
    about: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        about[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNED)


def file_header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file of ``tensors``, and where in the file each of them lies.

    Wide types come first, so that all are aligned.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    text = header_text(
        [(name, tensors[name].dtype, tensors[name].shape) for name in order], {"format": "pt"}
    ).encode()
    ends = itertools.accumulate(
        (tensors[name].bytes for name in order), initial=_LENGTH_BYTES + len(text)
    )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, dict(zip(order, ends, strict=False))


_NOTHING: Mapping[str, InnerTensor] = MappingProxyType({})


class SafetensorsFile:
    """A safetensors file that is filled part by part, in any order and by several threads.

    ::

        file = SafetensorsFile(path, {"w": TensorInfo("F32", (2, 3))})
        file.put(TensorPart("w", 0, 0, 2, 0), memoryview(bytes(24)))
        file.close()
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        inside: Mapping[str, InnerTensor] = _NOTHING,
    ) -> None:
        """Make ``path``, or use its memory again if it is there. ``inside``: tensors that lie in
        one of ``tensors``. OSError: no room."""
        header, self._offsets = file_header(tensors)
        self.tensors, self._inside = tensors, inside
        self.bytes = len(header) + sum(tensor.bytes for tensor in tensors.values())
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            # A full disk is an error here, and would be a signal in a mapping.
            file.truncate(self.bytes)
            os.posix_fallocate(file.fileno(), 0, self.bytes)
            # All pages at once: one after the other, as they are first written, takes longer than
            # the copy.
            self._memory = mmap.mmap(
                file.fileno(), self.bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        self._memory[: len(header)] = header
        self._data = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def open_existing(cls, path: Path, tensors: Mapping[str, TensorInfo]) -> SafetensorsFile:
        """A file that is there, to `get` parts from. ValueError: it is not laid out as this program
        does it."""
        header, offsets = file_header(tensors)
        self = cls.__new__(cls)
        self.tensors, self._offsets, self._inside = tensors, offsets, _NOTHING
        self.bytes = len(header) + sum(tensor.bytes for tensor in tensors.values())
        with path.open("rb") as file:
            if file.read(len(header)) != header or path.stat().st_size != self.bytes:
                raise ValueError(
                    f"{path}: not laid out like the version that is to be made from it"
                )
            self._memory = mmap.mmap(file.fileno(), self.bytes, prot=mmap.PROT_READ)
        self._data = np.frombuffer(self._memory, np.uint8)
        return self

    def put(self, part: TensorPart, record: memoryview) -> None:
        """Copy ``part`` from where it lies in ``record``. Parts of other tensors than the file's
        are passed over."""
        inside = self._inside.get(part.name)
        whole = inside.tensor if inside else self.tensors.get(part.name)
        if whole is not None:
            room, given = (
                self._room(part, whole),
                _array(record, part.offset, part.shape(whole), whole),
            )
            strip = _STRIP if inside and inside.transposed else len(given)
            for first in range(0, len(given), strip or 1):
                room[first : first + strip] = given[first : first + strip]

    def get(self, part: TensorPart, record: memoryview) -> None:
        """Copy ``part`` to where it lies in ``record``."""
        whole = self.tensors[part.name]
        _array(record, part.offset, part.shape(whole), whole)[...] = self._room(part, whole)

    def _room(self, part: TensorPart, whole: TensorInfo) -> np.ndarray:
        inside = self._inside.get(part.name)
        array = self._whole(inside.holder)[inside.block] if inside else self._whole(part.name)
        if inside:
            rows = slice(inside.first, inside.first + whole.shape[0])
            array = (array.T if inside.transposed else array)[rows]
        return array[(*[slice(None)] * part.axis, slice(part.start, part.stop))]

    def _whole(self, name: str) -> np.ndarray:
        one = self.tensors[name]
        return _array(memoryview(self._data), self._offsets[name], one.shape, one)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The whole file as it is now, in pieces of ``size`` bytes."""
        whole = memoryview(self._data)
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    def close(self) -> None:
        """Close the mapping; the file stays."""
        del self._data
        # After an error somebody may still look at a piece of it; then it goes with that.
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _array(
    memory: memoryview, offset: int, shape: tuple[int, ...], whole: TensorInfo
) -> np.ndarray:
    item = ITEM_BYTES[whole.dtype]
    count = math.prod(shape)
    return np.frombuffer(memory[offset : offset + count * item], np.dtype(f"u{item}")).reshape(
        shape
    )
