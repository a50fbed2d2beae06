"""Read HDF5 files of rows without the HDF5 library. Any program with h5py can read them too.

Each field of all rows is one contiguous dataset, 64-byte aligned. Offsets give the part of each row
in a per-token field, and attributes explain the content. The HDF5 user block at the start of the
file, which h5py skips, contains the positions of the datasets and a checksum. This module uses only
the user block, because the HDF5 library has one lock for all threads, does not survive a fork and
may crash on a damaged file. `hdf5_writer` writes the files.
"""

from __future__ import annotations

import json
import mmap
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from relax_hpc.base.foreign_files import open_in_run
from relax_hpc.queue.row_schema import FORMAT_VERSION, Row
from relax_hpc.queue.storage.shard import ShardError

FIRST_LINE = (
    "relax_hpc shard {}: {} bytes, XXH3-64 of the data {:016x}, of the next {} bytes {:016x}\n"
)
"""First line of a file: format version, size, and checksums of the datasets and of the line of JSON
that follows."""
_FIRST = re.compile(
    FIRST_LINE.replace("{:016x}", "([0-9a-f]{{16}})").replace("{}", r"(\d+)").format().encode()
)


def map_file(path: Path) -> memoryview:
    """A file, mapped read-only. ShardError: it cannot be read, or is empty."""
    try:
        with open_in_run(path) as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: {error}") from error


def read(path: Path) -> dict[str, Row]:
    """Rows by row id; numbers are read-only views of the mapped file.

    ShardError, naming the file and the fault: the file is not as it was written.
    """
    whole = map_file(path)
    try:
        columns = _read_columns(_read_index(whole), whole)
        names = list(columns)
        return {
            row[0]: dict(zip(names, row, strict=True))
            for row in zip(*columns.values(), strict=True)
        }
    except ShardError as error:
        raise ShardError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ShardError(f"{path}: not laid out as a shard: {error}") from error


def _read_index(whole: memoryview) -> list[dict[str, Any]]:
    """Index of the mapped file ``whole``, after checking the checksum of all datasets."""
    line = _FIRST.match(whole)
    if not line:
        raise ShardError(f"not a shard: it begins with {bytes(whole[:24])!r}")
    version, size, index_size = int(line[1]), int(line[2]), int(line[4])
    data_digest, index_digest = line[3], line[5]
    if version != FORMAT_VERSION:
        raise ShardError(f"a shard of format {version}, this program reads {FORMAT_VERSION}")
    if size != len(whole):
        raise ShardError(f"{len(whole)} bytes, {size} were written: truncated or overwritten")
    text = bytes(whole[line.end() : line.end() + index_size])
    if xxhash.xxh3_64_hexdigest(text).encode() != index_digest:
        raise ShardError("checksum of its first lines does not match")
    index = json.loads(text)
    digest = xxhash.xxh3_64()
    for entry in index:
        digest.update(_view(entry, whole).reshape(-1).view(np.uint8).data)
    if digest.hexdigest().encode() != data_digest:
        raise ShardError("checksum does not match")
    return index


def _read_columns(index: list[dict[str, Any]], whole: memoryview) -> dict[str, list[Any]]:
    """Columns by field, with one entry for each row."""
    tables = {
        entry["name"]: _view(entry, whole).tolist() for entry in index if entry["kind"] == "offsets"
    }
    columns: dict[str, list[Any]] = {}
    for entry in index:
        if entry["kind"] != "offsets":
            columns[entry["name"]] = _entries(
                entry["kind"], _view(entry, whole), tables.get(entry["offsets"], [])
            )
    return columns


def _entries(kind: str, flat: np.ndarray, offsets: list[int]) -> list[Any]:
    if kind == "token":
        return [flat[start:end] for start, end in pairwise(offsets)]
    if kind == "scalar":
        return list(flat)
    return json.loads(bytes(flat)) if kind == "json" else msgpack.unpackb(flat.data)


def _view(entry: dict[str, Any], whole: memoryview) -> np.ndarray:
    return np.frombuffer(whole, entry["dtype"], entry["count"], entry["at"]).reshape(
        -1, *entry["tail"]
    )
