"""The files of megatron-core's torch_dist format, read and written one shard at a time and without
a process group.

Runs save and load with megatron-core 0.16.1 itself (`checkpoint/strategy.py`, `convert/verify.py`).
Conversions do not, because its `dist_checkpointing`
- unpickles the checkpoint's `.metadata` with `pickle.load` (torch 2.13,
  `FileSystemReader.read_metadata`),
  so that a checkpoint of somebody else can run code;
- saves a whole state dict, of which all tensors exist before the first byte is written;
- always starts from the beginning: an interrupted `save` leaves nothing that the next one uses;
- needs an initialized process group (`torch.distributed.get_rank`, `barrier`).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import open_regular, read_json_object
from relax_hpc.convert.metadata import UnknownEntryError, read_metadata
from relax_hpc.training.checkpoint.store import MARKER, checksum

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
_DAMAGED = "damaged; take another checkpoint, or copy it again"
_UNKNOWN = (
    f"is not among what torch {torch.__version__} and megatron-core write there; nothing of it was "
    "run. If you know "
    "who wrote the checkpoint, save it again with this environment's versions; if you do not, "
    "leave it alone"
)


@dataclass(frozen=True, slots=True)
class Shard:
    """Place of bytes in a checkpoint: of a tensor's block, or (`offsets` None) of an object."""

    key: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    start: int
    length: int


class StoredState:
    """The tensors of a checkpoint directory by key. ConfigError names the file that is missing or
    damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path, recorded = directory / METADATA, _recorded(directory / MARKER)
        try:
            if METADATA in recorded and checksum(path) not in ("", recorded[METADATA]):
                raise ValueError("its checksum differs from the marker's")
            with open_regular(path) as file:
                self.tensors, self._stored = read_metadata(file)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path}: missing, so saving did not come to its end; take another checkpoint"
            ) from error
        except UnknownEntryError as error:
            raise ConfigError(f"{path}: unknown entry: {_brief(error)} {_UNKNOWN}") from error
        # A damaged pickle can fail in any way.
        except Exception as error:
            raise ConfigError(f"{path}: {_DAMAGED} ({_brief(error)})") from error

    def read(self, key: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block of `shape` at `start` of the tensor `key`, which lies within it."""
        about = self.tensors[key]
        room, filled = torch.empty(*shape, dtype=about.properties.dtype), 0
        for chunk in about.chunks:
            low = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            ends = zip(start, shape, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = self._load(key, chunk)[_block(low, high, chunk.offsets)]
                room[_block(low, high, start)] = part
                filled += part.numel()
        if filled != room.numel():
            raise ConfigError(
                f"{self.directory / METADATA}: {key} has no shards for all of it; {_DAMAGED}"
            )
        return room

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        path = self.directory / METADATA
        try:
            about = self._stored[key, tuple(chunk.offsets)]
            path = self.directory / Path(about.relative_path).name
            with open_regular(path) as file:
                file.seek(about.offset)
                archive = io.BytesIO(file.read(about.length))
            # torch checks no checksums; its archives have them.
            if (broken := zipfile.ZipFile(archive).testzip()) is not None:
                raise ValueError(f"checksum of {broken}")
            archive.seek(0)
            tensor = torch.load(archive, map_location="cpu", weights_only=True)
            if tensor.shape != chunk.sizes or tensor.dtype != self.tensors[key].properties.dtype:
                raise ValueError(f"shape {list(tensor.shape)} and type {tensor.dtype}")
            return tensor
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: missing; take another checkpoint") from error
        # A damaged archive can fail in any way.
        except Exception as error:
            raise ConfigError(
                f"{path}: shard {list(chunk.offsets)} of {key}: {_DAMAGED} ({_brief(error)})"
            ) from error


def _recorded(marker: Path) -> dict[str, str]:
    """Checksums that a marker has; none without a marker."""
    if not marker.exists():
        return {}
    files = read_json_object(marker, _DAMAGED).get("files")
    if not isinstance(files, dict):
        found = type(files).__name__
        raise ConfigError(f"{marker}: files: found {found}, expected an object; {_DAMAGED}")
    return files


def _brief(error: Exception) -> str:
    """First line of an error: torch explains at length."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _block(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def write_shards(
    file: BinaryIO, shards: Iterator[tuple[str, tuple[int, ...] | None, Any]]
) -> list[Shard]:
    """Append (key, offsets, tensor or object), each taken when the one before it is written."""
    found, at = [], 0
    for key, offsets, value in shards:
        torch.save(value, file)
        sizes = tuple(value.shape) if offsets is not None else ()
        found.append(Shard(key, offsets, sizes, at, file.tell() - at))
        at = file.tell()
    return found


def write_description(
    directory: Path,
    whole: dict[str, tuple[tuple[int, ...], torch.dtype]],
    files: dict[str, list[Shard]],
) -> None:
    """Describe a checkpoint made of files of shards: `whole` has shape and type of each tensor."""
    described: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        for key, (shape, dtype) in whole.items()
    }
    results = []
    for name, shards in files.items():
        for one in shards:
            offsets = None if one.offsets is None else torch.Size(one.offsets)
            if offsets is None:
                described[one.key] = BytesStorageMetadata()
            else:
                described[one.key].chunks.append(
                    ChunkStorageMetadata(offsets, torch.Size(one.sizes))
                )
            info = _StorageInfo(name, one.start, one.length)
            results.append(WriteResult(MetadataIndex(one.key, offsets), one.length, info))
    writer = FileSystemWriter(directory)
    # Drawn at random otherwise: the same conversion shall give the same bytes.
    writer.save_id = "converted"
    writer.finish(Metadata(described), [results])
    common = io.BytesIO()
    torch.save({}, common)
    (directory / COMMON).write_bytes(common.getvalue())
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / CONFIG).write_text(
        json.dumps(config | {"common_backend": "torch", "common_backend_version": 1})
    )


def shards_to_json(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Plain values of ``shards`` for a record of what is written."""
    return [asdict(one) for one in shards]


def shards_from_json(found: list[dict[str, Any]]) -> list[Shard]:
    """Inverse of `shards_to_json`."""
    return [
        Shard(
            one["key"],
            None if one["offsets"] is None else tuple(cast(list[int], one["offsets"])),
            tuple(one["sizes"]),
            one["start"],
            one["length"],
        )
        for one in found
    ]
