"""Start of a controller: the state that earlier ones journaled, and a run directory without their
leftovers."""

from __future__ import annotations

import contextlib
import os

from relax_hpc.base.disk_waits import is_temporary
from relax_hpc.base.rundir import RunDir
from relax_hpc.queue.controller.eventlog import EventLog
from relax_hpc.queue.controller.gathering import GATHERED_NAME
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.snapshots import Snapshot, SnapshotError, Snapshots
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import SUPERVISOR
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.queue.storage.shard import SHARD_NAME


def recovered(journal: Journal, snapshots: Snapshots, event_log: EventLog) -> QueueState:
    """State that the journal records, or a snapshot with the records since; events.jsonl is written
    anew as it goes.

    FencedError: a successor has begun meanwhile.
    """
    snapshot = _newest_snapshot(journal, snapshots, event_log)
    state, after = (
        (snapshot.state, snapshot.position) if snapshot else (QueueState(snapshots.plan), None)
    )
    for number, record in enumerate(journal.replay(after)):
        state.apply(record)
        if number % 1000 == 0:
            event_log.write(state.events.take_lines())
    event_log.write(state.events.take_lines())
    journal.check_newest()
    event_log.publish()
    return state


def _newest_snapshot(
    journal: Journal, snapshots: Snapshots, event_log: EventLog
) -> Snapshot | None:
    """The newest that can be used; its events are in the new events.jsonl."""
    for path in snapshots.found():
        try:
            snapshot = snapshots.load(path)
        except SnapshotError as error:
            print(error, flush=True)
            continue
        if journal.covers(snapshot.position) and event_log.begin_with(snapshot.events):
            return snapshot
    return None


def note_torn_tails(service: QueueService) -> None:
    """Print what was cut off from the journal."""
    journal = service.journal
    for name, size in journal.cut.items():
        print(
            f"{journal.folder / name}: the last {size} bytes are no whole record and were cut off",
            flush=True,
        )
        service.record(op="note", what="torn_tail", name=name, reason="journal")


def end_former_groups(service: QueueService, all_of_them: bool) -> None:
    """End former groups, for which nobody speaks after a resume with other groups: what they hold
    comes back.

    So it is with ``all_of_them`` if the journal may lack what they were told: they begin again with
    what it has.
    """
    members = service.state.members
    for group, incarnation in members.incarnations.items():
        gone = not service.plan.knows(group) or (
            all_of_them and group.partition("-")[0] != SUPERVISOR
        )
        if gone and not members.lowest_allowed((group, incarnation)):
            service.record(op="down", group=group, incarnation=incarnation)


def sweep(run: RunDir, state: QueueState) -> None:
    """Remove the files of shards that are garbage, or were never put by a group incarnation that is
    over.

    A living one's are left alone: its put may have been sent to an earlier controller and be sent
    again.
    """
    needed, garbage = state.shards.numbers, set(state.shards.take_garbage())
    for path in run.shards.iterdir():
        made = SHARD_NAME.match(path.name)
        orphan = (
            made
            and path.name not in needed
            and state.members.lowest_allowed((made[1], int(made[2])))
        )
        orphan = orphan or (GATHERED_NAME.match(path.name) and path.name not in needed)
        if orphan or path.name in garbage:
            remove(str(path))
    if run.media.exists():
        with contextlib.suppress(OSError):
            MediaStore(run.media).remove_all_except(state.media.counts)


def remove(path: str) -> None:
    """A file that nobody needs. What cannot be removed now the next controller finds (`sweep`)."""
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and not is_temporary(error):
            raise
