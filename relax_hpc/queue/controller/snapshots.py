"""Snapshots of the queue's state beside its journal: they keep the replay short, and nothing
depends on them.

A child process, which is a copy of the controller at one moment, writes one while the controller
goes on.
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
from relax_hpc.queue.controller.forked_work import Forked
from relax_hpc.queue.controller.journal import Position
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan

FORMAT = 11
"""Format of snapshots: one of another format is not used, and the journal is replayed instead."""
RECORDS = 50_000
"""Records between two snapshots: about a second of replay."""
_KEEP = 2
"""Snapshots that are kept: the previous one is there in case the newest is not whole."""
_GROWTH = 20
"""Bytes of the last snapshot for each record until the next one, so that all together cost less
than the work."""
_LONGEST_S = 600.0
"""Seconds after which a child counts as hanging on its filesystem."""
_CLOSE_S = 1.0
_HEAD = struct.Struct("<8sIQI")
"""Head of a snapshot: magic, format, bytes of the body, its crc."""
_MAGIC = b"RLXQSNAP"
_NAME = re.compile(r"inc-(\d{6})-(\d{15})\.snapshot")


class SnapshotError(ValueError):
    """A file that is no whole snapshot of this run; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, how much of the journal it covers, and of events.jsonl."""

    state: QueueState
    position: Position
    events: Extent


class Snapshots:
    """Snapshots of one run, in ``folder``."""

    def __init__(self, folder: Path, plan: Plan, durable: bool, every: int = RECORDS) -> None:
        self.folder, self.plan, self.durable, self.every = folder, plan, durable, every
        self.taken = 0
        """Number of whole snapshots that this controller has taken."""
        self._child = Forked(_LONGEST_S)
        self._covered = 0
        self._size = 0
        folder.mkdir(parents=True, exist_ok=True)
        for temporary in folder.glob(".*"):
            temporary.unlink(missing_ok=True)

    # -- reading -----------------------------------------------------------------------------------

    def found(self) -> Iterator[Path]:
        """Files of snapshots, newest first."""
        paths = {
            match.groups(): path
            for path in self.folder.iterdir()
            if (match := _NAME.fullmatch(path.name))
        }
        return (paths[key] for key in sorted(paths, reverse=True))

    def load(self, path: Path) -> Snapshot:
        """SnapshotError: the file is not whole, of another format, or of a run that was configured
        differently."""
        try:
            content = msgpack.unpackb(_body(path.read_bytes()), strict_map_key=False)
            if content["plan"] != _plain(self.plan):
                raise ValueError("the run was configured differently")
            state = QueueState.load(self.plan, content["state"])
            return Snapshot(state, Position(*content["position"]), Extent(*content["events"]))
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"{path}: not used, {type(error).__name__}: {error}") from error

    # -- writing -----------------------------------------------------------------------------------

    def due(self, records: int) -> bool:
        """Whether to `take` one, the journal having ``records`` of this controller."""
        self._look_after_child()
        return not self._child.runs and records - self._covered >= max(
            self.every, self._size // _GROWTH
        )

    def take(
        self, state: QueueState, records: int, position: Position, events: Extent, events_file: int
    ) -> None:
        """Start to write one; all that it covers was written. ``events_file``: descriptor of
        events.jsonl."""
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
        """Write a snapshot, and remove those before the previous one; its path."""
        content = {
            "plan": _plain(self.plan),
            "position": astuple(position),
            "events": astuple(events),
        }
        body = msgpack.packb(content | {"state": state.dump()})
        path = self.folder / f"inc-{position.incarnation:06d}-{position.offset:015d}.snapshot"
        write_atomic(
            path, _HEAD.pack(_MAGIC, FORMAT, len(body), zlib.crc32(body)) + body, sync=self.durable
        )
        for old in list(self.found())[_KEEP:]:
            old.unlink(missing_ok=True)
        return path

    def _look_after_child(self) -> None:
        if (status := self._child.ended()) is not None:
            self._note_end(status)

    def _note_end(self, status: int) -> None:
        if status:
            print(
                f"no snapshot of the queue in {self.folder}: status {status} of the process that "
                "wrote",
                flush=True,
            )
        else:
            self.taken += 1
            with contextlib.suppress(OSError):
                self._size = max((path.stat().st_size for path in self.found()), default=0)

    def close(self) -> None:
        """Wait a little for the one that is being written, then give it up."""
        if (status := self._child.wait(_CLOSE_S)) is not None:
            self._note_end(status)


def _body(data: bytes) -> memoryview:
    body = memoryview(data)[_HEAD.size :]
    magic, version, size, crc = _HEAD.unpack(data[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or version != FORMAT:
        raise ValueError(f"not a snapshot of format {FORMAT}")
    if len(body) != size or zlib.crc32(body) != crc:
        raise ValueError(f"{len(body)} bytes of {size}, or a wrong checksum")
    return body


def _plain(plan: Plan) -> str:
    """Plan as plain values: everything that a replay depends on."""
    return json.dumps(asdict(plan), default=sorted, sort_keys=True)
