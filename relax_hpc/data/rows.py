"""Rows of data files, one after the other, each a mapping or the reason why it is none. Nothing is held in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError

_OTHER_KINDS = {
    b"\xff\xfe": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; iconv -f UTF-16 -t UTF-8",
    b"PAR1": "a parquet file; write its rows as lines of JSON",
    b"\x1f\x8b": "compressed by gzip; gunzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unzstd",
    b"PK": "a zip archive; unzip",
}
"""Beginning of a file -> what it is, and what makes lines of it."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A row that is skipped."""

    line: int
    """Counted from 1."""
    reason: str
    """broken_json | missing_field | wrong_type | duplicate_id | empty_prompt | over_long"""
    detail: str = field(default="", compare=False)


Record = dict[str, Any]


def read_rows(path: Path | str) -> Iterator[tuple[int, Record] | BadLine]:
    """Rows of a jsonl file with their lines, counted from 1; blank lines are none.

    ConfigError: it cannot be read, or is no file of lines at all.
    """
    with _opened(path) as file:
        _refuse_others(path, file.peek(512))
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _record(number, line)


def count_rows(path: Path | str) -> int:
    """Rows of a jsonl file, sound or not, which is much faster than to read them. ConfigError: it cannot be read."""
    with _opened(path) as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def _opened(path: Path | str) -> Iterator[BufferedReader]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; data.train and data.eval name jsonl files"
        ) from error


def _refuse_others(path: Path | str, head: bytes) -> None:
    found = next((kind for magic, kind in _OTHER_KINDS.items() if head.startswith(magic)), "")
    if not found and b"\0" in head:
        found = "not text in UTF-8 (it has NUL bytes); iconv -f UTF-16 -t UTF-8, if it is text"
    if not found and head.lstrip().startswith(b"["):
        found = "one JSON list; jq -c '.[]' makes a line of each entry"
    if found:
        raise ConfigError(f"{path}: found {found}; allowed: jsonl, one JSON object a line")


def _record(number: int, line: bytes) -> tuple[int, Record] | BadLine:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "broken_json", str(error))
    if not isinstance(record, dict):
        return BadLine(number, "broken_json", "no JSON object")
    if _has_half_a_character(line, record):
        return BadLine(number, "broken_json", "half of a surrogate pair, such as \\ud800, which is no text")
    return number, record


def _has_half_a_character(line: bytes, record: Record) -> bool:
    """Whether a text of the row cannot be written in UTF-8: JSON can name what no tokenizer, log or message takes."""
    if b"\\ud" not in line.lower():
        return False
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return True
    return False
