"""Context of a role: its run, its place in the group, its connection to the queue, and its
clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.log_rotation import LogRotator
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.node_files import model_directory
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.queue.client import QueueClient

HUB = ("hub", "an answer of the queue")
"""Cause of a wait where the queue names nobody else."""
NEWS = ("actor", "a newer version")
TURN = ("actor", "its turn on the devices")
END = [("actor", "the end of the run", math.inf)]
"""Cause of a wait that nothing came of, see `OpenSpan.because`."""


@dataclass(slots=True)
class Context:
    """One rank of one role. `client` is the leader's; other ranks have None."""

    run: RunDir
    config: Config
    group: str
    role: str
    incarnation: int
    world: World
    client: QueueClient | None
    spans: Spans
    stop: SignalFlag
    """Flag that is set when the process is asked to end."""
    deadline: float | None = None
    """Time at which the allocation ends, of the wall clock; None: it does not."""
    kept_short: LogRotator | None = None
    """Keeper that cuts the logs of this process, and of those that it starts."""
    has_worked: bool = False
    """Whether this rank has trained a step. What else a role has done is known to the hub."""

    @property
    def model(self) -> Path:
        """Model directory from which this process reads version 0 and the tokenizer."""
        return model_directory(self.run, self.config)

    @property
    def logs(self) -> Path:
        """Folder of the logs of this incarnation of the group."""
        return self.run.logs(self.group, self.incarnation)

    def says(self, what: str) -> None:
        """Tell people what this process is at before it begins to work; empty: it has begun."""
        if self.client:
            self.client.beat.at_work(what)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Send metrics of ``step`` and the seconds spent by kind since the last report; nobody
        waits for it."""
        assert self.client is not None
        self.client.status.report(self.role, step, values, self.spans.take())
