"""Position ids in three dimensions (time, height, width) for rows with media: interleaved mRoPE
(Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules

Span = Mapping[str, Any]
"""Span of a row: `kind`, `start`, `length`, `media_id`."""
_VIDEO_WITH_SOUND = {Kind.VIDEO, Kind.AUDIO}
"""Kinds of a video and its sound, whose runs alternate without a token between them."""


def positions(
    length: int, spans: Sequence[Span], media: Mapping[str, Header | Medium], rules: Rules
) -> np.ndarray:
    """Position ids (time, height, width) of a row of ``length`` tokens, int64 [3, length].

    ``spans`` are sorted by position. The spans of a medium take its tokens one after the other, and
    start again after the last one. Times are rounded to whole positions, because engines only have
    whole positions. UnusableMedium: spans and media do not fit.
    """
    position_ids, cursor = np.empty((3, length), np.int64), _Cursor(media, rules)
    # Tokens before `end` have positions. The next text token gets the position `next_position`.
    end = next_position = 0
    for group in _group_spans(spans):
        start = group[0]["start"]
        position_ids[:, end:start] = next_position + np.arange(start - end)
        base = next_position + start - end
        for span in group:
            end = span["start"] + span["length"]
            position_ids[:, span["start"] : end] = base + cursor.take(span)
        # After a video with sound transformers also uses only the last run.
        next_position = position_ids[:, group[-1]["start"] : end].max() + 1
    position_ids[:, end:] = next_position + np.arange(length - end)
    return position_ids


class _Cursor:
    """The next token of each medium."""

    def __init__(self, media: Mapping[str, Header | Medium], rules: Rules) -> None:
        self._media, self._rules = media, rules
        self._positions: dict[str, np.ndarray] = {}
        self._used: dict[str, int] = {}

    def take(self, span: Span) -> np.ndarray:
        """Positions of the next tokens of the span's medium, int64 [3, length], counted from the
        beginning of the medium."""
        name = span["media_id"]
        if name not in self._positions:
            if name not in self._media:
                raise UnusableMedium(
                    Reason.SPANS,
                    f"{span['kind']} span at {span['start']} names {name}, which is not there",
                )
            self._positions[name] = inner_positions(self._media[name], self._rules)
        medium_positions, start = self._positions[name], self._used.get(name, 0)
        end = start + span["length"]
        if end > medium_positions.shape[1]:
            raise UnusableMedium(
                Reason.SPANS,
                f"{span['kind']} span at {span['start']} has {span['length']} tokens, "
                f"{medium_positions.shape[1] - start} of {medium_positions.shape[1]} of its medium "
                "are left",
            )
        self._used[name] = end % medium_positions.shape[1]
        return medium_positions[:, start:end]


def inner_positions(medium: Header | Medium, rules: Rules) -> np.ndarray:
    """Positions of the tokens of a medium, counted from its beginning, int64 [3, tokens]."""
    if medium.kind is Kind.AUDIO:
        return np.tile(np.arange(rules.tokens(medium)), (3, 1))
    time, height, width = medium.grid
    merged = time, height // rules.merge, width // rules.merge
    token_positions = np.indices(merged).reshape(3, -1)
    token_positions[0] = times(medium, rules)[token_positions[0]]
    return token_positions


def times(medium: Header | Medium, rules: Rules) -> np.ndarray:
    """Position of each temporal patch of an image or video, int64 [patches]; 0 for families that
    have time stamps instead."""
    if rules.stamped or not medium.seconds:
        return np.zeros(medium.grid[0], np.int64)
    return np.rint(np.array(medium.seconds) * rules.positions_a_second).astype(np.int64)


def _group_spans(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Groups of ``spans`` that count from the same position: the runs of a video and its sound are
    one group, any other span is a group."""
    group: list[Span] = []
    for span in spans:
        if group and not _are_video_with_sound(group[-1], span):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _are_video_with_sound(before: Span, after: Span) -> bool:
    are_adjacent = before["start"] + before["length"] == after["start"]
    return are_adjacent and {before["kind"], after["kind"]} == _VIDEO_WITH_SOUND
