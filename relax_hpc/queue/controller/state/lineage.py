"""The surviving versions. If an actor resumes at an earlier step, later versions are rolled
back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.versions import Version

_MAX_ORIGINS = 4096


@dataclass(slots=True)
class Lineage:
    """Steps at which the incarnations of the actor resumed."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    """Incarnation and the step at which it resumed, the latest last."""
    _origins: dict[tuple[int, ...], tuple[bool, int]] = field(default_factory=dict, compare=False)
    """Results of `origin`."""

    @property
    def incarnation(self) -> int:
        """Incarnation that trains; 0: none has started."""
        return self.starts[-1][0] if self.starts else 0

    def resume(self, incarnation: int, step: int) -> None:
        self.starts.append((incarnation, step))
        self._origins.clear()

    def __contains__(self, version: Version) -> bool:
        """Whether ``version`` survives: its incarnation trained, and no later incarnation resumed
        below its number."""
        incarnations = [incarnation for incarnation, _ in self.starts]
        if version.incarnation not in incarnations:
            return False
        later = self.starts[incarnations.index(version.incarnation) + 1 :]
        return all(version.number <= start for _, start in later)

    def origin(self, codes: tuple[int, ...]) -> tuple[bool, int]:
        """Whether all of these encoded versions survive, and the lowest of their numbers (-1 if
        ``codes`` is empty)."""
        if codes not in self._origins:
            if len(self._origins) >= _MAX_ORIGINS:
                self._origins.clear()
            versions = [Version.decode(code) for code in codes]
            lowest = min((version.number for version in versions), default=-1)
            self._origins[codes] = all(version in self for version in versions), lowest
        return self._origins[codes]

    def dump(self) -> Any:
        return self.starts

    def load(self, values: Any) -> None:
        self.starts = [(incarnation, step) for incarnation, step in values]
        self._origins.clear()
