"""Numbers of accepted and dropped rows, and of faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """Counts since the run began."""

    accepted: int = 0
    """Rows that were accepted. A row that is accepted again counts again."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that were dropped, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Faults that concern no ticket, counted by `<what>/<reason>`."""

    def dump(self) -> Any:
        return self.accepted, dict(self.dropped), dict(self.noted)

    def load(self, values: Any) -> None:
        self.accepted, dropped, noted = values
        self.dropped, self.noted = Counter(dropped), Counter(noted)
