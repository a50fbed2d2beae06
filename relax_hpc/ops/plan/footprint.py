"""Memory that the processes of one role take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
Parts = Mapping[str, float]
"""Bytes by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Footprint of one role: memory on one GPU, the one with the most, and on one node."""

    role: str
    group: str
    split: str
    """Split of the model over ranks, for people."""
    gpus: int
    """GPUs of all its processes."""
    resident: Parts
    """Bytes that are on a GPU always."""
    moments: Mapping[str, Parts] = field(default_factory=dict)
    """Bytes on a GPU beside these, by what is being done; one at a time."""
    pinned: Parts = field(default_factory=dict)
    """Bytes of page-locked or shared host memory of all its processes on a node."""
    host: Parts = field(default_factory=dict)
    """Bytes of other host memory of all its processes on a node."""
    note: str = ""
    """Use of the memory, for people."""
    lack: str = ""
    """Reason why the role could not work though it fits; empty: it could."""

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
