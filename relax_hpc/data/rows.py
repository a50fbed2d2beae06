"""Reader of the rows of a jsonl, parquet or arrow file. It streams: no file is held in memory."""

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
from typing import Any, BinaryIO, cast

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import open_regular, unique_members

_TABLES = {b"PAR1": "parquet", b"\xff\xff\xff\xff": "arrow"}
"""First bytes of a table -> its format."""
_OTHER_KINDS = {
    b"\xff\xfe": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"\x1f\x8b": "compressed by gzip; gunzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unzstd",
    b"PK": "a zip archive; unzip",
}
"""First bytes of a file -> its format, and the program that converts it."""
MAX_LINE_BYTES = 1 << 30
"""Maximum length of a line. A longer one shows that the file has another format."""
_BATCH, _BATCH_WITH_MEDIA = 1024, 16
"""Maximum number of rows of a table in memory."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A row that is skipped."""

    line: int
    """Number of the line from 1; it continues from file to file."""
    reason: str
    """broken_json | missing_field | wrong_type | unknown_key | duplicate_id | empty_prompt |
    answer_in_prompt | over_long | special_token | chat_template | tokenizer | media_mismatch, or a
    reason of `relax_hpc.data.multimodal.bad_media`; of examples also empty_answer |
    no_preference."""
    detail: str = field(default="", compare=False)


class BadRecord(Exception):
    """A row that cannot be used. Arguments: the reason, see `BadLine.reason`, and the detail."""


Record = dict[str, Any]
Row = tuple[int, Record] | BadLine
"""A row with the number of its line, or a bad line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    number: int
    """Number of the line, counted from 1."""
    start: int
    """Offset in the file in bytes."""
    data: bytes

    @property
    def is_blank(self) -> bool:
        return not self.data.strip()


def read_rows(path: Path | str, with_media: bool = False) -> Iterator[Row]:
    """Rows of a file with the numbers of their lines from 1. Blank lines are skipped.

    ``with_media``: see `read_table`. ConfigError: the file cannot be read, or has another format.
    """
    if is_table(path):
        yield from read_table(path, with_media)
        return
    for line in read_lines(path):
        if not line.is_blank:
            yield row_of(line)


def read_lines(
    path: Path | str, on_bytes: Callable[[bytes], None] = lambda data: None
) -> Iterator[Line]:
    """All lines of a jsonl file. ``on_bytes`` is called with all bytes of the file in their order.
    ConfigError: see `read_rows`.

    Of a line that is too long, only the first MAX_LINE_BYTES are returned.
    """
    with open_rows(path) as file:
        _refuse_other_formats(path, file.peek(512))
        number = start = 0
        while data := file.readline(MAX_LINE_BYTES):
            number, length = number + 1, len(data)
            on_bytes(data)
            piece = data
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(MAX_LINE_BYTES)
                on_bytes(piece)
                length += len(piece)
            yield Line(number, start, data)
            start += length


def row_of(line: Line) -> Row:
    """The row in ``line``."""
    if len(line.data) >= MAX_LINE_BYTES:
        return BadLine(line.number, "broken_json", f"longer than {MAX_LINE_BYTES} bytes")
    return _record(line.number, line.data)


def is_table(path: Path | str) -> bool:
    """Whether the file begins like a parquet file or a stream of arrow. ConfigError: it cannot be
    read."""
    return bool(_table_format(path))


def _table_format(path: Path | str) -> str:
    with open_rows(path) as file:
        return _TABLES.get(file.peek(4)[:4], "")


def read_table(path: Path | str, with_media: bool = False) -> Iterator[Row]:
    """Rows of a parquet or arrow file, like `read_rows`.

    Fields that are null are dropped. Times and decimals become texts. Bytes become data URIs if the
    rows are ``with_media``, otherwise the row is bad. Values of arrow's type JSON are decoded:
    `datasets` 5 uses it for columns with objects of different fields.
    """
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
    """Row for a ``record`` of a table. ``encoded``: columns that hold JSON texts."""
    try:
        for column in encoded:
            if column.name in record:
                record[column.name] = _decoded(record[column.name], column.type)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "broken_json", f"column {column.name}: {error}")
    return _as_json(number, record, default)


def _has_json(kind: Any) -> bool:
    """Whether values of the arrow type ``kind`` are, or contain, JSON texts."""
    fields = (kind.field(index).type for index in range(kind.num_fields))
    return _is_json(kind) or any(map(_has_json, fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _decoded(value: Any, kind: Any) -> Any:
    """``value`` of the arrow type ``kind`` with its JSON texts decoded."""
    if _is_json(kind):
        return json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return {name: _decoded(entry, kind.field(name).type) for name, entry in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_decoded(entry, kind.value_type) for entry in value]
    return value


def without_nulls(value: Any) -> Any:
    """``value`` without fields that are null, at any depth. In arrow all structs of a column have
    the same fields: those that a row does not have are null.

    >>> without_nulls({"a": None, "b": [{"c": 1, "d": None}, None]})
    {'b': [{'c': 1}, None]}
    """
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def is_empty(value: Any) -> bool:
    """Whether ``value`` has no content, so that it may be ignored. False and 0 have content.

    >>> [is_empty(value) for value in (None, "", [], {}, False, 0)]
    [True, True, True, True, False, False]
    """
    return value is None or (isinstance(value, str | list | dict) and not value)


def count_rows(path: Path | str) -> int:
    """Number of rows of a file, bad ones included, without parsing them. ConfigError: the file
    cannot be read."""
    if is_table(path):
        with _table(path) as batches:
            return sum(batch.num_rows for batch in batches(_BATCH, columns=[]))
    with open_rows(path) as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def _table(path: Path | str) -> Iterator[Callable[..., Iterator[Any]]]:
    """A function that yields batches of the table at ``path``, see `_batches`. ConfigError: pyarrow
    is not installed, or cannot read the file."""
    table_format = _table_format(path)
    try:
        # `pyarrow.parquet` is only an attribute of pyarrow after this import.
        import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path}: found {table_format}, which needs pyarrow, and that is not installed: pip "
            "install pyarrow, or write its rows as lines of JSON"
        ) from error
    try:
        with open_rows(path) as file:
            yield partial(_batches, file, table_format)
    except ConfigError:
        raise
    except Exception as error:  # errors of pyarrow have no common base class
        raise ConfigError(
            f"{path}: no {table_format} file that can be read: {error}; write it again"
        ) from error


def _batches(
    file: BinaryIO, table_format: str, rows: int, columns: list[str] | None = None
) -> Iterator[Any]:
    """Batches of at most ``rows`` rows of a table. ``columns``: of a parquet file, read only these;
    None: all."""
    arrow = import_module("pyarrow")
    if table_format == "parquet":
        yield from arrow.parquet.ParquetFile(file).iter_batches(
            rows, columns=columns, use_threads=False
        )
        return
    # Read, not mapped: if a shared filesystem fails, a read raises OSError, but an access to mapped
    # memory ends the process with SIGBUS.
    for batch in arrow.ipc.open_stream(file):
        yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _as_json(number: int, record: Record, default: Callable[[Any], str]) -> Row:
    """``record`` after a conversion to JSON and back. ``default`` converts values for which JSON
    has no type."""
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
    """``data`` as a data URI, a text that a row may hold.

    >>> data_uri(b"ab")
    'data:application/octet-stream;base64,YWI='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@contextmanager
