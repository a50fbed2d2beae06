"""Options of one medium, given in a part of a chat message: size, number of frames, time range.

They have the meaning that qwen-vl-utils 0.0.14 gives them (`fetch_image`, `fetch_video`). A medium
with any option is processed by the rules of qwen-vl-utils in all respects, also where the model's
processor has other defaults.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Budget, Size, limit_aspect, resize_to_budget

_IMAGE_TOKENS = 4, 16384
_FRAME_TOKENS = 128, 768
_CLIP_TOKENS = 115_200
"""Tokens of all frames of a video: nine tenths of `MODEL_SEQ_LEN`, 128,000."""
_FPS, _MIN_FRAMES, _MAX_FRAMES, _FRAME_FACTOR = 2.0, 4, 768, 2
_MIN_MARGIN = 1.05
"""Minimum ratio of the largest size of a frame to the smallest."""


@dataclass(frozen=True, slots=True)
class MediumOptions:
    """Options of a medium; None: the default."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    """Pixels of an image, or of each frame of a video."""
    resized_height: int | None = None
    resized_width: int | None = None
    """Size in pixels, rounded to whole tokens. Both or neither."""
    total_pixels: int | None = None
    """Pixels of all frames of a video."""
    fps: float | None = None
    """Frames that are sampled in a second of video."""
    nframes: int | None = None
    """Frames that are sampled in a video. Not together with `fps`."""
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    """Range in seconds from which frames are sampled."""

    @classmethod
    def from_mapping(cls, kind: Kind, values: Mapping[str, Any]) -> MediumOptions:
        """Options of a medium of ``kind``. UnusableMedium: an option is unknown or has an invalid
        value."""
        for name, value in values.items():
            if name not in _NAMES[kind]:
                allowed = ", ".join(_NAMES[kind]) or "none"
                raise UnusableMedium(Reason.OPTION, f"{kind}: found {name!r}, allowed: {allowed}")
            number = float if name in _FLOATS else int
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value != number(value):
                raise _bad_value(name, value, f"a number ({number.__name__})")
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "video_start"):
                raise _bad_value(name, value, "a positive number")
        options = cls(**values)
        options._check()
        return options

    @property
    def key(self) -> tuple[Any, ...]:
        """Values of all options."""
        return dataclasses.astuple(self)

    def _check(self) -> None:
        """UnusableMedium: options contradict each other."""
        if (self.resized_height is None) != (self.resized_width is None):
            raise UnusableMedium(
                Reason.OPTION, "resized_height and resized_width: found one, allowed: both"
            )
        if self.fps is not None and self.nframes is not None:
            raise UnusableMedium(Reason.OPTION, "fps and nframes: found both, allowed: one of them")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise _bad_value(
                "min_pixels", self.min_pixels, f"at most max_pixels, {self.max_pixels}"
            )


NO_OPTIONS = MediumOptions()
_FLOATS = ("fps", "video_start", "video_end")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_FRAMES = ("total_pixels", "fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
_NAMES = {Kind.IMAGE: _SIZES, Kind.VIDEO: (*_SIZES, *_FRAMES), Kind.AUDIO: ()}


@dataclass(frozen=True, slots=True)
class RulesWithOptions(Rules):
    """Rules of a model's family, with the options of one medium."""

    options: MediumOptions = NO_OPTIONS

    def image_size(self, size: Size) -> Size:
        """See `Rules`."""
        low, high = self._image_pixels()
        options = self.options
        return self._resized(size, options.min_pixels or low, options.max_pixels or high)

    def frame_size(self, size: Size, frames: int) -> Size:
        """See `Rules`."""
        options, token = self.options, self.factor**2
        low = options.min_pixels or _FRAME_TOKENS[0] * token
        share = (options.total_pixels or _CLIP_TOKENS * token) / frames * _FRAME_FACTOR
        high = max(min(_FRAME_TOKENS[1] * token, share), int(low * _MIN_MARGIN))
        return self._resized(size, low, min(options.max_pixels or high, high))

    def _resized(self, size: Size, low: float, high: float) -> Size:
        """Size between ``low`` and ``high`` pixels, or the one that the options name."""
        options = self.options
        if options.resized_height and options.resized_width:
            size = options.resized_height, options.resized_width
            low, high = self._image_pixels()
        budget = Budget(int(min(low, high)), int(high))
        return resize_to_budget(limit_aspect(size), self.factor, budget, min_side=self.factor)

    def _image_pixels(self) -> tuple[int, int]:
        """Least and most pixels of an image without options for them."""
        token = self.factor**2
        return _IMAGE_TOKENS[0] * token, _IMAGE_TOKENS[1] * token

    def frames(self, total: int, native_fps: float) -> np.ndarray:
        """See `Rules`. UnusableMedium: the range of the options has less than two frames."""
        first, last = self._frame_range(total, native_fps)
        count = self._frame_count(last - first + 1, native_fps)
        return np.linspace(first, last, count).round().astype(np.int64)

    def _frame_range(self, total: int, native_fps: float) -> tuple[int, int]:
        """Numbers of the first and the last frame that may be sampled."""
        seconds, first, last = total / native_fps, 0, total - 1
        if self.options.video_start is not None:
            first = math.ceil(min(self.options.video_start, seconds) * native_fps)
        if self.options.video_end is not None:
            last = min(math.floor(min(self.options.video_end, seconds) * native_fps), total - 1)
        if first >= last and (first, last) != (0, total - 1):
            raise UnusableMedium(
                Reason.OPTION,
                f"video_start and video_end: found frames {first} to {last}, allowed: two frames "
                f"or more of {total} in {seconds:.2f} s",
            )
        return first, last

    def _frame_count(self, total: int, native_fps: float) -> int:
        """Number of frames to sample of ``total``, a multiple of two."""
        options = self.options
        if options.nframes is not None:
            count = round(options.nframes / _FRAME_FACTOR) * _FRAME_FACTOR
        else:
            low = _round_up(options.min_frames or _MIN_FRAMES)
            high = _round_down(options.max_frames or min(_MAX_FRAMES, total))
            wanted = total / native_fps * (options.fps or _FPS)
            count = _round_down(min(max(wanted, low), high, total))
        if not _FRAME_FACTOR <= count <= total:
            raise UnusableMedium(
                Reason.OPTION,
                f"found {count} frames to take of {total}, allowed: {_FRAME_FACTOR} to {total}",
            )
        return count

    def times(self, sampled: np.ndarray, total: int, native_fps: float) -> tuple[float, ...]:
        """See `Rules`."""
        first, last = self._frame_range(total, native_fps)
        # Time stamps count from the beginning of the video. Times that are positions count from
        # the beginning of the range, and depend on its length.
        return Rules.times(self, sampled, last - first + 1, native_fps)


def with_options(rules: Rules, options: MediumOptions) -> Rules:
    """``rules`` for a medium with these ``options``."""
    if options == NO_OPTIONS:
        return rules
    values = {field.name: getattr(rules, field.name) for field in dataclasses.fields(Rules)}
    return RulesWithOptions(**values, options=options)


def _bad_value(name: str, value: Any, allowed: str) -> UnusableMedium:
    return UnusableMedium(Reason.OPTION, f"{name}: found {str(value)[:40]!r}, allowed: {allowed}")


def _round_up(number: float) -> int:
    return math.ceil(number / _FRAME_FACTOR) * _FRAME_FACTOR


def _round_down(number: float) -> int:
    return math.floor(number / _FRAME_FACTOR) * _FRAME_FACTOR
