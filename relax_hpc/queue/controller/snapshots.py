"""Snapshots of the queue's state. They make the replay of the journal shorter, and nothing depends
on them.

A forked child writes a snapshot, so that the controller can continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import msgpack

from relax_hpc.base.rundir import write_atomic
from relax_hpc.queue.controller.eventlog import Extent
from relax_hpc.queue.controller.forked_work import ForkedChild
from relax_hpc.queue.controller.journal import Position
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan

FORMAT = 12
"""Format of snapshots. A snapshot of another format is not used: the journal is replayed
instead."""
RECORDS = 50_000
"""Records between two snapshots: about a second of replay."""
_KEEP = 2
"""Number of snapshots that are kept. The previous one is used if the newest is damaged."""
_GROWTH = 20
"""A snapshot of n bytes is followed by the next after n / 20 records at the earliest, so that
snapshots cost less than the work."""
_LONGEST_S = 600.0
"""Seconds after which a child counts as hanging in its filesystem."""
_CLOSE_S = 1.0
_HEAD = struct.Struct("<8sIQI")
"""Head of a snapshot: magic, format, bytes of the body, its crc."""
_MAGIC = b"RLXQSNAP"
_NAME = re.compile(r"inc-(\d{6})-(\d{15})\.snapshot")


class SnapshotError(ValueError):
    """A file that is no valid snapshot of this run. The message names it and the fault."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, and the parts of the journal and of events.jsonl that it covers."""

    state: QueueState
    position: Position
    events: Extent


class Snapshots:
    """Snapshots of one run, in ``folder``."""

    def __init__(self, folder: Path, plan: Plan, durable: bool, every: int = RECORDS) -> None:
        self.folder, self.plan, self.durable, self.every = folder, plan, durable, every
        self.taken = 0
        """Number of snapshots that this controller has taken."""
        self._child = ForkedChild(_LONGEST_S)
        self._covered = 0
        self._size = 0
        folder.mkdir(parents=True, exist_ok=True)
        for temporary in folder.glob(".*"):
            temporary.unlink(missing_ok=True)

    # -- reading -----------------------------------------------------------------------------------

    def paths(self) -> Iterator[Path]:
        """Files of snapshots, newest first."""
        by_key = {}
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                by_key[match.groups()] = path
        return (by_key[key] for key in sorted(by_key, reverse=True))

    def load(self, path: Path) -> Snapshot:
        """Load a snapshot. SnapshotError: it is damaged, of another format, or of a run with
        another configuration."""
        try:
            content = msgpack.unpackb(_body(path.read_bytes()), strict_map_key=False)
            if content["plan"] != _plan_text(self.plan):
                raise ValueError("the run was configured differently")
            state = QueueState.load(self.plan, content["state"])
            return Snapshot(state, Position(*content["position"]), Extent(*content["events"]))
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"{path}: not used, {type(error).__name__}: {error}") from error

    # -- writing -----------------------------------------------------------------------------------

    def due(self, records: int) -> bool:
        """Whether to `take` a snapshot; ``records``: number of records in the journal of this
        controller."""
        self._poll_child()
        interval = max(self.every, self._size // _GROWTH)
        return not self._child.is_running and records - self._covered >= interval

    def take(
        self, state: QueueState, records: int, position: Position, events: Extent, events_file: int
    ) -> None:
        """Start to write a snapshot. Journal and events must have been written up to the covered
        position. ``events_file``: descriptor of events.jsonl."""
        self._covered = records
        try:
            self._child.start(lambda: self._write(state, position, events, events_file))
        except OSError as error:
            print(f"no snapshot of the queue: {error}", flush=True)

    def _write(
        self, state: QueueState, position: Position, events: Extent, events_file: int
    ) -> None:
        """Write a snapshot, in the child."""
        if self.durable:
            os.fsync(events_file)
        self.write(state, position, events)

    def write(self, state: QueueState, position: Position, events: Extent) -> Path:
        """Write a snapshot, and delete all but the previous one; its path."""
        content = {
            "plan": _plan_text(self.plan),
            "position": astuple(position),
            "events": astuple(events),
        }
        body = msgpack.packb(content | {"state": state.dump()})
        path = self.folder / f"inc-{position.incarnation:06d}-{position.offset:015d}.snapshot"
        write_atomic(
            path, _HEAD.pack(_MAGIC, FORMAT, len(body), zlib.crc32(body)) + body, sync=self.durable
        )
        for old in list(self.paths())[_KEEP:]:
            old.unlink(missing_ok=True)
        return path

    def _poll_child(self) -> None:
        status = self._child.poll()
        if status is not None:
            self._note_end(status)

    def _note_end(self, status: int) -> None:
        if status:
            text = f"no snapshot of the queue in {self.folder}: its process ended with {status}"
            print(text, flush=True)
            return
        self.taken += 1
        with contextlib.suppress(OSError):
            self._size = max((path.stat().st_size for path in self.paths()), default=0)

    def close(self) -> None:
        """Wait a short time for a snapshot that is being written, then kill its process."""
        status = self._child.wait(_CLOSE_S)
        if status is not None:
            self._note_end(status)


def _body(data: bytes) -> memoryview:
    """The body of a snapshot. ValueError: it is damaged or of another format."""
    body = memoryview(data)[_HEAD.size :]
    magic, version, size, crc = _HEAD.unpack(data[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or version != FORMAT:
        raise ValueError(f"not a snapshot of format {FORMAT}")
    if len(body) != size or zlib.crc32(body) != crc:
        raise ValueError(f"{len(body)} bytes of {size}, or a wrong checksum")
    return body


def _plan_text(plan: Plan) -> str:
    """The plan as JSON text. A replay depends on all of it."""
    return json.dumps(asdict(plan), default=sorted, sort_keys=True)
