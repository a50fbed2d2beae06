"""Requests that cannot be answered yet, by topic, so that a change wakes only the requests that it
concerns."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator

from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.topics import ALL
from relax_hpc.queue.records import Cause, Owner

_ANSWERED = 1000
"""Deadlines of answered requests that are kept before the list is cleaned."""


class NotYet(Exception):
    """A request cannot be answered yet.

    ``topic``: of the wait. ``reason``: for people. ``common``: no other request that waits
    for the topic can be answered either. ``cause``: under which the time of the wait is counted.
    """

    def __init__(
        self, topic: str, reason: str = "", common: bool = False, cause: Cause = ("", "")
    ) -> None:
        super().__init__(topic)
        self.topic, self.reason, self.common, self.cause = topic, reason, common, cause


class WaitingRequests:
    """Waiting requests. Within a topic, the request that came first is tried first."""

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
        return itertools.chain.from_iterable(topic.values() for topic in self._topics.values())

    def next_deadline(self) -> float:
        """The next deadline, in seconds of the monotonic clock; infinity without any."""
        while self._deadlines:
            deadline, number, topic = self._deadlines[0]
            if number in self._topics.get(topic, ()):
                return deadline
            heapq.heappop(self._deadlines)
        return float("inf")

    def take_overdue(self) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        overdue, now = [], time.monotonic()
        while self.next_deadline() <= now:
            _, number, topic = heapq.heappop(self._deadlines)
            overdue.append(self._topics[topic].pop(number))
        return overdue

    def drop(self, owner: Owner) -> None:
        """Drop the requests of ``owner``, which has ended."""
        for topic in self._topics.values():
            for number in [number for number, request in topic.items() if request.owner == owner]:
                del topic[number]

    def withdraw(self, key: str) -> None:
        """Drop the request with this ``key``."""
        for topic in self._topics.values():
            for number in [number for number, request in topic.items() if request.key == key]:
                del topic[number]

    def wake(self, woken: set[str], answer: Callable[[Request], bool]) -> None:
        """Try the requests that wait for a topic in ``woken``. ``answer`` returns whether it
        answered a request, and may add topics.

        A request is not tried if an equal one has just failed.
        """
        while woken:
            topics = list(self._topics)
            if ALL not in woken:
                topics = [topic for topic in topics if topic in woken]
            woken.clear()
            for topic in topics:
                self._wake_topic(self._topics[topic], answer)

    def _wake_topic(self, waiting: dict[int, Request], answer: Callable[[Request], bool]) -> None:
        failed: dict[str, Request] = {}
        for number, request in list(waiting.items()):
            content = repr((request.op, request.args))
            if content in failed:
                request.count_wait()
                request.cause = failed[content].cause
                continue
            if answer(request):
                waiting.pop(number, None)
            elif request.common:
                break
            else:
                failed[content] = request
