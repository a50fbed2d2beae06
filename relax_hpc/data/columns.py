"""Columns of rows: columns with other names (`data.columns`), ids, and columns that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.rows import BadRecord, Record, is_empty

ROW_FIELDS = (
    "id",
    "prompt",
    "messages",
    "token_ids",
    "answer",
    "chosen",
    "rejected",
    "tools",
    "prompt_len",
)
"""Columns that rows may have. A file may have other names for them (`data.columns`)."""
_NOT_READ = (
    "chat_template_kwargs",
    "documents",
    "enable_thinking",
    "functions",
    "parallel_tool_calls",
    "system",
)
"""Columns that change the prompt in other programs (TRL, OpenAI, LLaMA-Factory) and are not read
here. A row that has one is refused, because its prompt would be incomplete."""
_ALPACA_PROMPT_COLUMNS = ("input", "history")
"""Columns that are parts of the prompt in rows with a column `instruction` (Alpaca,
LLaMA-Factory). They are refused for the same reason."""


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """Rules by which a record of a file becomes a row."""

    names: tuple[tuple[str, str], ...] = ()
    """Field of a row, and the column of the file that holds it."""
    set_name: str = "train"
    """Name of the data set; a prefix of the ids of rows without an id."""
    ignored: tuple[str, ...] = ()
    """Columns, and keys of messages, that are dropped."""
    order_by: str = ""
    """Column by which rows are ordered; empty: none."""

    @classmethod
    def from_config(cls, data: DataConfig, set_name: str) -> ColumnRules:
        """Rules of a configuration for the set ``set_name``."""
        order_by = data.order_by if set_name in ("train", *data.train_sets) else ""
        return cls(tuple(data.columns.items()), set_name, tuple(data.ignore_keys), order_by)

    @property
    def key(self) -> list[Any]:
        """Value that is equal for rules that make the same rows."""
        return [list(map(list, self.names)), self.set_name, list(self.ignored), self.order_by]

    def read(self, number: int, record: Record, has_template: bool) -> Record:
        """Row of the ``record`` with that ``number``, with an id. BadRecord: a column is missing,
        or the row has a column that is refused."""
        row = self.renamed(record)
        refused_columns: tuple[str, ...] = _NOT_READ if has_template else ()
        if dict(self.names).get("prompt") == "instruction":
            refused_columns += _ALPACA_PROMPT_COLUMNS
        for name in refused_columns:
            if not is_empty(row.get(name)):
                raise BadRecord(
                    "unknown_key",
                    f"found a column {name!r}, which is not read; put it into the prompt, or list "
                    "it in data.ignore_keys",
                )
        row["id"] = self.id_of(row, number)
        return row

    def renamed(self, record: Record) -> Record:
        """``record`` with the columns of `data.columns` under their fields, and without ignored
        ones. BadRecord: a column is missing."""
        row = {name: value for name, value in record.items() if name not in self.ignored}
        for field, column in self.names:
            row[field] = _value_of(record, field, column)
        # A renamed column is not metadata too.
        fields = dict(self.names)
        for column in fields.values():
            if column not in fields:
                row.pop(column, None)
        return row

    def missing(self, fields: Sequence[str]) -> str:
        """Error detail of a row that lacks these ``fields``, with the names of its file."""
        names = dict(self.names)
        return ", ".join(f"no {names.get(field, field)}" for field in fields)

    def order(self, row: Record) -> float:
        """Value of the row in the column by which rows are ordered. BadRecord: it is not a
        number."""
        if not self.order_by:
            return 0.0
        value = row.get(self.order_by)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise BadRecord(
                "wrong_type",
                f"{self.order_by} is {str(value)[:40]!r}, allowed: a number, see data.order_by",
            )
        return float(value)

    def id_of(self, row: Record, number: int) -> str:
        """Id of a row; if it has none, the set's name and the row's number. BadRecord: the value
        is neither a text nor an integer."""
        value = row.get("id")
        if value is None:
            return f"{self.set_name}/{number}"
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadRecord("wrong_type", f"id is {type(value).__name__} {str(value)[:40]!r}")
        return str(value)


NO_COLUMNS = ColumnRules()


def _value_of(record: Record, field: str, column: str) -> Any:
    """Value in ``column``, or, for a path such as `reward_model.ground_truth`, in nested
    objects."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadRecord("missing_field", f"no {column}, which data.columns.{field} names")
        value = value[name]
    return value
