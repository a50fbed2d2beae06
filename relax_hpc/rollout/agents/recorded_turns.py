"""Turns that the log of an episode has: a program that asks for the same again gets them again."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.rollout.engines.engine import Draft
from relax_hpc.rollout.episodes.history import OpenRow


class Recorded:
    """Rows of an episode as they were when whoever played it ended."""

    def __init__(self, rows: Sequence[OpenRow]) -> None:
        self._rows = list(rows)

    def turn(self, number: int, tokens: Sequence[int]) -> tuple[Draft, bool] | None:
        """Row ``number`` up to the end of the turn that follows its first ``tokens``, and whether
        that turn is over; None: it has none there."""
        row = self._rows[number] if number < len(self._rows) else None
        if not row or [*row.prompt, *row.draft.token_ids][: len(tokens)] != list(tokens):
            return None
        start, versions = len(tokens) - len(row.prompt), row.draft.token_versions
        if not 0 <= start < row.length or not versions[start] or (start and versions[start - 1]):
            return None
        end = next((end for end in row.turns if end > start), row.length)
        return row.prefix(end), end in row.turns

    def has_more(self, number: int, start: int) -> bool:
        """Whether row ``number`` has anything behind its first ``start`` tokens after the
        prompt."""
        return number < len(self._rows) and self._rows[number].length > start
