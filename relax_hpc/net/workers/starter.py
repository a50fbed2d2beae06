"""Starts the workers of one kind of work, as long as that comes to something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.net.workers.process import Message, Worker, WorkerEnded

MOST_STARTS = 3
"""Starts in a row that may come to nothing."""


class Starter:
    """Starter of any number of workers."""

    def __init__(
        self, name: str, module: str, about: Message, read: Callable[[Message], Any]
    ) -> None:
        """``name``: of the work, in messages, such as `reward maths`; the others as `Worker.start`
        has them."""
        self._name, self._worker = name, (module, about, read)
        self._failed = 0

    async def start(self) -> Worker:
        """A worker. ConfigError: it cannot do this work. RelaxError: too many in a row did not
        begin."""
        while True:
            try:
                worker = await Worker.start(*self._worker)
            except WorkerEnded as ended:
                self._failed += 1
                if self._failed >= MOST_STARTS:
                    text = (
                        f"a worker for {self._name} {ended} while it started, {self._failed} "
                        "times in a row"
                    )
                    raise RelaxError(
                        f"{text}; what it printed is in the log of this role"
                    ) from ended
            else:
                self._failed = 0
                return worker
