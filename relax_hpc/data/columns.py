"""Columns of rows: other names that a configuration gives for them, ids, and columns that are
refused."""

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
"""Columns that rows have, which `data.columns` may rename."""
_NOT_READ = (
    "chat_template_kwargs",
    "documents",
    "enable_thinking",
    "functions",
    "parallel_tool_calls",
    "system",
)
"""Columns that change the prompt in other programs (TRL, OpenAI, LLaMA-Factory), and nothing
here."""
_BESIDE_INSTRUCTION = ("input", "history")
"""Columns that belong to the prompt of a row whose prompt is the column `instruction` (Alpaca,
LLaMA-Factory)."""


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """Rules by which a record of a file becomes a row."""

    names: tuple[tuple[str, str], ...] = ()
    """Field of a row, and the column that has it."""
    set_name: str = "train"
    """Name of the data set, of which ids are made."""
    ignored: tuple[str, ...] = ()
    """Columns, and keys of messages, to leave out of account."""
    order_by: str = ""
    """Column by which rows are ordered; empty: none."""

    @classmethod
    def from_config(cls, data: DataConfig, set_name: str) -> ColumnRules:
        """Rules of a configuration for the set ``set_name``."""
        order_by = data.order_by if set_name in ("train", *data.train_sets) else ""
        return cls(tuple(data.columns.items()), set_name, tuple(data.ignore_keys), order_by)

    @property
    def key(self) -> list[Any]:
        """Value that is the same for rules that make the same rows."""
        return [list(map(list, self.names)), self.set_name, list(self.ignored), self.order_by]

    def read(self, number: int, record: Record, has_template: bool) -> Record:
        """Row of the ``record`` with that ``number``, with an id. BadRecord: a column is missing or
        not read."""
        row = self.renamed(record)
        not_read = _NOT_READ if has_template else ()
        if dict(self.names).get("prompt") == "instruction":
            not_read += _BESIDE_INSTRUCTION
        for name in not_read:
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
        """Detail of a row that lacks these ``fields``, by the names that its file has for them."""
        names = dict(self.names)
        return ", ".join(f"no {names.get(field, field)}" for field in fields)

    def order(self, row: Record) -> float:
        """Value of the row in the column by which rows are ordered. BadRecord: it is no number."""
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
        """Id of a row, or one of its set and number if it has none. BadRecord: it is no id."""
        value = row.get("id")
        if value is None:
            return f"{self.set_name}/{number}"
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadRecord("wrong_type", f"id is {type(value).__name__} {str(value)[:40]!r}")
        return str(value)


NO_COLUMNS = ColumnRules()


def _value_of(record: Record, field: str, column: str) -> Any:
    """Value in ``column``, or, as `reward_model.ground_truth`, within objects in one."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadRecord("missing_field", f"no {column}, which data.columns.{field} names")
        value = value[name]
    return value
