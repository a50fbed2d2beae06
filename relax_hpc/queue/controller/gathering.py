"""One HDF5 file a step: rows that a checkpoint covers and that are kept leave the many small files
of their makers.

Makers write shards as they come, as cheaply as they can. What of them stays in the run directory
(`queue.keep_steps`) is for people, so it is gathered here into files that h5py reads, by a child of
the controller, beside all work. A file counts from the moment that it is journaled; the shards are
removed after that, as all that nobody needs any more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.disk_waits import is_temporary
from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.queue.controller.forked_work import Forked
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.task_queues import HELD
from relax_hpc.queue.records import ShardFields
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import record_file
from relax_hpc.queue.storage.columns import Columns, make_column
from relax_hpc.queue.storage.shard import ShardError

GATHERED_NAME = re.compile(r"\.?step-\d{6,}-i\d{6,}-\d{6,}\.h5")
"""A file of gathered rows, or its temporary one."""
_MOST_BYTES = 512 << 20
"""Bytes of one file, about, at most: the child holds all of its rows in memory."""
_LONGEST_S = 3600.0
"""Seconds after which a child counts as hanging on its filesystem."""
_AGAIN_S = 30.0
"""Seconds between tries after the disk was full."""
_CLOSE_S = 20.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Gathering:
    """A file to be: where the fields of its prompt groups lie so far."""

    name: str
    step: int
    parts: dict[int, tuple[ShardFields, ...]]
    """Places of the fields of each prompt group, by ticket. All have the same fields."""
    shards: dict[int, str]
    """Names of the shards by number."""


Ended = tuple[int, list[tuple[Gathering, int]]]
"""Step below which nothing is left to be gathered, and the files that there are now, with their
bytes."""


class Gatherer:
    """Gathers into ``folder`` for the controller of ``incarnation``."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        self.folder, self.incarnation = folder, incarnation
        self._child = Forked(_LONGEST_S)
        self._steps, self._work = range(0), list[Gathering]()
        self._made = 0
        self._again_at = 0.0

    def look(self, state: QueueState) -> Ended | None:
        """Begin with what there is to gather, or say what has become of it; None: nothing yet."""
        if self._child.runs:
            status = self._child.ended()
            return None if status is None else self._end(status)
        if not (steps := covered_steps(state)) or time.monotonic() < self._again_at:
            return None
        self._steps, self._work = steps, planned(state, steps, self.incarnation, self._made)
        self._made += len(self._work)
        if not self._work:
            return self._end(EXIT_DONE)
        try:
            self._child.start(lambda: write_all(self.folder, self._work))
        except OSError as error:
            print(
                f"rows of steps {steps.start} to {steps.stop - 1} are not gathered yet: {error}",
                flush=True,
            )
            self._again_at = time.monotonic() + _AGAIN_S
        return None

    def last(self, state: QueueState) -> Iterable[Ended]:
        """Files gathered before the controller ends, if that does not take long."""
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and (self._child.runs or covered_steps(state)):
            if ended := self.look(state):
                yield ended
            elif not self._child.runs:
                break
            time.sleep(_LOOK_S)
        self._child.wait(0.0)

    def _end(self, status: int) -> Ended | None:
        paths = {gathering.name: self.folder / gathering.name for gathering in self._work}
        found = [
            (gathering, path)
            for gathering in self._work
            if (path := paths[gathering.name]).exists()
        ]
        if status != EXIT_RETRY:
            return self._steps.stop, [(gathering, path.stat().st_size) for gathering, path in found]
        for _, path in found:
            path.unlink(missing_ok=True)
        self._again_at = time.monotonic() + _AGAIN_S
        return None


