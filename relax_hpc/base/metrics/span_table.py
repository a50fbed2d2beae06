"""Spans of a process as columns. A long run has millions of spans, too many for one object each.

Functions here compute what `accounting.Account` and `read_spans.merge_intervals` do, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from relax_hpc.base.metrics.accounting import OTHER, Interval, Label, rank_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
NO_STEP = np.iinfo(np.int64).min
"""Number in a column of steps that stands for None."""


@dataclass(frozen=True, slots=True)
class Span:
    """Span of a role's time in [start, end], in wall-clock seconds.

    The clocks of processes of one machine agree exactly.
    """

    role: str
    what: str
    step: int | None
    start: float
    end: float
    peer: str = ""
    """Role or other cause of a wait."""
    reason: str = ""
    lane: str = ""


class SpanKind(NamedTuple):
    """Texts that many spans have in common."""

    role: str
    what: str
    peer: str = ""
    reason: str = ""
    lane: str = ""

    @property
    def label(self) -> Label:
        return Label(self.what, self.peer, self.reason)


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable(Sequence[Span]):
    """Spans in the order in which they were written."""

    kinds: Sequence[SpanKind]
    kind: Integers
    """[spans] Index into ``kinds``."""
    step: Integers
    """[spans] NO_STEP: none."""
    start: Floats
    end: Floats

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> SpanTable:
        """Columns of single spans."""
        if isinstance(spans, cls):
            return spans
        numbers: dict[SpanKind, int] = {}
        rows = list[tuple[int, int, float, float]]()
        for span in spans:
            kind = SpanKind(span.role, span.what, span.peer, span.reason, span.lane)
            step = NO_STEP if span.step is None else span.step
            rows.append((numbers.setdefault(kind, len(numbers)), step, span.start, span.end))
        kind_column, steps, starts, ends = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            list(numbers),
            np.array(kind_column, np.int64),
            np.array(steps, np.int64),
            np.array(starts, np.float64),
            np.array(ends, np.float64),
        )

    @classmethod
    def join(cls, tables: Sequence[SpanTable]) -> SpanTable:
        """All spans of ``tables``, in order."""
        if len(tables) == 1:
            return tables[0]
        numbers: dict[SpanKind, int] = {}
        kinds = [np.empty(0, np.int64)]
        for table in tables:
            new = [numbers.setdefault(kind, len(numbers)) for kind in table.kinds]
            kinds.append(np.array(new, np.int64)[table.kind])
        columns = [
            np.concatenate([getattr(table, name) for table in tables] or [np.empty(0)])
            for name in ("step", "start", "end")
        ]
        return cls(list(numbers), np.concatenate(kinds), *columns)

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...

    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        kind, step = self.kinds[self.kind[index]], int(self.step[index])
        return Span(
            kind.role,
            kind.what,
            None if step == NO_STEP else step,
            float(self.start[index]),
            float(self.end[index]),
            kind.peer,
            kind.reason,
            kind.lane,
        )

    def __iter__(self) -> Iterator[Span]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    def part(self, start: int, end: int, offset: float) -> SpanTable:
        """Spans ``start`` to ``end``, with ``offset`` added to their times."""
        return SpanTable(
            self.kinds,
            self.kind[start:end],
            self.step[start:end],
            self.start[start:end] + offset,
            self.end[start:end] + offset,
        )

    def select(self, rows: NDArray[np.bool_]) -> SpanTable:
        """Spans whose entry in ``rows`` [spans] is true."""
        return SpanTable(
            self.kinds, self.kind[rows], self.step[rows], self.start[rows], self.end[rows]
        )

    def of_kinds(self, whats: Iterable[str]) -> SpanTable:
        """Spans of these kinds of work."""
        names = set(whats)
        return self.select(self._rows_of([kind.what in names for kind in self.kinds]))

    def in_lane(self, lane: str) -> SpanTable:
        """Spans of a lane, and those without a lane."""
        return self.select(self._rows_of([kind.lane in (lane, "") for kind in self.kinds]))

    def with_step(self) -> SpanTable:
        """Spans that belong to a step."""
        return self.select(self.step != NO_STEP)

    @property
    def lanes(self) -> list[str]:
        """Sorted names of the lanes."""
        used = np.unique(self.kind).tolist()
        return sorted({self.kinds[number].lane for number in used} - {""})

    @property
    def labels(self) -> tuple[list[Label], Integers]:
        """Distinct labels, and the index of the label of each span."""
        numbers: dict[Label, int] = {}
        by_kind = [numbers.setdefault(kind.label, len(numbers)) for kind in self.kinds]
        return list(numbers), np.array(by_kind, np.int64)[self.kind]

    def merged(self) -> Merged:
        """The points that any span covers."""
        return Merged.from_intervals(self.start, self.end)

    def _rows_of(self, is_kind: list[bool]) -> NDArray[np.bool_]:
        return np.array(is_kind, np.bool_)[self.kind]


@dataclass(frozen=True, slots=True)
class Merged:
    """Disjoint intervals in ascending order."""

    starts: Floats
    ends: Floats

    @classmethod
    def from_intervals(cls, starts: Floats, ends: Floats) -> Merged:
        """Disjoint intervals with the same points. Empty and reversed ones are left out."""
        is_valid = ends > starts
        order = np.lexsort((ends[is_valid], starts[is_valid]))
        starts, reached = starts[is_valid][order], np.maximum.accumulate(ends[is_valid][order])
        if not len(starts):
            return cls(starts, reached)
        is_first = np.concatenate(([True], starts[1:] > reached[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        return cls(starts[is_first], reached[is_last])

    def covered(self, starts: Floats, ends: Floats) -> Floats:
        """Seconds of each interval [starts, ends] that are covered."""
        return self._covered_before(ends) - self._covered_before(starts)

    def _covered_before(self, times: Floats) -> Floats:
        if not len(self.starts):
            return np.zeros(len(times))
        lengths = np.concatenate(([0.0], np.cumsum(self.ends - self.starts)))
        index = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(index - 1, 0)
        within = np.minimum(times, self.ends[last]) - self.starts[last]
        return np.where(index > 0, lengths[last] + within, 0.0)


def seconds_by_label(
    labels: Sequence[Label], label: Integers, starts: Floats, ends: Floats, window: Interval
) -> dict[Label, float]:
    """The seconds of ``window`` by label, as an `Account` counts them. Seconds that no span covers
    are labelled OTHER.

    ``labels``: distinct labels. ``label``: [spans] index of the label of each span.
    """
    start, end = window[0], max(window)
    lows, highs = np.maximum(starts, window[0]), np.minimum(ends, window[1])
    is_inside = highs > lows
    lows, highs, label = lows[is_inside], highs[is_inside], label[is_inside]
    if not len(lows):
        return {Label(OTHER): end - start} if end > start else {}
    # The order of labels decides between edges at the same time.
    position = np.argsort(np.array(sorted(range(len(labels)), key=labels.__getitem__)))
    times = np.concatenate((lows, highs))
    is_begin = np.repeat([True, False], len(lows))
    edge_labels = np.tile(label, 2)
    order = np.lexsort((position[edge_labels], is_begin, times))
    times, is_begin, edge_labels = times[order], is_begin[order], edge_labels[order]
    winner = _present_labels(labels, edge_labels, is_begin)
    lengths = np.diff(times, append=end)
    seconds = dict[Label, float]()
    other_s = float(times[0] - start)
    for number in np.unique(winner).tolist():
        spent = float(lengths[winner == number].sum())
        if number < 0:
            other_s += spent
        elif spent:
            seconds[labels[number]] = seconds.get(labels[number], 0.0) + spent
    if other_s:
        seconds[Label(OTHER)] = seconds.get(Label(OTHER), 0.0) + other_s
    return seconds


def _present_labels(
    labels: Sequence[Label], edge_labels: Integers, is_begin: NDArray[np.bool_]
) -> Integers:
    """Index of the label that each second after an edge has; -1: none.

    Of the labels that run, the one with the first rank counts, and of those the one that has run
    without a pause for longest.
    """
    count = len(edge_labels)
    best = np.full(count, np.iinfo(np.int64).max)
    winner = np.full(count, -1)
    for number, label in enumerate(labels):
        own_edges = np.flatnonzero(edge_labels == number)
        running = np.cumsum(np.where(is_begin[own_edges], 1, -1))
        # It runs from an edge that ends a pause to the edge that begins the next one.
        firsts = np.flatnonzero(is_begin[own_edges] & (running == 1))
        starts, ends = own_edges[firsts], own_edges[running == 0]
        if not len(starts):
            continue
        lengths = ends - starts
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        covered = np.repeat(starts, lengths) + offsets
        key = rank_of(label) * count + np.repeat(starts, lengths)
        is_better = key < best[covered]
        covered = covered[is_better]
        best[covered] = key[is_better]
        winner[covered] = number
    return winner
