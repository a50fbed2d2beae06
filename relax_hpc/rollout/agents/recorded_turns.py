"""Logged turns of an episode. A program that sends the same request again gets the same turn
again."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.data.generation import Draft
from relax_hpc.rollout.episodes.history import OpenRow


class RecordedTurns:
    """Rows of an episode, as far as an earlier process has logged them."""

    def __init__(self, rows: Sequence[OpenRow]) -> None:
        self._rows = list(rows)

    def turn(self, number: int, tokens: Sequence[int]) -> tuple[Draft, bool] | None:
        """Row ``number`` up to the end of the turn after its first ``tokens``, and whether that
        turn is complete; None: the log has no such turn."""
        row = self._rows[number] if number < len(self._rows) else None
        if not row or [*row.prompt, *row.draft.token_ids][: len(tokens)] != list(tokens):
            return None
        start, versions = len(tokens) - len(row.prompt), row.draft.token_versions
        if not 0 <= start < row.length:
            return None
        # A turn begins with a sampled token after one that was not sampled.
        if not versions[start] or (start and versions[start - 1]):
            return None
        end = next((end for end in row.turns if end > start), row.length)
        return row.prefix(end), end in row.turns

    def has_more(self, number: int, start: int) -> bool:
        """Whether row ``number`` has tokens after the first ``start`` tokens behind the prompt."""
        return number < len(self._rows) and self._rows[number].length > start
