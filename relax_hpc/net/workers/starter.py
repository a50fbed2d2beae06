"""Starter of workers. Several failed starts in a row are an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.net.workers.process import Message, Worker, WorkerEnded

MAX_FAILED_STARTS = 3
"""Failed starts in a row, at most."""


class Starter:
    """Starts workers of one kind of work."""

    def __init__(
        self, name: str, module: str, setup: Message, read_answer: Callable[[Message], Any]
    ) -> None:
        """``name``: name of the work in messages, such as `reward maths`. The other arguments are
        those of `Worker.start`."""
        self._name, self._arguments = name, (module, setup, read_answer)
        self._failed = 0

    async def start(self) -> Worker:
        """A new worker. ConfigError: it cannot do this work. RelaxError: too many starts in a row
        have failed."""
        while True:
            try:
                worker = await Worker.start(*self._arguments)
            except WorkerEnded as ended:
                self._failed += 1
                if self._failed >= MAX_FAILED_STARTS:
                    text = (
                        f"a worker for {self._name} {ended} while it started, {self._failed} "
                        "times in a row"
                    )
                    raise RelaxError(f"{text}; its output is in the log of this role") from ended
            else:
                self._failed = 0
                return worker
