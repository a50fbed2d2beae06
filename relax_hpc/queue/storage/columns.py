"""Columns of a record: of each field all rows end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_hpc.queue.storage.shard import flat_of, parts_of


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all rows: `values`, one a row, or `flat` numbers, end to end by `lengths` or
    (None) one a row."""

    name: str
    values: list[Any] | None = None
    flat: np.ndarray | None = None
    lengths: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Contents of a record, with the ids of its rows and its origin (group, incarnation)."""

    origin: dict[str, Any]
    row_ids: list[str]
    columns: list[Column]


def columns_of(record: memoryview, name: str = "shard") -> Columns:
    """The columns of a record of `shard.pack`, as read-only views into it; ShardError if it is
    none, or cut."""
    header, payload = parts_of(record, name)
    return Columns(
        header["origin"], header["row_ids"], [_column(head, payload) for head in header["columns"]]
    )


def column_of(name: str, values: list[Any]) -> Column:
    """Column of one field of all rows, copied where they are numbers."""
    if not values or not isinstance(values[0], np.ndarray | np.generic):
        return Column(name, values)
    if values[0].ndim:
        return Column(name, flat=np.concatenate(values), lengths=[len(value) for value in values])
    return Column(name, flat=np.array(values))


def _column(head: dict[str, Any], payload: memoryview) -> Column:
    if "values" in head:
        return Column(head["name"], values=head["values"])
    return Column(head["name"], flat=flat_of(head, payload), lengths=head["lengths"])
