"""Runs of placeholder tokens that represent a medium in a prompt, and the texts between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.positions import inner_positions
from relax_hpc.data.multimodal.rules import Rules

Run = tuple[Kind, int]
"""Kind of a placeholder, and its number of successive copies."""


def time_stamp(seconds: float) -> str:
    """Text before the temporal patch of a video at ``seconds``, in families with time stamps."""
    return f"<{seconds:.1f} seconds>"


def stamped_runs(video: Header | Medium, rules: Rules) -> list[tuple[str, Run]]:
    """Time stamp and run of placeholders of each temporal patch. The caller puts each run between
    the tokens that begin and end vision."""
    run = Kind.VIDEO, rules.tokens(video) // video.grid[0]
    return [(time_stamp(seconds), run) for seconds in video.seconds]


def runs_with_sound(video: Header | Medium, sound: Header | Medium, rules: Rules) -> list[Run]:
    """Placeholders of a video and its sound (`use_audio_in_video`) in the order of their times. At
    equal times the video's come first."""
    kinds = itertools.groupby(_kinds_by_time(video, sound, rules))
    return [(kind, len(list(run))) for kind, run in kinds]


def _kinds_by_time(video: Header | Medium, sound: Header | Medium, rules: Rules) -> Iterator[Kind]:
    tokens_per_patch = rules.tokens(video) // video.grid[0]
    video_times = np.array(video.seconds) * rules.positions_a_second
    video_positions = np.repeat(video_times, tokens_per_patch)
    sound_positions = inner_positions(sound, rules)[0]
    # The stable sort keeps the video's tokens before the sound's at equal times.
    order = np.argsort(np.concatenate([video_positions, sound_positions]), kind="stable")
    return (Kind.VIDEO if index < len(video_positions) else Kind.AUDIO for index in order)
