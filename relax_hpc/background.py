"""A thread that does one job after the other beside everything else, and whose failure is heard of."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Background(Generic[Job]):
    """Jobs are done in the order in which they come. One that raises is the last: `check` raises the same from then on.

    >>> work = Background("letters", print)
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
        """Jobs that are not done."""
        with self._changed:
            return self._pending

    def put(self, job: Job) -> None:
        """Raises what an earlier job has raised."""
        self.check()
        with self._changed:
            self._pending += 1
        self._jobs.put(job)

    def wait(self, timeout_s: float, most: int = 0) -> bool:
        """Until at most so many jobs are pending; False if that takes longer. Raises what a job has raised."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure or self._pending <= most, timeout_s)
        self.check()
        return bool(done)

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
            say(f"{self._name}: ends with {error!r}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()


def say(text: str) -> None:
    """A line for the log, if its disk is not the one that is full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
