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

_AT_A_TIME = 16
"""Frames in memory before they are resized."""


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a video; its first frame is decoded. BadMedium: it is none, or over a limit."""
    with _reader(source, limits or Limits()) as reader:
        return _header(reader, rules)


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A video as it is stored. BadMedium: it is none, damaged, or over a limit."""
    with _reader(source, limits or Limits()) as reader:
        about = _header(reader, rules)
        size = about.grid[1] * rules.patch, about.grid[2] * rules.patch
        frames = _frames(reader, rules.frames(len(reader), reader.get_avg_fps()), size)
        return Medium(Kind.VIDEO, frames, about.grid, about.seconds)


def _header(reader: VideoReader, rules: Rules) -> Header:
    return rules.video_header(len(reader), reader.get_avg_fps(), _size(reader))


def _size(reader: VideoReader) -> Size:
    return reader[0].shape[:2]


def _frames(reader: VideoReader, taken: np.ndarray, size: Size) -> np.ndarray:
    """The frames of those numbers in ``size``, uint8 [frames, height, width, 3]."""
    from PIL import Image

    found = np.empty((len(taken), *size, 3), np.uint8)
    for first in range(0, len(taken), _AT_A_TIME):
        decoded = reader.get_batch(taken[first : first + _AT_A_TIME].tolist()).asnumpy()
        into = found[first : first + _AT_A_TIME]
        if decoded.shape == into.shape:
            into[:] = decoded
            continue
        for number, frame in enumerate(decoded):
            into[number] = resize(Image.fromarray(frame), size)
    return found


@contextmanager
def _reader(source: Source, limits: Limits) -> Iterator[VideoReader]:
    import decord

    with opened(source, Kind.VIDEO, limits) as file, path_of(file) as path:
        try:
            reader = decord.VideoReader(path, num_threads=1)
            _check(reader, limits)
            yield reader
        except (RuntimeError, decord.DECORDError, IndexError) as error:
            reason = Reason.NO_STREAM if "cannot find video stream" in str(error) else Reason.CORRUPTED
            raise BadMedium(reason, str(error).strip().splitlines()[0][-200:]) from error


def _check(reader: VideoReader, limits: Limits) -> None:
    frames, fps = len(reader), reader.get_avg_fps()
    if frames < 1 or not math.isfinite(fps) or fps <= 0:
        raise BadMedium(Reason.CORRUPTED, f"{frames} frames, {fps} a second")
    if frames > limits.frames:
        raise BadMedium(Reason.FRAMES, f"{frames} frames, allowed {limits.frames}")
    if frames / fps > limits.seconds:
        raise BadMedium(Reason.SECONDS, f"{frames / fps:.0f} s, allowed {limits.seconds:g}")
    height, width = _size(reader)
    if height * width > limits.pixels:
        raise BadMedium(Reason.PIXELS, f"{width} x {height}, allowed {limits.pixels} together")
