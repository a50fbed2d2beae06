"""Requests to the controller and their answers. Any thread may send a request; one thread does the
communication.

That thread finds the controller through the roster and sends beats. If the controller is replaced
by a later incarnation, it reconnects and repeats all requests without an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from relax_hpc.base.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    RefusedError,
    RelaxError,
    StoppedError,
)
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.life_signs import process_identity
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.queue.client.beat import Beat
from relax_hpc.queue.client.controller_link import ControllerLink
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.records import OBSERVER_INCARNATION

Input = TypeVar("Input")
Output = TypeVar("Output")
BEAT_FILE_S = 5.0
"""Seconds between two writes of the beat file."""
_NO_HUB_S = 5.0
"""Seconds without a hub after which it counts as ended, in a run that was asked to stop. No other
hub is started in such a run."""
_ERRORS: dict[str, type[RelaxError]] = {"fenced": FencedError, "deadline": DeadlineError}


class Submit(Protocol):
    """Type of `QueueConnection.submit`, which all methods of a client use."""

    def __call__(
        self, op: str, timeout: float | None = None, **args: Any
    ) -> Future[dict[str, Any]]:
        """Future of the answer."""


class ShardHolder(Protocol):
    """Holder of shards in this process's memory. The queue tells it which shards to free."""

    def holds(self) -> list[str]:
        """Names of its shards that are on disk."""

    def free(self, names: list[str]) -> None:
        """Free these shards: no process needs them in memory."""


WITHDRAWN = frozenset(
    (
        *("admit", "claim", "next_version", "step_generated", "take_turn", "whole"),
        "operations_watch",
    )
)
"""Requests that may wait at the hub for long. If the client no longer waits, they are withdrawn."""


