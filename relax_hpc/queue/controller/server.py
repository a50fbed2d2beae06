"""The queue controller: one process, which alone writes the journal. Requests come over TCP.

A request that cannot be answered yet (no rows, no ticket, no newer version) waits, and is answered
as soon as it can be. So no client polls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from relax_hpc.base.disk_waits import WriteRetry, is_temporary, retry_write
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Durability
from relax_hpc.net.transport.listener import Listener, create_listening_socket
from relax_hpc.net.transport.wire import Bytes, controller_purpose, pack, unpack
from relax_hpc.queue.controller.eventlog import EventLog
from relax_hpc.queue.controller.gathering import Gatherer, journal_files
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.messages import Refused, Request, parse
from relax_hpc.queue.controller.recovery import (
    delete_file,
    delete_leftovers,
    end_former_groups,
    note_torn_tails,
    recover_state,
)
from relax_hpc.queue.controller.service import LEASE_S, QueueService
from relax_hpc.queue.controller.snapshots import RECORDS, Snapshots
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.plan import Plan

ALWAYS_ANSWERED = ("beat", "status")
"""Requests that are answered even while the journal cannot be written, so that clients know for
what they wait."""
_CHECK_S = 0.05
"""Most seconds between two checks for a successor while nothing changes."""
_LATE_S = 1.0
"""Most seconds by which the journal may be late with durability `none`."""


class Reply(NamedTuple):
    """Reply to a request of one peer."""

    peer: int
    op: str
    content: dict[str, Any]


class Controller:
    """The controller of one run."""

    def __init__(
        self,
        run: RunDir,
        plan: Plan,
        incarnation: int,
        host: str = "127.0.0.1",
        durability: Durability = "commit",
        snapshot_every: int = RECORDS,
        lease_s: float = LEASE_S,
        gathers: bool = False,
    ) -> None:
        """``gathers``: a child of this process gathers the rows that are kept, see `gathering`."""
        self.run = run
        durable, self.late_s = durability == "commit", _LATE_S if durability == "none" else 0.0
        self._commit_at, self._shards = 0.0, str(run.shards)
        journal = retry_write(run.journal, lambda: Journal(run.journal, incarnation, durable))
        self.stuck = WriteRetry(journal.path)
        """True while the journal cannot be written. Then no change is answered, and no request
        times out."""
        self._unsent: list[Reply] = []
        """Replies that follow from records which are not in the journal yet."""
        self._postponed: list[Request] = []
        """Requests that came while the journal could not be written."""
        folder = run.journal.with_name("snapshots")
        self.snapshots = retry_write(
            folder, lambda: Snapshots(folder, plan, durable, snapshot_every)
        )
        self.event_log = EventLog(run.events, incarnation)
        self.gatherer = Gatherer(run.shards, incarnation) if gathers else None
        self.journal, self.incarnation = journal, incarnation
        state = recover_state(journal, self.snapshots, self.event_log)
        self.service = QueueService(plan, incarnation, state, journal, lease_s)
        note_torn_tails(self.service)
        end_former_groups(self.service, all_groups=self.late_s > 0)
        delete_leftovers(run, state)
        self.listener = Listener(
            create_listening_socket(host), run.token(), controller_purpose(incarnation)
        )
        self.endpoint = self.listener.endpoint

    @property
    def state(self) -> QueueState:
        return self.service.state

    # -- loop --------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests until ``until()``, which is called at least once a second. FencedError:
        there is a successor."""
        check_at = 0.0
        while not until():
            self._unsent += self._take(self.listener.receive(self._wait_s()))
            self.service.refused_connections = self.listener.refused
            wrote = self._commit()
            # A change counts only if a successor replays it. So the check for a successor comes
            # between the commit and the replies. If nothing changed, it may be late.
            if wrote or time.monotonic() >= check_at:
                check_at = time.monotonic() + _CHECK_S
                self._check_newest()
            self._send_replies()
            if not self.stuck and (not self.late_s or wrote):
                self._after_replies()

    def _commit(self) -> bool:
        """Write new records to the journal, before their replies are sent; with durability `none`,
        at most once in `_LATE_S`. Whether records were written."""
        if not self.stuck.is_due() or (self.late_s and time.monotonic() < self._commit_at):
            return False
        self._commit_at = time.monotonic() + self.late_s
        try:
            wrote = self.journal.commit()
        except OSError as error:
            self.stuck.note_failure(error)
            return False
        self.stuck.note_success()
        return wrote

    def _send_replies(self) -> None:
        """Send all replies; while the journal cannot be written, only those that are always
        answered."""
        replies, self._unsent = self._unsent, []
        for reply in replies:
            if self.stuck and reply.op not in ALWAYS_ANSWERED:
                self._unsent.append(reply)
                continue
            if self.stuck:
                # Which shards can be freed may depend on records that are not in the journal.
                reply.content.get("result", {}).pop("free", None)
            self.listener.send(reply.peer, pack(reply.content))

    def _wait_s(self) -> float:
        """Most seconds to wait for messages."""
        if self.stuck:
            wake_at = self.stuck.next_try
        elif self._postponed or self.state.woken:
            wake_at = 0.0
        else:
            wake_at = self.service.waiting.next_deadline()
        return max(0.0, min(1.0, wake_at - time.monotonic()))

    def _check_newest(self) -> None:
        """Check that there is no successor. If the disk fails, no reply is sent until it
        answers."""
        try:
            self.journal.check_newest()
            self.event_log.check()
        except OSError as error:
            self.stuck.note_failure(error)

    def _after_replies(self) -> None:
        self.event_log.write(self.state.events.take_lines())
        self.event_log.flush()
        for name in self.state.shards.take_garbage():
            # A Path object would cost more than the rest of this loop.
            delete_file(f"{self._shards}/{name}")
        for media_id in self.state.media.take_garbage():
            delete_file(str(self.run.media / media_id))
        if self.snapshots.due(self.journal.records):
            log = self.event_log
            self.snapshots.take(
                self.state, self.journal.records, self.journal.position, log.extent, log.fileno()
            )
        # Files are journaled after the snapshot, which must contain nothing beyond the journal.
        gathered = self.gatherer.poll(self.state) if self.gatherer else None
        if gathered:
            journal_files(self.service, *gathered)

    def close(self) -> None:
        """Flush and release everything. Records that cannot be written now are lost; their replies
        were not sent."""
        try:
            self.journal.commit()
            self._after_replies()
            for gathered in self.gatherer.finish(self.state) if self.gatherer else ():
                journal_files(self.service, *gathered)
                self.journal.commit()
                self._after_replies()
        except OSError as error:
            if not is_temporary(error):
                raise
        self.snapshots.close()
        self.event_log.close()
        with contextlib.suppress(OSError):
            self.journal.close()
        self.stuck.note_success()
        self.listener.close()

    # -- messages ----------------------------------------------------------------------------------

    def _take(self, payloads: Sequence[tuple[int, Bytes]]) -> list[Reply]:
        """Handle messages; the replies that are possible now. Their records are committed
        together."""
        replies: list[Reply] = []
        for request in self._requests(payloads):
            if self.stuck and request.op not in ALWAYS_ANSWERED:
                self._postponed.append(request)
            elif not self._answer(request, replies):
                self.service.waiting.add(request)
        self.service.update_presence()
        if self.stuck:
            return replies
        self.service.update_operations()
        # Requests that waited are answered first, because work waits for them. A client that has
        # put rows is busy with their file anyway.
        waited: list[Reply] = []
        waiting = self.service.waiting
        waiting.wake(self.state.woken, lambda request: self._answer(request, waited))
        replies = waited + replies
        for request in waiting.take_overdue():
            if self._answer(request, replies):
                continue
            if self._extend_deadline(request):
                waiting.add(request)
            else:
                error = self._overdue_message(request)
                replies.append(self._reply(request, error=error, kind="deadline"))
        return replies

    def _requests(self, payloads: Sequence[tuple[int, Bytes]]) -> list[Request]:
        """Requests to handle now: first the postponed ones, then those of ``payloads``."""
        requests: list[Request] = []
        if not self.stuck:
            requests, self._postponed = self._postponed, []
        for peer, payload in payloads:
            try:
                request = parse(peer, unpack(payload))
            except ValueError:
                self.listener.refuse(peer)
                continue
            request.paused_s = self.service.presence.paused_s
            requests.append(request)
        return requests

    def _extend_deadline(self, request: Request) -> bool:
        """Move the deadline by the time for which timeouts were paused since the last look; whether
        it moved."""
        paused_s = self.service.presence.paused_s
        added_s = min(paused_s - request.paused_s, request.max_pause_s)
        request.deadline += added_s
        request.paused_s = paused_s
        request.max_pause_s -= added_s
        return added_s > 0

    def _answer(self, request: Request, replies: list[Reply]) -> bool:
        """Handle a request and add its reply to ``replies``; False: it has to wait."""
        try:
            reply = self._reply(request, result=self.service.handle(request))
        except Refused as refusal:
            reply = self._reply(request, error=str(refusal), kind=refusal.kind)
        except NotYet as wait:
            request.count_wait()
            request.topic, request.reason, request.common = wait.topic, wait.reason, wait.common
            request.cause = wait.cause
            return False
        replies.append(reply)
        return True

    def _overdue_message(self, request: Request) -> str:
        """Error message of an overdue request: for what it waited, how long, how far the run is,
        and which logs to open."""
        subjects = [str(request.args[name]) for name in ("task", "reader") if name in request.args]
        subject = " ".join([request.op, *subjects])
        depth = ", ".join(f"{count} {name}" for name, count in self.state.tickets.depth().items())
        reason = f" ({request.reason})" if request.reason else ""
        waited_s = time.monotonic() - request.received_at
        return (
            f"{subject}: nothing came for {waited_s:.1f} s{reason}; trained "
            f"steps: {self.state.progress.trained_steps}, prompt groups: {depth}; open the logs of "
            f"the group that is behind in {self.run.root / 'logs'}"
        )

    def _reply(self, request: Request, **content: Any) -> Reply:
        head = {"id": request.id, "hub_incarnation": self.incarnation}
        return Reply(request.peer, request.op, {**head, **content})
