"""One line of the benchmark's table: our figure beside the peer's and a memcpy's, with its target and its limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = ("what", "unit", "queue", "peer", "memcpy", "/ peer", "/ memcpy", "target", "")


@dataclass(frozen=True, slots=True)
class Line:
    """Medians, in ``unit``. ``targets``: of `ratios`, or of `ours` itself, the least ("least") or most ("most")."""

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

    def ratios(self) -> dict[str, float]:
        """How many times as good ours is as each of the others."""
        others = {"peer": self.peer, "memcpy": self.memcpy}
        known = {name: value for name, value in others.items() if value}
        return {name: value / self.ours if self.less_is_better else self.ours / value for name, value in known.items()}

    def met(self) -> bool | None:
        """Whether all targets that can be compared are met; None: there is none."""
        found = self.ratios() | {"least": self.ours, "most": -self.ours}
        wanted = self.targets | ({"most": -self.targets["most"]} if "most" in self.targets else {})
        known = [found[name] >= value for name, value in wanted.items() if name in found]
        return all(known) if known else None

    def target(self) -> str:
        signs = {"peer": ">= {} x peer", "memcpy": ">= {} x memcpy", "least": ">= {}", "most": "<= {}"}
        return ", ".join(signs[name].format(number(value)) for name, value in self.targets.items())

    def cells(self) -> list[str]:
        ratios, met = self.ratios(), self.met()
        values = [number(value) for value in (self.ours, self.peer, self.memcpy, ratios.get("peer"))]
        word = {True: "met", False: "MISSED", None: ""}[met]
        return [self.what, self.unit, *values, number(ratios.get("memcpy")), self.target() or "-", word]

    def record(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("what", "unit", "ours", "peer", "memcpy", "limit", "targets")}
        return about | {"ratios": self.ratios(), "met": self.met()}


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


def table(lines: Sequence[Line]) -> list[str]:
    """Head, lines, and under each what its limit is."""
    rows = [list(HEAD), *(line.cells() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    limits = [f"    limit: {line.limit}" if line.limit else "" for line in lines]
    pairs = zip(texts[1:], limits, strict=True)
    return [texts[0], *(text for pair in pairs for text in pair if text)]
