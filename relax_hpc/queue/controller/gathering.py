"""One HDF5 file for each step: rows that a checkpoint covers and that are kept are moved out of the
many small files of their producers.

Producers write shards as cheaply as they can. What stays in the run directory (`queue.keep_steps`)
is for people, so it is gathered into files that h5py reads. A child of the controller does this, so
that no other work waits for it. A file counts after it is journaled. Then its shards have no users
any more and are deleted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from relax_hpc.base.disk_waits import is_temporary
from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.queue.controller.forked_work import ForkedChild
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.task_queues import HELD
from relax_hpc.queue.records import ShardFields
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import record_file
from relax_hpc.queue.storage.columns import Columns, make_column
from relax_hpc.queue.storage.shard import ShardError

GATHERED_NAME = re.compile(r"\.?step-\d{6,}-i\d{6,}-\d{6,}\.h5")
"""Name of a file of gathered rows, or of its temporary file."""
_MOST_BYTES = 512 << 20
"""Approximate upper bound of the bytes of one file: the child holds all of its rows in memory."""
_LONGEST_S = 3600.0
"""Seconds after which a child counts as hanging in its filesystem."""
_RETRY_S = 30.0
"""Seconds between tries after the disk was full."""
_CLOSE_S = 20.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Gathering:
    """A file to write, and the shards that have the fields of its prompt groups now."""

    name: str
    step: int
    parts: dict[int, tuple[ShardFields, ...]]
    """Fields of each prompt group, by ticket. All groups have the same fields."""
    shards: dict[int, str]
    """Names of the shards by number."""


GatheredFiles = tuple[int, list[tuple[Gathering, int]]]
"""Step below which all rows are gathered, and the files that were written, with their bytes."""


class Gatherer:
    """Gathers rows into ``folder`` for the controller of ``incarnation``."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        self.folder, self.incarnation = folder, incarnation
        self._child = ForkedChild(_LONGEST_S)
        self._steps, self._work = range(0), list[Gathering]()
        self._planned = 0
        self._retry_at = 0.0

    def poll(self, state: QueueState) -> GatheredFiles | None:
        """Start a child if there are rows to gather, or return the files that it has written; None:
        no child has ended."""
        if self._child.is_running:
            status = self._child.poll()
            return None if status is None else self._end(status)
        steps = covered_steps(state)
        if not steps or time.monotonic() < self._retry_at:
            return None
        self._steps = steps
        self._work = plan_files(state, steps, self.incarnation, self._planned)
        self._planned += len(self._work)
        if not self._work:
            return self._end(EXIT_DONE)
        try:
            self._child.start(lambda: write_all(self.folder, self._work))
        except OSError as error:
            print(
                f"rows of steps {steps.start} to {steps.stop - 1} are not gathered yet: {error}",
                flush=True,
            )
            self._retry_at = time.monotonic() + _RETRY_S
        return None

    def finish(self, state: QueueState) -> Iterable[GatheredFiles]:
        """Gather the remaining rows before the controller ends, if that does not take long."""
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and (self._child.is_running or covered_steps(state)):
            gathered = self.poll(state)
            if gathered:
                yield gathered
            elif not self._child.is_running:
                break
            time.sleep(_POLL_S)
        self._child.wait(0.0)

    def _end(self, status: int) -> GatheredFiles | None:
        """Result of a child that ended with ``status``; None: it has to be tried again."""
        sizes = []
        for gathering in self._work:
            path = self.folder / gathering.name
            if path.exists():
                sizes.append((gathering, path.stat().st_size))
        if status != EXIT_RETRY:
            return self._steps.stop, sizes
        for gathering, _ in sizes:
            (self.folder / gathering.name).unlink(missing_ok=True)
        self._retry_at = time.monotonic() + _RETRY_S
        return None


