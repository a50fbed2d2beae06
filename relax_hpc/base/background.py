"""A thread that does one job after the other beside everything else, and whose failure is heard
of."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from relax_hpc.base.terminal_text import log_entry

Job = TypeVar("Job")
T = TypeVar("T")
_LOOK_S = 1.0


class BackgroundThread(Generic[Job]):
    """Jobs are done in the order in which they come. One that raises is the last: `check` raises
    the same from then on.

    >>> work = BackgroundThread("letters", print)
    >>> work.put("a")
    >>> work.wait(5.0)
    a
    True
    """

    def __init__(self, name: str, act: Callable[[Job], object], device: int | None = None) -> None:
        """``device``: the GPU that the thread works with, which is another's for a new thread."""
        self._name, self._act, self._device = name, act, device
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def pending(self) -> int:
        """Number of jobs that are not done."""
        with self._changed:
            return self._pending

    def put(self, job: Job) -> None:
        """Add a job. Raises what an earlier job has raised."""
        self.check()
        with self._changed:
            self._pending += 1
        self._jobs.put(job)

    def wait(
        self, timeout_s: float, most: int = 0, stands: Callable[[], object] = lambda: False
    ) -> bool:
        """Wait until at most ``most`` jobs are pending; False if that takes longer, not counting
        times of ``stands()``.

        Raises what a job has raised.
        """
        left_s = timeout_s
        while not (done := self._is_down_to(most, min(max(left_s, 0.0), _LOOK_S))) and left_s > 0:
            left_s -= 0.0 if stands() else _LOOK_S
        self.check()
        return done

    def _is_down_to(self, most: int, timeout_s: float) -> bool:
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: self._failure or self._pending <= most, timeout_s)
            )

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            if self._device is not None:
                import torch

                torch.cuda.set_device(self._device)
            while True:
                self._act(self._jobs.get())
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()
        except BaseException as error:
            print_log_line(f"{self._name}: ends with {error!r}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()


def run_in_thread(act: Callable[[], T]) -> Future[T]:
    """Future of what ``act`` returns or raises, in a thread of its own, which keeps no process from
    ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="in_thread", daemon=True).start()
    return future


def print_log_line(text: str) -> None:
    """Print a line to the log, if its disk is not the one that is full."""
    with contextlib.suppress(OSError):
        print(log_entry(text), file=sys.stderr, flush=True)
