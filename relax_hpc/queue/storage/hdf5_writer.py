"""Writes rows to HDF5: see `hdf5`. Nobody who makes or takes rows imports this, or the HDF5
library."""

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
    """Write ``columns`` beside ``path`` and rename the file into place; ``sync``: so that it
    survives a power loss.

    ``origin`` (text or integers) becomes attributes of the file. OSError as the system says.
    """
    datasets, data = _datasets(columns), xxhash.xxh3_64()
    for dataset in datasets:
        data.update(dataset.raw)
    with replace_when_written(path) as temporary:
        places = _create(
            temporary,
            datasets,
            {**origin, "rows": len(columns.row_ids), "digest": data.hexdigest()},
        )
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            size = os.fstat(descriptor).st_size
            for at, dataset in zip(places, datasets, strict=True):
                _write_at(descriptor, dataset.raw, at)
            _write_at(descriptor, memoryview(_block(datasets, places, size, data.intdigest())), 0)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if sync:
        sync_directory(path.parent)


@dataclass(frozen=True, slots=True)
class _Dataset:
    """One dataset to be: the field that it holds, or the offsets of others, and its numbers or
    (uint8) its text."""

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
        """Name of the dataset in the file: no path of groups, and none of our own."""
        quoted = quote(self.name, safe="").replace(".", "%2E")
        ours = self.kind != "offsets" and (self.name.startswith("offsets") or not quoted)
        return f"%{quoted}" if ours else quoted

    def about(self) -> dict[str, str]:
        """Attributes of the dataset."""
        if self.kind == "offsets":
            return {"kind": "offsets", "meaning": "where each row begins, and the end of the last"}
        spec = FIELDS.get(self.name)
        about = {"kind": self.kind, "meaning": spec.meaning if spec else "not in the schema"}
        about |= (
            {name: text for name, text in (("unit", spec.unit), ("by", spec.by)) if text}
            if spec
            else {}
        )
        return about | ({"offsets": self.offsets} if self.offsets else {})


def _datasets(columns: Columns) -> list[_Dataset]:
    """Datasets in the order of the file; per-token fields of the same lengths share their
    offsets."""
    found = [_listed("row_id", columns.row_ids)]
    tables: dict[tuple[int, ...], str] = {}
    for column in columns.columns:
        if column.name == "row_id":
            continue
        if column.flat is None:
            found.append(_listed(column.name, column.values or []))
        elif column.lengths is None:
            found.append(_Dataset(column.name, "scalar", column.flat))
        else:
            key = tuple(column.lengths)
            if key not in tables:
                tables[key] = f"offsets{len(tables) or ''}"
                found.append(_Dataset(tables[key], "offsets", np.cumsum([0, *key], dtype=np.int64)))
            found.append(_Dataset(column.name, "token", column.flat, tables[key]))
    return found


def _listed(name: str, values: list[Any]) -> _Dataset:
    """Dataset of values that are not numbers, so that they come back as they are: as JSON, or
    (bytes, NaN) as msgpack."""
    try:
        kind, packed = "json", json.dumps(values, allow_nan=False).encode()
    except (TypeError, ValueError):
        kind, packed = "msgpack", msgpack.packb(values)
    return _Dataset(name, kind, np.frombuffer(packed, np.uint8))


def _create(path: Path, datasets: list[_Dataset], about: dict[str, Any]) -> list[int]:
    """A file with all datasets but their bytes, and at which offset each of them lies.

    Bytes written past the HDF5 library are not written under its lock.
    """
    block = len(_block(datasets, [1 << 60] * len(datasets), 1 << 60, 0))
    how = {
        "userblock_size": block,
        "alignment_threshold": 1,
        "alignment_interval": _ALIGN,
        "locking": False,
    }
    at_once = h5p.create(h5p.DATASET_CREATE)
    at_once.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    at_once.set_fill_time(h5d.FILL_TIME_NEVER)
    try:
        with h5py.File(path, "w", **how) as file:
            about = {
                "format": "relax_hpc shard",
                "format_version": FORMAT_VERSION,
                "layout": _LAYOUT,
                **about,
            }
            _describe(
                file.id, about | {"digest_of": json.dumps([dataset.link for dataset in datasets])}
            )
            return [_allocate(file.id, dataset, at_once) for dataset in datasets]
    except (RuntimeError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        # What the library makes of a disk that fails it while it closes the file.
        found = _ERRNO.search(str(error))
        raise OSError(int(found[1]) if found else errno.EIO, str(error), str(path)) from error


def _allocate(file: h5f.FileID, dataset: _Dataset, how: h5p.PropDCID) -> int:
    if dataset.kind == "json":
        shape, type_ = _ONE, h5t.py_create(np.dtype(f"S{len(dataset.flat)}"))
    else:
        shape, type_ = h5s.create_simple(dataset.flat.shape), h5t.py_create(dataset.flat.dtype)
    made = h5d.create(file, dataset.link.encode(), type_, shape, how)
    _describe(made, dataset.about())
    return made.get_offset() or 0


def _describe(where: h5f.FileID | h5d.DatasetID, about: dict[str, str | int]) -> None:
    """Attributes, made by hand because h5py's own way is several times slower."""
    for name, value in about.items():
        text = isinstance(value, str)
        in_file, in_memory = _TEXT_TYPES if text else (h5t.NATIVE_INT64, h5t.NATIVE_INT64)
        attribute = h5a.create(where, name.encode(), in_file, _ONE)
        attribute.write(np.array(value, _TEXT if text else np.int64), in_memory)


def _block(datasets: list[_Dataset], places: list[int], size: int, data: int) -> bytes:
    """The user block: a line with the size of the file and its checksums, and one in JSON that says
    what lies where."""
    keys = ("name", "kind", "dtype", "count", "at", "offsets", "tail")
    pairs = zip(datasets, places, strict=True)
    parts = (
        (d.name, d.kind, d.flat.dtype.name, d.flat.size, at, d.offsets, d.flat.shape[1:])
        for d, at in pairs
    )
    index = json.dumps([dict(zip(keys, part, strict=True)) for part in parts]).encode()
    line = FIRST_LINE.format(
        FORMAT_VERSION, size, data, len(index), xxhash.xxh3_64_intdigest(index)
    )
    text = line.encode() + index + b"\n"
    return text.ljust(max(_SMALLEST_BLOCK, 1 << (len(text) - 1).bit_length()), b"\0")


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
