"""Memory that the processes of one role need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
Sizes = Mapping[str, float]
"""Bytes by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one role on its fullest GPU, and on one node."""

    role: str
    group: str
    split: str
    """Description of how ranks split the model."""
    gpus: int
    """GPUs of all its processes."""
    resident: Sizes
    """Bytes on a GPU in all phases."""
    phases: Mapping[str, Sizes] = field(default_factory=dict)
    """Additional bytes on a GPU by phase (such as backward or update); phases do not overlap."""
    pinned: Sizes = field(default_factory=dict)
    """Bytes of page-locked or shared host memory of all its processes on a node."""
    host: Sizes = field(default_factory=dict)
    """Bytes of other host memory of all its processes on a node."""
    note: str = ""
    """Comment for the table."""
    lack: str = ""
    """Reason why the role cannot work although its memory fits, or an empty text."""

    @property
    def worst_phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()), default="")

    @property
    def device_sizes(self) -> dict[str, float]:
        """Bytes on the GPU in the worst phase, by purpose."""
        return {**self.resident, **self.phases.get(self.worst_phase, {})}

    @property
    def peak(self) -> float:
        """Bytes on the GPU in the worst phase."""
        return sum(self.device_sizes.values())
