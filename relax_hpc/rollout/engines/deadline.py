"""The timeout of requests to an engine that sends no output."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class SilenceTimeout:
    """Cancels requests to an engine that has sent no output to any request for ``seconds``.

    The length of a response does not matter, nor does the time for which it is queued in the engine
    behind others. For one event loop. One timer serves all requests, so that the cost of an output
    does not depend on the number of requests.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started: dict[RequestTimeout, float] = {}
        """Requests in flight, the oldest first -> start time; seconds of the loop's clock."""
        self._last_output = -math.inf
        self._suspensions = 0
        self._timer: asyncio.TimerHandle | None = None

    def for_request(self) -> RequestTimeout:
        """Context manager for one request. It raises TimeoutError after too long a silence."""
        return RequestTimeout(self)

    def note_output(self) -> None:
        """Record that the engine has sent output."""
        self._last_output = asyncio.get_running_loop().time()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not time out while the body runs: the engine is not expected to send output."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1
            self.note_output()
            self._set_timer()

    def add(self, request: RequestTimeout) -> None:
        """Start the timeout of a ``request``."""
        self._started[request] = asyncio.get_running_loop().time()
        self._set_timer()

    def remove(self, request: RequestTimeout) -> None:
        """Stop the timeout of a ``request`` that has ended."""
        self._started.pop(request, None)
        if not self._started and self._timer:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and self._started and not self._suspensions:
            oldest = next(iter(self._started.values()))
            due = max(oldest, self._last_output) + self.seconds
            self._timer = asyncio.get_running_loop().call_at(due, self._expire_silent)

    def _expire_silent(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        if not self._suspensions:
            silent = [
                request
                for request, started in self._started.items()
                if max(started, self._last_output) + self.seconds <= now
            ]
            for request in silent:
                del self._started[request]
                request.expire()
        self._set_timer()


class RequestTimeout:
    """See `SilenceTimeout.for_request`. It works like `asyncio.timeout` but is cheaper, because
    each response of an engine needs one."""

    __slots__ = ("_cancellations_before", "_expired", "_silence", "_task")

    def __init__(self, silence: SilenceTimeout) -> None:
        self._silence, self._expired = silence, False
        self._task: asyncio.Task[Any]
        self._cancellations_before = 0
        """Cancellations of the task that were requested before this context was entered."""

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancellations_before = task, task.cancelling()
        self._silence.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._silence.remove(self)
        # As in asyncio.timeout: a cancellation that another caller requested stays one.
        if (
            self._expired
            and self._task.uncancel() <= self._cancellations_before
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the request."""
        self._expired = True
        self._task.cancel()
