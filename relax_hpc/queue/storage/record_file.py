"""The durable copy of a shard: one immutable file, the record as it is in memory and a checksum.

The producer of rows writes it. This costs one `write` and, if rows must survive a power loss, one
`fsync`. HDF5 would take milliseconds of CPU under one lock, even for few rows. For steps that are
kept, the hub writes one HDF5 file each (`controller.gathering`), for people and other programs.
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
    """Write a record of `shard.pack` to a temporary file and rename it to ``path``. With ``sync``,
    the bytes are on disk before the rename.

    The name survives a power loss after its folder is synced too. OSError: a write failed.
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


def _write_all(file: int, buffers: list[memoryview]) -> None:
    while buffers:
        # A signal, or the limit of 2 GiB for one call, may end a write early.
        written = os.writev(file, buffers)
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]


def read(path: Path) -> dict[str, Row]:
    """Rows by row id, from a file of `write` or an HDF5 file; numbers are read-only views of the
    mapped file.

    ShardError, naming the file and the fault: the file is not as it was written.
    """
    whole = hdf5.map_file(path)
    if not is_record(whole):
        return hdf5.read(path)
    if len(whole) < _END.size:
        raise ShardError(f"{path}: {len(whole)} bytes, too few for a shard: truncated")
    record, (mark, digest) = whole[: -_END.size], _END.unpack(whole[-_END.size :])
    if mark != _MARK:
        raise ShardError(
            f"{path}: {len(whole)} bytes without the mark at its end: truncated or overwritten"
        )
    if xxhash.xxh3_64_intdigest(record) != digest:
        raise ShardError(f"{path}: checksum does not match")
    try:
        return unpack(record, str(path))
    except (LookupError, TypeError, ValueError, ArithmeticError, struct.error) as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{path}: not laid out as a shard: {error}") from error
