"""Shards: the rows of one put as one contiguous record.

A record is a fixed prefix, a msgpack header and a payload. In the payload, each per-token field of
all rows is one array, 64-byte aligned; a row is a slice of it. Readers map the file and copy
nothing.
"""

from __future__ import annotations

import math
import re
import reprlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgpack
import numpy as np

from relax_hpc.base.fields import FIELDS, FieldSpec
from relax_hpc.queue.row_schema import (
    FORMAT_VERSION,
    BadRow,
    Row,
    column_lengths,
    copy_column,
    field_spec,
)

PREFIX = struct.Struct("<8sIIQ")
"""Prefix of a record: magic, format version, header bytes, payload bytes."""
_MAGIC = b"RLXSHARD"
_ALIGN = 64
MAX_NAME_BYTES = 200
"""Most bytes of a file's name: filesystems allow 255, and temporary files have a suffix."""
SHARD_NAME = re.compile(r"\.?(.+)-i(\d{6,})-")
"""Group and incarnation in the name of a shard of a `QueueClient`, or of its temporary file."""


class ShardError(ValueError):
    """A shard that is truncated, corrupted or of an unknown format. The message names the file and
    the fault."""


def align(size: int) -> int:
    """``size`` rounded up to the next possible start of a column."""
    return -(-size // _ALIGN) * _ALIGN


def check_name(name: str) -> str:
    """``name``, if it can be the name of a file in a folder. ShardError: it leaves the folder, is
    hidden, or is too long."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name.startswith("."):
        raise ShardError(
            f"{reprlib.repr(name)}: the name of a file has no path in it and no dot at its start"
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ShardError(
            f"{reprlib.repr(name)}: {len(name.encode())} bytes, allowed {MAX_NAME_BYTES}"
        )
    return name


@dataclass(slots=True)
class _Column:
    """One field of all rows: its header, its position in the payload, and its values."""

    head: dict[str, Any]
    spec: FieldSpec
    values: Sequence[Any] = ()
    at: int = 0
    size: int = 0


def pack(
    rows: Sequence[Row],
    fields: Sequence[str],
    origin: dict[str, Any],
    allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
) -> memoryview:
    """One record with ``fields`` of ``rows``; ``origin`` (group, incarnation) goes to the header.
    BadRow: a row is invalid.

    It is written to the memory that ``allocate`` returns for its size in bytes. It has no checksum:
    readers of this memory need none, and planes that copy it check the copy.
    """
    columns, end = [], 0
    tokens = [len(row["token_ids"]) if "token_ids" in row else None for row in rows]
    for name in fields:
        columns.append(_column(name, rows, tokens, end))
        end = align(end + columns[-1].size)
    names = [row["row_id"] for row in rows]
    header = msgpack.packb(
        {"origin": origin, "row_ids": names, "columns": [column.head for column in columns]}
    )
    body_at = align(PREFIX.size + len(header))
    record = allocate(body_at + end)[: body_at + end]
    PREFIX.pack_into(record, 0, _MAGIC, FORMAT_VERSION, len(header), end)
    record[PREFIX.size : PREFIX.size + len(header)] = header
    for column in columns:
        if column.size:
            start = body_at + column.at
            copy_column(column.spec, column.values, record[start : start + column.size])
    return record


def _column(name: str, rows: Sequence[Row], tokens: list[int | None], at: int) -> _Column:
    values = [row.get(name) for row in rows]
    if any(value is None for value in values):
        missing = next(
            row["row_id"] for row, value in zip(rows, values, strict=True) if value is None
        )
        raise BadRow(f"{name}: missing in {missing}")
    spec = field_spec(name, values)
    if not spec.is_number:
        return _Column({"name": name, "values": values}, spec)
    lengths, tail = column_lengths(spec, values) if spec.kind == "token" else (None, ())
    if name in FIELDS and lengths is not None and lengths != tokens:
        _check_lengths(name, rows, lengths, tokens)
    count = math.prod(tail) * (sum(lengths) if lengths is not None else len(values))
    head = {
        "name": name,
        "dtype": spec.dtype,
        "at": at,
        "count": count,
        "lengths": lengths,
        "tail": tail,
    }
    return _Column(head, spec, values, at, count * np.dtype(spec.dtype).itemsize)


def _check_lengths(
    name: str, rows: Sequence[Row], lengths: list[int], tokens: list[int | None]
) -> None:
    """BadRow: a per-token field does not have one entry for each token of its row."""
    for row, length, expected in zip(rows, lengths, tokens, strict=True):
        if expected is not None and length != expected:
            raise BadRow(f"{name}: {length} entries for {expected} tokens in {row['row_id']}")


def is_record(data: memoryview | bytes) -> bool:
    """Whether ``data`` begins like a record of `pack`."""
    return data[: len(_MAGIC)] == _MAGIC


def split_record(
    record: memoryview | bytes, name: str = "shard"
) -> tuple[dict[str, Any], memoryview]:
    """Header and payload of a record. ShardError: it is malformed or truncated."""
    view = memoryview(record).toreadonly()
    if len(view) < PREFIX.size:
        raise ShardError(f"{name}: {len(view)} bytes, shorter than a header")
    magic, version, header_size, payload_size = PREFIX.unpack_from(view)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise ShardError(
            f"{name}: not a shard of format {FORMAT_VERSION} (magic {magic!r}, format {version})"
        )
    body_at = align(PREFIX.size + header_size)
    if len(view) != body_at + payload_size:
        raise ShardError(f"{name}: {len(view)} bytes, expected {body_at + payload_size} by header")
    return msgpack.unpackb(view[PREFIX.size : PREFIX.size + header_size]), view[body_at:]


def unpack(record: memoryview | bytes, name: str = "shard") -> dict[str, Row]:
    """Rows by row id; per-token fields are read-only views of ``record``. ShardError: it is
    malformed or truncated."""
    header, payload = split_record(record, name)
    names = ["row_id", *(column["name"] for column in header["columns"])]
    values = [header["row_ids"], *(_values(column, payload) for column in header["columns"])]
    return {row[0]: dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)}


def flat_values(head: dict[str, Any], payload: memoryview) -> np.ndarray:
    """Numbers of all rows of a column, without gaps: [n, *tail]."""
    return np.frombuffer(payload, head["dtype"], head["count"], head["at"]).reshape(
        -1, *head["tail"]
    )


def _values(column: dict[str, Any], payload: memoryview) -> list[Any]:
    if "values" in column:
        return column["values"]
    flat = flat_values(column, payload)
    if column["lengths"] is None:
        return list(flat)
    ends = list(accumulate(column["lengths"]))
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
