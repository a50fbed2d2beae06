"""The audit and the fates of samples are the same with a summary of the journal and without one,
whatever happened to the run, and whenever the summary was made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import dump
from relax_hpc.queue.controller import eventlog
from relax_hpc.queue.controller.journal import FORMAT, _frame
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect import row_lives
from relax_hpc.queue.inspect.audit import Ledger
from relax_hpc.queue.inspect.event_extent import EventExtent, lines_after_extent
from relax_hpc.queue.inspect.fates import read_fates
from relax_hpc.queue.inspect.journal_copy import JournalCopy
from relax_hpc.queue.inspect.journal_summary import path_of
from relax_hpc.queue.inspect.summarise_journal import summarise_journal
from relax_hpc.queue.plan import Plan
from tests.effort import effort
from tests.helpers.queue_helpers import make_run, small
from tests.helpers.queue_world import World
from tests.queue.test_queue_snapshots import random_world


class WrittenRun:
    """A run directory into which the journal and the events of a random run are written again,
    in pieces."""

    def __init__(self, run: RunDir, world: World, chance: random.Random) -> None:
        self.run, self.plan, self.chance = run, world.plan, chance
        # A world keeps its journal in memory.
        journal = cast("list[bytes]", world.service.journal)
        self.records = [msgpack.unpackb(raw, strict_map_key=False) for raw in journal]
        self._state = QueueState(world.plan)
        self._lengths: dict[int, int] = {}
        self._incarnation = 0
        self._events = b""

    def _path(self, incarnation: int) -> Path:
        return self.run.journal / f"inc-{incarnation:06d}.journal"

    def begin(self) -> None:
        """A new controller seals the files before its own. The last one may have left half a
        record."""
        if self._incarnation and self.chance.random() < 0.5:
            self._append(_frame(b"half a record")[:15], counts=False)
        lengths = {str(number): size for number, size in self._lengths.items()}
        self._incarnation += 1
        self._lengths[self._incarnation] = 0
        seal = {"op": "seal", "lengths": lengths, "format": FORMAT}
        self._append(_frame(msgpack.packb(seal)))

    def _append(self, data: bytes, counts: bool = True) -> None:
        with self._path(self._incarnation).open("ab") as file:
            file.write(data)
        self._lengths[self._incarnation] += len(data) if counts else 0

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self._append(_frame(msgpack.packb(record)))
            self._state.apply(record)
            self._events += self._state.events.take_lines()
        self.run.events.write_bytes(self._events)

    def pieces(self) -> list[list[dict[str, Any]]]:
        ends = sorted(self.chance.sample(range(len(self.records)), 4))
        bounds = [0, *ends, len(self.records)]
        return [self.records[start:end] for start, end in pairwise(bounds)]


def audits(run: RunDir) -> list[Any]:
    """The audit and the fates, read in full and from the summary."""
    results = []
    for ledger in (Ledger(run), Ledger.from_summary(run)):
        trained = ledger.state.progress.trained_steps
        audit = ledger.judge(trained)
        audit.problems += ledger.events.problems(ended_well=False)
        audit.problems.sort()
        results.append((asdict(audit), ledger.records))
    return results


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> WrittenRun:
    seed = getattr(request, "param", 1)
    monkeypatch.setattr(eventlog, "PART_BYTES", 2000)
    monkeypatch.setattr(row_lives, "_OPEN_TICKETS", 3)
    world = random_world(seed, 250)
    monkeypatch.setattr(Plan, "from_config", staticmethod(lambda *_: world.plan))
    run = make_run(tmp_path / "run")
    dump(small(), run.config)
    return WrittenRun(run, world, random.Random(seed))


@pytest.mark.parametrize("written", range(effort(5, 60)), indirect=True)
def test_a_summary_changes_no_audit_and_no_fate(written: WrittenRun) -> None:
    run = written.run
    written.begin()
    for piece in written.pieces():
        written.write(piece)
        if written.chance.random() < 0.7:
            assert summarise_journal(run, 1)
        if written.chance.random() < 0.5:
            written.begin()
        full, fast = audits(run)
        assert fast == full
        assert read_fates(run) == read_fates(run, with_summary=False)
    assert not full[0]["problems"] and path_of(run).exists()


def test_only_the_records_after_the_summary_are_read(written: WrittenRun) -> None:
    written.begin()
    first, *others = written.pieces()
    written.write(first)
    summarise_journal(written.run, 1)
    written.write([record for piece in others for record in piece])
    ledger = Ledger.from_summary(written.run)
    assert ledger.summarised_records == len(first) < ledger.records == len(written.records)
    assert Ledger(written.run).summarised_records == 0


def test_a_journal_that_differs_from_its_summary_is_read_in_full(written: WrittenRun) -> None:
    """A record of the summarised part is another one, whose checksum is right."""
    written.begin()
    written.write(written.records)
    summarise_journal(written.run, 1)
    path = written.run.journal / "inc-000001.journal"
    whole = path.read_bytes()
    begin = len(_frame(msgpack.packb({"op": "seal", "lengths": {}, "format": FORMAT})))
    other = _frame(msgpack.packb({"op": "note", "what": "x", "name": "y", "reason": "z"}))
    path.write_bytes(whole[:begin] + other + whole[begin:])
    full, fast = audits(written.run)
    assert fast == full and Ledger.from_summary(written.run).summarised_records == 0
    path.write_bytes(whole[:-5])
    full, fast = audits(written.run)
    assert fast == full, "the end that the summary covered is missing"


def test_changed_events_are_reported_as_without_a_summary(written: WrittenRun) -> None:
    written.begin()
    written.write(written.records)
    summarise_journal(written.run, 1)
    lines = written.run.events.read_bytes()
    for changed in (lines.replace(b"trained", b"trainde", 1), lines[200:], lines + b"{}\n", b""):
        written.run.events.write_bytes(changed)
        full, fast = audits(written.run)
        assert fast == full
        assert full[0]["problems"] or not changed, changed[:80]


def test_damaged_summaries_are_not_used(written: WrittenRun) -> None:
    written.begin()
    written.write(written.records)
    summarise_journal(written.run, 1)
    path, (full, _) = path_of(written.run), audits(written.run)
    whole = path.read_bytes()
    foreign = msgpack.packb({"plan": 1, "files": {}, "ledger": {"records": 1}})
    for data in (b"", whole[:50], whole[:-1], whole[:40] + b"x" + whole[41:], foreign):
        path.write_bytes(data)
        assert audits(written.run) == [full, full]
        assert Ledger.from_summary(written.run).summarised_records == 0
        assert read_fates(written.run) == read_fates(written.run, with_summary=False)
    assert summarise_journal(written.run, 1), "it is made again"
    assert Ledger.from_summary(written.run).summarised_records


def test_the_extent_of_events_is_found_in_packed_parts(written: WrittenRun) -> None:
    """The controller packs old parts at any time; the extent stays the same."""
    written.begin()
    written.write(written.records)
    lines = written.run.events.read_bytes().splitlines(keepends=True)
    extent = EventExtent()
    known = 2 * len(lines) // 3
    for line in lines[:known]:
        extent.add(line)
    assert extent.parts > 1
    written.run.events.unlink()
    log = eventlog.EventLog(written.run.events, 1)
    for line in lines:
        log.write(line)
    log.publish()
    log.flush()
    log.close()
    assert eventlog.rotated_files(written.run.events)
    after = lines_after_extent(written.run.events, extent)
    assert after is not None and list(after) == lines[known:]
    extent.crc ^= 1
    assert lines_after_extent(written.run.events, extent) is None


def test_the_copy_of_a_journal_names_the_bytes_that_it_read(written: WrittenRun) -> None:
    written.begin()
    written.write(written.records[:5])
    written.begin()
    copy = JournalCopy(written.run)
    assert len(list(copy.records())) == 5
    sizes = {number: size for number, (size, _) in copy.read.files.items()}
    assert sizes == written._lengths
    written.write(written.records[5:])
    later = JournalCopy(written.run, copy.read)
    assert len(list(later.records())) == len(written.records) - 5
    assert later.read == _read_again(written.run)


def _read_again(run: RunDir) -> Any:
    copy = JournalCopy(run)
    list(copy.records())
    return copy.read