def covered_steps(state: QueueState) -> range:
    """Steps that a checkpoint covers and whose rows are kept, but not gathered yet."""
    first = max(state.progress.gathered, state.order.first // state.plan.prompts_per_step)
    return range(first, max(first, state.progress.covered_steps))


def plan_files(state: QueueState, steps: range, incarnation: int, planned: int) -> list[Gathering]:
    """Files for the rows of ``steps``; ``planned``: number of files that the controller of
    ``incarnation`` has planned before."""
    work: list[Gathering] = []
    for step in steps:
        for shard_fields in _groups_by_file(state, step):
            shards: dict[int, str] = {}
            for number, _ in chain.from_iterable(shard_fields.values()):
                shards[number] = state.shards[number].descriptor["name"]
            # The name is unique, so that another controller, or the same step after a rollback,
            # never writes to the same file.
            number = planned + len(work) + 1
            name = f"step-{step:06d}-i{incarnation:06d}-{number:06d}.h5"
            work.append(Gathering(name, step, shard_fields, shards))
    return work


def _groups_by_file(state: QueueState, step: int) -> list[dict[int, tuple[ShardFields, ...]]]:
    """The prompt groups of a step that have rows, divided into files. Groups in a file have the
    same fields, and together not too many bytes."""
    by_fields: dict[tuple[tuple[str, ...], ...], list[dict[int, tuple[ShardFields, ...]]]] = {}
    sizes: dict[int, int] = {}
    for ticket in sorted(state.tickets_of(step)):
        group = state.groups.get(ticket)
        if group is None or not group.parts or not _can_be_gathered(state, group.parts):
            continue
        files = by_fields.setdefault(tuple(fields for _, fields in group.parts), [{}])
        shards = [state.shards[number] for number, _ in group.parts]
        size = sum(shard.bytes // max(1, shard.needed) for shard in shards)
        if files[-1] and sizes[id(files[-1])] + size > _MOST_BYTES:
            files.append({})
        sizes[id(files[-1])] = sizes.get(id(files[-1]), 0) + size
        files[-1][ticket] = group.parts
    return list(chain.from_iterable(by_fields.values()))


def _can_be_gathered(state: QueueState, shard_fields: tuple[ShardFields, ...]) -> bool:
    """Whether all fields of a prompt group are on disk, and not in one gathered file already."""
    shards = [state.shards[number] for number in {number for number, _ in shard_fields}]
    if any(shard.unsaved for shard in shards):
        return False
    return len(shards) > 1 or not GATHERED_NAME.fullmatch(shards[0].descriptor["name"])


def journal_files(service: QueueService, end: int, sizes: Sequence[tuple[Gathering, int]]) -> None:
    """Record that rows of steps below ``end`` are in these files of the given sizes. Prompt groups
    that have changed since are left out."""
    files = []
    for gathering, size in sizes:
        tickets = [
            ticket
            for ticket, shard_fields in gathering.parts.items()
            if _is_unchanged(service.state, ticket, shard_fields)
        ]
        if tickets:
            files.append(({"name": gathering.name, "bytes": size, "planes": {}}, tickets))
        else:
            service.state.shards.garbage.append(gathering.name)
    service.record(op="gathered", owner=["hub", service.incarnation], end=end, files=files)


def _is_unchanged(state: QueueState, ticket: int, shard_fields: Sequence[ShardFields]) -> bool:
    """Whether ``ticket`` is trained, in no lease, and has the same parts as before."""
    group = state.groups.get(ticket)
    if group is None or group.parts != shard_fields:
        return False
    if state.plan.step_of(ticket) >= state.progress.trained_steps:
        return False
    return all(queue.statuses[ticket] != HELD for queue in state.tasks.values())


# -- in the child ----------------------------------------------------------------------------------


def write_all(folder: Path, work: Sequence[Gathering]) -> int:
    """Write all files; EXIT_RETRY: a disk is full, or fails for a while."""
    os.nice(10)
    for gathering in work:
        if not all((folder / name).exists() for name in gathering.shards.values()):
            # The shards were retired since, because nothing waits for this work.
            continue
        try:
            write(folder, gathering)
        except (ShardError, LookupError, ValueError, TypeError) as error:
            print(f"step {gathering.step}: its rows stay in their shards: {error}", flush=True)
        except OSError as error:
            print(f"step {gathering.step}: its rows are not gathered: {error}", flush=True)
            if is_temporary(error):
                return EXIT_RETRY
    return EXIT_DONE


def write(folder: Path, gathering: Gathering) -> None:
    """Write one file; it is on disk before it gets its name. ShardError or LookupError: a shard is
    damaged, or does not have the rows."""
    # Importing the HDF5 library takes a tenth of a second, so only this child does it.
    from relax_hpc.queue.storage import hdf5_writer

    rows = list(_rows(folder, gathering))
    fields: dict[str, None] = {}
    for row in rows:
        fields |= dict.fromkeys(row)
    fields.pop("row_id", None)
    columns = [
        make_column(field, _check_type(field, [row[field] for row in rows])) for field in fields
    ]
    origin = {"run": str(folder.parents[1]), "step": gathering.step}
    hdf5_writer.write(
        folder / gathering.name, Columns({}, [row["row_id"] for row in rows], columns), origin, True
    )


def _rows(folder: Path, gathering: Gathering) -> Iterable[Row]:
    shards = {number: record_file.read(folder / name) for number, name in gathering.shards.items()}
    names: dict[tuple[int, int], list[str]] = {}
    for number, rows in shards.items():
        for name in rows:
            names.setdefault((number, int(name.partition(".")[0])), []).append(name)
    for ticket, shard_fields in gathering.parts.items():
        for name in names[shard_fields[0][0], ticket]:
            row: Row = {"row_id": name}
            for number, fields in shard_fields:
                row |= {field: shards[number][name][field] for field in fields}
            yield row


def _check_type(field: str, values: list) -> list:
    """``values``. ValueError: their dtypes differ."""
    dtypes = {str(getattr(value, "dtype", "")) for value in values}
    if len(dtypes) > 1:
        raise ValueError(f"{field}: rows of one step have it as {' and as '.join(sorted(dtypes))}")
    return values
