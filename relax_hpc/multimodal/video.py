"""Videos of files: frames drawn evenly, of the size that the model takes, with the time of each patch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.image import resize
from relax_hpc.multimodal.limits import Limits
from relax_hpc.multimodal.medium import Header, Kind, Medium
from relax_hpc.multimodal.rules import Rules
from relax_hpc.multimodal.sizes import Size
from relax_hpc.multimodal.source import Source, opened, path_of

if TYPE_CHECKING:
    from decord import VideoReader

_MOST_BYTES = 1 << 28
"""Bytes of frames in memory before they are resized: in one call decord decodes them faster than in several."""


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a video; its first frame is decoded. BadMedium: it is none, or over a limit."""
    with _opened(source, rules, limits or Limits()) as (_, _, about):
        return about


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A video as it is stored. BadMedium: it is none, damaged, or over a limit."""
    with _opened(source, rules, limits or Limits()) as (reader, decoded_size, about):
        size = about.grid[1] * rules.patch, about.grid[2] * rules.patch
        frames = _frames(reader, rules.frames(len(reader), reader.get_avg_fps()), decoded_size, size)
        return Medium(Kind.VIDEO, frames, about.grid, about.seconds)


def _frames(reader: VideoReader, taken: np.ndarray, decoded_size: Size, size: Size) -> np.ndarray:
    """The frames of those numbers in ``size``, uint8 [frames, height, width, 3]."""
    from PIL import Image

    found = np.empty((len(taken), *size, 3), np.uint8)
    at_a_time = max(1, _MOST_BYTES // math.prod((*decoded_size, 3)))
    for first in range(0, len(taken), at_a_time):
        decoded = reader.get_batch(taken[first : first + at_a_time].tolist()).asnumpy()
        into = found[first : first + at_a_time]
        if decoded.shape == into.shape:
            into[:] = decoded
            continue
        for number, frame in enumerate(decoded):
            into[number] = resize(Image.fromarray(frame), size)
    return found


@contextmanager
def _opened(source: Source, rules: Rules, limits: Limits) -> Iterator[tuple[VideoReader, Size, Header]]:
    import decord

    with opened(source, Kind.VIDEO, limits) as file, path_of(file) as path:
        try:
            reader = decord.VideoReader(path, num_threads=1)
            _check_length(reader, limits)
            # Decoded once: decord would begin anew each time.
            size = reader[0].shape[:2]
            _check_size(size, limits)
            yield reader, size, rules.video_header(len(reader), reader.get_avg_fps(), size)
        except (RuntimeError, decord.DECORDError, IndexError) as error:
            reason = Reason.NO_STREAM if "cannot find video stream" in str(error) else Reason.CORRUPTED
            raise BadMedium(reason, str(error).strip().splitlines()[0][-200:]) from error


def _check_length(reader: VideoReader, limits: Limits) -> None:
    frames, fps = len(reader), reader.get_avg_fps()
    if frames < 1 or not math.isfinite(fps) or fps <= 0:
        raise BadMedium(Reason.CORRUPTED, f"{frames} frames, {fps} a second")
    if frames > limits.frames:
        raise BadMedium(Reason.FRAMES, f"{frames} frames, allowed {limits.frames}")
    if frames / fps > limits.seconds:
        raise BadMedium(Reason.SECONDS, f"{frames / fps:.0f} s, allowed {limits.seconds:g}")


def _check_size(size: Size, limits: Limits) -> None:
    if size[0] * size[1] > limits.pixels:
        raise BadMedium(Reason.PIXELS, f"{size[1]} x {size[0]}, allowed {limits.pixels} together")
