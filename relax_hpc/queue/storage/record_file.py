"""The durable copy of a shard while a run needs it: one immutable file, its record as it is in
memory and a checksum.

Whoever makes rows writes it, at the price of one `write` and, where rows must survive a power loss,
one `fsync`: no HDF5 library, which takes milliseconds of CPU under one lock for however few rows.
Of steps that are kept the hub makes one HDF5 file each (`controller.gathering`), for people and
other programs.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from relax_hpc.base.rundir import replace_when_written
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import hdf5
from relax_hpc.queue.storage.shard import ShardError, is_record, unpack

SUFFIX = ".shard"
_END = struct.Struct("<8sQ")
"""Trailer of the record: a mark, and XXH3-64 of the record."""
_MARK = b"RLXSHEND"


def write(path: Path, record: memoryview, sync: bool) -> None:
    """Write what `shard.pack` made beside ``path`` and rename it into place; ``sync``: have its
    bytes on disk before.

    The name survives a power loss once its folder is synced too. OSError as the filesystem says.
    """
    end = _END.pack(_MARK, xxhash.xxh3_64_intdigest(record))
    with replace_when_written(path) as temporary:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(file, [record, memoryview(end)])
            if sync:
                os.fsync(file)
        finally:
            os.close(file)


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        # A signal, or 2 GiB, may cut a write short.
        written = os.writev(file, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]


def read(path: Path) -> dict[str, Row]:
    """Rows by row id, numbers as read-only views into the mapped file: of one that `write` made, or
    of HDF5.

    ShardError, naming the file and what is wrong, unless every row is as it was written.
    """
    whole = hdf5.mapped(path)
    if not is_record(whole):
        return hdf5.read(path)
    if len(whole) < _END.size:
        raise ShardError(f"{path}: {len(whole)} bytes, too few for a shard: truncated")
    record, (mark, digest) = whole[: -_END.size], _END.unpack(whole[-_END.size :])
    if mark != _MARK:
        raise ShardError(
            f"{path}: {len(whole)} bytes without the mark of its end: truncated or overwritten"
        )
    if xxhash.xxh3_64_intdigest(record) != digest:
        raise ShardError(f"{path}: checksum does not match")
    try:
        return unpack(record, str(path))
    except (LookupError, TypeError, ValueError, ArithmeticError, struct.error) as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{path}: not laid out as a shard: {error}") from error
