"""Rows of a data file, jsonl, parquet or arrow, one after the other, each a mapping or the reason
why it is none. Nothing is held in memory."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import open_regular, unique_members

_TABLES = {b"PAR1": "parquet", b"\xff\xff\xff\xff": "arrow"}
"""Beginning of a table -> its form."""
_OTHER_KINDS = {
    b"\xff\xfe": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"\x1f\x8b": "compressed by gzip; gunzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unzstd",
    b"PK": "a zip archive; unzip",
}
"""Beginning of a file -> what it is, and what makes lines of it."""


MOST_BYTES = 1 << 30
"""Bytes of a line at most: a longer one is some other file."""
_BATCH, _BATCH_WITH_MEDIA = 1024, 16
"""Rows of a table in memory at a time, at most."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A row that is skipped."""

    line: int
    """Number of the line, counted from 1, through all files."""
    reason: str
    """broken_json | missing_field | wrong_type | unknown_key | duplicate_id | empty_prompt |
    answer_in_prompt | over_long | special_token | chat_template | tokenizer | media_mismatch, or a
    reason of `relax_hpc.data.multimodal.bad_media`; of examples also empty_answer |
    no_preference."""
    detail: str = field(default="", compare=False)


class BadRecord(Exception):
    """A row that cannot be used: its reason, see `BadLine.reason`, and the detail."""


Record = dict[str, Any]
Row = tuple[int, Record] | BadLine
"""A row with the number of its line, or why it is none."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, as it stands."""

    number: int
    """Number of the line, counted from 1."""
    start: int
    """Offset in the file, bytes."""
    data: bytes

    @property
    def is_blank(self) -> bool:
        return not self.data.strip()


def read_rows(path: Path | str, with_media: bool = False) -> Iterator[Row]:
    """Rows of a file with their lines, counted from 1; blank lines are none.

    ``with_media``: see `read_table`. ConfigError: it cannot be read, or is no file of rows at all.
    """
    if is_table(path):
        yield from read_table(path, with_media)
        return
    for line in read_lines(path):
        if not line.is_blank:
            yield row_of(line)


def read_lines(
    path: Path | str, told: Callable[[bytes], None] = lambda data: None
) -> Iterator[Line]:
    """All lines of a jsonl file; ``told`` all its bytes, in their order. ConfigError: as
    `read_rows`.

    Of a line that is too long the beginning alone is there, no JSON.
    """
    with opened(path) as file:
        _refuse_others(path, file.peek(512))
        number = start = 0
        while data := file.readline(MOST_BYTES):
            number, length = number + 1, len(data)
            told(data)
            rest = data
            while not rest.endswith(b"\n") and (rest := file.readline(MOST_BYTES)):
                told(rest)
                length += len(rest)
            yield Line(number, start, data)
            start += length


def row_of(line: Line) -> Row:
    """Row that stands in ``line``."""
    if len(line.data) >= MOST_BYTES:
        return BadLine(line.number, "broken_json", f"longer than {MOST_BYTES} bytes")
    return _record(line.number, line.data)


def is_table(path: Path | str) -> bool:
    """Whether it begins as parquet files do, or streams of arrow. ConfigError: it cannot be
    read."""
    return bool(_form(path))


def _form(path: Path | str) -> str:
    with opened(path) as file:
        return _TABLES.get(file.peek(4)[:4], "")


def read_table(path: Path | str, with_media: bool = False) -> Iterator[Row]:
    """Rows of a parquet or arrow file, as `read_rows`. Fields that are null are left out; times and
    decimals become texts, and so do bytes, as data URIs, in rows ``with_media``; in others they are
    bad. Values of the type JSON, in which `datasets` 5 stores objects of several forms, are
    decoded."""
    number, default = 0, _text_or_uri if with_media else _text
    with _table(path) as batches:
        for batch in batches(_BATCH_WITH_MEDIA if with_media else _BATCH):
            batch = _with_short_floats(path, batch)
            encoded = [column for column in batch.schema if _has_json(column.type)]
            for record in batch.to_pylist():
                number += 1
                yield _as_row(number, without_nulls(record), encoded, default)


def _with_short_floats(path: Path | str, batch: Any) -> Any:
    """``batch`` with columns of float16 and float32 as float64: the shortest decimal number that
    rounds to the stored value, such as 0.1 for the float32 0.10000000149.

    ConfigError: two columns have the same name.
    """
    arrow = import_module("pyarrow")
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{path}: found two columns {_first_repeated(names)!r}, allowed: one of each name; "
            "rename one of them"
        )
    for index, column in enumerate(batch.schema):
        if column.type in (arrow.float16(), arrow.float32()):
            short = batch.column(index).cast(arrow.string()).cast(arrow.float64())
            batch = batch.set_column(index, column.name, short)
    return batch


def _as_row(number: int, record: Record, encoded: list[Any], default: Callable[[Any], str]) -> Row:
    """Row of the ``record`` of a table, of whose columns those in ``encoded`` hold JSON."""
    try:
        for column in encoded:
            if column.name in record:
                record[column.name] = _decoded(record[column.name], column.type)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "broken_json", f"column {column.name}: {error}")
    return _as_json(number, record, default)


