"""What the processes of one role take of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
Parts = Mapping[str, float]
"""What for -> bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one role on one GPU, the one with the most, and on one node."""

    role: str
    group: str
    split: str
    """How the model is cut, for people."""
    gpus: int
    """Of all its processes."""
    resident: Parts
    """On a GPU, always."""
    moments: Mapping[str, Parts] = field(default_factory=dict)
    """On a GPU beside it, by what is being done; one at a time."""
    pinned: Parts = field(default_factory=dict)
    """In host memory, page-locked or shared, of all its processes on a node."""
    host: Parts = field(default_factory=dict)
    """Other host memory of all its processes on a node."""
    note: str = ""
    """What the memory is good for."""
    lack: str = ""
    """Why it would do nothing with it though it fits; empty: it would."""

    @property
    def worst(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()), default="")

    @property
    def device(self) -> dict[str, float]:
        """Parts on the GPU at the worst moment."""
        return {**self.resident, **self.moments.get(self.worst, {})}

    @property
    def peak(self) -> float:
        """Bytes on the GPU at the worst moment."""
        return sum(self.device.values())
