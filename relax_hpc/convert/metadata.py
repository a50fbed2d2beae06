"""Safe reader of `.metadata`, the pickle that describes a torch_dist checkpoint.

A checkpoint may come from another user, so the reader accepts only the names that it knows and
calls no code that the pickle names.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout


class UnknownEntryError(Exception):
    """The pickle names something that does not describe tensors. Nothing in it was called."""


class _Sealed(type):
    """Metaclass of classes without assignable attributes.

    A pickle can set attributes of any class that it names, with effect on the whole process.
    """

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise UnknownEntryError(f"an assignment to {cls.__name__}.{name}")


def _sealed(base: type) -> type:
    return _Sealed(base.__name__, (base,), {})


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)


def _path(*names: str) -> str:
    return "/".join(names)


def _layout(name: str) -> torch.layout:
    return _get_layout(name)


def _memory_format(value: int) -> _MEM_FORMAT_ENCODING:
    return _MEM_FORMAT_ENCODING(value)


def _enum_member(enum: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Member of an enum.

    Python 3.11.2 pickles it as `getattr(enum, name)`, later versions (3.11.7, 3.12) as
    `enum(value)`.
    """
    if enum is not _memory_format:
        raise UnknownEntryError("builtins.getattr of something that is no enum")
    return _MEM_FORMAT_ENCODING[name]


_DESCRIPTIONS = (
    *(
        Metadata,
        StorageMeta,
        TensorStorageMetadata,
        TensorProperties,
        ChunkStorageMetadata,
        BytesStorageMetadata,
    ),
    *(MetadataIndex, _StorageInfo),
)
_KNOWN: dict[tuple[str, str], Callable[..., Any] | torch.dtype] = {
    ("builtins", "getattr"): _enum_member,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _path,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _memory_format,
    **{(kind.__module__, kind.__name__): _sealed(kind) for kind in _DESCRIPTIONS},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if _is_dtype(dtype)},
}
"""All names that a `.metadata` may contain. Classes are replaced by subclasses whose attributes a
pickle cannot set."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UnknownEntryError(f"{module}.{name}")
        return _KNOWN[module, name]


def read_metadata(
    file: BinaryIO,
) -> tuple[dict[str, TensorStorageMetadata], dict[tuple[str, tuple[int, ...]], _StorageInfo]]:
    """The tensors by key, and the location of each block by (key, offsets).

    No code of the file runs. UnknownEntryError: the file names something that does not describe
    tensors. Any other error: the file is damaged.
    """
    metadata = _Unpickler(file).load()
    tensors = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for key, entry in tensors.items():
        _check(key, entry)
    locations = {
        (index.fqn, tuple(index.offset)): info
        for index, info in metadata.storage_data.items()
        if index.offset is not None
    }
    return tensors, locations


def _check(key: str, entry: TensorStorageMetadata) -> None:
    """Check the types in a tensor's description: the pickle may have put anything there."""
    sizes = [entry.size]
    for chunk in entry.chunks:
        sizes += [chunk.offsets, chunk.sizes]
    has_sizes = all(isinstance(size, torch.Size) and len(size) == len(entry.size) for size in sizes)
    has_type = isinstance(entry.properties.dtype, torch.dtype)
    if not (isinstance(key, str) and has_sizes and has_type):
        raise ValueError(f"{key!r} is not described as a tensor is")
