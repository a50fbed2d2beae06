"""The durable copy of a shard: one immutable HDF5 file, which anyone can read and understand with h5py alone.

Each field of all rows is one contiguous dataset, 64-byte aligned; a row's part of a per-token field is found by its
offsets. Attributes say what everything means. The HDF5 user block before it, which h5py skips, says where the datasets
lie and what their checksum is: this module reads a shard without the HDF5 library, which has one lock for all threads,
does not survive a fork and may crash on a damaged file.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import msgpack
import numpy as np
import xxhash
from h5py import h5a, h5d, h5f, h5p, h5s, h5t

from relax_hpc.fields import FIELDS
from relax_hpc.rundir import sync_directory
from relax_hpc.transfer_queue.row_schema import FORMAT_VERSION, Row
from relax_hpc.transfer_queue.storage.shard import ShardError, flat_of, parts_of

SUFFIX = ".h5"
_LINE = "relax_hpc shard {}: {} bytes, XXH3-64 of the data {:016x}, of the next {} bytes {:016x}\n"
_FIRST = re.compile(_LINE.replace("{:016x}", "([0-9a-f]{{16}})").replace("{}", r"(\d+)").format().encode())
_ERRNO = re.compile(r"errno = (\d+)")
_ALIGN = 64
_SMALLEST_BLOCK = 512
_TEXT = h5py.string_dtype()
_TEXT_TYPES = h5t.py_create(_TEXT, logical=True), h5t.py_create(_TEXT)
"""In the file, and in memory."""
_ONE = h5s.create(h5s.SCALAR)
_LAYOUT = """One dataset a field, its name written as in a URL; entry i of each belongs to entry i of sample_id.
Attribute `kind`: token: numbers of all rows end to end, row i is [o[i]:o[i+1]] of the first axis, o being the int64
dataset named by `offsets`; scalar: one number a row; json: a JSON list, one entry a row; msgpack: the same in msgpack.
Without a `unit` it is a pure number. `by`: the role that made it.
`digest`: XXH3-64 of the bytes of all datasets, in the order of `digest_of`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all rows: `values`, one a row, or `flat` numbers, end to end by `lengths` or (None) one a row."""

    name: str
    values: list[Any] | None = None
    flat: np.ndarray | None = None
    lengths: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """What a record holds, with the sample ids of its rows and its origin (group, incarnation)."""

    origin: dict[str, Any]
    sample_ids: list[str]
    columns: list[Column]


def columns_of(record: memoryview, name: str = "shard") -> Columns:
    """The columns of a record of `shard.pack`, as read-only views into it; ShardError if it is none, or cut."""
    header, payload = parts_of(record, name)
    return Columns(header["origin"], header["sample_ids"], [_column(head, payload) for head in header["columns"]])


def column_of(name: str, values: list[Any]) -> Column:
    """One field of all rows, copied where they are numbers."""
    if not values or not isinstance(values[0], np.ndarray | np.generic):
        return Column(name, values)
    if values[0].ndim:
        return Column(name, flat=np.concatenate(values), lengths=[len(value) for value in values])
    return Column(name, flat=np.array(values))


def _column(head: dict[str, Any], payload: memoryview) -> Column:
    if "values" in head:
        return Column(head["name"], values=head["values"])
    return Column(head["name"], flat=flat_of(head, payload), lengths=head["lengths"])


# -- writing ---------------------------------------------------------------------------------------------------------


def write(path: Path, columns: Columns, origin: dict[str, Any], sync: bool) -> None:
    """Write ``columns`` beside ``path`` and rename the file into place; ``sync``: so that it survives a power loss.

    ``origin`` (run, group, incarnation: text or integers) becomes attributes of the file. OSError as the system says.
    """
    datasets, data = _datasets(columns), xxhash.xxh3_64()
    for dataset in datasets:
        data.update(dataset.raw)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        places = _create(temporary, datasets, {**origin, "rows": len(columns.sample_ids), "digest": data.hexdigest()})
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
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


@dataclass(frozen=True, slots=True)
class _Dataset:
    """One dataset to be: the field that it holds, or the offsets of others, and its numbers or (uint8) its text."""

    name: str
    kind: str
    flat: np.ndarray
    offsets: str = ""

    @property
    def raw(self) -> memoryview:
        """Its bytes."""
        return self.flat.reshape(-1).view(np.uint8).data

    @property
    def link(self) -> str:
        """Its name in the file: no path of groups, and none of our own."""
        quoted = quote(self.name, safe="").replace(".", "%2E")
        ours = self.kind != "offsets" and (self.name.startswith("offsets") or not quoted)
        return f"%{quoted}" if ours else quoted

    def about(self) -> dict[str, str]:
        """Its attributes."""
        if self.kind == "offsets":
            return {"kind": "offsets", "meaning": "where each row begins, and the end of the last"}
        spec = FIELDS.get(self.name)
        about = {"kind": self.kind, "meaning": spec.meaning if spec else "not in the schema"}
        about |= {name: text for name, text in (("unit", spec.unit), ("by", spec.by)) if text} if spec else {}
        return about | ({"offsets": self.offsets} if self.offsets else {})


def _datasets(columns: Columns) -> list[_Dataset]:
    """In the order of the file; per-token fields of the same lengths share their offsets."""
    found = [_listed("sample_id", columns.sample_ids)]
    tables: dict[tuple[int, ...], str] = {}
    for column in columns.columns:
        if column.name == "sample_id":
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
    """What is not numbers, so that it comes back as it is: as JSON, or (bytes, NaN) as msgpack."""
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
    how = {"userblock_size": block, "alignment_threshold": 1, "alignment_interval": _ALIGN, "locking": False}
    at_once = h5p.create(h5p.DATASET_CREATE)
    at_once.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    at_once.set_fill_time(h5d.FILL_TIME_NEVER)
    try:
        with h5py.File(path, "w", **how) as file:
            about = {"format": "relax_hpc shard", "format_version": FORMAT_VERSION, "layout": _LAYOUT, **about}
            _describe(file.id, about | {"digest_of": json.dumps([dataset.link for dataset in datasets])})
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
    """The user block: a line with the size of the file and its checksums, and one in JSON that says what lies where."""
    keys = ("name", "kind", "dtype", "count", "at", "offsets", "tail")
    pairs = zip(datasets, places, strict=True)
    parts = ((d.name, d.kind, d.flat.dtype.name, d.flat.size, at, d.offsets, d.flat.shape[1:]) for d, at in pairs)
    index = json.dumps([dict(zip(keys, part, strict=True)) for part in parts]).encode()
    line = _LINE.format(FORMAT_VERSION, size, data, len(index), xxhash.xxh3_64_intdigest(index))
    text = line.encode() + index + b"\n"
    return text.ljust(max(_SMALLEST_BLOCK, 1 << (len(text) - 1).bit_length()), b"\0")


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Row]:
    """Rows by sample id, numbers as read-only views into the mapped file.

    ShardError, naming the file and what is wrong, unless every row is as it was written.
    """
    try:
        with path.open("rb") as opened:
            whole = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ShardError(f"{path}: {error}") from error
    try:
        columns = _read_columns(_read_index(whole), whole)
        names = list(columns)
        return {row[0]: dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)}
    except ShardError as error:
        raise ShardError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ShardError(f"{path}: not laid out as a shard: {error}") from error


def _read_index(whole: memoryview) -> list[dict[str, Any]]:
    """What lies where in the file ``whole``, of which every dataset has been compared with the checksum."""
    line = _FIRST.match(whole)
    if not line:
        raise ShardError(f"not a shard: it begins with {bytes(whole[:24])!r}")
    version, size, data, index_size, digest = int(line[1]), int(line[2]), line[3], int(line[4]), line[5]
    if version != FORMAT_VERSION:
        raise ShardError(f"a shard of format {version}, this program reads {FORMAT_VERSION}")
    if size != len(whole):
        raise ShardError(f"{len(whole)} bytes, {size} were written: truncated or overwritten")
    text = bytes(whole[line.end() : line.end() + index_size])
    if xxhash.xxh3_64_hexdigest(text).encode() != digest:
        raise ShardError("checksum of its first lines does not match")
    index = json.loads(text)
    found = xxhash.xxh3_64()
    for entry in index:
        found.update(_view(entry, whole).reshape(-1).view(np.uint8).data)
    if found.hexdigest().encode() != data:
        raise ShardError("checksum does not match")
    return index


def _read_columns(index: list[dict[str, Any]], whole: memoryview) -> dict[str, list[Any]]:
    """Per field, one entry a row."""
    tables = {entry["name"]: _view(entry, whole).tolist() for entry in index if entry["kind"] == "offsets"}
    columns: dict[str, list[Any]] = {}
    for entry in index:
        if entry["kind"] != "offsets":
            columns[entry["name"]] = _entries(entry["kind"], _view(entry, whole), tables.get(entry["offsets"], []))
    return columns


def _entries(kind: str, flat: np.ndarray, offsets: list[int]) -> list[Any]:
    if kind == "token":
        return [flat[start:end] for start, end in pairwise(offsets)]
    if kind == "scalar":
        return list(flat)
    return json.loads(bytes(flat)) if kind == "json" else msgpack.unpackb(flat.data)


def _view(entry: dict[str, Any], whole: memoryview) -> np.ndarray:
    return np.frombuffer(whole, entry["dtype"], entry["count"], entry["at"]).reshape(-1, *entry["tail"])
