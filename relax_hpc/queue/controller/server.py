"""The queue controller: one process, one writer. Requests come over TCP, effects go through the
journal.

A request that cannot be answered yet (no rows, no ticket, no newer version) waits and is answered
the moment it can, so nobody polls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
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
    end_former_groups,
    note_torn_tails,
    recovered,
    remove,
    sweep,
)
from relax_hpc.queue.controller.service import LEASE_S, QueueService
from relax_hpc.queue.controller.snapshots import RECORDS, Snapshots
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.plan import Plan

Reply = dict[str, Any]
TELLING = ("beat", "status")
"""Requests that are answered whatever becomes of the journal: they tell whom to wait for."""
_LOOK_S = 0.05
"""Seconds between looks for a successor while nothing changes, at most."""
_LATE_S = 1.0
"""Seconds that the journal may be late with durability `none`, at most."""


class Answer(NamedTuple):
    """Answer to a request of one peer."""

    peer: int
    op: str
    reply: Reply


class Controller:
    """Serves one run."""

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
        self._journal_at, self._shards = 0.0, str(run.shards)
        journal = retry_write(run.journal, lambda: Journal(run.journal, incarnation, durable))
        self.stuck = WriteRetry(journal.path)
        """Patience that is true while the journal cannot be written: nobody is told of anything, or
        waits in vain."""
        self._unsent: list[Answer] = []
        """Answers whose changes are not in the journal yet."""
        self._later: list[Request] = []
        """Requests that have come while the journal could not be written."""
        folder = run.journal.with_name("snapshots")
        self.snapshots = retry_write(
            folder, lambda: Snapshots(folder, plan, durable, snapshot_every)
        )
        self.event_log = EventLog(run.events, incarnation)
        self.gatherer = Gatherer(run.shards, incarnation) if gathers else None
        self.journal, self.incarnation = journal, incarnation
        state = recovered(journal, self.snapshots, self.event_log)
        self.service = QueueService(plan, incarnation, state, journal, lease_s)
        note_torn_tails(self.service)
        end_former_groups(self.service, all_of_them=self.late_s > 0)
        sweep(run, state)
        self.listener = Listener(
            create_listening_socket(host), run.token(), controller_purpose(incarnation)
        )
        self.endpoint = self.listener.endpoint

    @property
    def state(self) -> QueueState:
        return self.service.state

    # -- loop --------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests until ``until()``; asked at least once a second. FencedError once there
        is a successor."""
        look_at = 0.0
        while not until():
            self._unsent += self._take(self.listener.receive(self._patience()))
            self.service.refused_connections = self.listener.refused
            wrote = self._commit()
            # A change counts only if a successor replays it, so look before telling of it; other
            # answers may be late.
            if wrote or time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_S
                self._look()
            self._tell()
            if not self.stuck and (not self.late_s or wrote):
                self._after_replies()

    def _commit(self) -> bool:
        """Have the journal hold what was done, before anybody is told of it unless it may be late;
        whether it did."""
        if not self.stuck.is_due() or (self.late_s and time.monotonic() < self._journal_at):
            return False
        self._journal_at = time.monotonic() + self.late_s
        try:
            wrote = self.journal.commit()
        except OSError as error:
            self.stuck.note_failure(error)
            return False
        self.stuck.note_success()
        return wrote

    def _tell(self) -> None:
        """Send the answers that there are: while the journal is stuck those alone that say whom to
        wait for."""
        answers, self._unsent = self._unsent, []
        for answer in answers:
            if self.stuck and answer.op not in TELLING:
                self._unsent.append(answer)
                continue
            if self.stuck:
                # It may follow from what is not in the journal.
                answer.reply.get("result", {}).pop("free", None)
            self.listener.send(answer.peer, pack(answer.reply))

    def _patience(self) -> float:
        if self.stuck:
            until = self.stuck.next_try
        else:
            until = 0.0 if self._later or self.state.woken else self.service.waiting.next_deadline()
        return max(0.0, min(1.0, until - time.monotonic()))

    def _look(self) -> None:
        """Check that this controller is still the newest. While the disk does not say, nobody is
        told of anything."""
        try:
            self.journal.check_newest()
            self.event_log.check()
        except OSError as error:
            self.stuck.note_failure(error)

    def _after_replies(self) -> None:
        self.event_log.write(self.state.events.take_lines())
        self.event_log.flush()
        for name in self.state.shards.take_garbage():
            # Building a path costs more than the rest of it.
            remove(f"{self._shards}/{name}")
        for media_id in self.state.media.take_garbage():
            remove(str(self.run.media / media_id))
        if self.snapshots.due(self.journal.records):
            log = self.event_log
            self.snapshots.take(
                self.state, self.journal.records, self.journal.position, log.extent, log.fileno()
            )
        # A snapshot holds nothing that the journal does not.
        if self.gatherer and (ended := self.gatherer.look(self.state)):
            journal_files(self.service, *ended)

    def close(self) -> None:
        """Flush and release everything. What the journal's disk does not take by now nobody was
        told of."""
        try:
            self.journal.commit()
            self._after_replies()
            for ended in self.gatherer.last(self.state) if self.gatherer else ():
                journal_files(self.service, *ended)
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

    def _take(self, payloads: list[tuple[int, Bytes]]) -> list[Answer]:
        """Take what has come; the answers that there are now. What it does is committed
        together."""
        answers: list[Answer] = []
        for request in self._requests(payloads):
            if self.stuck and request.op not in TELLING:
                self._later.append(request)
            elif not self._answer(request, answers):
                self.service.waiting.add(request)
        self.service.look_for_members()
        if self.stuck:
            return answers
        # Who waited is told first: its work is late, while who put something goes on to write its
        # file.
        waited: list[Answer] = []
        waiting = self.service.waiting
        waiting.wake(self.state.woken, lambda request: self._answer(request, waited))
        answers = waited + answers
        for request in waiting.take_overdue():
            if self._answer(request, answers):
                continue
            if self._put_off(request):
                waiting.add(request)
            else:
                reply = self._reply(request, error=self._overdue(request), kind="deadline")
                answers.append(Answer(request.peer, request.op, reply))
        return answers

    def _requests(self, payloads: list[tuple[int, Bytes]]) -> list[Request]:
        """Requests that can be looked at now: first those put off until later, then those that have
        come."""
        found: list[Request] = []
        if not self.stuck:
            found, self._later = self._later, []
        for peer, payload in payloads:
            try:
                request = parse(peer, unpack(payload))
            except ValueError:
                self.listener.refuse(peer)
                continue
            request.paused_s = self.service.presence.paused_s
            found.append(request)
        return found

    def _put_off(self, request: Request) -> bool:
        """Whether a request has more time, as clocks have stood since it came."""
        paused_s = min(self.service.presence.paused_s - request.paused_s, request.may_stand_s)
        request.deadline, request.paused_s = (
            request.deadline + paused_s,
            self.service.presence.paused_s,
        )
        request.may_stand_s -= paused_s
        return paused_s > 0

    def _answer(self, request: Request, answers: list[Answer]) -> bool:
        """Whether there is an answer, which is in ``answers`` then."""
        try:
            reply = self._reply(request, result=self.service.handle(request))
        except Refused as refusal:
            reply = self._reply(request, error=str(refusal), kind=refusal.kind)
        except NotYet as wait:
            request.put_down()
            request.topic, request.why, request.common = wait.topic, wait.why, wait.common
            request.cause = wait.cause
            return False
        answers.append(Answer(request.peer, request.op, reply))
        return True

    def _overdue(self, request: Request) -> str:
        """Message of an overdue request: what was waited for, how long, how far the run is, and
        where to look."""
        what = " ".join(
            [
                request.op,
                *(str(request.args[name]) for name in ("task", "reader") if name in request.args),
            ]
        )
        at = ", ".join(f"{count} {name}" for name, count in self.state.tickets.depth().items())
        why = f" ({request.why})" if request.why else ""
        return (
            f"{what}: nothing came for {time.monotonic() - request.since:.1f} s{why}; trained "
            f"steps: {self.state.progress.trained_steps}, prompt groups: {at}; open the logs of "
            f"the group that is behind in {self.run.root / 'logs'}"
        )

    def _reply(self, request: Request, **content: Any) -> Reply:
        return {"id": request.id, "hub_incarnation": self.incarnation, **content}
