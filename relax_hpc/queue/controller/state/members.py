"""Incarnations of groups that may speak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import Owner


@dataclass(slots=True)
class Members:
    """The incarnations of each group, by its name."""

    incarnations: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each group that was heard of."""
    ended: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each group that was seen to end."""

    def lowest_allowed(self, owner: Owner) -> int:
        """0 while ``owner`` may speak for its group, else the lowest incarnation that may."""
        group, incarnation = owner
        lowest = max(self.incarnations.get(group, 0), self.ended.get(group, 0) + 1)
        return lowest if incarnation < lowest else 0

    def dump(self) -> Any:
        return self.incarnations, self.ended

    def load(self, values: Any) -> None:
        self.incarnations, self.ended = values
