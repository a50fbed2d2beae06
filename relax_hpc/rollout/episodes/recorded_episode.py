"""An episode of a log, gone through once more: turns are taken from it, and what its environment
says is compared."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.data.media import spans_of
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.rollout.engines.engine import Draft
from relax_hpc.rollout.episodes.history import OpenRow


class Differs(EnvironmentFault):
    """Fault of an environment that says something else when an episode is played again."""

    def __init__(
        self, row: int, what: str, then: Sequence[int] = (), now: Sequence[int] = ()
    ) -> None:
        """``then``, ``now``: tokens of row number ``row`` that it said, where it is about those."""
        super().__init__(
            "environment_differs", f"row {row} of the episode has {what} when it is played again"
        )
        self.then, self.now = list(then), list(now)


class Tape:
    """Rows of an episode as far as it was logged."""

    def __init__(self, rows: Sequence[OpenRow]) -> None:
        self._rows = list(rows)

    def turn(self, number: int, start: int) -> Draft | None:
        """Row ``number`` up to the end of its turn that begins ``start`` tokens behind the prompt;
        None: that turn is not over here."""
        if number >= len(self._rows):
            return None
        row = self._rows[number]
        return next((row.prefix(end) for end in row.turns if end > start), None)

    def rest(self, number: int, start: int) -> Draft | None:
        """All of row ``number``, with what it has of the turn that begins ``start`` tokens behind
        the prompt; None: it ends before that."""
        if number >= len(self._rows):
            return None
        row = self._rows[number]
        return row.prefix(row.length) if row.length >= start else None

    def compare(self, number: int, row: OpenRow, heard: Sequence[int]) -> None:
        """EnvironmentFault: row ``number``, which was like ``row``, did not go on by what was
        ``heard``."""
        if number >= len(self._rows):
            return
        then, end = self._rows[number], row.length + len(heard)
        if then.prompt != row.prompt:
            raise Differs(number, "another beginning", then.prompt, row.prompt)
        if then.length > row.length and then.draft.token_ids[row.length : end] != list(heard):
            what = f"another observation {row.length} tokens behind the prompt"
            raise Differs(number, what, _said(then, row.length), heard)

    def check_over(self, rows: Sequence[OpenRow]) -> None:
        """EnvironmentFault: it has more than the ``rows`` that were made of it, or other media. It
        is over then."""
        then, self._rows = self._rows, []
        if len(then) > len(rows):
            raise Differs(len(rows), "no such row")
        for number, (one, now) in enumerate(zip(then, rows, strict=False)):
            if one.length > now.length:
                raise Differs(number, f"an end {now.length} tokens behind the prompt")
            spans, end = spans_of(one.media), len(one.prompt) + one.length
            if [span for span in spans_of(now.media) if span["start"] < end] != [
                span for span in spans if span["start"] < end
            ]:
                raise Differs(number, "other media")


def _said(row: OpenRow, start: int) -> Sequence[int]:
    """Tokens of ``row`` from ``start`` behind the prompt on that nobody sampled."""
    versions = row.draft.token_versions[start:]
    length = next((place for place, version in enumerate(versions) if version), len(versions))
    return row.draft.token_ids[start : start + length]