def open_rows(path: Path | str) -> Iterator[BufferedReader]:
    """A file of rows, open for reading. ConfigError: it cannot be read."""
    try:
        with open_regular(Path(path)) as file:
            # `open_regular` returns what `open` of mode "rb" does.
            yield cast("BufferedReader", file)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; data.train and data.eval name files of "
            "rows, or folders of them"
        ) from error


def _refuse_other_formats(path: Path | str, head: bytes) -> None:
    """ConfigError: a file that begins with ``head`` is not jsonl."""
    other = next((kind for magic, kind in _OTHER_KINDS.items() if head.startswith(magic)), "")
    if not other and b"\0" in head:
        other = "not text in UTF-8 (it has NUL bytes); iconv -f UTF-16 -t UTF-8, if it is text"
    if not other and head.lstrip().startswith(b"["):
        other = "one JSON list; jq -c '.[]' makes a line of each entry"
    if other:
        raise ConfigError(
            f"{path}: found {other}; allowed: jsonl, one JSON object a line, or parquet"
        )


def _record(number: int, line: bytes) -> Row:
    try:
        record = json.loads(line, object_pairs_hook=unique_members)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "broken_json", str(error))
    if not isinstance(record, dict):
        return BadLine(number, "broken_json", "no JSON object")
    if _has_half_surrogate(line, record):
        return BadLine(
            number, "broken_json", "half of a surrogate pair, such as \\ud800, which is no text"
        )
    return number, record


def _first_repeated(names: Sequence[str]) -> str:
    """The first of ``names`` that occurs several times."""
    counts = Counter(names)
    return next(name for name in names if counts[name] > 1)


def _has_half_surrogate(line: bytes, record: Record) -> bool:
    """Whether a text of the row has half of a surrogate pair, which UTF-8 cannot represent. JSON
    allows it, but no tokenizer, log or message does."""
    if b"\\ud" not in line.lower():
        return False
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    return False
