"""One line of the benchmark's table: our figure beside the peer's and a memcpy's, with its target
and its limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = (
    "what",
    "unit",
    "queue",
    "[rounds]",
    "peer",
    "[rounds]",
    "memcpy",
    "/ peer",
    "/ memcpy",
    "target",
    "",
)
_WIDTHS = (40, 9, 7, 20, 7, 20, 7, 6, 8, 30, 6)
"""Known before, as lines are printed one by one."""


@dataclass(frozen=True, slots=True)
class Line:
    """Medians, in ``unit``. ``targets``: of `ratios`, or of `ours` itself, the least ("least") or
    most ("most")."""

    what: str
    unit: str
    ours: float
    peer: float | None = None
    memcpy: float | None = None
    targets: dict[str, float] = field(default_factory=dict)
    """By "peer" and "memcpy" (at least so many times as good), "least" and "most" (of ours)."""
    limit: str = ""
    """What the figure cannot be better than, and why."""
    less_is_better: bool = False
    rounds: Sequence[float] = ()
    """What every round gave, of which `ours` is the median; so `peer_rounds`."""
    peer_rounds: Sequence[float] = ()

    def ratios(self) -> dict[str, float]:
        """How many times as good ours is as each of the others."""
        others = {"peer": self.peer, "memcpy": self.memcpy}
        known = {name: value for name, value in others.items() if value}
        return {
            name: value / self.ours if self.less_is_better else self.ours / value
            for name, value in known.items()
        }

    def met(self) -> bool | None:
        """Whether all targets that can be compared are met; None: there is none."""
        found = self.ratios() | {"least": self.ours, "most": -self.ours}
        wanted = self.targets | ({"most": -self.targets["most"]} if "most" in self.targets else {})
        known = [found[name] >= value for name, value in wanted.items() if name in found]
        return all(known) if known else None

    def target(self) -> str:
        signs = {
            "peer": ">= {} x peer",
            "memcpy": ">= {} x memcpy",
            "least": ">= {}",
            "most": "<= {}",
        }
        return ", ".join(signs[name].format(number(value)) for name, value in self.targets.items())

    def cells(self) -> list[str]:
        ratios, met = self.ratios(), self.met()
        ours, theirs = (
            (number(self.ours), spread(self.rounds)),
            (number(self.peer), spread(self.peer_rounds)),
        )
        others = [
            number(value) for value in (self.memcpy, ratios.get("peer"), ratios.get("memcpy"))
        ]
        word = {True: "met", False: "MISSED", None: ""}[met]
        return [self.what, self.unit, *ours, *theirs, *others, self.target() or "-", word]

    def record(self) -> dict[str, Any]:
        names = ("what", "unit", "ours", "peer", "memcpy", "limit", "targets")
        about = {name: getattr(self, name) for name in names}
        rounds = {"rounds": list(self.rounds), "peer_rounds": list(self.peer_rounds)}
        return about | rounds | {"ratios": self.ratios(), "met": self.met()}

    def text(self) -> str:
        """The line, and under it what its limit is."""
        return _text(self.cells()) + (f"\n    limit: {self.limit}" if self.limit else "")


def number(value: float | None) -> str:
    """Three digits, or more before the point.

    >>> number(0.01234), number(123456.7), number(2.0), number(None)
    ('0.0123', '123,457', '2', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of all do not exceed.

    >>> quantile([3, 1, 2, 4], 0.5), quantile([3, 1, 2, 4], 0.99)
    (2, 4)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def spread(values: Sequence[float]) -> str:
    """The least and the most of several rounds.

    >>> spread([2.0, 1.0, 3.0]), spread([1.0])
    ('[1 to 3]', '')
    """
    return f"[{number(min(values))} to {number(max(values))}]" if len(values) > 1 else ""


def head() -> str:
    """The names of the columns."""
    return _text(HEAD)


def _text(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()
