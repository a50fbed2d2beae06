"""The role exported_rows: puts rows of a file into the queue, instead of engines that generate
them. It needs no GPU.

The file has the rows of `relax-hpc queue export` in the format jsonl. Prompt groups keep their
order: ticket 0 gets the first group of the file. Fields of rollout are put as they are. Roles that
score rows, and advantages, compute their fields again. The tokens get the newest version when they
are put, because the versions of the exported run do not exist in this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS, fields_by
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.queue.client import Admission
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import NO_VERSION, Row
from relax_hpc.roles.data import ExampleMedia, Feeder
from relax_hpc.rollout.prompt_source import PromptSource


@dataclass(frozen=True, slots=True)
class GroupLines:
    """The lines of one prompt group in the file."""

    first_line: int
    offset: int
    count: int


class ExportedRows:
    """The prompt groups of a file of rows. Only their places are in memory.

    ConfigError: the file has a line that is not a row, or too few groups for the run.
    """

    def __init__(self, path: Path, prompts: int, samples_per_prompt: int) -> None:
        """``prompts``: prompt groups that the run needs. ``samples_per_prompt``: episodes of
        each."""
        self.path, self.samples_per_prompt = path, samples_per_prompt
        self.groups = list(self._index())
        if len(self.groups) < prompts:
            raise ConfigError(
                f"{path}: found {len(self.groups)} prompt groups, allowed: at least {prompts} "
                "(steps * prompts_per_step); export more steps, or set fewer steps"
            )

    def _index(self) -> Iterator[GroupLines]:
        """Places of the groups. Rows of a group are consecutive."""
        group: GroupLines | None = None
        group_key: tuple[int, int] | None = None
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _parse(self.path, number, line)
                key = row["step"], row["ticket"]
                if group is None or key != group_key:
                    if group is not None:
                        yield group
                    group, group_key = GroupLines(number, offset, 0), key
                group = replace(group, count=group.count + 1)
                offset += len(line)
        if group is not None:
            yield group

    def rows(self, number: int, ticket: int, version: Version) -> list[Row]:
        """Rows of prompt group ``number`` of the file, as rows of ``ticket``, sampled by
        ``version``."""
        group = self.groups[number]
        rows = list[Row]()
        with self.path.open("rb") as file:
            file.seek(group.offset)
            for line_number in range(group.first_line, group.first_line + group.count):
                row = _parse(self.path, line_number, file.readline())
                rows.append(_as_row(row, ticket, version))
        episodes = {row["episode"] for row in rows}
        if episodes != set(range(self.samples_per_prompt)):
            raise ConfigError(
                f"{self.path}:{group.first_line}: found {len(episodes)} episodes of a prompt, "
                f"allowed: {self.samples_per_prompt} (samples_per_prompt)"
            )
        return rows


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The row in a line. ConfigError names the line and the first missing field."""
    try:
        row = json.loads(line)
        missing = [name for name in ("step", *GENERATED) if name not in row]
    except (ValueError, TypeError):
        missing = ["(not a JSON object)"]
    if missing:
        raise ConfigError(
            f"{path}:{number}: found no {missing[0]}, allowed: a row of relax-hpc queue export "
            "with format jsonl"
        )
    if row["spans"]:
        raise ConfigError(
            f"{path}:{number}: found a row with media, allowed: rows of text, because an export "
            "does not contain media"
        )
    return row


def _as_row(exported: dict[str, Any], ticket: int, version: Version) -> Row:
    """The row of the queue with the fields of rollout."""
    row: Row = {}
    for name in (*GENERATED, *fields_by("rollout", optional=True)):
        if name in exported and exported[name] is not None:
            spec, value = FIELDS[name], exported[name]
            row[name] = np.array(value, spec.dtype) if spec.kind == "token" else value
    sampled = np.asarray(exported["token_versions"]) != NO_VERSION
    row["token_versions"] = sampled.astype(np.int32) * version.encode()
    row["row_id"] = row_id(ticket, row["episode"], row["row"])
    row["ticket"] = ticket
    return row


class RowFeeder(Feeder):
    """Puts the exported rows of every admitted ticket."""

    def __init__(self, context: Context, exported: ExportedRows) -> None:
        # The tickets and versions are handled as for demonstrations. Only rows differ.
        super().__init__(context, cast(PromptSource, None), cast(ExampleMedia, None))
        self.exported = exported

    def _put(self, admitted: Admission) -> None:
        step = admitted.tickets[0] // self.context.config.prompts_per_step
        with self.context.spans("queue", step=step):
            rows = list[Row]()
            for ticket in admitted.tickets:
                rows += self.exported.rows(ticket, ticket, self.newest)
            refused = self.client.put_generated(rows, fields=_fields_of(rows))
        for ticket, reason in refused.items():
            print(log_entry(f"ticket {ticket}: {reason}"), flush=True)
        self.context.report(step, self.client.store.plane_counts.take_metrics())


def _fields_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Fields that all rows have. Optional ones are added by the client."""
    return tuple(name for name in GENERATED if all(name in row for row in rows))


def run(context: Context) -> None:
    """Serve until the run is finished."""
    config = context.config
    context.report_phase("reading rows")
    prompts = config.steps * config.prompts_per_step
    exported = ExportedRows(Path(config.rows), prompts, config.samples_per_prompt)
    context.report_phase("")
    RowFeeder(context, exported).serve()
