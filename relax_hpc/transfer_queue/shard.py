"""Shards: the rows of one put as one contiguous record, and the plane that carries them through the run directory.

A record is a fixed prefix, a msgpack header and a payload in which each per-token field of all rows lies in one piece,
64-byte aligned; a row is a slice. Readers map the file and copy nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from relax_hpc.transfer_queue.schema import FIELDS, FORMAT_VERSION, FieldSpec, Row

_PREFIX = struct.Struct("<8sIIQ")
_MAGIC = b"RLXSHARD"
_ALIGN = 64
_SCALAR = FieldSpec("scalar", "float64", "")


class ShardError(ValueError):
    """A shard that is truncated, corrupted or of an unknown format; the message names the file and what is wrong."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def pack(rows: Sequence[Row], fields: Sequence[str], origin: dict[str, Any]) -> bytes:
    """One record holding ``fields`` of ``rows``; ``origin`` (run, group, epoch) goes to the header."""
    columns: list[dict[str, Any]] = []
    pieces: list[np.ndarray] = []
    position = 0
    for name in fields:
        spec = FIELDS.get(name)
        if spec is None or spec.kind in ("text", "json"):
            columns.append({"name": name, "values": [row[name] for row in rows]})
            continue
        values = [np.atleast_1d(np.asarray(row[name], dtype=spec.dtype)) for row in rows]
        flat = np.concatenate(values)
        lengths = [len(value) for value in values] if spec.kind == "token" else None
        columns.append({"name": name, "dtype": spec.dtype, "at": position, "count": len(flat), "lengths": lengths})
        pieces.append(flat)
        position = _aligned(position + flat.nbytes)
    payload = bytearray(position)
    for column, flat in zip((c for c in columns if "at" in c), pieces, strict=True):
        payload[column["at"] : column["at"] + flat.nbytes] = flat.view(np.uint8).data
    ids = [row["sample_id"] for row in rows]
    header = msgpack.packb({"origin": origin, "sample_ids": ids, "columns": columns})
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header), len(payload))
    body_at = _aligned(_PREFIX.size + len(header) + 4)
    crc = zlib.crc32(payload, zlib.crc32(header, zlib.crc32(prefix)))
    record = bytearray(body_at)
    record[: _PREFIX.size] = prefix
    record[_PREFIX.size : _PREFIX.size + len(header)] = header
    struct.pack_into("<I", record, _PREFIX.size + len(header), crc)
    return bytes(record + payload)


def unpack(record: memoryview | bytes, name: str = "shard", check: bool = True) -> dict[str, Row]:
    """Rows by sample id, per-token fields as read-only views into ``record``; ShardError if it is not whole."""
    view = memoryview(record)
    if len(view) < _PREFIX.size:
        raise ShardError(f"{name}: {len(view)} bytes, shorter than a header")
    magic, version, header_size, payload_size = _PREFIX.unpack_from(view)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise ShardError(f"{name}: not a shard of format {FORMAT_VERSION} (magic {magic!r}, format {version})")
    body_at = _aligned(_PREFIX.size + header_size + 4)
    if len(view) != body_at + payload_size:
        raise ShardError(f"{name}: {len(view)} bytes, header says {body_at + payload_size}")
    header_bytes, payload = view[_PREFIX.size : _PREFIX.size + header_size], view[body_at:]
    if check:
        (crc,) = struct.unpack_from("<I", view, _PREFIX.size + header_size)
        if crc != zlib.crc32(payload, zlib.crc32(header_bytes, zlib.crc32(view[: _PREFIX.size]))):
            raise ShardError(f"{name}: checksum does not match")
    header = msgpack.unpackb(header_bytes)
    rows: list[Row] = [{"sample_id": sample} for sample in header["sample_ids"]]
    for column in header["columns"]:
        for row, value in zip(rows, _values(column, payload, len(rows)), strict=True):
            row[column["name"]] = value
    return {row["sample_id"]: row for row in rows}


def _values(column: dict[str, Any], payload: memoryview, count: int) -> list[Any]:
    if "values" in column:
        return column["values"]
    flat = np.frombuffer(payload, column["dtype"], column["count"], column["at"])
    if column["lengths"] is None:
        return list(flat)
    return np.split(flat, np.cumsum(column["lengths"])[:-1]) if count else []


class FilePlane:
    """Shards as immutable files below one folder of the shared filesystem: always there, readable by every node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, dict[str, Row]] = {}

    def publish(self, name: str, record: bytes) -> dict[str, Any]:
        """Write ``record`` under ``name`` by rename; the descriptor by which others read it."""
        path = self.folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}")
        temporary.write_bytes(record)
        temporary.replace(path)
        return {"plane": "file", "name": name, "bytes": len(record)}

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        """Rows of a shard by sample id, mapped; ShardError if the file is missing or not whole."""
        name = descriptor["name"]
        if "/" in name or name.startswith("."):
            raise ShardError(f"{name}: a shard's name has no path in it")
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
