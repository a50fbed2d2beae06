"""Context of a role: its run, its rank in the group, its connection to the queue, and its
deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.log_rotation import LogRotator
from relax_hpc.base.metrics.resource_sampler import ResourceSampler
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.node_files import model_directory
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.queue.client import QueueClient

HUB = ("hub", "an answer of the queue")
"""Cause of a wait if the queue names no other role."""
NEWS = ("actor", "a newer version")
TURN = ("actor", "its turn on the devices")
END = [("actor", "the end of the run", math.inf)]
"""Cause of a wait that ended without a result, see `OpenSpan.set_causes`."""


@dataclass(slots=True)
class Context:
    """One rank of one role. Only the leader has a `client`; it is None on other ranks."""

    run: RunDir
    config: Config
    group: str
    role: str
    incarnation: int
    world: World
    client: QueueClient | None
    spans: Spans
    stop: SignalFlag
    """Flag that is set when the process has to end."""
    deadline: float | None = None
    """Wall-clock time at which the allocation ends; None: it has no end."""
    log_rotator: LogRotator | None = None
    """Truncates the logs of this process and of its children."""
    resources: ResourceSampler | None = None
    """Sampler of this rank's processes, whose newest values are in every report."""
    has_worked: bool = False
    """Whether this rank has trained a step. The hub knows what other roles have done."""

    @property
    def model(self) -> Path:
        """Model directory from which this process reads version 0 and the tokenizer."""
        return model_directory(self.run, self.config)

    @property
    def logs(self) -> Path:
        """Folder of the logs of this incarnation of the group."""
        return self.run.logs(self.group, self.incarnation)

    def report_phase(self, phase: str) -> None:
        """Report what this process does before its work begins, for people; empty: it has begun."""
        self.spans.enter_stage(phase)
        if self.client:
            self.client.beat.set_phase(phase)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Send metrics of ``step`` and the seconds by kind since the last report, without waiting
        for an answer."""
        assert self.client is not None
        if self.resources:
            values = values | self.resources.metrics()
        self.client.status.report(self.role, step, values, self.spans.take())
