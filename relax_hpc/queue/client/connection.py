"""Requests to the controller and their answers: any thread may ask, one thread talks.

It finds the controller through the roster, beats for liveness, and when the controller comes back
as a later incarnation it reconnects and asks again whatever was not answered.
"""

from __future__ import annotations

import contextlib
import itertools
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
from relax_hpc.queue.client.controller_link import Line
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.records import OBSERVER_INCARNATION

Given = TypeVar("Given")
Made = TypeVar("Made")
BEAT_FILE_S = 5.0
_NO_HUB_S = 5.0
"""Seconds without a hub after which it counts as gone, in a run that was asked to stop: no other is
started then."""
_ERRORS: dict[str, type[RelaxError]] = {"fenced": FencedError, "deadline": DeadlineError}


class Submit(Protocol):
    """Type of `Connection.submit`, which the methods of a client are made of."""

    def __call__(
        self, op: str, timeout: float | None = None, **args: Any
    ) -> Future[dict[str, Any]]:
        """Future of the answer."""


class Holder(Protocol):
    """Keeper of shards in this process's memory, which the queue tells when to free them."""

    def holds(self) -> list[str]:
        """Names of the shards that are on disk."""

    def free(self, names: list[str]) -> None:
        """Free these shards: nobody needs them any more."""


WITHDRAWN = frozenset(("admit", "claim", "next_version", "step_generated", "take_turn", "whole"))
"""Requests that may wait at the hub for long. If nobody waits for the answer any more, they are
withdrawn."""


