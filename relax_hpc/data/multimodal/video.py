"""Videos of files: evenly sampled frames, resized for the model, with the time of each temporal
patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from relax_hpc.data.multimodal.frame_reader import Video, read_video
from relax_hpc.data.multimodal.image import resize
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Size
from relax_hpc.data.multimodal.source import Source, open_source, path_of


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a video. All its packets are read, and its first frame is decoded.

    UnusableMedium: it is not a video, is damaged, exceeds a limit, or has a format that is not
    read."""
    with _open_video(source, limits) as video:
        return rules.video_header(video.count, video.fps, video.first.shape[:2])


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A video in its stored form. UnusableMedium: see `header`; or a frame cannot be decoded."""
    with _open_video(source, limits) as video:
        header = rules.video_header(video.count, video.fps, video.first.shape[:2])
        size = header.grid[1] * rules.patch, header.grid[2] * rules.patch
        frames = _resized_frames(video, rules.frames(video.count, video.fps), size)
        return Medium(Kind.VIDEO, frames, header.grid, header.seconds)


@contextmanager
def _open_video(source: Source, limits: Limits | None) -> Iterator[Video]:
    limits = limits or Limits()
    with open_source(source, Kind.VIDEO, limits) as file, path_of(file) as path:
        yield read_video(path, limits)


def _resized_frames(video: Video, numbers: np.ndarray, size: Size) -> np.ndarray:
    """Frames of these ``numbers`` in ``size``, uint8 [frames, height, width, 3]."""
    from PIL import Image

    unique, indices = np.unique(numbers, return_inverse=True)
    frames = np.empty((len(unique), *size, 3), np.uint8)
    for frame, pixels in zip(frames, video.frames(unique.tolist()), strict=True):
        if pixels.shape[:2] == size:
            frame[:] = pixels
        else:
            frame[:] = np.asarray(resize(Image.fromarray(np.ascontiguousarray(pixels)), size))
    return frames if len(unique) == len(numbers) else frames[indices]
