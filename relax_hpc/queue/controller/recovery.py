"""Start of a controller: restore the state from the journal, and delete leftovers of earlier
controllers."""

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


def recover_state(journal: Journal, snapshots: Snapshots, event_log: EventLog) -> QueueState:
    """State of the journal: from a snapshot with the records since, or from all records. It writes
    events.jsonl again.

    FencedError: a successor has started.
    """
    snapshot = _newest_snapshot(journal, snapshots, event_log)
    state = snapshot.state if snapshot else QueueState(snapshots.plan)
    for number, record in enumerate(journal.replay(snapshot.position if snapshot else None)):
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
    """The newest usable snapshot. Its events are already written to the new events.jsonl."""
    for path in snapshots.paths():
        try:
            snapshot = snapshots.load(path)
        except SnapshotError as error:
            print(error, flush=True)
            continue
        if journal.covers(snapshot.position) and event_log.begin_with(snapshot.events):
            return snapshot
    return None


def note_torn_tails(service: QueueService) -> None:
    """Print and record which incomplete records were cut off from the journal."""
    journal = service.journal
    for name, size in journal.torn_bytes.items():
        print(
            f"{journal.folder / name}: cut off the last {size} bytes, which are no whole record",
            flush=True,
        )
        service.record(op="note", what="torn_tail", name=name, reason="journal")


def end_former_groups(service: QueueService, all_groups: bool) -> None:
    """End incarnations of groups that this run no longer has, after a resume with other groups.
    Their tickets and leases are taken back.

    ``all_groups``: end the others too, because the journal may lack records whose replies they have
    seen. They start again from the state of the journal.
    """
    members = service.state.members
    for group, incarnation in members.incarnations.items():
        is_supervisor = group.partition("-")[0] == SUPERVISOR
        must_end = not service.plan.knows(group) or (all_groups and not is_supervisor)
        if must_end and not members.lowest_allowed((group, incarnation)):
            service.record(op="down", group=group, incarnation=incarnation)


def delete_leftovers(run: RunDir, state: QueueState) -> None:
    """Delete files of shards that are garbage, or that an ended incarnation never put.

    Files of a living incarnation stay: it may have sent its put to an earlier controller, and will
    repeat it.
    """
    used, garbage = state.shards.numbers, set(state.shards.take_garbage())
    for path in run.shards.iterdir():
        shard = SHARD_NAME.match(path.name)
        is_orphan = GATHERED_NAME.match(path.name) is not None
        if shard and state.members.lowest_allowed((shard[1], int(shard[2]))):
            is_orphan = True
        if path.name in garbage or (is_orphan and path.name not in used):
            delete_file(str(path))
    if run.media.exists():
        with contextlib.suppress(OSError):
            MediaStore(run.media).remove_all_except(state.media.counts)


def delete_file(path: str) -> None:
    """Delete an unused file. If that fails for now, the next controller deletes it
    (`delete_leftovers`)."""
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and not is_temporary(error):
            raise
