"""Plan of a replay: the checkpoint to begin with, and the windows of each step. It is a file in the
folder of the replay, from which all ranks read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.queue.client import Claim

_PLAN, _RESULTS = "plan.msgpack", "steps.msgpack"


@dataclass(frozen=True, slots=True)
class ReplayDir(RunDir):
    """Folder of a replay: its own logs and weights, with the rows, the model and the checkpoints of
    the run ``source``."""

    source: Path

    @property
    def _source(self) -> RunDir:
        return RunDir(self.source)

    @property
    def model(self) -> Path:
        return self._source.model

    @property
    def data(self) -> Path:
        return self._source.data

    @property
    def shards(self) -> Path:
        return self._source.shards

    @property
    def media(self) -> Path:
        return self._source.media

    @property
    def checkpoints(self) -> Path:
        return self._source.checkpoints

    def write_steps(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Write the metrics of the replayed steps so far."""
        write_atomic(self.root / _RESULTS, msgpack.packb(dict(values)))

    def read_steps(self) -> dict[int, dict[str, float]]:
        """Metrics of the replayed steps; empty before the first one."""
        path = self.root / _RESULTS
        if not path.exists():
            return {}
        return msgpack.unpackb(path.read_bytes(), strict_map_key=False)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Steps that the ranks of a replay train, and their start."""

    source: str
    """Run directory."""
    group: str
    """Group of the policy."""
    first: int
    """First step to train."""
    checkpoint: Mapping[str, Any]
    """{name, digest} of the checkpoint before step ``first``; empty: the weights of version 0."""
    steps: Sequence[Sequence[Claim]]
    """Windows of each step from ``first`` on."""

    @property
    def last(self) -> int:
        """Last step to train."""
        return self.first + len(self.steps) - 1

    def write(self, folder: Path) -> None:
        """Write the plan to ``folder``."""
        content = {
            "source": self.source,
            "group": self.group,
            "first": self.first,
            "checkpoint": dict(self.checkpoint),
            "steps": [[claim.message() for claim in step] for step in self.steps],
        }
        write_atomic(folder / _PLAN, msgpack.packb(content))

    @classmethod
    def read(cls, folder: Path) -> ReplayPlan:
        """The plan in ``folder``."""
        content = msgpack.unpackb((folder / _PLAN).read_bytes())
        steps = [list(map(Claim.from_message, step)) for step in content.pop("steps")]
        return cls(**content, steps=steps)
