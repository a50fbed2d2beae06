"""Videos of files: frames drawn evenly, of the size that the model takes, with the time of each patch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    from decord.ndarray import NDArray

_MOST_BYTES = 1 << 28
"""Bytes of frames in memory before they are resized: in one call decord decodes them faster than in several."""

_NO_STREAM = "no video that decord decodes (H.264, HEVC, VP9, MPEG-4, MJPEG; AV1 it does not)"


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a video; its first frame is decoded. BadMedium: it is none, or over a limit."""
    with _opened(source, rules, limits or Limits()) as (_, _, about):
        return about


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A video as it is stored. BadMedium: it is none, damaged, or over a limit."""
    with _opened(source, rules, limits or Limits()) as (reader, first, about):
        size = about.grid[1] * rules.patch, about.grid[2] * rules.patch
        frames = _frames(reader, first, rules.frames(len(reader), reader.get_avg_fps()), size)
        return Medium(Kind.VIDEO, frames, about.grid, about.seconds)


def _frames(reader: VideoReader, first: np.ndarray, taken: np.ndarray, size: Size) -> np.ndarray:
    """The frames of those numbers in ``size``, uint8 [frames, height, width, 3]; the ``first`` of all is among them."""
    found = np.empty((len(taken), *size, 3), np.uint8)
    _fill(found[:1], first[None])
    if len(taken) > 1 and len(reader.get_key_indices()) < len(reader):
        for number, decoded in enumerate(_in_turn(reader, taken[1:].tolist()), start=1):
            _fill(found[number : number + 1], decoded[None])
        return found
    at_a_time = max(1, _MOST_BYTES // first.nbytes)
    for begin in range(1, len(taken), at_a_time):
        numbers = taken[begin : begin + at_a_time].tolist()
        _fill(found[begin : begin + at_a_time], np.from_dlpack(_Shared(reader.get_batch(numbers))))
    return found


def _in_turn(reader: VideoReader, numbers: list[int]) -> Iterator[np.ndarray]:
    """Frames of these ``numbers``, ascending, of a ``reader`` that has decoded frame 0.

    Every frame before them is decoded. decord takes the place of a key frame in the file for its place in time: where
    frames that are shown before a key frame come behind it (open groups of pictures, which x265 makes unless it is told
    not to), it finds others than it looks for, and says nothing.
    """
    wanted = set(numbers)
    for number in range(1, numbers[-1] + 1):
        frame = _next(reader, number)
        if number in wanted:
            yield frame


def _next(reader: VideoReader, number: int) -> np.ndarray:
    """The next frame of ``reader``, its ``number``. BadMedium: there is none."""
    try:
        return np.from_dlpack(_Shared(reader.next()))
    except StopIteration:
        raise BadMedium(Reason.TRUNCATED, f"{number} frames, its index says {len(reader)}") from None


class _Shared:
    """Frames of decord for numpy, over the memory that they are in: many megabytes, which `asnumpy` would copy."""

    def __init__(self, frames: NDArray) -> None:
        self._frames = frames

    def __dlpack__(self, **_: Any) -> Any:
        return self._frames.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # memory of the CPU


def _fill(into: np.ndarray, decoded: np.ndarray) -> None:
    """Have ``decoded`` frames in the size of ``into``."""
    from PIL import Image

    if decoded.shape == into.shape:
        into[:] = decoded
        return
    for number, frame in enumerate(decoded):
        into[number] = resize(Image.fromarray(frame), into.shape[1:3])


@contextmanager
def _opened(source: Source, rules: Rules, limits: Limits) -> Iterator[tuple[VideoReader, np.ndarray, Header]]:
    """Reader of a video, its first frame, and what it is."""
    import decord

    with opened(source, Kind.VIDEO, limits) as file, path_of(file) as path:
        try:
            reader = decord.VideoReader(path, num_threads=1)
            _check_length(reader, limits)
            # Decoded once: decord would begin anew each time.
            first = _next(reader, 0)
            _check_size(first.shape[:2], limits)
            yield reader, first, rules.video_header(len(reader), reader.get_avg_fps(), first.shape[:2])
        except (RuntimeError, decord.DECORDError, IndexError) as error:
            if "cannot find video stream" in str(error):
                raise BadMedium(Reason.NO_STREAM, _NO_STREAM) from error
            raise BadMedium(Reason.CORRUPTED, str(error).strip().splitlines()[0][-200:]) from error


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
