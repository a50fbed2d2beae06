"""Columns of a record: each field of all rows in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_hpc.queue.storage.shard import flat_values, split_record


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all rows: either `values`, one for each row, or `flat` numbers. With `lengths`,
    `flat` has that many numbers for each row; without, it has one for each row."""

    name: str
    values: list[Any] | None = None
    flat: np.ndarray | None = None
    lengths: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Content of a record, with the ids of its rows and its origin (group, incarnation)."""

    origin: dict[str, Any]
    row_ids: list[str]
    columns: list[Column]


def parse_columns(record: memoryview, name: str = "shard") -> Columns:
    """The columns of a record of `shard.pack`, as read-only views of it. ShardError: it is
    malformed or truncated."""
    header, payload = split_record(record, name)
    return Columns(
        header["origin"], header["row_ids"], [_column(head, payload) for head in header["columns"]]
    )


def make_column(name: str, values: list[Any]) -> Column:
    """Column of one field of all rows; numbers are copied to one array."""
    if not values or not isinstance(values[0], np.ndarray | np.generic):
        return Column(name, values)
    if values[0].ndim:
        return Column(name, flat=np.concatenate(values), lengths=[len(value) for value in values])
    return Column(name, flat=np.array(values))


def _column(head: dict[str, Any], payload: memoryview) -> Column:
    if "values" in head:
        return Column(head["name"], values=head["values"])
    return Column(head["name"], flat=flat_values(head, payload), lengths=head["lengths"])
