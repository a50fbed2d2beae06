"""Files of megatron-core's torch_dist format, read and written one shard at a time.

Runs save and load with megatron-core 0.16.1 itself (`checkpoint/strategy.py`, `convert/verify.py`).
Conversions do not, because its `dist_checkpointing`
- unpickles the checkpoint's `.metadata` with `pickle.load` (torch 2.13,
  `FileSystemReader.read_metadata`), so that a checkpoint of another user can run code;
- saves a whole state dict, so that all tensors are in memory before the first byte is written;
- always starts from the beginning: a new `save` does not continue an interrupted one;
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
from relax_hpc.convert.workspace import HashedFile
from relax_hpc.training.checkpoint.store import MARKER, checksum

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
_DAMAGED = "damaged; name another checkpoint, or copy it again"
_UNKNOWN = (
    f"is not a name that torch {torch.__version__} and megatron-core write; no code of the file "
    "was run. If you know who wrote the checkpoint, save it again with the versions of this "
    "environment; otherwise do not use it"
)


@dataclass(frozen=True, slots=True)
class Shard:
    """Location of a tensor's block, or (`offsets` None) of an object, in a file."""

    key: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    start: int
    length: int


class StoredState:
    """The tensors of a checkpoint directory by key.

    ConfigError names a file that is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path, checksums = directory / METADATA, _marker_checksums(directory / MARKER)
        try:
            if METADATA in checksums and checksum(path) not in ("", checksums[METADATA]):
                raise ValueError("its checksum differs from the marker's")
            with open_regular(path) as file:
                self.tensors, self._stored = read_metadata(file)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path}: missing, so the checkpoint is incomplete; name another checkpoint"
            ) from error
        except UnknownEntryError as error:
            raise ConfigError(f"{path}: unknown entry: {_brief(error)} {_UNKNOWN}") from error
        # A damaged pickle can fail in any way.
        except Exception as error:
            raise ConfigError(f"{path}: {_DAMAGED} ({_brief(error)})") from error

    def read(self, key: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the block of `shape` at `start` of the tensor `key`, which contains it."""
        entry = self.tensors[key]
        result, filled = torch.empty(*shape, dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            # [low, high) is the intersection of the requested block and the stored chunk.
            low = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            ends = zip(start, shape, chunk.offsets, chunk.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                block = self._load(key, chunk)[_slices(low, high, chunk.offsets)]
                result[_slices(low, high, start)] = block
                filled += block.numel()
        if filled != result.numel():
            raise ConfigError(
                f"{self.directory / METADATA}: {key} has no shards for all of it; {_DAMAGED}"
            )
        return result

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        path = self.directory / METADATA
        try:
            location = self._stored[key, tuple(chunk.offsets)]
            path = self.directory / Path(location.relative_path).name
            with open_regular(path) as file:
                file.seek(location.offset)
                archive = io.BytesIO(file.read(location.length))
            # torch.load (torch 2.13) ignores the checksums of its zip archives.
            damaged_member = zipfile.ZipFile(archive).testzip()
            if damaged_member is not None:
                raise ValueError(f"checksum of {damaged_member}")
            archive.seek(0)
            tensor = torch.load(archive, map_location="cpu", weights_only=True)
            if tensor.shape != chunk.sizes or tensor.dtype != self.tensors[key].properties.dtype:
                raise ValueError(f"shape {list(tensor.shape)} and type {tensor.dtype}")
            return tensor
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: missing; name another checkpoint") from error
        # A damaged archive can fail in any way.
        except Exception as error:
            raise ConfigError(
                f"{path}: shard {list(chunk.offsets)} of {key}: {_DAMAGED} ({_brief(error)})"
            ) from error


def _marker_checksums(marker: Path) -> dict[str, str]:
    """Checksums by file name in a marker; empty without a marker."""
    if not marker.exists():
        return {}
    files = read_json_object(marker, _DAMAGED).get("files")
    if not isinstance(files, dict):
        raise ConfigError(
            f"{marker}: files: found {type(files).__name__}, expected an object; {_DAMAGED}"
        )
    return files


def _brief(error: Exception) -> str:
    """First line of an error; errors of torch have many."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Slices of the region [low, high) in a tensor that begins at ``origin``."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def write_shards(
    file: HashedFile, shards: Iterator[tuple[str, tuple[int, ...] | None, Any]]
) -> list[Shard]:
    """Append (key, offsets, tensor or object) to a file; the next is taken when one is written."""
    locations, start = [], 0
    for key, offsets, value in shards:
        # torch.save needs only `write` and `flush` of a file.
        torch.save(value, cast(BinaryIO, file))
        sizes = tuple(value.shape) if offsets is not None else ()
        locations.append(Shard(key, offsets, sizes, start, file.tell() - start))
        start = file.tell()
    return locations


def write_description(
    directory: Path,
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
    files: dict[str, list[Shard]],
) -> None:
    """Write the metadata of a checkpoint.

    ``tensors``: shape and type of each tensor. ``files``: shards of each file.
    """
    entries: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        for key, (shape, dtype) in tensors.items()
    }
    results = []
    for name, shards in files.items():
        for shard in shards:
            offsets = None
            if shard.offsets is None:
                entries[shard.key] = BytesStorageMetadata()
            else:
                offsets = torch.Size(shard.offsets)
                chunk = ChunkStorageMetadata(offsets, torch.Size(shard.sizes))
                entries[shard.key].chunks.append(chunk)
            info = _StorageInfo(name, shard.start, shard.length)
            results.append(WriteResult(MetadataIndex(shard.key, offsets), shard.length, info))
    writer = FileSystemWriter(directory)
    # torch draws a random id; a fixed one makes the same conversion give the same bytes.
    writer.save_id = "converted"
    writer.finish(Metadata(entries), [results])
    common = io.BytesIO()
    torch.save({}, common)
    (directory / COMMON).write_bytes(common.getvalue())
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (directory / CONFIG).write_text(json.dumps(config))


def shards_to_json(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """``shards`` as JSON values."""
    return [asdict(shard) for shard in shards]


def shards_from_json(records: list[dict[str, Any]]) -> list[Shard]:
    """Inverse of `shards_to_json`."""
    return [
        Shard(
            record["key"],
            None if record["offsets"] is None else tuple(record["offsets"]),
            tuple(record["sizes"]),
            record["start"],
            record["length"],
        )
        for record in records
    ]
