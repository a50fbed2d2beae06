"""Text tables whose columns are as wide as their widest cell.

A cell may hold text of other users or programs. Its control characters, including newlines, are
escaped before the width is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_hpc.base.terminal_text import columns_of, escape_line

_ALWAYS = 9
"""Value of `keep` for columns that are never dropped."""
_ELLIPSIS = ".."
"""End of a text that was shortened."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    keep: int = _ALWAYS
    """Rank of the column. If the table is too wide, the lowest ranks are dropped first."""
    is_number: bool = False
    """Whether cells are aligned to the right."""
    max_chars: int = 0
    """Characters to which long cells are shortened if the table is too wide; 0: never."""


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Lines of the table, titles first.

    >>> aligned([Column("GROUP"), Column("AGE", is_number=True)], [["rollout", "5s"]])
    ['GROUP    AGE', 'rollout   5s']
    """
    rows = _escape_cells(rows)
    widths = _widths(columns, rows)
    lines = [[column.title for column in columns], *rows]
    return [gap.join(_cells(columns, widths, line)).rstrip() for line in lines]


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The table in ``width`` columns of a terminal.

    Empty columns are dropped, then those with the lowest `keep`. Then long cells and long lines are
    shortened.
    """
    rows = _escape_cells(rows)
    shown = [number for number, column in enumerate(columns) if _is_needed(column, number, rows)]
    while _needed_width(columns, rows, shown) > width:
        candidate = min(shown, key=lambda number: columns[number].keep)
        if columns[candidate].keep == _ALWAYS:
            break
        shown.remove(candidate)
    widths = _widths(columns, rows)
    if sum(widths[number] + 1 for number in shown) > width:
        rows = [_shorten_cells(columns, row) for row in rows]
    shown_rows = [[row[number] for number in shown] for row in rows]
    table = aligned([columns[number] for number in shown], shown_rows, gap=" ")
    return [shorten_line(line, width) for line in table]


def _escape_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(map(escape_line, row)) for row in rows]


def _shorten_cells(columns: Sequence[Column], row: Sequence[str]) -> list[str]:
    """``row`` with shortened cells; the last cell is shortened with its line."""
    cells = [
        shorten_line(cell, column.max_chars or columns_of(cell))
        for column, cell in zip(columns[:-1], row[:-1], strict=True)
    ]
    return [*cells, row[-1]]


def shorten_line(line: str, width: int) -> str:
    """``line`` in at most ``width`` columns of a terminal.

    >>> shorten_line("rollout: running", 10)
    'rollout:..'
    """
    if columns_of(line) <= width:
        return line
    end = len(line)
    while end and columns_of(line[:end]) > width - len(_ELLIPSIS):
        end -= 1
    return line[:end] + _ELLIPSIS


def _is_needed(column: Column, number: int, rows: Sequence[Sequence[str]]) -> bool:
    return column.keep == _ALWAYS or any(row[number] not in ("", "-") for row in rows)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    cells = zip(*rows, strict=True) if rows else [()] * len(columns)
    return [
        max([len(column.title), *map(columns_of, column_cells)])
        for column, column_cells in zip(columns, cells, strict=True)
    ]


def _needed_width(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int]
) -> int:
    """Width of a table that has only the columns ``shown``."""
    widths = _widths(columns, rows)
    needed = [min(widths[number], columns[number].max_chars or widths[number]) for number in shown]
    return sum(needed) + len(needed) - 1


def _cells(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> list[str]:
    """``cells`` of a line, padded to the widths of their columns."""
    padded = list[str]()
    for column, width, cell in zip(columns, widths, cells, strict=True):
        blanks = " " * (width - columns_of(cell))
        padded.append(blanks + cell if column.is_number else cell + blanks)
    return padded
