"""Shards: the rows of one put as one contiguous record, and the plane that carries them through the run directory.

A record is a fixed prefix, a msgpack header and a payload in which each per-token field of all rows lies in one piece,
64-byte aligned; a row is a slice. Readers map the file and copy nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from relax_hpc.transfer_queue.schema import FIELDS, FORMAT_VERSION, BadRow, Row, flat_column

_PREFIX = struct.Struct("<8sIIQI")
"""Magic, format version, header bytes, payload bytes, crc of everything else."""
_CRC_AT = _PREFIX.size - 4
_MAGIC = b"RLXSHARD"
_ALIGN = 64
SHARD_NAME = re.compile(r"\.?(.+)-e(\d{6,})-")
"""Group and epoch in the name of a shard of a `QueueClient`, or of its temporary file."""


class ShardError(ValueError):
    """A shard that is truncated, corrupted or of an unknown format; the message names the file and what is wrong."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def check_name(name: str) -> str:
    """``name``, if it is one; ShardError if it leads out of the folder or to a hidden file."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ShardError(f"{name!r}: a shard's name has no path in it and no dot before it")
    return name


def pack(rows: Sequence[Row], fields: Sequence[str], origin: dict[str, Any]) -> bytes:
    """One record holding ``fields`` of ``rows``; ``origin`` (group, epoch) goes to the header. BadRow as it says."""
    columns: list[dict[str, Any]] = []
    pieces: list[tuple[int, np.ndarray]] = []
    position = 0
    for name in fields:
        if missing := [row["sample_id"] for row in rows if row.get(name) is None]:
            raise BadRow(f"{name}: missing in {missing[0]}")
        spec, values = FIELDS.get(name), [row[name] for row in rows]
        if spec is None or spec.kind in ("text", "json"):
            columns.append({"name": name, "values": values})
            continue
        flat = flat_column(name, values)
        lengths = [len(value) for value in values] if spec.kind == "token" else None
        for row, length in zip(rows, lengths or (), strict=False):
            if length != len(row.get("token_ids", row[name])):
                raise BadRow(f"{name}: {length} entries for {len(row['token_ids'])} tokens in {row['sample_id']}")
        columns.append({"name": name, "dtype": spec.dtype, "at": position, "count": len(flat), "lengths": lengths})
        pieces.append((position, flat))
        position = _aligned(position + flat.nbytes)
    header = msgpack.packb({"origin": origin, "sample_ids": [row["sample_id"] for row in rows], "columns": columns})
    body_at = _aligned(_PREFIX.size + len(header))
    record = bytearray(body_at + position)
    _PREFIX.pack_into(record, 0, _MAGIC, FORMAT_VERSION, len(header), position, 0)
    record[_PREFIX.size : _PREFIX.size + len(header)] = header
    for at, flat in pieces:
        record[body_at + at : body_at + at + flat.nbytes] = flat.view(np.uint8).data
    struct.pack_into("<I", record, _CRC_AT, _crc(memoryview(record)))
    return bytes(record)


def _crc(record: memoryview) -> int:
    return zlib.crc32(record[_PREFIX.size :], zlib.crc32(record[:_CRC_AT]))


def unpack(record: memoryview | bytes, name: str = "shard") -> dict[str, Row]:
    """Rows by sample id, per-token fields as read-only views into ``record``; ShardError if it is not whole."""
    view = memoryview(record)
    if len(view) < _PREFIX.size:
        raise ShardError(f"{name}: {len(view)} bytes, shorter than a header")
    magic, version, header_size, payload_size, crc = _PREFIX.unpack_from(view)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise ShardError(f"{name}: not a shard of format {FORMAT_VERSION} (magic {magic!r}, format {version})")
    body_at = _aligned(_PREFIX.size + header_size)
    if len(view) != body_at + payload_size:
        raise ShardError(f"{name}: {len(view)} bytes, header says {body_at + payload_size}")
    if crc != _crc(view):
        raise ShardError(f"{name}: checksum does not match")
    header = msgpack.unpackb(view[_PREFIX.size : _PREFIX.size + header_size])
    names = ["sample_id", *(column["name"] for column in header["columns"])]
    values = [header["sample_ids"], *(_values(column, view[body_at:]) for column in header["columns"])]
    return {row[0]: dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)}


def _values(column: dict[str, Any], payload: memoryview) -> list[Any]:
    if "values" in column:
        return column["values"]
    flat = np.frombuffer(payload, column["dtype"], column["count"], column["at"])
    if column["lengths"] is None:
        return list(flat)
    ends = list(accumulate(column["lengths"]))
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class FilePlane:
    """Shards as immutable files below one folder of the shared filesystem: always there, readable by every node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, dict[str, Row]] = {}

    def publish(self, name: str, record: bytes) -> dict[str, Any]:
        """Write ``record`` under ``name`` by rename; the descriptor by which others read it."""
        path = self.folder / check_name(name)
        temporary = path.with_name(f".{name}.{os.getpid()}")
        temporary.write_bytes(record)
        temporary.replace(path)
        return {"plane": "file", "name": name, "bytes": len(record)}

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        """Rows of a shard by sample id, mapped; ShardError if the file is missing or not whole."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            try:
                with (self.folder / name).open("rb") as file:
                    record = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ShardError(f"{self.folder / name}: {error}") from error
            self._open[name] = unpack(memoryview(record), str(self.folder / name))
        return self._open[name]

    def forget(self, keep: set[str]) -> None:
        """Drop the mappings of all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