def covered_steps(state: QueueState) -> range:
    """Steps that a checkpoint covers, whose rows are kept and not gathered yet."""
    first = max(state.progress.gathered, state.order.first // state.plan.prompts_per_step)
    return range(first, max(first, state.progress.covered_steps))


def planned(state: QueueState, steps: range, incarnation: int, made: int) -> list[Gathering]:
    """Files to be gathered of ``steps`` by the controller of ``incarnation``, which has ``made`` so
    many before."""
    found = [(step, parts) for step in steps for parts in _alike(state, step)]
    work = []
    for number, (step, parts) in enumerate(found, made + 1):
        shards = {n: state.shards[n].descriptor["name"] for some in parts.values() for n, _ in some}
        # Another controller, or a second life of the step after a rollback, never writes to the
        # same file.
        work.append(
            Gathering(f"step-{step:06d}-i{incarnation:06d}-{number:06d}.h5", step, parts, shards)
        )
    return work


def _alike(state: QueueState, step: int) -> list[dict[int, tuple[ShardFields, ...]]]:
    """The prompt groups of a step that have rows, those together that fit one file: of the same
    fields, and not too many bytes."""
    found: dict[tuple[tuple[str, ...], ...], list[dict[int, tuple[ShardFields, ...]]]] = {}
    sizes: dict[int, int] = {}
    for ticket in sorted(state.tickets_of(step)):
        group = state.groups.get(ticket)
        if group is None or not group.parts or _is_gathered(state, group.parts):
            continue
        files = found.setdefault(tuple(fields for _, fields in group.parts), [{}])
        shards = [state.shards[number] for number, _ in group.parts]
        size = sum(shard.bytes // max(1, shard.needed) for shard in shards)
        if files[-1] and sizes[id(files[-1])] + size > _MOST_BYTES:
            files.append({})
        sizes[id(files[-1])] = sizes.get(id(files[-1]), 0) + size
        files[-1][ticket] = group.parts
    return [parts for files in found.values() for parts in files]


def _is_gathered(state: QueueState, parts: tuple[ShardFields, ...]) -> bool:
    """Whether all of a prompt group lies in one file for people already, or not all of it is on
    disk."""
    shards = [state.shards[number] for number in {number for number, _ in parts}]
    alone = len(shards) == 1 and GATHERED_NAME.fullmatch(shards[0].descriptor["name"])
    return bool(alone) or any(shard.unsaved for shard in shards)


def journal_files(service: QueueService, end: int, found: Sequence[tuple[Gathering, int]]) -> None:
    """The rows of steps below ``end`` lie in files of so many bytes. What has changed meanwhile
    stays as it is."""
    files = []
    for gathering, size in found:
        tickets = [
            ticket
            for ticket, parts in gathering.parts.items()
            if _is_at_rest(service.state, ticket, parts)
        ]
        if tickets:
            files.append(({"name": gathering.name, "bytes": size, "planes": {}}, tickets))
        else:
            service.state.shards.garbage.append(gathering.name)
    service.record(op="gathered", owner=["hub", service.incarnation], end=end, files=files)


def _is_at_rest(state: QueueState, ticket: int, parts: Sequence[ShardFields]) -> bool:
    """Whether ``ticket`` is trained on, in nobody's hands, and where it was."""
    group, trained = (
        state.groups.get(ticket),
        state.plan.step_of(ticket) < state.progress.trained_steps,
    )
    return bool(trained and group and group.parts == parts) and not any(
        queue.statuses[ticket] == HELD for queue in state.tasks.values()
    )


# -- in the child ----------------------------------------------------------------------------------


def write_all(folder: Path, work: Sequence[Gathering]) -> int:
    """Write the files that can be; EXIT_RETRY: a disk is full, or ill for a while."""
    os.nice(10)
    for gathering in work:
        if not all((folder / name).exists() for name in gathering.shards.values()):
            # Retired meanwhile, as nobody waits for this.
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
    """Write one file, on disk before it has its name. ShardError or LookupError: a shard is
    damaged, or another's."""
    # The library, which nobody else needs, takes a tenth of a second to import.
    from relax_hpc.queue.storage import hdf5_writer

    rows = list(_rows(folder, gathering))
    fields = dict.fromkeys(field for row in rows for field in row if field != "row_id")
    columns = [
        make_column(field, _of_one_type(field, [row[field] for row in rows])) for field in fields
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
    for ticket, parts in gathering.parts.items():
        for name in names[parts[0][0], ticket]:
            row: Row = {"row_id": name}
            for number, fields in parts:
                row |= {field: shards[number][name][field] for field in fields}
            yield row


def _of_one_type(field: str, values: list) -> list:
    if len(found := {str(getattr(value, "dtype", "")) for value in values}) > 1:
        raise ValueError(f"{field}: rows of one step have it as {' and as '.join(sorted(found))}")
    return values
