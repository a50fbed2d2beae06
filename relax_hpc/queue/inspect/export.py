"""Export rows of the queue for other programs: rows of any step that are still in shards, as jsonl
or parquet."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.journal_copy import JournalCopy
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP
from relax_hpc.queue.row_ids import row_ids
from relax_hpc.queue.row_schema import Row, sampled_versions
from relax_hpc.queue.storage import record_file
from relax_hpc.queue.storage.shard import check_name

Writer = Callable[[Path, Iterable[list[Row]]], None]
"""Function that writes rows, step by step, to a file."""


class KeptRows:
    """Rows of a run that still exist, according to its journal. JournalError: it is damaged."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.shards
        self.plan = Plan.from_config(load_resolved(run.root))
        self._state = QueueState(self.plan)
        for _ in JournalCopy(run).replay(self._state):
            pass
        self.decode_tokens: Callable[[list[int]], str] | None = None
        """Decoder of tokens; None: rows get no text."""
        self.absent: list[int] = []
        """Tickets that were left out, because one of their shards is not on disk."""

    def steps(self) -> list[int]:
        """Steps that have rows, ascending."""
        groups = self._state.groups.items()
        return sorted({self._state.step_of(ticket) for ticket, group in groups if group.parts})

    def rows(self, step: int) -> list[Row]:
        """Rows of ``step`` in the order of their ids, with the fields of the queue (numbers as
        arrays).

        Each row also has its `step`, the version that was `trained` on it or None, the `versions`
        that sampled its tokens, and its text as `prompt` and `response`. ShardError, naming the
        file: a shard is damaged.
        """
        rows, shards = list[Row](), dict[str, dict[str, Row]]()
        for ticket in self._tickets(step):
            sources = self._sources(ticket)
            if not all((self.folder / name).exists() for name, _ in sources):
                self.absent.append(ticket)
                continue
            if not sources:
                continue
            for name, _ in sources:
                if name not in shards:
                    shards[name] = record_file.read(self.folder / name)
            fields_of_shards = [(shards[name], fields) for name, fields in sources]
            for name in row_ids(ticket, self._state.groups[ticket].episodes):
                rows.append(self._row(step, name, fields_of_shards))
        return rows

    def _tickets(self, step: int) -> Sequence[int]:
        """Tickets that ``step`` has taken so far. If there are none, the tickets without a position
        that are admitted for it."""
        taken = sorted(self._state.tickets_of(step))
        if taken or not self._state.tasks.in_sets:
            return taken
        size, groups = self.plan.prompts_per_step, self._state.groups
        return [
            t
            for t in range(step * size, (step + 1) * size)
            if t in groups and groups[t].position == NO_STEP
        ]

    def _sources(self, ticket: int) -> list[tuple[str, tuple[str, ...]]]:
        """Names of the shards that have fields of ``ticket``, with these fields, oldest first."""
        group = self._state.groups.get(ticket)
        numbered = group.parts if group else ()
        return [
            (check_name(self._state.shards[number].descriptor["name"]), fields)
            for number, fields in numbered
        ]

    def _row(
        self, step: int, name: str, sources: list[tuple[dict[str, Row], tuple[str, ...]]]
    ) -> Row:
        row: Row = {"row_id": name, "step": step, "trained": self._trained(step), "versions": []}
        for rows, fields in sources:
            row |= {field: rows[name][field] for field in fields}
        sampled = sorted(sampled_versions(row)) if "token_versions" in row else ()
        row["versions"] = [str(Version.decode(code)) for code in sampled]
        return row | self._texts(row)

    def _texts(self, row: Row) -> Row:
        if self.decode_tokens is None or "token_ids" not in row:
            return {}
        tokens, prompt_len = row["token_ids"].tolist(), int(row["prompt_len"])
        return {
            "prompt": self.decode_tokens(tokens[:prompt_len]),
            "response": self.decode_tokens(tokens[prompt_len:]),
        }

    def _trained(self, step: int) -> str | None:
        """The version that was trained on ``step`` in the surviving lineage."""
        if step >= self._state.progress.trained_steps:
            return None
        starts = self._state.lineage.starts
        incarnations = [incarnation for incarnation, start in starts if start <= step]
        return str(Version(incarnations[-1], step))


def export(kept: KeptRows, steps: Iterable[int], form: str, output: Path) -> int:
    """Write the rows of ``steps`` to ``output``, which is created by rename; the number of rows.

    ConfigError: ``form`` is not in FORMATS, or its library is not installed.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format: found {form!r}, allowed: {', '.join(FORMATS)}")
    written = 0

    def batches() -> Iterator[list[Row]]:
        nonlocal written
        for step in steps:
            rows = kept.rows(step)
            written += len(rows)
            yield rows

    temporary = output.with_name(f".{output.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        FORMATS[form](temporary, batches())
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def write_jsonl(path: Path, batches: Iterable[list[Row]]) -> None:
    """Write one JSON object for each row; arrays become lists, bytes base64."""
    with path.open("w") as file:
        for rows in batches:
            file.writelines(json.dumps(row, default=_plain) + "\n" for row in rows)


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value.tolist()


def write_parquet(path: Path, batches: Iterable[list[Row]]) -> None:
    """Write one row group for each step. Fields that the schema does not have are JSON text in the
    column `other`."""
    try:
        # pyarrow is no dependency of this package, not even an optional one.
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        text = (
            "--format: parquet needs pyarrow, which is not installed: pip install pyarrow, or "
            "take jsonl"
        )
        raise ConfigError(text) from error
    schema = pyarrow.schema(
        {"step": pyarrow.int64(), "trained": pyarrow.string()} | _arrow_types(pyarrow)
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in batches:
            columns = {name: [_cell(row, name) for row in rows] for name in schema.names}
            writer.write_table(pyarrow.table(columns, schema))


def _arrow_types(pyarrow: Any) -> dict[str, Any]:
    """Type of each column, in the order of the schema."""
    types = {
        "versions": pyarrow.list_(pyarrow.string()),
        "prompt": pyarrow.string(),
        "response": pyarrow.string(),
    }
    for name, spec in FIELDS.items():
        column = pyarrow.string()
        if spec.is_number:
            column = pyarrow.from_numpy_dtype(np.dtype(spec.dtype))
        if spec.kind == "token":
            for _ in (None, *spec.tail):
                column = pyarrow.list_(column)
        types[name] = column
    return types | {"other": pyarrow.string()}


def _cell(row: Row, name: str) -> Any:
    if name == "other":
        other_columns = (*FIELDS, *_ADDED)
        unknown = {key: value for key, value in row.items() if key not in other_columns}
        return json.dumps(unknown, default=_plain) if unknown else None
    value = row.get(name)
    if name in FIELDS and isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    is_blob = name in FIELDS and not FIELDS[name].is_number and value is not None
    if is_blob and not isinstance(value, str):
        return json.dumps(value, default=_plain)
    return value


_ADDED = ("step", "trained", "versions", "prompt", "response")
"""Keys of an exported row that are no fields of the queue."""
FORMATS: dict[str, Writer] = {"jsonl": write_jsonl, "parquet": write_parquet}
