"""Write rows to HDF5, see `hdf5`. Only a separate process of the hub imports this module and the
HDF5 library."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import msgpack
import numpy as np
import xxhash
from h5py import h5a, h5d, h5f, h5p, h5s, h5t

from relax_hpc.base.fields import FIELDS
from relax_hpc.base.rundir import replace_when_written, sync_directory
from relax_hpc.queue.row_schema import FORMAT_VERSION
from relax_hpc.queue.storage.columns import Columns
from relax_hpc.queue.storage.hdf5 import FIRST_LINE

SUFFIX = ".h5"
_ERRNO = re.compile(r"errno = (\d+)")
_ALIGN = 64
_SMALLEST_BLOCK = 512
_TEXT = h5py.string_dtype()
_TEXT_TYPES = h5t.py_create(_TEXT, logical=True), h5t.py_create(_TEXT)
"""Types of text in the file, and in memory."""
_ONE = h5s.create(h5s.SCALAR)
_LAYOUT = """One dataset a field, its name written as in a URL; entry i of each belongs to entry
i of row_id. Attribute `kind`: token: numbers of all rows end to end, row i is [o[i]:o[i+1]] of
the first axis, o being the int64 dataset named by `offsets`; scalar: one number a row; json: a
JSON list, one entry a row; msgpack: the same in msgpack.
Without a `unit` it is a pure number. `by`: the role that made it.
`digest`: XXH3-64 of the bytes of all datasets, in the order of `digest_of`."""


def write(path: Path, columns: Columns, origin: dict[str, Any], sync: bool) -> None:
    """Write ``columns`` to a temporary file and rename it to ``path``. With ``sync``, the file
    survives a power loss.

    ``origin`` (texts or integers) becomes attributes of the file. OSError: a write failed.
    """
    datasets, data = _datasets(columns), xxhash.xxh3_64()
    for dataset in datasets:
        data.update(dataset.raw)
    with replace_when_written(path) as temporary:
        attributes = {**origin, "rows": len(columns.row_ids), "digest": data.hexdigest()}
        positions = _create(temporary, datasets, attributes)
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            size = os.fstat(descriptor).st_size
            for position, dataset in zip(positions, datasets, strict=True):
                _write_at(descriptor, dataset.raw, position)
            block = _user_block(datasets, positions, size, data.intdigest())
            _write_at(descriptor, memoryview(block), 0)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if sync:
        sync_directory(path.parent)


@dataclass(frozen=True, slots=True)
class _Dataset:
    """A dataset to write: a field, or the offsets of fields. `flat`: its numbers, or its text as
    uint8."""

    name: str
    kind: str
    flat: np.ndarray
    offsets: str = ""

    @property
    def raw(self) -> memoryview:
        """Bytes of the dataset."""
        return self.flat.reshape(-1).view(np.uint8).data

    @property
    def link(self) -> str:
        """Name of the dataset in the file. Names that HDF5 reads as a path, and names of our
        offsets, are escaped."""
        quoted = quote(self.name, safe="").replace(".", "%2E")
        is_reserved = self.name.startswith("offsets") or not quoted
        return f"%{quoted}" if self.kind != "offsets" and is_reserved else quoted

    def attributes(self) -> dict[str, str | int]:
        """Attributes of the dataset."""
        if self.kind == "offsets":
            return {"kind": "offsets", "meaning": "where each row begins, and the end of the last"}
        spec = FIELDS.get(self.name)
        attributes: dict[str, str | int] = {
            "kind": self.kind,
            "meaning": spec.meaning if spec else "not in the schema",
        }
        if spec and spec.unit:
            attributes["unit"] = spec.unit
        if spec and spec.by:
            attributes["by"] = spec.by
        if self.offsets:
            attributes["offsets"] = self.offsets
        return attributes


def _datasets(columns: Columns) -> list[_Dataset]:
    """Datasets in the order of the file. Per-token fields with the same lengths share their
    offsets."""
    datasets = [_encode("row_id", columns.row_ids)]
    tables: dict[tuple[int, ...], str] = {}
    for column in columns.columns:
        if column.name == "row_id":
            continue
        if column.flat is None:
            datasets.append(_encode(column.name, column.values or []))
        elif column.lengths is None:
            datasets.append(_Dataset(column.name, "scalar", column.flat))
        else:
            key = tuple(column.lengths)
            if key not in tables:
                tables[key] = f"offsets{len(tables) or ''}"
                offsets = np.cumsum([0, *key], dtype=np.int64)
                datasets.append(_Dataset(tables[key], "offsets", offsets))
            datasets.append(_Dataset(column.name, "token", column.flat, tables[key]))
    return datasets


def _encode(name: str, values: list[Any]) -> _Dataset:
    """Dataset of values that are not numbers: as JSON, or as msgpack if JSON cannot represent them
    (bytes, NaN)."""
    try:
        kind, packed = "json", json.dumps(values, allow_nan=False).encode()
    except (TypeError, ValueError):
        kind, packed = "msgpack", msgpack.packb(values)
    return _Dataset(name, kind, np.frombuffer(packed, np.uint8))


def _create(path: Path, datasets: list[_Dataset], attributes: dict[str, str | int]) -> list[int]:
    """Create the file with all datasets, but without their bytes; the position of each dataset.

    The bytes are written without the HDF5 library, so that its lock is not held for long.
    """
    block_bytes = len(_user_block(datasets, [1 << 60] * len(datasets), 1 << 60, 0))
    # Datasets get their position when they are created, and are not filled with zeros.
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    attributes = {
        "format": "relax_hpc shard",
        "format_version": FORMAT_VERSION,
        "layout": _LAYOUT,
        **attributes,
        "digest_of": json.dumps([dataset.link for dataset in datasets]),
    }
    try:
        with h5py.File(
            path,
            "w",
            userblock_size=block_bytes,
            alignment_threshold=1,
            alignment_interval=_ALIGN,
            locking=False,
        ) as file:
            _set_attributes(file.id, attributes)
            return [_allocate(file.id, dataset, creation) for dataset in datasets]
    except (RuntimeError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        # If a write fails while HDF5 closes the file, h5py raises an error without an errno. The
        # number is only in its text.
        number = _ERRNO.search(str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def _allocate(file: h5f.FileID, dataset: _Dataset, creation: h5p.PropDCID) -> int:
    """Create a dataset; its position in the file."""
    if dataset.kind == "json":
        shape, dtype = _ONE, h5t.py_create(np.dtype(f"S{len(dataset.flat)}"))
    else:
        shape, dtype = h5s.create_simple(dataset.flat.shape), h5t.py_create(dataset.flat.dtype)
    created = h5d.create(file, dataset.link.encode(), dtype, shape, creation)
    _set_attributes(created, dataset.attributes())
    return created.get_offset() or 0


def _set_attributes(owner: h5f.FileID | h5d.DatasetID, attributes: dict[str, str | int]) -> None:
    """Set attributes by the low-level interface, which is several times faster than `attrs`."""
    for name, value in attributes.items():
        text = isinstance(value, str)
        in_file, in_memory = _TEXT_TYPES if text else (h5t.NATIVE_INT64, h5t.NATIVE_INT64)
        attribute = h5a.create(owner, name.encode(), in_file, _ONE)
        attribute.write(np.array(value, _TEXT if text else np.int64), in_memory)


def _user_block(datasets: list[_Dataset], positions: list[int], size: int, digest: int) -> bytes:
    """The user block: a line with the size of the file and its checksums, and a line of JSON with
    the position of each dataset."""
    entries = [
        {
            "name": dataset.name,
            "kind": dataset.kind,
            "dtype": dataset.flat.dtype.name,
            "count": dataset.flat.size,
            "at": position,
            "offsets": dataset.offsets,
            "tail": dataset.flat.shape[1:],
        }
        for dataset, position in zip(datasets, positions, strict=True)
    ]
    index = json.dumps(entries).encode()
    line = FIRST_LINE.format(
        FORMAT_VERSION, size, digest, len(index), xxhash.xxh3_64_intdigest(index)
    )
    text = line.encode() + index + b"\n"
    return text.ljust(max(_SMALLEST_BLOCK, 1 << (len(text) - 1).bit_length()), b"\0")


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
