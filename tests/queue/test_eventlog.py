"""events.jsonl is cut into compressed parts: whoever writes it, dies or begins anew, its lines are
those of the run."""

from __future__ import annotations

import errno
import gzip
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base import disk_waits
from relax_hpc.base.log_rotation import rotated_files
from relax_hpc.queue.controller import eventlog
from relax_hpc.queue.controller.eventlog import EventLog, Extent, event_lines
from tests.effort import effort


@pytest.fixture(autouse=True, scope="module")
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eventlog, "PART_BYTES", 100)
        yield


def told(first: int, last: int) -> bytes:
    """Lines of many lengths, among them empty ones."""
    return b"".join(b"%d%s\n" % (number, b"." * (number * 7 % 40)) for number in range(first, last))


def settled(log: EventLog) -> None:
    """What a controller does between messages, until nothing is left to be cut off."""
    deadline = time.monotonic() + 10
    while len(log._ends) > 1 or log._packing:
        assert time.monotonic() < deadline
        log.flush()
        if log._packing:
            log._packing.join(60)


def lines(path: Path) -> bytes:
    return b"".join(event_lines(path))


def test_a_long_log_is_cut_while_it_grows(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    log.publish()
    for number in range(200):
        log.write(told(number, number + 1))
        log.flush()
        assert lines(path) == told(0, number + 1)
        log.check()
    settled(log)
    assert len(rotated_files(path)) > 20 and path.stat().st_size < 400
    assert all(100 <= len(gzip.decompress(part.read_bytes())) < 150 for part in rotated_files(path))
    log.close()
    assert lines(path) == told(0, 200)


def test_a_disk_that_is_full_for_a_moment_costs_a_cut_and_no_line(tmp_path, monkeypatch):
    for module, name, value in (
        (eventlog, "_CHUNK_BYTES", 16),
        (eventlog, "_RETRY_S", 0.0),
        (disk_waits, "_KEPT_BYTES", 64),
        (disk_waits, "_MIN_PAUSE_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    path, write, fails = tmp_path / "events.jsonl", os.write, [True] * 5
    log = EventLog(path, 1)
    log.publish()
    for number in range(30):
        log.write(told(number, number + 1))
        log._lines.flush()

    def full(file, data):
        if fails and Path(f"/proc/self/fd/{file}").readlink().suffix == ".next":
            fails.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    settled(log)
    assert not fails and lines(path) == told(0, 30)
    log.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["replace", "unlink"])
def test_a_disk_that_is_ill_for_a_moment_costs_a_cut_and_no_line(
    tmp_path, monkeypatch, call, number
):
    monkeypatch.setattr(eventlog, "_RETRY_S", 0.0)
    path, real, fails = tmp_path / "events.jsonl", getattr(Path, call), [True] * 3
    log = EventLog(path, 1)
    log.publish()
    for n in range(30):
        log.write(told(n, n + 1))
        log._lines.flush()

    def ill(self, *args, **more):
        if fails and self.suffix == ".next":
            fails.pop()
            raise OSError(number, os.strerror(number))
        return real(self, *args, **more)

    monkeypatch.setattr(Path, call, ill)
    settled(log)
    assert not fails and lines(path) == told(0, 30)
    log.check()
    log.close()


@settings(deadline=None, max_examples=effort(15, 500))
@given(
    batches=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["", "settle", "extent", "crash", "replay"])),
        max_size=12,
    )
)
def test_whoever_writes_it_the_lines_are_those_of_the_run(tmp_path_factory, batches):
    """Controllers take over what a snapshot covers, or tell everything anew, with more or less of
    it cut off."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    incarnation, count, known = 1, 0, (0, Extent(0, 0))
    log = EventLog(path, incarnation)
    log.publish()
    for size, what in batches:
        log.write(told(count, count + size))
        log.flush()
        count += size
        if what == "settle":
            settled(log)
        elif what == "extent":
            known = (count, log.extent)
        elif what:
            log.close()
            incarnation += 1
            log = EventLog(path, incarnation)
            covered = known[0] if what == "crash" and log.begin_with(known[1]) else 0
            assert what == "replay" or covered == known[0], "what a snapshot covers is there"
            log.write(told(covered, count))
            log.publish()
        assert lines(path) == told(0, count)
    settled(log)
    log.close()
    assert lines(path) == told(0, count)


@pytest.mark.parametrize(
    "damage", ["a part is gone", "a part is another", "the file", "a part is torn"]
)
def test_a_beginning_that_is_not_as_it_was_is_told_again(tmp_path, damage):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    log.publish()
    log.write(told(0, 60))
    settled(log)
    extent = log.extent
    log.close()
    first = rotated_files(path)[0]
    if damage == "a part is gone":
        first.unlink()
    elif damage == "a part is another":
        first.write_bytes(gzip.compress(gzip.decompress(first.read_bytes()).replace(b"0", b"9", 1)))
    elif damage == "a part is torn":
        os.truncate(first, 5)
    else:
        path.write_bytes(b"x" + path.read_bytes()[1:])
    second = EventLog(path, 2)
    assert not second.begin_with(extent) and second.extent == Extent(0, 0)
    second.write(told(0, 80))
    second.publish()
    settled(second)
    second.close()
    assert lines(path) == told(0, 80)


def test_a_controller_killed_between_part_and_file_leaves_no_line_twice(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    log.publish()
    monkeypatch.setattr(EventLog, "_cut", lambda self: None)
    log.write(told(0, 30))
    log.flush()
    log._packing.join(60)
    log.flush()
    assert len(rotated_files(path)) == 1 and lines(path) == told(0, 30)
    extent = log.extent
    log.close()
    monkeypatch.undo()
    monkeypatch.setattr(eventlog, "PART_BYTES", 100)
    after = EventLog(path, 2)
    assert after.begin_with(extent) and after.extent == extent
    after.write(told(30, 40))
    after.publish()
    assert lines(path) == told(0, 40)
    after.close()


def test_where_there_is_no_room_for_a_part_the_file_grows(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, 1)
    log.publish()
    real = gzip.GzipFile.write
    monkeypatch.setattr(
        gzip.GzipFile, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    for number in range(40):
        log.write(told(number, number + 1))
        log.flush()
    log._packing and log._packing.join(60)
    log.flush()
    assert rotated_files(path) == [] and path.read_bytes() == told(0, 40)
    monkeypatch.setattr(gzip.GzipFile, "write", real)
    log._retry_at = 0.0
    settled(log)
    assert rotated_files(path) and lines(path) == told(0, 40)
    log.close()


def test_a_torn_end_is_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"')
    assert list(event_lines(path)) == [b'{"a": 1}\n', b'{"b"']
    assert list(event_lines(tmp_path / "none.jsonl")) == []
    assert json.loads(next(event_lines(path))) == {"a": 1}
