"""Requests that cannot be answered yet, by what they wait for, so that a change wakes only those
that it concerns."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator

from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.topics import ALL
from relax_hpc.queue.records import Cause, Owner

_ANSWERED = 1000
"""Deadlines of answered requests, about, that are kept until a look at all of them pays."""


class NotYet(Exception):
    """A request cannot be answered yet: what it waits for, why in words, and whether nobody who
    waits for it can be; and the `cause` that its time is put down to."""

    def __init__(
        self, topic: str, why: str = "", common: bool = False, cause: Cause = ("", "")
    ) -> None:
        super().__init__(topic)
        self.topic, self.why, self.common, self.cause = topic, why, common, cause


class WaitingRequests:
    """Requests that are answered once they can be; within a topic those first that came first."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[int, Request]] = {}
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int, str]] = []

    def add(self, request: Request) -> None:
        number = next(self._numbers)
        self._topics.setdefault(request.topic, {})[number] = request
        if len(self._deadlines) > _ANSWERED + 2 * sum(map(len, self._topics.values())):
            self._deadlines = [
                entry for entry in self._deadlines if entry[1] in self._topics.get(entry[2], ())
            ]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (request.deadline, number, request.topic))

    def __iter__(self) -> Iterator[Request]:
        return (request for topic in self._topics.values() for request in topic.values())

    def next_deadline(self) -> float:
        """The first deadline, seconds of the monotonic clock; infinity without any."""
        while self._deadlines and self._deadlines[0][1] not in self._topics.get(
            self._deadlines[0][2], ()
        ):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def take_overdue(self) -> list[Request]:
        """Requests whose deadline has passed; they wait no more."""
        overdue, now = [], time.monotonic()
        while self.next_deadline() <= now:
            _, number, topic = heapq.heappop(self._deadlines)
            overdue.append(self._topics[topic].pop(number))
        return overdue

    def drop(self, owner: Owner) -> None:
        """Drop the requests of ``owner``: nobody waits for their answers any more."""
        for topic in self._topics.values():
            for number in [number for number, request in topic.items() if request.owner == owner]:
                del topic[number]

    def withdraw(self, key: str) -> None:
        """Drop the request with this ``key``."""
        for topic in self._topics.values():
            for number in [number for number, request in topic.items() if request.key == key]:
                del topic[number]

    def wake(self, woken: set[str], answer: Callable[[Request], bool]) -> None:
        """Try the requests that wait for what is in ``woken``: ``answer`` says whether it could,
        and may add to it.

        What cannot succeed, because one like it just failed, is not tried.
        """
        while woken:
            topics = (
                list(self._topics)
                if ALL in woken
                else [topic for topic in self._topics if topic in woken]
            )
            woken.clear()
            for topic in topics:
                self._wake_topic(self._topics[topic], answer)

    def _wake_topic(self, waiting: dict[int, Request], answer: Callable[[Request], bool]) -> None:
        failed: dict[str, Request] = {}
        for number, request in list(waiting.items()):
            like = repr((request.op, request.args))
            if like in failed:
                request.put_down()
                request.cause = failed[like].cause
                continue
            if answer(request):
                waiting.pop(number, None)
            elif request.common:
                break
            else:
                failed[like] = request
