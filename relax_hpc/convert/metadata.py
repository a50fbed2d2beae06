"""Reads `.metadata`, the pickle that describes a torch_dist checkpoint, as what it is: bytes of
somebody else."""

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
    """The pickle names something that does not describe tensors; nothing of it was called."""


class _Sealed(type):
    """A class that stays as it is: pickle can set attributes of whatever it finds, of classes for
    the whole process."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise UnknownEntryError(f"an assignment to {cls.__name__}.{name}")


def _sealed(found: type) -> type:
    return _Sealed(found.__name__, (found,), {})


def _path(*parts: str) -> str:
    return "/".join(parts)


def _layout(name: str) -> torch.layout:
    return _get_layout(name)


def _memory_format(value: int) -> _MEM_FORMAT_ENCODING:
    return _MEM_FORMAT_ENCODING(value)


def _enum_member(of: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """An enum's member as Python 3.11.2 stores it, `getattr(enum, name)`; others (3.11.7, 3.12)
    store `enum(value)`."""
    if of is not _memory_format:
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
    **{(one.__module__, one.__name__): _sealed(one) for one in _DESCRIPTIONS},
    **{("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
}
"""All that a `.metadata` may name. What could be changed from inside the pickle has a stand-in that
cannot."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UnknownEntryError(f"{module}.{name}")
        return _KNOWN[module, name]


def read_metadata(
    file: BinaryIO,
) -> tuple[dict[str, TensorStorageMetadata], dict[tuple[str, tuple[int, ...]], _StorageInfo]]:
    """The tensors by key, and where the bytes of each block lie, by (key, offsets). No code of the
    file runs.

    UnknownEntryError: it names something else than descriptions of tensors. Any other error: it is
    damaged.
    """
    found = _Unpickler(file).load()
    entries = found.state_dict_metadata.items()
    tensors = {key: about for key, about in entries if isinstance(about, TensorStorageMetadata)}
    for key, about in tensors.items():
        _check(key, about)
    stored = found.storage_data.items()
    return tensors, {
        (index.fqn, tuple(index.offset)): info for index, info in stored if index.offset is not None
    }


def _check(key: str, about: TensorStorageMetadata) -> None:
    sizes = [about.size, *(size for one in about.chunks for size in (one.offsets, one.sizes))]
    sized = all(isinstance(size, torch.Size) and len(size) == len(about.size) for size in sizes)
    if not (isinstance(key, str) and sized and isinstance(about.properties.dtype, torch.dtype)):
        raise ValueError(f"{key!r} is not described as a tensor is")
