"""A thread that does one job after another in the background and reports its failure."""

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
_CHECK_S = 1.0
"""Seconds between two checks of a wait whether its clock is paused."""


class BackgroundThread(Generic[Job]):
    """Does jobs in the order in which they were added.

    If a job raises, the thread ends, and `check`, `put` and `wait` raise the same error.

    >>> work = BackgroundThread("letters", print)
    >>> work.put("a")
    >>> work.wait(5.0)
    a
    True
    """

    def __init__(self, name: str, act: Callable[[Job], object], device: int | None = None) -> None:
        """``device``: number of the GPU that the thread works with.

        torch keeps the current device for each thread, and a new thread begins with device 0.
        """
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
        """Add a job. Raises the error of an earlier job."""
        self.check()
        with self._changed:
            self._pending += 1
        self._jobs.put(job)

    def wait(
        self,
        timeout_s: float,
        max_pending: int = 0,
        is_paused: Callable[[], object] = lambda: False,
    ) -> bool:
        """Wait until at most ``max_pending`` jobs are pending. False: that takes longer.

        Time does not count while ``is_paused()``. Raises the error of a job.
        """
        remaining_s = timeout_s
        while True:
            done = self._wait_for_pending(max_pending, min(max(remaining_s, 0.0), _CHECK_S))
            if done or remaining_s <= 0:
                break
            if not is_paused():
                remaining_s -= _CHECK_S
        self.check()
        return done

    def _wait_for_pending(self, max_pending: int, timeout_s: float) -> bool:
        """Whether at most ``max_pending`` jobs are pending, or one has failed, in time."""
        with self._changed:
            return bool(
                self._changed.wait_for(
                    lambda: self._failure or self._pending <= max_pending, timeout_s
                )
            )

    def check(self) -> None:
        """Raise the error of a job, if one has failed."""
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
    """Future of the result or the error of ``act``, which runs in a new thread.

    The thread is a daemon: the process can end while it runs.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="run_in_thread", daemon=True).start()
    return future


def print_log_line(text: str) -> None:
    """Print a line to standard error. If its disk is full, the line is lost."""
    with contextlib.suppress(OSError):
        print(log_entry(text), file=sys.stderr, flush=True)
