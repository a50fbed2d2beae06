"""Lives of all rows of a run, in a form that stays small and does not depend on the order of work.

Prompt groups whose rows had the same lives share one object, which is judged once.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

Mark = tuple[str, str]
"""A task and the version that it used ("": none), or `DROPPED` and the reason."""
Lives = list[list[Mark]]
"""The lives of a row. A life is the list of its marks."""
_FrozenLives = tuple[tuple[Mark, ...], ...]
_MAX_COLUMN_BYTES = 1 << 30
_OPEN_TICKETS = 4096
"""Prompt groups whose rows are kept as single objects."""


class History(NamedTuple):
    """History of the rows of a prompt group. A row is named by the end of its id."""

    rows: tuple[str, ...]
    """Rows that were last accepted."""
    lives: tuple[tuple[tuple[str, ...], _FrozenLives], ...]
    """Rows that had the same lives, and these."""


class RowLives:
    """Rows of each prompt group, and the lives of each row."""

    def __init__(self) -> None:
        self.rows: dict[int, list[str]] = defaultdict(list)
        """Ids of the rows that were last accepted, by ticket; of open prompt groups."""
        self.lives: dict[int, dict[str, Lives]] = defaultdict(dict)
        """Ticket -> id of a row -> its lives; of open prompt groups."""
        self.frozen: dict[int, History] = {}
        """Histories of all other prompt groups."""
        self._shared: dict[Any, Any] = {}

    def open(self, ticket: int) -> None:
        """Make the rows of ``ticket`` single objects, before one of them changes."""
        if ticket in self.lives:
            return
        if len(self.lives) >= _OPEN_TICKETS:
            self.freeze()
        history = self.frozen.pop(ticket, None)
        rows, self.rows[ticket] = self.lives[ticket], []
        if history:
            name = f"{ticket:09d}"
            self.rows[ticket] = [name + end for end in history.rows]
            for ends, lives in history.lives:
                rows.update((name + end, [list(life) for life in lives]) for end in ends)

    def freeze(self) -> None:
        """Give all prompt groups a shared history."""
        for ticket, lives_by_row in self.lives.items():
            name = f"{ticket:09d}"
            ends = tuple(row.removeprefix(name) for row in self.rows[ticket])
            grouped: dict[_FrozenLives, list[str]] = {}
            for row, lives in lives_by_row.items():
                frozen = tuple(map(tuple, lives))
                grouped.setdefault(frozen, []).append(row.removeprefix(name))
            pairs = [(self._share(tuple(rows)), lives) for lives, rows in grouped.items()]
            self.frozen[ticket] = self._share(History(self._share(ends), tuple(pairs)))
        self.lives.clear()
        self.rows.clear()

    def _share(self, value: Any) -> Any:
        """One object for all equal values."""
        return self._shared.setdefault(value, value)

    def tickets(self) -> Iterator[int]:
        """All tickets whose rows are known, frozen ones first."""
        yield from self.frozen
        yield from self.lives

    def dump(self) -> Any:
        """All histories, for a summary."""
        self.freeze()
        marks, ends, histories = _Numbers(), _Numbers(), _Numbers()
        for history in self.frozen.values():
            histories.number(history)
        packed = []
        for history in histories.values:
            lives = [
                [ends.number(rows), [[marks.number(mark) for mark in life] for life in lives]]
                for rows, lives in history.lives
            ]
            packed.append([ends.number(history.rows), lives])
        tickets = np.fromiter(self.frozen, np.int64, len(self.frozen))
        numbers = [histories.number(history) for history in self.frozen.values()]
        return {
            "marks": marks.values,
            "ends": ends.values,
            "histories": packed,
            "tickets": pack_integers(tickets),
            "numbers": pack_integers(numbers),
        }

    def load(self, values: Any) -> None:
        """Take the histories of a dump. LookupError, TypeError, ValueError, zlib.error: it is
        none."""
        marks = [(use, detail) for use, detail in values["marks"]]
        ends = [tuple(rows) for rows in values["ends"]]
        histories = list[History]()
        for rows, groups in values["histories"]:
            lives = [
                (ends[number], tuple(tuple(map(marks.__getitem__, life)) for life in packed))
                for number, packed in groups
            ]
            histories.append(self._share(History(ends[rows], tuple(lives))))
        numbers = unpack_integers(values["numbers"])
        for ticket, number in zip(unpack_integers(values["tickets"]), numbers, strict=True):
            self.frozen[ticket] = histories[number]


class _Numbers:
    """Numbers of distinct values, in the order in which they were met."""

    def __init__(self) -> None:
        self._by_value: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._by_value.setdefault(value, len(self._by_value))

    @property
    def values(self) -> list[Any]:
        return list(self._by_value)


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Compressed differences of consecutive numbers."""
    column = np.asarray(numbers, np.int64).reshape(-1)
    return zlib.compress(np.diff(column, prepend=0).tobytes(), 1)


def unpack_integers(data: bytes) -> list[int]:
    """Inverse of `pack_integers`."""
    unpacked = zlib.decompressobj().decompress(data, _MAX_COLUMN_BYTES)
    differences = np.frombuffer(unpacked, np.int64)
    return np.cumsum(differences).tolist()