def _has_json(kind: Any) -> bool:
    """Whether values of an arrow type ``kind`` are, or hold, texts of JSON."""
    fields = (kind.field(index).type for index in range(kind.num_fields))
    return _is_json(kind) or any(map(_has_json, fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _decoded(value: Any, kind: Any) -> Any:
    """``value`` of an arrow type ``kind`` with the objects that its texts of JSON hold."""
    if _is_json(kind):
        return json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return {name: _decoded(entry, kind.field(name).type) for name, entry in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_decoded(entry, kind.value_type) for entry in value]
    return value


def without_nulls(value: Any) -> Any:
    """``value`` without fields that are null, at any depth. Arrow gives all structs of a column the
    same fields, so that those which a row does not have are null.

    >>> without_nulls({"a": None, "b": [{"c": 1, "d": None}, None]})
    {'b': [{'c': 1}, None]}
    """
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def is_empty(value: Any) -> bool:
    """Whether ``value`` says nothing, so that it may be ignored. False and 0 do say something.

    >>> [is_empty(value) for value in (None, "", [], {}, False, 0)]
    [True, True, True, True, False, False]
    """
    return value is None or (isinstance(value, str | list | dict) and not value)


def count_rows(path: Path | str) -> int:
    """Rows of a file, sound or not, which is much faster than to read them. ConfigError: it cannot
    be read."""
    if is_table(path):
        with _table(path) as batches:
            return sum(batch.num_rows for batch in batches(_BATCH, columns=[]))
    with opened(path) as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def _table(path: Path | str) -> Iterator[Callable[..., Iterator[Any]]]:
    """Batches of the table at ``path``, of at most so many rows, see `_batches`. ConfigError: its
    library is not installed, or cannot read it."""
    form = _form(path)
    try:
        # `parquet` is an attribute of it only then.
        import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path}: found {form}, which needs pyarrow, and that is not installed: pip install "
            "pyarrow, or write its rows as lines of JSON"
        ) from error
    try:
        with opened(path) as file:
            yield partial(_batches, file, form)
    except ConfigError:
        raise
    except Exception as error:  # pyarrow's have no other base, a date in the year 30000
        raise ConfigError(
            f"{path}: no {form} file that can be read: {error}; write it again"
        ) from error


def _batches(
    file: BinaryIO, form: str, rows: int, columns: list[str] | None = None
) -> Iterator[Any]:
    """Batches of a table, of a parquet file those ``columns`` alone."""
    arrow = import_module("pyarrow")
    if form == "parquet":
        yield from arrow.parquet.ParquetFile(file).iter_batches(
            rows, columns=columns, use_threads=False
        )
        return
    # Read, not mapped: what a shared filesystem cannot read is an error then, and no signal.
    for batch in arrow.ipc.open_stream(file):
        yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _as_json(number: int, record: Record, default: Callable[[Any], str]) -> Row:
    """``record`` as it is after it was written as JSON, what JSON has no type for as the text that
    ``default`` makes."""
    try:
        return number, json.loads(json.dumps(record, default=default))
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        return BadLine(number, "wrong_type", str(error))


def _text(value: Any) -> str:
    if isinstance(value, bytes | memoryview):
        raise TypeError("a column holds bytes, which no row of text has a place for")
    return str(value)


def _text_or_uri(value: Any) -> str:
    return data_uri(bytes(value)) if isinstance(value, bytes | memoryview) else str(value)


def data_uri(data: bytes, kind: str = "application/octet-stream") -> str:
    """``data`` as a row of text may hold it.

    >>> data_uri(b"ab")
    'data:application/octet-stream;base64,YWI='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@contextmanager
def opened(path: Path | str) -> Iterator[BufferedReader]:
    """A file that is to be read. ConfigError: it cannot be."""
    try:
        with open_regular(Path(path)) as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; data.train and data.eval name files of "
            "rows, or folders of them"
        ) from error


def _refuse_others(path: Path | str, head: bytes) -> None:
    found = next((kind for magic, kind in _OTHER_KINDS.items() if head.startswith(magic)), "")
    if not found and b"\0" in head:
        found = "not text in UTF-8 (it has NUL bytes); iconv -f UTF-16 -t UTF-8, if it is text"
    if not found and head.lstrip().startswith(b"["):
        found = "one JSON list; jq -c '.[]' makes a line of each entry"
    if found:
        raise ConfigError(
            f"{path}: found {found}; allowed: jsonl, one JSON object a line, or parquet"
        )


def _record(number: int, line: bytes) -> Row:
    try:
        record = json.loads(line, object_pairs_hook=unique_members)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "broken_json", str(error))
    if not isinstance(record, dict):
        return BadLine(number, "broken_json", "no JSON object")
    if _has_half_a_character(line, record):
        return BadLine(
            number, "broken_json", "half of a surrogate pair, such as \\ud800, which is no text"
        )
    return number, record


def _first_repeated(names: Sequence[str]) -> str:
    """The first of ``names`` that another one equals."""
    counts = Counter(names)
    return next(name for name in names if counts[name] > 1)


def _has_half_a_character(line: bytes, record: Record) -> bool:
    """Whether a text of the row cannot be written in UTF-8: JSON can name what no tokenizer, log or
    message takes."""
    if b"\\ud" not in line.lower():
        return False
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    return False
