"""Position ids of tokens and media in three dimensions: interleaved mRoPE (Qwen2-VL, arXiv
2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules

Span = Mapping[str, Any]
"""Span as rows have it: `kind`, `start`, `length`, `media_id`."""
_TOGETHER = {Kind.VIDEO, Kind.AUDIO}
"""Kinds of a video and its own sound, which alternate without a token between."""


def positions(
    length: int, spans: Sequence[Span], media: Mapping[str, Header | Medium], rules: Rules
) -> np.ndarray:
    """Position ids (time, height, width) of a row of ``length`` tokens, int64 [3, length].

    ``spans`` in their order; those of a medium take its tokens one after the other, and begin again
    when all are taken. Times are rounded to whole positions: engines have no others. BadMedium:
    spans and media do not fit.
    """
    found, cursor = np.empty((3, length), np.int64), _Cursor(media, rules)
    at = following = 0
    for group in _groups(spans):
        start = group[0]["start"]
        found[:, at:start] = following + np.arange(start - at)
        base = following + start - at
        for span in group:
            at = span["start"] + span["length"]
            found[:, span["start"] : at] = base + cursor.take(span)
        # After a video with sound transformers, too, looks at the last run alone.
        following = found[:, group[-1]["start"] : at].max() + 1
    found[:, at:] = following + np.arange(length - at)
    return found


class _Cursor:
    """Cursor over the tokens of each medium."""

    def __init__(self, media: Mapping[str, Header | Medium], rules: Rules) -> None:
        self._media, self._rules = media, rules
        self._places: dict[str, np.ndarray] = {}
        self._taken: dict[str, int] = {}

    def take(self, span: Span) -> np.ndarray:
        """Positions of the next tokens of the span's medium, int64 [3, length]; 0 is where the
        medium begins."""
        name = span["media_id"]
        if name not in self._places:
            if name not in self._media:
                raise BadMedium(
                    Reason.SPANS,
                    f"{span['kind']} span at {span['start']} names {name}, which is not there",
                )
            self._places[name] = inner_positions(self._media[name], self._rules)
        places, first = self._places[name], self._taken.get(name, 0)
        after = first + span["length"]
        if after > places.shape[1]:
            raise BadMedium(
                Reason.SPANS,
                f"{span['kind']} span at {span['start']} has {span['length']} tokens, "
                f"{places.shape[1] - first} of {places.shape[1]} of its medium are left",
            )
        self._taken[name] = after % places.shape[1]
        return places[:, first:after]


def inner_positions(medium: Header | Medium, rules: Rules) -> np.ndarray:
    """Positions of the tokens of a medium from its own beginning, int64 [3, tokens]."""
    if medium.kind is Kind.AUDIO:
        return np.tile(np.arange(rules.tokens(medium)), (3, 1))
    time, height, width = (
        medium.grid[0],
        medium.grid[1] // rules.merge,
        medium.grid[2] // rules.merge,
    )
    found = np.indices((time, height, width)).reshape(3, -1)
    found[0] = times(medium, rules)[found[0]]
    return found


def times(medium: Header | Medium, rules: Rules) -> np.ndarray:
    """Position of each temporal patch of an image or video, int64 [patches]; 0 where time stamps
    stand between."""
    if rules.stamped or not medium.seconds:
        return np.zeros(medium.grid[0], np.int64)
    return np.rint(np.array(medium.seconds) * rules.positions_a_second).astype(np.int64)


def _groups(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """``spans`` by where they begin to count: a video and its own sound together, all others
    alone."""
    group: list[Span] = []
    for span in spans:
        if group and not _go_together(group[-1], span):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _go_together(one: Span, other: Span) -> bool:
    return (
        one["start"] + one["length"] == other["start"] and {one["kind"], other["kind"]} == _TOGETHER
    )
