"""Tokens that stand for a medium in a prompt, in their order, and the texts between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.positions import inner_positions
from relax_hpc.data.multimodal.rules import Rules

Run = tuple[Kind, int]
"""Kind of a placeholder, and how often it stands in a row."""


def time_stamp(seconds: float) -> str:
    """Text before the temporal patch of a video at ``seconds``, in families that have such
    stamps."""
    return f"<{seconds:.1f} seconds>"


def stamped_runs(video: Header | Medium, rules: Rules) -> list[tuple[str, Run]]:
    """Time stamp and placeholders of each temporal patch; each run stands between the tokens that
    begin and end vision."""
    run = Kind.VIDEO, rules.tokens(video) // video.grid[0]
    return [(time_stamp(seconds), run) for seconds in video.seconds]


def runs_with_sound(video: Header | Medium, sound: Header | Medium, rules: Rules) -> list[Run]:
    """Placeholders of a video and of its own sound (`use_audio_in_video`), in the order of their
    times; at the same time the video's come first."""
    return [
        (kind, len(list(run))) for kind, run in itertools.groupby(_in_order(video, sound, rules))
    ]


def _in_order(video: Header | Medium, sound: Header | Medium, rules: Rules) -> Iterator[Kind]:
    each = rules.tokens(video) // video.grid[0]
    seen = np.repeat(np.array(video.seconds) * rules.positions_a_second, each)
    heard = inner_positions(sound, rules)[0]
    # Stable: of equal times the first part, the video's, stays first.
    order = np.argsort(np.concatenate([seen, heard]), kind="stable")
    return (Kind.VIDEO if place < len(seen) else Kind.AUDIO for place in order)