class Answer(Future):
    """Answer of the queue, which is not there yet. It cannot be cancelled as other futures can: who
    waited and waits no more must not disturb the thread that talks to the hub."""

    def __init__(self, withdraw: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.withdraw = withdraw
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Withdraw the request, if it is one that may wait for long. asyncio calls this when the
        future that it has made of this one is cancelled, before anybody has seen its result."""
        if self.withdraw:
            self.withdraw()
        return False


@dataclass(slots=True)
class _Call:
    future: Answer
    message: dict[str, Any]
    until: float
    since: float
    may_stand_s: float = 0.0
    """Seconds by which ``until`` may be put off while others are not there. Each hub judges that
    anew; a call without a hub, or with a silent one, waits for as long."""

    @property
    def latest(self) -> float:
        return self.until + self.may_stand_s

    def request(self) -> dict[str, Any]:
        """The message, with how long its answer is waited for yet."""
        now = time.monotonic()
        patience = self.until - (self.since if self.may_stand_s else now)
        return {
            **self.message,
            "patience": max(0.0, patience),
            "may_stand": max(0.0, min(self.may_stand_s, self.latest - now)),
        }


class Connection:
    """Connection of one process, ``member`` of an incarnation of its group, to the queue."""

    def __init__(
        self, run: RunDir, config: Config, group: str, incarnation: int, member: str
    ) -> None:
        self.run, self.config, self.group, self.incarnation, self.member = (
            run,
            config,
            group,
            incarnation,
            member,
        )
        self.name = f"{group}-i{incarnation:06d}-{os.getpid()}-{os.urandom(4).hex()}"
        self.shards: Holder | None = None
        self._line = Line(run, run.token())
        self.beat = Beat(lambda: self._line.connected)
        self._connected_at = time.monotonic()
        self._refused: ConfigError | None = None
        """Reason why there will never be a connection."""
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        """Guards the calls, and what is sent."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._talk, name=f"queue-{member}", daemon=True)
        self._thread.start()

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future[dict[str, Any]]:
        """Send a request; the future has its result, or DeadlineError, FencedError, RefusedError.

        Without a ``timeout`` it is queue.wait_timeout_s, not counting time in which somebody is not
        there yet.
        """
        may_stand_s = longest_wait_s(self.config) if timeout is None else 0.0
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        number, now = next(self._ids), time.monotonic()
        answer = Answer(partial(self._withdraw, number) if op in WITHDRAWN else None)
        call = _Call(answer, self._message(number, op, args), now + timeout, now, may_stand_s)
        with self._lock:
            if open_yet := not self._closing.is_set():
                self._calls[number] = call
                self._line.send(call)
        if not open_yet:
            call.future.set_exception(
                self._refused or RelaxError(f"{op}: this connection to the queue is closed")
            )
        return call.future

    def call(self, op: str, timeout: float | None = None, **args: Any) -> dict[str, Any]:
        """Submit a request and wait for the answer."""
        return self.submit(op, timeout, **args).result()

    def _withdraw(self, number: int) -> None:
        """Have the hub forget the request ``number``, and take back what it has granted to it:
        whoever asked does not wait for the answer any more, and a later request may come from
        another one of the same name."""
        with self._lock:
            self._calls.pop(number, None)
        self.submit("withdraw", number=number)

    def _message(self, number: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        about = {"client": self.name, "group": self.group, "incarnation": self.incarnation}
        return {"id": number, **about, "op": op, "args": args}

    def close(self) -> None:
        """Stop talking; calls that were not answered fail."""
        self._closing.set()
        self._line.bell.ring()
        self._thread.join(timeout=5.0)
        self._line.bell.close()

    # -- the talking thread ------------------------------------------------------------------------

    def _talk(self) -> None:
        error = RelaxError("the connection to the queue was closed before the answer came")
        try:
            self._serve()
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
                self._line.close()
            self._fail(self._take_calls(), error)

    def _take_calls(self, late: float | None = None) -> list[_Call]:
        """Calls that are waited for no more: all, or those whose time was over at ``late``."""
        with self._lock:
            since = float("inf") if late is None else late - self._line.grace_s
            taken = [number for number, call in self._calls.items() if call.latest < since]
            return [self._calls.pop(number) for number in taken]

    def _fail(self, calls: list[_Call], error: RelaxError) -> None:
        """Let ``calls`` fail, whose answers cannot come."""
        for call in calls:
            call.future.set_exception(error)

    def _serve(self) -> None:
        beat_at, file_at, beat_s = 0.0, 0.0, self.config.liveness.beat_s
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= beat_at:
                connection = self._line.found(now, 2 * beat_s, beat_s)
                self._look_at_end(connection is not None or self._line.connected, now)
                beat = self._beat_call(now)
                with self._lock:
                    if connection:
                        self._line.take(connection)
                    self._line.send(beat)
                    for call in self._calls.values() if connection else ():
                        self._line.send(call)
                if now >= file_at and self.incarnation != OBSERVER_INCARNATION:
                    self._write_beat()
                    file_at = now + BEAT_FILE_S
                beat_at = now + beat_s
            self._expire(now)
            self._line.wait(max(0.0, min(beat_at, self._due()) - time.monotonic()))
            with self._lock:
                replies, broken = self._line.replies()
            for reply in replies:
                self._settle(reply)
            if broken:
                beat_at = 0.0

    def _look_at_end(self, connected: bool, now: float) -> None:
        """End the calls, once a beat, if nobody will ever answer: the run stops, and its hub has
        gone."""
        if connected or self.incarnation == OBSERVER_INCARNATION:
            self._connected_at = now
        elif now - self._connected_at > _NO_HUB_S and self.run.stop.exists():
            self._fail(
                self._take_calls(), StoppedError("the run stops, and its hub has gone before")
            )

    def _write_beat(self) -> None:
        """Write the beat to a file, for `status` while the hub does not answer. A full disk must
        not end this thread."""
        path = self.run.rendezvous(self.group) / f"beat-{self.member}.json"
        with contextlib.suppress(OSError):
            write_json(
                path,
                {
                    "time": time.time(),
                    "incarnation": self.incarnation,
                    **process_identity(),
                    **self.beat.about(),
                },
            )

    def _beat_call(self, now: float) -> _Call:
        self.beat.passes(now)
        holds = self.shards.holds() if self.shards else []
        args = {"member": self.member, "holds": holds, **self.beat.about()}
        return _Call(Answer(), self._message(0, "beat", args), now + 1.0, now)

    def _due(self) -> float:
        """Time at which the next call has to be given up, on the monotonic clock."""
        with self._lock:
            return (
                min((call.latest for call in self._calls.values()), default=float("inf"))
                + self._line.grace_s
            )

    def _expire(self, now: float) -> None:
        for call in self._take_calls(late=now):
            card = latest_card(self.run, "hub")
            log = self.run.logs("hub", card.incarnation if card else 1)
            text = (
                f"{call.message['op']}: the hub has not answered for {now - call.since:.0f} s; "
                f"open {log}"
            )
            call.future.set_exception(DeadlineError(text))

    def _settle(self, reply: dict[str, Any]) -> None:
        """Hand an answer to who waits for it. One that no controller would give is none, and ends
        nothing."""
        number, kind, error = reply.get("id"), reply.get("kind"), reply.get("error")
        refused = type(kind) is type(error) is str
        if type(number) is not int or not (refused or "result" in reply):
            return
        if refused and kind == "fenced":
            self._fail(self._take_calls(), FencedError(error))
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            self._free(reply.get("result"))
        elif refused:
            call.future.set_exception(_ERRORS.get(kind, RefusedError)(error))
        else:
            call.future.set_result(reply["result"])

    def _free(self, answer: Any) -> None:
        """Take the answer to a beat: shards that nobody needs any more, whether clocks stand, and
        for which disk."""
        if not isinstance(answer, dict):
            return
        self.beat.answered(answer)
        if self.shards and isinstance(names := answer.get("free"), list) and names:
            self.shards.free([name for name in names if isinstance(name, str)])


def then(future: Future[Given], function: Callable[[Given], Made]) -> Future[Made]:
    """A future with ``function`` of the result, or with what went wrong on the way there."""
    after = Answer(getattr(future, "withdraw", None))

    def finish(done: Future) -> None:
        try:
            after.set_result(function(done.result()))
        except Exception as error:
            after.set_exception(error)

    future.add_done_callback(finish)
    return after


def nothing(_: object) -> None:
    """Result of an answer that says no more than that there is one."""
