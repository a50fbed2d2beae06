"""Tensors of a version of the weights: whole tensors by Hugging Face name, and the parts that a
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
"""Bytes of an element, by the safetensors types that weights can have."""
_ALIGNED = 8
_LENGTH_BYTES = 8
# Rows that are transposed in one step: with bfloat16 a cache line. It is five times as fast as
# transposing all rows in one step.
_STRIP = 32


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
    """Type and shape of a whole tensor. `dtype`: name in safetensors."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """Position of a tensor inside of a holder, a tensor of several blocks of rows."""

    tensor: TensorInfo
    holder: str
    """Name of the holder."""
    block: int
    first: int
    """First row of the tensor in the block."""
    transposed: bool
    """Whether the blocks are [columns, rows]."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows `start` to `stop` along `axis` of tensor `name`, at byte `offset` of a record, in C
    order."""

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
    """Error of ``parts`` as a partition of ``tensors``. Empty: each element is in exactly one
    part."""
    by_tensor: dict[str, list[TensorPart]] = {name: [] for name in tensors}
    for part in parts:
        if part.name not in by_tensor:
            return f"a part of {part.name}, which is not a tensor of this version"
        by_tensor[part.name].append(part)
    for name, tensor_parts in by_tensor.items():
        shape, at = tensors[name].shape, 0
        axes = {part.axis for part in tensor_parts}
        if len(axes) != 1 or not 0 <= min(axes) < len(shape):
            return (
                f"tensor {name} is split along axes {sorted(axes)}, allowed one of its {len(shape)}"
            )
        for part in sorted(tensor_parts, key=lambda part: part.start):
            if part.start != at or part.stop < part.start:
                return (
                    f"tensor {name} lacks rows, or has them twice, at {min(at, part.start)} of "
                    f"axis {part.axis}"
                )
            at = part.stop
        axis = tensor_parts[0].axis
        if at != shape[axis]:
            return f"tensor {name} lacks rows from {at} on of axis {axis}"
    return ""


def header_text(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None
) -> str:
    """The header of a safetensors file with these tensors (name, type, shape), in this order, as
    the safetensors library writes it.

    The format: https://github.com/huggingface/safetensors#format. safetensors 0.8.0 (`save_file`,
    `serialize_file`) needs all tensors of a file in memory, 5 GB for a converted model. It chooses
    the order of tensors, and cannot compute a checksum during the write. So this header is for
    files that are written one tensor after the other, or by several processes.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNED)


def file_header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The header bytes of a safetensors file of ``tensors``, and the offset of each tensor in the
    file.

    Wide types come first, so that all tensors are aligned.
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
    """A safetensors file that several threads can fill, part by part in any order.

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
        """Create ``path``, or reuse the memory of an existing file. ``inside``: tensors inside of
        one of ``tensors``. OSError: the disk is full."""
        header, self._offsets = file_header(tensors)
        self.tensors, self._inside = tensors, inside
        self.bytes = len(header) + sum(tensor.bytes for tensor in tensors.values())
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            # Allocate now: a full disk raises OSError here, but would send SIGBUS on a write to the
            # mapping.
            file.truncate(self.bytes)
            os.posix_fallocate(file.fileno(), 0, self.bytes)
            # MAP_POPULATE maps all pages now. Page faults on first writes would take longer than
            # the copy.
            self._memory = mmap.mmap(
                file.fileno(), self.bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        self._memory[: len(header)] = header
        self._data = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def open_existing(cls, path: Path, tensors: Mapping[str, TensorInfo]) -> SafetensorsFile:
        """An existing file, to `get` parts from. ValueError: it has another layout."""
        header, offsets = file_header(tensors)
        self = cls.__new__(cls)
        self.tensors, self._offsets, self._inside = tensors, offsets, _NOTHING
        self.bytes = len(header) + sum(tensor.bytes for tensor in tensors.values())
        # Equal headers mean equal offsets, so the parts need no further checks.
        with path.open("rb") as file:
            if file.read(len(header)) != header or path.stat().st_size != self.bytes:
                raise ValueError(f"{path}: not the layout of the version that refers to it")
            self._memory = mmap.mmap(file.fileno(), self.bytes, prot=mmap.PROT_READ)
        self._data = np.frombuffer(self._memory, np.uint8)
        return self

    def put(self, part: TensorPart, record: memoryview) -> None:
        """Copy ``part`` from ``record`` into the file. Parts of tensors that are not in the file
        are ignored."""
        inner = self._inside.get(part.name)
        info = inner.tensor if inner else self.tensors.get(part.name)
        if info is None:
            return
        target = self._part_view(part, info)
        source = _as_array(record, part.offset, part.shape(info), info)
        strip = _STRIP if inner and inner.transposed else len(source)
        for first in range(0, len(source), strip or 1):
            target[first : first + strip] = source[first : first + strip]

    def get(self, part: TensorPart, record: memoryview) -> None:
        """Copy ``part`` from the file into ``record``."""
        info = self.tensors[part.name]
        target = _as_array(record, part.offset, part.shape(info), info)
        target[...] = self._part_view(part, info)

    def _part_view(self, part: TensorPart, info: TensorInfo) -> np.ndarray:
        inner = self._inside.get(part.name)
        if inner:
            block = self._tensor_view(inner.holder)[inner.block]
            if inner.transposed:
                block = block.T
            array = block[inner.first : inner.first + info.shape[0]]
        else:
            array = self._tensor_view(part.name)
        return array[(*[slice(None)] * part.axis, slice(part.start, part.stop))]

    def _tensor_view(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        return _as_array(self._data.data, self._offsets[name], info.shape, info)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The present bytes of the whole file, in pieces of ``size`` bytes."""
        data = self._data.data
        for start in range(0, len(data), size):
            yield data[start : start + size]

    def close(self) -> None:
        """Close the mapping. The file stays."""
        del self._data
        # After an error, a view of the mapping may still exist. Then the mapping is freed with it.
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_array(
    memory: memoryview, offset: int, shape: tuple[int, ...], info: TensorInfo
) -> np.ndarray:
    """View of ``memory`` as unsigned integers with the width of the tensor's type."""
    item = ITEM_BYTES[info.dtype]
    data = memory[offset : offset + math.prod(shape) * item]
    return np.frombuffer(data, np.dtype(f"u{item}")).reshape(shape)
