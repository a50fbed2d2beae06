"""A logged episode that is played again: its turns are taken from the log, and the environment's
observations are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.data.generation import Draft
from relax_hpc.data.media import spans_of
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.rollout.episodes.history import OpenRow


class ReplayMismatch(EnvironmentFault):
    """Fault of an environment that answers differently when an episode is played again."""

    def __init__(
        self, row: int, difference: str, then: Sequence[int] = (), now: Sequence[int] = ()
    ) -> None:
        """``then``, ``now``: different tokens in row number ``row``, if the difference is in
        tokens."""
        super().__init__(
            "environment_differs",
            f"row {row} of the episode has {difference} when it is played again",
        )
        self.then, self.now = list(then), list(now)


class RecordedEpisode:
    """Rows of an episode, as far as it was logged."""

    def __init__(self, rows: Sequence[OpenRow]) -> None:
        self._rows = list(rows)

    def completed_turn(self, number: int, start: int) -> Draft | None:
        """Row ``number`` up to the end of the turn that begins ``start`` tokens after the prompt;
        None: the log does not have the whole turn."""
        if number >= len(self._rows):
            return None
        row = self._rows[number]
        return next((row.prefix(end) for end in row.turns if end > start), None)

    def unfinished_turn(self, number: int, start: int) -> Draft | None:
        """All of row ``number``, including the logged part of the turn that begins ``start`` tokens
        after the prompt; None: the log ends before that."""
        if number >= len(self._rows):
            return None
        row = self._rows[number]
        return row.prefix(row.length) if row.length >= start else None

    def compare(self, number: int, row: OpenRow, observation: Sequence[int]) -> None:
        """ReplayMismatch: row ``number`` of the log does not continue ``row`` with the tokens of
        this ``observation``."""
        if number >= len(self._rows):
            return
        then, end = self._rows[number], row.length + len(observation)
        if then.prompt != row.prompt:
            raise ReplayMismatch(number, "another beginning", then.prompt, row.prompt)
        if then.length > row.length and then.draft.token_ids[row.length : end] != list(observation):
            difference = f"another observation {row.length} tokens behind the prompt"
            recorded = _observation_at(then, row.length)
            raise ReplayMismatch(number, difference, recorded, observation)

    def check_end(self, rows: Sequence[OpenRow]) -> None:
        """End the replay. ReplayMismatch: the log has more than the ``rows`` that were played, or
        other media."""
        recorded, self._rows = self._rows, []
        if len(recorded) > len(rows):
            raise ReplayMismatch(len(rows), "no such row")
        for number, (then, now) in enumerate(zip(recorded, rows, strict=False)):
            if then.length > now.length:
                raise ReplayMismatch(number, f"an end {now.length} tokens behind the prompt")
            end = len(then.prompt) + then.length
            then_spans = [span for span in spans_of(then.media) if span["start"] < end]
            now_spans = [span for span in spans_of(now.media) if span["start"] < end]
            if now_spans != then_spans:
                raise ReplayMismatch(number, "other media")


def _observation_at(row: OpenRow, start: int) -> Sequence[int]:
    """Tokens of ``row`` that were not sampled, from ``start`` after the prompt up to the next
    sampled token."""
    versions = row.draft.token_versions[start:]
    length = next((index for index, version in enumerate(versions) if version), len(versions))
    return row.draft.token_ids[start : start + length]