class PendingAnswer(Future):
    """Future of an answer of the queue. It cannot be cancelled like other futures: a caller that
    stops waiting must not disturb the thread that communicates with the hub."""

    def __init__(self, withdraw: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.withdraw = withdraw
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Withdraw the request, if it may wait at the hub for long. asyncio calls this if the
        future that wraps this one is cancelled before its result was read."""
        if self.withdraw:
            self.withdraw()
        return False


@dataclass(slots=True)
class _Call:
    """A request without an answer. Times are of the monotonic clock, in seconds."""

    future: PendingAnswer
    message: dict[str, Any]
    deadline: float
    sent_at: float
    max_pause_s: float = 0.0
    """Most seconds by which ``deadline`` may be moved while other groups are absent. Each hub
    decides this independently. A call without a hub, or with a silent hub, waits this much
    longer."""

    @property
    def latest_deadline(self) -> float:
        return self.deadline + self.max_pause_s

    def request(self) -> dict[str, Any]:
        """The message, with the seconds for which its answer is still wanted."""
        now = time.monotonic()
        patience = self.deadline - (self.sent_at if self.max_pause_s else now)
        return {
            **self.message,
            "patience": max(0.0, patience),
            "may_stand": max(0.0, min(self.max_pause_s, self.latest_deadline - now)),
        }


class QueueConnection:
    """Connection of one process to the queue: of ``member``, in an incarnation of its group."""

    def __init__(
        self, run: RunDir, config: Config, group: str, incarnation: int, member: str
    ) -> None:
        self.run, self.config = run, config
        self.group, self.incarnation, self.member = group, incarnation, member
        self.name = f"{group}-i{incarnation:06d}-{os.getpid()}-{os.urandom(4).hex()}"
        self.shards: ShardHolder | None = None
        self._link = ControllerLink(run, run.token())
        self.beat = Beat(lambda: self._link.connected)
        self._connected_at = time.monotonic()
        self._refused: ConfigError | None = None
        """Error because of which there will never be a connection."""
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        """Guards the calls, and sending."""
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"queue-{member}", daemon=True
        )
        self._thread.start()

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future[dict[str, Any]]:
        """Send a request; the future has its result, or DeadlineError, FencedError, RefusedError.

        The default ``timeout`` is queue.wait_timeout_s. It does not run while other groups are
        absent.
        """
        max_pause_s = longest_wait_s(self.config) if timeout is None else 0.0
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        number, now = next(self._ids), time.monotonic()
        future = PendingAnswer(partial(self._withdraw, number) if op in WITHDRAWN else None)
        call = _Call(future, self._message(number, op, args), now + timeout, now, max_pause_s)
        with self._lock:
            is_open = not self._closing.is_set()
            if is_open:
                self._calls[number] = call
                self._link.send(call)
        if not is_open:
            call.future.set_exception(
                self._refused or RelaxError(f"{op}: this connection to the queue is closed")
            )
        return call.future

    def call(self, op: str, timeout: float | None = None, **args: Any) -> dict[str, Any]:
        """Submit a request and wait for the answer."""
        return self.submit(op, timeout, **args).result()

    def _withdraw(self, number: int) -> None:
        """Ask the hub to forget the request ``number`` and to take back tickets or a lease
        that it has granted: the caller no longer waits for the answer."""
        with self._lock:
            self._calls.pop(number, None)
        self.submit("withdraw", number=number)

    def _message(self, number: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        sender = {"client": self.name, "group": self.group, "incarnation": self.incarnation}
        return {"id": number, **sender, "op": op, "args": args}

    def close(self) -> None:
        """End the communication. Calls without an answer fail."""
        self._closing.set()
        self._link.wakeup.ring()
        self._thread.join(timeout=5.0)
        self._link.wakeup.close()

    # -- the communication thread ------------------------------------------------------------------

    def _run_thread(self) -> None:
        error = RelaxError("the connection to the queue was closed before the answer came")
        try:
            self._communicate()
        except ConfigError as failure:
            error = self._refused = failure
        except Exception as failure:
            error = RelaxError(
                f"the connection to the queue broke: {type(failure).__name__}: {failure}"
            )
            error.__cause__ = failure
        finally:
            with self._lock:
                self._closing.set()
                self._link.close()
            self._fail_calls(self._take_calls(), error)

    def _take_calls(self, overdue_at: float | None = None) -> list[_Call]:
        """Remove all calls, or those whose deadline passed before ``overdue_at``."""
        with self._lock:
            limit = math.inf if overdue_at is None else overdue_at - self._link.grace_s
            numbers = [n for n, call in self._calls.items() if call.latest_deadline < limit]
            return [self._calls.pop(number) for number in numbers]

    def _fail_calls(self, calls: list[_Call], error: RelaxError) -> None:
        for call in calls:
            call.future.set_exception(error)

    def _communicate(self) -> None:
        beat_at, file_at, beat_s = 0.0, 0.0, self.config.liveness.beat_s
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= beat_at:
                self._send_beat(now)
                if now >= file_at and self.incarnation != OBSERVER_INCARNATION:
                    self._write_beat()
                    file_at = now + BEAT_FILE_S
                beat_at = now + beat_s
            self._expire(now)
            self._link.wait(max(0.0, min(beat_at, self._next_deadline()) - time.monotonic()))
            with self._lock:
                replies, broken = self._link.receive()
            for reply in replies:
                self._handle_reply(reply)
            if broken:
                beat_at = 0.0

    def _send_beat(self, now: float) -> None:
        """Send a beat. A new connection sends all calls again."""
        beat_s = self.config.liveness.beat_s
        connection = self._link.find_connection(now, 2 * beat_s, beat_s)
        self._check_stopped(connection is not None or self._link.connected, now)
        beat = self._beat_call(now)
        with self._lock:
            if connection:
                self._link.use(connection)
            self._link.send(beat)
            if connection:
                for call in self._calls.values():
                    self._link.send(call)

    def _check_stopped(self, connected: bool, now: float) -> None:
        """Fail all calls if no answer can come: the run stops, and its hub has ended. Checked at
        each beat."""
        if connected or self.incarnation == OBSERVER_INCARNATION:
            self._connected_at = now
        elif now - self._connected_at > _NO_HUB_S and self.run.stop.exists():
            error = StoppedError("the run stops, and its hub has already ended")
            self._fail_calls(self._take_calls(), error)

    def _write_beat(self) -> None:
        """Write the beat to a file, for `status` while the hub does not answer. A full disk must
        not end this thread."""
        path = self.run.rendezvous(self.group) / f"beat-{self.member}.json"
        with contextlib.suppress(OSError):
            content = {"time": time.time(), "incarnation": self.incarnation, **process_identity()}
            write_json(path, {**content, **self.beat.content()})

    def _beat_call(self, now: float) -> _Call:
        self.beat.count_time(now)
        holds = self.shards.holds() if self.shards else []
        args = {"member": self.member, "holds": holds, **self.beat.content()}
        return _Call(PendingAnswer(), self._message(0, "beat", args), now + 1.0, now)

    def _next_deadline(self) -> float:
        """Time at which the next call times out, on the monotonic clock."""
        with self._lock:
            deadlines = [call.latest_deadline for call in self._calls.values()]
            return min(deadlines, default=math.inf) + self._link.grace_s

    def _expire(self, now: float) -> None:
        for call in self._take_calls(overdue_at=now):
            card = latest_card(self.run, "hub")
            log = self.run.logs("hub", card.incarnation if card else 1)
            text = (
                f"{call.message['op']}: the hub has not answered for {now - call.sent_at:.0f} s; "
                f"open {log}"
            )
            call.future.set_exception(DeadlineError(text))

    def _handle_reply(self, reply: dict[str, Any]) -> None:
        """Set the result of the call that the reply answers. A malformed reply is ignored, so that
        it cannot end this thread."""
        number, kind, error = reply.get("id"), reply.get("kind"), reply.get("error")
        refused = type(kind) is type(error) is str
        if type(number) is not int or not (refused or "result" in reply):
            return
        if refused and kind == "fenced":
            self._fail_calls(self._take_calls(), FencedError(error))
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            self._handle_beat_answer(reply.get("result"))
        elif refused:
            call.future.set_exception(_ERRORS.get(str(kind), RefusedError)(error))
        else:
            call.future.set_result(reply["result"])

    def _handle_beat_answer(self, answer: Any) -> None:
        """Read the answer to a beat: shards to free, whether timeouts are paused, and for which
        disk."""
        if not isinstance(answer, dict):
            return
        self.beat.read_answer(answer)
        names = answer.get("free")
        if self.shards and isinstance(names, list) and names:
            self.shards.free([name for name in names if isinstance(name, str)])


def then(future: Future[Input], function: Callable[[Input], Output]) -> Future[Output]:
    """A future of ``function`` applied to the result, or with the error of either."""
    result = PendingAnswer(getattr(future, "withdraw", None))

    def finish(done: Future) -> None:
        try:
            result.set_result(function(done.result()))
        except Exception as error:
            result.set_exception(error)

    future.add_done_callback(finish)
    return result


def ignore_answer(_: object) -> None:
    """Ignore the content of an answer: its arrival is the information."""
